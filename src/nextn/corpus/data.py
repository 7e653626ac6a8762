"""Data: documents -> one stream of ids.

A document is a (name, text); whoever reads another format yields those. The files of this folder know neither models
nor losses, and import torch only where a batch becomes tensors.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nextn.corpus.bytelevel import is_byte_tokenizer
from nextn.corpus.text_files import read_text
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.integer]
Encode = Callable[[Sequence[str]], Sequence[Sequence[int] | Ids]]


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


def _groups(texts: Iterable[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    iterator = iter(texts)
    while group := list(islice(iterator, size)):
        yield group


def _compact(ids: Ids) -> Ids:
    return ids.astype(np.uint16 if ids.max() <= np.iinfo(np.uint16).max else np.int32)
