"""The MTP head: norms + projection + the trunk's own block per module, chained over depths.

A module eats pairs: at column i the embedding of token t_{i+1} and the hidden state h_i, and predicts t_{i+2}. Depth k
eats (t_{i+k}, the state of depth k-1 at column i). It does not know how drafts are verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from nextn.blocks.streams import collapse, spread
from nextn.errors import ConfigError
from nextn.families import Family, by_name
from nextn.kinds import Kind, new_cache
from nextn.rollback import Apart, Cache
from nextn.sampling import Prediction, Sampling
from nextn.shortlist import Shortlist
from nextn.trunk import Trunk, packed
from nextn.unroll import BlockCache, chain_mask

# How many columns a head's cache can drop where that takes memory: more than anyone drafts at once.
_SPARE = 128
# What joins token and hidden state, and how many of the two each eats.
_PROJECTIONS = {"projection": 2, "token_projection": 1, "hidden_projection": 1}


@dataclass(frozen=True)
class Step:
    """normed [B, T, H]: what the output head reads. recycled [B, T, H]: what the next depth eats."""

    normed: Tensor
    recycled: Tensor


class Module(nn.Module):
    """One MTP module (DeepSeek-V3, arXiv 2412.19437, eq. 21-23), with the family's conventions."""

    projection: nn.Module
    token_projection: nn.Module
    hidden_projection: nn.Module

    def __init__(self, family: Family, trunk: Trunk, index: int, count: int) -> None:
        super().__init__()
        size = trunk.config.hidden_size
        bias = bool(family.projection_bias and getattr(trunk.config, family.projection_bias))
        self.family, self.scale = family, trunk.scale
        self.token_norm, self.hidden_norm = trunk.norm(), trunk.norm(trunk.hidden_shape[-1])
        projections = [role for role in _PROJECTIONS if role in family.names]
        for role in projections:
            setattr(self, role, nn.Linear(_PROJECTIONS[role] * size, size, bias=bias, dtype=trunk.dtype))
        self.block: nn.Module = trunk.block(index, count, family.block, parts=family.parts)
        self.kinds = trunk.block_kinds(index, count, family.block)
        has_norm = "final_norm" in family.names and trunk.has(family.optional.get("final_norm"))
        self.final_norm = trunk.norm() if has_norm else nn.Identity()
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
        """The decoder layers of the block, in order; `kinds` says how each attends."""
        return [*self.block] if isinstance(self.block, nn.ModuleList) else [self.block]

    @property
    def dtype(self) -> torch.dtype:
        """Of its matrices."""
        return cast(nn.Linear, getattr(self, "projection", None) or self.token_projection).weight.dtype

    @property
    def kind(self) -> Kind:
        """How the layer of the block that attends does so."""
        return next(kind for kind in self.kinds if kind.name != "dummy")

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        *,
        positions: Tensor,
        rotary: object,
        mask: Tensor | None = None,
        cache: Cache | BlockCache | None = None,
    ) -> Step:
        """embedded, hidden [B, T, H] at positions [B, T] -> Step."""
        if self.family.position0 == "zero":
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        joined = self._join(embedded, hidden)
        return self._finish(self._run_block(joined, positions=positions, rotary=rotary, mask=mask, cache=cache))

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Norms and projection -> what the block eats."""
        parts = [self.token_norm(embedded), self.hidden_norm(hidden)]
        if "projection" not in self.family.names:
            flat = parts[1].shape[-1] != parts[0].shape[-1]
            states = self.hidden_projection(parts[1].unflatten(-1, (-1, parts[0].shape[-1])) if flat else parts[1])
            states = states + spread(self.token_projection(parts[0]), states)
            return states.flatten(-2) if flat else states
        if self.family.concat == "hidden_first":
            parts.reverse()
        return self.projection(torch.cat(parts, dim=-1))

    def _run_block(
        self,
        states: Tensor,
        *,
        positions: Tensor,
        rotary: object,
        mask: Tensor | None,
        cache: Cache | BlockCache | None,
    ) -> Tensor:
        for layer in self.layers:
            out = layer(
                states,
                position_embeddings=rotary,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
            states = out[0] if isinstance(out, tuple) else out
        return states

    def _finish(self, raw: Tensor) -> Step:
        whole = self.collapse(raw) if "collapse" in self.family.names else raw
        if "collapse_fn" in self.family.names:
            whole = collapse(raw, self.collapse_fn, self.collapse_base, self.collapse_scale, **self.eps)
        normed = self.final_norm(whole)
        return Step(normed * self.scale, normed if self.family.recycled == "post" else raw)


class Head(nn.Module):
    """One module applied again and again, or num_modules distinct ones; depths beyond the last module reuse it.

    What the family stores once for all modules is module 0's, and the others use it. Embedding and output head are the
    trunk's, and no parameters of this module, unless the family says that they are the head's own.
    """

    def __init__(self, family: Family, trunk: Trunk, *, num_modules: int = 1) -> None:
        super().__init__()
        if num_modules < 1:
            raise ConfigError(f"num_modules = {num_modules}; a head has at least one module")
        self.family = family
        self.shortlist: Shortlist | None = None  # what it drafts from, if not from the whole vocabulary
        self.exact = False  # whether it drafts by all bits of its weights where fewer are faster
        self._trunk = (trunk,)  # in a tuple, so that nn.Module does not take the trunk's parameters for the head's
        self.stack = nn.ModuleList(Module(family, trunk, index, num_modules) for index in range(num_modules))
        for module in list(self.stack)[1:]:
            for role in family.once:
                delattr(module, role)
                # Past nn.Module, which would list the same parameters again under this module's name.
                module.__dict__[role] = getattr(self.stack[0], role)

    @property
    def trunk(self) -> Trunk:
        return self._trunk[0]

    @property
    def num_modules(self) -> int:
        return len(self.stack)

    def keeps_fp32(self, name: str) -> bool:
        """Whether this tensor stays in fp32 whatever the model's dtype."""
        return "collapse_" in name or self.trunk.keeps_fp32(name)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers of all modules."""
        return [layer for index in range(self.num_modules) for layer in self._at(index).layers]

    def module(self, depth: int) -> int:
        """Index of the module that computes `depth` (1-based)."""
        return min(depth, self.num_modules) - 1

    def kinds(self, index: int) -> list[Kind]:
        """How each layer of module `index` attends."""
        return self._at(index).kinds

    def cache(self, batch_size: int) -> Cache:
        """An empty cache of one module's keys and values for batch_size rows."""
        kinds = [kind for index in range(self.num_modules) for kind in self.kinds(index)]
        return new_cache(kinds, batch_size, device=self.trunk.device, spare=_SPARE)

    def eats_recycled(self, depth: int) -> bool:
        """Whether `depth` eats the state that the depth before handed on, rather than the trunk's."""
        return depth > (self.num_modules if self.family.order == "unchained" else 1)

    def step(
        self,
        index: int,
        tokens: Tensor,
        hidden: Tensor,
        *,
        cache: Cache | None = None,
        within: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Step:
        """Module `index` over pairs: tokens [B, T], maybe on the host, hidden [B, T, H]. With a cache the T columns are
        a window that the caller closes with `cache.keep`; without one, positions count from 0 and attention is causal,
        and within [B, 1, T, T] limits it further."""
        if isinstance(cache, Apart):
            steps = [
                self.step(index, tokens[row : row + 1], hidden[row : row + 1], cache=each)
                for row, each in enumerate(cache.rows)
            ]
            return Step(*(torch.cat([getattr(step, name) for step in steps]) for name in ("normed", "recycled")))
        tokens = tokens.to(hidden.device, non_blocking=True)
        columns = tokens.shape[1]
        if cache is not None:
            cache.begin(columns)
            positions = cache.positions(columns)
        elif positions is None:
            positions = torch.arange(columns, device=tokens.device).expand_as(tokens)
        kind = self._at(index).kind
        mask = self.trunk.mask(kind, columns, rows=len(tokens), cache=cache, within=within)
        return self._eat(index, tokens, hidden, positions=positions, mask=mask, cache=cache)

    def _eat(
        self,
        index: int,
        tokens: Tensor,
        hidden: Tensor,
        *,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | BlockCache | None,
    ) -> Step:
        module = self._at(index)
        embedded = module.embedding(tokens) if "embedding" in self.family.own else self._embed(tokens)
        embedded = embedded.to(module.dtype)  # of a head that trains in fp32 on a trunk in bf16
        rotary = self.trunk.rotary(embedded, positions, module.kind)
        hidden = hidden.to(embedded.dtype)
        return module(embedded, hidden, positions=positions, rotary=rotary, mask=mask, cache=cache)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.trunk.embed(tokens, raw=self.family.embedded == "raw")

    def output(self, index: int) -> nn.Linear:
        """The output head that reads module `index`'s normed states."""
        return self._at(index).output if "output" in self.family.own else self.trunk.output

    def _at(self, index: int) -> Module:
        return cast(Module, self.stack[index])

    def predict(self, index: int, normed: Tensor) -> Prediction:
        """normed [..., H] of module `index` -> what it predicts."""
        return Prediction(self.logits(index, normed))

    def logits(self, index: int, normed: Tensor) -> Tensor:
        """normed [..., H] of module `index` -> [..., V]; -inf for what is not in the shortlist, if there is one."""
        if self.shortlist is not None:
            weight = self.output(index).weight
            rows = self.shortlist.rows(weight)
            return self.shortlist.expand(nn.functional.linear(normed.to(weight.dtype), rows))
        return self.output(index)(normed) if "output" in self.family.own else self.trunk.logits(normed)

    def prepare(self, rows: int, windows: Sequence[int]) -> None:
        """Told before a text which numbers of columns the head will catch up on, see `Trunk.prepare`."""

    def chain(self, cache: Cache, sampling: Sampling, *, sampled: bool) -> None:
        """The fast path may draft natively."""
        return

    def recursion(self, cache: Cache, state: Tensor) -> "Recursion":
        """The last module going on by itself from the state [B, H] that the depth before handed on."""
        return Recursion(self, cache, state)

    def hiddens(self, tokens: Tensor, hidden: Tensor, depths: int, *, documents: Tensor | None = None) -> list[Tensor]:
        """Teacher-forced, all columns at once: tokens [B, T], hidden [B, T, H] -> depth k's normed states [B, T-k, H].

        documents [B, T] ids: attention and positions stay inside a document.
        """
        return self._forced(tokens, hidden, depths, documents, None)

    @property
    def can_unroll(self) -> bool:
        """Whether `unrolled` can be asked for: the last module keeps keys and values, and nothing else."""
        return all(kind.is_plain for kind in self.kinds(self.num_modules - 1))

    def unrolled(self, tokens: Tensor, hidden: Tensor, depths: int, *, documents: Tensor | None = None) -> list[Tensor]:
        """`hiddens` as decoding computes them, for the chains that leave all columns at once.

        They differ beyond the last module D. There, `hiddens` lets depth k attend to depth k of the columns before, at
        positions i; decoding, and this, to the module's columns j <= i and to the chain's own depths, at positions
        i + k - D. Memory for keys and masks is (depths - D + 1) times as much. Raises ConfigError where the head keeps
        more between columns than keys and values.
        """
        if not self.can_unroll:
            kinds = ", ".join(sorted({kind.name for kind in self.kinds(self.num_modules - 1)}))
            raise ConfigError(f"a head with layers of kind {kinds} cannot be unrolled; decode with it instead")
        layers = sum(len(self.kinds(index)) for index in range(self.num_modules))
        return self._forced(tokens, hidden, depths, documents, BlockCache(layers))

    def _forced(
        self, tokens: Tensor, hidden: Tensor, depths: int, documents: Tensor | None, blocks: BlockCache | None
    ) -> list[Tensor]:
        """blocks: an empty cache of an unrolled pass; None: each depth sees its own keys."""
        length = tokens.shape[1]
        if not 1 <= depths < length:
            raise ConfigError(f"depths = {depths}; expected 1 <= depths < {length}, the number of tokens")
        positions: Tensor = torch.arange(length, device=tokens.device).expand_as(tokens)
        within = None
        if documents is not None:
            positions, within = packed(documents)
        outs, recycled = [], hidden
        for depth in range(1, depths + 1):
            columns, index = length - depth, self.module(depth)
            eaten, states = tokens[:, depth:], (recycled if self.eats_recycled(depth) else hidden)[:, :columns]
            places = positions[:, :columns]
            if blocks is None or depth < self.num_modules:
                seen = None if within is None else within[:, :, :columns, :columns]
                step = self.step(index, eaten, states, positions=places, within=seen)
            else:
                beyond = depth - self.num_modules
                window = self._at(index).kind.window
                seen = chain_mask(length, self.num_modules, depth, window=window, within=within, device=tokens.device)
                mask = self.trunk.shown(seen)
                step = self._eat(index, eaten, states, positions=places + beyond, mask=mask, cache=blocks)
            outs.append(step.normed)
            recycled = step.recycled
        return outs

    def forward(self, tokens: Tensor, hidden: Tensor | None = None, *, depths: int | None = None) -> Tensor:
        """tokens [B, T], hidden [B, T, H] or None for the embeddings themselves -> logits [B, T-D, D, V].

        logits[:, i, k-1] predict token i+k+1 from the tokens up to i+k.
        """
        depths = self.num_modules if depths is None else depths
        states = self.hiddens(tokens, self.trunk.embedding(tokens) if hidden is None else hidden, depths)
        columns = tokens.shape[1] - depths
        logits = [self.logits(self.module(depth), state[:, :columns]) for depth, state in enumerate(states, start=1)]
        return torch.stack(logits, dim=2)


class Recursion:
    """The last module, one column a step: each eats the newest draft and the state that the step before handed on."""

    def __init__(self, head: Head, cache: Cache, state: Tensor) -> None:
        self._head, self._cache, self._state = head, cache, state

    def step(self, tokens: Sequence[int]) -> Prediction:
        """tokens: one a row -> logits [B, V] of the next depth. The column stands until the cache is truncated."""
        index = self._head.num_modules - 1
        eaten = torch.tensor(tokens, device=self._state.device)[:, None]
        step = self._head.step(index, eaten, self._state[:, None], cache=self._cache)
        self._cache.keep([1] * len(tokens))
        self._state = step.recycled[:, 0]
        return Prediction(self._head.logits(index, step.normed[:, 0]))


def outputs(trunk: Trunk, head: Head | None, depths: int) -> list[Tensor]:
    """The weights [V, H] that the trunk's normed states and those of depths 1, 2, ... are read with."""
    shared = trunk.readout  # once: the loss takes depths together whose weight is the same tensor
    if head is None or "output" not in head.family.own:
        return [shared] * (1 + (depths if head is not None else 0))
    return [shared, *(head.output(head.module(depth)).weight for depth in range(1, depths + 1))]


class StandaloneHead(Head):
    """A head that owns its embedding and (tied) output head: MTP for any model that can hand over its hidden states."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, num_modules: int = 1, num_heads: int = 4, max_length: int = 4096
    ) -> None:
        config = {
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": hidden_size // num_heads,
            "max_position_embeddings": max_length,
            "tie_word_embeddings": True,
        }
        family = replace(by_name("deepseek_v3"), block={"layer_types": ["full_attention"]})
        super().__init__(family, Trunk.from_config(config), num_modules=num_modules)
        self.embedding = self.trunk.embedding
