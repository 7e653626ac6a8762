"""Who reads and writes what in a lowered pass, so that operations can be taken together and nobody else notices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nextn.fast.lower import Instruction, Lowered
from nextn.fast.tape import key

FLOATS = (torch.float32, torch.bfloat16)  # what native kernels of several operations take


class Match(Protocol):
    """Groups that follow each other, up to before `end`, and what does the same. inner: the tensors that are no longer
    written."""

    @property
    def inner(self) -> Sequence[Tensor]: ...

    @property
    def end(self) -> int: ...

    @property
    def lowered(self) -> Lowered: ...


class Touched:
    """storage -> the groups that read or write it, and those that write it; what is kept counts as read behind all."""

    def __init__(self, groups: Sequence[Lowered], kept: Sequence[Tensor]) -> None:
        self._groups: dict[int, set[int]] = {}
        self._written: dict[int, set[int]] = {}
        for at, group in enumerate(groups):
            for tensor in group.tensors:
                self._groups.setdefault(key(tensor), set()).add(at)
            for tensor in group.entry.outs:
                self._written.setdefault(key(tensor), set()).add(at)
        for tensor in kept:
            self._groups.setdefault(key(tensor), set()).add(len(groups))

    def by(self, tensor: Tensor) -> set[int]:
        """The groups that touch the tensor's storage."""
        return self._groups[key(tensor)]

    def written(self, tensor: Tensor) -> set[int]:
        """The groups that write the tensor's storage."""
        return self._written.get(key(tensor), set())

    def replaced(self, groups: Sequence[Lowered], matches: Callable[[int], Iterator[Match]]) -> list[Lowered]:
        """The groups with the first match at each place, whose inner tensors nobody else touches, in their stead."""
        out: list[Lowered] = []
        at = 0
        while at < len(groups):
            found = next((match for match in matches(at) if self._inside(match.inner, at, match.end)), None)
            out.append(groups[at] if found is None else found.lowered)
            at = at + 1 if found is None else found.end
        return out

    def _inside(self, tensors: Sequence[Tensor], start: int, end: int) -> bool:
        return all(start <= at < end for tensor in tensors for at in self.by(tensor))


def single(groups: Sequence[Lowered], at: int) -> Instruction | None:
    """The group's instruction, if it is one."""
    if at >= len(groups) or len(groups[at].instructions) != 1:
        return None
    return groups[at].instructions[0]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether both are one view of one storage."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


def is_dense(*tensors: Tensor) -> bool:
    """Whether all are of the first one's shape and dtype, and their last dims without gaps."""
    first = tensors[0]
    return all(
        each.shape == first.shape and each.dtype == first.dtype and (each.shape[-1] == 1 or each.stride(-1) == 1)
        for each in tensors
    )
