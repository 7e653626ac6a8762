"""What the family's row documents of an engine, as evidence about its faults; and what to check of a running engine.

Imports no torch.
"""

from collections.abc import Mapping, Sequence

from nextn.families import Family

# Odds of a fault of conventions in an engine whose code for this family was read and does not have it: versions before
# and after, forks and patches still do.
DOCUMENTED_PRIOR = 0.05
# Fault -> the convention that an engine of the row states where it deviates; None: the row would say so in no field.
_CONVENTIONS: Mapping[str, str | None] = {
    "gain-less": None, "gain-more": None, "halves-swapped": None, "pair-shifted": None, "wrong-hidden": "hidden",
    "recycled-wrong": "next_hidden", "position0": "position0", "modules-permuted": "order",
}  # fmt: skip
# Causes with which the engine may have loaded something else than this head.
_LOADING = ("head-unset", "nothing-kept", "weights", "one-module", "modules-permuted", "own-output-lost")


def engine_priors(family: Family, engine: str) -> dict[str, float]:
    """Return fault -> prior odds, of the faults that the engine's code for this family does not have."""
    row = family.engines.get(engine.lower().replace(".", ""))
    if row is None or row.support != "runs":
        return {}
    return {
        fault: DOCUMENTED_PRIOR for fault, field in _CONVENTIONS.items() if not field or getattr(row, field) is None
    }


def next_checks(named: Sequence[str], *, driven: bool, temperature: float) -> list[str]:
    """Return what to check of an engine with a finding, the cheapest first."""
    checks = [
        "the engine serves this folder: compare `sha256sum *.safetensors config.json` where it runs with this one"
    ]
    if not named or any(name in _LOADING for name in named):
        checks.append("the loader's warnings in the engine's log: tensors skipped, missing or newly initialized")
    if not driven:
        checks.append(
            f"the engine's temperature and rule: the comparison assumes temperature {temperature:g} (--temperatures, "
            "--rule)"
        )
        checks.append("the same prompts in both, with the engine running: add --drive")
    return checks
