"""Draft counts in tables with commas: speculators' acceptance.csv, and the matrix of `aiperf speed-bench-report`."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from nextn.engines.counters import MAX_POSITIONS, Counters, refuse_model, sum_counters
from nextn.errors import EngineError

MATRIX_FORMAT = "the matrix of `aiperf speed-bench-report`"
_SUBSETS_FORMAT = "speculators' acceptance.csv"
_MAX_ROWS = 10_000
_MAX_COUNT = 10**15
_Reader = Callable[[str, str, str | None], Counters]  # (text, what errors call it, model) -> counts
T = TypeVar("T")


def table_reader(text: str) -> _Reader | None:
    """Return the reader of a table, by its first line; None for another text."""
    header = text.partition("\n")[0].rstrip("\r")
    return next((read for pattern, read in CSV_READERS.values() if re.fullmatch(pattern, header)), None)


def is_matrix(text: str) -> bool:
    """Whether a text begins as AIPerf's matrix."""
    return table_reader(text) is _matrix


def read_matrix(text: str, source: str) -> dict[str, dict[str, float]]:
    """Return the acceptance lengths of each model by category, without their mean. Raises EngineError for others."""
    lengths: dict[str, dict[str, float]] = {}
    for row in _rows(text, source, MATRIX_FORMAT, _categories):
        if repeated := lengths.keys() & row:
            raise EngineError(f"{source}: several rows of the model {min(repeated)}; keep the one in question")
        lengths |= row
    if not lengths:
        raise EngineError(f"{source}: {MATRIX_FORMAT} without an acceptance length")
    return lengths


def _matrix(text: str, source: str, model: str | None) -> Counters:
    """Tokens per round with bonus token by category, of which the mean is taken; no counts, and no K."""
    lengths = read_matrix(text, source)
    if model is None and len(lengths) == 1:
        (model,) = lengths
    if model not in lengths:
        asked = "it is of several models" if model is None else f"nothing in it of the model {model}"
        raise EngineError(f"{source}: {asked}; choose one of {', '.join(lengths):.400}, as {source}#{min(lengths)}")
    by_category = lengths[model]
    each = ", ".join(f"{category} {length:.2f}" for category, length in by_category.items())
    mean = sum(by_category.values()) / len(by_category)
    note = f"the mean of the categories is compared: {each:.1000}"
    return Counters("an engine under AIPerf", length=mean, notes=(note,), source=MATRIX_FORMAT)


def _categories(row: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The acceptance lengths of a model; categories that were not run are empty."""
    cells = {name: value for name, value in row.items() if name not in ("Model", "Overall") and value}
    lengths = {name: _cell(value, name, least=1, most=MAX_POSITIONS + 1) for name, value in cells.items()}
    return {row["Model"]: lengths} if lengths else {}


def _subsets(text: str, source: str, model: str | None) -> Counters:
    """Rounds, draft tokens and accepted drafts of all subsets; positions are shares of all rounds."""
    refuse_model(model, source)
    counters = sum_counters(_rows(text, source, _SUBSETS_FORMAT, _subset))
    if counters is None:
        raise EngineError(f"{source}: {_SUBSETS_FORMAT} without a row")
    return counters


def _subset(row: Mapping[str, str]) -> Counters:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    rounds, drafted, accepted = (round(_cell(row[name], name)) for name in names)
    columns = [name for name in row if name and name.startswith("acceptance_at_pos_")][:MAX_POSITIONS]
    positions = tuple(round(_cell(row[name], name, most=1) * rounds) for name in columns if row[name])
    return Counters("vLLM", rounds, drafted, accepted, positions, k=len(positions) or None, source=_SUBSETS_FORMAT)


def _rows(text: str, source: str, name: str, read: Callable[[Mapping[str, str]], T]) -> Iterator[T]:
    """Yield what `read` makes of each row. Raises EngineError for a row that is none of the format `name`."""
    number = 2
    try:
        for row in csv.DictReader(io.StringIO(text)):
            if number > _MAX_ROWS:
                raise ValueError(f"more than {_MAX_ROWS:,} rows")
            yield read(row)
            number += 1
    except (TypeError, ValueError, csv.Error) as error:
        raise EngineError(f"{source}:{number}: not a row of {name}: {error}") from error


def _cell(text: str, name: str, *, least: float = 0, most: float = _MAX_COUNT) -> float:
    value = float(text)
    if not least <= value <= most:
        raise ValueError(f"{name} = {text!r:.40}; expected a number from {least:g} to {most:g}")
    return value


# Name of the format -> its first line, as a pattern, and its reader.
CSV_READERS: dict[str, tuple[str, _Reader]] = {
    _SUBSETS_FORMAT: ("subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length(,.+)?", _subsets),
    MATRIX_FORMAT: ("Model,(.+,)?Overall", _matrix),
}
