"""RMS norms in a lowered pass: the operations that a model spells one out in become one native `rms_norm`."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.tape import key
from nextn.fast.touched import FLOATS, Touched, same, single

# `rms_norm`'s modes (norm.cpp): the gain on the rounded row, or in float before the one rounding.
_AFTER_ROUNDING, _IN_FLOAT = 0, 2
# What may follow the scaled row, the longest first. `gain`: times a constant vector.
_TAILS = (("copy", "gain"), ("gain", "copy"), ("gain",), ("copy",), ())


def fused(groups: Sequence[Lowered], touched: Touched, is_constant: Callable[[Tensor], bool]) -> list[Lowered]:
    """The groups with each norm in one."""
    return touched.replaced(groups, lambda at: _norms(groups, at, is_constant))


class _Norm:
    """One that was recognised, from some group to before `end`. inner: the tensors that are no longer written."""

    def __init__(self, source: Tensor, eps: float, inner: Sequence[Tensor], end: int) -> None:
        self.source, self.eps, self.end = source, eps, end
        self.inner, self.out = list(inner[:-1]), inner[-1]
        self._gains: list[Tensor] = []
        self._gain = _IN_FLOAT

    def then_copied(self, step: Instruction) -> bool:
        """Whether the step rounds what came out so far."""
        if step.op != "copy" or not same(step.tensors[1], self.out):
            return False
        return self._goes_on(step.tensors[0])

    def then_gained(self, step: Instruction, is_constant: Callable[[Tensor], bool]) -> bool:
        """Whether the step multiplies what came out so far by a constant vector."""
        if step.op != "mul" or len(step.tensors) != 3:
            return False
        out, *factors = step.tensors
        gains = [each for each in factors if is_constant(each)]
        if len(gains) != 1 or not any(same(each, self.out) for each in factors):
            return False
        rounds_twice = self.out.dtype != torch.float32
        if not _repeats_rows(gains[0]) or (rounds_twice and out.dtype != self.out.dtype):
            return False
        self._gains, self._gain = gains, _AFTER_ROUNDING if rounds_twice else _IN_FLOAT
        return self._goes_on(out)

    def _goes_on(self, out: Tensor) -> bool:
        self.inner.append(self.out)
        self.out, self.end = out, self.end + 1
        return True

    @property
    def is_native(self) -> bool:
        """What the kernel asks of its views."""
        return (
            all(each.dtype in FLOATS for each in (self.out, self.source, *self._gains))
            and self.out.shape == self.source.shape
            and (self.out.stride(-1) == 1 or self.out.shape[-1] == 1)
            and key(self.out) != key(self.source)
        )

    @property
    def lowered(self) -> Lowered:
        vectors = [gain[(0,) * (gain.ndim - 1)] for gain in self._gains]
        return Lowered.native(Instruction("rms_norm", (self.out, self.source, *vectors), (self._gain,), (self.eps,)))


def _norms(groups: Sequence[Lowered], at: int, is_constant: Callable[[Tensor], bool]) -> Iterator[_Norm]:
    """Every norm that starts with this group, the longest first."""
    for tail in _TAILS:
        norm = _scaled(groups, at)
        if norm is None:
            return
        if all(_goes_on(norm, groups, part, is_constant) for part in tail) and norm.is_native:
            yield norm


def _goes_on(norm: _Norm, groups: Sequence[Lowered], part: str, is_constant: Callable[[Tensor], bool]) -> bool:
    step = single(groups, norm.end)
    if step is None:
        return False
    return norm.then_copied(step) if part == "copy" else norm.then_gained(step, is_constant)


def _scaled(groups: Sequence[Lowered], at: int) -> _Norm | None:
    """x * rsqrt(mean(x^2) + eps), with x copied to float before or float as it is."""
    steps = [step for place in range(at, at + 6) if (step := single(groups, place)) is not None]
    has_copy = len(steps) == 6 and steps[0].op == "copy"
    if len(steps) < 5 + has_copy:
        return None
    head, body = steps[:has_copy], steps[has_copy : has_copy + 5]
    names = [step.op for step in body]
    if names not in (["pow", "mean", "add", "rsqrt", "mul"], ["mul", "mean", "add", "rsqrt", "mul"]):
        return None
    source = (head or body)[0].tensors[1]
    wide = head[0].tensors[0] if head else source
    if source.shape != wide.shape or not _is_norm(wide, *body):
        return None
    inner = [step.tensors[0] for step in (*head, *body)]
    return _Norm(source, body[2].reals[0], inner, at + has_copy + 5)


def _is_norm(
    wide: Tensor, square: Instruction, mean: Instruction, plus: Instruction, root: Instruction, scale: Instruction
) -> bool:
    squares, means, sums, roots, out = (step.tensors[0] for step in (square, mean, plus, root, scale))
    if any(tensor.dtype != torch.float32 for tensor in (wide, squares, means, sums, roots, out)):
        return False
    itself = all(same(factor, wide) for factor in square.tensors[1:])
    squared = square.reals == (2.0,) if square.op == "pow" else len(square.tensors) == 3
    factors = scale.tensors[1:]
    return (
        itself
        and squared
        and same(mean.tensors[1], squares)
        and mean.ints == (1 << (wide.ndim - 1),)
        and len(plus.tensors) == 2
        and same(plus.tensors[1], means)
        and plus.reals[1] == 1.0
        and same(root.tensors[1], sums)
        and len(factors) == 2
        and any(same(wide, x) and same(roots.expand(out.shape), y) for x, y in (factors, factors[::-1]))
    )


def _repeats_rows(tensor: Tensor) -> bool:
    """Whether it is a vector over the last dim."""
    return all(size == 1 or stride == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
