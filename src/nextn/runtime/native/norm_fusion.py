"""Fusion of RMSNorms in a lowered pass: of their operations, with the rotary embedding behind, or the sum in front."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.runtime.native.graph_analysis import (
    FLOATS,
    UseDefs,
    are_dense_and_alike,
    is_pair,
    is_same_view,
    single_instruction,
    with_changes,
)
from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.trace import storage_key

IsConstant = Callable[[Tensor], bool]
# What may follow the scaled row of an RMSNorm, longest first. `weight`: a product with a constant vector.
_NORM_TAILS = (("copy", "weight"), ("weight", "copy"), ("weight",), ("copy",), ())
_NORM_ROPE_VIEWS = 5  # out, x, cosine, sine, weight


def fuse_rms_norms(groups: Sequence[Lowered], use_defs: UseDefs, is_constant: IsConstant) -> list[Lowered]:
    """Fuse the operations of each RMSNorm into one `rms_norm`."""
    return use_defs.replace_matches(groups, lambda index: _match_norms(groups, index, is_constant))


class _NormMatch:
    """A matched RMSNorm, ending before `end`; `out` is its result so far."""

    def __init__(self, source: Tensor, eps: float, results: Sequence[Tensor], end: int) -> None:
        self.source, self.eps, self.end = source, eps, end
        self.intermediates, self.out = list(results[:-1]), results[-1]
        self._weights: list[Tensor] = []

    def extend(self, groups: Sequence[Lowered], part: str, is_constant: IsConstant) -> bool:
        """Extend the match by the next group, if that is this part of a tail."""
        step = single_instruction(groups, self.end)
        if step is None:
            return False
        return self._extend_by_copy(step) if part == "copy" else self._extend_by_weight(step, is_constant)

    def _extend_by_copy(self, step: Instruction) -> bool:
        """A rounding of the result so far."""
        if step.op != "copy" or not is_same_view(step.tensors[1], self.out):
            return False
        return self._advance(step.tensors[0])

    def _extend_by_weight(self, step: Instruction, is_constant: IsConstant) -> bool:
        """A product of the result so far with a constant vector."""
        if step.op != "mul" or len(step.tensors) != 3:
            return False
        out, *factors = step.tensors
        weights = [factor for factor in factors if is_constant(factor)]
        if len(weights) != 1 or not any(is_same_view(factor, self.out) for factor in factors):
            return False
        is_rounded = self.out.dtype != torch.float32
        if not _is_vector(weights[0]) or (is_rounded and out.dtype != self.out.dtype):
            return False
        self._weights = weights
        return self._advance(out)

    def _advance(self, out: Tensor) -> bool:
        self.intermediates.append(self.out)
        self.out, self.end = out, self.end + 1
        return True

    @property
    def is_supported(self) -> bool:
        """Whether the kernel supports the views."""
        return (
            all(tensor.dtype in FLOATS for tensor in (self.out, self.source, *self._weights))
            and self.out.shape == self.source.shape
            and (self.out.stride(-1) == 1 or self.out.shape[-1] == 1)
            and storage_key(self.out) != storage_key(self.source)
        )

    @property
    def lowered(self) -> Lowered:
        vectors = [weight[(0,) * (weight.ndim - 1)] for weight in self._weights]
        return Lowered.native(Instruction("rms_norm", (self.out, self.source, *vectors), reals=(self.eps,)))


def _match_norms(groups: Sequence[Lowered], index: int, is_constant: IsConstant) -> Iterator[_NormMatch]:
    """Every RMSNorm that starts with this group, longest first."""
    for tail in _NORM_TAILS:
        match = _match_scaled_row(groups, index)
        if match is None:
            return
        if all(match.extend(groups, part, is_constant) for part in tail) and match.is_supported:
            yield match


def _match_scaled_row(groups: Sequence[Lowered], index: int) -> _NormMatch | None:
    """x * rsqrt(mean(x^2) + eps), with x copied to float first, or float already."""
    steps = [step for at in range(index, index + 6) if (step := single_instruction(groups, at)) is not None]
    has_copy = len(steps) == 6 and steps[0].op == "copy"
    if len(steps) < 5 + has_copy:
        return None
    head, body = steps[:has_copy], steps[has_copy : has_copy + 5]
    ops = [step.op for step in body]
    if ops not in (["pow", "mean", "add", "rsqrt", "mul"], ["mul", "mean", "add", "rsqrt", "mul"]):
        return None
    source = (head or body)[0].tensors[1]
    wide = head[0].tensors[0] if head else source
    if source.shape != wide.shape or not _is_rms_norm(wide, *body):
        return None
    results = [step.tensors[0] for step in (*head, *body)]
    return _NormMatch(source, body[2].reals[0], results, index + has_copy + 5)


def _is_rms_norm(
    wide: Tensor, square: Instruction, mean: Instruction, add: Instruction, rsqrt: Instruction, scale: Instruction
) -> bool:
    squares, means, sums, roots, out = (step.tensors[0] for step in (square, mean, add, rsqrt, scale))
    if any(tensor.dtype != torch.float32 for tensor in (wide, squares, means, sums, roots, out)):
        return False
    factors = scale.tensors[1:]
    return (
        all(is_same_view(factor, wide) for factor in square.tensors[1:])
        and (square.reals == (2.0,) if square.op == "pow" else len(square.tensors) == 3)
        and is_same_view(mean.tensors[1], squares)
        and mean.ints == (1 << (wide.ndim - 1),)
        and len(add.tensors) == 2
        and is_same_view(add.tensors[1], means)
        and add.reals[1] == 1.0
        and is_same_view(rsqrt.tensors[1], sums)
        and len(factors) == 2
        and is_pair(factors, wide, roots.expand(out.shape))
    )


def _is_vector(tensor: Tensor) -> bool:
    """Whether it is one vector over the last dim, repeated along the others."""
    return all(size == 1 or stride == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))


def fuse_qk_norm_rope(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse the RMSNorm of each head with its rotary embedding into one `norm_rope`, at the position of the latter.
    Those of queries and keys become one call."""
    changes = dict[int, Lowered | None]()
    for index in range(len(groups)):
        if (match := _match_norm_rope(groups, use_defs, index)) is not None:
            indices, instruction = match
            changes |= dict.fromkeys((index, *indices)) | {indices[0]: Lowered.native(instruction)}
    return _merge_norm_ropes(with_changes(groups, changes))


