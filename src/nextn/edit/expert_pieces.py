"""Experts of one form as tensors of another, byte for byte: parts of stored tensors, and parts one after another.

Also leaves out experts of a head, with the router's rows, as a pruned trunk's layers lack them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nextn.bounded_json import JsonLimits, parse_json
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.expert_counts import cut, declared_experts, head_experts, router_axis, trunk_experts, uniform
from nextn.checkpoint.expert_forms import ExpertPath, expert_path, split_view
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo
from nextn.edit.plan import Piece
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import ExpertForm, lookup, lookup_count
from nextn.family_table.config_fields import text_config, text_key
from nextn.text_format import some

_SCALES = (".weight_scale_inv", ".scale")  # one per block of rows and columns
_BLOCK = 128  # rows, where the config does not say
_PAIR = ("gate_proj", "up_proj")
_MAX_EXPERTS = 65_536
_LIMITS = JsonLimits(num_bytes=1_000_000, num_values=_MAX_EXPERTS + 1)


@dataclass(frozen=True, slots=True)
class JoinedPiece(Piece):
    """Pieces one after another; `name` is the first one's tensor."""

    parts: tuple[Piece, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def info(self) -> TensorInfo:
        size = sum(part.info.nbytes for part in self.parts)
        return replace(self.parts[0].info, shape=self.shape, begin=0, end=size)

    def chunks(self) -> Iterator[bytes]:
        return (chunk for part in self.parts for chunk in part.chunks())


def in_form(tensors: Mapping[str, TensorInfo], form: ExpertForm, checkpoint: Checkpoint) -> dict[str, Piece]:
    """Return pieces of these stored tensors by path in a decoder layer, with the experts among them in `form`.

    Raises CheckpointError for experts that are packed, incomplete, or whose scales cover gate and up together.
    """
    parts = dict(checkpoint.tensors)  # with each expert's part of a tensor
    out: dict[str, Piece] = {}
    split: dict[ExpertPath, str] = {}
    for path, info in tensors.items():
        found = expert_path(path)
        if found is None or found.form == form:
            out[path] = Piece(checkpoint, info.name)
            continue
        _refuse_packed(found, info, checkpoint)
        for part, view in split_view(path, info):
            own = expert_path(part)
            if own is None or own.form != "split":
                message = f"{checkpoint.path}: {info.name} {list(info.shape)} does not divide into experts."
                raise CheckpointError(message)
            split[own] = info.name if found.form == "split" else f"{info.name}: {part}"
            parts[split[own]] = replace(view, name=split[own])
    pieces = {path: Piece(replace(checkpoint, tensors=parts), name) for path, name in split.items()}
    return out | ({path.name(): piece for path, piece in pieces.items()} if form == "split" else _joined(pieces, form))


def _joined(split: Mapping[ExpertPath, Piece], form: ExpertForm) -> dict[str, Piece]:
    groups: dict[tuple[str, str], dict[int, dict[str, Piece]]] = defaultdict(lambda: defaultdict(dict))
    for path, piece in split.items():
        assert path.number is not None
        groups[path.stem, path.suffix][path.number][path.part] = piece
    out: dict[str, Piece] = {}
    for (stem, suffix), experts in groups.items():
        parts = experts[min(experts)].keys()
        if sorted(experts) != list(range(len(experts))) or any(each.keys() != parts for each in experts.values()):
            source = next(iter(split.values())).source
            raise CheckpointError(f"{source.path}: experts of {stem} are missing; it has {some([*map(str, experts)])}.")
        gated = [_PAIR] if form == "fused" and "gate_proj" in parts else [(part,) for part in _PAIR if part in parts]
        for group in [*gated, *([("down_proj",)] if "down_proj" in parts else [])]:
            joined = tuple(experts[number][part] for number in range(len(experts)) for part in group)
            path = ExpertPath(stem, None, "gate_up_proj" if len(group) > 1 else group[0], suffix, form)
            out[path.name()] = _join(joined, len(group))
    return out


def _join(parts: tuple[Piece, ...], halves: int) -> Piece:
    first, forms = parts[0], {part.info.form for part in parts}
    if len(forms) > 1:
        listed = some([f"{dtype} {list(shape)}" for dtype, shape in forms])
        raise CheckpointError(f"{first.source.path}: {first.name} and the other experts' differ: {listed}.")
    rows, *rest = first.info.shape or (1,)
    return JoinedPiece(first.source, first.name, parts=parts, shape=(len(parts) // halves, halves * rows, *rest))


def superseded(tensors: Mapping[str, TensorInfo], form: ExpertForm, source: str) -> set[str]:
    """Return the paths of experts in other forms of which every part is also stored in `form`.

    Raises CheckpointError where copies overlap and `form` is not a whole one: parts of different copies are no expert.
    """
    found = {path: own for path in tensors if (own := expert_path(path)) is not None}
    parts = {path: {part for part, _ in split_view(path, tensors[path])} for path in found}
    copies: dict[ExpertForm, set[str]] = defaultdict(set)
    for path, own in found.items():
        copies[own.form] |= parts[path]
    kept, every = copies[form], set().union(*copies.values())
    if kept != every and sum(map(len, copies.values())) > len(every):
        whole = [each for each, own in copies.items() if own == every]
        strays = [tensors[path].name for path, own in found.items() if own.form not in whole]
        raise CheckpointError(
            f"{source}: its experts are stored in several forms, and not all of them as {form}. "
            + (f"Keep {' or '.join(whole)}, which has all" if whole else "Take them from the model that has all")
            + f"; the others are {some(strays)}."
        )
    return {path for path, own in found.items() if own.form != form and parts[path] <= kept}


def trunk_in_form(inventory: Inventory, form: ExpertForm | None) -> tuple[dict[str, Piece], set[str], list[str]]:
    """Return the trunk's experts that are not in `form` in it, by name, the names of the tensors that they replace, and
    of these, those that are left out, as what they hold is also stored in `form`; None: nothing.
    """
    family, checkpoint = inventory.family, inventory.checkpoint
    root = family.names["block"].format(module=0, layer=inventory.num_layers) + "."
    fresh: dict[str, Piece] = {}
    gone: set[str] = set()
    left: list[str] = []
    if form is None:
        return fresh, gone, left
    for layer in inventory.layers.values():
        running = {inventory.running_paths[path]: info for path, info in layer.items()}
        experts = {path: info for path, info in running.items()
                   if (found := expert_path(path)) is not None and found.form != form}  # fmt: skip
        twice = superseded(running, form, checkpoint.path)
        left += sorted(experts[path].name for path in twice)
        moved = {path: info for path, info in experts.items() if path not in twice}
        for own, piece in in_form(moved, form, checkpoint).items():
            path = family.published(f"0.block.{own}", inventory.num_layers).removeprefix(root)
            fresh[_stem(layer) + path] = piece
        gone |= {info.name for info in experts.values()}
    return fresh, gone, left


def with_split_experts(inventory: Inventory) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint with the experts of trunk and head one by one, as parts of the stored tensors.

    Also return the tensors that are left out, as what they hold is also stored one by one.
    """
    family, checkpoint = inventory.family, inventory.checkpoint
    pieces, gone, left = trunk_in_form(inventory, "split")
    stored = {canonical: checkpoint.tensors[name] for canonical, name in inventory.stored.items()}
    twice = superseded(stored, "split", checkpoint.path)
    stored = {canonical: info for canonical, info in stored.items()
              if (found := expert_path(canonical)) is not None and found.form != "split"}  # fmt: skip
    moved = {canonical: info for canonical, info in stored.items() if canonical not in twice}
    for canonical, piece in in_form(moved, "split", checkpoint).items():
        pieces[family.published(canonical, inventory.num_layers, wrapper=inventory.wrapper)] = piece
    gone |= {info.name for info in stored.values()}
    left += sorted(stored[canonical].name for canonical in twice)
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in gone}
    infos = {name: replace(piece.info, name=name) for name, piece in pieces.items()}
    return replace(checkpoint, tensors=tensors | infos), left


def _stem(layer: Mapping[str, TensorInfo]) -> str:
    """Return what the names of a layer's tensors begin with."""
    path, info = next(iter(layer.items()))
    return info.name.removesuffix(path)


def _refuse_packed(path: ExpertPath, info: TensorInfo, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for tensors of which parts mean something else than the whole."""
    is_float = DTYPES[info.dtype] % 8 == 0 and info.dtype not in ("I32", "U8", "I8", "U32")
    if path.suffix == ".weight" and len(info.shape) >= 2 and is_float:
        return
    section = lookup(checkpoint.config, "quantization_config.weight_block_size")
    block = section[0] if isinstance(section, list) and section and isinstance(section[0], int) else _BLOCK
    weight = checkpoint.tensors.get(info.name.removesuffix("_scale_inv"))
    rows = weight.shape[-2] // len(path.halves) if weight is not None and len(weight.shape) > 1 else None
    if path.suffix in _SCALES and rows is not None and rows % max(1, block) == 0:
        return
    raise CheckpointError(
        f"{checkpoint.path}: {info.name} ({info.dtype} {list(info.shape)}) is quantized; only unquantized experts, and "
        f"fp8 ones with scales for whole blocks of {block} rows, change their form. Convert the unquantized model."
    )


def read_expert_list(given: str) -> list[int]:
    """Return the experts to keep: numbers joined by commas, or a JSON file with a list of them.

    Raises ConfigError for anything else, for a number twice, and for an empty list.
    """
    path, data = Path(given), f"[{given}]".encode()
    if path.suffix == ".json":
        if not path.is_file() or path.stat().st_size > _LIMITS.num_bytes:
            raise ConfigError(f"--keep-experts {given}: no file of at most {_LIMITS.num_bytes:,} bytes")
        data = path.read_bytes()
    try:
        numbers = parse_json(data, _LIMITS)
    except ValueError:
        numbers = None
    if not isinstance(numbers, list) or not numbers or not all(type(each) is int for each in numbers):
        raise ConfigError(f"--keep-experts {given[:80]}: expected numbers joined by commas, or a .json file of a list")
    if len(set(numbers)) != len(numbers) or not all(0 <= each < _MAX_EXPERTS for each in numbers):
        raise ConfigError(f"--keep-experts {given[:80]}: each expert once, by its number, from 0")
    return numbers


def prune(inventory: Inventory, head: Inventory, keep: Sequence[int]) -> tuple[Inventory, Inventory, dict[str, Piece]]:
    """Return checkpoint and head with these experts of each module alone, in this order, and pieces of routers.

    The pieces, by canonical name, are of what has an entry per expert. Raises ConfigError if the head has no such
    expert, or the trunk's layers have another number than are kept; CheckpointError if the head has no experts, or
    modules with different numbers of them.
    """
    count = uniform(head_experts(head))
    if count is None:
        raise CheckpointError(f"{inventory.checkpoint.path}: --keep-experts needs modules with one number of experts")
    if wrong := [each for each in keep if each >= count]:
        raise ConfigError(f"--keep-experts: the head has {count} experts, none is {some(list(map(str, wrong)))}")
    trunk = uniform(trunk_experts(inventory))
    if trunk is not None and trunk != len(keep):
        raise ConfigError(f"--keep-experts: {len(keep)} numbers; the trunk's layers have {trunk} experts, keep as many")
    stored = {canonical: inventory.checkpoint.info(name) for canonical, name in head.stored.items()}
    experts = {canonical: info for canonical, info in stored.items() if expert_path(canonical) is not None}
    split = in_form(experts, "split", inventory.checkpoint)
    order = {old: new for new, old in enumerate(keep)}
    tensors, names = dict(inventory.checkpoint.tensors), {}
    for canonical, piece in split.items():
        path = expert_path(canonical)
        assert path is not None
        assert path.number is not None
        tensors[piece.name] = piece.info
        if path.number in order:
            names[path.of_expert(order[path.number], path.part)] = piece.name
    checkpoint = replace(inventory.checkpoint, tensors=tensors)
    others = {canonical: name for canonical, name in head.stored.items() if canonical not in experts}
    routers = _routers(stored, checkpoint, count, keep)
    return replace(inventory, checkpoint=checkpoint), replace(head, stored=others | names), routers


def _routers(
    stored: Mapping[str, TensorInfo], checkpoint: Checkpoint, count: int, keep: Sequence[int]
) -> dict[str, Piece]:
    """Return canonical name -> the kept entries of each tensor that has one for every expert."""
    out: dict[str, Piece] = {}
    for canonical, info in stored.items():
        if (axis := router_axis(canonical, info, count)) is None:
            continue
        rows = {f"{info.name}: {each}": cut(info, axis, each, each + 1) for each in keep}
        source = replace(checkpoint, tensors=rows)
        shape = (*info.shape[:axis], len(keep), *info.shape[axis + 1 :])
        out[canonical] = JoinedPiece(source, info.name, parts=tuple(Piece(source, row) for row in rows), shape=shape)
    return out


def with_num_experts(config: Mapping[str, object], num_experts: int) -> dict[str, object]:
    """Return the config with this number of experts in the fields that state their number."""
    out = dict(config)
    blocks = out.get("mtp_block_configs")
    if isinstance(blocks, list):
        out["mtp_block_configs"] = [with_num_experts(each, num_experts) for each in blocks if isinstance(each, Mapping)]
    for field in (*declared_experts(config), *(["mtp_num_experts"] if lookup_count(config, "mtp_num_experts") else ())):
        if field in out or not text_config(out):
            out[field] = num_experts
        else:
            out[text_key(out)] = {**text_config(out), field: num_experts}
    return out
