"""Layers of a cache that hold keys and values; `recurrent` has the other states."""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class FullCacheLayer(CacheLayerMixin):
    """What transformers asks of a layer that holds the keys and values of all positions."""

    is_compileable = False
    is_sliding = False
    is_initialized: bool
    is_frozen = False  # a pass reads what is stored, and stores nothing
    keys: Tensor
    values: Tensor

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class AttentionLayer(FullCacheLayer):
    """Keys and values [B, heads, slots, dim] in buffers that double when full; a rejected slot is overwritten.

    Sliding-window layers use it as well: the window is applied by the mask, so the slots that a rollback needs still
    exist.
    """

    is_croppable = True
    has_blocks = True  # whether keys and values are all that is cached
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


class IndexedLayer(AttentionLayer):
    """Keys and values, and the keys [B, slots, dim] by which an indexer selects the positions to attend to."""

    has_blocks = False
    _index: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Update the index keys under the name that MiniMax-M3 calls, with an axis of one head: [B, 1, m, dim]."""
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
        made: dict[object, tuple[Tensor, slice, Tensor]] = self.__dict__.setdefault("made", {})
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


def causal(queries: Tensor, num_positions: int, *, window: int | None = None) -> Tensor:
    """Return the causal mask [B, 1, m, num_positions] bool, True = visible, of queries at positions [B, m]."""
    queries = queries[:, None, :, None]
    keys = torch.arange(num_positions, device=queries.device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def packed(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions [B, T], counted from each document's start, and a mask [B, 1, T, T], causal inside it."""
    indices = torch.arange(documents.shape[1], device=documents.device)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = indices - torch.where(starts, indices, 0).cummax(dim=1).values
    is_same = documents[:, :, None] == documents[:, None, :]
    return positions, (is_same & (indices[:, None] >= indices))[:, None]
