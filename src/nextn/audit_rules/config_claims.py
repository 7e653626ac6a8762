"""Compare what config.json says of the trunk's layers with the tensors that they have: parts, experts and sizes.

Each claim is a row of a table: a field, and the tensors that it gives or withholds. Where fields of the usual names do
not describe a family's layers, the layers have other names, and nothing is reported.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from math import prod

from nextn.audit_rules.findings import Finding, restore
from nextn.audit_rules.layer_reference import LayerReference
from nextn.bounded_json import JsonDict, short_repr
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_counts import COUNT_FIELDS, declared_experts, lost_experts, trunk_experts, uniform
from nextn.checkpoint.expert_forms import split_view
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import GENERIC
from nextn.checkpoint.quantization import unpacked
from nextn.family_table import lookup, lookup_count
from nextn.family_table.config_fields import text_config, text_key
from nextn.text_format import counted, joined

Claim = tuple[Mapping[str, object], str]  # fields of config.json, and what is stored against them
_MOST_SHOWN = 100  # characters of a value
IDS = ("config-contradicts",)
_KEYS, _VALUES = 2 * ("linear_num_key_heads*linear_key_head_dim",), "linear_num_value_heads*linear_value_head_dim"
# Path in a layer -> the fields of config.json whose products, added, are the number of rows.
_ROWS = {
    "self_attn.q_proj.weight": "num_attention_heads*head_dim",
    "self_attn.k_proj.weight": "num_key_value_heads*head_dim",
    "self_attn.q_a_proj.weight": "q_lora_rank",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_lora_rank + qk_rope_head_dim",
    "self_attn.kv_b_proj.weight": "num_attention_heads*qk_nope_head_dim + num_attention_heads*v_head_dim",
    "self_attn.indexer.wq_b.weight": "index_n_heads*index_head_dim",
    "linear_attn.in_proj_qkv.weight": " + ".join((*_KEYS, _VALUES)),
    "linear_attn.in_proj_qkvz.weight": " + ".join((*_KEYS, _VALUES, _VALUES)),
    "mlp.gate_proj.weight": "intermediate_size",
    "mlp.experts.0.gate_proj.weight": "moe_intermediate_size",
    "mlp.shared_expert.gate_proj.weight": "shared_expert_intermediate_size",
    "mlp.shared_experts.gate_proj.weight": "n_shared_experts*moe_intermediate_size",
}
# Field -> what layers have if it is true, or not 0: in words, their tensors, and those beside which they would be.
_PARTS = {
    "use_qk_norm": (
        "norms of queries and keys", r"\w+\.(q|k|query|key)_(layer)?norm\.weight", r"\w+\.(k_proj|query_key_value)\..+",
    ),
    "attention_bias": (
        "biases of attention's inputs", r"\w+\.(q|k|v|q_a|kv_a)_proj\w*\.bias",
        r"(self_attn|mixer)\.(k_proj|q_a_proj|kv_a_proj_with_mqa)\.weight",
    ),
    "q_lora_rank": ("q_a_proj", r"self_attn\.q_a_proj\..+", r"self_attn\.kv_a_proj_with_mqa\..+"),
    "n_shared_experts": ("shared experts", r"(.+\.)?shared?_(experts?|mlp)\..+", r"\w+\.experts\..+"),
    "add_swa_attention_sink_bias": (
        "sinks of attention", r"self_attn\.(sinks|attention_sink_bias)", r"self_attn\.\w+\.weight",
    ),
}  # fmt: skip
_AT_BOTH_LEVELS = ("num_hidden_layers", "hidden_size", "vocab_size")
_SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers")
_MORE_SIZES = ("num_key_value_heads", "intermediate_size", "moe_intermediate_size", "head_dim")
# Lists with one entry for each layer; those of some releases also have entries for the head.
_OF_LAYERS = ("layer_types", "mlp_layer_types", "moe_layer_freq")
# Field -> families whose class in transformers 5.23 accepts what others refuse: no value, ids of another type, and
# lists of more entries than layers. Those of the generic family are of many classes, such as Llama's.
ACCEPTED = {
    "num_key_value_heads": {
        "deepseek_v3", "ernie4_5_moe", "ernie4_5_vl_moe", "longcat_flash", "bailing_hybrid", "cohere2_moe", "generic",
    },
    "num_hidden_layers": {"nemotron_h"},
    "bos_token_id": {"glm_ocr"},
    "eos_token_id": {"glm_ocr"},
    "layer_types": {"deepseek_v4", "step3p5", "step5", "nemotron_h"},
    "mlp_layer_types": {
        "deepseek_v3", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_ocr", "ernie4_5_moe",
        "ernie4_5_vl_moe", "longcat_flash", "nemotron_h", "step3p5", "step5", "hy_v3",
    },
}  # fmt: skip
# Lists whose entries for the head's layers engines look up by the layers' numbers, and fail (vLLM) or take those of
# full attention (llama.cpp) without. Step: vLLM, models/step3p5.py; llama.cpp, conversion/step3.py.
_OF_HEAD = dict.fromkeys(("step3p5", "step5"), ("layer_types", "partial_rotary_factors", "rope_theta"))


def config_claims(inventory: Inventory) -> Iterator[Finding]:
    """Report what config.json says of the trunk and its files do not hold."""
    config = both_levels(inventory.checkpoint.config)
    if inventory.family.trunk_kv or not inventory.layers:
        return
    yield from _no_sizes(config, {field for field, names in ACCEPTED.items() if inventory.family.name in names})
    yield from _no_dtype(config)
    yield from _no_entries(inventory, config)
    if inventory.trunk_lost:  # what no layer has may be in a file that is absent
        return
    reported: set[str] = set()
    for fields, found in (*_parts(inventory, config), *_row_counts(inventory, config), *_experts(inventory, config),
                          *_layers(inventory, config)):  # fmt: skip
        if not reported & fields.keys():  # one wrong number contradicts every matrix that has it
            yield _contradiction(fields, found)
        reported |= fields.keys()


def _no_sizes(config: Mapping[str, object], accepted: Collection[str]) -> Iterator[Finding]:
    """Report sizes and token ids of a type that configuration classes refuse or take for something else.

    accepted: Those fields of which the family's class takes what others refuse.
    """
    needed = {*_SIZES, *({"num_key_value_heads"} if "kv_lora_rank" not in config else ())}.difference(accepted)
    for field in (*_SIZES, *COUNT_FIELDS, *_MORE_SIZES):
        value, least = config.get(field, 1), int(field in needed)
        sizes = value if isinstance(value, list) and value else [value]  # of each layer
        is_absent = value is None and field not in needed
        if not is_absent and not all(type(size) is int and size >= least for size in sizes):
            yield _of_type(field, value, f"A whole number from {least}.")
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if field not in accepted and not all(type(each) is int for each in ids):
            yield _of_type(field, value, "A token id, a list of them, or null.")


def _of_type(field: str, value: object, valid: str) -> Finding:
    found = f"{field} = {_as_json(value)} in {CONFIG}."
    return Finding("config-contradicts", "error", f"{CONFIG}: {field}", found, valid, f"Correct {CONFIG}.")


def _no_dtype(config: Mapping[str, object]) -> Iterator[Finding]:
    """Report a dtype that torch does not have under this name."""
    for field in ("dtype", "torch_dtype"):
        value = config.get(field)
        if isinstance(value, str) and not re.fullmatch(r"b?float16|float(32|64|8_\w+)?|half|double|u?int\d+", value):
            yield _of_type(field, value, "The name of a dtype in torch, such as bfloat16.")


def _no_entries(inventory: Inventory, config: Mapping[str, object]) -> Iterator[Finding]:
    """Report lists of layers that end with the trunk's where engines look up the head's."""
    count = inventory.num_layers + len(inventory.modules)
    if "mtp_layer_types" in config:  # as transformers writes them
        return
    lists = {field: config.get(field) for field in _OF_HEAD.get(inventory.family.name, ())}
    short = [field for field, entries in lists.items()
             if isinstance(entries, list) and inventory.num_layers <= len(entries) < count]  # fmt: skip
    if short:
        yield Finding(
            "config-contradicts", "error", f"{CONFIG}: {short[0]}",
            f"{joined(short)} in {CONFIG} end{'s' * (len(short) == 1)} with the trunk's {inventory.num_layers} layers, "
            f"and the MTP layer{'s have' if len(inventory.modules) > 1 else ' has'} no entry: vLLM fails, and "
            "llama.cpp takes full attention.",
            f"{count} entries, as in the published {CONFIG}.",
            f"Add the published entries, or run `{restore(inventory, force=True)}`, which takes them with the head.",
        )  # fmt: skip


def _layers(inventory: Inventory, config: Mapping[str, object]) -> Iterator[Claim]:
    """Yield another number of layers, or of columns, and layers of one declared type with different mixers."""
    family, is_counted_right = inventory.family, not inventory.unrecognized and not inventory.bare_blocks
    for field in _OF_LAYERS:
        entries = config.get(field)
        longer = family.runs and is_counted_right and field in ACCEPTED and family.name not in ACCEPTED[field]
        if isinstance(entries, list) and (
            len(entries) < inventory.num_layers or (longer and len(entries) > inventory.num_layers)
        ):
            yield {f"length of {field}": len(entries)}, f"the trunk has {inventory.num_layers} layers"
    pattern = config.get("hybrid_override_pattern")  # Megatron's also has the head's layers, and | between stages
    if isinstance(pattern, str) and (len(pattern) != inventory.num_layers or not set(pattern) <= set("ME*-")):
        yield (
            {"hybrid_override_pattern": pattern},
            (f"the trunk has {counted(inventory.num_layers, 'layer')}, each of which has one of M, E, * and -"),
        )
    embedding = inventory.checkpoint.tensors.get(inventory.shared.get("embedding", ""))
    hidden = lookup_count(config, "hidden_size")
    if embedding and unpacked(embedding) and hidden and embedding.shape[1:] not in ((), (hidden,)):
        yield {"hidden_size": hidden}, f"{embedding.name} has {embedding.shape[1]} columns"
    types = lookup(inventory.checkpoint.config, "layer_types")
    mixers: dict[str, dict[frozenset[str], int]] = defaultdict(dict)
    for index, parts in LayerReference(inventory).parts_of_layers.items():
        mixer = frozenset(part.partition(".")[0] for part in parts) & {"self_attn", "linear_attn"}
        if isinstance(types, list) and index < len(types) and mixer:
            mixers[str(types[index])].setdefault(mixer, index)
    for layer_type, found in mixers.items():
        if len(found) > 1:
            listed = joined(f"{'.'.join(sorted(mixer))} in layer {index}" for mixer, index in found.items())
            yield {"layer_types": [layer_type]}, f"layers have {listed}"


def _row_counts(inventory: Inventory, config: Mapping[str, object]) -> Iterator[Claim]:
    """Yield matrices whose numbers of rows are not those that the config's fields of the usual names give.

    Only where all layers have the same number: else some follow fields that are not known here, as in Step-3.5. With
    latent attention, head_dim is that of a part of the queries; beside experts, dense layers have widths of many names.
    """
    rows: dict[str, dict[int, str]] = defaultdict(dict)
    for layer in inventory.layers.values():
        for path, info in layer.items():
            for view, part in split_view(inventory.running_paths[path], info):
                if view in _ROWS and len(part.shape) == 2 and unpacked(info):
                    rows[view].setdefault(part.shape[0], info.name)
    gate = config.get("attn_output_gate")
    for view, found in rows.items():
        terms, (count, name) = [term.split("*") for term in _ROWS[view].split(" + ")], next(iter(found.items()))
        fields: JsonDict = {field: config.get(field) for term in terms for field in term}
        is_latent, is_dense = "head_dim" in fields and "kv_lora_rank" in config, "intermediate_size" in fields
        is_known = all(type(size) is int for size in fields.values()) and not (is_dense and declared_experts(config))
        if not is_known or is_latent or len(found) > 1:
            continue
        times = {1}
        if "q_proj" in view:  # queries may come with as many gates
            fields |= {"attn_output_gate": gate} if isinstance(gate, bool) else {}
            times = {1 + gate} if isinstance(gate, bool) else {1, 2}
        if count not in {each * sum(prod(map(fields.__getitem__, term)) for term in terms) for each in times}:
            yield fields, f"{name} has {counted(count, 'row')}{' per expert' * ('experts.0' in view)}"


def _parts(inventory: Inventory, config: Mapping[str, object]) -> Iterator[Claim]:
    """Yield parts of layers that a field of config.json gives and no layer has, or withholds and one has."""
    paths = {inventory.running_paths[path]: info.name for layer in inventory.layers.values()
             for path, info in layer.items()}  # fmt: skip
    for field, (words, part, beside) in _PARTS.items():
        if field == "use_qk_norm" and inventory.family.name == GENERIC:
            continue  # Llama 4 has norms without weights
        value, found = config.get(field, paths), [name for path, name in paths.items() if re.fullmatch(part, path)]
        has_neighbor = any(re.fullmatch(beside, path) for path in paths)
        if value is paths or not has_neighbor or bool(value) == bool(found):
            continue
        what = f"{found[0]} is stored" if found else f"no layer has {words}"
        yield {field: value}, what


def _experts(inventory: Inventory, config: Mapping[str, object]) -> Iterator[Claim]:
    """Yield numbers of experts, and layers with experts, that are not those of config.json."""
    experts, declared = trunk_experts(inventory), declared_experts(config)
    count, chosen = uniform(experts), lookup_count(config, "num_experts_per_tok")
    if count and declared and count not in declared.values() and any(lost_experts(inventory)):
        return  # which is a finding of its own
    if count and declared and count not in declared.values():
        yield declared, f"the trunk's layers have {count} experts"
    elif count and chosen and chosen > count:
        yield {"num_experts_per_tok": chosen}, f"the trunk's layers have {count} experts"
    yield from _other_kind(inventory, config, has_experts=bool(experts))
    for fields, sparse in _sparse_layers(config, inventory.num_layers) if experts else ():
        for index in inventory.layers:
            if (index in sparse) != (index in experts):
                has = "has experts" if index in experts else "is dense"
                yield {field: config[field] for field in fields}, f"layer {index} of the trunk {has}"
                break


def _other_kind(inventory: Inventory, config: Mapping[str, object], *, has_experts: bool) -> Iterator[Claim]:
    """Yield what says that a model is one of experts, or dense, where no layer of the trunk is so."""
    paths = [path for layer in inventory.layers.values() for path in layer]
    dense = [path for path in paths if re.search(r"\bmlp\.down_proj\.weight", path)]
    about_experts = [key for key in config if re.search("expert|moe", key)]
    is_dense = len(dense) == inventory.num_layers and not any("expert" in path for path in paths)
    withheld = any(not sparse for _, sparse in _sparse_layers(config, inventory.num_layers)) or config.get(
        "mlp_only_layers"
    )
    if is_dense and not withheld and (declared := declared_experts(config)):
        yield declared, "no layer of the trunk has experts"
    elif has_experts and not dense and not about_experts and "moe" not in str(config.get("model_type")):
        yield (
            {"model_type": config.get("model_type")},
            "every layer of the trunk has experts, and no field gives their number",
        )


def _sparse_layers(config: Mapping[str, object], num_layers: int) -> Iterator[tuple[list[str], set[int]]]:
    """Yield fields of config.json and the trunk layers to which they give experts."""
    layers = range(num_layers)
    first, every, types = map(config.get, ("first_k_dense_replace", "moe_layer_freq", "mlp_layer_types"))
    if isinstance(every, list):
        yield ["moe_layer_freq"], {index for index, entry in zip(layers, every, strict=False) if entry}
    elif type(first) is int and type(every) in (int, type(None)):
        fields = ["first_k_dense_replace"] + ["moe_layer_freq"] * (every is not None)
        yield fields, {index for index in layers if index >= first and index % (every or 1) == 0}  # type: ignore[operator]
    if isinstance(types, list) and {*map(str, types)} <= {"dense", "sparse"}:
        yield ["mlp_layer_types"], {index for index, entry in zip(layers, types, strict=False) if entry == "sparse"}
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    fields = [field for field in ("decoder_sparse_step", "mlp_only_layers") if field in config]
    if fields and type(step) is int and step > 0 and isinstance(dense, list):
        yield fields, {index for index in layers if index not in dense and (index + 1) % step == 0}


def both_levels(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of config.json with those of its text model, which come first."""
    return {**config, **text_config(config)}


