"""Compare the trunk's layers with each other: what loaders would miss.

Knows no family's layers: a tensor is looked for among layers of the same type.
"""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from nextn.audit_rules.config_claims import both_levels
from nextn.audit_rules.findings import Finding
from nextn.audit_rules.layer_reference import LayerReference
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_counts import lost_experts
from nextn.checkpoint.head_inventory import HEADLIKE, Inventory
from nextn.checkpoint.quantization import is_mlx
from nextn.family_table import lookup
from nextn.family_table.config_fields import text_config
from nextn.text_format import counted, some

IDS = ("trunk-partial",)
FINAL_NORMS = ("norm.weight", "norm_f.weight", "final_layernorm.weight")
_LAYER = re.compile(r"^(?!.*(?:visi|visual|audio)).*(?:layers|blocks|\bh)\.[0-9]+\.")
_Groups = dict[tuple[object, str], dict[int, frozenset[str]]]  # layer type and component -> layer -> parts
_IN_MEMORY = "model.embed_tokens"
_MATRIX = re.compile(r".*(?:proj\w*|norm)")
# The components without which no layer is complete: all layers have one of each, under one of its names.
_ATTENTION, _MLP = (
    re.compile(r".*(?:attn|attention|mixer|mamba)"),
    re.compile(r"mlps?|ffn|feed_forward|.*moe|.*experts?"),
)
_ROUTED = re.compile(r"(\w+)\.(?:experts|switch_\w+)\.")  # the latter is MLX's
_ROUTER = re.compile(r"(\w+)\.(?:gate|router)(?:\.(?!.*bias|tid2eid)\w+)?")  # `gate.gate_proj` is Ling's in MLX
_GATED = frozenset({"gate_proj", "up_proj", "down_proj"})
# Recurrent mixers: gated delta nets (Qwen3.5, Qwen3-Next), Mamba 2, Kimi delta attention without its gates.
_DELTA = "A_log dt_bias conv1d norm out_proj"
_MIXERS = tuple(frozenset(parts.split()) for parts in (
    f"{_DELTA} in_proj_qkv in_proj_z in_proj_a in_proj_b", f"{_DELTA} in_proj_qkvz in_proj_ba", f"{_DELTA} D in_proj",
    "A_log dt_bias q_conv1d k_conv1d v_conv1d q_proj k_proj v_proj b_proj o_norm",
))  # fmt: skip
_ORDINARY = re.compile("[qkvo]_proj|(out_|o_)?(norm|proj)")  # also of attention, or of what no row here has


def trunk_layers(inventory: Inventory) -> Iterator[Finding]:
    """Run every rule on the trunk's layers."""
    if names := names_in_memory(inventory):
        # transformers' save_pretrained of DeepSeek-V4 writes some names as it has them in memory.
        fix = "Rename them, or take the trunk's published files." if inventory.family.trunk_renames else (
            "Load the values into a new model of transformers (from_config, then load_state_dict) and save it with "
            "save_pretrained, which writes the published names; then restore the head."
        )  # fmt: skip
        yield Finding(
            "names-unknown", "error", names[0],
            f"{counted(len(names), 'tensor')} under the names that transformers has in memory, such as {some(names)}, "
            "as of a state_dict that was saved as it is: transformers alone reads them.",
            f"The published names, such as {inventory.family.shared_name('embedding')}.",
            fix,
        )  # fmt: skip
        return
    yield from _renamed(inventory)
    yield from _wrapped(inventory)
    reference = LayerReference(inventory)
    yield from _partial(inventory, reference)
    yield from _unknown(inventory, reference)


def names_in_memory(inventory: Inventory) -> list[str]:
    """Return a trunk's tensors under transformers' own names, in a family that is published under others."""
    tensors, family = inventory.checkpoint.tensors, inventory.family
    # transformers' usual names: a family that is published under these has no others, and a head alone has no trunk.
    is_published = family.trunk["embedding"] == _IN_MEMORY or family.trunk_kv
    if is_published or f"{_IN_MEMORY}.weight" not in tensors or not family.runs:
        return []
    names = [name for name in tensors if name.startswith(("model.layers.", _IN_MEMORY))]
    return names if any(".self_attn." in name for name in names) and "embedding" not in inventory.shared else []


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


