"""The blocks of a head beside the trunk's layers: which parts a block lacks, and which names no layer has.

A block is of the trunk's own layer class, so the reference is the layer that resembles it most; where the block mixes
what single layers have, such as another attention with a dense MLP, each component has its own. Experts are compared
one by one, in whatever form trunk and head store them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from nextn.checkpoint.expert_counts import declared_experts
from nextn.checkpoint.expert_forms import expert_path, split_view
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import PLAIN, split_name
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.family_table import lookup, lookup_count

# Stored next to weights by some writers, and not a part of a module that could be missing.
# fa_q.scale to kv_cache_offset: of the attention and the KV cache, by ModelSlim.
_AUXILIARY = re.compile(
    r"(.*\.)?(inv_freq|[kv]_scale|(input|output)_(scale|scale_ub|global_scale|zero_point)|(fa_[qkv]\.|kv_cache_)(scale|offset))"
)
_PROJECTION = re.compile(r"(.*?_proj)\.(?!bias$)(.+)")
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.+)")
_ROUTER = re.compile(r"\.(?!shared)\w*(gate|router)(\.\w*(weight|classifier|wg|gate|proj))?$")
_MATRICES = frozenset(("gate_proj", "up_proj", "down_proj"))
_MAX_EXPERTS = 4096  # more than any layer has; each is a name in memory
# Of blocks that are dense where all of the trunk's layers have experts.
_DENSE = frozenset(f"mlp.{name}" for name in _MATRICES)


@dataclass(frozen=True)
class LayerComparison:
    """One module's block beside the trunk: parts as `self_attn.q_proj`, experts one by one."""

    layer: int  # the trunk layer that the block resembles most; -1 where there is none to compare it with
    missing: tuple[str, ...] = ()  # parts of the reference that the block lacks
    unknown: tuple[str, ...] = ()  # tensors of the block that are no part of any layer


