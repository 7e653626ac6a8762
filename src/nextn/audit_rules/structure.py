"""Compare the head that config.json declares with the one that is stored: partial, elsewhere, or undeclared.

If a head is stored under other names than declared, only that is reported: the rules that look for its parts under the
declared names report nothing, so that one cause gives one finding.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from nextn.audit_rules.absent_head import absent
from nextn.audit_rules.findings import Finding, convert, restore, verb
from nextn.audit_rules.head_structure import HeadStructure, count_field, own_names
from nextn.audit_rules.layer_reference import LayerReference
from nextn.audit_rules.trunk_layers import missing_parts
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_forms import expert_path, split_view
from nextn.checkpoint.foreign_names import ForeignNames, foreign
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import is_mlx, split_name, storage
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.edit.find_head import find_head
from nextn.errors import CheckpointError
from nextn.family_table import ExpertForm
from nextn.text_format import counted, joined, some

IDS = (
    "head-elsewhere", "head-undeclared", "modules-missing", "head-partial", "names-unknown", "names-foreign",
    "experts-twice",
)  # fmt: skip


def structure(inventory: Inventory) -> Iterator[Finding]:
    """Run every rule that compares the config with the names."""
    head = HeadStructure(inventory)
    for rule in (absent, _elsewhere, _undeclared, _modules_missing, _partial, _names_unknown, _experts_twice):
        yield from rule(head)


def foreign_names(inventory: Inventory) -> list[tuple[ForeignNames, list[str]]]:
    """Return each kind of names of a running program (such as an FSDP wrapper) with the tensors that have them."""
    # Without the parts of the head's published names that would be a running program's in other checkpoints.
    known = {name: canonical for canonical in inventory.stored for name in inventory.spellings([canonical])}
    own = inventory.family.runtime_names
    names = [name for name in sorted(inventory.checkpoint.tensors) if not (name in known and name.endswith(own))]
    checked = {known.get(name, name): name for name in names}
    kinds = foreign(checked, own)
    return [(kind, [checked[key] for key in keys]) for kind, keys in kinds]


def names_foreign(path: str, found: Iterable[tuple[ForeignNames, list[str]]]) -> Iterator[Finding]:
    """Report names of a running program, by the kind of program that wrote them."""
    for kind, names in found:
        yield Finding(
            "names-foreign", kind.severity, names[0],
            f"{counted(len(names), 'tensor')} under names of {kind.what}, such as {some(names)}: {kind.effect}.",
            "The names under which the family's checkpoints are published.",
            kind.remedy.replace("MODEL", shlex.quote(path)),
        )  # fmt: skip


def _elsewhere(head: HeadStructure) -> Iterator[Finding]:
    """Report a head under a layer index or in a family's layout that differs from what the config implies."""
    inventory = head.inventory
    if head.counted_as_trunk:
        first, paths = next(iter(head.counted_as_trunk.items()))
        yield Finding(
            "head-elsewhere", "error", f"{CONFIG}: num_hidden_layers",
            f"Layer {first} holds the head's {joined(paths)}, and the config counts it as one of the trunk's "
            f"{inventory.num_layers} layers.",
            f"num_hidden_layers = {first}: the head's layers come after the trunk's.",
            f"Set num_hidden_layers to {first} in {CONFIG}." if max(inventory.layers) in head.counted_as_trunk
            else f"Save the trunk again without layer {first}, and restore the head behind it.",
        )  # fmt: skip
    elif head.layer_offset:
        actual, expected = inventory.num_layers + head.layer_offset, inventory.num_layers
        contiguous = all(module in head.roles for module in range(head.layer_offset))
        yield Finding(
            "head-elsewhere",
            "error",
            f"model.layers.{actual}",
            f"The head's first MTP layer is stored as layer {actual}; with {expected} trunk layers, engines look for "
            f"it as layer {expected}.",
            f"num_hidden_layers = {actual}, if the trunk has that many; else the head as model.layers.{expected}.",
            f"Set num_hidden_layers to {actual} in {CONFIG}." if contiguous else _renamed_or_restored(inventory),
        )
    yield from _behind_a_prefix(inventory)
    families, names = head.other_layout
    if names:
        family_names = joined(family.name for family in families[:4])
        yield Finding(
            "head-elsewhere", "warning" if head.heads else "error", names[0],
            f"{counted(len(names), 'kind')} of tensor, such as {some(names)}, in the layout of {family_names}; "
            f"{_looks(inventory)}.",
            f"Names such as {some(own_names(inventory))}.",
            _renamed_or_restored(inventory),
        )  # fmt: skip