def _wrapped(inventory: Inventory) -> Iterator[Finding]:
    """Report a trunk under a vision-language model's names in part, or beside a config of text alone."""
    layers = [info.name for layer in inventory.layers.values() for info in layer.values()]
    wrapper = inventory.family.wrapper(layers)
    names = [name for name in layers if name.startswith(wrapper)]
    if others := [name for name in layers if not name.startswith(wrapper)]:
        yield Finding(
            "names-unknown", "error", names[0],
            f"{counted(len(names), 'tensor')} of layers under {wrapper}, and {len(others)} not, such as {others[0]}: "
            "loaders look for all of them under one path, and transformers initializes the others at random.",
            f"All under {wrapper}, or none, as {CONFIG} is of a vision-language model or of text alone.",
            "Rename the others, or save the model again from one source.",
        )  # fmt: skip
        return
    config = inventory.checkpoint.config
    is_nested = bool(text_config(config)) or any("num_hidden_layers" in part for part in config.values()
                                                 if isinstance(part, dict))  # fmt: skip
    meant, names_of_class = inventory.family.text_wrapper, config.get("architectures")
    joint = "ForConditionalGeneration"
    if meant and layers and not wrapper and joint in str(names_of_class):
        root = inventory.family.wrappers[meant]
        yield Finding(
            "names-unknown", "error", layers[0],
            f"{counted(len(layers), 'tensor')} of layers under {root}, and {CONFIG} names a vision-language class, "
            f"{names_of_class}: transformers does not find them there and initializes the trunk at random.",
            f"Names such as {meant}{layers[0].removeprefix(root)}, or the class of the model of text alone.",
            f"Rename them, or in {CONFIG} set architectures to {str(names_of_class).replace(joint, 'ForCausalLM')}.",
        )  # fmt: skip
    if wrapper in ("", inventory.family.text_wrapper) or is_nested or is_mlx(inventory.checkpoint):
        return
    yield Finding(
        "names-unknown", "error", names[0],
        f"{counted(len(names), 'tensor')} of layers under {wrapper}, and {CONFIG} is of a model of text alone, without "
        "text_config: transformers does not find them and initializes the trunk at random.",
        f"Names such as {inventory.family.wrappers[wrapper]}{names[0].removeprefix(wrapper)}, or the {CONFIG} of the "
        "model whose names these are.",
        f"Rename them, or take that {CONFIG}.",
    )  # fmt: skip


def _partial(inventory: Inventory, reference: LayerReference) -> Iterator[Finding]:
    """Report a trunk without its final norm, and layers without tensors that layers like them have."""
    if not inventory.layers or len(inventory.layers) < inventory.num_layers:
        return  # a head alone; `trunk-missing`
    parts = dict.fromkeys(missing_parts(inventory, reference))
    missing = [f"model.layers.{index}: {part}" for index, part in parts]
    of_head = {*inventory.stored.values(), *inventory.unrecognized}
    trunk = {name: info for name, info in inventory.checkpoint.tensors.items() if name not in of_head}
    missing += chain.from_iterable(inventory.lost_in(trunk).values())
    if not any(name.endswith(FINAL_NORMS) and inventory.family.trunk_layer(name) is None
               for name in trunk):  # fmt: skip
        missing.append("the final norm")
    if missing:
        yield Finding(
            "trunk-partial", "error", missing[0],
            f"The trunk lacks {some(missing)}: no loader has a value for {'it' if len(missing) == 1 else 'them'}.",
            "The tensors that layers of the same type have, and the final norm.",
            "Download or save the trunk again.",
        )  # fmt: skip


