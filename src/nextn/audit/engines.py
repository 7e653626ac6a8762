"""What each engine would do with this head: tensors that it looks for and does not find, replaces, or never reads.

What an engine does is the family's row's to say; a fact that only some set-ups meet is a note.
"""

from collections.abc import Iterator

from nextn.audit.finding import Finding, Severity
from nextn.audit.windows import same, same_form
from nextn.audit.words import ENGINES, engines, joined, restore, some
from nextn.families import Engine, Support, lookup, rows
from nextn.inventory import Inventory

IDS = (
    "trunk-missing", "shared-missing", "copy-differs", "own-head-overwritten", "layer-index", "too-many-modules",
    "engine-loads", "engine-ignores", "engine-drops", "engine-refuses", "engine-absent",
)  # fmt: skip
_ALONE: dict[Support, str] = {
    "loads": "keep the head at conversion and have no graph for it",
    "ignores": "skip the head on load",
    "drops": "lose the head at conversion",
    "refuses": "refuse the model or its head",
    "absent": "do not know the family",
}


def trunk_missing(inventory: Inventory) -> Iterator[Finding]:
    """The trunk's embedding or output head, which the head uses, is not where engines look for it."""
    if not inventory.layers:
        return  # a head alone
    for role, path in inventory.family.trunk.items():
        tied = role == "output" and lookup(inventory.checkpoint.config, "tie_word_embeddings") is not False
        if role in inventory.shared or tied or f"{path}.qweight" in inventory.checkpoint.tensors:
            continue
        elsewhere = sorted({name for name in inventory.checkpoint.tensors if any(
            each.shared_role(name) == role for each in rows())})  # fmt: skip
        instead = f"; {some(elsewhere)} is stored, a name of another family" if elsewhere else ""
        yield Finding(
            "trunk-missing", "error", f"{path}.weight",
            f"The {role} that trunk and head share is not at {path}.weight{instead}: {_runners(inventory)}",
            f"{path}.weight in a file of the checkpoint.",
            "Fetch or write the trunk again: the head has no other." if not elsewhere else f"Rename {elsewhere[0]}.",
        )  # fmt: skip


def shared_missing(inventory: Inventory) -> Iterator[Finding]:
    """Modules without their copy of a shared tensor, where an engine would leave its own at an initial value."""
    family = inventory.family
    for role in family.copies:
        stored = {int(canonical.split(".")[0]) for canonical in inventory.copies if inventory.role(canonical) == role}
        once = "{" not in family.names[role]
        lack = [module for module in inventory.modules if module not in stored and not (once and module)]
        hurt = {name: engine for name, engine in family.engines.items() if role in (*engine.unset, *engine.skips)}
        if not lack or not hurt or role not in inventory.shared:
            continue
        place = family.published(f"{lack[0]}.{role}.weight", inventory.num_layers, wrapper=inventory.wrapper)
        severity: Severity = "warning" if any(role in engine.skips for engine in hurt.values()) else "note"
        yield Finding(
            "shared-missing", severity, place,
            f"The {role} is stored as {inventory.shared[role]} alone, not inside the module. "
            + " ".join(_unset(name, engine, role) for name, engine in family.engines.items() if _uses(engine)),
            f"{place}, equal to {inventory.shared[role]}.",
            restore(inventory, "--add-aliases"),
        )  # fmt: skip


def copy_differs(inventory: Inventory) -> Iterator[Finding]:
    """A module's copy of the embedding or output head is not the trunk's, by a few windows of both."""
    for canonical, name in inventory.copies.items():
        _, role, *rest = canonical.split(".", 2)
        trunk = inventory.shared.get(role)
        if rest == ["weight"] and trunk and not same(inventory.checkpoint, name, trunk):
            yield _differing(inventory, role, name, trunk)


def own_head_overwritten(inventory: Inventory) -> Iterator[Finding]:
    """An embedding or output head of the head's own that an engine replaces by the trunk's."""
    for role in inventory.family.own:
        names = [name for canonical, name in inventory.stored.items() if inventory.role(canonical) == role]
        guilty = [name for name, engine in _running(inventory) if role in engine.trunks]
        if names and guilty:
            yield Finding(
                "own-head-overwritten", "note", names[0],
                f"Each module has its own {role}; {engines(guilty)} put{_s(guilty)} the trunk's in its place.",
                f"An engine that uses the module's own: {_others(inventory, guilty)}.",
                f"Expect lower acceptance in {engines(guilty)}, or use another engine.",
            )  # fmt: skip


