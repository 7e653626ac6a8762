"""The cache of the native backend: buffers that native ops write and read in place.

It follows the protocol of `KVCache`: a block is written after each sequence's length, and `commit` makes a prefix of it
permanent.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from nextn.cache.kv_cache import KVCache
from nextn.errors import RollbackError
from nextn.runtime.native.abi import Program, Runtime
from nextn.runtime.native.memory import untouched_zeros
from nextn.runtime.native.trace_hooks import MAX_RECURRENT_BLOCK, StateShape

_BLOCK = 32  # capacities are multiples of the positions that native attention processes at once
_MIN_CAPACITY = 256
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
Shape = tuple[int, int, int]  # of an attention layer: kv heads, key size, value size


class KVBuffers(KVCache):
    """Keys and values of attention layers, states of recurrent layers.

    An attention layer has keys and values [B, heads, capacity, size]; the order within 32 positions is up to the kernel
    (csrc/attention_*.cpp). A recurrent layer has states [B, heads, key size * value size + MAX_RECURRENT_BLOCK * (key
    size + value size + 1)] in fp32: the state before the block, and what its positions change in it; and the inputs of
    its convolution [B, channels, MAX_RECURRENT_BLOCK + kernel - 1].

    Attributes:
        headers: [layers, 3] int64, the addresses of a layer's two buffers and their capacity.
        allocation: An object that is replaced whenever the headers change.
    """

    def __init__(
        self, shapes: Sequence[Shape | StateShape], batch_size: int, *, dtype: torch.dtype, runtime: Runtime
    ) -> None:
        super().__init__([], batch_size)
        self._runtime, self._dtype, self._shapes, self._capacity = runtime, dtype, list(shapes), 0
        self.headers = torch.zeros(len(shapes), 3, dtype=torch.int64)
        self._set_buffers([self._allocate(shape) for shape in self._shapes])

    @cached_property
    def is_recurrent(self) -> bool:
        return any(isinstance(shape, StateShape) for shape in self._shapes)

    def begin(self, num_positions: int) -> None:
        if self.is_recurrent and num_positions > MAX_RECURRENT_BLOCK:
            raise RollbackError(
                f"a block of {num_positions} positions; recurrent layers can roll back at most {MAX_RECURRENT_BLOCK}, "
                "use smaller blocks"
            )
        super().begin(num_positions)
        self.reserve(max(self.lengths) + num_positions)

    def commit(self, counts: Sequence[int]) -> None:
        super().commit(counts)
        if self.is_recurrent:
            self._counts.copy_(torch.tensor(counts))
            self._commit.run()

    def advance(self, counts: Sequence[int]) -> None:
        """Commit positions that native code wrote by itself into reserved memory."""
        assert not self.is_recurrent
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def rollback_to(self, lengths: Sequence[int]) -> None:
        if self.is_recurrent and list(lengths) != self.lengths:
            raise RollbackError("recurrent state cannot be cropped; commit fewer positions of the last block instead")
        super().rollback_to(lengths)

    def reserve(self, num_positions: int) -> None:
        """Ensure capacity for this many positions, moving the contents to larger buffers if necessary."""
        if num_positions <= self._capacity:
            return
        old, wanted = self._capacity, max(num_positions, 2 * self._capacity, _MIN_CAPACITY)
        self._capacity = -(-wanted // _BLOCK) * _BLOCK
        grown = []
        for shape, buffers in zip(self._shapes, self._buffers, strict=True):
            grown.append(buffers if isinstance(shape, StateShape) else self._allocate(shape))
            for target, buffer in zip(grown[-1], buffers, strict=True):
                if target is not buffer:
                    target[:, :, :old] = buffer
        self._set_buffers(grown)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(list(rows))
        self._set_buffers([(first[index], second[index]) for first, second in self._buffers])

    def _allocate(self, shape: Shape | StateShape) -> tuple[Tensor, Tensor]:
        batch_size = len(self.lengths)
        if isinstance(shape, StateShape):
            width = MAX_RECURRENT_BLOCK + shape.kernel - 1
            history = untouched_zeros(batch_size, shape.channels, width, dtype=self._dtype)
            heads, key_size, value_size = shape.state
            size = key_size * value_size + MAX_RECURRENT_BLOCK * (key_size + value_size + 1)
            return untouched_zeros(batch_size, heads, size), history
        heads, *sizes = shape
        keys, values = (untouched_zeros(batch_size, heads, self._capacity, size, dtype=self._dtype) for size in sizes)
        return keys, values

    def _set_buffers(self, buffers: list[tuple[Tensor, Tensor]]) -> None:
        self._buffers = buffers
        headers = [(first.data_ptr(), second.data_ptr(), self._capacity) for first, second in buffers]
        self.headers.copy_(torch.tensor(headers))
        self.allocation = object()
        self._counts, self._commit = torch.zeros(len(self.lengths), dtype=torch.int64), Program(self._runtime)
        for shape, header in zip(self._shapes, self.headers, strict=True):
            if isinstance(shape, StateShape):
                self._add_commit(shape, header)

    def _add_commit(self, shape: StateShape, header: Tensor) -> None:
        """For one layer: advance the state by each sequence's committed positions, move its history to the front."""
        batch_size = len(self.lengths)
        history = [MAX_RECURRENT_BLOCK, shape.kernel, shape.channels, batch_size, _TYPES[self._dtype]]
        state = [MAX_RECURRENT_BLOCK, *shape.state, batch_size]
        assert self._commit.add("commit_state", [self._counts, header[:1]], state)
        assert self._commit.add("commit_history", [self._counts, header[1:2]], history)
