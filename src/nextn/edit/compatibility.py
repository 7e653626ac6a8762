"""Check from headers whether a head is complete, matches a target's sizes, and can be added to a quantized trunk."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.expert_counts import COUNT_FIELDS, declared_experts, with_experts
from nextn.checkpoint.expert_forms import split_view
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import QuantConfig, Storage, declared, stored_modules, unpacked
from nextn.edit.plan import Piece
from nextn.errors import CheckpointError
from nextn.family_table import Family, lookup, lookup_count
from nextn.text_format import counted, some

# Config fields that determine the head's shapes.
SIZES = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", *COUNT_FIELDS, "n_shared_experts",
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
ABOUT_HEAD = re.compile(r"mtp|nextn")  # fields that name the head
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
# Families whose router scores a group of experts by its two best ones.
_GROUPED = (
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm5_next", "exaone_moe", "mimo_v2",
    "bailing_hybrid",
)  # fmt: skip
# What two checkpoints of one quantization method must agree on, so that tensors of one fit the other's config.
_SCHEME = ("weight_block_size", "group_size", "bits", "fmt", "format", "quant_algo", "scale_fmt")


def absent(inventory: Inventory) -> list[str]:
    """Return what this head lacks to be complete, as canonical names of roles or tensors."""
    family = inventory.family
    count = max([inventory.declared, *(index + 1 for index in inventory.modules)])
    missing = [
        f"{index}.{role}"
        for index in range(count)
        for role in family.names
        if role in family.required(index) and role not in inventory.roles.get(index, ())
    ]
    missing += chain.from_iterable(inventory.lost_in(inventory.stored.values()).values())
    # Modules, and the experts of one, may be in different forms, and of different types, as by mtp_mlp_layer_types.
    tails: dict[int, set[str]] = defaultdict(set)
    for canonical in inventory.stored:
        for path, _ in split_view(canonical, inventory.info(canonical)):
            number, _, tail = path.partition(".")
            tails[int(number)].add(tail)
    components = {index: _components(module) for index, module in sorted(tails.items())}
    for index, module in sorted(tails.items()):
        for other in components.values() if f"{index}.block" not in missing else ():
            lost = {tail for name, part in other.items() if (own := components[index].get(name, set())) < part
                    for tail in part - own}  # fmt: skip
            missing += sorted({f"{index}.{tail}" for tail in lost} - {*missing})
        missing += [f"{index}.block: expert {number}" for number in _missing_experts(module, inventory)]
    return missing + inventory.indexed_but_missing(head=True)


def _components(tails: Iterable[str]) -> dict[str, set[str]]:
    components: dict[str, set[str]] = defaultdict(set)
    for tail in tails:
        if tail.startswith("block."):
            components[tail.split(".")[1]].add(tail)
    return components


def _missing_experts(tails: set[str], inventory: Inventory) -> list[int]:
    stored = {int(match[1]) for tail in tails if (match := _EXPERT.search(tail))}
    count = next(iter(declared_experts(inventory.checkpoint.config).values()), 0)
    return sorted(set(range(max(count, max(stored) + 1))) - stored) if stored else []


def lone_experts(family: Family, config: Mapping[str, object]) -> str:
    """Return why engines fail where each group of experts is one expert, without a period; "" where they do not.

    Lines are of vLLM 0.32.0 and llama.cpp 0c1e57098. On GPUs, vLLM and SGLang choose experts by other kernels.
    """
    counts = [*declared_experts(config).values()]
    groups = lookup_count(config, "n_group")
    if family.name not in _GROUPED or not counts or counts[0] // (groups or 1) > 1:
        return ""
    reason = (
        f"{counted(counts[0], 'routed expert')} in {counted(groups or 1, 'group')}: routers take the two best experts "
        "of a group, so transformers and vLLM on a CPU (cpu_router.py:49) fail in the first pass"
    )
    more = "; llama.cpp needs more experts than groups (llama-model.cpp:1365) and does not load the model"
    return reason + (more if groups else "")


def refuse_misfit(dst: Inventory, src: Inventory, *, force: bool) -> list[str]:
    """Raise CheckpointError with every mismatch of the head; return notes of those that `force` accepts."""
    sizes, dst_sizes = _sizes(src), _sizes(replace(dst, stored={}))  # whose head is replaced
    wrong = {key: f"{key} is {sizes[key]}, the target's {dst_sizes[key]}"
             for key in SIZES if key in sizes and key in dst_sizes and sizes[key] != dst_sizes[key]}  # fmt: skip
    notes = []
    if "vocab_size" in wrong and force and not set(src.family.own):
        vocabulary = wrong.pop("vocab_size")
        notes.append(f"another vocabulary: {vocabulary}; the head uses only the trunk's embedding and lm_head")
    if (lost := _lost_lm_head(dst, src)) and force:
        notes.append(lost)
    elif lost:
        wrong["lm_head"] = lost
    pruned = next((key for key in wrong if key in COUNT_FIELDS and dst_sizes[key] < sizes[key]), "")
    keep = f"`nextn convert {shlex.quote(dst.checkpoint.path)} OUT --keep-experts LIST` keeps those of the trunk"
    same = with_experts(src, dst_sizes[pruned]) if pruned else src
    if pruned and force:
        notes.append(f"{wrong.pop(pruned)}: {keep}")
    reasons = [*wrong.values(), *_mismatched_shapes(dst, same)]
    if reasons:
        more = f" and {len(reasons) - 5} more" if reasons[5:] else ""
        only = next(iter(wrong)) if len(wrong) == len(reasons) == 1 else ""
        advice = {
            "vocab_size": "" if src.family.own else " If tokens were only added, use --force.",
            pruned or None: f" If the trunk's experts were pruned, use --force; then {keep}.",
            "lm_head": " Save the target again with its lm_head; with --force, it stays as it is.",
        }.get(only, "")
        where = f"{src.checkpoint.path}: its head does not fit {dst.checkpoint.path}"
        raise CheckpointError(f"{where}: {'; '.join(reasons[:5])}{more}.{advice}")
    return notes


def _lost_lm_head(dst: Inventory, src: Inventory) -> str:
    """Say that the target predicts with its embedding, and the base with an lm_head of its own; "" if not so."""
    tied = [bool(lookup(each.checkpoint.config, "tie_word_embeddings")) for each in (dst, src)]
    stores = ["output" in each.shared for each in (dst, src)]
    is_lost = tied == [True, False] and stores == [False, True]
    return "the target is tied (tie_word_embeddings), without the lm_head that the base has" if is_lost else ""


def _sizes(inventory: Inventory) -> dict[str, int]:
    config = inventory.checkpoint.config
    sizes = {key: value for key in SIZES if isinstance(value := lookup(config, key), int)}
    stored = {**inventory.shared, **{inventory.role(each): name for each, name in inventory.stored.items()}}
    infos = {role: inventory.checkpoint.tensors[name] for role, name in stored.items()}
    shapes = {role: info.shape for role, info in infos.items() if unpacked(info)}
    for role in ("output", "embedding"):
        if len(shapes.get(role, ())) == 2:
            sizes["vocab_size"], sizes["hidden_size"] = shapes[role]
    if len(shapes.get("token_norm", ())) == 1:
        sizes["hidden_size"] = shapes["token_norm"][0]
    return sizes


def _mismatched_shapes(dst: Inventory, src: Inventory) -> Iterator[str]:
    """Yield block tensors whose shape no layer of the target's trunk has, unless the base's own trunk also lacks it."""
    family = src.family
    for canonical, name in src.stored.items():
        module = canonical.partition(".")[0]
        stem = family.names["block"].format(module=module, layer=src.num_layers + int(module)) + "."
        path = family.published(canonical, src.num_layers).removeprefix(stem)
        shape = src.info(canonical).shape
        if not unpacked(src.info(canonical)):
            continue
        expected, own = _layer_shapes(dst, path), _layer_shapes(src, path)
        if src.role(canonical) == "block" and expected and shape not in expected and (not own or shape in own):
            shapes = " or ".join(map(str, map(list, sorted(expected))))
            yield f"{some([name])} is {list(shape)}, the target's layers have {shapes}"


def _layer_shapes(inventory: Inventory, path: str) -> set[tuple[int, ...]]:
    """Return the shapes of one path in all layers of the trunk, without packed tensors."""
    infos = (layer[path] for layer in inventory.layers.values() if path in layer)
    return {info.shape for info in infos if unpacked(info)}


def quantized_without(dst: Inventory, src: Inventory, fresh: Mapping[str, Piece]) -> dict[str, Mapping[str, object]]:
    """Return the target's config files, edited to leave out the head's unquantized modules.

    Raises CheckpointError for a head that is quantized differently from the target.
    """
    quantized = QuantConfig.of(dst.checkpoint)
    head = {name: replace(piece.info, name=name) for name, piece in fresh.items()}
    kinds = dict(stored_modules(head))
    packed = {module: kind for module, kind in kinds.items() if kind != "plain"}
    if packed:
        _refuse_scheme(dst, src, fresh, packed, quantized)
    if quantized is None:
        return {}
    # By its family's convention a quantized head has unquantized modules, which engines know without the config.
    published = QuantConfig.of(src.checkpoint) if packed else None
    plain = [
        module for module in sorted(kinds.keys() - packed.keys())
        if published is None or published.covers(_source(fresh, module)) is False
    ]  # fmt: skip
    old = dst.spellings(dst.stored)
    rest = {name: info for name, info in dst.checkpoint.tensors.items() if name not in old}
    return dict(quantized.leaving_out(plain, rest | head))


def _source(fresh: Mapping[str, Piece], module: str) -> str:
    """Return the module's name in the checkpoint that its weight comes from."""
    name = f"{module}.weight"
    return fresh[name if name in fresh else module].name.removesuffix(".weight")


