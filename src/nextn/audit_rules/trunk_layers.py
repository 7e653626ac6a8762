"""Compare the trunk's tensors with config.json, and its layers with each other: what loaders would miss or refuse.

Knows no family's layers: a tensor is looked for among layers of the same type, and sizes are compared with fields of
the usual names, where all layers agree.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import prod

from nextn.audit_rules.findings import Finding
from nextn.audit_rules.layer_reference import LayerReference
from nextn.bounded_json import short_repr
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_counts import COUNT_FIELDS, declared_experts, trunk_experts, uniform
from nextn.checkpoint.expert_forms import split_view
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import unpacked
from nextn.family_table import lookup, lookup_count
from nextn.text_format import counted, joined, some

IDS = ("trunk-partial",)
FINAL_NORMS = ("norm.weight", "norm_f.weight", "final_layernorm.weight")
_LAYER = re.compile(r"^(?!.*(?:visi|visual|audio)).*(?:layers|blocks|\bh)\.[0-9]+\.")
_MATRIX = re.compile(r".*(?:proj|norm)")
# Path in a layer -> the fields of config.json whose product is the number of rows.
_ROWS = {
    "self_attn.q_proj.weight": ("num_attention_heads", "head_dim"),
    "self_attn.k_proj.weight": ("num_key_value_heads", "head_dim"),
    "mlp.gate_proj.weight": ("intermediate_size",),
    "mlp.experts.0.gate_proj.weight": ("moe_intermediate_size",),
}
_SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers")


def trunk_layers(inventory: Inventory) -> Iterator[Finding]:
    """Run every rule on the trunk's layers."""
    yield from _renamed(inventory)
    reference = LayerReference(inventory)
    yield from _partial(inventory, reference)
    yield from _config_sizes(inventory, reference)


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


def _config_sizes(inventory: Inventory, reference: LayerReference) -> Iterator[Finding]:
    """Report sizes of the trunk, and numbers of its experts, that are not those of config.json."""
    config = inventory.checkpoint.config
    if inventory.family.trunk_kv or not inventory.layers:
        return
    yield from _no_sizes(_both_levels(config))
    yield from _row_counts(inventory, _both_levels(config))
    experts, declared = trunk_experts(inventory), declared_experts(config)
    count = uniform(experts)
    if count and declared and count not in declared.values():
        yield _contradiction(declared, [*declared], f"the trunk's layers have {count} experts")
    embedding = inventory.checkpoint.tensors.get(inventory.shared.get("embedding", ""))
    hidden = lookup_count(config, "hidden_size")
    if embedding and unpacked(embedding) and hidden and embedding.shape[1:] not in ((), (hidden,)):
        yield _contradiction({"hidden_size": hidden}, ["hidden_size"],
                             f"{embedding.name} has {embedding.shape[1]} columns")  # fmt: skip
    yield from _mixed_types(inventory, reference)


def _no_sizes(config: Mapping[str, object]) -> Iterator[Finding]:
    """Report sizes that are no whole numbers, which configuration classes refuse or take for something else."""
    for field in (*_SIZES, *COUNT_FIELDS, "intermediate_size", "moe_intermediate_size", "head_dim"):
        value, least = config.get(field), int(field in _SIZES)
        if value is not None and not isinstance(value, list) and (type(value) is not int or value < least):
            yield Finding(
                "config-contradicts", "error", f"{CONFIG}: {field}", f"{field} = {short_repr(value)} in {CONFIG}.",
                f"A whole number from {least}.", f"Correct {CONFIG}.",
            )  # fmt: skip


def _mixed_types(inventory: Inventory, reference: LayerReference) -> Iterator[Finding]:
    """Report layers of one declared type of which some have attention and some a recurrent mixer."""
    types = lookup(inventory.checkpoint.config, "layer_types")
    mixers: dict[str, dict[frozenset[str], int]] = defaultdict(dict)
    for index, parts in reference.parts_of_layers.items():
        mixer = frozenset(part.partition(".")[0] for part in parts) & {"self_attn", "linear_attn"}
        if isinstance(types, list) and index < len(types) and mixer:
            mixers[str(types[index])].setdefault(mixer, index)
    for layer_type, found in mixers.items():
        if len(found) > 1:
            listed = joined(f"{'.'.join(sorted(mixer))} in layer {index}" for mixer, index in found.items())
            yield _contradiction({"layer_types": [layer_type]}, ["layer_types"], f"layers have {listed}")


def _row_counts(inventory: Inventory, config: Mapping[str, object]) -> Iterator[Finding]:
    """Report matrices whose numbers of rows are not those that the config's fields of the usual names give.

    Only where all layers have the same number: else some follow fields that are not known here, as in Step-3.5. With
    latent attention, head_dim is that of a part of the queries; beside experts, dense layers have widths of many names.
    """
    rows: dict[str, dict[int, str]] = defaultdict(dict)
    for layer in inventory.layers.values():
        for path, info in layer.items():
            for view, part in split_view(inventory.running_paths[path], info):
                if view in _ROWS and len(part.shape) == 2 and unpacked(info):
                    rows[view].setdefault(part.shape[0], info.name)
    for view, found in rows.items():
        fields, (count, name) = _ROWS[view], next(iter(found.items()))
        sizes = [size for field in fields if type(size := config.get(field)) is int]
        is_latent, is_dense = "head_dim" in fields and "kv_lora_rank" in config, fields == ("intermediate_size",)
        is_known = len(sizes) == len(fields) and not is_latent and not (is_dense and declared_experts(config))
        # Queries may come with as many gates.
        if is_known and len(found) == 1 and count not in (prod(sizes), prod(sizes) * (1 + ("q_proj" in view))):
            what = f"{name} has {counted(count, 'row')}{' per expert' * ('experts' in name)}"
            yield _contradiction(config, [*fields], what)


def _both_levels(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}


def _layer_type(inventory: Inventory, index: int, *, mlp: bool) -> str:
    """Return what the config's lists with an entry for each layer say of the MLP, or of the rest, of one."""
    lists = (value for field, value in _both_levels(inventory.checkpoint.config).items()
             if (isinstance(value, list) or (isinstance(value, str) and "pattern" in field))
             and len(value) >= inventory.num_layers
             and (mlp or not re.search("mlp|moe", field)))  # fmt: skip
    return " ".join(str(value[index])[:40] for value in lists)


def _contradiction(numbers: Mapping[str, object], fields: list[str], found: str) -> Finding:
    listed = joined(f"{field} = {numbers[field]}" for field in fields[:4])
    return Finding(
        "config-contradicts", "error", f"{CONFIG}: {fields[0]}",
        f"{found[0].upper() if found.startswith('the') else found[0]}{found[1:]}, which {listed} in {CONFIG} do"
        f"{'es' if len(fields) == 1 else ''} not give: loaders refuse it.",
        "Sizes of the weights that are stored.", f"Correct {CONFIG}, or take config and weights of one model.",
    )  # fmt: skip


RULES = (trunk_layers,)
