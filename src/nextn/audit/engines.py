"""What each engine would do with this head: tensors that it looks for and does not find, replaces, or never reads.

What an engine does is the family's row's to say; a fact that only some set-ups meet is a note.
"""

from collections.abc import Iterator

from nextn.audit.finding import Finding
from nextn.audit.windows import same
from nextn.audit.words import ENGINES, ROLES, aliases, engines, verb
from nextn.checkpoints.checkpoint import CONFIG
from nextn.checkpoints.inventory import Inventory
from nextn.families import Engine, Support, lookup, rows
from nextn.words import joined, some

IDS = (
    "trunk-missing", "shared-missing", "copy-differs", "own-head-overwritten", "layer-index", "too-many-modules",
    "engine-loads", "engine-ignores", "engine-drops", "engine-refuses", "engine-absent",
)  # fmt: skip
_ALONE: dict[Support, tuple[str, str]] = {
    "loads": ("store", "the head and cannot run it"),
    "ignores": ("skip", "the head on load"),
    "drops": ("lose", "the head at conversion"),
    "refuses": ("refuse", "the model or its head"),
    "absent": ("lack", "this family"),
}


def trunk_missing(inventory: Inventory) -> Iterator[Finding]:
    """The trunk's embedding or output head, which the head uses, is not where engines look for it."""
    if not inventory.layers:
        return  # a head alone
    for role, path in inventory.family.trunk.items():
        tied = role == "output" and lookup(inventory.checkpoint.config, "tie_word_embeddings") is not False
        if role in inventory.shared or tied or f"{path}.qweight" in inventory.checkpoint.tensors:
            continue
        elsewhere = sorted(_known_places(role) & inventory.checkpoint.tensors.keys())
        instead = f"; {some(elsewhere)} is stored, a name of another family" if elsewhere else ""
        yield Finding(
            "trunk-missing", "error", f"{path}.weight",
            f"The {ROLES[role]} that trunk and head share is not at {path}.weight{instead}: {_runners(inventory)}",
            f"{path}.weight in a file of the checkpoint.",
            f"Rename {elsewhere[0]} to {path}.weight." if elsewhere else "Fetch or write the trunk again.",
        )  # fmt: skip


