"""Documents, and the corpus that joins them into one stream of token ids; reading text files.

The default data is the Python standard library's own sources, which every machine has.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nextn.data.byte_tokenizer import is_byte_tokenizer
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, line endings unchanged. Raises ConfigError for any other file."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give readable text files") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); convert it or leave it out") from error
    if "\0" in text:
        raise ConfigError(f"{path}: contains a NUL byte, so it is not a text file; convert it or leave it out")
    return text


def standard_library() -> list[Path]:
    """Return the running interpreter's own Python sources, ordered by relative path, without its tests.

    CPython 3.11: 732 files, 12.1 MB; other versions differ. Not all of it is code: it includes `encodings` (1.4 MB of
    similar tables) and `pydoc_data` (0.8 MB of prose). Installed packages, the build configuration and files that are
    not UTF-8 text are left out. Raises ConfigError if the interpreter was installed without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise ConfigError(f"{root} has no Python sources (an interpreter without them); give text files instead")
    return [path for path in paths if _is_text(path)]


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # `config-*` and `_sysconfigdata*` contain paths and flags of the machine that built the interpreter.
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith("config-")]
        yield from (
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _is_text(path: Path) -> bool:
    try:
        read_text(path)
    except ConfigError:
        return False
    return True


Ids = NDArray[np.integer]
Encode = Callable[[Sequence[str]], Sequence[Sequence[int] | Ids]]


def encode_documents(texts: Iterable[tuple[str, str]], encode: Encode) -> "Iterator[Document]":
    """Encode (name, text) pairs as documents, 64 at a time."""
    pairs = iter(texts)
    while group := list(islice(pairs, 64)):
        for (name, _), ids in zip(group, encode([text for _, text in group]), strict=True):
            yield Document(name, np.asarray(ids))


def encoder(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Return a function from texts to ids; it adds no tokens, and encodes text like `<eos>` as plain text."""
    if is_byte_tokenizer(tokenizer):
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return lambda texts: tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]


def newline_id(encode: Encode) -> int | None:
    """Return the id that ends a line; None if there is none."""
    newline = [int(id) for id in encode(["\n"])[0]]
    return newline[-1] if newline else None


def eos_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id that ends a document. Raises ConfigError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos token, which ends each document; set tokenizer.eos_token")
    return int(tokenizer.eos_token_id)


@dataclass(frozen=True, eq=False)
class Document:
    """One text as token ids."""

    name: str
    ids: Ids  # [T]
    mask: NDArray[np.bool_] | None = None  # [T]: tokens that are labels; None = all, and the eos appended to them

    def with_eos(self, eos: int) -> "Document":
        """Return the document with eos at its end; if it has a mask, an eos added here is not a label."""
        if len(self.ids) and self.ids[-1] == eos:
            return Document(self.name, _compact(self.ids), self.mask)
        mask = None if self.mask is None else np.append(self.mask, False)
        return Document(self.name, _compact(np.append(self.ids, eos)), mask)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end, each ending with one eos.

    Attributes:
        ids: Token ids [N], uint16 or int32.
        starts: Index of each document's first token [documents], int64.
        names: Of the documents.
        eos: The token id that ends each of them.
        newline: The token id that ends a line; None if the tokenizer has none.
        mask: Which tokens are labels [N], bool; None: all.
        notes: Remarks on the data, to be shown to the user.

    Example:
        >>> corpus = nextn.Corpus.from_texts([("a", "1 2 3")], lambda texts: [[1, 2, 3] for _ in texts], eos=0)
        >>> corpus.ids.tolist(), corpus.num_labels
        ([1, 2, 3, 0], 4)
    """

    ids: Ids
    starts: NDArray[np.int64]
    names: tuple[str, ...]
    eos: int
    newline: int | None
    mask: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_documents(
        cls, documents: Iterable[Document], encode: Encode, eos: int, *, notes: Sequence[str] = ()
    ) -> "Corpus":
        """Join documents, dropping empty ones. Raises ConfigError if no document, or no label, is left."""
        parts = [document.with_eos(eos) for document in documents if len(document.ids)]
        if not parts:
            raise ConfigError("the data is empty: no document has any text; check the given paths")
        mask = None
        if any(part.mask is not None for part in parts):
            mask = np.concatenate([np.ones(len(part.ids), bool) if part.mask is None else part.mask for part in parts])
            if not mask.any():
                raise ConfigError(
                    "no token of the data is a label: no conversation has an assistant turn, and no prompt an answer; "
                    "use --all-tokens to train on every token"
                )
        starts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
        names = tuple(part.name for part in parts)
        ids = np.concatenate([part.ids for part in parts])
        return cls(ids, starts, names, eos, newline_id(encode), mask, tuple(notes))

    @property
    def num_labels(self) -> int:
        return self.num_tokens if self.mask is None else int(self.mask.sum())

    @classmethod
    def from_texts(cls, texts: Iterable[tuple[str, str]], encode: Encode, eos: int) -> "Corpus":
        """Encode and join (name, text) pairs, dropping empty texts. Raises ConfigError if none is left."""
        return cls.from_documents(encode_documents(texts, encode), encode, eos)

    @classmethod
    def from_files(cls, paths: Iterable[Path], tokenizer: "PreTrainedTokenizerBase") -> "Corpus":
        """Read one document per file. Raises ConfigError for a file that cannot be read or is not UTF-8 text."""
        texts = ((path.as_posix(), read_text(path)) for path in paths)
        return cls.from_texts(texts, encoder(tokenizer), eos_id(tokenizer))

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens, the document boundaries and the label mask."""
        digest = hashlib.sha256()
        for part in (self.ids.astype("<i4"), self.starts.astype("<i8"), self.mask):
            digest.update(b"" if part is None else part.tobytes())
        return digest.hexdigest()

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError, naming the document, for a token id outside a vocabulary of `size` tokens."""
        if int(self.ids.max()) >= size:
            index = int(self.ids.argmax())
            name = self.names[int(np.searchsorted(self.starts, index, side="right")) - 1]
            raise ConfigError(
                f"{name}: token {self.ids[index]} is not in the model's vocabulary of {size}; give text, or ids of "
                "this model's tokenizer"
            )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[documents]: tokens of each document, its eos included."""
        return np.diff(self.starts, append=self.num_tokens)


def _compact(ids: Ids) -> Ids:
    return ids.astype(np.uint16 if ids.max() <= np.iinfo(np.uint16).max else np.int32)
