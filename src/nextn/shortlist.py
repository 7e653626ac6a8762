"""A vocabulary to draft from: the most frequent tokens of a text, so that a head reads fewer rows of its output weight.

Decoding stays exact, as a draft may come from any law: a token outside is never drafted, and the trunk alone says it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Shortlist:
    """ids [N] int64, ascending; tokens of a vocabulary of vocab_size."""

    ids: Tensor
    vocab_size: int

    @classmethod
    def of(
        cls,
        texts: Iterable[Sequence[int] | NDArray[np.integer]],
        size: int,
        *,
        vocab_size: int,
        always: Iterable[int] = (),
    ) -> "Shortlist":
        """The `always` (eos, special tokens), then the most frequent ids of the texts; of equals, the lowest.

        Raises ConfigError for a size that does not fit, texts without a token and ids outside the vocabulary.
        """
        counts = _counts(texts, vocab_size)
        chosen = sorted(set(always))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < vocab_size:
            raise ConfigError(f"token ids {chosen[0]}..{chosen[-1]} are always to be in; expected 0..{vocab_size - 1}")
        if not max(1, len(chosen)) <= size <= vocab_size:
            raise ConfigError(f"size = {size}; expected {max(1, len(chosen))} to {vocab_size}, the whole vocabulary")
        counts[chosen] = counts.max() + 1
        ids = np.sort(np.argsort(-counts, kind="stable")[:size])
        return cls(torch.from_numpy(ids), vocab_size)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, weight: Tensor) -> Tensor:
        """The rows of an output weight [V, H] that are read -> [N, H]."""
        return weight[self.ids.to(weight.device)]

    def expand(self, logits: Tensor) -> Tensor:
        """Logits [..., N] over the list -> [..., V], of which every law gives nothing to other tokens."""
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -inf)
        full[..., self.ids.to(logits.device)] = logits
        return full

    def lost(self, laws: Tensor) -> Tensor:
        """The share of laws [..., V] on tokens outside: what the acceptance loses at most -> [...]."""
        inside = laws[..., self.ids.to(laws.device)].sum(-1)
        return (laws.sum(-1) - inside).clamp_min(0)


def _counts(texts: Iterable[Sequence[int] | NDArray[np.integer]], vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        ids = np.asarray(text)
        if not ids.size:
            continue
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ConfigError(f"a text has token ids {ids.min()}..{ids.max()}; expected 0..{vocab_size - 1}")
        counts += np.bincount(ids, minlength=vocab_size)
    if not counts.any():
        raise ConfigError("the texts have no token; give some that are like what will be decoded")
    return counts
