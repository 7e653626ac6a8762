"""The types of decoder layers: how each attends, and which cache layer keeps its state.

Also the config of a head's layers, by the trunk's.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DummyLayer, get_layer_types_and_kwargs

from nextn.cache.attention_layer import AttentionLayer, IndexedLayer
from nextn.cache.family_caches import (
    CompressedLayer,
    ConvolutionLayer,
    PerSequenceCache,
    PooledLayer,
    RotaryIndexedLayer,
)
from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.cache.recurrent import RecurrentLayer
from nextn.checkpoint.provenance import LAYER_SIZES
from nextn.errors import FamilyError, RollbackError

_FULL, _SLIDING, _INDEXED = "full_attention", "sliding_attention", "indexed_attention"
_BLOCKWISE = "minimax_m3_sparse"  # an indexer that selects blocks of positions, counted from position 0
_RECURRENT = ("linear_attention", "conv")
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
# Arguments that transformers passes to attention and that do not change its result beyond the mask.
IGNORABLE_ARGUMENTS: set[str] = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    CACHE_ARGUMENT,
    "use_cache",
    "sliding_window",
}
IGNORABLE_ARGUMENTS |= {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"}
# Attention layers with additional convolutions -> transformers' name of their mask.
_HYBRID = {"hybrid": _FULL, "hybrid_sliding": _SLIDING}
# Frequencies that transformers and the engines compute from `rope_parameters` alone.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class LayerType:
    """How a decoder layer attends."""

    name: str = _FULL
    window: int | None = None  # positions that a sliding-window layer sees, the query's own included
    num_states: int = 1  # of convolutions or recurrences
    compress_rate: int = 0  # positions per entry of compressed attention
    pool_size: int = 0  # positions per pool, where an indexer selects pools
    rotates_all_keys: bool = False  # an indexer applies rotary embeddings to all keys in every pass

    @property
    def is_recurrent(self) -> bool:
        return self.name in _RECURRENT

    @property
    def keeps_only_kv(self) -> bool:
        """Whether it keeps only keys and values between positions."""
        return self.name in (_FULL, _SLIDING) and not (self.compress_rate or self.needs_equal_lengths)

    @property
    def can_pack(self) -> bool:
        """Whether mask and positions suffice to separate several documents in one sequence."""
        return not (self.is_recurrent or self.compress_rate or self.needs_equal_lengths or self.name == _BLOCKWISE)

    @property
    def is_indexed(self) -> bool:
        """Whether an indexer selects single positions; it needs a mask even where all are visible."""
        return self.name == _INDEXED

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether a batch cannot mix lengths, as transformers counts all positions from one offset."""
        return self.name in _HYBRID or bool(self.pool_size) or self.rotates_all_keys


class _StatelessLayer(DummyLayer):
    """The cache layer of a decoder layer without state."""

    num_bytes = bytes_per_position = bytes_per_state = 0
    has_blocks = True

    def begin(self, lengths: object, num_positions: int) -> None: ...
    def commit(self, counts: object, num_positions: int) -> None: ...
    def drop(self, counts: object) -> None: ...
    def select(self, sequences: Tensor) -> None: ...
    def append(self, other: object, counts: object) -> None: ...
    def write_block(self, start: int, block: object) -> None: ...

    def read_block(self, start: int, end: int) -> tuple[Tensor, ...]:
        return ()


def layer_types_of(config: PreTrainedConfig) -> list[LayerType]:
    """Return the layer type of each decoder layer of this config."""
    # A head's config may name more layers than it has.
    layers = [_layer_type(name, options) for name, options in zip(*get_layer_types_and_kwargs(config), strict=False)]
    pool, rotates = getattr(config, "index_kpool", 0), hasattr(config, "indexer_compress_ratio")
    return [replace(layer, pool_size=pool, rotates_all_keys=rotates) if layer.is_indexed else layer for layer in layers]


def _layer_type(name: str, options: Mapping[str, Any]) -> LayerType:
    if name in _COMPRESSED:
        config = options["config"]
        return LayerType(name, config.sliding_window, compress_rate=config.compress_rates[name])
    return LayerType(name, options.get("sliding_window"), options.get("number_of_states", 1))


def masks_of(layer_types: Sequence[LayerType], mask: Callable[[LayerType], Tensor | None]) -> object:
    """Return the mask argument of a decoder with these layers: a single mask, or a dict by transformers' names."""
    layers = {*layer_types}
    masks = {_HYBRID.get(layer.name, layer.name): None if layer.is_recurrent else mask(layer) for layer in layers}
    if any(layer.name in _HYBRID for layer in layers):
        masks |= dict.fromkeys({*_HYBRID.values(), "linear_attention"} - masks.keys())
    return masks if len(masks) > 1 else next(iter(masks.values()))


def new_cache(
    layer_types: Sequence[LayerType], batch_size: int, *, device: torch.device, max_rollback: int = 0
) -> KVCache:
    """Return an empty cache for these layers. Raises RollbackError for a type that cannot be rolled back exactly.

    max_rollback: the most committed positions that can be dropped again, where that takes memory.
    """

    def make(num_sequences: int) -> KVCache:
        layers = [_layer_of(layer_type, max_rollback) for layer_type in layer_types]
        return KVCache(layers, num_sequences, device=device)

    if any(layer_type.needs_equal_lengths for layer_type in layer_types):
        return PerSequenceCache([make(1) for _ in range(batch_size)])
    return make(batch_size)


