"""Fusion of operations in a lowered pass: all of it in order, with rotary embeddings and SwiGLU.

Fused kernels give the same bits as the separate operations. Anything that is written differently is left as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nextn.runtime.native import head_parallel
from nextn.runtime.native.graph_analysis import (
    FLOATS,
    UseDefs,
    are_dense_and_alike,
    eliminate_copies,
    is_pair,
    is_same_view,
    single_instruction,
    split_concatenations,
)
from nextn.runtime.native.linear_fusion import WeightType, fuse_gated_linear, merge_linear_layers
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.norm_fusion import IsConstant, fuse_add_norm, fuse_qk_norm_rope, fuse_rms_norms
from nextn.runtime.native.trace import storage_key

_ROPE_OPS = ["mul", "neg", "copy", "copy", "mul", "add"]


def fuse(
    groups: Sequence[Lowered],
    *,
    live: Sequence[Tensor],
    is_constant: IsConstant,
    weight_type: WeightType = lambda weight: weight.dtype,
) -> list[Lowered]:
    """Fuse groups wherever possible. `live`: tensors that are read after the pass, or that exist before it."""
    out = split_concatenations(groups)
    out = fuse_rms_norms(out, UseDefs(out, live), is_constant)
    out = fuse_rope(out, UseDefs(out, live))
    out = fuse_swiglu(out, UseDefs(out, live))
    out = merge_linear_layers(out, UseDefs(out, live), weight_type)
    out = eliminate_copies(out, live)
    out = fuse_gated_linear(out, UseDefs(out, live))
    out = fuse_qk_norm_rope(out, UseDefs(out, live))
    return head_parallel.split_by_heads(fuse_add_norm(out, UseDefs(out, live)))


@dataclass(frozen=True)
class _RopeMatch:
    """A matched rotary embedding. out, x, cosine, sine: [..., 2 * half], of one dtype."""

    out: Tensor
    x: Tensor
    cosine: Tensor
    sine: Tensor
    intermediates: tuple[Tensor, ...]
    end: int

    @property
    def lowered(self) -> Lowered:
        return Lowered.native(Instruction("rope", (self.out, self.x, self.cosine, self.sine)))


def fuse_rope(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse each rotary embedding in rotate-half form, x * cos + [-x2, x1] * sin, into one `rope`."""
    return use_defs.replace_matches(groups, lambda index: _match_rope(groups, index))


def _match_rope(groups: Sequence[Lowered], index: int) -> Iterator[_RopeMatch]:
    """The rotary embedding that starts with this group, if there is one."""
    end = index + len(_ROPE_OPS)
    steps = [step for at in range(index, end) if (step := single_instruction(groups, at)) is not None]
    if [step.op for step in steps] != _ROPE_OPS or any(len(steps[at].tensors) != 3 for at in (0, 4, 5)):
        return
    (
        (x_cos, *cos_factors),
        (negated, upper),
        (to_lower, copied),
        (to_upper, lower),
        (x_sin, *sin_factors),
        (
            out,
            *terms,
        ),
    ) = (step.tensors for step in steps)
    if steps[5].reals != (1.0,) or not is_same_view(copied, negated) or not is_pair(terms, x_cos, x_sin):
        return
    for x, cosine in (cos_factors, cos_factors[::-1]):
        for rotated, sine in (sin_factors, sin_factors[::-1]):
            fits = out.dtype in FLOATS and are_dense_and_alike(out, x, cosine, sine, rotated)
            if fits and _are_halves(x, lower, upper) and _are_halves(rotated, to_lower, to_upper):
                yield _RopeMatch(out, x, cosine, sine, (x_cos, negated, rotated, x_sin), end)
                return


def _are_halves(tensor: Tensor, lower: Tensor, upper: Tensor) -> bool:
    half = tensor.shape[-1] // 2
    is_even = tensor.shape[-1] == 2 * half
    return is_even and is_same_view(tensor[..., :half], lower) and is_same_view(tensor[..., half:], upper)


def fuse_swiglu(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse silu(a) and its later product with b into one `silu_mul`, at the position of the product."""
    matches = {
        index: match for index in range(len(groups)) if (match := _match_swiglu(groups, use_defs, index)) is not None
    }
    products = dict(matches.values())
    return [products.get(index, group) for index, group in enumerate(groups) if index not in matches]


def _match_swiglu(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[int, Lowered] | None:
    """For a silu: the index of its product, and the fused group."""
    silu = single_instruction(groups, index)
    if silu is None or silu.op != "silu":
        return None
    gate, a = silu.tensors
    others = use_defs.uses(gate) - {index}
    product_index = min(others) if len(others) == 1 else index
    product = single_instruction(groups, product_index) if product_index > index else None
    if product is None or product.op != "mul" or len(product.tensors) != 3:
        return None
    out, *factors = product.tensors
    unchanged = not any(index < use < product_index for use in use_defs.uses(a))
    for factor, b in (factors, factors[::-1]):
        is_gate = is_same_view(factor, gate) and storage_key(b) != storage_key(gate)
        if is_gate and unchanged and out.dtype in FLOATS and are_dense_and_alike(out, a, b):
            return product_index, Lowered.native(Instruction("silu_mul", (out, a, b)))
    return None
