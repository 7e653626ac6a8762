"""Queries and keys of a lowered pass: the norm of each head and its rotary embedding become one native `norm_rotate`,
and those of queries and keys one call."""

from collections.abc import Sequence

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.tape import key
from nextn.fast.touched import FLOATS, Touched, single


def fused(groups: Sequence[Lowered], touched: Touched) -> list[Lowered]:
    """The groups with each such pair in one, where the rotation stood."""
    out: list[Lowered | None] = list(groups)
    for at in range(len(groups)):
        found = _found(groups, touched, at)
        if found is not None:
            places, instruction = found
            for place in (at, *places):
                out[place] = None
            out[places[0]] = Lowered.native(instruction)
    return _joined([group for group in out if group is not None])


def _found(groups: Sequence[Lowered], touched: Touched, at: int) -> tuple[list[int], Instruction] | None:
    """Of a norm: where its rotation stands and, if there is one, the copy of what is not turned; what does it all."""
    norm = single(groups, at)
    if norm is None or norm.op != "rms_norm" or len(norm.tensors) != 3:
        return None
    normed, x, weight = norm.tensors
    readers = {step.op: place for place in touched.by(normed) - {at} if (step := single(groups, place)) is not None}
    if len(readers) != len(touched.by(normed)) - 1 or readers.keys() not in ({"rotate"}, {"rotate", "copy"}):
        return None
    places = [readers[op] for op in ("rotate", "copy") if op in readers]
    rotate, *copy = (groups[place].instructions[0] for place in places)
    out = _whole(rotate, copy[0] if copy else None, normed)
    source = None if out is None else _seen_as(x, normed, rotate.tensors[1], out.shape[-1])
    if out is None or source is None or min(places) < at or x.dtype != normed.dtype or normed.dtype not in FLOATS:
        return None
    changed = {each for each in touched.by(out) | touched.written(x) if at < each < max(places)}
    if key(out) == key(x) or changed - set(places):
        return None
    tensors = (out, source, *rotate.tensors[2:], weight)
    return places, Instruction("norm_rotate", tensors, norm.ints, norm.reals)


def _whole(rotate: Instruction, copy: Instruction | None, normed: Tensor) -> Tensor | None:
    """[..., D]: where the turned channels lie and, behind them, those that are copied; None: not beside each other."""
    turned, x, size = *rotate.tensors[:2], normed.shape[-1]
    count = turned.shape[-1]
    if x.data_ptr() != normed.data_ptr() or x.stride(-1) != 1 or count > size or key(turned) == key(normed):
        return None
    if copy is None:
        return turned if count == size else None
    rest, source = copy.tensors
    if key(rest) != key(turned) or rest.shape != (*turned.shape[:-1], size - count):
        return None
    if not (_is_behind(turned, rest) and _is_behind(x, source)):
        return None
    return turned.as_strided((*turned.shape[:-1], size), turned.stride(), turned.storage_offset())


def _is_behind(first: Tensor, rest: Tensor) -> bool:
    """Whether each row of `rest` begins where that of `first` ends."""
    return rest.data_ptr() == first[..., -1:].data_ptr() + first.itemsize and rest.stride() == first.stride()


def _seen_as(x: Tensor, normed: Tensor, view: Tensor, size: int) -> Tensor | None:
    """x [..., D] with the dims in the order that `view` has those of `normed`, which is of x's shape."""
    strides = []
    for length, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True):
        dims = [dim for dim in range(normed.ndim - 1) if (normed.shape[dim], normed.stride(dim)) == (length, stride)]
        if length > 1 and len(dims) != 1:
            return None
        strides.append(x.stride(dims[0]) if length > 1 else 0)
    if view[..., 0].numel() * size != x.numel():
        return None
    return x.as_strided((*view.shape[:-1], size), (*strides, x.stride(-1)), x.storage_offset())


def _joined(groups: Sequence[Lowered]) -> list[Lowered]:
    """Neighbours of one dtype in one call."""
    out: list[Lowered] = []
    for group in groups:
        step, before = single([group], 0), single(out, len(out) - 1) if out else None
        if step is None or before is None or not _go_together(before, step):
            out.append(group)
        else:
            both = (before.tensors + step.tensors, before.ints + step.ints, before.reals + step.reals)
            made = Instruction("norm_rotate", *both)
            out[-1] = Lowered.native(made, outs=made.tensors[::5])
    return out


def _go_together(before: Instruction, step: Instruction) -> bool:
    """Whether the second reads nothing that the first writes."""
    if before.op != "norm_rotate" or step.op != "norm_rotate" or before.tensors[0].dtype != step.tensors[0].dtype:
        return False
    written = {key(out) for out in before.tensors[::5]}
    return not any(key(tensor) in written for tensor in step.tensors)