def _layer_of(layer_type: LayerType, max_rollback: int) -> AttentionLayer | RecurrentLayer | _StatelessLayer:
    if layer_type.name in (_FULL, _SLIDING):
        return AttentionLayer()
    if layer_type.pool_size:
        return PooledLayer()
    if layer_type.rotates_all_keys:
        return RotaryIndexedLayer()
    if layer_type.name in (_INDEXED, _BLOCKWISE):
        return IndexedLayer()
    if layer_type.compress_rate:
        return CompressedLayer(layer_type.compress_rate)
    if layer_type.name in _HYBRID:
        return ConvolutionLayer(layer_type.num_states, max_rollback=max_rollback)
    if layer_type.is_recurrent:
        return RecurrentLayer(layer_type.num_states)
    if layer_type.name == "dummy":
        return _StatelessLayer()
    known = ", ".join((_FULL, _SLIDING, _INDEXED, _BLOCKWISE, *_COMPRESSED, *_HYBRID, *_RECURRENT))
    raise RollbackError(f"layers of type {layer_type.name!r} cannot be rolled back exactly; supported: {known}")


def head_config(
    config: PreTrainedConfig, layer_types: Sequence[LayerType], count: int, overrides: Mapping[str, object]
) -> PreTrainedConfig:
    """Derive the config of a head's layers from the trunk's.

    overrides: Fields to change; a list has one entry per decoder layer of an MTP layer.
    """
    spec = config._heterogeneity_spec if config.is_heterogeneous else None
    config = copy.deepcopy(config)
    config.per_layer_config = None
    config.num_hidden_layers = len(layer_indices(0, overrides)) * count
    if hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers = count
    for name, value in overrides.items():
        if isinstance(value, list):
            # Some configs have the value for the head, under transformers' name for it.
            own, value = getattr(config, f"mtp_{name}", None), value * count
            value = value if own is None or len(own) < len(value) else own[: len(value)]
        setattr(config, name, value)
    if spec is not None:
        # A layer has the options of the trunk's layers of its type, such as the number of heads of the sliding ones.
        own = spec.per_layer_overrides
        options = {layer_type.name: own.get(index, {}) for index, layer_type in enumerate(layer_types)}
        config.per_layer_config = {
            index: options.get(layer_type.name, {}) for index, layer_type in enumerate(layer_types_of(config))
        }
    return config


def layer_indices(index: int, overrides: Mapping[str, object]) -> range:
    """The indices of MTP layer `index`'s decoder layers in the config of the whole head."""
    width = max((len(value) for value in overrides.values() if isinstance(value, list)), default=1)
    return range(index * width, (index + 1) * width)


def context_length(config: PreTrainedConfig) -> int | None:
    """Return how many positions a text may have; None if the config does not say.

    Rotary embeddings of type `longrope` have two sets of frequencies, by the length of the text. Cached keys keep those
    that they were stored with, so the context ends with the first set.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    lengths = [each.get("original_max_position_embeddings") for each in kinds if each.get("rope_type") == "longrope"]
    known = [each for each in (getattr(config, "max_position_embeddings", None), *lengths) if each is not None]
    return min(known, default=None)


def layer_sizes(config: PreTrainedConfig) -> dict[str, object]:
    """Return the sizes of a Qwen2 layer that takes its config from this trunk, as vLLM makes a separate draft's.

    vLLM reads them in the trunk's config (model_executor/models/mimo_mtp.py, MiMoMultiTokenPredictor), and ignores its
    head_dim (model_executor/models/qwen2.py, Qwen2Attention). Raises FamilyError listing all that does not fit.
    """
    sizes = {name: getattr(config, name, None) for name in (*LAYER_SIZES, "num_hidden_layers")}
    if problems := [*_misfits(config, sizes)]:
        raise FamilyError(
            f"a trunk of model_type {config.model_type} cannot have a head in MiMo's layout: {'; '.join(problems)}. "
            "A head of its own layers (without --layout) runs here and in transformers"
        )
    return sizes


def _misfits(config: PreTrainedConfig, sizes: Mapping[str, object]) -> Iterator[str]:
    if absent := [name for name, value in sizes.items() if value is None]:
        yield f"its config has no {', '.join(absent)}"
        return
    hidden, heads, rope = (sizes[name] for name in ("hidden_size", "num_attention_heads", "rope_parameters"))
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    assert isinstance(rope, dict)
    if sizes["hidden_act"] != "silu":
        yield f"its activation is {sizes['hidden_act']}, a Qwen2 layer's is silu"
    if hidden % (2 * heads):
        yield f"hidden_size {hidden} is no even multiple of its {heads} attention heads"
    if rope.get("rope_type") not in _ROPE_TYPES:
        yield f"its rotary embeddings are of type {rope.get('rope_type')}, not one of {', '.join(_ROPE_TYPES)}"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield f"it rotates {rope['partial_rotary_factor']:g} of each head, a Qwen2 layer all of it"
    if any(layer.window for layer in layer_types_of(config)):
        yield "some of its layers have a sliding window, which engines would give to the draft, too"
