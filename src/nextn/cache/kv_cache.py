"""KV caches with exact rollback, per sequence; their layers are in `attention_layer`, `recurrent` and `family_caches`.

A forward pass writes a *block* of positions provisionally; `KVCache.commit` then makes a prefix of it permanent, per
sequence. Sequences are left-aligned and may differ in length, so cache slot == position, and a prompt is never padded
on the left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from nextn.cache.attention_layer import AttentionLayer, IndexedLayer, Starts, causal
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
        """Let blocks attend to the stored keys and values without storing anything, in this context."""
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
        """Upper bound of the bytes that the cache takes."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def bytes_per_position(self) -> int:
        """Bytes that a position of one sequence takes; known after the first block."""
        return sum(layer.bytes_per_position for layer in self.layers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes that a sequence takes independent of its length; known after the first block."""
        return sum(layer.bytes_per_state for layer in self.layers)

    @property
    def compress_rate(self) -> int:
        """The most positions that share one entry of a layer."""
        return max((getattr(layer, "compress_rate", 1) for layer in self.layers), default=1)

    def limit(self, num_positions: int) -> None:
        """Reserve memory for at most this many positions per sequence; the caller must not exceed them."""
        for layer in self.layers:
            layer.max_slots = num_positions

    def shrink(self) -> None:
        """Free the memory of sequences that left; only caches that keep it do anything."""

    def positions(self, num_positions: int) -> Tensor:
        """Return the positions [B, m] int64 of the next m tokens of each sequence."""
        return torch.tensor(self.lengths, device=self.device)[:, None] + torch.arange(num_positions, device=self.device)

    def mask(self, num_positions: int, *, window: int | None = None, always: bool = False) -> Tensor | None:
        """Return the mask [B, 1, m, slots] bool, True = visible, of the open block; None if attention needs none.

        `window` is the number of positions that a sliding-window layer attends to, including the query's own. `always`
        returns a mask even if none is needed.
        """
        end = max(self.lengths) + num_positions
        is_plain = len(set(self.lengths)) == 1 and num_positions in (1, end) and (window is None or end <= window)
        if is_plain and not always:
            return None
        return causal(self.positions(num_positions), end, window=window)
