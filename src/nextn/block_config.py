"""The config that a head's blocks are made of: the trunk's, with the layers of the head in place of its own."""

import copy
from collections.abc import Mapping, Sequence

from transformers import PreTrainedConfig

from nextn.kinds import Kind, kinds_of


def block_config(
    config: PreTrainedConfig, kinds: Sequence[Kind], count: int, overrides: Mapping[str, object]
) -> PreTrainedConfig:
    """The trunk's config as one of a head of `count` modules, whose layers are all that it names.

    kinds: of the trunk's layers. A list in overrides has one entry for each layer of a module.
    """
    spec = config._heterogeneity_spec if config.is_heterogeneous else None
    config = copy.deepcopy(config)
    config.per_layer_config = None
    config.num_hidden_layers = len(places(0, overrides)) * count
    if hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers = count
    for name, value in overrides.items():
        if isinstance(value, list):
            # Some configs say it themselves, under transformers' name for it.
            own, value = getattr(config, f"mtp_{name}", None), value * count
            value = value if own is None or len(own) < len(value) else own[: len(value)]
        setattr(config, name, value)
    if spec is not None:
        # A block is made like the trunk's layers of its kind, such as with the heads of the sliding ones.
        own = spec.per_layer_overrides
        alike = {kind.name: own.get(place, {}) for place, kind in enumerate(kinds)}
        config.per_layer_config = {place: alike.get(kind.name, {}) for place, kind in enumerate(kinds_of(config))}
    return config


def places(index: int, overrides: Mapping[str, object]) -> range:
    """The places of module `index`'s layers in a config of the whole head."""
    width = max((len(value) for value in overrides.values() if isinstance(value, list)), default=1)
    return range(index * width, (index + 1) * width)
