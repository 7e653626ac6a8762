"""Rotary embeddings by halves in a lowered pass: x * cos + [-x2, x1] * sin becomes one native `rotate`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.touched import FLOATS, Touched, is_dense, same, single

_NAMES = ["mul", "neg", "copy", "copy", "mul", "add"]


@dataclass(frozen=True)
class _Rotation:
    """out, x, cosine, sine: [..., 2 * half], of one dtype."""

    out: Tensor
    x: Tensor
    cosine: Tensor
    sine: Tensor
    inner: tuple[Tensor, ...]
    end: int

    @property
    def lowered(self) -> Lowered:
        return Lowered.native(Instruction("rotate", (self.out, self.x, self.cosine, self.sine)))


def fused(groups: Sequence[Lowered], touched: Touched) -> list[Lowered]:
    """The groups with each rotation in one."""
    return touched.replaced(groups, lambda at: _rotations(groups, at))


def _rotations(groups: Sequence[Lowered], at: int) -> Iterator[_Rotation]:
    """The rotation that starts with this group, if one does."""
    steps = [step for place in range(at, at + len(_NAMES)) if (step := single(groups, place)) is not None]
    if [step.op for step in steps] != _NAMES or any(len(steps[at].tensors) != 3 for at in (0, 4, 5)):
        return
    (plain, *factors), (minus, upper), (to_lower, moved), (to_upper, lower), (turned, *others), (out, *terms) = (
        step.tensors for step in steps
    )
    if steps[5].reals != (1.0,) or not same(moved, minus) or not _two(terms, plain, turned):
        return
    for x, cosine in (factors, factors[::-1]):
        for swapped, sine in (others, others[::-1]):
            views = (out, x, cosine, sine, swapped)
            fits = out.dtype in FLOATS and is_dense(*views)
            if fits and _halves(x, lower, upper) and _halves(swapped, to_lower, to_upper):
                yield _Rotation(out, x, cosine, sine, (plain, minus, swapped, turned), at + len(_NAMES))
                return


def _two(terms: Sequence[Tensor], one: Tensor, other: Tensor) -> bool:
    return any(same(one, a) and same(other, b) for a, b in (terms, terms[::-1]))


def _halves(whole: Tensor, lower: Tensor, upper: Tensor) -> bool:
    half = whole.shape[-1] // 2
    return whole.shape[-1] == 2 * half and same(whole[..., :half], lower) and same(whole[..., half:], upper)
