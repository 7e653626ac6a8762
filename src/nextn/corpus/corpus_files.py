"""Where text comes from: files and folders, records of .jsonl and .parquet, and data sets of the `datasets` library.

A text file is one document; of the others, each record is. What a record says is `records`' matter.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nextn.corpus.data import Corpus, Document, encoded, encoder, eos_of, newline_of
from nextn.corpus.records import Reader, Record
from nextn.corpus.split import divided, mark, path_marks
from nextn.corpus.text_files import read_text, standard_library
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = str | Path
_FILES = (".txt", ".jsonl", ".parquet")
_COLON = re.compile(r":(?![^\[]*\])")  # not that of a slice, as in train[:10%]
HEADER = "nextn"  # a first line with this key says how the lines behind it were made
_ROWS = 1024  # of a parquet file, in memory at a time


def corpora(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    all_tokens: bool = False,
    context: int | None = None,
    held_out: float = 0.05,
) -> tuple[Corpus, Corpus]:
    """(train, held out) of files, folders and data sets; none: the standard library.

    A text file's side hangs on its name, a record's on what it holds, so copies of a record stay together. A document
    that is alone is cut. all_tokens, context: see `Reader`. Raises ConfigError for what cannot be read.
    """
    reader, encode, eos = Reader(tokenizer, all_tokens, context), encoder(tokenizer), eos_of(tokenizer)
    texts, record_sources = sorted_out(sources or standard_library())
    documents = list(encoded(((path.as_posix(), read_text(path)) for path in texts), encode))
    marks = path_marks(texts)
    for place, record in chain.from_iterable(map(records, record_sources)):
        documents.append(reader.document(record, place))
        marks.append(mark(documents[-1].ids.astype("<i4").tobytes()))
    filled = [(each, number) for each, number in zip(documents, marks, strict=True) if len(each.ids)]
    if len(filled) == 1:
        train, held = _cut(filled[0][0], held_out, newline_of(encode))
    else:
        train, held = divided([each for each, _ in filled], [number for _, number in filled], held_out=held_out)
    made = Corpus.of(train, encode, eos, notes=reader.notes)
    has_labels = any(each.mask is None or each.mask.any() for each in held)
    return made, Corpus.of(held, encode, eos) if has_labels else made


def check_sources(sources: Sequence[Source]) -> None:
    """Raise ConfigError for the first source that is no file, no folder and not named as a data set is."""
    for source in sources:
        if not Path(source).exists():
            _data_set(str(source))


def records(source: Source) -> Iterator[tuple[str, Record]]:
    """(place, record) of a .jsonl or .parquet file, or a data set: where each stands, for errors, and what it says."""
    path = Path(source)
    if path.suffix == ".jsonl" and path.is_file():
        return _json_lines(path)
    if path.suffix == ".parquet" and path.is_file():
        return _parquet_rows(path)
    return _dataset_rows(str(source))


def header_of(source: Source) -> Record | None:
    """The first line of a file of stored answers, which says how they were made; None for any other source."""
    path = Path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:  # reading the records says what is wrong with it
            return None
    return first if isinstance(first, dict) and first.get(HEADER) == "answers" else None


def holds_records(source: Source) -> bool:
    """Whether the source is read record by record; else it is a text file or a folder."""
    path = Path(source)
    return not path.is_dir() and (path.suffix in (".jsonl", ".parquet") or not path.exists())


def files_of(source: Source) -> list[Path]:
    """A file, or all files below a folder, sorted; none that is hidden, or in a hidden folder."""
    path = Path(source)
    if path.is_file():
        return [path]
    found = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(map(_is_hidden, file.relative_to(path).parts)))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def sorted_out(sources: Sequence[Source]) -> tuple[list[Path], list[Source]]:
    """Text files, those below folders among them, and what is read by records."""
    found: list[Source] = []
    for source in sources:
        found += [source] if holds_records(source) else files_of(source)
    texts = sorted(Path(each) for each in found if not holds_records(each))
    return texts, [each for each in found if holds_records(each)]


def _cut(document: Document, held_out: float, newline: int | None) -> tuple[list[Document], list[Document]]:
    """One document as two: at the last end of a line before that share, if there is one."""
    at = round(len(document.ids) * (1 - held_out))
    lines = np.flatnonzero(document.ids[:at] == newline)
    at = int(lines[-1]) + 1 if len(lines) else at
    parts = [slice(0, at), slice(at, None)]
    train, held = (
        Document(document.name, document.ids[part], None if document.mask is None else document.mask[part])
        for part in parts
    )
    return [train], [held] if len(held.ids) else []


def _json_lines(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path.as_posix()}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{place}: not JSON: {error}; expected one JSON object a line") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{place}: a JSON {type(record).__name__}; expected one JSON object a line")
            if number > 1 or HEADER not in record:
                yield place, record


def _parquet_rows(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{path}: parquet files need pyarrow: pip install 'nextn[data]'") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for record in batch.to_pylist():
                    yield f"{path.as_posix()}[{number}]", record
                    number += 1
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from error


def _data_set(source: str) -> list[str]:
    """The parts of the name of a data set."""
    name, *rest = _COLON.split(source)
    if Path(source).suffix in _FILES or len(rest) > 2 or not ("/" in name or Path(name).is_dir()):
        raise ConfigError(
            f"{source}: no such file or folder; expected text files, folders, .jsonl or .parquet files, or a data set "
            "as org/name, org/name:split or org/name:config:split"
        )
    return [name, *rest]


def _dataset_rows(source: str) -> Iterator[tuple[str, Record]]:
    """Rows of `name`, `name:split` or `name:config:split`, where a name is org/name or a folder of such files."""
    name, *rest = _data_set(source)
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ConfigError(
            f"{source}: no such file or folder; to read it as a data set: pip install 'nextn[data]'"
        ) from error
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
