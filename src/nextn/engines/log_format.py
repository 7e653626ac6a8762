"""What an entry of a log is, and how its numbers are read."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nextn.engines.counters import MAX_POSITIONS, Counters

HALF = 0.005  # of the last digit of a length
NUMBER = r"[0-9]{1,9}(?:[.,][0-9]{1,9})?"  # with a decimal comma, too
_THOUSANDS = r"[1-9][0-9]{0,2}(?:[.,'’ ][0-9]{3})+"
# What is left of a number that is written in another way is no count.
INT = rf"(?:{_THOUSANDS}|[0-9]{{1,15}}(?:\.0+)?)(?![.,'’]?[0-9])"
LIST = rf"{NUMBER}(?:(?:[,;]\s*| +){NUMBER}){{0,{MAX_POSITIONS}}}"  # a spreadsheet's locale sets what is between them
EQUALS = r"['\"]?\s{0,3}[=:](?:\s{0,6}| {0,40})"
IS = rf"(?:{EQUALS}| {{1,6}})"
Fields = Mapping[str, list[str]]  # name of a field -> its values in the entry


@dataclass(frozen=True)
class LogFormat:
    """One kind of entry. Its fields are tried once each, on text of bounded length: linear time."""

    name: str
    literal: str  # text that every entry has, by which a log without any is passed over fast
    marker: str  # regular expression with which an entry begins, without groups
    fields: Mapping[str, str]  # name as printed -> regular expression with one group
    required: tuple[str, ...]  # names of fields
    counters: Callable[[Fields], Counters | None]
    counted: str  # what the figures are, for the documentation
    num_lines: int = 1  # of an entry, at most
    is_cumulative: bool = False  # later entries include earlier ones
    is_run: bool = False  # an entry is a run, or a row of one, whose settings may be others than those of the next
    is_general: bool = False  # not of one engine: read where there is no other, as it is slow to look for


def integer(text: str) -> int:
    """Read a count, with any separator of thousands or a fraction of zeros."""
    return int(re.sub(r"\D", "", text) if re.fullmatch(_THOUSANDS, text) else text.partition(".")[0])


def to_number(text: str) -> float:
    """Read a `NUMBER`."""
    return float(text.replace(",", "."))


def int_field(fields: Fields, name: str) -> int | None:
    return integer(fields[name][0]) if fields.get(name) else None


def float_field(fields: Fields, name: str) -> float | None:
    return to_number(fields[name][0]) if fields.get(name) else None


def rates_of(text: str) -> list[float]:
    """Read the numbers of a `LIST`."""
    return [to_number(rate) for rate in re.findall(NUMBER, text)]


def equals(*names: str) -> dict[str, str]:
    """Fields that are printed as `name=count`."""
    return {name: rf"(?<!\w){name}=({INT})" for name in names}


def colon(*names: str, value: str = NUMBER) -> dict[str, str]:
    """Fields that are printed as `name: value`."""
    return {name: rf"{re.escape(name)}:\s*({value})" for name in names}


def rounds_by_length(accepted: int, drafted: int, length: float | None, k: int = 0) -> int | None:
    """Return the rounds that a printed length shows, or `drafted / k` where it allows that; None where it shows none.

    A length of 1.00 fits any number of rounds if nothing was accepted, and many if a few drafts were.
    """
    if length is None:
        return None
    low = accepted / max(length - 1 + HALF, HALF)
    high = accepted / (length - 1 - HALF) if length - 1 > HALF else math.inf
    if k and low - 1 <= drafted / k <= high + 1:
        return round(drafted / k)
    return round(accepted / (length - 1)) if length > 1 else None


def counts_of(
    engine: str, rounds: str = "", drafted: str = "", accepted: str = "", *, length: str = "", k: str = ""
) -> Callable[[Fields], Counters]:
    """Return the reader of an entry with these fields."""
    return lambda fields: Counters(
        engine, int_field(fields, rounds), int_field(fields, drafted), int_field(fields, accepted),
        length=float_field(fields, length), k=int_field(fields, k),
    )  # fmt: skip
