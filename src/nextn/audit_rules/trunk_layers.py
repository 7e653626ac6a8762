"""Compare the trunk's tensors with config.json, and its layers with each other: what loaders would miss or refuse.

Knows no family's layers. A size is looked for among the config's own numbers, and a tensor among layers of the same
type, so that only what neither explains is reported.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

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
_PROJECTION = re.compile(
    r"(?:.*\.)?(?:(?P<query>q_proj)|(?P<key>[kv]_proj)|(?:mlp|\w*experts?(?:\.[0-9]+)?)\.(?P<width>(?:gate|up)_proj))\.weight"
)
_WIDTH = re.compile(r".*(?:inter|ffn|inner|expert|shared?).*(?:size|dim)s?")
_HEAD_DIM = re.compile(r".*head.*dim|qk_.*dim|v_head_dim|d_head|kv_channels")
_HEADS = re.compile(r".*(?:num|n)_.*heads|n_heads?")
_KEY_HEADS = re.compile(r".*(?:key_value|kv).*heads|multi_query_group_num")
_OTHER_HEADS = re.compile(r".*(?:linear|mamba|swa|sliding).*heads")
_SHARED = re.compile(r".*shared?_?experts?|.*shared?.*(?:size|dim)s?")
_FIELDS = {"query": _HEADS, "key": _KEY_HEADS, "width": _WIDTH, "experts": _WIDTH, "shared": _SHARED}
_EXPERT_WIDTH = re.compile(r".*(?:moe|expert).*(?:size|dim)s?")
_ENCODER = re.compile("vision|visual|audio|image|speech|video")
_INNER_SIZE = re.compile(r".*(?:heads|groups|head_dim|intermediate_size)")
_NUM_SHARED = re.compile(r".*shared?_?experts?(?:_num)?")
_SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers")
_MAX_VALUES = 100  # of a config, per kind of size


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
    """Report matrices of the trunk whose size no numbers of config.json give, and another number of experts."""
    config = inventory.checkpoint.config
    if inventory.family.trunk_kv or not inventory.layers:
        return
    yield from _no_sizes(_both_levels(config))
    numbers = dict(_numbers(_both_levels(config)))
    expected = {} if _has_inner_sizes(config) else _expected(numbers)
    for kind, name, rows in _unexplained(inventory, expected):
        fields = [field for field in numbers if _FIELDS[kind].fullmatch(field)]
        yield _contradiction(numbers, fields, f"{name} has {counted(rows, 'row')}{' per expert' * ('experts' in name)}")
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


def _unexplained(inventory: Inventory, expected: Mapping[str, set[int]]) -> Iterator[tuple[str, str, int]]:
    """Yield kind, name and number of rows of the first matrix of each kind whose rows are none of those expected.

    Where some layers' numbers of heads are as expected, others may come from fields that are not known here.
    """
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for layer in inventory.layers.values():
        for path, info in layer.items():
            for view, part in split_view(inventory.running_paths[path], info):
                if (kind := _kind(view)) and len(part.shape) == 2 and unpacked(info):
                    found[kind].setdefault(part.shape[0], info.name)
    for kind, names in found.items():
        wrong = [rows for rows in names if expected.get(kind) and rows not in expected[kind]]
        if wrong and (kind not in ("query", "key") or len(wrong) == len(names)):
            yield kind, names[wrong[0]], wrong[0]


def _kind(path: str) -> str:
    """Return which of the config's sizes gives the rows of the matrix at this path in a layer; "" for none."""
    match = None if "index" in path else _PROJECTION.fullmatch(path)
    if match is None or not match["width"]:
        return "" if match is None else str(match.lastgroup)
    return "shared" if "shared" in path else "experts" if "expert" in path else "width"


def _has_inner_sizes(config: Mapping[str, object]) -> bool:
    """Whether some layers have sizes of their own in an inner object, as Step-3.5's `attention_other_setting`."""
    inner = (value for field, value in _both_levels(config).items()
             if isinstance(value, Mapping) and field != "text_config" and not _ENCODER.match(field))  # fmt: skip
    return any(_INNER_SIZE.fullmatch(str(field)) for each in inner for field in each)


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


def _numbers(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the fields of a config that are a size, or a list of sizes."""
    for field, value in config.items():
        values = value if isinstance(value, list) else [value]
        if values and all(type(each) is int and 0 < each < 2**31 for each in values):
            yield field, value


def _expected(numbers: Mapping[str, object]) -> dict[str, set[int]]:
    """Return kind of matrix -> the numbers of rows that the config's numbers give; empty where they say nothing.

    A config may leave out what its class has as a default, so nothing is derived from a field that is absent.
    """
    width, dims, key_heads = (_values(numbers, pattern) for pattern in (_WIDTH, _HEAD_DIM, _KEY_HEADS))
    heads = _values({field: each for field, each in numbers.items() if not _KEY_HEADS.fullmatch(field)}, _HEADS)
    dims |= {first + second for first in dims for second in dims}  # parts with and without positions
    num_shared = _values(numbers, _NUM_SHARED)
    return {
        "query": {count * dim * gate for count in heads for dim in dims for gate in (1, 2)},
        "key": {count * dim for count in key_heads | _values(numbers, _OTHER_HEADS) for dim in dims},
        "width": width,
        "experts": width if any(_EXPERT_WIDTH.fullmatch(field) for field in numbers) else set(),
        "shared": {size * count for size in width for count in num_shared}
        | _values(numbers, re.compile(r".*shared?.*(?:size|dim)s?")),
    }


def _values(numbers: Mapping[str, object], pattern: re.Pattern[str]) -> set[int]:
    found: set[int] = set()
    for field, value in numbers.items():
        if pattern.fullmatch(field) and len(found) < _MAX_VALUES:
            found |= {*value[:_MAX_VALUES]} if isinstance(value, list) else {int(str(value))}
    return {*sorted(found)[:_MAX_VALUES]}


RULES = (trunk_layers,)
