"""Find families by the names of published models, with what nextn does with each. Imports no torch."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from nextn.errors import FamilyError
from nextn.family_table import WITHHELD, Family, Withheld, rows, separate_rows

_FILES = "audit, restore, convert"


@dataclass(frozen=True)
class KnownFamilies:
    """Families by the names of their models.

    Attributes:
        families: Published conventions that nextn knows, in the order of the documentation.
        withheld: Models that were published without the head that their config.json declares, or with another draft.

    Example:
        >>> known = nextn.families("Sarvam")
        >>> [each.title for each in known.withheld], [family.name for family in known.families]
        (['Sarvam-MoE / MLA'], [])
    """

    families: tuple[Family, ...]
    withheld: tuple[Withheld, ...]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.families or self.withheld)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `nextn families --json`."""
        return {"families": [_record(row) for row in self.families], "withheld": [each.title for each in self.withheld]}


def families(search: str = "") -> KnownFamilies:
    """List the published models whose MTP heads are known.

    Args:
        search: Words of a model's name or model_type, such as `GLM 5.3`, or a hub id; empty: all.

    Returns:
        The families, and the models without a head, whose names have all these words, whatever the case and signs; if
        there are none, those whose name is the longest part of the one that is searched.

    Raises:
        FamilyError: No known model has this name.

    Example:
        >>> [family.name for family in nextn.families("DeepSeek R1").families]
        ['deepseek_v3']
    """

    def fitting(fits: Callable[[list[str]], bool]) -> KnownFamilies:
        found = tuple(row for row in (*rows(), *separate_rows()) if fits(_names(row)))
        return KnownFamilies(
            found, tuple(each for each in WITHHELD if fits([*_spelled(each.title), *each.model_types]))
        )

    words = [_letters(word) for word in search.split()]
    known = fitting(lambda names: all(any(word in _letters(name) for name in names) for word in words))
    if not known:
        found = (fitting(partial(_has_name, part)) for part in _parts(search))
        known = next(filter(None, found), known)
    if not known:
        raise FamilyError(
            f"{search}: no known model has this name; `nextn families` lists all, and `nextn audit` of the checkpoint "
            "says what its tensors look like"
        )
    return known


def works(row: Family) -> str:
    """Return what nextn does with a family's heads."""
    files = "audit" if row.trunk_kv else _FILES
    return f"{files}, measure, train, decode" if row.runs else files


def _record(row: Family) -> dict[str, object]:
    return {
        "name": row.name,
        "title": row.title,
        "models": row.models,
        "model_types": row.model_types,
        "layout": row.names["block"],
        "works": works(row).split(", "),
        "why_not_run": row.cannot_run,
        "engines": {name: engine.support for name, engine in row.engines.items()},
    }


def _has_name(part: str, names: Sequence[str]) -> bool:
    return part in map(_letters, names)


def _names(row: Family) -> list[str]:
    return [row.name, *_spelled(row.title), *row.models, *row.model_types, *row.draft_types, *row.trunk_types]


def _parts(search: str) -> Iterator[str]:
    """Yield a published name without what is before or behind it, longest first: an owner, sizes, a quantization.

    Models that were distilled into another architecture have that one's head, if any.
    """
    words = search.rpartition("/")[2].split("-")
    if " " in search or "distill" in search.lower():
        return
    for length in range(len(words), 0, -1):
        for start in range(len(words) - length + 1):
            yield _letters("".join(words[start : start + length]))


def _spelled(title: str) -> Iterator[str]:
    """Yield a title, and each name of one such as `Qwen3.5 / 3.6` or `Hunyuan V3 (HY-V3)` in full."""
    yield title
    yield from re.findall(r"\((.+?)\)", title)
    first, *others = re.split(r" / |, ", re.sub(r" \(.*?\)", "", title))
    yield first
    for other in others:
        stem = first.split("-")[0] + "-" if other[:1].isalpha() else re.split(r"\d", first)[0]
        yield from (stem + other, other)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
