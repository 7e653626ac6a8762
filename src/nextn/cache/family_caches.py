"""Cache layers of single families: compressed attention, attention with short convolutions, particular indexers, and
heads that read the trunk's keys. Also a separate cache per sequence, for layers that take no batch of several lengths.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from nextn.cache.attention_layer import AttentionLayer, IndexedLayer, join_slots, write_states
from nextn.cache.kv_cache import KVCache
from nextn.errors import RollbackError


class CompressedLayer(AttentionLayer):
    """A cache layer for compressed attention (DeepSeek-V4): keys and values, and one entry per `rate` positions.

    The compressor's inputs are kept per position, so a rejected position is overwritten like any key and nothing needs
    to be restored: each pass recomputes the entries from the end of the shortest sequence on, and a query sees those of
    complete groups of positions. The compressors (`compressor`, `indexer`) have separate inputs and entries.
    """

    has_blocks = False

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.compress_rate = rate
        self._inputs: dict[tuple[str, str], Tensor] = {}
        self._entries: dict[str, Tensor] = {}
        self._first = 0

    def begin(self, lengths: Sequence[int], num_positions: int) -> None:
        super().begin(lengths, num_positions)
        # The group before the first incomplete one is included, for entries that reach back into it.
        self._first = max(0, min(lengths) // self.compress_rate - 1)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Store kv and gate [B, m, dim] of the block; return those of all complete groups to recompute."""
        start, end = self._first * self.compress_rate, self._end // self.compress_rate * self.compress_rate
        chunks = []
        for part, states in (("kv", kv), ("gate", gate)):
            buffer = write_states(self._inputs.get((name, part)), states[:, None], self._starts, self.max_slots)
            self._inputs[name, part] = buffer
            chunks.append(buffer[:, 0, start:end])
        return chunks[0], chunks[1], start

    def update_overlap_state(self, name: str, kv: Tensor, gate: Tensor, head_dim: int) -> tuple[None, None]:
        """Do nothing: the group before is part of the chunk."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store the recomputed entries [B, n, dim] and return all entries [B, groups, dim]."""
        if self._first:
            # The first was computed without the group before it. It is complete in every sequence: use the stored one.
            compressed = torch.cat([self._entries[name][:, : self._first + 1], compressed[:, 1:]], dim=1)
        self._entries[name] = compressed
        return compressed

    @property
    def buffers(self) -> list[Tensor]:
        return [*super().buffers, *self._inputs.values()]

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(entries.nbytes for entries in self._entries.values())

    @property
    def bytes_per_position(self) -> int:
        per_entry = sum(entries.shape[-1] * entries.itemsize for entries in self._entries.values())
        return super().bytes_per_position + -(-per_entry // self.compress_rate)

    def select(self, sequences: Tensor) -> None:
        super().select(sequences)
        self._inputs = {key: buffer[sequences] for key, buffer in self._inputs.items()}
        self._entries = {name: entries[sequences] for name, entries in self._entries.items()}

    def append(self, other: AttentionLayer, counts: tuple[int, int]) -> None:
        super().append(other, counts)
        assert isinstance(other, CompressedLayer)
        for key in self._inputs | other._inputs:
            buffer = join_slots([self._inputs.get(key), other._inputs.get(key)], counts)
            assert buffer is not None
            self._inputs[key] = buffer
        for name in self._entries | other._entries:
            parts = [entries.get(name) for entries in (self._entries, other._entries)]
            joined = join_slots([None if part is None else part[:, None] for part in parts], counts)
            assert joined is not None
            self._entries[name] = joined[:, 0]


class ConvolutionLayer(AttentionLayer, LinearAttentionLayer):
    """A cache layer for attention with short convolutions (Inkling): keys, values, and the convolutions' last inputs.

    A convolution's state [B, C, inputs], newest last, is nothing but its last inputs, so it can be moved back as far
    as inputs are stored: `max_rollback` positions.
    """

    has_blocks = False
    conv_states: dict[int, Tensor | None]

    def __init__(self, number_of_states: int, *, max_rollback: int = 0) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        AttentionLayer.__init__(self)
        self.record_past = True  # sends one-token steps through update_conv_state, too
        self._max_rollback = max_rollback
        self._reversible: list[int] = []

    def begin(self, lengths: Sequence[int], num_positions: int) -> None:
        super().begin(lengths, num_positions)
        self._reversible = self._reversible or [0] * len(lengths)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Prepend the kernel's past inputs to those of the block [B, C, m]; before a text they are zeros."""
        past = self.conv_states[state_idx]
        if past is None:
            past = conv_states.new_zeros(*conv_states.shape[:2], int(conv_kernel_size or 0) + self._max_rollback)
        states = self.conv_states[state_idx] = torch.cat([past, conv_states], dim=-1)
        self.has_previous_state[state_idx] = True
        return states[..., self._max_rollback :]

    def update_recurrent_state(self, *args: object, **kwargs: object) -> Tensor:
        raise RollbackError(
            "layers with attention and a recurrent state beside it, as Falcon-H1 and Zamba2 have, cannot be rolled "
            "back exactly; nextn cannot decode with this model"
        )

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(state.nbytes for state in self._states)

    @property
    def bytes_per_state(self) -> int:
        return sum(state[0].nbytes for state in self._states)

    @property
    def _states(self) -> list[Tensor]:
        return [state for state in self.conv_states.values() if state is not None]

    def commit(self, counts: Sequence[int], num_positions: int) -> None:
        self._move(counts, num_positions)
        pairs = zip(self._reversible, counts, strict=True)
        self._reversible = [min(old + count, self._max_rollback) for old, count in pairs]

    def drop(self, counts: Sequence[int]) -> None:
        if any(count > num_reversible for count, num_reversible in zip(counts, self._reversible, strict=True)):
            raise RollbackError(
                f"{max(counts)} positions cannot be rolled back: the convolutions' inputs are stored for "
                f"{self._max_rollback}; use fewer drafts"
            )
        self._move([-count for count in counts], 0)
        self._reversible = [old - count for old, count in zip(self._reversible, counts, strict=True)]

    def select(self, sequences: Tensor) -> None:
        super().select(sequences)
        self._reversible = [self._reversible[row] for row in sequences.tolist()]
        states = self.conv_states.items()
        self.conv_states = {index: None if state is None else state[sequences] for index, state in states}

    def append(self, other: AttentionLayer, counts: tuple[int, int]) -> None:
        super().append(other, counts)
        assert isinstance(other, ConvolutionLayer)
        self._reversible = self._reversible + other._reversible
        for index, state in self.conv_states.items():
            other_state = other.conv_states[index]
            if state is not None and other_state is not None:
                self.conv_states[index] = torch.cat([state, other_state])

    def _move(self, counts: Sequence[int], num_positions: int) -> None:
        """Let each sequence's inputs end counts[row] positions later than before the block of num_positions."""
        for index, state in self.conv_states.items():
            if state is not None:
                width = state.shape[-1] - num_positions
                ends = torch.tensor(counts, device=state.device)[:, None] + torch.arange(width, device=state.device)
                # Values clamped on the left are arbitrary; `drop` never goes back that far.
                indices = ends.clamp(min=0)[:, None].expand(-1, state.shape[1], -1)
                self.conv_states[index] = state.gather(-1, indices)


class PooledLayer(IndexedLayer):
    """For an indexer that pools positions (GLM-5-Next): it asks for their number after adding its own.

    Sequences of different lengths need separate caches: the indexer counts all from one offset.
    """

    def get_seq_length(self) -> int:
        return self._end


class RotaryIndexedLayer(IndexedLayer):
    """For a trunk (Qwen4) that stores all position ids in its first indexed layer: they equal the slots' indices.

    Sequences of different lengths need separate caches here, too.
    """

    @property
    def indexer_position_ids(self) -> Tensor | None:
        start = max(self._starts)
        return torch.arange(start, device=self.device).expand(3, len(self._starts), -1) if start else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None: ...


class TrunkKV(KVCache):
    """A view of the trunk's cache for a head that reads its keys and values, and stores nothing.

    `lengths` counts the positions that the head has run, as with a cache of its own, so blocks, rollback and refreshes
    are the same; the trunk has seen these positions before.
    """

    has_blocks = True  # of nothing: all that later positions depend on is in the trunk's

    def __init__(self, trunk: KVCache | None, batch_size: int) -> None:
        """Create a view at position 0. trunk: The trunk's cache; None for a view that is only measured."""
        super().__init__([], batch_size, device="cpu" if trunk is None else trunk.device)
        self.trunk = trunk

    def keys_and_values(self, layer: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, heads, num_positions, dim] of one of the trunk's layers."""
        assert self.trunk is not None
        states: AttentionLayer = self.trunk.layers[layer]
        return states.keys[:, :, :num_positions], states.values[:, :, :num_positions]


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
