"""The trunk's layers as the reference for a head's block: which tensors a complete block has, with which shapes.

A block is of the trunk's own layer class, so the reference is the layer that resembles it most. Where none does, as in
families with a block of their own, nothing is reported.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.checkpoint.stored_format import split_name
from nextn.families import lookup

# Share of a block's kinds of tensor that the reference layer must have.
_MIN_COMMON = 0.9
# Stored next to weights by some writers, and not a part of a module that could be missing.
_AUXILIARY = re.compile(r"(.*\.)?(inv_freq|[kv]_scale|(input|output)_(scale|global_scale|zero_point))")


@dataclass(frozen=True)
class LayerReference:
    """The blocks of a head, with the trunk's layers to compare them with.

    A path is that of the running model with its suffix; a part is `self_attn.q_proj` for a weight, however it is
    quantized, and `self_attn.q_proj.bias` for anything else. Layers share few distinct paths, so each is parsed once.
    """

    inventory: Inventory

    @cached_property
    def of_head(self) -> Mapping[int, Mapping[str, TensorInfo]]:
        """Return module -> path -> tensor."""
        blocks: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        for canonical, name in self.inventory.stored.items():
            module, role, *rest = canonical.split(".", 2)
            if role == "block" and rest:
                blocks[int(module)][rest[0]] = self.inventory.checkpoint.tensors[name]
        return blocks

    @cached_property
    def forms(self) -> Mapping[str, Mapping[tuple[str, tuple[int, ...]], TensorInfo]]:
        """Return path -> (dtype, shape) in the trunk's layers -> one tensor that has it."""
        forms: dict[str, dict[tuple[str, tuple[int, ...]], TensorInfo]] = {
            path: {} for path in self.inventory.running_paths.values()
        }
        for layer in self.inventory.layers.values():
            for path, info in layer.items():
                forms[self.inventory.running_paths[path]].setdefault(info.form, info)
        return forms

    def missing(self, module: int) -> tuple[int, tuple[str, ...]]:
        """Return the trunk layer that a module's block resembles most, and that layer's parts which the block lacks.

        The index is -1 where no layer resembles it; then only missing experts are detected.
        """
        parts = frozenset(part for part in _parts(self.of_head.get(module, {})).values() if part)
        kinds = frozenset(map(_kind, parts))
        best = max(self._candidates, key=lambda index: self._similarity(index, kinds), default=-1)
        if best < 0:
            return -1, ()
        missing = sorted(self._layers[best] - parts)
        if self.inventory.family.own_block or len(kinds & self._kinds[best]) < _MIN_COMMON * len(kinds):
            return -1, tuple(part for part in missing if _kind(part) in kinds)
        return best, tuple(missing)

    @property
    def split_experts(self) -> bool:
        """Whether the trunk stores its experts as separate tensors."""
        return any(".experts.*" in kind for kinds in self._kinds.values() for kind in kinds)

    def _similarity(self, index: int, kinds: frozenset[str]) -> tuple[int, int]:
        common = len(kinds & self._kinds[index])
        return common, common - len(self._kinds[index])

    @cached_property
    def _layers(self) -> Mapping[int, frozenset[str]]:
        """Return trunk layer -> its parts."""
        parts = _parts(self.inventory.running_paths.values())
        of = {path: parts[running] for path, running in self.inventory.running_paths.items()}
        return {index: frozenset(map(of.__getitem__, layer)) - {""} for index, layer in self.inventory.layers.items()}

    @cached_property
    def _kinds(self) -> Mapping[int, frozenset[str]]:
        """Return trunk layer -> its parts, all experts as one, so that a block that lost most experts still matches."""
        kind = {part: _kind(part) for parts in self._layers.values() for part in parts}
        return {index: frozenset(map(kind.__getitem__, parts)) for index, parts in self._layers.items()}

    @cached_property
    def _candidates(self) -> list[int]:
        """Return the layers of the block's layer type, where family and config declare one; else all layers."""
        block_types = self.inventory.family.block.get("layer_types")
        layer_types = lookup(self.inventory.checkpoint.config, "layer_types")
        indices = sorted(self.inventory.layers)
        if not (isinstance(block_types, list) and isinstance(layer_types, list)):
            return indices
        return [i for i in indices if i < len(layer_types) and layer_types[i] == block_types[0]] or indices


def _parts(paths: Collection[str]) -> dict[str, str]:
    """Return path -> the part it belongs to; "" for auxiliary tensors."""
    names = frozenset(paths)
    return {path: "" if _AUXILIARY.fullmatch(path) else split_name(path, names)[0] for path in names}


def _kind(part: str) -> str:
    return re.sub(r"\.experts\.\d+", ".experts.*", part)
