"""Compare the trunk's layers with each other: what loaders would miss.

Knows no family's layers: a tensor is looked for among layers of the same type.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from nextn.audit_rules.config_claims import both_levels
from nextn.audit_rules.findings import Finding
from nextn.audit_rules.layer_reference import LayerReference
from nextn.checkpoint.head_inventory import Inventory
from nextn.text_format import counted, some

IDS = ("trunk-partial",)
FINAL_NORMS = ("norm.weight", "norm_f.weight", "final_layernorm.weight")
_LAYER = re.compile(r"^(?!.*(?:visi|visual|audio)).*(?:layers|blocks|\bh)\.[0-9]+\.")
_MATRIX = re.compile(r".*(?:proj\w*|norm)")
# The components without which no layer is complete: all layers have one of each, under one of its names.
_ATTENTION, _MLP = re.compile(r".*(?:attn|attention|mixer|mamba)"), re.compile(r"mlps?|ffn|feed_forward|.*moe")
_GATED = frozenset({"gate_proj", "up_proj", "down_proj"})


def trunk_layers(inventory: Inventory) -> Iterator[Finding]:
    """Run every rule on the trunk's layers."""
    yield from _renamed(inventory)
    yield from _partial(inventory, LayerReference(inventory))


def _renamed(inventory: Inventory) -> Iterator[Finding]:
    """Report layers under a path that is not the family's, in a checkpoint that has none under that one."""
    known = set(inventory.stored.values()) | set(inventory.unrecognized)
    known |= set() if inventory.draft_model is None else inventory.draft_model.names
    names = [] if inventory.layers or inventory.family.trunk_kv else [
        name for name in inventory.checkpoint.tensors if _LAYER.search(name) and name not in known
    ]  # fmt: skip
    if names:
        root = inventory.family.trunk["embedding"].rpartition(".")[0]
        yield Finding(
            "names-unknown", "error", names[0],
            f"{counted(len(names), 'tensor')} of layers under another path, such as {names[0]}: loaders of "
            f"{inventory.family.name} do not find the trunk.",
            f"Names such as {root + '.' if root else ''}layers.0.", "Rename them, or save the trunk again.",
        )  # fmt: skip


def _partial(inventory: Inventory, reference: LayerReference) -> Iterator[Finding]:
    """Report a trunk without its final norm, and layers without tensors that layers like them have."""
    if not inventory.layers or len(inventory.layers) < inventory.num_layers:
        return  # a head alone; `trunk-missing`
    missing = [f"model.layers.{index}: {part}" for index, part in missing_parts(inventory, reference)]
    if not any(name.endswith(FINAL_NORMS) and inventory.family.trunk_layer(name) is None
               for name in inventory.checkpoint.tensors.keys() - set(inventory.stored.values())):  # fmt: skip
        missing.append("the final norm")
    if missing:
        yield Finding(
            "trunk-partial", "error", missing[0],
            f"The trunk lacks {some(missing)}: no loader has a value for {'it' if len(missing) == 1 else 'them'}.",
            "The tensors that the other layers of the same type have, and the final norm.",
            "Download or save the trunk again.",
        )  # fmt: skip


def missing_parts(inventory: Inventory, reference: LayerReference) -> Iterator[tuple[int, str]]:
    """Yield layer and part of what a component of a layer lacks and most of the same type have, beside its siblings.

    A component that is alone of its type is compared with that of the head's block, and its MLPs with all others.
    """
    components = {index: _components(parts) for index, parts in reference.parts_of_layers.items()}
    yield from _without_component(components)
    groups: dict[tuple[object, str], dict[int, frozenset[str]]] = defaultdict(dict)
    for index, layer in components.items():
        for name, found in layer.items():
            groups[_layer_type(inventory, index, mlp=name == "mlp"), name][index] = found
    alike = not (inventory.family.own_block or inventory.family.block_adds)
    block = _components(reference.parts_of_head(0)) if alike and inventory.modules else {}
    gated = any(leaves >= _GATED for parts in reference.parts_of_layers.values() for leaves in _modules(parts).values())
    for (_, name), layers in groups.items():
        kinds = Counter(layers.values())
        for index, own in layers.items():
            larger = [other for other, count in kinds.items() if own < other and count >= kinds[own]]
            larger += [block[name]] if len(layers) == 1 and own < block.get(name, own) else []
            lost = max(larger, key=lambda other: kinds[other]) - own if larger else frozenset()
            lost |= _half_gated(own) if gated and _MLP.fullmatch(name) else set()
            for part in sorted(lost):
                parent = part.rpartition(".")[0]
                if parent and _MATRIX.fullmatch(part) and any(each.rpartition(".")[0] == parent for each in own):
                    yield index, part


def _components(parts: Iterable[str]) -> dict[str, frozenset[str]]:
    components: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        components[part.partition(".")[0]].add(part)
    return {name: frozenset(found) for name, found in components.items()}


def _without_component(layers: Mapping[int, Collection[str]]) -> Iterator[tuple[int, str]]:
    """Yield layers that have no attention, or no MLP, where others have one."""
    for kind in (_ATTENTION, _MLP):
        names = {index: sorted(filter(kind.fullmatch, layer)) for index, layer in layers.items()}
        usual = max(names.values(), default=[])
        yield from ((index, usual[0]) for index, own in names.items() if usual and not own)


def _modules(parts: Iterable[str]) -> dict[str, set[str]]:
    """Return module -> the names of its parts."""
    modules: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        modules[part.rpartition(".")[0]].add(part.rpartition(".")[2])
    return modules


def _half_gated(parts: Iterable[str]) -> set[str]:
    """Return the projections that gated MLPs among these parts lack."""
    modules = {
        name: leaves for name, leaves in _modules(parts).items() if leaves & _GATED and "gate_up_proj" not in leaves
    }
    return {f"{name}.{leaf}" for name, leaves in modules.items() for leaf in _GATED - leaves}


def _layer_type(inventory: Inventory, index: int, *, mlp: bool) -> str:
    """Return what the config's lists with an entry for each layer say of the MLP, or of the rest, of one."""
    lists = (value for field, value in both_levels(inventory.checkpoint.config).items()
             if (isinstance(value, list) or (isinstance(value, str) and "pattern" in field))
             and len(value) >= inventory.num_layers
             and (mlp or not re.search("mlp|moe", field)))  # fmt: skip
    return " ".join(str(value[index])[:40] for value in lists)


RULES = (trunk_layers,)
