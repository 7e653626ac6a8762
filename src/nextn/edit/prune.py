"""Leave out experts of a head, with the router's rows, as a pruned trunk's layers lack them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nextn.bounded_json import JsonLimits, parse_json
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.expert_counts import cut, declared_experts, head_experts, router_axis, trunk_experts, uniform
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.edit.expert_pieces import JoinedPiece, in_form
from nextn.edit.plan import Piece
from nextn.errors import CheckpointError, ConfigError
from nextn.text_format import some

_MAX_EXPERTS = 65_536
_LIMITS = JsonLimits(num_bytes=1_000_000, num_values=_MAX_EXPERTS + 1)


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
    """Return checkpoint and head with these experts of each module, in this order, and pieces of their routers.

    Args:
        inventory: The checkpoint.
        head: Its head, whose experts may be stored in any form.
        keep: Numbers of the experts.

    Returns:
        Both inventories, with the experts one by one, and canonical name -> piece of what has an entry per expert.

    Raises:
        ConfigError: The head has no such expert, or the trunk's layers have another number than are kept.
        CheckpointError: The head has no experts, or modules with different numbers of them.
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
    for field in declared_experts(config):
        inner = out.get("text_config")
        if field in out or not isinstance(inner, Mapping):
            out[field] = num_experts
        else:
            out["text_config"] = {**inner, field: num_experts}
    return out
