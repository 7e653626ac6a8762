"""Families: how each published model stores and computes its MTP head. Imports no torch.

`spec` defines a family, `rows` has the cited facts; this module looks them up.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from reprlib import repr as brief
from typing import Literal

from nextn.errors import FamilyError
from nextn.family_table.config_fields import levels, lookup, lookup_count
from nextn.family_table.conventions import ENGINES, FACTS, EngineSupport, Fp8, Missing, Stage, Support
from nextn.family_table.rows import (
    ASKS_FOR_FUSED,
    FAMILIES,
    GEMMA4_ASSISTANT,
    GENERIC,
    MIMO_DRAFT,
    PLAIN_IN_NVFP4,
    PLAIN_PROJECTION,
    READS_FUSED,
    READS_SPLIT,
    STEP35_DRAFT,
)
from nextn.family_table.spec import MAX_COUNT, REPEATED_FIELD, ExpertForm, Family
from nextn.family_table.withheld import WITHHELD, Withheld, declared_fields, withheld

__all__ = [
    "ASKS_FOR_FUSED",
    "ENGINES", "LAYOUT_FIELD", "MAX_COUNT", "MIMO_ARCHITECTURE", "PLAIN_IN_NVFP4", "PLAIN_PROJECTION", "READS_FUSED",
    "READS_SPLIT", "REPEATED_FIELD", "WITHHELD", "EngineSupport", "ExpertForm", "Family", "Fp8", "Missing", "Stage",
    "Support", "Withheld", "beside", "by_config", "by_name", "declared_fields", "deviations", "disagreements", "find",
    "fitted", "generic", "lookup", "lookup_count", "outer_type", "rows", "separate_rows", "withheld",
]  # fmt: skip

# The architecture by which engines know a separate draft in MiMo's layout, stored with Qwen2's model_type.
MIMO_ARCHITECTURE = "MiMoForCausalLM"
# The field of config.json by which a head alone says that it is in another layout than its trunk's: a row's name.
LAYOUT_FIELD = "mtp_layout"
# Prefixes of a text model inside a model of a type of its own, of which no row knows the names.
_INSIDE_OTHERS = {"model.language_model.": "model.", "language_model.": "", "language.": ""}
# Models without a family whose RMSNorm multiplies by 1 + w.
_MAX_CLASS = 100  # characters of a name in architectures
_ONE_PLUS = {"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma"}


def rows() -> tuple[Family, ...]:
    """Return every row, in the order of the documentation."""
    return FAMILIES


def separate_rows() -> tuple[Family, ...]:
    """Return the rows of published heads in repositories of their own, which `rows` does not have."""
    return (GEMMA4_ASSISTANT,)


def deviations(row: Family, engine: str) -> dict[str, object]:
    """Return the facts in which an engine is documented to deviate from a row, with the engine's values."""
    facts = {fact: getattr(row.engines[engine], fact) for fact in FACTS}
    return {fact: value for fact, value in facts.items() if value not in (None, getattr(row, fact))}


def disagreements(row: Family) -> tuple[str, ...]:
    """Return where engines that run the head differ from its row or from each other, and further remarks."""
    return (*(line for fact in FACTS for line in _differing(row, fact)), *_replaced(row), *row.remarks)


def _differing(row: Family, fact: str) -> Iterator[str]:
    own_value = getattr(row, fact)
    engines: dict[str, list[str]] = {}
    for name, engine in row.runners.items():
        engines.setdefault(getattr(engine, fact) or own_value, []).append(name)
    if set(engines) - {own_value}:
        yield f"{fact}: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in engines.items())


def _replaced(row: Family) -> Iterator[str]:
    for role in row.own:
        names = [name for name, engine in row.runners.items() if role in engine.trunk_roles]
        if names:
            yield f"{role}: stored for each module, but {', '.join(names)} uses the trunk's"


def by_name(name: str) -> Family:
    """Return the row called `name`; FamilyError with the known names if there is none."""
    for family in (*rows(), *separate_rows(), GENERIC, MIMO_DRAFT, STEP35_DRAFT):
        if family.name == name:
            return family
    raise FamilyError(f"unknown family {name!r}; known: {', '.join(sorted(row.name for row in rows()))}")


def find(config: Mapping[str, object]) -> Family | None:
    """Return the row for a config.json, by its `model_type` or that of its text model; None if there is none.

    A draft model's own type (`deepseek_mtp`, ...) also counts. A draft in MiMo's layout, and a model of another type
    that declares `num_mtp_layers`, have a head that was added to a model without a family.

    Raises FamilyError for a `mtp_repeated_kv` that is not known.
    """
    row, repeated = _row(config), lookup(config, REPEATED_FIELD)
    if row is None or repeated is None:
        return row
    if repeated not in ("own", "first"):
        raise FamilyError(f"{REPEATED_FIELD} = {brief(repeated)}; expected own or first")
    return replace(row, repeated_kv=repeated)


