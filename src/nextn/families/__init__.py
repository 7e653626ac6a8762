"""Families: how each published model stores and computes its MTP head. Imports no torch.

`family` says what a row states and what follows from it, `rows` has the cited facts; here they are looked up.
"""

from collections.abc import Mapping
from reprlib import repr as brief

from nextn.errors import FamilyError
from nextn.families.family import ENGINES, MAX_COUNT, Engine, Family, Fp8, Missing, Stage, Support, lookup, lookup_count
from nextn.families.rows import FAMILIES

__all__ = [
    "ENGINES", "MAX_COUNT", "Engine", "Family", "Fp8", "Missing", "Stage", "Support", "by_config", "by_name", "lookup",
    "lookup_count", "rows",
]  # fmt: skip


def rows() -> tuple[Family, ...]:
    """Every row, in the order of the documentation."""
    return FAMILIES


def by_name(name: str) -> Family:
    """The row called `name`. Raises FamilyError that lists the known ones."""
    for family in rows():
        if family.name == name:
            return family
    raise FamilyError(f"unknown family {name!r}; known: {', '.join(sorted(row.name for row in rows()))}")


def by_config(config: Mapping[str, object]) -> Family:
    """The row for a checkpoint's config.json, by `model_type`, else by that of its text model.

    A draft's own type (`deepseek_mtp`, ...) counts, too. Raises FamilyError that lists the known types.
    """
    text = config.get("text_config")
    types = [part.get("model_type") for part in (config, text) if isinstance(part, Mapping)]
    table = {kind: family for family in rows() for kind in (*family.model_types, *family.draft_types)}
    for kind in types:
        if isinstance(kind, str) and kind in table:
            return table[kind]
    known = ", ".join(sorted(kind for row in rows() for kind in row.model_types))
    raise FamilyError(
        f"no family has model_type {brief(types[0])}; known model types: {known}. A head needs a "
        "row of facts: docs/families.md lists them"
    )
