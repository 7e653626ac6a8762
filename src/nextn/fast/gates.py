"""The gate of an MLP in a lowered pass: silu(a), and later its product with b, become one native `silu_mul`."""

from collections.abc import Sequence

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.tape import key
from nextn.fast.touched import FLOATS, Touched, is_dense, same, single


def fused(groups: Sequence[Lowered], touched: Touched) -> list[Lowered]:
    """The groups with each gate in one, where the product stood."""
    found = {at: gate for at in range(len(groups)) if (gate := _gate(groups, touched, at)) is not None}
    products = dict(found.values())
    return [products.get(at, group) for at, group in enumerate(groups) if at not in found]


def _gate(groups: Sequence[Lowered], touched: Touched, at: int) -> tuple[int, Lowered] | None:
    """Where the product stands, and what does both; None where the group is no gate."""
    silu = single(groups, at)
    if silu is None or silu.op != "silu":
        return None
    gate, a = silu.tensors
    others = touched.by(gate) - {at}
    product = single(groups, min(others)) if len(others) == 1 and min(others) > at else None
    if product is None or product.op != "mul" or len(product.tensors) != 3:
        return None
    place = min(others)
    out, *factors = product.tensors
    for one, b in (factors, factors[::-1]):
        unchanged = not any(at < each < place for each in touched.by(a))
        if same(one, gate) and key(b) != key(gate) and unchanged and out.dtype in FLOATS and is_dense(out, a, b):
            return place, Lowered.native(Instruction("silu_mul", (out, a, b)))
    return None
