"""Memory for weights that are read in order at every step: large pages spare most misses of the address cache."""

import mmap

import torch
from torch import Tensor

_CHUNK = 32 * 2**20  # bytes: sixteen of the 2 MB pages that Linux lends on request
_ALIGNMENT = 64


class Pages:
    """Hands out pieces of large chunks. What was handed out keeps its chunk alive."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.bool), 0

    def take(self, size: int) -> Tensor:
        """size bytes from the start of a cache line on, as a 1-D bool tensor of zeros."""
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _large(max(size, _CHUNK)), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return piece


def mapped(size: int) -> mmap.mmap:
    """Fresh memory of this process alone: by default Python's maps are shared with forked processes, which write."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _large(size: int) -> Tensor:
    memory = mapped(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bool)
