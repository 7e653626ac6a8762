"""A cache layer for compressed attention (DeepSeek-V4): keys and values, and one more entry for every few columns.

The compressor's inputs stay column by column, so a rejected column is overwritten like any key and nothing has to be
put back: each pass makes the entries from the shortest row's end on anew, and a query sees those of closed windows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nextn.rollback import AttentionLayer, written


class CompressedLayer(AttentionLayer):
    """rate: columns to an entry. The compressors (`compressor`, `indexer`) each have their own inputs and entries."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.compress_rate = rate
        self._inputs: dict[tuple[str, str], Tensor] = {}
        self._entries: dict[str, Tensor] = {}
        self._first = 0

    def begin(self, lengths: Sequence[int], num_columns: int) -> None:
        super().begin(lengths, num_columns)
        # The window before the first open one goes along, for entries that reach back into it.
        self._first = max(0, min(lengths) // self.compress_rate - 1)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """kv, gate [B, m, dim] of the new columns -> those of all full windows from the first one to make anew."""
        start, end = self._first * self.compress_rate, self._end // self.compress_rate * self.compress_rate
        chunks = []
        for part, states in (("kv", kv), ("gate", gate)):
            slab = written(self._inputs.get((name, part)), states[:, None], self._starts)
            self._inputs[name, part] = slab
            chunks.append(slab[:, 0, start:end])
        return chunks[0], chunks[1], start

    def update_overlap_state(self, name: str, kv: Tensor, gate: Tensor, head_dim: int) -> tuple[None, None]:
        """Nothing: the window before is part of the chunk."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """compressed [B, n, dim]: entries from the first window on -> all entries [B, windows, dim]."""
        if self._first:
            # The first was made without the window before it; it is closed in every row, so the known one stands.
            compressed = torch.cat([self._entries[name][:, : self._first + 1], compressed[:, 1:]], dim=1)
        self._entries[name] = compressed
        return compressed

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._inputs = {key: slab[rows] for key, slab in self._inputs.items()}
        self._entries = {name: entries[rows] for name, entries in self._entries.items()}
