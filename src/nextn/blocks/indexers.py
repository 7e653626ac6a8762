"""Cache layers for indexers that count columns in a way of their own. Their rows go apart: all are counted as one."""

import torch
from torch import Tensor

from nextn.rollback import IndexedLayer


class PooledLayer(IndexedLayer):
    """For an indexer that pools columns (GLM-5-Next): it asks for their number when its own are among them."""

    def get_seq_length(self) -> int:
        return self._end


class AngledLayer(IndexedLayer):
    """For a trunk (Qwen4) that puts the positions of all columns into its first indexed layer: they are the columns."""

    @property
    def indexer_position_ids(self) -> Tensor | None:
        start = max(self._starts)
        return torch.arange(start, device=self.device).expand(3, len(self._starts), -1) if start else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None: ...
