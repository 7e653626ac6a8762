"""Families: how each published model stores and computes its MTP head. Imports no torch.

`spec` defines a family, `rows` has the cited facts; this module looks them up.
"""

from collections.abc import Mapping
from reprlib import repr as brief

from nextn.errors import FamilyError
from nextn.families.rows import FAMILIES
from nextn.families.spec import (
    ENGINES,
    MAX_COUNT,
    EngineSupport,
    Family,
    Fp8,
    Missing,
    Stage,
    Support,
    lookup,
    lookup_count,
)

__all__ = [
    "ENGINES", "MAX_COUNT", "EngineSupport", "Family", "Fp8", "Missing", "Stage", "Support",
    "by_config", "by_name", "find", "headless", "lookup", "lookup_count", "rows",
]  # fmt: skip

_EXAMPLES = ("deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_next")


def rows() -> tuple[Family, ...]:
    """Return every row, in the order of the documentation."""
    return FAMILIES


def by_name(name: str) -> Family:
    """Return the row called `name`; FamilyError with the known names if there is none."""
    for family in rows():
        if family.name == name:
            return family
    raise FamilyError(f"unknown family {name!r}; known: {', '.join(sorted(row.name for row in rows()))}")


def find(config: Mapping[str, object]) -> Family | None:
    """Return the row for a config.json, by its `model_type` or that of its text model; None if there is none.

    A draft model's own type (`deepseek_mtp`, ...) also counts.
    """
    table = {name: family for family in rows() for name in (*family.model_types, *family.draft_types)}
    return next((table[name] for name in _types(config) if isinstance(name, str) and name in table), None)


def by_config(config: Mapping[str, object]) -> Family:
    """Return the same; FamilyError with what to do where there is no row."""
    family = find(config)
    if family is not None:
        return family
    raise FamilyError(
        f"model_type {brief(_types(config)[0])} has no MTP convention that nextn knows: no head to read, train or "
        f"convert. {len(rows())} families are known, e.g. {', '.join(_EXAMPLES)} (docs/reference/families/index.md). "
        "`nextn generate -k 0` and `nextn answer` need none; `nextn audit` and `nextn restore` take --family NAME for "
        "a head that is stored as that family's"
    )


def _types(config: Mapping[str, object]) -> list[object]:
    text = config.get("text_config")
    return [part.get("model_type") for part in (config, text) if isinstance(part, Mapping)]


def headless(config: Mapping[str, object]) -> Family:
    """Return a family without a head, for a trunk of an unknown model type: no tensor counts as a head's."""
    model_type = brief(config.get("model_type"))
    return Family(
        name=str(config.get("model_type")),
        title=str(config.get("model_type")),
        model_types=(),
        count_fields=(),
        default_count=0,
        names={},
        sources=(),
        engines={},
        cannot_run=f"model_type {model_type} has no MTP convention that nextn knows",
    )