@dataclass(frozen=True)
class LayerReference:
    """The blocks of a head, with the trunk's layers to compare them with.

    A path is that of the running model with its suffix; a part is `self_attn.q_proj` for a weight, however it is
    quantized, and `self_attn.q_proj.bias` for anything else. Layers share few distinct paths, so each is parsed once.
    """

    inventory: Inventory

    @cached_property
    def of_head(self) -> Mapping[int, Mapping[str, TensorInfo]]:
        """Return module -> path -> tensor, experts one by one."""
        blocks: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        for canonical, name in self.inventory.stored.items():
            module, role, *rest = canonical.split(".", 2)
            if role == "block" and rest:
                blocks[int(module)].update(split_view(rest[0], self.inventory.checkpoint.tensors[name]))
        return blocks

    @cached_property
    def forms(self) -> Mapping[str, Mapping[tuple[str, tuple[int, ...]], TensorInfo]]:
        """Return path in the block -> (dtype, shape) in the trunk's layers -> one tensor that has it."""
        forms: dict[str, dict[tuple[str, tuple[int, ...]], TensorInfo]] = defaultdict(dict)
        seen: set[tuple[str, tuple[str, tuple[int, ...]]]] = set()
        for layer in self.inventory.layers.values():
            for path, info in layer.items():
                if (path, info.form) not in seen:
                    seen.add((path, info.form))
                    for view, shape in split_view(self.inventory.running_paths[path], info):
                        if (own := self._in_block(view)) is not None:
                            forms[own].setdefault(shape.form, shape)
        return forms

    def compare(self, module: int) -> LayerComparison:
        """Compare a module's block with the trunk's layers."""
        parts = self.parts_of_head(module)
        groups = _decoder_layers(parts)
        if not self._candidates or len(self.inventory.layers) < self.inventory.num_layers:
            return LayerComparison(-1)
        best, missing, unknown = -1, list[str](), list[str]()
        for prefix, own in groups.items():
            if not prefix and len(groups) > 1:  # beside the numbered layers
                unknown += [parts[part] for part in own]
                continue
            best, expected = self._expected(own)
            expected |= _implied(own, self._num_experts(prefix))
            pairs = {**self.inventory.family.block_pairs, **self.inventory.family.layer_pairs}
            expected |= {pair for part, pair in pairs.items() if part in own}
            kinds = {_kind(part) for part in expected}
            missing += [f"{prefix}{part}" for part in sorted(expected - own)]
            extra = (
                part for part in own - expected if (_kind(part) not in kinds or ".experts." in part)
                and not f"{part}.".startswith(self.inventory.family.block_adds)
            )  # fmt: skip
            unknown += [parts[f"{prefix}{part}"] for part in extra]
        if not groups:
            best, expected = self._expected(frozenset())
            missing = sorted(expected)
        return LayerComparison(best, tuple(missing), tuple(sorted(set(unknown))))

    def parts_of_head(self, module: int) -> dict[str, str]:
        """Return part -> one tensor of it, of a module's block."""
        block = self.of_head.get(module, {})
        parts: dict[str, str] = {}
        for path, part in _parts(block, self._unknown_leaves).items():
            if part:
                parts.setdefault(part, block[path].name)
        return parts

    def _expected(self, parts: frozenset[str]) -> tuple[int, frozenset[str]]:
        """Return the layer most like a decoder layer with these parts, and the parts that it should have."""
        kinds = frozenset(map(_kind, parts))
        best = max(self._candidates, key=lambda index: self._similarity(self._kinds[index], kinds))
        if kinds <= self._kinds[best]:
            return best, self.parts_of_layers[best]
        own = frozenset(map(_component, parts))
        expected = frozenset(part for part in self.parts_of_layers[best] if _component(part) not in own)
        return best, expected.union(*(self._component(name, parts) for name in own))

    def _component(self, name: str, parts: frozenset[str]) -> frozenset[str]:
        """Return what a component of a block, such as `mlp`, should have: what it has in the layer most like it.

        Layers of other types are looked at where none of the block's type has all that it has.

        Where it has nothing in common with that of any layer, its own parts: there is nothing to compare it with.
        """
        own = _of_component(name, parts)
        kinds = frozenset(map(_kind, own))
        is_dense = bool(kinds) and kinds <= _DENSE
        if is_dense and not self._all_sparse:
            return _DENSE
        alike = [_of_component(name, self.parts_of_layers[index]) for index in self._candidates]
        if not any(kinds <= frozenset(map(_kind, other)) for other in alike):
            alike += [_of_component(name, parts) for parts in self.parts_of_layers.values()]
        best = max(alike, key=lambda other: self._similarity(frozenset(map(_kind, other)), kinds))
        return own if best and not is_dense and not kinds & frozenset(map(_kind, best)) else best

    def _num_experts(self, prefix: str) -> int:
        """Return how many experts config.json gives a layer of a block, where no layer of the trunk has any; or 0."""
        if any(".experts." in kind for kinds in self._kinds.values() for kind in kinds):
            return 0
        config = self.inventory.checkpoint.config
        blocks, index = lookup(config, "mtp_block_configs"), int(prefix[:-1] or 0)
        if isinstance(blocks, list) and index < len(blocks) and isinstance(blocks[index], Mapping):
            config = blocks[index]
        count = lookup_count(config, "mtp_num_experts") or next(iter(declared_experts(config).values()), 0)
        return min(count, _MAX_EXPERTS)

    @cached_property
    def _all_sparse(self) -> bool:
        """Whether every layer has experts, so that loaders build the head's block with experts, too."""
        return all(any(".experts." in kind for kind in kinds) for kinds in self._kinds.values())

    @staticmethod
    def _similarity(own: frozenset[str], kinds: frozenset[str]) -> tuple[int, int]:
        common = len(kinds & own)
        return common, common - len(own)

    def _in_block(self, path: str) -> str | None:
        """Return the path in a block of what a trunk layer has at `path`; None where the family's block has not."""
        family = self.inventory.family
        if family.parts:
            for own, of_layer in family.parts.items():
                if path.startswith(f"{of_layer}."):
                    return f"{own}{path.removeprefix(of_layer)}"
            return None
        return None if path.startswith(family.block_lacks) else path

    @cached_property
    def parts_of_layers(self) -> Mapping[int, frozenset[str]]:
        """Return trunk layer -> its parts, as a block names them, without those that blocks lack."""
        return self._layers(self._in_block)

    @cached_property
    def parts_of_trunk(self) -> Mapping[int, frozenset[str]]:
        """Return trunk layer -> all of its parts, as the running model names them."""
        return self._layers(lambda path: path)

    def _layers(self, named: Callable[[str], str | None]) -> Mapping[int, frozenset[str]]:
        cache: dict[tuple[str, tuple[int, ...]], frozenset[str]] = {}
        running = self.inventory.running_paths
        suffixes = _parts({*running.values(), *self.forms}, self._unknown_leaves)
        layers = {}
        for index, layer in self.inventory.layers.items():
            found: set[str] = set()
            for path, info in layer.items():
                key = running[path], info.shape[:1] if expert_path(running[path]) else ()
                if key not in cache:
                    views = {own for view, _ in split_view(key[0], info) if (own := named(view)) is not None}
                    cache[key] = frozenset(suffixes.get(view, view) for view in views) - {""}
                found |= cache[key]
            layers[index] = frozenset(found)
        return layers

    @cached_property
    def _unknown_leaves(self) -> frozenset[str]:
        """Return under which names the trunk's projections store what is no weight, as unknown quantizers do."""
        paths = frozenset(self.inventory.running_paths.values())
        running, layers = self.inventory.running_paths, self.inventory.layers.values()
        packed = {running[path] for layer in layers for path, info in layer.items() if info.dtype not in PLAIN}
        found = (match for path in paths if (match := _PROJECTION.fullmatch(path)))
        return frozenset(match[2] for match in found if match[2] != "weight"
                         and ((weight := f"{match[1]}.weight") not in paths or weight in packed))  # fmt: skip

    @cached_property
    def _kinds(self) -> Mapping[int, frozenset[str]]:
        """Return trunk layer -> its parts, all experts as one, so that a block that lost most experts still matches."""
        kind = {part: _kind(part) for parts in self.parts_of_layers.values() for part in parts}
        return {index: frozenset(map(kind.__getitem__, parts)) for index, parts in self.parts_of_layers.items()}

    @cached_property
    def _candidates(self) -> list[int]:
        """Return the layers of the block's layer type, where family and config declare one; else all layers."""
        block_types = self.inventory.family.block.get("layer_types")
        layer_types = lookup(self.inventory.checkpoint.config, "layer_types")
        indices = sorted(self.inventory.layers)
        if not (isinstance(block_types, list) and isinstance(layer_types, list)):
            return indices
        return [i for i in indices if i < len(layer_types) and layer_types[i] == block_types[0]] or indices


