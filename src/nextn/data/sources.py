"""Load training data from files, folders, .jsonl and .parquet records and `datasets`, and split off held-out text.

A text file is one document; in all other sources, each record is one. The split depends only on names or contents and
the seed, so a document keeps its side when others are added or removed.
"""

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nextn.bounded_json import JsonObject, check_unicode
from nextn.data.corpus import (
    Corpus,
    Document,
    encode_documents,
    encoder,
    eos_id,
    newline_id,
    read_text,
    standard_library,
)
from nextn.data.records import Record, RecordReader
from nextn.errors import ConfigError
from nextn.text_format import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Source = str | Path
HEADER_KEY = "nextn"  # marks the first line of a file of answers, which records how they were generated
_EXTENSIONS = (".txt", ".jsonl", ".parquet")
_COLON = re.compile(r":(?![^\[]*\])")  # not the colon of a slice, as in train[:10%]
_BATCH_ROWS = 1024  # rows of a parquet file in memory at a time
T = TypeVar("T")


def load_corpora(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    all_tokens: bool = False,
    context: int | None = None,
    held_out: float = 0.05,
) -> tuple[Corpus, Corpus]:
    """Load files, folders and data sets (none: the standard library), and split them into training and held-out corpus.

    A text file's side depends on its name, a record's on its contents, so that copies of a record stay together. A
    single document is cut in two. Without a label in the held-out text, both are the training corpus. With
    `all_tokens`, prompts and user turns are labels, too. Conversations longer than the model's `context` are noted.
    Raises ConfigError for a source that cannot be read, or holds unusable data.
    """
    reader, encode, eos = RecordReader(tokenizer, all_tokens, context), encoder(tokenizer), eos_id(tokenizer)
    text_files, record_sources = partition_sources(sources or standard_library())
    documents = list(encode_documents(((path.as_posix(), read_text(path)) for path in text_files), encode))
    hashes = path_hashes(text_files)
    for location, record in chain.from_iterable(map(read_records, record_sources)):
        documents.append(reader.document(record, location))
        hashes.append(hash_fraction(documents[-1].ids.astype("<i4").tobytes()))
    nonempty = [(document, value) for document, value in zip(documents, hashes, strict=True) if len(document.ids)]
    if len(nonempty) == 1:
        train, held = _cut(nonempty[0][0], held_out, newline_id(encode))
    else:
        train, held = split_by_hash(
            [document for document, _ in nonempty], [value for _, value in nonempty], held_out=held_out
        )
    corpus = Corpus.from_documents(train, encode, eos, notes=reader.notes)
    has_labels = any(document.mask is None or document.mask.any() for document in held)
    return corpus, Corpus.from_documents(held, encode, eos) if has_labels else corpus


def path_hashes(paths: Sequence[Path]) -> list[float]:
    """Return a number in [0, 1) for each file, from its name below the common folder.

    So a file's side of a split is the same on every machine, and stays when other files are added or removed.
    """
    root = os.path.commonpath([path.absolute().parent for path in paths]) if paths else ""
    return [hash_fraction(f"0:{path.absolute().relative_to(root).as_posix()}".encode()) for path in paths]


def hash_fraction(name: bytes) -> float:
    """Return a number in [0, 1) that depends on the name alone, uniform over many names."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()) / 2**48


def split_by_hash(items: Sequence[T], hashes: Sequence[float], *, held_out: float) -> tuple[list[T], list[T]]:
    """Split into (train, held out), each in the given order; held out are items whose hash is below `held_out`.

    Each side gets at least one hash, if there are two; items of the same hash, such as copies of a text, stay together.
    """
    distinct = sorted(set(hashes))
    held = set(distinct[: min(max(bisect_left(distinct, held_out), 1), len(distinct) - 1)])
    pairs = list(zip(items, hashes, strict=True))
    return [item for item, value in pairs if value not in held], [item for item, value in pairs if value in held]


def check_sources(sources: Sequence[Source]) -> None:
    """Raise ConfigError for the first source that is not a file or folder, nor named like a data set."""
    for source in sources:
        if not Path(source).exists():
            _dataset_parts(str(source))


def read_records(source: Source) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) from a .jsonl or .parquet file, or a data set; the location is for error messages."""
    path = Path(source)
    if path.suffix == ".jsonl" and path.is_file():
        return _json_lines(path)
    if path.suffix == ".parquet" and path.is_file():
        return _parquet_rows(path)
    return _dataset_rows(str(source))


