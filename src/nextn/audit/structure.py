"""The head that config.json promises against the one that is stored: absent, partial, elsewhere, or never promised.

Where a head lies elsewhere, the rules that would count its parts at the promised place keep quiet: one cause, one
finding.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.audit.blocks import Blocks
from nextn.audit.finding import Finding
from nextn.audit.words import convert, restore, verb
from nextn.checkpoints.checkpoint import CONFIG
from nextn.checkpoints.inventory import Inventory
from nextn.families import Family, rows
from nextn.words import counted, joined, some

IDS = ("head-absent", "head-elsewhere", "head-unpromised", "modules-missing", "head-partial", "names-unknown")
_MOST = 1000  # kinds of names that are tried against all families
_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Head:
    """Where the head of one checkpoint lies, told from its names."""

    inventory: Inventory

    @cached_property
    def roles(self) -> Mapping[int, frozenset[str]]:
        """Module -> the roles that it stores, copies of the trunk's tensors aside."""
        found: dict[int, set[str]] = defaultdict(set)
        for canonical in self.inventory.stored:
            module, role, *_ = canonical.split(".", 2)
            if role not in self.inventory.family.copies:
                found[int(module)].add(role)
        return {module: frozenset(found[module]) for module in sorted(found)}

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Modules that are a head's and not a layer of the trunk beyond those that the config counts."""
        appended = "{layer}" in self.inventory.family.names["block"]
        return tuple(module for module, roles in self.roles.items() if roles != {"block"} or not appended)

    @cached_property
    def swallowed(self) -> Mapping[int, list[str]]:
        """Trunk layer -> the head's own paths in it: the config counts the head as a layer."""
        names, copies = self.inventory.family.names, self.inventory.family.copies
        if "{layer}" not in names["block"]:
            return {}
        root = names["block"] + "."
        own = {
            path.removeprefix(root)
            for role, path in names.items()
            if role not in ("block", *copies) and path.startswith(root)
        }
        found = {
            index: [path for path in own if f"{path}.weight" in layer] for index, layer in self.inventory.layers.items()
        }
        return {index: sorted(paths) for index, paths in sorted(found.items()) if paths}

    @cached_property
    def foreign(self) -> tuple[tuple[Family, ...], tuple[str, ...]]:
        """Families whose layout the strangers fit best, as those share layouts, and the strangers that fit."""
        kinds = {re.sub(r"\d+", "0", name): name for name in reversed(self.inventory.strangers)}
        tried = list(kinds.values())[:_MOST]
        best: tuple[list[Family], list[str]] = [], []
        for family in rows():
            found = {name: family.canonical(name, self.inventory.num_layers) for name in tried}
            fit = [name for name, canonical in found.items() if canonical]
            if not any(canonical and canonical.split(".")[1] != "block" for canonical in found.values()):
                continue
            if len(fit) > len(best[1]):
                best = [family], fit
            elif fit and fit == best[1]:
                best[0].append(family)
        return tuple(best[0]), tuple(sorted(best[1]))

    @property
    def shift(self) -> int:
        """By how many modules the head lies beyond the place that the config gives it."""
        appended = "{layer}" in self.inventory.family.names["block"]
        return self.heads[0] if self.heads and appended else 0

    @property
    def astray(self) -> bool:
        """Whether the head lies anywhere but where the config puts it."""
        return bool(self.swallowed or self.shift or (self.foreign[1] and not self.heads))


def structure(inventory: Inventory) -> Iterator[Finding]:
    """Every rule that sets the promise against the names."""
    head = Head(inventory)
    for rule in (_absent, _elsewhere, _unpromised, _modules_missing, _partial, _names_unknown):
        yield from rule(head)


