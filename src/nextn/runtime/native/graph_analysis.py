"""Use-def analysis of a lowered pass, and the passes built on it: dead-code elimination and copy elimination."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nextn.runtime.native.lowering import Instruction, Lowered
from nextn.runtime.native.trace import Entry, storage_key

FLOATS = (torch.float32, torch.bfloat16)  # dtypes that fused kernels support
# Ops whose output may have any strides with a dense last dim.
_STRIDED_OUT = ("add", "sub", "mul", "neg", "rope", "silu_mul")
_PURE = ("attend_stored", "expert_linear", "confidence")  # native ops without effects other than their outputs


class Match(Protocol):
    """A run of groups, ending before `end`, that one group can replace."""

    @property
    def intermediates(self) -> Sequence[Tensor]:
        """Tensors that the replacement no longer writes."""

    @property
    def end(self) -> int: ...

    @property
    def lowered(self) -> Lowered: ...


class UseDefs:
    """The groups that use each storage (read or write) and those that define it (write). Tensors in `live` count as
    used after the last group."""

    def __init__(self, groups: Sequence[Lowered], live: Sequence[Tensor]) -> None:
        self._uses: dict[int, set[int]] = {}
        self._definitions: dict[int, set[int]] = {}
        for index, group in enumerate(groups):
            for key in group.keys:
                self._uses.setdefault(key, set()).add(index)
            for key in group.entry.out_keys:
                self._definitions.setdefault(key, set()).add(index)
        for tensor in live:
            self._uses.setdefault(storage_key(tensor), set()).add(len(groups))

    def uses(self, tensor: Tensor) -> set[int]:
        """Return the groups that read or write the tensor's storage."""
        return self._uses[storage_key(tensor)]

    def definitions(self, tensor: Tensor) -> set[int]:
        """Return the groups that write the tensor's storage."""
        return self._definitions.get(storage_key(tensor), set())

    def replace_matches(self, groups: Sequence[Lowered], find: Callable[[int], Iterator[Match]]) -> list[Lowered]:
        """Replace, from the front, the first match at each index whose intermediates no other group uses."""
        out: list[Lowered] = []
        index = 0
        while index < len(groups):
            valid = (match for match in find(index) if self._is_private(match.intermediates, index, match.end))
            match = next(valid, None)
            out.append(groups[index] if match is None else match.lowered)
            index = index + 1 if match is None else match.end
        return out

    def _is_private(self, tensors: Sequence[Tensor], start: int, end: int) -> bool:
        return all(start <= index < end for tensor in tensors for index in self.uses(tensor))


def with_changes(groups: Sequence[Lowered], changes: Mapping[int, Lowered | None]) -> list[Lowered]:
    """Return the groups with others at these indices; None: without any."""
    changed = (changes.get(index, group) for index, group in enumerate(groups))
    return [group for group in changed if group is not None]


def single_instruction(groups: Sequence[Lowered], index: int) -> Instruction | None:
    """Return the instruction of a group that has exactly one, else None."""
    if index >= len(groups) or len(groups[index].instructions) != 1:
        return None
    return groups[index].instructions[0]


def is_same_view(left: Tensor, right: Tensor) -> bool:
    """Return whether both are the same view of the same storage."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def is_pair(pair: Sequence[Tensor], first: Tensor, second: Tensor) -> bool:
    """Return whether the pair consists of these two views, in either order."""
    return any(is_same_view(first, a) and is_same_view(second, b) for a, b in (pair, pair[::-1]))


def are_dense_and_alike(first: Tensor, *others: Tensor) -> bool:
    """Return whether all have the first one's shape and dtype, and a last dim without gaps."""
    return all(
        tensor.shape == first.shape
        and tensor.dtype == first.dtype
        and (tensor.shape[-1] == 1 or tensor.stride(-1) == 1)
        for tensor in (first, *others)
    )


def eliminate_dead_code(groups: Sequence[Lowered], live: Sequence[Tensor]) -> list[Lowered]:
    """Drop groups whose results are not read. Attention whose output is not read only stores its keys and values.

    `live`: tensors that are read after the pass, or that exist before it.
    """
    used = {storage_key(tensor) for tensor in live}
    out = []
    for group in reversed(groups):
        if not group.entry.out_keys & used:
            if group.entry.func == "attention":
                group = _store_only(group.entry)
            elif not isinstance(group.entry.func, str) or group.entry.func in _PURE:
                continue
        used |= group.keys
        out.append(group)
    return out[::-1]


def _store_only(attention: Entry) -> Lowered:
    _, _, *views = attention.args[:6]
    step = Instruction("store_kv", tuple(views), tuple(attention.ints[:1]))
    return Lowered(Entry(step.op, step.tensors, {}, []), [step])


def split_concatenations(groups: Sequence[Lowered]) -> list[Lowered]:
    """Make each copy of a concatenation a group of its own."""
    return [part for group in groups for part in (_split(group) if _is_concatenation(group) else [group])]


def _split(group: Lowered) -> list[Lowered]:
    return [Lowered.native(step) for step in group.instructions]


def _is_concatenation(group: Lowered) -> bool:
    steps = group.instructions
    dtypes = [tensor.dtype for step in steps for tensor in step.tensors]
    return len(steps) > 1 and all(step.op == "copy" for step in steps) and all(dtype in FLOATS for dtype in dtypes)


def eliminate_copies(groups: Sequence[Lowered], live: Sequence[Tensor]) -> list[Lowered]:
    """Let results that are only copied, as parts of a concatenation are, be written directly to the copy's target."""
    while len(fewer := _eliminate_once(groups, live)) < len(groups):  # one copy may feed another
        groups = fewer
    return fewer


def _eliminate_once(groups: Sequence[Lowered], live: Sequence[Tensor]) -> list[Lowered]:
    use_defs, changes = UseDefs(groups, live), dict[int, Lowered | None]()
    for index in range(len(groups)):
        if (copy_index := _find_copy(groups, use_defs, index)) is not None:
            (writer,), (copy,) = groups[index].instructions, groups[copy_index].instructions
            redirected = Instruction(writer.op, (copy.tensors[0], *writer.tensors[1:]), writer.ints, writer.reals)
            changes |= {index: Lowered.native(redirected), copy_index: None}
    return with_changes(groups, changes)


def _find_copy(groups: Sequence[Lowered], use_defs: UseDefs, index: int) -> int | None:
    """The group that copies this group's result, if that is the only use and its target can be written directly."""
    writer = single_instruction(groups, index)
    if writer is None or writer.op not in _STRIDED_OUT or any(each.dtype not in FLOATS for each in writer.tensors):
        return None
    result = writer.tensors[0]
    others = use_defs.uses(result) - {index}
    copy_index = min(others) if len(others) == 1 else -1
    copy = single_instruction(groups, copy_index) if copy_index > index else None
    if copy is None or copy.op != "copy" or not is_same_view(copy.tensors[1], result):
        return None
    target = copy.tensors[0]
    is_free = not any(index <= use < copy_index for use in use_defs.uses(target))
    fits = target.dtype == result.dtype and target.shape == result.shape and target.stride(-1) == 1
    return copy_index if is_free and fits else None
