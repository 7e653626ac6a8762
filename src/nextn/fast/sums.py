"""Residual sums in a lowered pass: a sum and the RMS norm of it become one native `add_rms_norm`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.tape import key
from nextn.fast.touched import FLOATS, Touched, is_dense, same, single


def fused(groups: Sequence[Lowered], touched: Touched) -> list[Lowered]:
    """The groups with each such pair in one, where the sum stood."""
    return touched.replaced(groups, lambda at: _sums(groups, at))


@dataclass(frozen=True)
class _Sum:
    lowered: Lowered
    end: int
    inner: tuple[Tensor, ...] = ()


def _sums(groups: Sequence[Lowered], at: int) -> Iterator[_Sum]:
    """The sum at this place with the norm behind it."""
    add, norm = single(groups, at), single(groups, at + 1)
    if add is None or norm is None or (add.op, norm.op) != ("add", "rms_norm"):
        return
    if len(add.tensors) != 3 or add.reals != (1.0,) or len(norm.tensors) != 3:
        return
    (total, a, b), (out, source, weight) = add.tensors, norm.tensors
    apart = key(out) not in {key(each) for each in add.tensors}
    if apart and same(source, total) and total.dtype in FLOATS and is_dense(out, total, a, b):
        both = Instruction("add_rms_norm", (out, total, a, b, weight), norm.ints, norm.reals)
        yield _Sum(Lowered.native(both, outs=both.tensors[:2]), at + 2)
