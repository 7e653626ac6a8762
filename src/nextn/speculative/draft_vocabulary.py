"""A reduced vocabulary to draft from: the most frequent tokens of a text, so that fewer rows of the lm_head are read.

Decoding stays exact, as q may be any distribution: a token outside is never drafted, but the trunk can still emit it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.errors import ConfigError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens that a head drafts from."""

    ids: Tensor  # [N] int64, ascending
    vocab_size: int

    @classmethod
    def of(
        cls,
        texts: Iterable[Sequence[int] | NDArray[np.integer]],
        size: int,
        *,
        vocab_size: int,
        always: Collection[int] = (),
    ) -> "DraftVocabulary":
        """Choose `size` tokens: those in `always` (eos, special tokens), then the most frequent of the texts.

        Of equally frequent tokens, the lowest id is chosen. Raises ConfigError for a size out of range, texts without
        tokens, or ids outside the vocabulary.
        """
        required = len(set(always))
        if not max(1, required) <= size <= vocab_size:
            raise ConfigError(f"size = {size}; expected {max(1, required)} to {vocab_size}, the whole vocabulary")
        ids = np.sort(by_frequency(texts, vocab_size, always=always)[:size])
        return cls(torch.from_numpy(ids), vocab_size)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, weight: Tensor) -> Tensor:
        """Return the rows [N, H] of an lm_head's weight [V, H], or of one that has only these rows."""
        return weight if len(weight) == len(self) else weight[self.ids.to(weight.device)]

    def expand(self, logits: Tensor) -> Tensor:
        """Expand logits [..., N] of these tokens to the whole vocabulary [..., V]; -inf for all others."""
        expanded = logits.new_full((*logits.shape[:-1], self.vocab_size), -inf)
        return expanded.scatter_(-1, self.ids.to(logits.device).expand(logits.shape), logits)


def by_frequency(
    texts: Iterable[Sequence[int] | NDArray[np.integer]], vocab_size: int, *, always: Iterable[int] = ()
) -> NDArray[np.int64]:
    """Return all token ids: those in `always`, then from the most to the least frequent of the texts, ties by id.

    Raises ConfigError for texts without tokens, or ids outside the vocabulary.
    """
    counts = _counts(texts, vocab_size)
    required = sorted(set(always))
    if required and not 0 <= required[0] <= required[-1] < vocab_size:
        raise ConfigError(f"always = token ids {required[0]}..{required[-1]}; expected ids within 0..{vocab_size - 1}")
    counts[required] = counts.max() + 1
    return np.argsort(-counts, kind="stable")


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
        raise ConfigError("the texts have no tokens; pass texts similar to what will be decoded")
    return counts
