"""Memory of the native runtime: huge pages for packed weights, merged weights, scratch memory that replays share."""

import math
import mmap
from collections.abc import Sequence

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


@torch.no_grad()
def merge_weights(weights: Sequence[Tensor], parts: int, columns: int) -> Tensor:
    """Merge weights into one matrix: part 0 of every weight, then part 1 of every weight, and so on, each padded to
    whole blocks of `columns` output channels."""
    if len(weights) == parts == 1:
        return weights[0]
    missing = [-weight.shape[-2] % (parts * columns) for weight in weights]
    padded = [torch.nn.functional.pad(w, (0, 0, 0, n)) if n else w for w, n in zip(weights, missing, strict=True)]
    split = [weight.unflatten(-2, (parts, -1)) for weight in padded]
    *before, _, k = split[0].shape
    # Not from the heap, which would keep the memory: the matrix is only needed until it is packed.
    merged = untouched_zeros(*before, sum(part.shape[-2] for part in split), k, dtype=weights[0].dtype)
    return torch.cat(split, dim=-2, out=merged).flatten(-3, -2)


def _map_private(size: int) -> mmap.mmap:
    """Map fresh memory of this process alone; by default Python shares anonymous maps with forked processes."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_huge(size: int) -> Tensor:
    memory = _map_private(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bool)
