"""Memory of the native runtime: huge pages for packed weights, and scratch memory that replays share."""

import math
import mmap

import torch
from torch import Tensor

_CHUNK = 32 * 2**20  # bytes: sixteen huge pages of 2 MB
_RESERVED = 64 * 2**20  # bytes of address space that scratch memory starts with; untouched pages take no memory
_SLICE = 4 * 2**20  # bytes of a weight that are packed at once
_ALIGNMENT = 64  # bytes: a cache line


class HugePages:
    """Allocator of weight memory from large chunks. Huge pages avoid most TLB misses of weights that are read in order
    at every step. An allocation keeps its chunk alive."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.bool), 0

    def take(self, size: int) -> Tensor:
        """Return `size` zero bytes, aligned to a cache line, as a 1-D bool tensor."""
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _map_huge(max(size, _CHUNK)), 0
        memory = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory


class Scratch:
    """Memory for intermediate tensors that several replays share, one running after the other.

    A replay of another block size then finds the memory in the processor's caches, and all sizes together take what the
    largest takes. Each replay overwrites what the last one left.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return `size` uninitialized bytes, aligned to a cache line, as a 1-D uint8 tensor."""
        if size > len(self._memory):
            self._memory = torch.frombuffer(_map_private(max(size, _RESERVED)), dtype=torch.uint8)
        return self._memory[:size]


def untouched_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros whose pages take no memory before they are written, unlike those of `torch.zeros`."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(_map_private(max(size, 1)), dtype=torch.uint8)[:size].view(dtype).view(shape)


def rows_per_slice(weight: Tensor, multiple: int) -> int:
    """Return how many rows of a weight [..., N, K] to pack at once, a multiple of this number."""
    return max(_SLICE // (weight.shape[-1] * weight.itemsize) // multiple, 1) * multiple


def _map_private(size: int) -> mmap.mmap:
    """Map fresh memory of this process alone; by default Python shares anonymous maps with forked processes."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_huge(size: int) -> Tensor:
    memory = _map_private(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bool)
