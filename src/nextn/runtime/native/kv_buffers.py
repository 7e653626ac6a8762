"""The cache of the native backend: buffers that native ops write and read in place.

It follows the protocol of `KVCache`: a block is written after each sequence's length, and `commit` makes a prefix of it
permanent.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from nextn.cache.family_caches import TrunkKV
from nextn.cache.kv_cache import CacheBlock, KVCache
from nextn.errors import RollbackError
from nextn.runtime.native.abi import Program, Runtime
from nextn.runtime.native.memory import untouched_zeros
from nextn.runtime.native.trace_hooks import MAX_RECURRENT_BLOCK, Shape, StateShape

_BLOCK = 32  # capacities are multiples of the positions that native attention processes at once
_MIN_CAPACITY = 256
_SCALE_BYTES = 8  # of a position and kv head in int8: two scales in fp32
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class KVBuffers(KVCache):
    """Keys and values of attention layers, states of recurrent layers.

    An attention layer has keys and values [B, heads, capacity, size]; the order within 32 positions is up to the kernel
    (csrc/attention_*.cpp). In int8, the keys have eight more bytes per position: its two scales. A recurrent layer has
    states [B, heads, key size * value size + MAX_RECURRENT_BLOCK * (key size + value size + 1)] in fp32: the state
    before the block, and what its positions change in it; and the inputs of its convolution [B, channels,
    MAX_RECURRENT_BLOCK + kernel - 1]. The buffers may have more rows than sequences.

    Attributes:
        headers: [layers, 3] int64, the addresses of a layer's two buffers and their capacity.
        allocation: An object that is replaced whenever the headers change.
    """

    def __init__(
        self,
        shapes: Sequence[Shape | StateShape],
        batch_size: int,
        *,
        dtype: torch.dtype,
        runtime: Runtime,
        int8: bool = False,
    ) -> None:
        """`dtype`: of hidden states, and of keys and values unless `int8`."""
        super().__init__([], batch_size)
        self._runtime, self._dtype, self._shapes, self._capacity = runtime, dtype, list(shapes), 0
        self._kv_dtype, self._scales = (torch.int8, _SCALE_BYTES) if int8 else (dtype, 0)
        self.headers = torch.zeros(len(shapes), 3, dtype=torch.int64)
        self._max_sequences = batch_size  # that the buffers have memory for
        self._most_positions, self._most_sequences = 0, batch_size  # since they were allocated; others are untouched
        self._buffers = [self._allocate(shape) for shape in self._shapes]
        self._bind()

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
        self._most_positions = max(self._most_positions, self._used)
        super().commit(counts)
        if self.is_recurrent:
            self._counts.copy_(torch.tensor(counts))
            self._commit.run()

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [B, heads, T, size] of a layer to the first positions, which are reserved."""
        views = [keys.to(self._dtype), values.to(self._dtype), torch.zeros(len(keys), dtype=torch.int64)]
        self._runtime.call("store_kv", [*views, self.headers[layer]], [int(self._kv_dtype is torch.int8)])

    def advance(self, counts: Sequence[int]) -> None:
        """Commit positions that native code wrote by itself into reserved memory."""
        assert not self.is_recurrent
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._most_positions = max(self._most_positions, self._used)

    def rollback_to(self, lengths: Sequence[int]) -> None:
        if self.is_recurrent and list(lengths) != self.lengths:
            raise RollbackError("recurrent state cannot be cropped; commit fewer positions of the last block instead")
        super().rollback_to(lengths)

    def reserve(self, num_positions: int) -> None:
        """Ensure capacity for this many positions, moving the contents to larger buffers if necessary."""
        if num_positions <= self._capacity:
            return
        self._reallocate(self._max_sequences, max(num_positions, 2 * self._capacity, _MIN_CAPACITY))

    def select(self, rows: Sequence[int]) -> None:
        rows = list(rows)
        moves = [(target, source) for target, source in enumerate(rows) if target != source]
        if len(set(rows)) == len(rows) and all(target < source for target, source in moves):
            for first, second in self._slices(self._used):
                for target, source in moves:  # in place: what is still needed is never written before
                    first[target], second[target] = first[source], second[source]
        else:
            index = torch.tensor(rows)
            self._buffers = [(first[index], second[index]) for first, second in self._buffers]
            self._max_sequences = len(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self._bind()

    def joined(self, other: KVCache) -> KVCache:
        """Copy the sequences of another cache after this one's; their memory is used again once they leave."""
        assert isinstance(other, KVBuffers)
        num_old, total = len(self.lengths), len(self.lengths) + len(other.lengths)
        if total > self._max_sequences or other._capacity > self._capacity:
            rows = self._max_sequences if total <= self._max_sequences else max(total, 2 * self._max_sequences)
            self._reallocate(rows, max(self._capacity, other._capacity))
        self.lengths = self.lengths + other.lengths
        used = other._used
        for target, source in zip(self._slices(used), other._slices(used), strict=True):
            for mine, theirs in zip(target, source, strict=True):
                mine[num_old:total] = theirs[: len(other.lengths)]
        self._bind()
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the buffers take at most; pages that were never written take none."""
        return self._most_sequences * (self._most_positions * self.bytes_per_position + self.bytes_per_state)

    def shrink(self) -> None:
        if self.num_bytes > len(self.lengths) * (self._used * self.bytes_per_position + self.bytes_per_state):
            self._reallocate(len(self.lengths), self._used)

    @property
    def bytes_per_position(self) -> int:
        """Bytes that a position of one sequence takes in all attention layers."""
        widths = [heads * (key + self._scales + value) for heads, key, value in self._attention_shapes]
        return sum(widths) * self._kv_dtype.itemsize

    @property
    def bytes_per_state(self) -> int:
        """Bytes that a sequence takes in all recurrent layers, whatever its length."""
        pairs = zip(self._shapes, self._buffers, strict=True)
        return sum(part[0].nbytes for shape, both in pairs if isinstance(shape, StateShape) for part in both)

    @property
    def _attention_shapes(self) -> list[Shape]:
        return [shape for shape in self._shapes if not isinstance(shape, StateShape)]

    has_blocks = True

    def read_block(self, start: int, end: int) -> CacheBlock:
        """Copy positions [start, end) of the only sequence, both multiples of 32. See `KVCache.read_block`."""
        return [(first[0].clone(), second[0].clone()) for first, second in self._parts(start, end)]

    def write_block(self, start: int, end: int, block: CacheBlock) -> None:
        self.reserve(end)
        for (first, second), (keys, values) in zip(self._parts(start, end), block, strict=True):
            first[0], second[0] = keys, values
        self.lengths = [end]
        self._most_positions = max(self._most_positions, self._used)

    def _parts(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Views of what a block consists of: of recurrent layers, the states without what a round adds to them."""
        parts = []
        for shape, (first, second) in zip(self._shapes, self._buffers, strict=True):
            if isinstance(shape, StateShape):
                _, key_size, value_size = shape.state
                parts.append((first[..., : key_size * value_size], second[:, : shape.kernel - 1]))
            else:
                parts.append((first[:, :, start:end], second[:, :, start:end]))
        return parts

    @property
    def _used(self) -> int:
        """Positions that hold something, those of an open block included."""
        used = max(self.lengths, default=0) + self._block
        return min(-(-used // _BLOCK) * _BLOCK, self._capacity)

    def _slices(self, num_positions: int) -> list[tuple[Tensor, Tensor]]:
        """The first positions of every attention layer's buffers; the buffers of recurrent layers as they are."""
        return [
            buffers
            if isinstance(shape, StateShape)
            else (buffers[0][:, :, :num_positions], buffers[1][:, :, :num_positions])
            for shape, buffers in zip(self._shapes, self._buffers, strict=True)
        ]

    def _reallocate(self, max_sequences: int, capacity: int) -> None:
        """Move the contents to buffers for this many sequences and at least this many positions."""
        used, num_old, rows = self._used, self._max_sequences, len(self.lengths)
        self._max_sequences, self._capacity = max_sequences, -(-capacity // _BLOCK) * _BLOCK
        self._most_positions, self._most_sequences = used, rows
        for layer, shape in enumerate(self._shapes):  # each is freed before the next one is copied
            if isinstance(shape, StateShape) and num_old == max_sequences:
                continue
            old, self._buffers[layer] = self._buffers[layer], self._allocate(shape)
            for target, source in zip(self._buffers[layer], old, strict=True):
                if isinstance(shape, StateShape):
                    target[:rows] = source[:rows]
                else:
                    target[:rows, :, :used] = source[:rows, :, :used]
        self._bind()

    def _allocate(self, shape: Shape | StateShape) -> tuple[Tensor, Tensor]:
        batch_size = self._max_sequences
        if isinstance(shape, StateShape):
            width = MAX_RECURRENT_BLOCK + shape.kernel - 1
            history = untouched_zeros(batch_size, width, shape.channels, dtype=self._dtype)
            heads, key_size, value_size = shape.state
            size = key_size * value_size + MAX_RECURRENT_BLOCK * (key_size + value_size + 1)
            return untouched_zeros(batch_size, heads, size), history
        heads, key_size, value_size = shape
        keys, values = (
            untouched_zeros(batch_size, heads, self._capacity, size, dtype=self._kv_dtype)
            for size in (key_size + self._scales, value_size)
        )
        return keys, values

    def _bind(self) -> None:
        """Write the addresses for the passes, and build the program that commits blocks of this many sequences."""
        self._most_sequences = max(self._most_sequences, len(self.lengths))
        headers = [(first.data_ptr(), second.data_ptr(), self._capacity) for first, second in self._buffers]
        self.headers.copy_(torch.tensor(headers))
        self.allocation = object()
        self._counts, self._commit = torch.zeros(len(self.lengths), dtype=torch.int64), Program(self._runtime)
        for shape, header in zip(self._shapes, self.headers, strict=True):
            if isinstance(shape, StateShape):
                self._add_commit(shape, header)

    def _add_commit(self, shape: StateShape, header: Tensor) -> None:
        """Advance one layer's state by each sequence's committed positions, and move its history to the front."""
        batch_size = len(self.lengths)
        history = [MAX_RECURRENT_BLOCK, shape.kernel, shape.channels, batch_size, _TYPES[self._dtype]]
        state = [MAX_RECURRENT_BLOCK, *shape.state, batch_size]
        assert self._commit.add("commit_state", [self._counts, header[:1]], state)
        assert self._commit.add("commit_history", [self._counts, header[1:2]], history)


class TrunkBuffers(TrunkKV):
    """A view of the trunk's buffers for a head that reads some of its layers, and stores nothing."""

    def __init__(self, trunk: KVBuffers | None, batch_size: int, layers: Sequence[int]) -> None:
        super().__init__(trunk, batch_size)
        self._layers = list(layers)

    @property
    def _buffers(self) -> KVBuffers:
        assert isinstance(self.trunk, KVBuffers)
        return self.trunk

    @property
    def headers(self) -> Tensor:
        return self._buffers.headers[self._layers]

    @property
    def allocation(self) -> object:
        return self._buffers.allocation

    def reserve(self, num_positions: int) -> None:
        """Reserve slots, see `KVBuffers.reserve`; a padded block reads beyond the last position."""
        self._buffers.reserve(num_positions)

    def advance(self, counts: Sequence[int]) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
