"""The config that a head's blocks are made of: the trunk's, with the layers of the head instead of its own."""

import copy
from collections.abc import Iterator, Mapping, Sequence

from transformers import PreTrainedConfig

from nextn.checkpoint.provenance import LAYER_SIZES
from nextn.errors import FamilyError
from nextn.model.layer_types import LayerType, layer_types_of

# Frequencies that transformers and the engines compute from `rope_parameters` alone.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def head_config(
    config: PreTrainedConfig, layer_types: Sequence[LayerType], count: int, overrides: Mapping[str, object]
) -> PreTrainedConfig:
    """Derive the config of a head's layers from the trunk's.

    Args:
        config: The trunk's.
        layer_types: Of the trunk's layers.
        count: Number of MTP layers.
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