def _unknown(inventory: Inventory, reference: LayerReference) -> Iterator[Finding]:
    """Report parts that one layer has and no other like it."""
    groups, block = _by_type(inventory, reference), _like_block(inventory, reference)
    heads = {index for index, parts in reference.parts_of_trunk.items() if any(map(HEADLIKE.search, parts))}
    if parts := sorted(each for each in _of_one_layer(groups, block) if each[0] not in heads):
        names = [f"model.layers.{index}: {part}" for index, part in parts]
        yield Finding(
            "names-unknown", "warning", names[0],
            f"{some(names)}: no other layer has {'it' if len(names) == 1 else 'them'}. vLLM fails at names that it "
            "does not know, and transformers leaves them out.",
            "The tensors that layers of the same type have.",
            f"Remove {'it' if len(names) == 1 else 'them'} from the files, and run `nextn convert "
            f"{shlex.quote(inventory.checkpoint.path)} --reindex`; or serve the model with the program that wrote it.",
        )  # fmt: skip


def _of_one_layer(groups: _Groups, block: Mapping[str, frozenset[str]]) -> Iterator[tuple[int, str]]:
    """Yield layer and part that one has beside all that at least two like it have, also as a component of its own."""
    num_layers = Counter[object]()
    for (kind, _), layers in groups.items():
        num_layers[kind] = max(num_layers[kind], len(layers))
    for (kind, name), layers in groups.items():
        for index, own in layers.items():
            others = [parts for other, parts in layers.items() if other != index]
            others += [block[name]] if name in block else []
            others += [frozenset()] * (num_layers[kind] - 1) if not others and _is_other(name) else []
            if len(others) > 1 and all(parts < own for parts in others):
                yield from ((index, part) for part in own.difference(*others))


def _like_block(inventory: Inventory, reference: LayerReference) -> dict[str, frozenset[str]]:
    """Return the components of the head's block, where it is like the trunk's layers; else nothing."""
    alike = not (inventory.family.own_block or inventory.family.block_adds or inventory.family.block_lacks)
    return _components(reference.parts_of_head(0)) if alike and inventory.modules else {}


def missing_parts(inventory: Inventory, reference: LayerReference) -> Iterator[tuple[int, str]]:
    """Yield layer and part of what a component of a layer lacks: what all others of the same type and the head's block
    have, or most have beside its siblings, or what is known to belong together.
    """
    components = {index: _components(parts) for index, parts in reference.parts_of_trunk.items()}
    yield from _without_component(components)
    yield from lost_experts(inventory)
    yield from _lost_in_every_layer(inventory, reference)
    block = _like_block(inventory, reference)
    others = {index: frozenset(filter(_is_other, layer)) for index, layer in components.items()}
    yield from _in_all_others(others, [frozenset(filter(_is_other, block))] if block else [])
    groups = _by_type(inventory, reference)
    every = [*reference.parts_of_trunk.values(), reference.parts_of_head(0)]
    gated = any(leaves >= _GATED for parts in every for leaves in _modules(parts).values())
    for (_, name), layers in groups.items():
        more = [block[name]] if name in block else []
        required = _MIXERS if not _MLP.fullmatch(name) else (_GATED,) if gated else ()
        lost = {*_in_all_others(layers, more), *_beside_siblings(layers, more)}
        lost |= {(index, part) for index, own in layers.items() for part in _incomplete(own, required)}
        yield from sorted(lost)


def _by_type(inventory: Inventory, reference: LayerReference) -> _Groups:
    """Return layer type and name of a component -> layer -> its parts."""
    groups: _Groups = defaultdict(dict)
    for index, parts in reference.parts_of_trunk.items():
        for name, found in _components(parts).items():
            groups[_layer_type(inventory, index, mlp=name == "mlp"), name][index] = found
    return groups