def _refuse_scheme(
    dst: Inventory,
    src: Inventory,
    fresh: Mapping[str, Piece],
    packed: Mapping[str, Storage],
    quantized: QuantConfig | None,
) -> None:
    """Raise for a head that is quantized otherwise than the target's config says. packed: its quantized modules."""
    kinds = set(packed.values())
    head_names = set(dst.stored.values())
    trunk = {name: info for name, info in dst.checkpoint.tensors.items() if name not in head_names}
    src_scheme, dst_scheme = _scheme(src.checkpoint), _scheme(dst.checkpoint)
    difference = "" if quantized else "the target's config has no quantization"
    if quantized and (unknown := kinds - {kind for _, kind in stored_modules(trunk)}):
        difference = f"the target stores no {', '.join(sorted(unknown))}"
    elif quantized and src_scheme and src_scheme != dst_scheme:
        difference = f"{src_scheme} against {dst_scheme}"
    elif quantized and (uncovered := [module for module in packed if quantized.covers(module) is False]):
        difference = f"the target's config leaves {some(uncovered[:1])} unquantized"
    elif quantized and kinds == {"mlx"}:
        difference = _other_bits(dst, src, {module: _source(fresh, module) for module in packed})
    if difference:
        what = f"its head is quantized ({', '.join(sorted(kinds))}) and bytes are copied as they are"
        raise CheckpointError(f"{src.checkpoint.path}: {what}: {difference}. Use a base in bf16.")


def _other_bits(dst: Inventory, src: Inventory, modules: Mapping[str, str]) -> str:
    """Say which module has other bits in the target's config than in the base's. modules: name -> name in the base."""
    for here, there in modules.items():
        if _bits(dst, here) != _bits(src, there):
            return f"{here} has {_bits(src, there)} there, and {_bits(dst, here)} by the target's config"
    return ""


def _bits(inventory: Inventory, module: str) -> str:
    """Return bits and group size that a config of MLX has for a module."""
    config = QuantConfig.of(inventory.checkpoint)
    settings = [each.format.settings(module) for each in config.sections if each.form == "mlx"] if config else []
    return f"{settings[0].bits} bits in groups of {settings[0].group_size}" if settings else ""


def _scheme(checkpoint: Checkpoint) -> dict[str, object]:
    section = declared(checkpoint.config)
    return {key: section[key] for key in _SCHEME if key in section}
