"""Attention in a lowered pass with the queries, keys and values before it, head by head: a worker makes those of its
own heads and attends with them, and need not wait for the others."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.packing import WIDEST
from nextn.fast.tape import Entry, key
from nextn.fast.touched import same, single

_VIEWS = 5  # of each tensor that `norm_rotate` makes
_READ = {"attend": slice(1, 4), "store": slice(0, 2)}  # what attention reads of heads, values last
_BETWEEN = 2  # groups that may stand between, as a copy of Qwen3.5's gates does


def apart(groups: Sequence[Lowered]) -> list[Lowered]:
    """The groups with linear layers, norms and rotations, and attention in one group, where nothing has to be done
    between them."""
    out, at = [], 0
    while at < len(groups):
        turn = next((place for place in range(at + 1, at + 2 + _BETWEEN) if _op(groups, place) == "norm_rotate"), at)
        found = _found(groups, at, turn) if turn > at else None
        out += [groups[at]] if found is None else [found, *groups[at + 1 : turn]]
        at += 1 if found is None else turn + 2 - at
    return out


def _found(groups: Sequence[Lowered], at: int, turn: int) -> Lowered | None:
    """The group at `at`, that at `turn` and the one behind that in one, where what stands between can go behind it."""
    places, between = (at, turn, turn + 1), groups[at + 1 : turn]
    steps = [step for place in places if (step := single(groups, place)) is not None]
    made = _made(*steps) if len(steps) == len(places) else None
    if made is None or _touch(between, groups[turn : turn + 2]) or _touch(groups[turn : turn + 2], between):
        return None
    return _together([groups[place] for place in places], made)


def _op(groups: Sequence[Lowered], at: int) -> str:
    step = single(groups, at)
    return "" if step is None else step.op


def _touch(writers: Sequence[Lowered], groups: Sequence[Lowered]) -> bool:
    """Whether the groups touch what the writers write."""
    written = {key(out) for group in writers for out in group.entry.outs}
    return any(key(tensor) in written for group in groups for tensor in group.tensors)


def _together(groups: Sequence[Lowered], steps: Sequence[Instruction]) -> Lowered:
    entries = [group.entry for group in groups]
    tensors = tuple(tensor for step in steps for tensor in step.tensors)
    return Lowered(Entry("attend", tensors, {}, [out for entry in entries for out in entry.outs]), list(steps))


def _made(linear: Instruction, turn: Instruction, attend: Instruction) -> list[Instruction] | None:
    """The three, shared by heads; None where they are something else, or what a head has is not made of its own."""
    if linear.op != "linear" or attend.op not in _READ:
        return None
    read = attend.tensors[_READ[attend.op]]
    heads, (outs, weights) = read[-1].shape[1], _layers(linear)
    if any(len(weight) % (heads * WIDEST) for weight in weights):
        return None
    turned = [turn.tensors[place : place + 2] for place in range(0, len(turn.tensors), _VIEWS)]
    if any(out.ndim != 4 or out.shape[1] % heads or not _is_of(x, outs) for out, x in turned):
        return None
    if not all(_is_of(each, outs) or any(same(each, out) for out, _ in turned) for each in read):
        return None
    return [
        replace(linear, ints=(*linear.ints[:-1], heads)),
        replace(turn, tensors=tuple(map(_heads_first, turn.tensors)), owners=heads),
        replace(attend, owners=heads),
    ]


def _layers(linear: Instruction) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Outs and weights."""
    count = len(linear.ints) - 2
    return linear.tensors[:count], linear.tensors[count + 1 : 2 * count + 1]


def _is_of(view: Tensor, outs: Sequence[Tensor]) -> bool:
    """Whether the view [B, heads, T, D] has equal shares of one out's columns as its heads, in order."""
    for out in outs:
        start = (view.data_ptr() - out.data_ptr()) // out.itemsize
        stride = view.stride(1)
        if start >= 0 and start + view.shape[3] <= stride and stride * view.shape[1] == out.shape[1]:
            return True
    return False


def _heads_first(view: Tensor) -> Tensor:
    """Its rows in the order that workers share them in."""
    return view.transpose(0, 1) if view.ndim == 4 else view
