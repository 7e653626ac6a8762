"""The cache of a head without keys of its own: the trunk's, which it reads."""

from torch import Tensor

from nextn.cache.attention_layer import AttentionLayer
from nextn.cache.kv_cache import KVCache


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
