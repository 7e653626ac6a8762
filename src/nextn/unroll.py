"""What a chain of drafts attends to, for the chains of all columns at once: for training and measuring as decoding is.

A chain that leaves column i sees the keys of the last module's columns j <= i, and those of its own depths before. Keys
of the depths lie one block behind the other: the columns of depth `first`, then those of each depth beyond it.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin


class _Blocks(CacheLayerMixin):
    """Keys and values [B, heads, columns, dim] of the depths so far; joined anew, so that gradients reach them all."""

    is_compileable = False
    is_sliding = False
    keys: Tensor
    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        else:
            self.lazy_initialization(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class BlockCache(TransformersCache):
    """Keys and values of one unrolled pass, of every layer of the head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Blocks() for _ in range(num_layers)])


def chain_mask(
    length: int,
    first: int,
    depth: int,
    *,
    window: int | None = None,
    within: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """-> bool [B or 1, 1, T - depth, keys], True = may be seen by depth `depth` of the chains of length = T columns.

    first: the depth whose columns all later chains see. window: columns that a sliding layer sees, its own included.
    within [B, 1, T, T]: what a column may see of its own document and before it.
    """
    columns = length - depth
    place = torch.arange(length - first, device=device)
    chain = place[:columns, None]
    seen = place <= chain
    if window is not None:
        seen = seen & (place > chain + depth - first - window)
    blocks = [seen if within is None else seen & within[:, 0, :columns, : length - first]]
    for other in range(first + 1, depth + 1):
        own = place[: length - other] == chain
        own = own if window is None or depth - other < window else torch.zeros_like(own)
        blocks.append(own if within is None else own.expand(len(within), -1, -1))
    return torch.cat(blocks, dim=-1).reshape(-1, 1, columns, sum(block.shape[-1] for block in blocks))