def answers_header(source: Source) -> JsonObject | None:
    """Return the first line of a file of answers, which records how they were generated; None for other sources."""
    path = Path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        try:
            header = json.loads(file.readline())
        except (ValueError, RecursionError):  # reading the records reports what is wrong with it
            return None
    return header if isinstance(header, dict) and header.get(HEADER_KEY) == "answers" else None


def has_records(source: Source) -> bool:
    """Return whether the source is read record by record; otherwise it is a text file or a folder."""
    path = Path(source)
    return not path.is_dir() and (path.suffix in (".jsonl", ".parquet") or not path.exists())


def list_files(source: Source) -> list[Path]:
    """Return the file, or all files below the folder, sorted; hidden files and folders are skipped."""
    path = Path(source)
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*") if file.is_file())
    hidden = re.compile(r"(?s)\..*|__pycache__")
    return sorted(file for file in files if not any(map(hidden.fullmatch, file.relative_to(path).parts)))


def partition_sources(sources: Sequence[Source]) -> tuple[list[Path], list[Source]]:
    """Return text files, including those below folders, and the sources that are read by records."""
    files: list[Source] = []
    for source in sources:
        files += [source] if has_records(source) else list_files(source)
    texts = sorted(Path(file) for file in files if not has_records(file))
    return texts, [file for file in files if has_records(file)]


def _cut(document: Document, held_out: float, newline: int | None) -> tuple[list[Document], list[Document]]:
    """Cut one document in two, at the last line end before the held-out share if there is one."""
    cut = round(len(document.ids) * (1 - held_out))
    lines = np.flatnonzero(document.ids[:cut] == newline)
    cut = int(lines[-1]) + 1 if len(lines) else cut
    train, held = (
        Document(document.name, document.ids[part], None if document.mask is None else document.mask[part])
        for part in (slice(0, cut), slice(cut, None))
    )
    return [train], [held] if len(held.ids) else []


def _json_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path.as_posix()}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                check_unicode(record, line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{location}: not JSON: {error}; expected one JSON object per line") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{location}: a JSON {type(record).__name__}; expected one JSON object per line")
            if number > 1 or HEADER_KEY not in record:
                yield location, record


def _parquet_rows(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{path}: parquet files need pyarrow: {install_command('data')}") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for record in batch.to_pylist():
                    yield f"{path.as_posix()}[{number}]", record
                    number += 1
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from error


def _dataset_parts(source: str) -> list[str]:
    """Split `name:config:split`. Raises ConfigError for a name that cannot be a data set's."""
    name, *rest = _COLON.split(source)
    if Path(source).suffix in _EXTENSIONS or len(rest) > 2 or not ("/" in name or Path(name).is_dir()):
        raise ConfigError(
            f"{source}: no such file or folder; expected text files, folders, .jsonl or .parquet files, or a data set "
            "as org/name, org/name:split or org/name:config:split"
        )
    return [name, *rest]


def _dataset_rows(source: str) -> Iterator[tuple[str, Record]]:
    """Yield rows of `name`, `name:split` or `name:config:split`; a name is org/name or a folder of data files."""
    name, *rest = _dataset_parts(source)
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        message = f"{source}: no such file or folder; to read it as a data set: {install_command('data')}"
        raise ConfigError(message) from error
    config, split = rest if len(rest) == 2 else (None, rest[0] if rest else "train")
    try:
        rows = load_dataset(name, config, split=split)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{source}: no such file or folder, and `datasets` cannot load it ({name}, config {config or 'default'}, "
            f"split {split}): {error}"
        ) from error
    for number, record in enumerate(rows):
        yield f"{source}[{number}]", record
