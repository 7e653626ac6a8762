"""What of a lowered pass somebody reads, or finds in the cache; the rest is left out.

Of columns whose keys and values are all that is wanted nothing is made but these.
"""

from collections.abc import Sequence

from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.tape import Entry, key

_PURE = ("expert_linear", "confidence")  # native ops that leave nothing but their outs


def needed(groups: Sequence[Lowered], kept: Sequence[Tensor]) -> list[Lowered]:
    """kept: what is read after the pass, or stands before it."""
    read = {key(tensor) for tensor in kept}
    out = []
    for group in reversed(groups):
        writes = {key(tensor) for tensor in group.entry.outs}
        if not writes & read:
            if group.entry.func == "attend":
                group = _stored(group.entry)
            elif not isinstance(group.entry.func, str) or group.entry.func in _PURE:
                continue
        read |= {key(tensor) for tensor in group.tensors}
        out.append(group)
    return out[::-1]


def _stored(entry: Entry) -> Lowered:
    """Keys and values of attention go into the cache, and nothing attends."""
    _, _, *views = entry.args[:6]
    step = Instruction("store", tuple(views))
    return Lowered(Entry(step.op, step.tensors, {}, []), [step])
