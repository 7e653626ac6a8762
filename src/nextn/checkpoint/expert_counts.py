"""How many experts trunk layers and the head's modules have, which differ where one of them was pruned. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.family_table import lookup_count

# Fields of config.json with the number of routed experts.
COUNT_FIELDS = ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts")


def trunk_experts(inventory: Inventory) -> dict[int, int]:
    """Return layer -> number of its routed experts, for the layers that have any."""
    running = inventory.running_paths
    counts = {
        index: count_experts((running[path], info) for path, info in layer.items())
        for index, layer in inventory.layers.items()
    }
    return {index: count for index, count in counts.items() if count}


def head_experts(inventory: Inventory) -> dict[int, int]:
    """Return module -> number of the routed experts of its block, for the modules that have any."""
    counts = {
        module: count_experts((canonical, inventory.info(canonical)) for canonical in inventory.of_module(module))
        for module in inventory.modules
    }
    return {module: count for module, count in counts.items() if count}


def count_experts(tensors: Iterable[tuple[str, TensorInfo]]) -> int:
    """Return the number of experts among these tensors, by path in a running layer."""
    found = [(path, info) for name, info in tensors if (path := expert_path(name)) is not None]
    numbers = {path.number for path, _ in found if path.number is not None}
    return len(numbers) or max((info.shape[0] for path, info in found if path.number is None and info.shape), default=0)


def lost_experts(inventory: Inventory) -> Iterator[tuple[int, str]]:
    """Yield layer of the trunk and expert that it lacks below the highest number of its experts."""
    running = inventory.running_paths
    for index, layer in inventory.layers.items():
        paths = [found for path in layer if (found := expert_path(running[path])) and found.number is not None]
        numbers = {found.number for found in paths if found.number is not None}
        lost = {*range(max(numbers, default=0))} - numbers
        yield from ((index, f"{paths[0].stem}.{each}") for each in sorted(lost))


def declared_experts(config: Mapping[str, object]) -> dict[str, int]:
    """Return the fields of config.json with a number of experts."""
    counts = {field: lookup_count(config, field) for field in COUNT_FIELDS}
    return {field: count for field, count in counts.items() if count}


def router_axis(path: str, info: TensorInfo, count: int) -> int | None:
    """Return the axis of a tensor of a sparse MLP that has one entry per expert; None where there is none."""
    if expert_path(path) is not None or "shared" in path or "mlp" not in path.split(".") or not info.shape:
        return None
    if info.shape[0] == count:
        return 0
    return 1 if info.shape == (1, count) else None


def with_experts(inventory: Inventory, count: int) -> Inventory:
    """Return the inventory as if trunk and head had their first `count` experts alone, to compare everything else."""
    running = inventory.running_paths
    paths = {info.name: running[path] for layer in inventory.layers.values() for path, info in layer.items()}
    paths |= {name: canonical for canonical in inventory.stored for name in inventory.spellings([canonical])}
    had = {info.name: number for index, number in trunk_experts(inventory).items()
           for info in inventory.layers[index].values()}  # fmt: skip
    for module, number in head_experts(inventory).items():
        had |= dict.fromkeys(inventory.spellings(inventory.of_module(module)), number)
    tensors: dict[str, TensorInfo] = {}
    for name, info in inventory.checkpoint.tensors.items():
        if (kept := _first(info, paths.get(name, ""), had.get(name, 0), count)) is not None:
            tensors[name] = kept
    return Inventory.of(replace(inventory.checkpoint, tensors=tensors), family=inventory.family)


def _first(info: TensorInfo, path: str, had: int, count: int) -> TensorInfo | None:
    """Return what a tensor is with `count` of `had` experts; None for an expert beyond them."""
    found = expert_path(path) if path else None
    if had <= count:
        return info
    if found is not None and found.number is not None:
        return info if found.number < count else None
    axis = 0 if found is not None else router_axis(path, info, had)
    return info if axis is None else cut(info, axis, 0, count)


def cut(info: TensorInfo, axis: int, begin: int, end: int) -> TensorInfo:
    """Return the view of entries `begin` to `end` along an axis before which all are 1."""
    size = info.nbytes // info.shape[axis]
    shape = (*info.shape[:axis], end - begin, *info.shape[axis + 1 :])
    return replace(info, shape=shape, begin=info.begin + begin * size, end=info.begin + end * size)


def uniform(counts: Mapping[int, int]) -> int | None:
    """Return the number that all have; None where they differ, or there are none."""
    values = set(counts.values())
    return values.pop() if len(values) == 1 else None
