"""KV caches with exact rollback, per sequence, and their layers of keys and values; `recurrent` has the other states.

A forward pass writes a *block* of positions provisionally; `KVCache.commit` then makes a prefix of it permanent, per
sequence. Sequences are left-aligned and may differ in length, so cache slot == position, and a prompt is never padded
on the left.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from nextn.cache.recurrent import RecurrentLayer
from nextn.errors import RollbackError

# The argument of transformers' decoders and their layers that takes a cache.
CACHE_ARGUMENT = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"

# For each layer, the cached tensors of a range of positions, or for recurrent layers the states after the last one.
CacheBlock = list[tuple[Tensor, ...]]


class _Layer(Protocol):
    def begin(self, lengths: Sequence[int], num_positions: int) -> None: ...
    def commit(self, counts: Sequence[int], num_positions: int) -> None: ...
    def drop(self, counts: Sequence[int]) -> None: ...
    def select(self, sequences: Tensor) -> None: ...
    def append(self, other: "_Layer", counts: tuple[int, int]) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def bytes_per_position(self) -> int: ...
    @property
    def bytes_per_state(self) -> int: ...


class AttentionLayer(CacheLayerMixin):
    """Keys and values [B, heads, slots, dim] in buffers that double when full; a rejected slot is overwritten.

    Sliding-window layers use it as well: the window is applied by the mask, so the slots that a rollback needs still
    exist.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    has_blocks = True  # whether keys and values are all that is cached
    is_initialized: bool
    keys: Tensor
    values: Tensor
    is_frozen = False  # a block reads what is stored, and stores nothing
    max_slots = sys.maxsize  # buffers grow by doubling, but not beyond this unless they must

    def __init__(self) -> None:
        super().__init__()
        self._starts: Sequence[int] = ()
        self._end = 0

    def begin(self, lengths: Sequence[int], num_positions: int) -> None:
        self._starts, self._end = lengths, max(lengths) + num_positions

    def commit(self, counts: Sequence[int], num_positions: int) -> None:
        """Do nothing: the slots beyond a sequence's length are masked and overwritten."""

    def drop(self, counts: Sequence[int]) -> None:
        """Do nothing, for the same reason."""

    def select(self, sequences: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[sequences], self.values[sequences]

    def append(self, other: "AttentionLayer", counts: tuple[int, int]) -> None:
        """Add the sequences of another layer after this one's. counts: the number of sequences of each."""
        keys, values = (
            join_slots([getattr(layer, name) if layer.is_initialized else None for layer in (self, other)], counts)
            for name in ("keys", "values")
        )
        if keys is not None and values is not None:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values

    def read_block(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Copy the written slots in [start, end); empty if the layer was never used."""
        return tuple(buffer[:, :, start:end].clone() for buffer in self.buffers)

    def write_block(self, start: int, block: tuple[Tensor, ...]) -> None:
        if block:
            self.begin([start], block[0].shape[2])
            self.update(*block)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.is_frozen:
            return self.keys[:, :, : self._end], self.values[:, :, : self._end]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = write_states(self.keys, key_states, self._starts, self.max_slots)
        self.values = write_states(self.values, value_states, self._starts, self.max_slots)
        return self.keys[:, :, : self._end], self.values[:, :, : self._end]

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers [B, heads, slots, dim]; none before the first block."""
        return [self.keys, self.values] if self.is_initialized else []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def bytes_per_position(self) -> int:
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.itemsize for buffer in self.buffers)

    @property
    def bytes_per_state(self) -> int:
        return 0

    def get_seq_length(self) -> int:
        return max(self._starts, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class IndexedLayer(AttentionLayer):
    """Keys and values, and the keys [B, slots, dim] by which an indexer selects the positions to attend to."""

    has_blocks = False
    _index: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Do the same under MiniMax-M3's name, with an axis of one head: [B, 1, m, dim]."""
        if self.is_frozen and self._index is not None:
            return self._index[:, :, : self._end]
        self._index = write_states(self._index, idx_k, self._starts, self.max_slots)
        return self._index[:, :, : self._end]

    def select(self, sequences: Tensor) -> None:
        super().select(sequences)
        self._index = None if self._index is None else self._index[sequences]

    def append(self, other: AttentionLayer, counts: tuple[int, int]) -> None:
        super().append(other, counts)
        assert isinstance(other, IndexedLayer)
        self._index = join_slots([self._index, other._index], counts)

    @property
    def buffers(self) -> list[Tensor]:
        return [*super().buffers, *([] if self._index is None else [self._index])]


def write_states(buffer: Tensor | None, states: Tensor, starts: Sequence[int], max_slots: int) -> Tensor:
    """Write states [B, heads, m, dim] into slots starts[seq], ... of buffer [B, heads, capacity, dim].

    Returns the buffer, or a larger one if they did not fit: do not use the one passed in again. It has more than
    max_slots only where the states need them.
    """
    buffer = states[:, :, :0] if buffer is None else buffer
    num_positions = states.shape[2]
    if (end := max(starts) + num_positions) > buffer.shape[2]:
        # Zeros, not garbage: a masked slot still meets 0 * value in the weighted sum, and 0 * NaN is NaN.
        capacity = max(end, min(max(2 * buffer.shape[2], 64), max_slots))
        grown = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
        grown[:, :, : buffer.shape[2]] = buffer
        buffer = grown
    if len(set(starts)) == 1:
        buffer[:, :, starts[0] : end] = states
    else:
        # One operation for all sequences where each waits for its launch; copies are faster on CPUs.
        write = write_each if buffer.device.type == "cpu" else write_indexed
        write(buffer, states, starts)
    return buffer


def write_each(buffer: Tensor, states: Tensor, starts: Sequence[int]) -> None:
    """Write states [B, heads, m, dim] into slots starts[seq], ... of buffer [B, heads, capacity, dim]."""
    for seq, start in enumerate(starts):
        buffer[seq, :, start : start + states.shape[2]] = states[seq]


def write_indexed(buffer: Tensor, states: Tensor, starts: Sequence[int]) -> None:
    """Write the states as `write_each` does, in one operation."""
    starts = starts if isinstance(starts, Starts) else Starts(starts)
    buffer[starts.indices(states.shape[2], buffer.device)] = states.transpose(1, 2)


class Starts(tuple[int, ...]):
    """The slots where a block begins in each sequence, with the indices that all layers of a GPU write at."""

    def indices(self, num_positions: int, device: torch.device) -> tuple[Tensor, slice, Tensor]:
        """Return indices of slots [B, m] of buffers [B, heads, capacity, dim]. They are copied to a device once."""
        made = self.__dict__.setdefault("made", {})
        if (num_positions, device) not in made:
            sequences = torch.arange(len(self), device=device)[:, None]
            slots = torch.tensor(self, device=device)[:, None] + torch.arange(num_positions, device=device)
            made[num_positions, device] = sequences, slice(None), slots
        return made[num_positions, device]


def join_slots(buffers: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor | None:
    """Concatenate the sequences of buffers [B, heads, slots, dim], padded with zeros to as many slots.

    counts: the number of sequences of each. None is a buffer that nothing was written to.
    """
    written = [buffer for buffer in buffers if buffer is not None]
    if not written:
        return None
    _, heads, _, width = written[0].shape
    slots = max(buffer.shape[2] for buffer in written)
    parts = zip(buffers, counts, strict=True)
    full = [written[0].new_zeros(count, heads, 0, width) if buffer is None else buffer for buffer, count in parts]
    return torch.cat([F.pad(buffer, (0, 0, 0, slots - buffer.shape[2])) for buffer in full])


class KVCache(TransformersCache):
    """One cache over all layers; `lengths` holds the number of committed positions of each sequence.

    Use: `begin(m)`, run m positions through the model, `commit(counts)` with 0 <= counts[seq] <= m.
    """

    def __init__(self, layers: Sequence[_Layer], batch_size: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=list(layers))
        self.lengths = [0] * batch_size
        self.device = torch.device(device)
        self._block = 0

    @property
    def is_recurrent(self) -> bool:
        return any(isinstance(layer, RecurrentLayer) for layer in self.layers)

    @property
    def has_blocks(self) -> bool:
        """Whether `read_block` copies everything that later positions depend on."""
        return bool(self.layers) and all(getattr(layer, "has_blocks", False) for layer in self.layers)

    def read_block(self, start: int, end: int) -> CacheBlock:
        """Copy positions [start, end) of the only sequence.

        For recurrent layers, copy the state after the last committed position, which must be `end - 1`.
        """
        return [layer.read_block(start, end) for layer in self.layers]

    def write_block(self, start: int, end: int, block: CacheBlock) -> None:
        """Write a block that `read_block` returned; the only sequence then has `end` positions."""
        for layer, part in zip(self.layers, block, strict=True):
            layer.write_block(start, part)
        self.lengths = [end]

    def begin(self, num_positions: int) -> None:
        """Open a block of num_positions provisional positions after each sequence's last one."""
        assert not self._block, "the last block was not closed with commit()"
        self._block, starts = num_positions, Starts(self.lengths)
        for layer in self.layers:
            layer.begin(starts, num_positions)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let blocks inside the context read what is stored at their positions, and store nothing."""
        for layer in self.layers:
            if type(layer) not in (AttentionLayer, IndexedLayer):
                raise RollbackError(f"a {type(layer).__name__} of a cache cannot be read without storing")
            layer.is_frozen = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer.is_frozen = False

    def commit(self, counts: Sequence[int]) -> None:
        """Close the block: make the first counts[seq] positions permanent and undo the rest. Raises RollbackError."""
        assert len(counts) == len(self.lengths)
        assert all(0 <= count <= self._block for count in counts)
        for layer in self.layers:
            layer.commit(counts, self._block)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._block = 0

    def rollback_to(self, lengths: Sequence[int]) -> None:
        """Drop committed positions beyond these lengths. Raises RollbackError where a layer's state is gone."""
        counts = [old - new for new, old in zip(lengths, self.lengths, strict=True)]
        assert min(counts) >= 0
        for layer in self.layers if any(counts) else ():
            layer.drop(counts)
        self.lengths = list(lengths)

    def select(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences (indices) of the batch, in this order."""
        index = torch.tensor(list(sequences), device=self.device)
        for layer in self.layers:  # which may be on other devices
            layer.select(index.to(getattr(layer, "device", None) or self.device))
        self.lengths = [self.lengths[seq] for seq in sequences]

    def joined(self, other: "KVCache") -> "KVCache":
        """Return a cache with the sequences of this one, then those of the other; neither may be used any more."""
        counts = len(self.lengths), len(other.lengths)
        for layer, others in zip(self.layers, other.layers, strict=True):
            layer.append(others, counts)
        self.lengths = self.lengths + other.lengths
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes at most."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def bytes_per_position(self) -> int:
        """Bytes that a position of one sequence takes; known after the first block."""
        return sum(layer.bytes_per_position for layer in self.layers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes that a sequence takes whatever its length; known after the first block."""
        return sum(layer.bytes_per_state for layer in self.layers)

    @property
    def compress_rate(self) -> int:
        """The most positions that share one entry of a layer."""
        return max((getattr(layer, "compress_rate", 1) for layer in self.layers), default=1)

    def limit(self, num_positions: int) -> None:
        """Reserve no memory beyond this many positions per sequence, which are all that it will hold."""
        for layer in self.layers:
            layer.max_slots = num_positions

    def shrink(self) -> None:
        """Give back the memory of sequences that left, where a cache keeps it."""

    def positions(self, num_positions: int) -> Tensor:
        """Return the positions [B, m] int64 of the next m tokens of each sequence."""
        return torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(num_positions, device=self.device)

    def mask(self, num_positions: int, *, window: int | None = None, always: bool = False) -> Tensor | None:
        """Return the attention mask of the open block.

        Args:
            num_positions: m, the block's size.
            window: Positions that a sliding-window layer sees, the query's own included.
            always: Return a mask even where causal attention needs none.

        Returns:
            [B, 1, m, slots] bool, True = visible; None where causal attention needs no mask.
        """
        end = max(self.lengths) + num_positions
        is_plain = len(set(self.lengths)) == 1 and num_positions in (1, end) and (window is None or end <= window)
        if is_plain and not always:
            return None
        return causal(self.positions(num_positions), end, window=window)


class PerSequenceCache(KVCache):
    """A separate cache per sequence: for attention that cannot take sequences of different lengths in one pass."""

    def __init__(self, sequences: Sequence[KVCache]) -> None:
        super().__init__([], len(sequences))
        self.sequences = list(sequences)
        self._measure()

    def commit(self, counts: Sequence[int]) -> None:
        for cache, count in zip(self.sequences, counts, strict=True):
            cache.commit([count])
        self._measure()

    def rollback_to(self, lengths: Sequence[int]) -> None:
        for cache, length in zip(self.sequences, lengths, strict=True):
            cache.rollback_to([length])
        self._measure()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with ExitStack() as stack:
            for cache in self.sequences:
                stack.enter_context(cache.frozen())
            yield

    def select(self, sequences: Sequence[int]) -> None:
        self.sequences = [self.sequences[seq] for seq in sequences]
        self._measure()

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self.sequences)

    @property
    def bytes_per_position(self) -> int:
        return max((cache.bytes_per_position for cache in self.sequences), default=0)

    @property
    def bytes_per_state(self) -> int:
        return max((cache.bytes_per_state for cache in self.sequences), default=0)

    @property
    def compress_rate(self) -> int:
        return max((cache.compress_rate for cache in self.sequences), default=1)

    def limit(self, num_positions: int) -> None:
        for cache in self.sequences:
            cache.limit(num_positions)

    def joined(self, other: KVCache) -> KVCache:
        assert isinstance(other, PerSequenceCache)
        return PerSequenceCache([*self.sequences, *other.sequences])

    def _measure(self) -> None:
        self.lengths = [cache.lengths[0] for cache in self.sequences]


def causal(queries: Tensor, num_positions: int, *, window: int | None = None) -> Tensor:
    """Return the causal mask [B, 1, m, num_positions] bool, True = visible, of queries at positions [B, m]."""
    queries = queries[:, None, :, None]
    keys = torch.arange(num_positions, device=queries.device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
