"""Operations of a lowered pass that one native op does together: RMS norms, of sums or before rotary embeddings, too,
gates with the linear layers before them, linear layers of one input; copies left out.

The bits stay, as the kernels promise. What is spelled otherwise stays as it is.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from nextn.fast import copies, gated, gates, heads, norms, owners, products, rotary, sums
from nextn.fast.lower import Lowered
from nextn.fast.touched import Touched


def fused(groups: Sequence[Lowered], *, kept: Sequence[Tensor], is_constant: Callable[[Tensor], bool]) -> list[Lowered]:
    """The groups, fewer of them. kept: what is read after the pass, or stands before it."""
    out = copies.apart(groups)
    out = norms.fused(out, Touched(out, kept), is_constant)
    out = rotary.fused(out, Touched(out, kept))
    out = gates.fused(out, Touched(out, kept))
    out = products.fused(out, Touched(out, kept))
    out = copies.left_out(out, kept)
    out = gated.fused(out, Touched(out, kept))
    out = heads.fused(out, Touched(out, kept))
    return owners.apart(sums.fused(out, Touched(out, kept)))
