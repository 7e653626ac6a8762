"""Draft counts in tables with a column for each count, as scripts write them: with commas, tabs, or in Markdown."""

import re
from itertools import islice

from nextn.engines.counters import Counters, refuse_model
from nextn.engines.named_counts import in_documents, role_of
from nextn.errors import EngineError

_DELIMITERS = re.compile(r"[,;\t|│┃]")
_RULE = re.compile(r"[\s|+:=─━┄┼╇┡┩├┤┏┓┳└┘┴│┃-]*")  # lines between rows
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,20})?")
_TOTALS, _MEANS = {"total", "sum", "all", "overall"}, {"mean", "average", "avg", "median"}
_MAX_ROWS = 10_000
_MAX_LINE = 4000


def is_count_table(text: str) -> bool:
    """Whether a text begins with names of columns, those of accepted and of drafted tokens or rounds among them."""
    lines = (line for line in islice(text.splitlines(), 20) if not _RULE.fullmatch(line))
    header, row = _cells(next(lines, "")), _cells(next(lines, ""))
    roles = {role_of(name) for name in header}
    named = "accepted" in roles and bool(roles & {"drafted", "rounds"})
    counts = [cell for name, cell in zip(header, row, strict=False) if role_of(name)]
    return named and len(row) == len(header) and all(map(_NUMBER.fullmatch, counts))


def read_count_table(text: str, source: str, model: str | None) -> Counters:
    """Return the counts of all rows. Raises EngineError for a row of another length, and as `in_documents`."""
    refuse_model(model, source)
    header, rows = list[str](), list[dict[str, object]]()
    for number, line in enumerate(text.splitlines(), 1):
        cells = _cells(line)
        if not line.strip() or _RULE.fullmatch(line):
            continue
        if not header:
            header = cells
        elif len(cells) != len(header):
            raise EngineError(
                f"{source}:{number}: a row of {len(cells)} cells, and the table has {len(header)} columns"
            )
        elif len(rows) < _MAX_ROWS:
            rows.append({name: _value(cell) for name, cell in zip(header, cells, strict=True)})
    counters = in_documents(_own_rows(rows))
    if counters is None:
        raise EngineError(f"{source}: a table without counts of accepted and drafted tokens")
    return counters


def _own_rows(rows: list[dict[str, object]]) -> list[object]:
    """Return the row of totals, where there is one, else the rows without those of means."""
    labels = [{str(cell).lower() for cell in row.values() if isinstance(cell, str)} for row in rows]
    totals = [row for row, own in zip(rows, labels, strict=True) if own & _TOTALS]
    return [*(totals[-1:] or (row for row, own in zip(rows, labels, strict=True) if not own & _MEANS))]


def _cells(line: str) -> list[str]:
    found = _DELIMITERS.search(line[:_MAX_LINE].strip("|│┃ "))
    parts = line[:_MAX_LINE].strip().strip("|│┃").split(found[0]) if found else []
    return [part.strip(" \"'*`") for part in parts]


def _value(cell: str) -> object:
    return (float(cell) if "." in cell else int(cell)) if _NUMBER.fullmatch(cell) else cell
