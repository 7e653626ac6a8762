"""The config that a head's blocks are made of: the trunk's, with the layers of the head instead of its own."""

import copy
from collections.abc import Mapping, Sequence

from transformers import PreTrainedConfig

from nextn.model.layer_types import LayerType, layer_types_of


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
