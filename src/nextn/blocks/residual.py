"""A plain block of a head whose trunk has richer layers: attention and MLP, each added to what it is given the norm of.

It does not know what the parts compute: those are transformers'.
"""

from collections.abc import Mapping

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x))."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, layer: nn.Module, parts: Mapping[str, str]) -> None:
        """parts: one of these names -> its path in the decoder layer, which is given up."""
        super().__init__()
        for name, path in parts.items():
            setattr(self, name, layer.get_submodule(path))

    def forward(self, states: Tensor, **kwargs: object) -> Tensor:
        states = states + self.self_attn(hidden_states=self.input_layernorm(states), **kwargs)[0]
        return states + self.mlp(self.post_attention_layernorm(states))
