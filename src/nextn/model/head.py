"""The MTP head: per MTP layer two norms, a projection and the trunk's own decoder layer; applied depth by depth.

At position i, depth k takes the embedding of token t_{i+k} and the hidden state of depth k-1 (depth 0: the trunk's),
and predicts t_{i+k+1}.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nextn.cache.attention_layer import packed
from nextn.cache.family_caches import PerSequenceCache
from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.cache.rollout_cache import RolloutCache, chain_mask
from nextn.errors import ConfigError
from nextn.family_table import Family
from nextn.model.family_layers import broadcast_to_streams, collapse_streams
from nextn.model.head_layers import block_layer_types, build_block, build_collapse, build_norm, layer_source
from nextn.model.layer_types import LayerType, new_cache
from nextn.model.logits import float_linear, logits_of
from nextn.model.trunk import Trunk
from nextn.speculative.draft_vocabulary import DraftVocabulary

# The projections that combine embedding and hidden state, and how many of the two each takes.
_PROJECTIONS = {"projection": 2, "token_projection": 1, "hidden_projection": 1}
# Positions that a head's cache can drop, where that takes memory (convolutions); rounds of more drafts are refused.
_MAX_ROLLBACK = 128


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
    __call__: Callable[..., HeadStep]

    def __init__(self, family: Family, trunk: Trunk, index: int, count: int, *, source: Trunk) -> None:
        """Create the layer at `index` in the head with new weights, of the layer and norm classes of `source`."""
        super().__init__()
        size = trunk.config.hidden_size
        bias = bool(family.projection_bias and getattr(trunk.config, family.projection_bias))
        self.family, self.scale = family, trunk.scale
        self.token_norm, self.hidden_norm = build_norm(source), build_norm(source, trunk.hidden_shape[-1])
        projections = [role for role in _PROJECTIONS if role in family.names]
        for role in projections:
            setattr(self, role, nn.Linear(_PROJECTIONS[role] * size, size, bias=bias, dtype=trunk.dtype))
        # The transformer block, TRM in the paper: a decoder layer of the trunk's class, or a list of several.
        self.block: nn.Module = build_block(source, index, count, family.block, parts=family.parts)
        self.layer_types = block_layer_types(source, index, count, family.block)
        has_norm = "final_norm" in family.names and trunk.config_flag(family.optional.get("final_norm"))
        self.final_norm = build_norm(source) if has_norm else nn.Identity()
        if "embedding" in family.own:
            self.embedding = nn.Embedding(trunk.vocab_size, size, dtype=trunk.dtype)
        if "output" in family.own:
            self.output = nn.Linear(size, trunk.vocab_size, bias=False, dtype=trunk.dtype)
        for name in (*projections, *family.own):
            trunk.initialize(getattr(self, name))
        if "collapse" in family.names:
            self.collapse = build_collapse(trunk)
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
            states: Tensor = self.hidden_projection(hidden.unflatten(-1, (-1, size)) if is_flat else hidden)
            states = states + broadcast_to_streams(self.token_projection(embedded), states)
            return states.flatten(-2) if is_flat else states
        parts = [hidden, embedded] if self.family.concat == "hidden_first" else [embedded, hidden]
        projected: Tensor = self.projection(torch.cat(parts, dim=-1))
        return projected

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


class Head(nn.Module):
    """The MTP layers of a model; depths beyond the last layer reuse it.

    Parts that the family stores once for all MTP layers belong to layer 0, and the others share them. Embedding and
    lm_head are the trunk's and not parameters of this module, unless the family gives the head its own.

    Args:
        family: The published convention that the head follows.
        trunk: The trunk, whose embedding and lm_head the head uses.
        num_modules: Number of MTP layers.

    Raises:
        ConfigError: The number of MTP layers is not one that the family has.
        FamilyError: The family's heads cannot be computed.

    Example:
        >>> head = nextn.load("tiny").head
        >>> head.num_modules, head.family.name
        (1, 'qwen3_5')
    """

    def __init__(self, family: Family, trunk: Trunk, *, num_modules: int = 1) -> None:
        super().__init__()
        if num_modules < 1:
            raise ConfigError(f"num_modules = {num_modules}; expected at least one")
        self.family = family
        self.draft_vocabulary: DraftVocabulary | None = None  # None: drafts from the whole vocabulary
        self.trained_length: int | None = None  # tokens of the longest text that it was trained on in this process
        self.exact = False  # draft with the full precision of the weights even where a lower one is faster
        self._trunk = (trunk,)  # a tuple, so that nn.Module does not register the trunk's parameters as the head's
        self._source = (layer_source(trunk, family.layer_model, scaled_rotary=family.has_scaled_rotary),)
        self.stack = nn.ModuleList(
            MTPLayer(family, trunk, index, num_modules, source=self._source[0]) for index in range(num_modules)
        )
        for module in list(self.stack)[1:]:
            for role in family.stored_once:
                delattr(module, role)
                # Bypasses nn.Module, which would list the same parameters again under this layer's name.
                module.__dict__[role] = getattr(self.stack[0], role)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Head":
        # Experts that are loaded while they run are on the meta device.
        super()._apply(lambda value: value if value.is_meta else fn(value), recurse)
        return self

    @property
    def trunk(self) -> Trunk:
        return self._trunk[0]

    def new_norm(self) -> nn.Module:
        """Build a norm of the head's class, as for a token embedding, that has no effect beyond normalizing."""
        norm = build_norm(self._source[0])
        next(norm.parameters()).data.fill_(float(self.family.norm_weight == "w"))
        return norm

    def set_family(self, family: Family) -> None:
        """Compute by another row from now on, of the same tensors."""
        for part in (self, *self.stack):
            cast(Head, part).family = family

    @property
    def num_modules(self) -> int:
        return len(self.stack)

    def keeps_fp32(self, name: str) -> bool:
        """Whether this tensor stays in fp32, whatever the model's dtype."""
        return "collapse_" in name or self.trunk.keeps_fp32(name)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers of all MTP layers."""
        return [layer for index in range(self.num_modules) for layer in self._at(index).layers]

    def layer_index(self, depth: int) -> int:
        """Return the index of the MTP layer that computes `depth` (1-based)."""
        return min(depth, self.num_modules) - 1

    def layer_types(self, index: int) -> list[LayerType]:
        """Return the types of MTP layer `index`'s decoder layers."""
        return self._at(index).layer_types

    def cache(self, batch_size: int, trunk_cache: KVCache | None = None) -> KVCache:
        """Return an empty cache for one MTP layer; its entries for the other layers take no memory.

        trunk_cache: The trunk's cache of the same sequences, for a head that reads it.
        """
        layer_types = [layer_type for index in range(self.num_modules) for layer_type in self.layer_types(index)]
        return new_cache(layer_types, batch_size, device=self.trunk.device, max_rollback=_MAX_ROLLBACK)

    def uses_next_hidden(self, depth: int) -> bool:
        """Whether `depth` takes the next_hidden of the depth before it, rather than the trunk's state."""
        return depth > (self.num_modules if self.family.order == "unchained" else 1)

    def step(
        self,
        index: int,
        tokens: Tensor,
        hidden: Tensor,
        *,
        cache: KVCache | None = None,
        within: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> HeadStep:
        """Run MTP layer `index`.

        Args:
            index: Index of the MTP layer.
            tokens: [B, T]; may be on the host.
            hidden: [B, T, *hidden_shape].
            cache: The T positions become a block of it, which the caller closes with `cache.commit`.
            within: [B, 1, T, T] bool that restricts causal attention further; without a cache only.
            positions: [B, T], without a cache only; by default from 0.
        """
        if isinstance(cache, PerSequenceCache):
            steps = [
                self.step(index, tokens[row : row + 1], hidden[row : row + 1], cache=own)
                for row, own in enumerate(cache.sequences)
            ]
            names = "final_hidden", "next_hidden"
            return HeadStep(*(torch.cat([getattr(step, name) for step in steps]) for name in names))
        tokens = tokens.to(hidden.device, non_blocking=True)
        length = tokens.shape[1]
        if cache is not None:
            cache.begin(length)
            positions = cache.positions(length)
        elif positions is None:
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        layer_type = self._at(index).layer_type
        mask = self.trunk.mask(layer_type, length, rows=len(tokens), cache=cache, within=within)
        return self._forward(index, tokens, hidden, positions=positions, mask=mask, cache=cache)

    def refresh(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: KVCache) -> None:
        """Run MTP layer `index` as `step` does, only to update the cache."""
        self.step(index, tokens, hidden, cache=cache)

    def repeat(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: KVCache) -> HeadStep:
        """Run MTP layer `index` on its own state: tokens [B, 1] and the next_hidden of the step before."""
        if self.family.repeated_kv == "own":
            return self.step(index, tokens, hidden, cache=cache)
        cache.rollback_to([length - 1 for length in cache.lengths])  # to the position of the step before
        with cache.frozen():
            return self.step(index, tokens, hidden, cache=cache)

    def _forward(
        self,
        index: int,
        tokens: Tensor,
        hidden: Tensor,
        *,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache | RolloutCache | None,
    ) -> HeadStep:
        module = self._at(index)
        embedded = module.embedding(tokens) if "embedding" in self.family.own else self._embed(tokens)
        embedded = embedded.to(module.dtype)  # a head may train in fp32 on a trunk in bf16
        rotary = self._source[0].rotary(embedded, positions, module.layer_type)
        hidden = hidden.to(embedded.dtype)
        return module(embedded, hidden, positions=positions, rotary=rotary, mask=mask, cache=cache)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.trunk.embed(tokens, raw=self.family.embedded == "raw")

    def output(self, index: int) -> nn.Linear:
        """Return the lm_head of MTP layer `index`."""
        return self._at(index).output if "output" in self.family.own else self.trunk.output

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the trunk's logit cap, unless the head has an lm_head of its own. See `Trunk.capped`."""
        return logits if "output" in self.family.own else self.trunk.capped(logits)

    def _at(self, index: int) -> MTPLayer:
        return cast(MTPLayer, self.stack[index])

    def logits(self, index: int, final_hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of MTP layer `index`; -inf outside of the draft vocabulary, if there is one."""
        logits = self.draft_logits(index, final_hidden)
        return logits if self.draft_vocabulary is None else self.draft_vocabulary.expand(logits)

    def draft_logits(self, index: int, final_hidden: Tensor) -> Tensor:
        """Return the logits [..., N] of MTP layer `index` for the draft vocabulary; without one, for all tokens."""
        output = self.output(index)
        if self.draft_vocabulary is not None:
            rows = self.draft_vocabulary.rows
            logits = float_linear(final_hidden, rows(output.weight), None if output.bias is None else rows(output.bias))
            return self.capped(logits)
        return logits_of(output, final_hidden) if "output" in self.family.own else self.trunk.logits(final_hidden)

    def teacher_forced_hidden(
        self, tokens: Tensor, hidden: Tensor, depths: int, *, documents: Tensor | None = None
    ) -> list[Tensor]:
        """Return the final_hidden [B, T-k, H] of each depth k, teacher-forced at all positions in parallel.

        Args:
            tokens: [B, T].
            hidden: [B, T, *hidden_shape], the trunk's head_input.
            depths: Number of depths.
            documents: [B, T] document ids; attention and positions stay inside a document.
        """
        if self.family.repeated_kv == "first" and depths > self.num_modules:
            return self.rollout_hidden(tokens, hidden, depths, documents=documents)
        return self._hidden_by_depth(tokens, hidden, depths, documents, None)

    @property
    def can_rollout(self) -> bool:
        """Whether `rollout_hidden` works: the last MTP layer keeps only keys and values between positions."""
        return all(layer_type.keeps_only_kv for layer_type in self.layer_types(self.num_modules - 1))

    def rollout_hidden(
        self, tokens: Tensor, hidden: Tensor, depths: int, *, documents: Tensor | None = None
    ) -> list[Tensor]:
        """Return final_hidden as `teacher_forced_hidden` does, with the attention of decoding.

        The two differ at depths k beyond the last MTP layer D. In `teacher_forced_hidden`, depth k at position i
        attends to depth k at earlier positions, with rotary position i. Here, as if each position i began a chain of
        drafts, it attends to depth D at positions j <= i and to the chain's own earlier depths, with rotary position
        i + k - D. Keys and masks take (depths - D + 1) times the memory. Raises ConfigError if not `can_rollout`.
        """
        if not self.can_rollout:
            names = ", ".join(sorted({layer_type.name for layer_type in self.layer_types(self.num_modules - 1)}))
            raise ConfigError(f"a head with layers of type {names} cannot compute rollouts; decode with it instead")
        layers = sum(len(self.layer_types(index)) for index in range(self.num_modules))
        return self._hidden_by_depth(tokens, hidden, depths, documents, RolloutCache(layers))

    def _hidden_by_depth(
        self, tokens: Tensor, hidden: Tensor, depths: int, documents: Tensor | None, rollout: RolloutCache | None
    ) -> list[Tensor]:
        """Run all depths. rollout: An empty cache, to attend as in decoding; None: each depth attends to its own."""
        check_depths(depths, length := tokens.shape[1])
        positions: Tensor = torch.arange(length, device=tokens.device).expand_as(tokens)
        within = None
        if documents is not None:
            positions, within = packed(documents)
        outs, next_hidden = [], hidden
        for depth in range(1, depths + 1):
            num, index = length - depth, self.layer_index(depth)
            inputs = tokens[:, depth:], (next_hidden if self.uses_next_hidden(depth) else hidden)[:, :num]
            if rollout is None or depth < self.num_modules:
                visible = None if within is None else within[:, :, :num, :num]
                step = self.step(index, *inputs, positions=positions[:, :num], within=visible)
            else:
                step = self._rollout_step(depth, inputs, positions, within, rollout)
            outs.append(step.final_hidden)
            next_hidden = step.next_hidden
        return outs

    def _rollout_step(
        self, depth: int, inputs: tuple[Tensor, Tensor], positions: Tensor, within: Tensor | None, rollout: RolloutCache
    ) -> HeadStep:
        """Run a depth of the last MTP layer as in decoding. positions [B, T] and `within` are of the whole text."""
        index, num = self.layer_index(depth), inputs[0].shape[1]
        is_shared = self.family.repeated_kv == "first"
        if is_shared and depth > self.num_modules:
            rollout.freeze()
        length, device, window = positions.shape[1], positions.device, self._at(index).layer_type.window
        reach = self.num_modules if is_shared else depth
        visible = chain_mask(length, self.num_modules, reach, window=window, within=within, device=device)
        own = positions[:, :num] + (0 if is_shared else depth - self.num_modules)
        mask = self.trunk.to_attention_mask(visible[:, :, :num])
        return self._forward(index, *inputs, positions=own, mask=mask, cache=rollout)

    def forward(self, tokens: Tensor, hidden: Tensor | None = None, *, depths: int | None = None) -> Tensor:
        """Return logits [B, T-D, D, V]; those at [:, i, k-1] predict token i+k+1 from the tokens up to i+k.

        hidden: [B, T, *hidden_shape], the trunk's hidden states; None uses the token embeddings instead.
        """
        depths = self.num_modules if depths is None else depths
        states = self.teacher_forced_hidden(tokens, self.trunk.embedding(tokens) if hidden is None else hidden, depths)
        length = tokens.shape[1] - depths
        logits = [
            self.logits(self.layer_index(depth), state[:, :length]) for depth, state in enumerate(states, start=1)
        ]
        return torch.stack(logits, dim=2)


def check_depths(depths: int, length: int) -> None:
    """Raise ConfigError if texts of `length` tokens are too short for this number of depths."""
    if not 1 <= depths < length:
        raise ConfigError(f"depths = {depths}; expected 1 <= depths < {length}, the number of tokens")
