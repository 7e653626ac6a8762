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
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

from nextn.corpus.bytelevel import is_byte_tokenizer
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.integer]
Encode = Callable[[Sequence[str]], Sequence[Sequence[int] | Ids]]
T = TypeVar("T")

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
    return divided(paths, path_marks(paths, seed=seed), held_out=held_out)


def path_marks(paths: Sequence[Path], *, seed: int = 0) -> list[float]:
    """The mark of each file: it hangs on the seed and the file's name below the common folder."""
    root = os.path.commonpath([path.absolute().parent for path in paths]) if paths else ""
    return [mark(f"{seed}:{path.absolute().relative_to(root).as_posix()}".encode()) for path in paths]


def mark(name: bytes) -> float:
    """A number in [0, 1) that hangs on the name alone; over many names it is uniform."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()) / 2**48


def divided(items: Sequence[T], marks: Sequence[float], *, held_out: float) -> tuple[list[T], list[T]]:
    """(train, held out), each in the given order: held out are those marked below that share of [0, 1).

    Each side gets at least one mark, if there are two; items of one mark, such as copies of a text, stay together.
    """
    distinct = sorted(set(marks))
    held = set(distinct[: min(max(bisect_left(distinct, held_out), 1), len(distinct) - 1)])
    pairs = list(zip(items, marks, strict=True))
    return [item for item, mark in pairs if mark not in held], [item for item, mark in pairs if mark in held]


def encoded(texts: Iterable[tuple[str, str]], encode: Encode) -> "Iterator[Document]":
    """(name, text) -> documents, a few at a time."""
    for group in _groups(texts, 64):
        for (name, _), ids in zip(group, encode([text for _, text in group]), strict=True):
            yield Document(name, np.asarray(ids))


def encoder(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Texts -> ids, without added tokens, and with text that looks like a special token kept as plain text."""
    if is_byte_tokenizer(tokenizer):
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return lambda texts: tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]


def newline_of(encode: Encode) -> int | None:
    """The id that ends a line; None if there is none."""
    newline = [int(id) for id in encode(["\n"])[0]]
    return newline[-1] if newline else None


def eos_of(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The id that ends a document. Raises ConfigError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos token, which ends each document; set tokenizer.eos_token")
    return int(tokenizer.eos_token_id)


@dataclass(frozen=True, eq=False)
class Document:
    """One text as ids [T]. mask [T] bool: which of them count as labels; None: all, and the eos behind them."""

    name: str
    ids: Ids
    mask: NDArray[np.bool_] | None = None

    def closed(self, eos: int) -> "Document":
        """The same with an eos at its end; where a mask is, an eos that the text did not have does not count."""
        if len(self.ids) and self.ids[-1] == eos:
            return Document(self.name, _compact(self.ids), self.mask)
        mask = None if self.mask is None else np.append(self.mask, False)
        return Document(self.name, _compact(np.append(self.ids, eos)), mask)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end, each ending with one eos.

    ids [N] uint16 or int32; starts [documents] int64, each document's first token; newline: the id that ends a line,
    None if the tokenizer has none. mask [N] bool: which tokens count as labels, None if all do. notes: what reading
    found worth saying that is no error.
    """

    ids: Ids
    starts: NDArray[np.int64]
    names: tuple[str, ...]
    eos: int
    newline: int | None
    mask: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, documents: Iterable[Document], encode: Encode, eos: int, *, notes: Sequence[str] = ()) -> "Corpus":
        """Empty documents are left out. Raises ConfigError if nothing remains, or nothing of it counts as a label."""
        parts = [document.closed(eos) for document in documents if len(document.ids)]
        if not parts:
            raise ConfigError("the data is empty: no document with text in it; check the paths that were given")
        mask = None
        if any(part.mask is not None for part in parts):
            mask = np.concatenate([np.ones(len(part.ids), bool) if part.mask is None else part.mask for part in parts])
            if not mask.any():
                raise ConfigError(
                    "no token of the data counts as a label: no conversation has an assistant's turn, no prompt an "
                    "answer; use --all-tokens to train on every token"
                )
        starts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
        names = tuple(part.name for part in parts)
        ids = np.concatenate([part.ids for part in parts])
        return cls(ids, starts, names, eos, newline_of(encode), mask, tuple(notes))

    @property
    def num_labels(self) -> int:
        return self.num_tokens if self.mask is None else int(self.mask.sum())

    @classmethod
    def from_texts(cls, texts: Iterable[tuple[str, str]], encode: Encode, eos: int) -> "Corpus":
        """texts: (name, text) of each document; empty ones are left out. Raises ConfigError if nothing remains."""
        return cls.of(encoded(texts, encode), encode, eos)

    @classmethod
    def from_files(cls, paths: Iterable[Path], tokenizer: "PreTrainedTokenizerBase") -> "Corpus":
        """One document per file. Raises ConfigError for a file that cannot be read or is not UTF-8 text."""
        texts = ((path.as_posix(), read_text(path)) for path in paths)
        return cls.from_texts(texts, encoder(tokenizer), eos_of(tokenizer))

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokens, where documents begin, and which tokens count."""
        digest = hashlib.sha256()
        for part in (self.ids.astype("<i4"), self.starts.astype("<i8"), self.mask):
            digest.update(b"" if part is None else part.tobytes())
        return digest.hexdigest()

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError, with the document, for a token that a model of that many does not have."""
        if int(self.ids.max()) >= size:
            place = int(self.ids.argmax())
            name = self.names[int(np.searchsorted(self.starts, place, side="right")) - 1]
            raise ConfigError(
                f"{name}: token {self.ids[place]} is not in the model's vocabulary of {size}; give text, or ids of "
                "this model's tokenizer"
            )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, its eos included."""
        return np.diff(self.starts, append=self.num_tokens)


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


def openings(corpus: Corpus, *, count: int, seed: int) -> list[Ids]:
    """What stands before the first token that counts, of up to count documents drawn by the seed: their prompts.

    Documents whose first token counts have none.
    """
    if corpus.mask is None:
        return []
    pieces = zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True)
    sizes = [(begin, int(corpus.mask[begin : begin + length].argmax())) for begin, length in pieces]
    places = [(begin, size) for begin, size in sizes if size]
    order = shuffled(PCG64(SeedSequence(seed)), len(places))[:count]
    return [corpus.ids[begin : begin + size] for begin, size in (places[index] for index in order)]


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
    order = shuffled(PCG64(SeedSequence(seed)), len(places))
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
        read_text(path)
    except ConfigError:
        return False
    return True


def read_text(path: Path) -> str:
    """A UTF-8 text, its line ends as they are. Raises ConfigError for a file that is none."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name readable text files") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); convert it or leave it out") from error
    if "\0" in text:
        raise ConfigError(f"{path}: holds a NUL byte, so it is no text file; convert it or leave it out")
    return text


def _groups(texts: Iterable[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    iterator = iter(texts)
    while group := list(islice(iterator, size)):
        yield group


def _compact(ids: Ids) -> Ids:
    return ids.astype(np.uint16 if ids.max() <= np.iinfo(np.uint16).max else np.int32)


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