def _match_norm_rope(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> tuple[list[int], Instruction] | None:
    """For an `rms_norm`: the index of its `rope`, that of the copy of unrotated channels if there is one, and the fused
    instruction."""
    norm = single_instruction(groups, index)
    if norm is None or norm.op != "rms_norm" or len(norm.tensors) != 3:
        return None
    normed, x, weight = norm.tensors
    uses = use_defs.uses(normed) - {index}
    readers = {step.op: use for use in uses if (step := single_instruction(groups, use)) is not None}
    if len(readers) != len(uses) or readers.keys() not in ({"rope"}, {"rope", "copy"}):
        return None
    indices = [readers[op] for op in ("rope", "copy") if op in readers]
    rope, *copy = (groups[reader].instructions[0] for reader in indices)
    out = _norm_rope_out(rope, copy[0] if copy else None, normed)
    source = None if out is None else _reorder_dims(x, normed, rope.tensors[1], out.shape[-1])
    if out is None or source is None or min(indices) < index or x.dtype != normed.dtype or normed.dtype not in FLOATS:
        return None
    between = {use for use in use_defs.uses(out) | use_defs.definitions(x) if index < use < max(indices)}
    if storage_key(out) == storage_key(x) or between - set(indices):
        return None
    return indices, Instruction("norm_rope", (out, source, *rope.tensors[2:], weight), reals=norm.reals)


def _norm_rope_out(rope: Instruction, copy: Instruction | None, normed: Tensor) -> Tensor | None:
    """The output [..., D]: the rotated channels and, after them, the copied ones; None if they are not adjacent."""
    rotated, x, size = *rope.tensors[:2], normed.shape[-1]
    count = rotated.shape[-1]
    if x.data_ptr() != normed.data_ptr() or x.stride(-1) != 1 or count > size:
        return None
    if storage_key(rotated) == storage_key(normed):
        return None
    if copy is None:
        return rotated if count == size else None
    rest, source = copy.tensors
    if storage_key(rest) != storage_key(rotated) or rest.shape != (*rotated.shape[:-1], size - count):
        return None
    if not (_is_adjacent(rotated, rest) and _is_adjacent(x, source)):
        return None
    return rotated.as_strided((*rotated.shape[:-1], size), rotated.stride(), rotated.storage_offset())


def _is_adjacent(first: Tensor, rest: Tensor) -> bool:
    """Whether each row of `rest` begins where that of `first` ends."""
    return rest.data_ptr() == first[..., -1:].data_ptr() + first.itemsize and rest.stride() == first.stride()


def _reorder_dims(x: Tensor, normed: Tensor, view: Tensor, size: int) -> Tensor | None:
    """x [..., D] with its dims in the order in which `view` has those of `normed`, which has x's shape."""
    strides = []
    for length, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True):
        dims = [dim for dim in range(normed.ndim - 1) if (normed.shape[dim], normed.stride(dim)) == (length, stride)]
        if length > 1 and len(dims) != 1:
            return None
        strides.append(x.stride(dims[0]) if length > 1 else 0)
    if view[..., 0].numel() * size != x.numel():
        return None
    return x.as_strided((*view.shape[:-1], size), (*strides, x.stride(-1)), x.storage_offset())


