"""The trunk's layers as the measure of a head's block: which paths a whole one has, and with which shapes.

The block is of the trunk's own layer class, so the layer that resembles it most tells; where no layer does, as in
families with a block of their own, nothing is said.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.storage import split_name
from nextn.checkpoints.tensor_file import TensorInfo
from nextn.families import lookup

# Of a block's kinds of tensor, this part must be in the layer that it is measured by.
_ALIKE = 0.9
# Kept beside weights by some writers, and no part of a module that could be missing.
_BESIDE = re.compile(r"(.*\.)?(inv_freq|[kv]_scale|(input|output)_(scale|global_scale|zero_point))")


@dataclass(frozen=True)
class Blocks:
    """The blocks of one checkpoint's head beside its trunk's layers.

    A path is that of the running model with its suffix; a part is `self_attn.q_proj` for a weight, however it is
    quantised, and `self_attn.q_proj.bias` for anything else. A layer has few distinct paths, so each is read once.
    """

    inventory: Inventory

    @cached_property
    def of_head(self) -> Mapping[int, Mapping[str, TensorInfo]]:
        """Module -> path -> tensor."""
        found: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        for canonical, name in self.inventory.stored.items():
            module, role, *rest = canonical.split(".", 2)
            if role == "block" and rest:
                found[int(module)][rest[0]] = self.inventory.checkpoint.tensors[name]
        return found

    @cached_property
    def forms(self) -> Mapping[str, Mapping[tuple[str, tuple[int, ...]], TensorInfo]]:
        """Path -> each (dtype, shape) that it has in the trunk's layers, with a tensor that has it."""
        found: dict[str, dict[tuple[str, tuple[int, ...]], TensorInfo]] = {
            path: {} for path in self.inventory.running_paths.values()
        }
        for layer in self.inventory.layers.values():
            for path, info in layer.items():
                found[self.inventory.running_paths[path]].setdefault(info.form, info)
        return found

    def missing(self, module: int) -> tuple[int, tuple[str, ...]]:
        """The trunk layer that a module's block resembles most, and that layer's parts which the block lacks.

        (-1, ...) where no layer resembles it: then single experts alone can be missed.
        """
        parts = frozenset(part for part in _parts(self.of_head.get(module, {})).values() if part)
        kinds = frozenset(map(_kind, parts))
        best = max(self._measures, key=lambda index: self._fit(index, kinds), default=-1)
        if best < 0:
            return -1, ()
        lost = sorted(self._layers[best] - parts)
        if self.inventory.family.own_block or len(kinds & self._kinds[best]) < _ALIKE * len(kinds):
            return -1, tuple(part for part in lost if _kind(part) in kinds)
        return best, tuple(lost)

    @property
    def split_experts(self) -> bool:
        """Whether the trunk stores its experts one by one."""
        return any(".experts.*" in kind for kinds in self._kinds.values() for kind in kinds)

    def _fit(self, index: int, kinds: frozenset[str]) -> tuple[int, int]:
        common = len(kinds & self._kinds[index])
        return common, common - len(self._kinds[index])

    @cached_property
    def _layers(self) -> Mapping[int, frozenset[str]]:
        """Trunk layer -> its parts."""
        parts = _parts(self.inventory.running_paths.values())
        of = {path: parts[running] for path, running in self.inventory.running_paths.items()}
        return {index: frozenset(map(of.__getitem__, layer)) - {""} for index, layer in self.inventory.layers.items()}

    @cached_property
    def _kinds(self) -> Mapping[int, frozenset[str]]:
        """Trunk layer -> its parts with one expert for all: a block that lost most of its experts still fits."""
        kind = {part: _kind(part) for parts in self._layers.values() for part in parts}
        return {index: frozenset(map(kind.__getitem__, parts)) for index, parts in self._layers.items()}

    @cached_property
    def _measures(self) -> list[int]:
        """The layers of the kind that the family's block has, where both say a kind; else all."""
        wanted = self.inventory.family.block.get("layer_types")
        said = lookup(self.inventory.checkpoint.config, "layer_types")
        every = sorted(self.inventory.layers)
        if not (isinstance(wanted, list) and isinstance(said, list)):
            return every
        return [index for index in every if index < len(said) and said[index] == wanted[0]] or every


def _parts(paths: Collection[str]) -> dict[str, str]:
    """Path -> the part that it belongs to; "" for what is none."""
    names = frozenset(paths)
    return {path: "" if _BESIDE.fullmatch(path) else split_name(path, names)[0] for path in names}


def _kind(part: str) -> str:
    return re.sub(r"\.experts\.\d+", ".experts.*", part)