def _behind_a_prefix(inventory: Inventory) -> Iterator[Finding]:
    """Report a head whose names have a prefix that loaders of a head do not expect."""
    wrapped = [] if not inventory.family.has_bare_head or is_mlx(inventory.checkpoint) else [
        name for name in inventory.stored.values() if not name.startswith("mtp.")
    ]  # fmt: skip
    if wrapped:
        yield Finding(
            "head-elsewhere", "error", wrapped[0],
            f"{counted(len(wrapped), 'tensor')} of the head, such as {some(wrapped)}, with a prefix before mtp.: vLLM "
            "and SGLang read names that begin with mtp. alone, and skip these.",
            f"Names such as {some(own_names(inventory))}.", convert(inventory, f"--to {inventory.family.name}"),
        )  # fmt: skip


def _renamed_or_restored(inventory: Inventory) -> str:
    """Return the fix for a head under other names, which can be converted only if it is complete."""
    try:
        find_head(inventory, inventory.family)
    except CheckpointError:
        return f"Run `{restore(inventory, force=True)}`, which removes these tensors: they are no complete head."
    return convert(inventory, f"--to {inventory.family.name}")


def _undeclared(head: HeadStructure) -> Iterator[Finding]:
    """Report stored MTP layers that the config does not declare."""
    inventory = head.inventory
    extra = [module for module in head.heads if module >= inventory.declared]
    count = len(head.heads)
    # No more of them than declared: their numbers have a gap, and what is missing is reported.
    if not extra or count <= inventory.declared or head.layer_offset or head.counted_as_trunk:
        return
    field = inventory.family.count_fields[0]
    yield Finding(
        "head-undeclared", "warning", count_field(inventory),
        f"MTP layers stored: {count}, declared: {inventory.declared}; engines ignore the rest, or refuse to load them.",
        f"{field} = {count}.",
        inventory.declaration(count),
    )  # fmt: skip


def _modules_missing(head: HeadStructure) -> Iterator[Finding]:
    """Report declared MTP layers without any stored tensor, if other layers are stored."""
    inventory = head.inventory
    missing = [module for module in range(inventory.declared) if module not in head.roles]
    beyond = [module for module in head.heads if module >= inventory.declared]
    if not missing or not head.roles or head.misplaced:
        return
    yield Finding(
        "modules-missing", "error", count_field(inventory),
        f"{CONFIG} declares {counted(inventory.declared, 'MTP layer')}; of {some([*map(str, missing)])} no tensor is "
        f"stored{f', and one numbered {min(beyond)} is, which engines do not look for' if beyond else ''}.",
        f"All {inventory.declared}{f', or {inventory.family.count_fields[0]} = {missing[0]}' if missing[0] else ''}.",
        restore(inventory, force=bool(beyond)),
    )  # fmt: skip


def _partial(head: HeadStructure) -> Iterator[Finding]:
    """Report MTP layers that lack some of their tensors."""
    inventory, reference = head.inventory, LayerReference(head.inventory)
    if head.misplaced or inventory.family.trunk_kv:  # see `separate.query_head`
        return
    if _beyond(head) and "{layer}" not in inventory.family.names["block"]:
        return  # the trunk layers to compare the block with may be among those
    for module in (index for index in head.roles if index < inventory.declared):
        required = sorted(inventory.family.required(module) - {"block"})
        missing = sorted(inventory.family.required(module) - head.roles[module])
        compared = reference.compare(module)
        paths = _in_form(compared.missing, inventory.family.experts)
        lacking = [*missing, *_of_norms(inventory, module), *_of_collapse(inventory, module)]
        lacking += [*(f"block.{path}" for path in paths)]
        names = [inventory.published(f"{module}.{each}") for each in lacking]
        lost = inventory.lost_in(inventory.of_module(module).values())
        for each in lost:
            if storage(inventory.checkpoint.tensors, each) != "fp8-bare":  # `scale-missing`
                names += lost[each]
        if names:
            like = f"a block like the trunk's layer {compared.layer}" if compared.layer >= 0 else "a block"
            fix = restore(inventory)
            if module in inventory.bare_blocks:
                fix = (
                    f"Correct num_hidden_layers in {CONFIG} if this is a layer of the trunk; if it is what is left of "
                    f"the head, run `{restore(inventory, force=True)}`."
                )
            yield Finding(
                "head-partial", "error", names[0],
                f"MTP layer {module} stores {counted(len(inventory.of_module(module)), 'tensor')} and lacks "
                f"{len(names)}: {some(names)}.",
                f"{joined([*(inventory.published(f'{module}.{role}') for role in required), like])}.",
                fix,
            )  # fmt: skip


