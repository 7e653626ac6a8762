"""The trunk's layers as the measure of a head's block: which paths a whole one has, and with which shapes.

The block is of the trunk's own layer class, so the layer that resembles it most tells; where no layer does, as in
families with a block of their own, nothing is said.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.checkpoint import TensorInfo
from nextn.families import lookup
from nextn.inventory import Inventory
from nextn.storage import split_name

# Of a block's kinds of tensor, this part must be in the layer that it is measured by.
_ALIKE = 0.9
# Kept beside weights by some writers, and no part of a module that could be missing.
_BESIDE = re.compile(r"(.*\.)?(inv_freq|[kv]_scale|(input|output)_(scale|global_scale|zero_point))")


@dataclass(frozen=True)
class Blocks:
    """The blocks of one checkpoint's head beside its trunk's layers.

    A path is `self_attn.q_proj` for a weight, however it is quantised, and `self_attn.q_proj.bias` for anything else.
    """

    inventory: Inventory

    @cached_property
    def of_head(self) -> Mapping[int, Mapping[str, TensorInfo]]:
        """Module -> path as the running model has it, with suffix -> tensor."""
        found: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        for canonical, name in self.inventory.stored.items():
            module, role, *rest = canonical.split(".", 2)
            if role == "block" and rest:
                found[int(module)][rest[0]] = self.inventory.checkpoint.tensors[name]
        return found

    @cached_property
    def of_trunk(self) -> Mapping[int, Mapping[str, TensorInfo]]:
        """The same for the trunk's layers."""
        running = {path: self._running(path) for layer in self.inventory.layers.values() for path in layer}
        return {
            index: {running[path]: info for path, info in layer.items()}
            for index, layer in self.inventory.layers.items()
        }

    @cached_property
    def shapes(self) -> Mapping[str, Mapping[tuple[int, ...], TensorInfo]]:
        """Path with suffix -> the shapes that it has in the trunk's layers, each with a tensor that has it."""
        found: dict[str, dict[tuple[int, ...], TensorInfo]] = defaultdict(dict)
        for layer in self.of_trunk.values():
            for path, info in layer.items():
                found[path].setdefault(info.shape, info)
        return found

    def missing(self, module: int) -> tuple[int, tuple[str, ...]]:
        """The trunk layer that a module's block resembles most, and that layer's paths which the block lacks.

        (-1, ...) where no layer resembles it: then single experts alone can be missed.
        """
        block = _paths(self.of_head.get(module, {}))
        kinds = _kinds(block)
        best = max(self._measures, key=lambda index: self._fit(index, kinds), default=-1)
        if best < 0:
            return -1, ()
        lost = sorted(_paths(self.of_trunk[best]) - block)
        if self.inventory.family.own_block or len(kinds & self._kinds[best]) < _ALIKE * len(kinds):
            return -1, tuple(path for path in lost if _kind(path) in kinds)
        return best, tuple(lost)

    def _fit(self, index: int, kinds: frozenset[str]) -> tuple[int, int]:
        common = len(kinds & self._kinds[index])
        return common, common - len(self._kinds[index])

    @cached_property
    def _kinds(self) -> Mapping[int, frozenset[str]]:
        return {index: _kinds(_paths(layer)) for index, layer in self.of_trunk.items()}

    @cached_property
    def _measures(self) -> list[int]:
        """The layers of the kind that the family's block has, where both say a kind; else all."""
        wanted, said = (
            self.inventory.family.block.get("layer_types"),
            lookup(self.inventory.checkpoint.config, "layer_types"),
        )
        every = sorted(self.of_trunk)
        if not (isinstance(wanted, list) and isinstance(said, list)):
            return every
        return [index for index in every if index < len(said) and said[index] == wanted[0]] or every

    def _running(self, path: str) -> str:
        family, num_layers = self.inventory.family, self.inventory.num_layers
        root = family.names["block"].format(module=0, layer=num_layers)
        canonical = family.canonical(f"{root}.{path}", num_layers) or ""
        return canonical.removeprefix("0.block.") if canonical.startswith("0.block.") else path


def _paths(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    return frozenset(split_name(path, tensors)[0] for path in tensors if not _BESIDE.fullmatch(path))


def _kinds(paths: frozenset[str]) -> frozenset[str]:
    """The paths with one expert for all, so that a block which lost most of its experts still resembles a layer."""
    return frozenset(map(_kind, paths))


def _kind(path: str) -> str:
    return re.sub(r"\.experts\.\d+", ".experts.*", path)
