"""What the layers of a model are: how each attends, and what keeps its state between columns and puts it back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DummyLayer, get_layer_types_and_kwargs

from nextn.blocks.compressed import CompressedLayer
from nextn.blocks.convolution import ConvolutionLayer
from nextn.blocks.indexers import AngledLayer, PooledLayer
from nextn.errors import RollbackError
from nextn.rollback import Apart, AttentionLayer, Cache, IndexedLayer, RecurrentLayer

_FULL, _SLIDING, _INDEXED = "full_attention", "sliding_attention", "indexed_attention"
_BLOCKWISE = "minimax_m3_sparse"  # an indexer that picks blocks of columns, counted from column 0
_RECURRENT = ("linear_attention", "conv")
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
# What transformers tells attention that changes nothing of its result beside the mask.
IDLE = {"position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "sliding_window"}
IDLE |= {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"}
# Attention whose layers have convolutions beside it -> what transformers calls its mask.
_HYBRID = {"hybrid": _FULL, "hybrid_sliding": _SLIDING}


@dataclass(frozen=True)
class Kind:
    """How a decoder layer attends. window: columns that a sliding layer sees, its own included; None = all before.
    states: how many of convolutions or recurrences it has. rate: columns to an entry where attention is compressed.
    pool: columns to a pool where an indexer picks pools. angled: an indexer turns all columns' keys each time."""

    name: str = _FULL
    window: int | None = None
    states: int = 1
    rate: int = 0
    pool: int = 0
    angled: bool = False

    @property
    def is_recurrent(self) -> bool:
        return self.name in _RECURRENT

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are all that it keeps between columns."""
        return self.name in (_FULL, _SLIDING) and not (self.rate or self.goes_apart)

    @property
    def can_pack(self) -> bool:
        """Whether a mask and positions alone keep the documents of a row apart."""
        return not (self.is_recurrent or self.rate or self.goes_apart or self.name == _BLOCKWISE)

    @property
    def is_indexed(self) -> bool:
        """Whether an indexer picks single columns; it wants a mask even where all may be seen."""
        return self.name == _INDEXED

    @property
    def goes_apart(self) -> bool:
        """Whether rows of different lengths cannot go together: transformers counts all from one offset."""
        return self.name in _HYBRID or bool(self.pool) or self.angled


class _IdleLayer(DummyLayer):
    """A decoder layer without state."""

    def begin(self, lengths: object, num_columns: int) -> None: ...
    def keep(self, counts: object, num_columns: int) -> None: ...
    def drop(self, counts: object) -> None: ...
    def select(self, rows: Tensor) -> None: ...


def kinds_of(config: PreTrainedConfig) -> list[Kind]:
    """How each decoder layer of this config attends."""
    # A block's config may name more layers than it has.
    kinds = [_kind(name, options) for name, options in zip(*get_layer_types_and_kwargs(config), strict=False)]
    pool, angled = getattr(config, "index_kpool", 0), hasattr(config, "indexer_compress_ratio")
    return [replace(kind, pool=pool, angled=angled) if kind.is_indexed else kind for kind in kinds]


def _kind(name: str, options: Mapping[str, Any]) -> Kind:
    if name in _COMPRESSED:
        config = options["config"]
        return Kind(name, config.sliding_window, rate=config.compress_rates[name])
    return Kind(name, options.get("sliding_window"), options.get("number_of_states", 1))


def masks_of(kinds: Sequence[Kind], mask: Callable[[Kind], Tensor | None]) -> object:
    """What a decoder of these layers takes as its mask: the one of all, or one under each name that it asks for."""
    masks = {_HYBRID.get(kind.name, kind.name): None if kind.is_recurrent else mask(kind) for kind in set(kinds)}
    if any(kind.name in _HYBRID for kind in kinds):
        masks |= dict.fromkeys({*_HYBRID.values(), "linear_attention"} - masks.keys())
    return masks if len(masks) > 1 else next(iter(masks.values()))


def new_cache(kinds: Sequence[Kind], batch_size: int, *, device: torch.device, spare: int = 0) -> Cache:
    """An empty cache for layers of these kinds. spare: how many columns that stood it can drop at most, where that
    takes memory. Raises RollbackError for a kind that cannot be put back exactly."""
    if batch_size > 1 and any(kind.goes_apart for kind in kinds):
        return Apart([new_cache(kinds, 1, device=device, spare=spare) for _ in range(batch_size)])
    return Cache([_layer_of(kind, spare) for kind in kinds], batch_size, device=device)


def _layer_of(kind: Kind, spare: int) -> AttentionLayer | RecurrentLayer | _IdleLayer:
    if kind.name in (_FULL, _SLIDING):
        return AttentionLayer()
    if kind.pool:
        return PooledLayer()
    if kind.angled:
        return AngledLayer()
    if kind.name in (_INDEXED, _BLOCKWISE):
        return IndexedLayer()
    if kind.rate:
        return CompressedLayer(kind.rate)
    if kind.name in _HYBRID:
        return ConvolutionLayer(kind.states, spare=spare)
    if kind.is_recurrent:
        return RecurrentLayer(kind.states)
    if kind.name == "dummy":
        return _IdleLayer()
    known = ", ".join((_FULL, _SLIDING, _INDEXED, _BLOCKWISE, *_COMPRESSED, *_HYBRID, *_RECURRENT))
    raise RollbackError(f"layers of kind {kind.name!r} cannot be put back exactly; supported: {known}")
