"""Compare the trunk's layers with each other: what loaders would miss.

Knows no family's layers: a tensor is looked for among layers of the same type.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from nextn.audit_rules.config_claims import both_levels
from nextn.audit_rules.findings import Finding
from nextn.audit_rules.layer_reference import LayerReference
from nextn.checkpoint.head_inventory import Inventory
from nextn.text_format import counted, some

IDS = ("trunk-partial",)
FINAL_NORMS = ("norm.weight", "norm_f.weight", "final_layernorm.weight")
_LAYER = re.compile(r"^(?!.*(?:visi|visual|audio)).*(?:layers|blocks|\bh)\.[0-9]+\.")
_MATRIX = re.compile(r".*(?:proj|norm)")


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
    missing = [f"model.layers.{index}: {part}" for index, part in _missing_parts(inventory, reference)]
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


def _missing_parts(inventory: Inventory, reference: LayerReference) -> Iterator[tuple[int, str]]:
    """Yield layer and part of what a component of a layer lacks and most of the same type have, beside its siblings."""
    groups: dict[tuple[object, str], dict[int, frozenset[str]]] = defaultdict(dict)
    for index, parts in reference.parts_of_layers.items():
        components: dict[str, set[str]] = defaultdict(set)
        for part in parts:
            components[part.partition(".")[0]].add(part)
        for name, found in components.items():
            groups[_layer_type(inventory, index, mlp=name == "mlp"), name][index] = frozenset(found)
    for layers in groups.values():
        kinds = Counter(layers.values())
        for index, own in layers.items():
            larger = [other for other, count in kinds.items() if own < other and count >= kinds[own]]
            for part in sorted(max(larger, key=lambda other: kinds[other]) - own) if larger else ():
                parent = part.rpartition(".")[0]
                if parent and _MATRIX.fullmatch(part) and any(each.rpartition(".")[0] == parent for each in own):
                    yield index, part


def _layer_type(inventory: Inventory, index: int, *, mlp: bool) -> str:
    """Return what the config's lists with an entry for each layer say of the MLP, or of the rest, of one."""
    lists = (value for field, value in both_levels(inventory.checkpoint.config).items()
             if (isinstance(value, list) or (isinstance(value, str) and "pattern" in field))
             and len(value) >= inventory.num_layers
             and (mlp or not re.search("mlp|moe", field)))  # fmt: skip
    return " ".join(str(value[index])[:40] for value in lists)


RULES = (trunk_layers,)