def _of_norms(inventory: Inventory, module: int) -> list[str]:
    """Return the tensors that one norm around the block lacks and another has, such as the weight of a gated norm."""
    tails = defaultdict(set)
    for canonical in inventory.of_module(module):
        _, role, *tail = canonical.split(".", 2)
        if role.endswith("_norm") and tail != ["bias"]:
            tails[role].update(tail)
    every = set[str]().union(*tails.values())
    return sorted(f"{role}.{tail}" for role, own in tails.items() for tail in every - own)


def _of_collapse(inventory: Inventory, module: int) -> list[str]:
    """Return the parts that the module which joins a head's streams lacks, and the trunk's of the same name has."""
    if "collapse" not in inventory.family.names:
        return []
    tensors, own = inventory.checkpoint.tensors, inventory.of_module(module)
    place = f".{inventory.published(f'{module}.collapse').rpartition('.')[2]}."
    parts = {split_name(name, tensors)[0].partition(place)[2] for name in tensors.keys() - {*own.values()}}
    stored = {split_name(name, tensors)[0].partition(place)[2] for name in own.values()}
    return [f"collapse.{part}" for part in sorted(parts - stored - {""})]


def _in_form(parts: Iterable[str], form: ExpertForm) -> list[str]:
    """Return the names of these parts in a head whose experts are stored in this form."""
    found = {part: expert_path(f"{part}.weight") for part in parts}
    gated = any(path is not None and path.part == "gate_proj" for path in found.values())
    return list(dict.fromkeys(
        part if path is None or form == "split" else path.all_in(form, gated=gated).removesuffix(".weight")
        for part, path in found.items()
    ))  # fmt: skip


def _experts_twice(head: HeadStructure) -> Iterator[Finding]:
    """Report experts of the head, or of one trunk layer, that are stored in several forms."""
    inventory = head.inventory
    layers = {f"layer {index}": {inventory.running_paths[path]: info for path, info in layer.items()}
              for index, layer in inventory.layers.items()}  # fmt: skip
    own = {canonical: inventory.info(canonical) for canonical in inventory.stored}
    for what, tensors in {"the head": own, **layers}.items():
        if finding := _several_forms(inventory, what, tensors):
            yield finding
            return


def _several_forms(inventory: Inventory, what: str, tensors: Mapping[str, TensorInfo]) -> Finding | None:
    """Report experts that are stored in several forms, or of which each form has only a part."""
    names: dict[ExpertForm, str] = {}
    parts: dict[ExpertForm, set[str]] = defaultdict(set)
    for path, info in tensors.items():
        if (found := expert_path(path)) is not None:
            names.setdefault(found.form, info.name)
            parts[found.form] |= {part for part, _ in split_view(path, info)}
    if len(names) < 2:
        return None
    ways = joined(f"{form} ({name})" for form, name in names.items())
    option = "experts" if what == "the head" else "trunk-experts"
    every, place = set().union(*parts.values()), next(iter(names.values()))
    if sum(map(len, parts.values())) == len(every):
        return Finding(
            "experts-form", "error" if what == "the head" else "warning", place,
            f"The experts of {what} are stored in several forms, each with a part of them: {ways}. A loader that reads "
            "one form misses the others.",
            "One form.", convert(inventory, f"--{option} {'split' if 'split' in names else next(iter(names))}"),
        )  # fmt: skip
    keeps = [f"`{convert(inventory, f'--{option} {form}')}`" for form, own in parts.items() if own == every]
    fix = f"Keep one: {' or '.join(keeps)} names the tensors that it leaves out." if keeps else (
        restore(inventory, force=True) if what == "the head" else "Download or convert the trunk again."
    )  # fmt: skip
    return Finding(
        "experts-twice", "error", place,
        f"The experts of {what} are stored {ways}: which of them an engine uses, if it loads them at all, depends on "
        "its load order.",
        "One of them.", fix,
    )  # fmt: skip


