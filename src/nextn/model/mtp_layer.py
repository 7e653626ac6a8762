"""One MTP layer: two norms, a projection of embedding and hidden state, and a decoder layer of the trunk.

At position i, the layer of depth k takes the embedding of token t_{i+k} and the hidden state of depth k-1 (depth 0: the
trunk's), and predicts t_{i+k+1}.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.cache.rollout_cache import RolloutCache
from nextn.family_table import Family
from nextn.model.family_layers import broadcast_to_streams, collapse_streams
from nextn.model.layer_types import LayerType
from nextn.model.trunk import Trunk

# The projections that combine embedding and hidden state, and how many of the two each takes.
_PROJECTIONS = {"projection": 2, "token_projection": 1, "hidden_projection": 1}


@dataclass(frozen=True)
class HeadStep:
    """The hidden states of one depth."""

    final_hidden: Tensor  # [B, T, H], the input of the lm_head
    next_hidden: Tensor  # [B, T, *hidden_shape], the hidden input of the next depth


class MTPLayer(nn.Module):
    """One MTP layer (DeepSeek-V3, arXiv 2412.19437, eq. 21-23), with the family's conventions."""

    projection: nn.Module
    token_projection: nn.Module
    hidden_projection: nn.Module

    def __init__(self, family: Family, trunk: Trunk, index: int, count: int, *, source: Trunk) -> None:
        """Create the layer at `index` in the head with new weights, of the layer and norm classes of `source`."""
        super().__init__()
        size = trunk.config.hidden_size
        bias = bool(family.projection_bias and getattr(trunk.config, family.projection_bias))
        self.family, self.scale = family, trunk.scale
        self.token_norm, self.hidden_norm = source.norm(), source.norm(trunk.hidden_shape[-1])
        projections = [role for role in _PROJECTIONS if role in family.names]
        for role in projections:
            setattr(self, role, nn.Linear(_PROJECTIONS[role] * size, size, bias=bias, dtype=trunk.dtype))
        # The transformer block, TRM in the paper: a decoder layer of the trunk's class, or a list of several.
        self.block: nn.Module = source.block(index, count, family.block, parts=family.parts)
        self.layer_types = source.block_layer_types(index, count, family.block)
        has_norm = "final_norm" in family.names and trunk.config_flag(family.optional.get("final_norm"))
        self.final_norm = source.norm() if has_norm else nn.Identity()
        if "embedding" in family.own:
            self.embedding = nn.Embedding(trunk.vocab_size, size, dtype=trunk.dtype)
        if "output" in family.own:
            self.output = nn.Linear(size, trunk.vocab_size, bias=False, dtype=trunk.dtype)
        for name in (*projections, *family.own):
            trunk.initialize(getattr(self, name))
        if "collapse" in family.names:
            self.collapse = trunk.collapse()
        if "collapse_fn" in family.names:
            config = trunk.config
            self.eps = {"eps": config.hc_eps, "norm_eps": config.rms_norm_eps}
            self.collapse_fn = nn.Parameter(torch.empty(config.hc_mult, config.hc_mult * size))
            nn.init.normal_(self.collapse_fn, std=config.initializer_range)
            self.collapse_base = nn.Parameter(torch.zeros(config.hc_mult))
            self.collapse_scale = nn.Parameter(torch.ones(1))

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers of the block, in order, of the types in `layer_types`."""
        return [*self.block] if isinstance(self.block, nn.ModuleList) else [self.block]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's matrices."""
        return cast(nn.Linear, getattr(self, "projection", None) or self.token_projection).weight.dtype

    @property
    def layer_type(self) -> LayerType:
        """The type of the block's attention layer."""
        return next(layer_type for layer_type in self.layer_types if layer_type.name != "dummy")

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        *,
        positions: Tensor,
        rotary: object,
        mask: Tensor | None = None,
        cache: KVCache | RolloutCache | None = None,
    ) -> HeadStep:
        """Run the layer over embeddings [B, T, H] and hidden states [B, T, *hidden_shape] at positions [B, T]."""
        if self.family.position0 == "zero":
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        states = self._project_inputs(embedded, hidden)
        return self._finish(self._run_layers(states, positions=positions, rotary=rotary, mask=mask, cache=cache))

    def _project_inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Apply norms and projection; return the block's input."""
        embedded, hidden = self.token_norm(embedded), self.hidden_norm(hidden)
        if "projection" not in self.family.names:
            is_flat, size = hidden.shape[-1] != embedded.shape[-1], embedded.shape[-1]
            states = self.hidden_projection(hidden.unflatten(-1, (-1, size)) if is_flat else hidden)
            states = states + broadcast_to_streams(self.token_projection(embedded), states)
            return states.flatten(-2) if is_flat else states
        parts = [hidden, embedded] if self.family.concat == "hidden_first" else [embedded, hidden]
        return self.projection(torch.cat(parts, dim=-1))

    def _run_layers(
        self,
        states: Tensor,
        *,
        positions: Tensor,
        rotary: object,
        mask: Tensor | None,
        cache: KVCache | RolloutCache | None,
    ) -> Tensor:
        for layer in self.layers:
            out = layer(
                states,
                position_embeddings=rotary,
                attention_mask=mask,
                position_ids=positions,
                use_cache=cache is not None,
                **{CACHE_ARGUMENT: cache},
            )
            states = out[0] if isinstance(out, tuple) else out
        return states

    def _finish(self, raw: Tensor) -> HeadStep:
        hidden = self.collapse(raw) if "collapse" in self.family.names else raw
        if "collapse_fn" in self.family.names:
            hidden = collapse_streams(raw, self.collapse_fn, self.collapse_base, self.collapse_scale, **self.eps)
        final_hidden = self.final_norm(hidden)
        return HeadStep(final_hidden * self.scale, final_hidden if self.family.next_hidden == "post" else raw)
