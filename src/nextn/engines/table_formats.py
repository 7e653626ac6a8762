"""Draft counts in tables with commas: speculators' scripts/evaluate writes one row per subset to `acceptance.csv`."""

import csv
from collections.abc import Mapping
from typing import TextIO

from nextn.engines.counters import MAX_POSITIONS, Counters, sum_counters
from nextn.errors import EngineError

TABLE_FORMAT = "speculators' acceptance.csv"
TABLE_START = "subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length"
_MAX_ROWS = 10_000
_MAX_COUNT = 10**15


def read_table(file: TextIO, source: str) -> Counters:
    """Sum the rows of all subsets; positions are shares of all rounds. Raises EngineError for invalid ones."""
    rows: list[Counters] = []
    try:
        for row in csv.DictReader(file):
            if len(rows) == _MAX_ROWS:
                raise EngineError(f"{source}: more than {_MAX_ROWS:,} rows; {TABLE_FORMAT} has one per subset")
            rows.append(_row(row))
    except (TypeError, ValueError, csv.Error) as error:
        raise EngineError(f"{source}:{len(rows) + 2}: not a row of {TABLE_FORMAT}: {error}") from error
    counters = sum_counters(rows)
    if counters is None:
        raise EngineError(f"{source}: {TABLE_FORMAT} without a row")
    return counters


def _row(row: Mapping[str, str]) -> Counters:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    rounds, drafted, accepted = (round(_number(row[name], name)) for name in names)
    columns = [name for name in row if name and name.startswith("acceptance_at_pos_")][:MAX_POSITIONS]
    positions = tuple(round(_number(row[name], name, maximum=1) * rounds) for name in columns if row[name])
    return Counters("vLLM", rounds, drafted, accepted, positions, k=len(positions) or None, source=TABLE_FORMAT)


def _number(text: str, name: str, *, maximum: float = _MAX_COUNT) -> float:
    value = float(text)
    if not 0 <= value <= maximum:
        raise ValueError(f"{name} = {text!r:.40}; expected a number from 0 to {maximum:g}")
    return value
