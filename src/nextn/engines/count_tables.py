"""Draft counts in tables with a column for each count, as scripts write them: with commas, tabs, or in Markdown."""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from nextn.bounded_json import JsonObject
from nextn.engines.counters import RUNS, Counters, refuse_model
from nextn.engines.named_counts import from_record, in_documents, refuse_copied, role_of
from nextn.engines.run_settings import with_settings
from nextn.errors import EngineError

_BOX = str.maketrans("│┃", "||")
_RULE = re.compile(r"[\s|+:=─━┄┼╇┡┩├┤┏┓┳└┘┴-]*")  # lines between rows
_NAME = re.compile(r"[\w #()./-]{1,60}")
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,20})?")
_COUNT = re.compile(r"[0-9]{1,15}(?:\.0{1,2})?|[0-9]{1,3}(?:,[0-9]{3}){1,4}")
# Words of a short name of a row that is made from others, or is not of the run.
_MADE = re.compile(
    r"(?:sub)?totals?|sum|all|overall|aggregated?|combined|mean|average|avg|median|std|stddev|var|min|max|count|warmup|warm"
)
_MAX_NAME = 5  # words of it; a prompt has more
_MAX_BEFORE = 5  # lines in which the header is: a title or comments are before it
_MAX_ROWS = 10_000
_MAX_LINE = 4000  # characters of the names of columns
_MAX_SETTING = 60  # characters of its value


def is_count_table(text: str) -> bool:
    """Whether a text begins with names of columns, those of accepted and of drafted tokens among them."""
    lines = text.splitlines()
    delimiter, start = _header(lines)
    found = [cells for _, cells in islice(_rows(lines[start:], delimiter), 2)] if delimiter else []
    return len(found) == 2 and len(found[0]) == len(found[1])


def read_count_table(text: str, source: str, model: str | None) -> Counters:
    """Return the counts of all rows. Raises EngineError for a row that is none of counts, and as `in_documents`."""
    refuse_model(model, source)
    lines = text.splitlines()
    delimiter, start = _header(lines)
    own = _of_runs([*_records(_rows(lines[start:], delimiter), delimiter, source, start)], source)
    settings = "\n".join({f"{name}: {cell}"[:_MAX_SETTING]: 0 for row in own for name, cell in row.items()})
    refuse_copied(settings)
    counters = in_documents([*own])
    if counters is None:
        raise EngineError(f"{source}: a table without counts of accepted and drafted tokens")
    notes = (f"{len(own):,} {RUNS}",) if len(own) > 1 else ()
    return with_settings(replace(counters, notes=counters.notes + notes), [settings])


def _header(lines: list[str]) -> tuple[str, int]:
    """Return what is between columns, and the index of the line with their names; "" and 0 for no such table."""
    for start, line in enumerate(lines[:_MAX_BEFORE]):
        for delimiter in "|\t;,":
            _, names = next(_rows([line[:_MAX_LINE]], delimiter), (0, []))
            counts = {name: 1 for name in names if role_of(name) and _NAME.fullmatch(name)}
            if {"accepted", "drafted"} <= {*map(role_of, counts)} and from_record(counts):
                return delimiter, start
    return "", 0


def _records(rows: Iterator[tuple[int, list[str]]], delimiter: str, source: str, start: int) -> Iterator[JsonObject]:
    """Yield the rows below the names, up to a line without columns."""
    _, names = next(rows)
    has_ended, num_rows = False, 0
    for number, cells in rows:
        where = f"{source}:{start + number}"
        if len(cells) == 1 and delimiter not in cells[0]:
            has_ended = True
        elif has_ended and len(cells) == len(names):
            raise EngineError(f"{where}: several tables; give one of them alone")
        elif not has_ended:
            num_rows += 1
            if len(cells) != len(names):
                raise EngineError(f"{where}: a row of {len(cells)} cells, and the table has {len(names)} columns")
            if num_rows > _MAX_ROWS:
                raise EngineError(f"{where}: more than {_MAX_ROWS:,} rows; give sums of them, or a part")
            yield _record(names, cells, where)


def _record(names: list[str], cells: list[str], where: str) -> JsonObject:
    pairs = [*zip(names, cells, strict=True)]
    counts = [cell for name, cell in pairs if role_of(name)]
    record = {name: _value(name, cell) for name, cell in pairs}
    is_clear = len({name for name in names if role_of(name)}) == len(counts)
    if not is_clear or not all(map(_COUNT.fullmatch, counts)) or from_record(record) is None:
        raise EngineError(
            f"{where}: the counts {', '.join(map(repr, counts)):.200} are not those of a run; expected one column for "
            "each count, whole numbers, and at most as many accepted as drafted tokens: correct or remove the row"
        )
    return record


def _value(name: str, cell: str) -> object:
    if role_of(name) and _COUNT.fullmatch(cell):
        return int(cell.partition(".")[0].replace(",", ""))
    return (float(cell) if "." in cell else int(cell)) if _NUMBER.fullmatch(cell) else cell


def _of_runs(rows: list[JsonObject], source: str) -> list[JsonObject]:
    """Return the rows without those made of them, where one is their sum. Raises EngineError where none is."""
    made = [row for row in rows if any(map(_is_made, row.values()))]
    own = [row for row in rows if row not in made]
    if len(rows) == 1 or not made:
        return rows
    sums = {name: sum(row[name] for row in own) for name in rows[0] if role_of(name)}
    if not any(sums.items() <= row.items() for row in made):
        raise EngineError(
            f"{source}: rows of totals, statistics or warm-ups beside others ({', '.join(map(_name, made)):.200}); "
            "give the rows of the run alone, or the row of its totals"
        )
    return own


def _is_made(cell: object) -> bool:
    words = re.findall("[a-z]+", str(cell).lower())
    return len(words) <= _MAX_NAME and any(map(_MADE.fullmatch, words))


def _name(row: JsonObject) -> str:
    return next(repr(cell) for cell in row.values() if _is_made(cell))


def _rows(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each row that is not blank."""
    is_drawn = delimiter == "|"
    if is_drawn:
        lines = (line.translate(_BOX).strip().removeprefix("|").removesuffix("|") for line in lines)
    reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE if is_drawn else csv.QUOTE_MINIMAL)
    try:
        for cells in reader:
            if any(cells) and not (is_drawn and _RULE.fullmatch("".join(cells))):
                yield reader.line_num, [cell.strip(" \"'*`") for cell in cells]
    except csv.Error as error:
        raise EngineError(f"a table with a row that cannot be read ({error}); leave out its long text") from error