def _absent(head: Head) -> Iterator[Finding]:
    """The config promises modules, and no tensor of any is stored."""
    inventory = head.inventory
    if not inventory.promised or head.roles or head.astray or inventory.strangers:
        return
    family = inventory.family
    named = bool(family.counted_in(inventory.checkpoint.config))
    promise = f"{CONFIG} promises {counted(inventory.promised, 'module')}"
    if not named:
        promise = f"{CONFIG} has no {family.count_fields[0]}, for which {family.title} means {inventory.promised}"
    listed = [name for name in inventory.checkpoint.index or {} if family.canonical(name, inventory.num_layers)]
    if listed:
        files = sorted({inventory.checkpoint.index[name] for name in listed if inventory.checkpoint.index})
        count = counted(len(listed), "tensor")
        found = f"{promise}, and the index puts {count} of it in {some(files)}, which does not hold them."
        mend = f"Fetch {some(files)} again, or run `{restore(inventory)}`."
    else:
        found, mend = f"{promise}, and no tensor of it is stored.", restore(inventory)
    valid = f"Tensors such as {some(_own_names(inventory))}, or {family.count_fields[0]} = 0."
    yield Finding("head-absent", "error" if named or listed else "warning", _count_place(inventory), found, valid, mend)


def _elsewhere(head: Head) -> Iterator[Finding]:
    """A head is stored, under another layer index or in another family's layout than the config says."""
    inventory = head.inventory
    if head.swallowed:
        first, paths = next(iter(head.swallowed.items()))
        yield Finding(
            "head-elsewhere", "error", f"{CONFIG}: num_hidden_layers",
            f"Layer {first} holds the head's {joined(paths)}, and the config counts it among the trunk's "
            f"{inventory.num_layers} layers.",
            f"num_hidden_layers = {first}: the head's layers come after the trunk's.",
            f"Set num_hidden_layers to {first} in {CONFIG}.",
        )  # fmt: skip
    elif head.shift:
        at, due = inventory.num_layers + head.shift, inventory.num_layers
        filled = all(module in head.roles for module in range(head.shift))
        yield Finding(
            "head-elsewhere",
            "error",
            f"model.layers.{at}",
            f"The head's first module is stored as layer {at}; with {due} trunk layers, engines look for it at {due}.",
            f"num_hidden_layers = {at}, if the trunk has so many layers; else the head at model.layers.{due}.",
            f"Set num_hidden_layers to {at} in {CONFIG}." if filled else restore(inventory),
        )
    families, names = head.foreign
    if names:
        titles = joined(each.name for each in families[:4])
        yield Finding(
            "head-elsewhere", "warning" if head.heads else "error", names[0],
            f"{counted(len(names), 'kind')} of tensor, such as {some(names)}, lie in the layout of {titles}; "
            f"{_looks(inventory)}.",
            f"Names such as {some(_own_names(inventory))}.",
            convert(inventory, f"--to {inventory.family.name}"),
        )  # fmt: skip


def _unpromised(head: Head) -> Iterator[Finding]:
    """Modules are stored beyond those that the config promises."""
    inventory = head.inventory
    extra = [module for module in head.heads if module >= inventory.promised]
    if not extra or head.shift or head.swallowed:
        return
    field = inventory.family.count_fields[0]
    count = len(head.heads)
    yield Finding(
        "head-unpromised", "warning", _count_place(inventory),
        f"Modules stored: {count}, promised: {inventory.promised}; engines leave the others unread, or refuse them.",
        f"{field} = {count}.",
        f"Set {field} to {count + (inventory.family.spare_count and count > 1)} in {CONFIG}.",
    )  # fmt: skip


def _modules_missing(head: Head) -> Iterator[Finding]:
    """Some of the promised modules are not stored at all."""
    inventory = head.inventory
    lost = [str(module) for module in range(inventory.promised) if module not in head.roles]
    if not lost or not head.roles or head.astray:
        return
    yield Finding(
        "modules-missing", "error", _count_place(inventory),
        f"{CONFIG} promises {inventory.promised} modules; of {some(lost)} no tensor is stored.",
        f"All {inventory.promised}, or {inventory.family.count_fields[0]} = {inventory.promised - len(lost)}.",
        restore(inventory),
    )  # fmt: skip


