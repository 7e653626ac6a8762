"""What a checkpoint holds of an MTP head: the config's promise against the tensors, by module and role.

Judges nothing: `audit` names what is wrong, `convert` moves it, `model` loads it. Knows no torch.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.tensor_file import TensorInfo
from nextn.errors import CheckpointError
from nextn.families import Family, by_config, lookup, lookup_count

# What no trunk calls a tensor: the marks of a head, whoever wrote it.
_HEADLIKE = re.compile(r"(^|[._])(mtp|nextn|eh_proj|enorm|hnorm|e_proj|h_proj)([._]|$)")


@dataclass(frozen=True, eq=False)
class Inventory:
    """One checkpoint, seen as trunk and head.

    promised: modules by its config. stored: canonical name `<module>.<role>[.<rest>]` -> tensor name. twice: canonical
    names stored under several spellings; the published one counts. shared: `embedding` and `output` -> the trunk's
    tensor, where it has one. layers: index -> path inside the layer -> tensor, of the trunk. strangers: tensors that
    look like a head's and that the family does not know.
    """

    checkpoint: Checkpoint = field(repr=False)
    family: Family = field(repr=False)
    num_layers: int
    promised: int
    stored: Mapping[str, str] = field(repr=False)
    twice: Mapping[str, tuple[str, ...]] = field(repr=False)
    shared: Mapping[str, str] = field(repr=False)
    layers: Mapping[int, Mapping[str, TensorInfo]] = field(repr=False)
    strangers: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, family: Family | None = None) -> "Inventory":
        """Raises FamilyError for a model type without a row, CheckpointError for a config that counts no layers."""
        family = family or by_config(checkpoint.config)
        # Where the head begins matters to a family with a head only.
        num_layers = count_layers(checkpoint) if family.names else 0
        promised = family.num_modules(checkpoint.config)
        spellings: dict[str, list[str]] = defaultdict(list)
        layers: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        shared: dict[str, str] = {}
        strangers = []
        for name, info in checkpoint.tensors.items():
            place = family.trunk_layer(name)
            if place is not None and place[0] < num_layers:
                layers[place[0]][place[1]] = info
            elif (canonical := family.canonical(name, num_layers)) is not None:
                spellings[canonical].append(name)
            elif (role := family.shared_role(name)) is not None:
                shared[role] = name
            elif family.names and (place is not None or _HEADLIKE.search(name)):
                strangers.append(name)
        stored = {canonical: _chosen(family, canonical, names, num_layers) for canonical, names in spellings.items()}
        twice = {canonical: tuple(names) for canonical, names in spellings.items() if len(names) > 1}
        return cls(checkpoint, family, num_layers, promised, stored, twice, shared, layers, tuple(strangers))

    @cached_property
    def modules(self) -> tuple[int, ...]:
        """Indices of the modules of which anything is stored."""
        return tuple(sorted({int(canonical.split(".")[0]) for canonical in self.stored}))

    def role(self, canonical: str) -> str:
        """`token_norm`, `block`, ...: the part after the module's index."""
        return canonical.split(".")[1]

    def of_module(self, index: int) -> dict[str, str]:
        """canonical name -> tensor name, of one module."""
        return {canonical: name for canonical, name in self.stored.items() if canonical.startswith(f"{index}.")}

    def info(self, canonical: str) -> TensorInfo:
        return self.checkpoint.tensors[self.stored[canonical]]

    def published(self, canonical: str) -> str:
        """What this checkpoint calls, or would call, that tensor of the head."""
        return self.family.published(canonical, self.num_layers, wrapper=self.wrapper)

    def spellings(self, canonicals: Iterable[str]) -> set[str]:
        """Tensor names of stored ones, under every spelling."""
        return {name for each in canonicals for name in self.twice.get(each, (self.stored[each],))}

    @cached_property
    def own(self) -> list[str]:
        """Canonical names of what is stored, less copies of the trunk's tensors; sorted."""
        return sorted(self.stored.keys() - self.copies.keys())

    @cached_property
    def copies(self) -> dict[str, str]:
        """Canonical name -> tensor name of shared tensors that are stored again inside the modules."""
        return {
            canonical: name for canonical, name in self.stored.items() if self.role(canonical) in self.family.copies
        }

    @cached_property
    def running_paths(self) -> Mapping[str, str]:
        """Path in a layer of the trunk's files -> path in the layer of the running model."""
        root = self.family.names["block"].format(module=0, layer=self.num_layers)
        found: dict[str, str] = {}
        for path in dict.fromkeys(chain.from_iterable(self.layers.values())):
            canonical = self.family.canonical(f"{root}.{path}", self.num_layers) or ""
            found[path] = canonical.removeprefix("0.block.") if canonical.startswith("0.block.") else path
        return found

    @cached_property
    def wrapper(self) -> str:
        """The leading path that this checkpoint's head has, as `Family.published` takes it."""
        return self.family.wrapper(self.stored.values() or self.shared.values())


def count_layers(checkpoint: Checkpoint) -> int:
    """The trunk's decoder layers by its config, text model included."""
    for key in ("num_hidden_layers", "num_layers"):
        if count := lookup_count(checkpoint.config, key):
            return count
    for key in ("layers_block_type", "hybrid_override_pattern"):  # Nemotron-H: one entry, or one letter, a layer
        kinds = lookup(checkpoint.config, key)
        if isinstance(kinds, list | str) and kinds:
            return len(kinds)
    said = "has none" if checkpoint.config else "is absent or empty"
    raise CheckpointError(
        f"{checkpoint.path}: num_hidden_layers is needed to know where the head begins, and config.json {said}. "
        "Give a folder or hub id with the model's own config.json."
    )


def _chosen(family: Family, canonical: str, names: list[str], num_layers: int) -> str:
    published = family.published(canonical, num_layers)
    return next((name for name in names if name.endswith(published)), names[0])