def shared_missing(inventory: Inventory) -> Iterator[Finding]:
    """Modules without their copies of shared tensors, where an engine would leave its own at initial values."""
    family = inventory.family
    running = family.runners
    hurt = {role: [each for each in running.values() if role in (*each.unset, *each.skips)] for role in family.copies}
    lack = {role: _lacking(inventory, role) for role in family.copies if hurt[role] and role in inventory.shared}
    roles = [role for role, modules in lack.items() if modules]
    if not roles:
        return
    places = [inventory.published(f"{lack[role][0]}.{role}.weight") for role in roles]
    known = joined(inventory.shared[role] for role in roles)
    skipped = any(role in engine.skips for role in roles for engine in hurt[role])
    yield Finding(
        "shared-missing", "warning" if skipped else "note", places[0],
        f"The {joined(ROLES[role] for role in roles)} {'are' if len(roles) > 1 else 'is'} stored as {known} "
        "alone, not inside the module: "
        f"{'; '.join(_unset(name, engine, roles) for name, engine in running.items())}.",
        f"{joined(places)}, equal to {known}.",
        aliases(inventory, next(name for name, engine in running.items() if engine in hurt[roles[0]])),
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
        guilty = [name for name, engine in inventory.family.runners.items() if role in engine.trunks]
        if names and guilty:
            yield Finding(
                "own-head-overwritten", "note", names[0],
                f"Each module has its own {ROLES[role]}; {verb(guilty, 'put')} the trunk's in its place.",
                f"An engine that uses the module's own: {_others(inventory, guilty)}.",
                f"Expect lower acceptance in {engines(guilty)}, or use another engine.",
            )  # fmt: skip


def layer_index(inventory: Inventory) -> Iterator[Finding]:
    """An engine knows the head at fixed layer indices only, and this head has another."""
    at = inventory.num_layers
    for name, engine in inventory.family.runners.items():
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
    used = {name: engine.modules for name, engine in inventory.family.runners.items()}
    fewer = {name: number for name, number in used.items() if number and number < count}
    if fewer:
        said = joined(f"{ENGINES[name]} uses {number}" for name, number in fewer.items())
        yield Finding(
            "too-many-modules", "note", f"{CONFIG}: {inventory.family.count_fields[0]}",
            f"{count} modules are stored; {said}, and applies it again for the depths after it.",
            f"An engine that runs them all: {_others(inventory, [*fewer])}.",
            "Nothing in the checkpoint needs to be done; expect lower acceptance at the later depths.",
        )  # fmt: skip


def engine_support(inventory: Inventory) -> Iterator[Finding]:
    """Engines that do not run this family's head at all."""
    for support, (does, what) in _ALONE.items():
        names = [name for name, engine in inventory.family.engines.items() if engine.support == support]
        if names and inventory.stored:
            notes = [note for name in names for note in inventory.family.engines[name].notes]
            yield Finding(
                f"engine-{support}", "note", inventory.family.name,
                f"{verb(names, does)} {what}{': ' if notes else ''}{'; '.join(dict.fromkeys(notes))}.",
                f"An engine that runs it: {_others(inventory, names)}.",
                "Nothing in the checkpoint needs to be done.",
            )  # fmt: skip


def _differing(inventory: Inventory, role: str, name: str, trunk: str) -> Finding:
    a, b = (inventory.checkpoint.tensors[each] for each in (name, trunk))
    what = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}" if a.form != b.form else "in its values"
    copy = [each for each, engine in inventory.family.runners.items() if role not in engine.trunks]
    theirs = [each for each, engine in inventory.family.runners.items() if role in engine.trunks]
    users = "; ".join(
        f"{verb(each, 'use')} {which}" for each, which in ((copy, "the copy"), (theirs, "the trunk's")) if each
    )
    return Finding(
        "copy-differs", "warning", name,
        f"{name} differs from {trunk}: {what}; {users or 'no engine runs this head'}.",
        f"A copy equal to {trunk}: the head was trained with one {ROLES[role]}.",
        aliases(inventory, next(iter(copy or theirs), "vllm")),
    )  # fmt: skip


def _known_places(role: str) -> set[str]:
    """Where the trunks of all families keep it."""
    return {
        f"{wrapper}{row.trunk[role].removeprefix(meant)}.weight"
        for row in rows()
        for wrapper, meant in {"": "", **row.wrappers}.items()
    }


def _lacking(inventory: Inventory, role: str) -> list[int]:
    """Modules of which something is stored, and not their copy of this shared tensor."""
    stored = {int(key.split(".")[0]) for key in inventory.copies if inventory.role(key) == role}
    once = "{" not in inventory.family.names[role]
    return [module for module in inventory.modules if module not in stored and not (once and module)]


def _unset(name: str, engine: Engine, roles: list[str]) -> str:
    if any(role in engine.skips for role in roles):
        return f"{ENGINES[name]}, in versions that do not hand over the trunk's, drafts from initial values, unsaid"
    lost = joined(ROLES[role] for role in roles if role in engine.unset)
    if lost:
        return f"{ENGINES[name]}, if it is pipeline-parallel, drafts from an initial {lost}"
    return f"{ENGINES[name]} takes the trunk's"


def _runners(inventory: Inventory) -> str:
    told = {
        "raises": ("fail", "to load"), "unquantised": ("fail", "to load, unless the checkpoint is quantised"),
        "module": ("leave", "it at an initial value"), "silent": ("leave", "it at an initial value, with no error"),
        "unknown": ("leave", "it at an initial value, or fail to load"),
    }  # fmt: skip
    lines = []
    for missing, (does, what) in told.items():
        names = [name for name, engine in inventory.family.runners.items() if engine.missing == missing]
        if names:
            lines.append(f"{verb(names, does)} {what}")
    return "; ".join(lines) + "." if lines else "no engine runs this head."


def _others(inventory: Inventory, names: list[str]) -> str:
    rest = [name for name in inventory.family.runners if name not in names]
    return engines(rest) if rest else "none known"


RULES = (
    trunk_missing, shared_missing, copy_differs, own_head_overwritten, layer_index, too_many_modules, engine_support,
)  # fmt: skip
