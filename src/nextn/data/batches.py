"""What training takes from a corpus: batches of its texts, and prompts to generate data from.

A batch is a pure function of (seed, step), so resuming needs no state.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

from nextn.data.corpus import Corpus, Ids
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of token ids; padding holds eos."""

    tokens: "Tensor"  # [B, T] int64
    documents: "Tensor"  # [B, T] int32, numbered from 0 in each row, -1 for padding
    mask: "Tensor | None" = None  # [B, T] bool: tokens that are labels, never padding; None = all but padding

    @property
    def label_mask(self) -> "Tensor":
        """[B, T] bool: the tokens that are labels."""
        return self.documents >= 0 if self.mask is None else self.mask


class Batches:
    """Shuffled rows of a corpus. Step s is the same batch in every run and on every machine.

    With `pack`, rows are consecutive slices of the whole token stream, treated as a ring, from a random offset per
    epoch. A row may hold parts of several documents. An epoch covers every token once, except for the last num_tokens %
    length before the offset. Without `pack`, a row holds one document or a piece of one, padded at its end, for trunks
    that carry state across documents. Each epoch moves the cuts and covers every token once.

    A batch may span the end of one epoch and the beginning of the next. The order comes from raw PCG64 bits, which
    numpy keeps stable between versions. Raises ConfigError, calling the corpus `name`, if it has fewer than `length`
    tokens, or a setting is out of range.
    """

    def __init__(
        self, corpus: Corpus, *, batch_size: int, length: int, seed: int, pack: bool = True, name: str = "the corpus"
    ) -> None:
        if batch_size < 1 or length < 2 or seed < 0:
            raise ConfigError(f"{batch_size=}, {length=}, {seed=}: expected batch_size >= 1, length >= 2 and seed >= 0")
        if pack and corpus.num_tokens < length:
            raise ConfigError(
                f"{length=}: {name} has only {corpus.num_tokens} tokens; use more text or a smaller length"
            )
        self.corpus, self.batch_size, self.length, self.seed, self.pack = corpus, batch_size, length, seed, pack
        self.rows_per_epoch = corpus.num_tokens // length if pack else int(self._pieces().sum())
        self._epoch_rows = lru_cache(maxsize=2)(self._sample_epoch)

    def batch(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """Return rows rank::world of the global batch. Raises ConfigError if it cannot be split evenly."""
        import torch

        if self.batch_size % world or not 0 <= rank < world:
            raise ConfigError(
                f"batch_size {self.batch_size} for {rank=} of {world=}: expected a multiple of world, world > rank"
            )
        starts, lengths = self._rows(step * self.batch_size + np.arange(rank, self.batch_size, world))
        offsets = np.arange(self.length)
        positions = (starts[:, None] + offsets) % self.corpus.num_tokens
        is_real = offsets < lengths[:, None]
        tokens = np.where(is_real, self.corpus.ids[positions], self.corpus.eos)
        documents = np.where(is_real, self._documents(positions), -1)
        mask = None if self.corpus.mask is None else torch.from_numpy(self.corpus.mask[positions] & is_real)
        return Batch(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(documents.astype(np.int32)), mask)

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, index = np.divmod(indices, self.rows_per_epoch)
        rows = [self._epoch_rows(int(epoch))[:, index[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(rows, axis=1)

    def _sample_epoch(self, epoch: int) -> NDArray[np.int64]:
        """[2, rows]: each row's first token and number of tokens."""
        bits = PCG64(SeedSequence([self.seed, epoch]))
        rows = self._packed_rows(bits) if self.pack else self._document_rows(bits)
        return rows[:, permutation(bits, rows.shape[1])]

    def _packed_rows(self, bits: PCG64) -> NDArray[np.int64]:
        starts = int(bits.random_raw()) % self.corpus.num_tokens + np.arange(self.rows_per_epoch) * self.length
        return np.stack([starts, np.full_like(starts, self.length)])

    def _document_rows(self, bits: PCG64) -> NDArray[np.int64]:
        pieces, lengths = self._pieces(), self.corpus.lengths
        # The first piece is `shift` tokens shorter than a row, so that the cuts move while their number stays.
        shift = (bits.random_raw(len(pieces)) % (pieces * self.length - lengths + 1).astype(np.uint64)).astype(np.int64)
        document = np.repeat(np.arange(len(pieces)), pieces)
        piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        ends = np.minimum((piece + 1) * self.length - shift[document], lengths[document])
        starts = np.maximum(piece * self.length - shift[document], 0)
        return np.stack([self.corpus.starts[document] + starts, ends - starts])

    def _pieces(self) -> NDArray[np.int64]:
        """The number of rows that each document takes."""
        return -(-self.corpus.lengths // self.length)

    def _documents(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        document = np.searchsorted(self.corpus.starts, positions, side="right") - 1
        is_start = self.corpus.starts[document] == positions
        numbers: NDArray[np.int64] = is_start.cumsum(axis=1) - is_start[:, :1]
        return numbers


def permutation(bits: PCG64, count: int) -> NDArray[np.int64]:
    """Return a random permutation of 0..count-1 that is the same in every version of numpy."""
    # Generator.permutation may change between versions; the raw bits may not (NEP 19).
    return np.argsort(bits.random_raw(count), kind="stable")


def leading_prompts(corpus: Corpus, *, count: int, seed: int) -> list[Ids]:
    """Return the tokens before the first label of up to `count` random documents, i.e. the prompts of their answers.

    Documents that begin with a label have no prompt and are skipped.
    """
    if corpus.mask is None:
        return []
    spans = zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True)
    sizes = [(start, int(corpus.mask[start : start + length].argmax())) for start, length in spans]
    prompts = [(start, size) for start, size in sizes if size]
    order = permutation(PCG64(SeedSequence(seed)), len(prompts))[:count]
    return [corpus.ids[start : start + size] for start, size in (prompts[index] for index in order)]


def sample_prompts(corpus: Corpus, *, count: int, length: int, seed: int) -> list[Ids]:
    """Sample `count` excerpts of the text, `length` ids each.

    Each starts at a line or a document and stays inside its document; none overlap. No document gives a second excerpt
    before every document that is long enough has given one. Raises ConfigError if the corpus is too small.
    """
    if min(count, length) < 1 or seed < 0:
        raise ConfigError(f"{count=}, {length=}, {seed=}: expected count, length >= 1, seed >= 0")
    candidates = _excerpts(corpus, length)
    order = permutation(PCG64(SeedSequence(seed)), len(candidates))
    num_taken: Counter[int] = Counter()
    ranked = []
    for document, start in (candidates[index] for index in order):
        ranked.append((num_taken[document], start))
        num_taken[document] += 1
    if len(ranked) < count:
        raise ConfigError(
            f"{count} prompts of {length} tokens: the corpus has only {len(ranked)}; ask for fewer or shorter ones, "
            "or hold out more text"
        )
    ranked.sort(key=lambda pair: pair[0])
    return [corpus.ids[start : start + length] for _, start in ranked[:count]]


def _excerpts(corpus: Corpus, size: int) -> list[tuple[int, int]]:
    """(document, first token) of disjoint excerpts, in order."""
    lines = np.flatnonzero(corpus.ids == corpus.newline) + 1
    starts = np.union1d(corpus.starts, lines)
    documents = np.searchsorted(corpus.starts, starts, side="right") - 1
    ends = (corpus.starts + corpus.lengths - 1)[documents]
    next_free, excerpts = 0, []
    for document, start, end in zip(documents.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if next_free <= start <= end - size:
            excerpts.append((document, start))
            next_free = start + size
    return excerpts
