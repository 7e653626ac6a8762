"""Batches of a corpus: a pure function of (seed, step), so that resuming needs no state."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

from nextn.corpus.data import Corpus
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """tokens [B, T] int64; documents [B, T] int32, counted from 0 in each row, -1 for padding (which holds eos);
    mask [B, T] bool: which tokens count as labels, padding never; None: all that are no padding."""

    tokens: "Tensor"
    documents: "Tensor"
    mask: "Tensor | None" = None

    @property
    def counted(self) -> "Tensor":
        """[B, T] bool: the tokens that count as labels."""
        return self.documents >= 0 if self.mask is None else self.mask


class Batches:
    """Shuffled windows of a corpus. Step s is the same batch whenever and wherever it is asked for.

    pack=True: windows of the whole stream, taken as a ring, from an offset that each epoch draws; a row may hold parts
    of several documents. An epoch sees every token once, but for the last num_tokens % length before the offset.
    pack=False: a row holds one document or a piece of one, padded at its end, for trunks that carry state across
    documents; each epoch moves the cuts, and sees every token once.
    num_windows: rows of one epoch. A batch may hold the end of one epoch and the beginning of the next. The order comes
    from raw PCG64 bits, which numpy keeps the same between versions. Raises ConfigError for settings that the corpus
    cannot fill; what: the corpus, for that message.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch_size: int,
        length: int,
        seed: int,
        pack: bool = True,
        what: str = "the corpus",
    ) -> None:
        if batch_size < 1 or length < 2 or seed < 0:
            raise ConfigError(f"{batch_size=}, {length=}, {seed=}: expected batch_size >= 1, length >= 2 and seed >= 0")
        if pack and corpus.num_tokens < length:
            raise ConfigError(f"{length=}: {what} has only {corpus.num_tokens} tokens; use a shorter one or more text")
        self.corpus, self.batch_size, self.length, self.seed, self.pack = corpus, batch_size, length, seed, pack
        self.num_windows = corpus.num_tokens // length if pack else int(self._pieces().sum())
        self._windows = lru_cache(maxsize=2)(self._draw)

    def batch(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """Rows rank::world of the global batch. Raises ConfigError if it cannot be dealt out evenly."""
        import torch

        if self.batch_size % world or not 0 <= rank < world:
            raise ConfigError(
                f"batch_size {self.batch_size} for {rank=} of {world=}: expected a multiple of world, world > rank"
            )
        begins, counts = self._rows(step * self.batch_size + np.arange(rank, self.batch_size, world))
        columns = np.arange(self.length)
        positions = (begins[:, None] + columns) % self.corpus.num_tokens
        real = columns < counts[:, None]
        tokens = np.where(real, self.corpus.ids[positions], self.corpus.eos)
        documents = np.where(real, self._documents(positions), -1)
        mask = None if self.corpus.mask is None else torch.from_numpy(self.corpus.mask[positions] & real)
        return Batch(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(documents.astype(np.int32)), mask)

    def _rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, index = np.divmod(rows, self.num_windows)
        drawn = [self._windows(int(epoch))[:, index[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(drawn, axis=1)

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        # [2, windows]: first token, number of tokens.
        bits = PCG64(SeedSequence([self.seed, epoch]))
        windows = self._packed(bits) if self.pack else self._per_document(bits)
        return windows[:, shuffled(bits, windows.shape[1])]

    def _packed(self, bits: PCG64) -> NDArray[np.int64]:
        begins = int(bits.random_raw()) % self.corpus.num_tokens + np.arange(self.num_windows) * self.length
        return np.stack([begins, np.full_like(begins, self.length)])

    def _per_document(self, bits: PCG64) -> NDArray[np.int64]:
        pieces, lengths = self._pieces(), self.corpus.lengths
        # The first piece gives up `shift` tokens of its row, so that the cuts move and their number does not.
        shift = (bits.random_raw(len(pieces)) % (pieces * self.length - lengths + 1).astype(np.uint64)).astype(np.int64)
        document = np.repeat(np.arange(len(pieces)), pieces)
        piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        ends = np.minimum((piece + 1) * self.length - shift[document], lengths[document])
        begins = np.maximum(piece * self.length - shift[document], 0)
        return np.stack([self.corpus.starts[document] + begins, ends - begins])

    def _pieces(self) -> NDArray[np.int64]:
        return -(-self.corpus.lengths // self.length)

    def _documents(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        document = np.searchsorted(self.corpus.starts, positions, side="right") - 1
        is_start = self.corpus.starts[document] == positions
        numbers: NDArray[np.int64] = is_start.cumsum(axis=1) - is_start[:, :1]
        return numbers


def shuffled(bits: PCG64, count: int) -> NDArray[np.int64]:
    """The numbers 0..count-1 in an order that stays the same in every version of numpy."""
    # Generator.permutation may change between versions; the raw bits may not (NEP 19).
    return np.argsort(bits.random_raw(count), kind="stable")