def _names_unknown(head: HeadStructure) -> Iterator[Finding]:
    """Report tensors that look like a head's, or are in its block, and whose names no known engine maps."""
    inventory = head.inventory
    known = {re.sub(r"\d+", "0", name) for name in head.other_layout[1]}
    names = [name for name in inventory.unrecognized if re.sub(r"\d+", "0", name) not in known]
    inside = [] if head.misplaced or _beyond(head) else [*_unknown_rests(inventory), *_unknown_parts(head)]
    layers = _beyond(head)
    names = [name for name in names if inventory.family.trunk_layer(name) is None]
    if layers and not known:
        yield Finding(
            "names-unknown", "warning", f"{CONFIG}: num_hidden_layers",
            f"{counted(len(layers), 'layer')} ({some(layers)}) beyond the trunk's {inventory.num_layers}, without a "
            "head's norms.",
            "num_hidden_layers equal to the number of trunk layers; the head's come after them.",
            f"Correct num_hidden_layers in {CONFIG}.",
        )  # fmt: skip
    if names := list(dict.fromkeys([*names, *inside])):
        complete = _is_complete(head) and not inside
        yield Finding(
            "names-unknown", "warning" if complete or (head.roles and not inside) else "error", names[0],
            f"{counted(len(names), 'tensor')} with names that no known engine maps: {some(names)}; "
            f"{_looks(inventory)}.",
            f"Names such as {some(own_names(inventory))}.",
            f"Rename them, or run `{restore(inventory, force=True, own=complete)}`, which removes them.",
        )  # fmt: skip


def _beyond(head: HeadStructure) -> list[str]:
    """Return the layers beyond the config's number that do not belong to a head."""
    inventory = head.inventory
    if "{layer}" in inventory.family.names["block"]:
        modules = [module for module in head.roles if module not in head.heads and module >= inventory.declared]
        return [] if head.layer_offset else [str(inventory.num_layers + module) for module in modules]
    found = filter(None, map(inventory.family.trunk_layer, inventory.unrecognized))
    return [str(layer) for layer in sorted({layer for layer, _ in found})]


def _unknown_parts(head: HeadStructure) -> Iterator[str]:
    """Yield tensors of the declared modules' blocks that no layer of the trunk has, where its layers are complete."""
    reference = LayerReference(head.inventory)
    if any(missing_parts(head.inventory, reference)):
        return
    for module in (index for index in head.roles if index < head.inventory.declared):
        yield from reference.compare(module).unknown


def _unknown_rests(inventory: Inventory) -> Iterator[str]:
    """Yield tensors of norms and projections that are not a weight, a bias, or a part of a quantized one.

    Others are accepted if the trunk's own modules have them as well, as gated norms do.
    """
    names = inventory.checkpoint.tensors
    paths = {path for layer in inventory.layers.values() for path in layer} | names.keys()
    for canonical, name in inventory.stored.items():
        module, role, *rest = canonical.split(".", 2)
        if role == "block" or role.startswith("collapse"):
            continue
        part = split_name(canonical, inventory.stored)[0].removeprefix(f"{module}.{role}").removeprefix(".")
        norms = "norm" in role and part == "bias" and any(path.endswith("norm.bias") for path in paths - {name})
        if not part or norms or any(path.endswith(f".{rest[0]}") for path in paths - {name}):
            continue
        yield name


def _is_complete(head: HeadStructure) -> bool:
    family, declared = head.inventory.family, range(head.inventory.declared)
    return all(family.required(module) <= head.roles.get(module, frozenset()) for module in declared)


def _looks(inventory: Inventory) -> str:
    family = inventory.family
    readers = [name for name, engine in family.engines.items() if engine.support in ("runs", "loads")]
    what = family.names["block"].format(module=0, layer=inventory.num_layers)
    return f"{verb(readers, 'look')} for {family.name}'s head at {what}" if readers else "no engine runs this head"


RULES = (structure,)
