"""Losses over a part of the vocabulary: frequent tokens as they are, and others drawn at random to stand for the rest.

With V tokens and a part N, products with the lm_head cost N / V. Each of n drawn tokens stands for R / n of the R that
are not kept: log(R / n) is added to its logit, the trunk's and the head's. Sums over the rest, which are what a
divergence and its normalizers are made of, are thus estimated without bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor
from torch.nn import functional

from nextn.losses.mtp_loss import Targets

_COLUMNS = 8  # products with an odd number of columns are slow


@dataclass(frozen=True, eq=False)
class SampledVocabulary:
    """The tokens of one batch's loss."""

    ids: Tensor  # [N] int64, ascending
    offsets: Tensor  # [N] fp32, log of how many tokens each stands for

    @classmethod
    def of(cls, tokens: Tensor, frequent: Tensor, num_drawn: int, *, vocab_size: int, seed: int) -> "SampledVocabulary":
        """Take the batch's tokens, the frequent ones, and `num_drawn` of the others: the same for the same batch."""
        kept = torch.zeros(vocab_size, dtype=torch.bool)
        kept[frequent] = True
        kept[tokens.flatten().cpu()] = True
        others = (~kept).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(seed + int(tokens.sum()))
        drawn = others[torch.randperm(len(others), generator=generator)[:num_drawn]]
        offsets = torch.zeros(vocab_size)
        if len(drawn):
            offsets[drawn] = log(len(others) / len(drawn))
        kept[drawn] = True
        ids = kept.nonzero()[:, 0]
        return cls(ids.to(tokens.device), offsets[ids].to(tokens.device))

    def targets(self, targets: Targets) -> Targets:
        """Number the tokens by their places in `ids`; every token of the batch has one."""
        return replace(targets, tokens=torch.searchsorted(self.ids, targets.tokens))

    def weights(self, weights: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Return rows [N, H + 8] of each lm_head weight [V, H], with the offsets as the first further column."""
        column = functional.pad(self.offsets[:, None] * temperature, (0, _COLUMNS - 1))
        rows = {id(each): torch.cat([each[self.ids], column.to(each)], dim=1) for each in weights}
        return [rows[id(each)] for each in weights]

    def inputs(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return states [..., H + 8], for products with `weights`."""
        return [
            torch.cat([state, functional.pad(torch.ones_like(state[..., :1]), (0, _COLUMNS - 1))], dim=-1)
            for state in states
        ]