def _row(config: Mapping[str, object]) -> Family | None:
    if config.get("architectures") == [MIMO_ARCHITECTURE] and config.get("model_type") == MIMO_DRAFT.layer_model:
        return MIMO_DRAFT
    if config.get(LAYOUT_FIELD) == STEP35_DRAFT.name:
        return fitted(STEP35_DRAFT, config)
    families = (*rows(), *separate_rows())
    table = {name: family for family in families for name in (*family.model_types, *family.draft_types)}
    types = [name if isinstance(name, str) else "" for name in _types(config)]
    row = next((table[name] for name in types if name in table), None)
    if row is not None and types[0] not in table and types[0]:
        row = replace(row, wrappers={**_INSIDE_OTHERS, **row.wrappers})
    row = generic(config) if row is None and lookup_count(config, GENERIC.count_fields[0]) else row
    if row is not None and row.trunk_kv:
        absent = {role for role, path in row.optional.items() if not lookup(config, path)}
        return replace(row, names={role: path for role, path in row.names.items() if role not in absent})
    return row


def by_config(config: Mapping[str, object]) -> Family:
    """Return the same; FamilyError with what to do where there is no row."""
    family = find(config)
    if family is not None:
        return family
    if (own := beside(config)) is not None:
        raise FamilyError(
            f"model_type {brief(_types(config)[0])}: its head is in a repository of its own ({', '.join(own.models)}): "
            "give that with --head; `nextn generate -k 0` needs none"
        )
    if (models := withheld(config)) is not None:
        raise FamilyError(f"model_type {brief(_types(config)[0])}: {models.sentence}, `nextn generate -k 0` needs none")
    if not any(_types(config)):
        raise FamilyError(
            "config.json is absent or has no model_type, by which families are known: put the model's own beside the "
            "weights; `nextn audit` and `nextn restore` take --family NAME instead"
        )
    raise FamilyError(
        f"model_type {brief(_types(config)[0])} has no known MTP head, so there is none to read. Train one "
        "(`nextn train RUN --from MODEL --freeze-trunk --init-head`), name one with --head, or decode without (-k 0). "
        "If the files hold a head as a family stores it (`nextn families`), `nextn audit` and `nextn restore` take "
        "--family NAME"
    )


def _types(config: Mapping[str, object]) -> list[object]:
    """Return the model_types of a config.json; where it has none, as LongCat-2.0's, those that its classes imply."""
    classes = config.get("architectures")
    types = [level.get("model_type") for level in levels(config)]
    if any(types) or not isinstance(classes, list):
        return types
    names = [re.sub(r"(For)?(CausalLM|ConditionalGeneration)$", "", str(name)[:_MAX_CLASS]) for name in classes[:1]]
    return [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in names]


def outer_type(config: Mapping[str, object]) -> str:
    """Return the model_type of a model of several modalities that no row has, around a text model of one; else ""."""
    row, types = find(config), _types(config)
    known = row is None or any(types[0] in (*each.model_types, *each.draft_types) for each in (*rows(), row))
    return "" if known or not isinstance(types[0], str) or not any(types[1:]) else types[0]


def beside(config: Mapping[str, object]) -> Family | None:
    """Return the row of heads in repositories of their own that run beside this model; None if there is none."""
    types = {str(name) for name in _types(config)}
    return next((row for row in separate_rows() if types & {*row.trunk_types}), None)


def generic(config: Mapping[str, object]) -> Family:
    """Return the layout of a head for a trunk whose model was published without one.

    Raises FamilyError for an encoder-decoder model.
    """
    return fitted(GENERIC, config)


def fitted(family: Family, config: Mapping[str, object]) -> Family:
    """Return the row of a head that was added to a model, with what depends on the trunk's config.json.

    Raises FamilyError for an encoder-decoder model.
    """
    if family.layer_model:  # its block depends on the sizes alone
        return family
    if lookup(config, "is_encoder_decoder"):
        raise FamilyError(
            f"model_type {brief(_types(config)[0])} is an encoder-decoder model; heads, and decoding here, need a "
            "decoder-only causal language model, such as Llama or Qwen"
        )
    layer_types, full = lookup(config, "layer_types"), "full_attention"
    block = {"layer_types": [full]} if isinstance(layer_types, list) and full in layer_types else {}
    norm_weight: Literal["w", "1+w"] = "1+w" if _ONE_PLUS & {str(name) for name in _types(config)} else "w"
    return replace(family, block=block, norm_weight=norm_weight)
