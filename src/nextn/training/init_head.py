"""A fresh head for a trunk that has none, made of the trunk's own parts, so that its first step is sane."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nextn.errors import ConfigError
from nextn.families import Family
from nextn.head import Head, Module
from nextn.kinds import Kind
from nextn.trunk import Trunk

_NOISE = 0.02
# What writes into the residual stream, by its last name in transformers' layers.
_WRITERS = re.compile(r"(^|\.)(o_proj|o_b_proj|down_proj|out_proj)(\.weight|\.bias)?$")
# Or else norms behind attention and MLP (GLM-OCR).
_BEHIND = re.compile(r"(post_self_attn|post_mlp)_layernorm")


def init_head(family: Family, trunk: Trunk, tokens: Tensor, *, num_modules: int = 1) -> tuple[Head, list[str]]:
    """-> the head, in the trunk's dtype, and notes on what of it has no counterpart in the trunk.

    tokens [B, T]: a text to measure the trunk's residual stream on. Each part of a block's layer is a copy of the last
    one in the trunk that is built alike. The block is given the sum of the normed token and the normed hidden state, of
    about unit size each, so what its layers write into their stream is divided by the size that the stream has in the
    trunk: they then compute what they did, and their weights are of a size that learning rates are made for. The final
    norm is the trunk's, and so are an embedding and an output head that the family's modules own. Raises ConfigError
    for more modules than the family has room for.
    """
    if family.max_modules is not None and num_modules > family.max_modules:
        raise ConfigError(f"modules = {num_modules}; {family.name} has room for {family.max_modules}")
    head = Head(family, trunk, num_modules=num_modules)
    notes: list[str] = []
    with torch.no_grad():
        sizes = _stream_sizes(trunk, tokens)
        for module in cast(Sequence[Module], head.stack):
            joined = 1.0
            for layer, kind in zip(module.layers, module.kinds, strict=True):
                places, left = _copy_layer(layer, kind, trunk, family)
                notes += left
                if _reads_raw(layer):
                    joined = sizes[max(places.values())]
                else:
                    _scale_writers(layer, {part: 1 / sizes[place] for part, place in places.items()})
            _join_both(module, family, joined)
            _copy_outside(module, trunk)
    return head, list(dict.fromkeys(notes))


def _stream_sizes(trunk: Trunk, tokens: Tensor) -> list[float]:
    """Root mean square of what each layer of the trunk is given."""
    sizes: list[float] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        sizes.append(states.float().square().mean().sqrt().item())

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in trunk.decoder.layers]
    try:
        trunk(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _copy_layer(layer: nn.Module, kind: Kind, trunk: Trunk, family: Family) -> tuple[dict[str, int], list[str]]:
    """Copy each part from the trunk layer that has most of its tensors; of such, one of its kind, of these the last.

    -> part -> place of that layer, and what none has.
    """
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in layer.state_dict().items():
        parts[name.partition(".")[0]][name] = value
    others = [
        # What adapters (LoRA) are added to is called so inside them.
        {name.replace(".base_layer.", "."): value for name, value in each.state_dict().items()}
        for each in trunk.decoder.layers
    ]
    places, left = {}, []
    for part, own in parts.items():
        found = [_counterparts(own, other, family.parts) for other in others]
        sizes = [sum(value.numel() for value in each.values()) for each in found]
        best = max(range(len(found)), key=lambda place: (sizes[place], trunk.kinds[place].name == kind.name, place))
        for name, value in found[best].items():
            own[name].copy_(value)
        places[part] = best
        left += [name for name in own if name not in found[best]]
    more = f" and {len(left) - 1} more" if left[1:] else ""
    return places, [f"no layer of the trunk has the block's {left[0]}{more}: drawn at random"] if left else []


def _reads_raw(layer: nn.Module) -> bool:
    """Whether attention and MLP read their stream as it is (EXAONE 4.5), so that its size matters."""
    return hasattr(layer, "post_feedforward_layernorm") and not hasattr(layer, "input_layernorm")


def _scale_writers(layer: nn.Module, factors: Mapping[str, float]) -> None:
    """factors: part of the layer -> what it is to be multiplied by where it writes."""
    is_behind = any(_BEHIND.match(part) for part in factors)
    for name, value in layer.named_parameters():
        if _BEHIND.match(name) if is_behind else _WRITERS.search(name):
            value.mul_(factors[name.partition(".")[0]])


def _counterparts(
    own: Mapping[str, Tensor], other: Mapping[str, Tensor], parts: Mapping[str, str]
) -> dict[str, Tensor]:
    """Name -> tensor of `other` that is called and shaped alike; parts: what a residual block calls otherwise."""
    found = {}
    for name, value in own.items():
        first, _, rest = name.partition(".")
        there = other.get(f"{parts[first]}.{rest}" if first in parts else name)
        if there is not None and there.shape == value.shape:
            found[name] = there
    return found


def _join_both(module: Module, family: Family, size: float) -> None:
    """Token and hidden state, normed, are added up, `size` times; small noise lets the two halves part."""
    for role in ("projection", "token_projection", "hidden_projection"):
        projection = getattr(module, role, None)
        if isinstance(projection, nn.Linear):
            projection.weight.normal_(std=_NOISE)
            for half in projection.weight.split(projection.out_features, dim=1):
                half.diagonal().add_(size)
            if projection.bias is not None:
                projection.bias.zero_()
    for norm in (module.token_norm, module.hidden_norm):
        next(norm.parameters()).fill_(float(family.gain == "w"))


def _copy_outside(module: Module, trunk: Trunk) -> None:
    """What stands behind the block, and tensors of the whole model that the family's modules have of their own."""
    pairs: list[tuple[object, object]] = [(module.final_norm, trunk.final_norm)]
    pairs += [(getattr(module, name, None), getattr(trunk, name)) for name in ("embedding", "output")]
    pairs.append((getattr(module, "collapse", None), getattr(trunk.decoder, "hyper_connection_mixer", None)))
    for own, other in pairs:
        if isinstance(own, nn.Module) and isinstance(other, nn.Module):
            state = other.state_dict()
            for name, value in own.state_dict().items():
                if name in state and state[name].shape[1:] == value.shape[1:] and len(state[name]) >= len(value):
                    value.copy_(state[name][: len(value)])  # embeddings of the trunk may have rows for padding
    mixer = getattr(trunk.decoder, "hc_head", None)
    if mixer is not None and hasattr(module, "collapse_fn"):
        for name in ("fn", "base", "scale"):
            getattr(module, f"collapse_{name}").copy_(getattr(mixer, f"hc_{name}"))
