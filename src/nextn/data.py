"""Data: documents -> one stream of ids -> batches, a pure function of (seed, step), so that resuming needs no state.

A document is a (name, text); whoever reads another format yields those. It knows neither models nor losses, and
imports torch only where a batch becomes tensors.
"""

import hashlib
import os
import sysconfig
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

from nextn.bytelevel import is_byte_tokenizer
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.integer]
Encode = Callable[[Sequence[str]], Sequence[Sequence[int] | Ids]]

_TEST_FOLDERS = {"test", "tests", "idle_test"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def standard_library(*, tests: bool = False) -> list[Path]:
    """The running interpreter's own Python sources, ordered by relative path; without its tests unless asked for.

    CPython 3.11: 732 files, 12.1 MB; the numbers differ between versions. It is not all code: `encodings` (1.4 MB of
    tables that resemble each other) and `pydoc_data` (0.8 MB of prose) are in. Installed packages, the build's own
    configuration and files that are not UTF-8 text are left out. Raises ConfigError where no sources are installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(_sources(root, tests=tests), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise ConfigError(f"{root} holds no Python sources (an interpreter without them); name text files instead")
    return [path for path in paths if _is_text(path)]


def split(paths: Sequence[Path], *, held_out: float = 0.05, seed: int = 0) -> tuple[list[Path], list[Path]]:
    """(train, held out), each in the given order; a file's side hangs on the seed and its name below the common folder.

    So the side is the same on every machine, and stays when other files come or go. Unless held_out is 0, both sides
    get at least one file. Raises ConfigError for a share outside [0, 1), or one file alone.
    """
    if not 0 <= held_out < 1:
        raise ConfigError(f"held_out = {held_out}: expected a share of the files, 0 <= held_out < 1")
    if held_out == 0:
        return list(paths), []
    if len(paths) < 2:
        raise ConfigError(f"{len(paths)} file(s) cannot be split by file; add files, or set held_out to 0")
    root = os.path.commonpath([path.absolute().parent for path in paths])
    marks = {path: _mark(f"{seed}:{path.absolute().relative_to(root).as_posix()}") for path in paths}
    cut = bisect_left(sorted(marks.values()), held_out)
    held = set(sorted(paths, key=marks.__getitem__)[: min(max(cut, 1), len(paths) - 1)])
    return [path for path in paths if path not in held], [path for path in paths if path in held]


def encoder(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Texts -> ids, without added tokens, and with text that looks like a special token kept as plain text."""
    if is_byte_tokenizer(tokenizer):
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return lambda texts: tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end, each followed by one eos.

    ids [N] uint16 or int32; starts [documents] int64, each document's first token; newline: the id that ends a line,
    None if the tokenizer has none.
    """

    ids: Ids
    starts: NDArray[np.int64]
    names: tuple[str, ...]
    eos: int
    newline: int | None

    @classmethod
    def from_texts(cls, texts: Iterable[tuple[str, str]], encode: Encode, eos: int) -> "Corpus":
        """texts: (name, text) of each document; empty ones are left out. Raises ConfigError if nothing remains."""
        names: list[str] = []
        parts: list[Ids] = []
        for group in _groups(texts, 64):
            for (name, _), ids in zip(group, encode([text for _, text in group]), strict=True):
                if len(ids):
                    names.append(name)
                    parts.append(_compact(np.append(ids, eos)))
        if not parts:
            raise ConfigError("the data is empty: no document with text in it; check the paths that were given")
        starts = np.cumsum([0, *map(len, parts[:-1])])
        newline = [int(id) for id in encode(["\n"])[0]]
        return cls(np.concatenate(parts), starts, tuple(names), eos, newline[-1] if newline else None)

    @classmethod
    def from_files(cls, paths: Iterable[Path], tokenizer: "PreTrainedTokenizerBase") -> "Corpus":
        """One document per file. Raises ConfigError for a file that cannot be read or is not UTF-8 text."""
        eos = tokenizer.eos_token_id
        if eos is None:
            raise ConfigError("the tokenizer has no eos token, which ends each document; set tokenizer.eos_token")
        return cls.from_texts(((path.as_posix(), _read(path)) for path in paths), encoder(tokenizer), eos)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, its eos included."""
        return np.diff(self.starts, append=self.num_tokens)


@dataclass(frozen=True, eq=False)
class Batch:
    """tokens [B, T] int64; documents [B, T] int32, counted from 0 in each row, -1 for padding (which holds eos)."""

    tokens: "Tensor"
    documents: "Tensor"


class Batches:
    """Shuffled windows of a corpus. Step s is the same batch whenever and wherever it is asked for.

    pack=True: windows of the whole stream, taken as a ring, from an offset that each epoch draws; a row may hold parts
    of several documents. An epoch sees every token once, but for the last num_tokens % length before the offset.
    pack=False: a row holds one document or a piece of one, padded at its end, for trunks that carry state across
    documents; each epoch moves the cuts, and sees every token once.
    num_windows: rows of one epoch. A batch may hold the end of one epoch and the beginning of the next. The order comes
    from raw PCG64 bits, which numpy keeps the same between versions. Raises ConfigError for settings that the corpus
    cannot fill.
    """

    def __init__(self, corpus: Corpus, *, batch_size: int, length: int, seed: int, pack: bool = True) -> None:
        if batch_size < 1 or length < 2 or seed < 0:
            raise ConfigError(f"{batch_size=}, {length=}, {seed=}: expected batch_size >= 1, length >= 2 and seed >= 0")
        if pack and corpus.num_tokens < length:
            raise ConfigError(
                f"{length=}: the corpus has only {corpus.num_tokens} tokens; use a shorter one or more text"
            )
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
        return Batch(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(documents.astype(np.int32)))

    def _rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, index = np.divmod(rows, self.num_windows)
        drawn = [self._windows(int(epoch))[:, index[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(drawn, axis=1)

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        # [2, windows]: first token, number of tokens.
        bits = PCG64(SeedSequence([self.seed, epoch]))
        windows = self._packed(bits) if self.pack else self._per_document(bits)
        return windows[:, _shuffle(bits, windows.shape[1])]

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


def prompts(corpus: Corpus, *, count: int, length: int, seed: int, continuation: int = 256) -> list[Ids]:
    """count pieces of real text, each [length + continuation] ids: the prompt, then what really follows it.

    Each begins at a line or a document, stays inside its document, and overlaps no other; no document gives a second
    one before every document with room gave its first. Raises ConfigError if the corpus has not enough room.
    """
    if min(count, length) < 1 or min(continuation, seed) < 0:
        raise ConfigError(
            f"{count=}, {length=}, {continuation=}, {seed=}: expected count, length >= 1, the others >= 0"
        )
    size = length + continuation
    places = _places(corpus, size)
    order = _shuffle(PCG64(SeedSequence(seed)), len(places))
    taken: Counter[int] = Counter()
    ranked = []
    for document, begin in (places[index] for index in order):
        ranked.append((taken[document], begin))
        taken[document] += 1
    if len(ranked) < count:
        raise ConfigError(
            f"{count} prompts of {length} + {continuation} tokens: the corpus has room for {len(ranked)}; "
            "ask for fewer or shorter ones, or hold out more text"
        )
    ranked.sort(key=lambda place: place[0])
    return [corpus.ids[begin : begin + size] for _, begin in ranked[:count]]


@dataclass(frozen=True)
class Degeneracy:
    """How repetitive a text is; acceptance measured on a loop says nothing about the head.

    distinct: distinct 8-grams / all 8-grams. longest_run: most repetitions of one token in a row. loop: share of the
    longest stretch, anywhere, that repeats at least three times with one period; period: that period, 0 if none.
    """

    distinct: float
    longest_run: int
    loop: float
    period: int

    @property
    def looping(self) -> bool:
        """A quarter of the text is one loop, or fewer than 3 in 10 of its 8-grams are distinct.

        On windows of CPython's sources, as bytes, it is wrong for 0.2 % at 400 bytes and for 1.1 % at most from 200
        to 4000; texts below 200 bytes are too short to tell (3 % at 128: indentation and rulers).
        """
        return self.loop >= 0.25 or self.distinct < 0.3


def degeneracy(text: str | Sequence[int] | Ids, *, max_period: int = 256) -> Degeneracy:
    """text: a str (taken as bytes) or ids [T]. Loops of up to max_period tokens are looked for."""
    ids = np.frombuffer(text.encode(), np.uint8) if isinstance(text, str) else np.asarray(text)
    periods = range(1, min(max_period, len(ids) // 3) + 1)
    stretches = [(_recurrence(ids, period) + period, -period) for period in periods]
    loop, period = max((found for found in stretches if found[0] >= -3 * found[1]), default=(0, 0))
    return Degeneracy(
        distinct=_distinct(ids, 8),
        longest_run=min(_recurrence(ids, 1) + 1, len(ids)),
        loop=loop / max(len(ids), 1),
        period=-period,
    )


def _sources(root: Path, *, tests: bool) -> Iterator[Path]:
    skipped = _FOREIGN_FOLDERS if tests else _FOREIGN_FOLDERS | _TEST_FOLDERS
    for folder, folders, files in os.walk(root):
        # `config-*` and `_sysconfigdata*` hold the paths and flags of the machine that built the interpreter.
        folders[:] = [name for name in folders if name not in skipped and not name.startswith("config-")]
        yield from (
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _is_text(path: Path) -> bool:
    try:
        _read(path)
    except ConfigError:
        return False
    return True


def _read(path: Path) -> str:
    # Bytes, not text mode: line ends stay as they are.
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name readable text files") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); convert it or leave it out") from error
    if "\0" in text:
        raise ConfigError(f"{path}: holds a NUL byte, so it is no text file; convert it or leave it out")
    return text


def _mark(name: str) -> float:
    # Uniform in [0, 1).
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) / 2**48


def _groups(texts: Iterable[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    iterator = iter(texts)
    while group := list(islice(iterator, size)):
        yield group


def _compact(ids: Ids) -> Ids:
    return ids.astype(np.uint16 if ids.max() <= np.iinfo(np.uint16).max else np.int32)


def _shuffle(bits: PCG64, count: int) -> NDArray[np.int64]:
    # Generator.permutation may change between numpy versions; the raw bits may not (NEP 19).
    return np.argsort(bits.random_raw(count), kind="stable")


def _places(corpus: Corpus, size: int) -> list[tuple[int, int]]:
    # (document, first token), disjoint, in order.
    lines = np.flatnonzero(corpus.ids == corpus.newline) + 1
    begins = np.union1d(corpus.starts, lines)
    documents = np.searchsorted(corpus.starts, begins, side="right") - 1
    ends = (corpus.starts + corpus.lengths - 1)[documents]
    free, places = 0, []
    for document, begin, end in zip(documents.tolist(), begins.tolist(), ends.tolist(), strict=True):
        if free <= begin <= end - size:
            places.append((document, begin))
            free = begin + size
    return places


def _recurrence(ids: Ids, period: int) -> int:
    # Length of the longest stretch of i with ids[i] == ids[i - period].
    breaks = np.flatnonzero(np.concatenate([[True], ids[period:] != ids[:-period], [True]]))
    return int(np.diff(breaks).max()) - 1


def _distinct(ids: Ids, size: int) -> float:
    if len(ids) < size:
        return 1.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, size)
    return len(np.unique(grams, axis=0)) / len(grams)
