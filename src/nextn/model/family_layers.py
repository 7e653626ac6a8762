"""Layers that single families need beside transformers': unused experts, plain residual blocks, hyper-connections."""

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Value = TypeVar("Value")
_FIRST = (".experts.0.gate_proj.weight", ".experts.0.up_proj.weight")


def add_unused_experts(state: Mapping[str, Value], config: object) -> dict[str, Value]:
    """Add placeholder tensors for LongCat-Flash's experts that compute nothing.

    transformers has rows for them in `gate_up_proj`, but no file stores any; see `remove_unused_experts`.
    """
    out, first = dict(state), getattr(config, "n_routed_experts", 0)
    templates = [name for name in state if name.endswith(_FIRST)]
    for expert in range(first, first + (getattr(config, "zero_expert_num", None) or 0)):
        out |= {name.replace(".experts.0.", f".experts.{expert}."): state[name] for name in templates}
    return out


def remove_unused_experts(model: nn.Module) -> None:
    """Drop the rows of the experts that compute nothing, which are never read."""
    for part in model.modules():
        rows = getattr(part, "gate_up_proj", None)
        if getattr(part, "zero_expert_num", 0) and isinstance(rows, nn.Parameter):
            part.gate_up_proj = nn.Parameter(rows.detach()[: cast(int, part.num_routed_experts)].clone())


def freeze_indexers(module: nn.Module) -> None:
    # transformers runs an indexer without gradients: its selection is not differentiable in its weights.
    for name, value in module.named_parameters():
        if ".indexer." in name:
            value.requires_grad_(False)


class ResidualBlock(nn.Module):
    """A plain block for a head whose trunk has richer layers, built from parts of such a layer.

    x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)).
    """

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, layer: nn.Module, parts: Mapping[str, str]) -> None:
        """parts: name of each submodule -> its path in the decoder layer, which must not be used afterwards."""
        super().__init__()
        for name, path in parts.items():
            setattr(self, name, layer.get_submodule(path))

    def forward(self, states: Tensor, **kwargs: object) -> Tensor:
        states = states + self.self_attn(hidden_states=self.input_layernorm(states), **kwargs)[0]
        states = states + self.mlp(self.post_attention_layernorm(states))
        return states


def broadcast_to_streams(states: Tensor, hidden: Tensor) -> Tensor:
    """Shape states [B, T, H] so that they can be added to hidden [B, T, H], or to every stream of [B, T, S, H]."""
    return states if hidden.ndim == states.ndim else states[:, :, None]


def collapse_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """Sum hyper-connection streams [B, T, S, H] (arXiv 2409.19606) to [B, T, H].

    The weights, in (eps, 1 + eps), depend on all streams. fn [S, S * H], base [S] and scale [1] are fp32, as in
    DeepSeek-V4's checkpoints and its inference code.
    """
    flat = streams.flatten(2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    weights = torch.sigmoid(functional.linear(flat, fn) * scale + base) + eps
    return (weights[..., None] * streams).sum(dim=2).to(streams.dtype)