def _as_json(value: object) -> str:
    found = json.dumps(value) if value is None or isinstance(value, bool | list) else short_repr(value)
    return found if len(found) <= _MOST_SHOWN else f"{found[:_MOST_SHOWN]}..."


def _contradiction(fields: Mapping[str, object], found: str) -> Finding:
    listed = joined([f"{field} = {_as_json(value)}" for field, value in fields.items()][:5])
    contradict = f"contradict{'s' * (len(fields) == 1)}"
    return Finding(
        "config-contradicts", "error", f"{CONFIG}: {next(iter(fields)).rpartition(' ')[2]}",
        f"{found[0].upper() if found.startswith(('the', 'no ')) else found[0]}{found[1:]}; {listed} in {CONFIG} "
        f"{contradict} that: loaders refuse the weights, or leave some out.",
        "What is stored.", f"Correct {CONFIG}, or take config and weights of one model.",
    )  # fmt: skip


def config_contradicts(inventory: Inventory) -> Iterator[Finding]:
    """Report counts of modules, and sizes, that config.json has twice with different values."""
    config, family = inventory.checkpoint.config, inventory.family
    inner = text_config(config)
    yield from _methods_differ(config, inner)
    places = {field: (config, inner) for field in (*family.count_fields, *_AT_BOTH_LEVELS) if "." not in field}
    fields = {f"{level}{field}": part[field]
            for field, parts in places.items() for level, part in zip(("", f"{text_key(config)}."), parts, strict=True)
            if part.get(field) is not None}  # fmt: skip
    counts = {name: value for name, value in fields.items() if name.rpartition(".")[2] in family.count_fields}
    groups = [counts, *({name: value for name, value in fields.items() if name.rpartition(".")[2] == size}
                        for size in _AT_BOTH_LEVELS)]  # fmt: skip
    for group in groups:
        if len({str(value) for value in group.values()}) > 1:
            yield Finding(
                "config-contradicts", "error", f"{CONFIG}: {next(iter(group))}",
                f"{CONFIG} says {joined(f'{name} = {value}' for name, value in group.items())}: engines differ in "
                "which of them they read.",
                "One value.", f"Correct {CONFIG}: {counted(len(inventory.modules), 'MTP layer')} "
                f"{'is' if len(inventory.modules) == 1 else 'are'} stored, after {inventory.num_layers} trunk layers.",
            )  # fmt: skip


def _methods_differ(config: Mapping[str, object], inner: Mapping[str, object]) -> Iterator[Finding]:
    """Report two quantization methods, one for each level of config.json."""
    sections = [part.get("quantization_config") for part in (config, inner)]
    methods = [str(section.get("quant_method")) for section in sections if isinstance(section, Mapping)]
    if len({*methods}) > 1:
        yield Finding(
            "config-contradicts", "error", f"{CONFIG}: quantization_config",
            f"{CONFIG} has quant_method = {methods[0]:.40}, and {methods[1]:.40} in text_config: engines differ in "
            "which of them they read.",
            "One method, that of the files.", f"Remove the quantization_config of the other from {CONFIG}.",
        )  # fmt: skip


RULES = (config_claims, config_contradicts)