def _decoder_layers(parts: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return prefix -> parts of each decoder layer of a block; a block of several numbers them, as `0.norm`."""
    groups: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        number, dot, rest = part.partition(".")
        prefix = f"{number}." if dot and number.isdecimal() else ""
        groups[prefix].add(rest if prefix else part)
    return {prefix: frozenset(own) for prefix, own in groups.items()}


def _parts(paths: Iterable[str], leaves: Collection[str]) -> dict[str, str]:
    """Return path -> the part it belongs to; "" for auxiliary tensors. leaves: Names of packed weights."""
    names = frozenset(paths)
    parts = {path: "" if _AUXILIARY.fullmatch(path) else split_name(path, names)[0] for path in names}
    packed = {path: match[1] for path in names if (match := _PROJECTION.fullmatch(path)) and match[2] in leaves}
    return {path: packed.get(path, part) if part else part for path, part in parts.items()}


def _implied(parts: frozenset[str], count: int) -> frozenset[str]:
    """Return what a sparse MLP implies whatever layers have: a router, `count` experts, and the same matrices in each.

    count: 0 where it is not known; then those of which a part is stored.
    """
    leaves: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        if "expert" in part:
            leaves[part.rpartition(".")[0]].add(part.rpartition(".")[2])
    split = [stem for stem, own in leaves.items() if own & _MATRICES and "gate_up_proj" not in own]
    matrices = {"up_proj", "down_proj"}.union(*(leaves[stem] & _MATRICES for stem in split))
    routers = [part for part in parts if _ROUTER.search(part) and "attn" not in _component(part)]
    experts = [match for part in parts if (match := _EXPERT.fullmatch(part))]
    kinds, indices = {match.group(1, 3) for match in experts}, {match[2] for match in experts}
    if count and (place := [*routers, *split]):
        stem = experts[0][1] if experts else f"{_component(place[0])}.experts"
        kinds |= {(stem, leaf) for leaf in matrices}
        indices |= set(map(str, range(count)))
    implied = {f"{stem}.{index}.{leaf}" for stem, leaf in kinds for index in indices}
    implied |= {f"{stem}.{leaf}" for stem in split for leaf in matrices}
    return frozenset(implied if routers or not kinds else {*implied, f"{_component(next(iter(kinds))[0])}.gate"})


def _kind(part: str) -> str:
    return re.sub(r"\.experts\.\d+", ".experts.*", part)


def _component(part: str) -> str:
    return part.partition(".")[0]


def _of_component(name: str, parts: Iterable[str]) -> frozenset[str]:
    return frozenset(part for part in parts if _component(part) == name)
