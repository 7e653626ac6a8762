"""Whether a head is whole, fits a target's sizes, and can lie beside a trunk that is quantised; from headers alone."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.quantisation import Quantisation, declared
from nextn.checkpoints.storage import stored_modules, unpacked
from nextn.errors import CheckpointError
from nextn.families import lookup
from nextn.moving.staging import Piece
from nextn.words import some

# Config fields that shapes of the head follow.
SIZES = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts",
    "n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
ABOUT_HEAD = re.compile(r"mtp|nextn")  # fields that name the head
_EXPERTS = ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
# What two checkpoints of one quantisation method must agree on before bytes of one are read by the other's config.
_SCHEME = ("weight_block_size", "group_size", "bits", "fmt", "format", "quant_algo", "scale_fmt")


def absent(inventory: Inventory) -> list[str]:
    """What a head of this family has and this one lacks, as canonical names, of roles or of tensors."""
    family = inventory.family
    count = max([inventory.promised, *(index + 1 for index in inventory.modules)])
    have = {tuple(name.split(".")[:2]) for name in inventory.stored}
    lost = [
        f"{index}.{role}"
        for index in range(count)
        for role in family.names
        if role in family.required(index) and (str(index), role) not in have
    ]
    tails = {name.partition(".")[2] for name in inventory.own}
    for index in inventory.modules:
        module = {name.partition(".")[2] for name in inventory.of_module(index)}
        block = {tail for tail in tails if tail.startswith("block.")} if f"{index}.block" not in lost else set()
        lost += sorted(f"{index}.{tail}" for tail in block - module)
        lost += [f"{index}.block: expert {number}" for number in _lost_experts(module, inventory)]
    return lost + listed_nowhere(inventory, head=True)


def _lost_experts(tails: set[str], inventory: Inventory) -> list[int]:
    found = {int(match[1]) for tail in tails if (match := _EXPERT.search(tail))}
    said = [count for key in _EXPERTS if isinstance(count := lookup(inventory.checkpoint.config, key), int)]
    return sorted(set(range(max([*said[:1], max(found) + 1]))) - found) if found else []


def listed_nowhere(inventory: Inventory, *, head: bool) -> list[str]:
    """Names in the index that no file holds, of the head or of all else."""
    family, checkpoint = inventory.family, inventory.checkpoint
    held = {name for header in checkpoint.headers.values() for name in header.tensors}
    lost = (checkpoint.index or {}).keys() - held
    return sorted(name for name in lost if (family.canonical(name, inventory.num_layers) is not None) is head)


def refuse_misfit(there: Inventory, here: Inventory, *, force: bool) -> list[str]:
    """Raise with every reason why the head does not fit; what `force` lets pass comes back as notes."""
    mine, theirs = _sizes(here), _sizes(there)
    wrong = {key: f"{key} is {mine[key]}, the target's {theirs[key]}"
             for key in SIZES if key in mine and key in theirs and mine[key] != theirs[key]}  # fmt: skip
    notes = []
    if "vocab_size" in wrong and force and not set(here.family.own):
        notes.append(f"another vocabulary: {wrong.pop('vocab_size')}; the head reads it through the trunk alone")
    reasons = [*wrong.values(), *_odd_shapes(there, here)]
    if reasons:
        more = f" and {len(reasons) - 5} more" if reasons[5:] else ""
        added = [*wrong] == ["vocab_size"] and not here.family.own
        way = " If tokens were only added, --force takes it." if added else ""
        where = f"{here.checkpoint.path}: its head does not fit {there.checkpoint.path}"
        raise CheckpointError(f"{where}: {'; '.join(reasons[:5])}{more}.{way}")
    return notes


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


def _odd_shapes(there: Inventory, here: Inventory) -> Iterator[str]:
    """Block tensors of a shape that the target's trunk has at no layer, unless the base's own trunk says the same."""
    family = here.family
    for canonical, name in here.stored.items():
        module = canonical.partition(".")[0]
        stem = family.names["block"].format(module=module, layer=here.num_layers + int(module)) + "."
        path = family.published(canonical, here.num_layers).removeprefix(stem)
        shape = here.info(canonical).shape
        seen, own = _layer_shapes(there, path), _layer_shapes(here, path)
        if here.role(canonical) == "block" and seen and shape not in seen and (not own or shape in own):
            shapes = " or ".join(map(str, map(list, sorted(seen))))
            yield f"{some([name])} is {list(shape)}, the target's layers have {shapes}"


def _layer_shapes(inventory: Inventory, path: str) -> set[tuple[int, ...]]:
    """Shapes of one path in all layers of the trunk, packed ones aside."""
    found = (layer[path] for layer in inventory.layers.values() if path in layer)
    return {info.shape for info in found if unpacked(info)}


def quantised_without(there: Inventory, here: Inventory, fresh: Mapping[str, Piece]) -> dict[str, Mapping[str, object]]:
    """The target's configs that leave the head's unquantised modules out; CheckpointError for a head quantised
    otherwise than the target.
    """
    quantised = Quantisation.of(there.checkpoint)
    kinds = dict(stored_modules({name: replace(piece.info, name=name) for name, piece in fresh.items()}))
    packed = {module: kind for module, kind in kinds.items() if kind != "plain"}
    if packed:
        _refuse_scheme(there, here, packed, quantised)
    if quantised is None:
        return {}
    # A quantised head keeps some modules plain by its family's convention: engines know those without being told.
    published = Quantisation.of(here.checkpoint) if packed else None
    plain = [
        module for module in sorted(kinds.keys() - packed.keys())
        if published is None or published.covers(_source(fresh, module)) is False
    ]  # fmt: skip
    return dict(quantised.leaving_out(plain))


def _source(fresh: Mapping[str, Piece], module: str) -> str:
    """The module's name where its weight comes from."""
    name = f"{module}.weight"
    return fresh[name if name in fresh else module].name.removesuffix(".weight")


def _refuse_scheme(
    there: Inventory, here: Inventory, packed: Mapping[str, str], quantised: Quantisation | None
) -> None:
    kinds = set(packed.values())
    heads = set(there.stored.values())
    trunk = {name: info for name, info in there.checkpoint.tensors.items() if name not in heads}
    said = [_scheme(each.checkpoint) for each in (here, there)]
    differs = "" if quantised else "the target's config has no quantisation"
    if quantised and (strange := kinds - {kind for _, kind in stored_modules(trunk)}):
        differs = f"the target stores no {', '.join(sorted(strange))}"
    elif quantised and said[0] and said[0] != said[1]:
        differs = f"{said[0]} against {said[1]}"
    elif quantised and (outside := [module for module in packed if quantised.covers(module) is False]):
        differs = f"the target's config leaves {some(outside[:1])} unquantised"
    if differs:
        what = f"its head is quantised ({', '.join(sorted(kinds))}) and bytes are moved as they are"
        raise CheckpointError(f"{here.checkpoint.path}: {what}: {differs}. Take a base in bf16.")


def _scheme(checkpoint: Checkpoint) -> dict[str, object]:
    section = declared(checkpoint.config)
    return {key: section[key] for key in _SCHEME if key in section}
