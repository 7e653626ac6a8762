"""New layers, norms and other modules of a trunk's own classes, which a head is built from."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

from nextn.errors import FamilyError
from nextn.model.family_layers import ResidualBlock, freeze_indexers
from nextn.model.layer_types import LayerType, head_config, layer_indices, layer_sizes, layer_types_of
from nextn.model.trunk import Trunk


def build_block(
    trunk: Trunk, index: int, count: int, overrides: Mapping[str, object], *, parts: Mapping[str, str] = {}
) -> nn.Module:
    """Build the decoder layers of MTP layer `index` of `count`, of the trunk's own class and freshly initialized.

    A list in the `overrides` of the config has one entry per decoder layer; with several, the result is an
    nn.ModuleList. `parts` are the submodules of a decoder layer that form a `ResidualBlock`, if any.
    """
    config = head_config(trunk.config, trunk.layer_types, count, overrides)
    layer_class = cast(Callable[..., nn.Module], type(trunk.decoder.layers[-1]))
    layers = [layer_class(config, layer_index) for layer_index in layer_indices(index, overrides)]
    layers = [ResidualBlock(layer, parts) for layer in layers] if parts else layers
    block = layers[0] if len(layers) == 1 else nn.ModuleList(layers)
    trunk.initialize(block)
    freeze_indexers(block)
    block.to(trunk.dtype)
    for name, value in [*block.named_parameters(), *block.named_buffers()]:
        if trunk.keeps_fp32(name) and value.is_floating_point():
            value.data = value.data.float()
    return block


def block_layer_types(trunk: Trunk, index: int, count: int, overrides: Mapping[str, object]) -> list[LayerType]:
    """Return the layer types of that block's decoder layers."""
    layer_types = layer_types_of(head_config(trunk.config, trunk.layer_types, count, overrides))
    return [layer_types[layer_index] for layer_index in layer_indices(index, overrides)]


def build_norm(trunk: Trunk, size: int | None = None) -> nn.Module:
    """Build a fresh norm of the trunk's own class, for states of `size` (default: H)."""
    reference = trunk.final_norm
    eps = getattr(reference, "variance_epsilon", getattr(reference, "eps", None))
    options = {} if eps is None else {"eps": eps}
    weight = next(reference.parameters(), None)
    if weight is None:
        raise FamilyError(f"{type(reference).__name__} has no weight, which a head's norms are stored with")
    norm: nn.Module = cast(Callable[..., nn.Module], type(reference))(size or trunk.config.hidden_size, **options)
    trunk.initialize(norm)
    return norm.to(weight.dtype)


def layer_source(trunk: Trunk, model_type: str, *, scaled_rotary: bool = True) -> Trunk:
    """Return a trunk with this one's sizes, to build decoder layers like its own, or of another model_type.

    Its own weights are on the meta device. Without `scaled_rotary`, rotary embeddings lose the scaling of this
    trunk's. Raises FamilyError if such layers cannot have these sizes.
    """
    config: dict[str, object] = {}
    if model_type:
        config = {"model_type": model_type, **layer_sizes(trunk.model.config)}
    elif not scaled_rotary and trunk.config.rope_parameters["rope_type"] != "default":
        rope = {"rope_type": "default", "rope_theta": trunk.config.rope_parameters["rope_theta"]}
        config = trunk.config.to_dict() | {"rope_parameters": rope}
    if not config:
        return trunk
    return on_meta(lambda: Trunk.from_config(config, dtype=trunk.dtype), like=trunk)


def on_meta(build: Callable[[], Trunk], *, like: Trunk) -> Trunk:
    """Build a trunk on the meta device whose layers attend as those of another; its rotary embedding has values."""
    with torch.device("meta"):
        source = build()
    with torch.device("cpu"):
        source.decoder.rotary_emb = type(source.decoder.rotary_emb)(source.config)
    source.config._attn_implementation = like.config._attn_implementation
    return source


def build_collapse(trunk: Trunk) -> nn.Module:
    """Build a fresh module of the trunk's own class that collapses concatenated streams to one state (Qwen4)."""
    mixer_class = cast(Callable[..., nn.Module], type(trunk.decoder.hyper_connection_mixer))
    mixer = mixer_class(trunk.config, use_combine=False)
    trunk.initialize(mixer)
    return mixer.to(trunk.dtype)