def _lost_in_every_layer(inventory: Inventory, reference: LayerReference) -> Iterator[tuple[int, str]]:
    """Yield layer and part of what belongs together, whatever other layers have: pairs, experts and their router."""
    pairs, bias = dict(inventory.family.layer_pairs), inventory.family.router_bias
    if bias and lookup(inventory.checkpoint.config, "topk_method") == "noaux_tc":
        pairs["mlp.gate"] = bias
    for index, parts in reference.parts_of_trunk.items():
        routed = {match[1] for part in parts if (match := _ROUTED.match(part))}
        routers = {match[1] for part in parts if (match := _ROUTER.fullmatch(part))}
        yield from ((index, f"{name}.gate") for name in sorted(routed - routers))
        # Attention may have a gate, too; `mixer` is either.
        routers = {name for name in routers if _MLP.fullmatch(name) or name == "mixer"}
        yield from ((index, f"{name}.experts") for name in sorted(routers - routed))
        hashed = "mlp.gate.tid2eid" in parts  # of DeepSeek-V4, whose router has no bias
        yield from ((index, pair) for part, pair in pairs.items() if part in parts and pair not in parts and not hashed)


def _beside_siblings(layers: Mapping[int, frozenset[str]], more: list[frozenset[str]]) -> Iterator[tuple[int, str]]:
    """Yield layer and matrix or norm of modules of which parts are there, where as many other layers have all.

    A layer that is alone of its type is compared with `more`.
    """
    kinds = Counter(layers.values())
    for index, own in layers.items():
        larger = [other for other, count in kinds.items() if own < other and count >= kinds[own]]
        larger += [other for other in more if len(layers) == 1 and own < other]
        most = max(larger, key=lambda other: kinds[other], default=own)
        yield from ((index, part) for part in most - own
                    if _MATRIX.fullmatch(part) and part.rpartition(".")[0] in _modules(own))  # fmt: skip


def _in_all_others(layers: Mapping[int, frozenset[str]], more: list[frozenset[str]]) -> Iterator[tuple[int, str]]:
    """Yield layer and part of one that has nothing but what two others like it have, also in `more`, and lacks a part.

    Dense MLPs and experts are not alike: they share less than half of their parts.
    """
    kinds = Counter(layers.values())
    for index, own in layers.items():
        alike = [kind for kind in [*layers.values(), *more] if kind != own and 2 * len(kind & own) >= len(own)]
        if kinds[own] == 1 and len(alike) > 1 and own < (common := frozenset.intersection(*alike)):
            yield from ((index, part) for part in sorted(common - own))


def _is_other(component: str) -> bool:
    return not (_ATTENTION.fullmatch(component) or _MLP.fullmatch(component))


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
    modules: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        modules[part.rpartition(".")[0]].add(part.rpartition(".")[2])
    return modules


def _incomplete(parts: Iterable[str], required: Iterable[frozenset[str]]) -> set[str]:
    """Return the parts that modules among these lack of the one in `required` that they resemble most."""
    lost, modules = set(), _modules(part for part in parts if not _ROUTER.fullmatch(part))
    for module, leaves in modules.items():
        own = {leaf for leaf in leaves if not _ORDINARY.fullmatch(leaf)}
        alike = [names for names in required if len(names & own) > len(names) // 4 and "gate_up_proj" not in leaves]
        best = max(alike, key=lambda names: len(names & leaves), default=leaves)
        # A module with tensors of a method that is not known is there.
        lost |= {f"{module}.{leaf}" for leaf in best - leaves if f"{module}.{leaf}" not in modules}
    return lost


def _layer_type(inventory: Inventory, index: int, *, mlp: bool) -> str:
    """Return what the config's lists with an entry for each layer say of the MLP, or of the rest, of one."""
    lists = (value for field, value in both_levels(inventory.checkpoint.config).items()
             if (isinstance(value, list) or (isinstance(value, str) and "pattern" in field))
             and len(value) >= inventory.num_layers
             and (field != "layer_types" if mlp else not re.search("mlp|moe", field)))  # fmt: skip
    return " ".join(str(value[index])[:40] for value in lists)


RULES = (trunk_layers,)
