"""Families: how each published model stores and computes its MTP head. Imports no torch.

`family` says what a row states and what follows from it, `rows` has the cited facts; here they are looked up.
"""

from collections.abc import Mapping
from reprlib import repr as brief

from nextn.errors import FamilyError
from nextn.families.family import ENGINES, MAX_COUNT, Engine, Family, Fp8, Missing, Stage, Support, lookup, lookup_count
from nextn.families.rows import FAMILIES

__all__ = [
    "ENGINES", "MAX_COUNT", "Engine", "Family", "Fp8", "Missing", "Stage", "Support", "by_config", "by_name", "find",
    "headless", "lookup", "lookup_count", "rows",
]  # fmt: skip


_EXAMPLES = ("deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_next")


def rows() -> tuple[Family, ...]:
    """Every row, in the order of the documentation."""
    return FAMILIES


def by_name(name: str) -> Family:
    """The row called `name`. Raises FamilyError that lists the known ones."""
    for family in rows():
        if family.name == name:
            return family
    raise FamilyError(f"unknown family {name!r}; known: {', '.join(sorted(row.name for row in rows()))}")


def find(config: Mapping[str, object]) -> Family | None:
    """The row for a checkpoint's config.json, by `model_type`, else by that of its text model; None without one.

    A draft's own type (`deepseek_mtp`, ...) counts, too.
    """
    table = {kind: family for family in rows() for kind in (*family.model_types, *family.draft_types)}
    return next((table[kind] for kind in _types(config) if isinstance(kind, str) and kind in table), None)


def by_config(config: Mapping[str, object]) -> Family:
    """The same. Raises FamilyError where there is no row, which says what to do."""
    family = find(config)
    if family is not None:
        return family
    raise FamilyError(
        f"model_type {brief(_types(config)[0])} has no MTP convention that nextn knows: no head to read, train or "
        f"move. {len(rows())} families are known, such as {', '.join(_EXAMPLES)}: docs/families.md. `nextn generate "
        "-k 0` and `nextn answer` need none; `nextn audit` and `nextn restore` take --family NAME for a head that is "
        "stored as that family's"
    )


def _types(config: Mapping[str, object]) -> list[object]:
    text = config.get("text_config")
    return [part.get("model_type") for part in (config, text) if isinstance(part, Mapping)]


def headless(config: Mapping[str, object]) -> Family:
    """A family without a head, for a trunk whose model type no row has: no tensor is taken for a head's."""
    kind = brief(config.get("model_type"))
    return Family(
        name=str(config.get("model_type")),
        title=str(config.get("model_type")),
        model_types=(),
        count_fields=(),
        default_count=0,
        names={},
        sources=(),
        engines={},
        cannot_run=f"model_type {kind} has no MTP convention that nextn knows",
    )
