"""Keys, values and masks of draft chains from all positions at once, so that training and scoring match decoding.

A chain that starts at position i sees the last MTP layer's keys at positions j <= i, and those of its own earlier
depths. The keys are stored depth after depth: the positions of depth `first`, then those of each depth beyond it.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from nextn.cache.attention_layer import FullCacheLayer


class _RolloutLayer(FullCacheLayer):
    """Keys and values [B, heads, keys, dim] of the depths so far; concatenated out of place, so that gradients flow."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.is_frozen:
            return self.keys, self.values
        if self.is_initialized:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        else:
            self.lazy_initialization(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0


class RolloutCache(TransformersCache):
    """Keys and values of one rollout, for every layer of the head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_RolloutLayer() for _ in range(num_layers)])

    def freeze(self) -> None:
        """Let all further depths read what is stored so far."""
        for layer in self.layers:
            layer.is_frozen = True


def chain_mask(
    length: int,
    first: int,
    depth: int,
    *,
    window: int | None = None,
    within: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the mask [B or 1, 1, T - depth, keys] bool, True = visible, of one depth of all positions' chains.

    All later depths see the positions of depth `first`. `window` positions are seen by a sliding-window layer, the
    query's own included. `within` [B, 1, T, T] bool is what a position sees of its own document and before it.
    """
    num_chains = length - depth
    keys = torch.arange(length - first, device=device)
    chains = keys[:num_chains, None]
    visible = keys <= chains
    if window is not None:
        visible = visible & (keys > chains + depth - first - window)
    masks = [visible if within is None else visible & within[:, 0, :num_chains, : length - first]]
    for other in range(first + 1, depth + 1):
        own = keys[: length - other] == chains
        own = own if window is None or depth - other < window else torch.zeros_like(own)
        masks.append(own if within is None else own.expand(len(within), -1, -1))
    return torch.cat(masks, dim=-1).reshape(-1, 1, num_chains, sum(mask.shape[-1] for mask in masks))