def _merge_norm_ropes(groups: Sequence[Lowered]) -> list[Lowered]:
    """Merge adjacent `norm_rope` calls of one dtype."""
    out: list[Lowered] = []
    for group in groups:
        step, before = single_instruction([group], 0), single_instruction(out, len(out) - 1) if out else None
        if step is None or before is None or not _can_merge_norm_ropes(before, step):
            out.append(group)
        else:
            tensors, reals = before.tensors + step.tensors, before.reals + step.reals
            merged = Instruction("norm_rope", tensors, reals=reals)
            out[-1] = Lowered.native(merged, outs=merged.tensors[::_NORM_ROPE_VIEWS])
    return out


def _can_merge_norm_ropes(before: Instruction, step: Instruction) -> bool:
    """Whether both are `norm_rope` and the second reads nothing that the first writes."""
    if before.op != "norm_rope" or step.op != "norm_rope" or before.tensors[0].dtype != step.tensors[0].dtype:
        return False
    written = {storage_key(out) for out in before.tensors[::_NORM_ROPE_VIEWS]}
    return not any(storage_key(tensor) in written for tensor in step.tensors)


@dataclass(frozen=True)
class _AddNormMatch:
    lowered: Lowered
    end: int
    intermediates: tuple[Tensor, ...] = ()


def fuse_add_norm(groups: Sequence[Lowered], use_defs: UseDefs) -> list[Lowered]:
    """Fuse each residual sum with the RMSNorm that follows it into one `add_rms_norm`, which writes both results."""
    return use_defs.replace_matches(groups, lambda index: _match_add_norm(groups, index))


def _match_add_norm(groups: Sequence[Lowered], index: int) -> Iterator[_AddNormMatch]:
    add, norm = single_instruction(groups, index), single_instruction(groups, index + 1)
    if add is None or norm is None or (add.op, norm.op) != ("add", "rms_norm"):
        return
    if len(add.tensors) != 3 or add.reals != (1.0,) or len(norm.tensors) != 3:
        return
    (total, a, b), (out, source, weight) = add.tensors, norm.tensors
    is_separate = storage_key(out) not in {storage_key(tensor) for tensor in add.tensors}
    if is_separate and is_same_view(source, total) and total.dtype in FLOATS and are_dense_and_alike(out, total, a, b):
        fused = Instruction("add_rms_norm", (out, total, a, b, weight), reals=norm.reals)
        yield _AddNormMatch(Lowered.native(fused, outs=fused.tensors[:2]), index + 2)