def layer_index(inventory: Inventory) -> Iterator[Finding]:
    """An engine knows the head at fixed layer indices only, and this head has another."""
    at = inventory.num_layers
    for name, engine in _running(inventory):
        if inventory.stored and engine.layers and at not in engine.layers:
            known = joined(map(str, engine.layers))
            yield Finding(
                "layer-index", "note", f"model.layers.{at}",
                f"{ENGINES[name]} finds this family's head at layer {known} only; here it is layer {at}.",
                f"A trunk of {known} layers, or another engine: {_others(inventory, [name])}.",
                "Nothing in the checkpoint needs to be done.",
            )  # fmt: skip


def too_many_modules(inventory: Inventory) -> Iterator[Finding]:
    """More modules than an engine uses."""
    count = len(inventory.modules)
    fewer = [
        (name, engine.modules) for name, engine in _running(inventory) if engine.modules and engine.modules < count
    ]
    if fewer:
        said = joined(f"{ENGINES[name]} uses {number}" for name, number in fewer)
        yield Finding(
            "too-many-modules", "note", f"config.json: {inventory.family.count_fields[0]}",
            f"{count} modules are stored; {said}, and applies it again for the depths after it.",
            f"An engine that runs them all: {_others(inventory, [name for name, _ in fewer])}.",
            "Nothing in the checkpoint needs to be done; expect lower acceptance at the later depths.",
        )  # fmt: skip


def engine_support(inventory: Inventory) -> Iterator[Finding]:
    """Engines that do not run this family's head at all."""
    for support, does in _ALONE.items():
        names = [name for name, engine in inventory.family.engines.items() if engine.support == support]
        if names and inventory.stored:
            notes = [note for name in names for note in inventory.family.engines[name].notes]
            yield Finding(
                f"engine-{support}", "note", inventory.family.name,
                f"{engines(names)}: {does}{'; ' if notes else ''}{'; '.join(dict.fromkeys(notes))}.",
                f"An engine that runs it: {_others(inventory, names)}.",
                "Nothing in the checkpoint needs to be done.",
            )  # fmt: skip


def _differing(inventory: Inventory, role: str, name: str, trunk: str) -> Finding:
    a, b = (inventory.checkpoint.tensors[each] for each in (name, trunk))
    what = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}" if not same_form(a, b) else "in its values"
    copy = [each for each, engine in _running(inventory) if role not in engine.trunks]
    theirs = [each for each, engine in _running(inventory) if role in engine.trunks]
    users = "; ".join(
        f"{engines(each)} use{_s(each)} {which}"
        for each, which in ((copy, "the copy"), (theirs, "the trunk's"))
        if each
    )
    return Finding(
        "copy-differs", "warning", name,
        f"{name} differs from {trunk}: {what}; {users or 'no engine runs this head'}.",
        f"A copy equal to {trunk}: the head was trained with one {role}.",
        restore(inventory, "--add-aliases"),
    )  # fmt: skip


def _unset(name: str, engine: Engine, role: str) -> str:
    if role in engine.skips:
        skips = f"{ENGINES[name]} skips the trunk's on load: versions that do not hand it over leave the head's at an"
        return f"{skips} initial value, for 0 % acceptance and no error."
    if role in engine.unset:
        return f"{ENGINES[name]} leaves the head's at an initial value if it is pipeline-parallel."
    return f"{ENGINES[name]} takes the trunk's."


def _runners(inventory: Inventory) -> str:
    told = {
        "raises": "{} fail{} to load", "unquantised": "{} fail{} to load, unless the checkpoint is quantised",
        "module": "{} leave{} it at an initial value", "silent": "{} leave{} it at an initial value, with no error",
        "unknown": "{} may leave{} it at an initial value",
    }  # fmt: skip
    lines = []
    for missing, text in told.items():
        names = [name for name, engine in _running(inventory) if engine.missing == missing]
        if names:
            lines.append(text.format(engines(names), "" if missing == "unknown" else _s(names)))
    return "; ".join(lines) + "." if lines else "no engine runs this head."


def _uses(engine: Engine) -> bool:
    return engine.support == "runs"


def _running(inventory: Inventory) -> list[tuple[str, Engine]]:
    return [(name, engine) for name, engine in inventory.family.engines.items() if _uses(engine)]


def _others(inventory: Inventory, names: list[str]) -> str:
    rest = [name for name, _ in _running(inventory) if name not in names]
    return engines(rest) if rest else "none known"


def _s(names: list[str]) -> str:
    return "s" if len(names) == 1 else ""


RULES = (
    trunk_missing, shared_missing, copy_differs, own_head_overwritten, layer_index, too_many_modules, engine_support,
)  # fmt: skip