def _partial(head: Head) -> Iterator[Finding]:
    """A module lacks some of its tensors."""
    inventory, blocks = head.inventory, Blocks(head.inventory)
    if head.astray:
        return
    for module in (each for each in head.roles if each < inventory.promised):
        lost = sorted(inventory.family.required(module) - head.roles[module])
        layer, paths = blocks.missing(module)
        names = [inventory.published(f"{module}.{each}") for each in [*lost, *(f"block.{path}" for path in paths)]]
        stored = len(inventory.of_module(module))
        fused = [name for path, name in _block(inventory, module) if _FUSED.fullmatch(path)]
        if fused and blocks.split_experts and inventory.family.experts != "fused":
            yield _experts_fused(inventory, fused)
        elif names:
            like = f"a block like the trunk's layer {layer}" if layer >= 0 else "a block"
            yield Finding(
                "head-partial", "error", names[0],
                f"Module {module} stores {counted(stored, 'tensor')} and lacks {len(names)}: {some(names)}.",
                f"{joined([*sorted(inventory.family.required(module) - {'block'}), like])}.",
                restore(inventory),
            )  # fmt: skip


def _names_unknown(head: Head) -> Iterator[Finding]:
    """Tensors look like a head's, and no known engine maps their names."""
    inventory = head.inventory
    known = {re.sub(r"\d+", "0", name) for name in head.foreign[1]}
    names = [name for name in inventory.strangers if re.sub(r"\d+", "0", name) not in known]
    beyond = [module for module in head.roles if module not in head.heads and module >= inventory.promised]
    if beyond and not head.shift:
        layers = [str(inventory.num_layers + module) for module in beyond]
        yield Finding(
            "names-unknown", "warning", f"{CONFIG}: num_hidden_layers",
            f"{counted(len(layers), 'layer')} ({some(layers)}) beyond the trunk's {inventory.num_layers}, without a "
            "head's norms.",
            "num_hidden_layers that covers the trunk's layers, then the head's.",
            f"Correct num_hidden_layers in {CONFIG}.",
        )  # fmt: skip
    if names:
        yield Finding(
            "names-unknown", "note" if _whole(head) else "warning" if head.roles else "error", names[0],
            f"{counted(len(names), 'tensor')} with names that no known engine maps: {some(names)}; "
            f"{_looks(inventory)}.",
            f"Names such as {some(_own_names(inventory))}.",
            f"Rename them, or run `{restore(inventory, whole=_whole(head))}`.",
        )  # fmt: skip


def _experts_fused(inventory: Inventory, names: list[str]) -> Finding:
    return Finding(
        "head-partial", "error", names[0],
        f"The experts are stored fused, as {some(names)}: so transformers keeps them in memory; no engine reads them.",
        "Experts one by one, such as experts.0.gate_proj.weight.",
        restore(inventory),
    )  # fmt: skip


def _whole(head: Head) -> bool:
    family, promised = head.inventory.family, range(head.inventory.promised)
    return all(family.required(module) <= head.roles.get(module, frozenset()) for module in promised)


def _block(inventory: Inventory, module: int) -> Iterator[tuple[str, str]]:
    stem = f"{module}.block."
    return ((key.removeprefix(stem), name) for key, name in inventory.stored.items() if key.startswith(stem))


def _own_names(inventory: Inventory) -> list[str]:
    """Where the family's engines look for the first module."""
    family = inventory.family
    roles = [role for role in family.names if role not in family.copies and role != "block"]
    return [inventory.published(f"0.{role}") for role in roles]


def _looks(inventory: Inventory) -> str:
    """Which engines look where, in words."""
    family = inventory.family
    readers = [name for name, engine in family.engines.items() if engine.support in ("runs", "loads")]
    what = family.names["block"].format(module=0, layer=inventory.num_layers)
    return f"{verb(readers, 'look')} for {family.name}'s head at {what}" if readers else "no engine runs this head"


def _count_place(inventory: Inventory) -> str:
    family = inventory.family
    return f"{CONFIG}: {[*family.counted_in(inventory.checkpoint.config), *family.count_fields][0]}"


RULES = (structure,)
