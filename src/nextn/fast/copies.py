"""Copies in a lowered pass that nobody needs: what is only copied, as parts of a concatenation are, is written where
the copy would have put it."""

from collections.abc import Sequence

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.touched import FLOATS, Touched, same, single

_WRITERS = ("add", "sub", "mul", "neg", "rotate", "silu_mul")  # whose out may lie anywhere with a dense last dim


def apart(groups: Sequence[Lowered]) -> list[Lowered]:
    """The groups with the copies of a concatenation each on its own."""
    return [part for group in groups for part in (_parts(group) if _only_copies(group) else [group])]


def _parts(group: Lowered) -> list[Lowered]:
    return [Lowered.native(step) for step in group.instructions]


def _only_copies(group: Lowered) -> bool:
    steps = group.instructions
    views = [tensor for step in steps for tensor in step.tensors]
    return len(steps) > 1 and all(step.op == "copy" for step in steps) and all(each.dtype in FLOATS for each in views)


def left_out(groups: Sequence[Lowered], kept: Sequence[Tensor]) -> list[Lowered]:
    """The groups without such copies. kept: what is read after the pass, or stands before it."""
    while len(fewer := _fewer(groups, kept)) < len(groups):  # a part may be waiting for the one before it
        groups = fewer
    return fewer


def _fewer(groups: Sequence[Lowered], kept: Sequence[Tensor]) -> list[Lowered]:
    touched = Touched(groups, kept)
    out = list(groups)
    gone = set()
    for at in range(len(groups)):
        place = _copied(groups, touched, at)
        if place is not None:
            (writer,), (copy,) = groups[at].instructions, groups[place].instructions
            moved = Instruction(writer.op, (copy.tensors[0], *writer.tensors[1:]), writer.ints, writer.reals)
            out[at] = Lowered.native(moved)
            gone.add(place)
    return [group for at, group in enumerate(out) if at not in gone]


def _copied(groups: Sequence[Lowered], touched: Touched, at: int) -> int | None:
    """Where what the group writes is copied, if that is all that happens to it."""
    writer = single(groups, at)
    if writer is None or writer.op not in _WRITERS or any(each.dtype not in FLOATS for each in writer.tensors):
        return None
    made = writer.tensors[0]
    others = touched.by(made) - {at}
    place = min(others) if len(others) == 1 else -1
    copy = single(groups, place) if place > at else None
    if copy is None or copy.op != "copy" or not same(copy.tensors[1], made):
        return None
    to = copy.tensors[0]
    is_free = not any(at <= each < place for each in touched.by(to))
    fits = to.dtype == made.dtype and to.shape == made.shape and to.stride(-1) == 1
    return place if is_free and fits else None
