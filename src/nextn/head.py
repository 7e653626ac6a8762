"""The MTP head: norms + projection + the trunk's own block per module, chained over depths.

A module eats pairs: at column i the embedding of token t_{i+1} and the hidden state h_i, and predicts t_{i+2}. Depth k
eats (t_{i+k}, the state of depth k-1 at column i). It does not know how drafts are verified.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nextn.errors import ConfigError
from nextn.families import Family, by_name
from nextn.rollback import AttentionLayer, Cache
from nextn.trunk import Trunk, packed


@dataclass(frozen=True)
class Step:
    """normed [B, T, H]: what the output head reads. recycled [B, T, H]: what the next depth eats."""

    normed: Tensor
    recycled: Tensor


class Module(nn.Module):
    """One MTP module (DeepSeek-V3, arXiv 2412.19437, eq. 21-23), with the family's conventions."""

    def __init__(self, family: Family, trunk: Trunk, index: int, count: int) -> None:
        super().__init__()
        size = trunk.config.hidden_size
        self.family = family
        self.token_norm, self.hidden_norm = trunk.norm(), trunk.norm()
        self.projection = nn.Linear(2 * size, size, bias=False, dtype=self.token_norm.weight.dtype)
        trunk.initialize(self.projection)
        self.block = trunk.block(index, count, family.block)
        self.final_norm = trunk.norm()

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        *,
        positions: Tensor,
        rotary: object,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Step:
        """embedded, hidden [B, T, H] at positions [B, T] -> Step."""
        if self.family.position0 == "zero":
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        joined = self._join(embedded, hidden)
        return self._finish(self._run_block(joined, positions=positions, rotary=rotary, mask=mask, cache=cache))

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Norms and projection -> what the block eats."""
        parts = [self.token_norm(embedded), self.hidden_norm(hidden)]
        if self.family.concat == "hidden_first":
            parts.reverse()
        return self.projection(torch.cat(parts, dim=-1))

    def _run_block(
        self, states: Tensor, *, positions: Tensor, rotary: object, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        out = self.block(
            states,
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out[0] if isinstance(out, tuple) else out

    def _finish(self, raw: Tensor) -> Step:
        normed = self.final_norm(raw)
        return Step(normed, normed if self.family.recycled == "post" else raw)


class Head(nn.Module):
    """One module applied again and again, or num_modules distinct ones; depths beyond the last module reuse it.

    Embedding and output head are the trunk's and are not parameters of this module.
    """

    def __init__(self, family: Family, trunk: Trunk, *, num_modules: int = 1) -> None:
        super().__init__()
        if num_modules < 1:
            raise ConfigError(f"num_modules = {num_modules}; a head has at least one module")
        self.family = family
        self._trunk = (trunk,)  # in a tuple, so that nn.Module does not take the trunk's parameters for the head's
        self.stack = nn.ModuleList(Module(family, trunk, index, num_modules) for index in range(num_modules))

    @property
    def trunk(self) -> Trunk:
        return self._trunk[0]

    @property
    def num_modules(self) -> int:
        return len(self.stack)

    def module(self, depth: int) -> int:
        """Index of the module that computes `depth` (1-based)."""
        return min(depth, self.num_modules) - 1

    def cache(self, batch_size: int) -> Cache:
        """An empty cache of one module's keys and values for batch_size rows."""
        return Cache([AttentionLayer() for _ in self.stack], batch_size, device=self.trunk.device)

    def step(
        self,
        index: int,
        tokens: Tensor,
        hidden: Tensor,
        *,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Step:
        """Module `index` over pairs: tokens [B, T], hidden [B, T, H]. With a cache the T columns are a window that the
        caller closes with `cache.keep`; without one, positions count from 0 and attention is causal."""
        if cache is not None:
            cache.begin(tokens.shape[1])
            positions, mask = cache.positions(tokens.shape[1]), cache.mask(tokens.shape[1])
        elif positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        embedded = self.trunk.embedding(tokens)
        hidden = hidden.to(embedded.dtype)
        return self.stack[index](
            embedded, hidden, positions=positions, rotary=self.trunk.rotary(embedded, positions), mask=mask, cache=cache
        )

    def logits(self, index: int, normed: Tensor) -> Tensor:
        """normed [..., H] of module `index` -> [..., V]."""
        return self.trunk.logits(normed)

    def hiddens(self, tokens: Tensor, hidden: Tensor, depths: int, *, documents: Tensor | None = None) -> list[Tensor]:
        """Teacher-forced, all columns at once: tokens [B, T], hidden [B, T, H] -> depth k's normed states [B, T-k, H].

        documents [B, T] ids: attention and positions stay inside a document.
        """
        length = tokens.shape[1]
        if not 1 <= depths < length:
            raise ConfigError(f"depths = {depths}; expected 1 <= depths < {length}, the number of tokens")
        positions, mask = (None, None) if documents is None else packed(documents)
        outs = []
        for depth in range(1, depths + 1):
            columns = length - depth
            step = self.step(
                self.module(depth),
                tokens[:, depth:],
                hidden[:, :columns],
                positions=None if positions is None else positions[:, :columns],
                mask=None if mask is None else mask[:, :, :columns, :columns],
            )
            outs.append(step.normed)
            hidden = step.recycled
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
