"""What a checkpoint holds of an MTP head: the modules that the config declares, and the tensors by module and role.

Lists only: `audit` reports what is wrong, `convert` rewrites the head, `model` loads it. Imports no torch.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from nextn.checkpoint.base_model import base_model
from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.draft_models import StoredDraftModel, stored
from nextn.checkpoint.expert_forms import expert_forms
from nextn.checkpoint.file_index import of_model
from nextn.checkpoint.lost_parts import lost_parts
from nextn.checkpoint.quantization import QuantConfig, may_be_packed, split_name, storage
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.errors import CheckpointError
from nextn.family_table import Family, by_config, lookup, lookup_count

# Parts of names that no trunk uses and that mark a head, whoever wrote it.
HEADLIKE = re.compile(r"(^|[._])(mtp|nextn|eh_proj|enorm|hnorm|e_proj|h_proj)([._]|$)")


@dataclass(frozen=True, eq=False)
class Inventory:
    """One checkpoint, seen as trunk and head. A canonical name is `<module>.<role>[.<rest>]`."""

    checkpoint: Checkpoint = field(repr=False)
    family: Family = field(repr=False)
    num_layers: int  # of the trunk
    declared: int  # number of modules that the config declares; 0 where it counts the stages of another draft model
    stored: Mapping[str, str] = field(repr=False)  # canonical name -> tensor name
    # Canonical name -> all its tensor names, where there are several; `stored` has the published one if it is there.
    duplicates: Mapping[str, tuple[str, ...]] = field(repr=False)
    shared: Mapping[str, str] = field(repr=False)  # `embedding` and `output` -> the trunk's tensor, where it has one
    layers: Mapping[int, Mapping[str, TensorInfo]] = field(repr=False)  # of the trunk: index -> path in it -> tensor
    unrecognized: tuple[str, ...] = field(repr=False)  # tensors that look like a head's and are not the family's
    draft_model: StoredDraftModel | None = field(default=None, repr=False)  # beside the head, or in place of one

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, family: Family | None = None) -> "Inventory":
        """Take the inventory; FamilyError for an unknown model type, CheckpointError without a number of layers."""
        family = family or by_config(checkpoint.config)
        checkpoint = of_model(checkpoint, family)
        # Only a family with a head needs to know where the head begins.
        num_layers = count_layers(checkpoint) if family.names else 0
        declared = family.num_modules(checkpoint.config)
        draft_model = stored(checkpoint.tensors, checkpoint.config)
        if draft_model is not None and draft_model.counted:
            declared = 0
        others = frozenset[str]() if draft_model is None else draft_model.names
        spellings: dict[str, list[str]] = defaultdict(list)
        layers: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
        shared: dict[str, str] = {}
        unrecognized = []
        for name, info in checkpoint.tensors.items():
            if name in others:
                continue
            layer = family.trunk_layer(name)
            if layer is not None and layer[0] < num_layers:
                layers[layer[0]][layer[1]] = info
            elif (canonical := family.canonical(name, num_layers)) is not None:
                spellings[canonical].append(name)
            elif (role := family.shared_role(name)) is not None:
                shared[role] = name
            elif family.names and (layer is not None or family.trunk_kv or HEADLIKE.search(name)):
                unrecognized.append(name)
        family = _fitted(family, spellings)
        heads = {canonical: _published(family, canonical, names, num_layers) for canonical, names in spellings.items()}
        duplicates = {canonical: tuple(names) for canonical, names in spellings.items() if len(names) > 1}
        return cls(checkpoint, family, num_layers, declared, heads, duplicates, shared, layers, tuple(unrecognized),
                   draft_model)  # fmt: skip

    @cached_property
    def modules(self) -> tuple[int, ...]:
        """The indices of the modules of which anything is stored."""
        return tuple(sorted({int(canonical.split(".")[0]) for canonical in self.stored}))

    @cached_property
    def roles(self) -> Mapping[int, frozenset[str]]:
        """Module -> its stored roles. One of which there is a bias alone is not stored."""
        roles: dict[int, set[str]] = defaultdict(set)
        for canonical in self.stored:
            module, role, *tail = canonical.split(".", 2)
            if tail != ["bias"]:
                roles[int(module)].add(role)
        return {module: frozenset(roles[module]) for module in sorted(roles)}

    @cached_property
    def bare_blocks(self) -> list[int]:
        """Modules of which a decoder layer alone is stored, after the trunk's: it may be the trunk's own."""
        if "{layer}" not in self.family.names.get("block", ""):
            return []
        return [index for index, roles in self.roles.items() if roles == {"block"} != self.family.required(index)]

    @cached_property
    def lost_parts(self) -> Mapping[str, list[str]]:
        """Module of trunk or head, by its name -> the tensors that it lacks of what its quantization method stores."""
        try:
            config = QuantConfig.of(self.checkpoint)
        except CheckpointError:  # the audit reports it
            config = None
        return lost_parts(self.checkpoint.tensors, is_defined=config is None or config.has_known_parts)

    @property
    def is_head_alone(self) -> bool:
        """Whether nothing but a head is stored, and the index lists no more."""
        names = self.checkpoint.tensors.keys() - self.spellings(self.stored)
        return bool(self.stored) and not names and not self.trunk_lost

    def indexed_but_missing(self, *, head: bool) -> list[str]:
        """Return the names in the index that no file holds, of the head or of everything else."""
        stored = {name for header in self.checkpoint.headers.values() for name in header.tensors}
        missing = (self.checkpoint.index or {}).keys() - stored
        return sorted(name for name in missing if (self.family.canonical(name, self.num_layers) is not None) is head)

    @cached_property
    def trunk_lost(self) -> list[str]:
        """The tensors that the index lists and no file holds, except the head's."""
        return self.indexed_but_missing(head=False)

    @property
    def trunk_codes(self) -> list[str]:
        """The matrices of the trunk whose values are codes."""
        tensors = self.checkpoint.tensors
        infos = [tensors[name] for name in self.shared.values()]
        infos += [info for layer in self.layers.values() for info in layer.values()]
        modules = dict.fromkeys(split_name(info.name, tensors)[0] for info in infos if may_be_packed(info))
        modules = dict.fromkeys(module for module in modules if f"{module.rpartition('.')[0]}.W_q" not in tensors)
        return [module for module in modules if storage(tensors, module) not in (None, "plain")]

    def lost_in(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return `lost_parts` of the modules that these tensors belong to."""
        modules = {split_name(name, self.checkpoint.tensors)[0] for name in names}
        return {module: parts for module, parts in self.lost_parts.items() if module in modules}

    @cached_property
    def base_model(self) -> str | None:
        """The model that the checkpoint was made from, see `base_model.base_model`."""
        return base_model(self.checkpoint)

    @property
    def base_word(self) -> str:
        """It, as a word of a printed command; BASE if it is unknown."""
        return shlex.quote(self.base_model or "BASE")

    def declaration(self, count: int) -> str:
        """Return the edit of config.json that declares this number of stored modules, as a sentence."""
        spare = int(self.family.spare_count and count > 1)
        return f"Set {self.family.count_field(self.checkpoint.config)} to {count + spare} in {CONFIG}."

    def restore_command(self, *, force: bool = False, base: str | None = None) -> str:
        """Return the command that restores the head (by `force` a complete one) from the base model or another."""
        origin = base or self.base_word
        return f"nextn restore {shlex.quote(self.checkpoint.path)} --from {origin}{' --force' if force else ''}"

    def refuse_draft_model(self, *, adding: bool = False) -> None:
        """Raise CheckpointError where a draft model of another kind is in an MTP head's place.

        adding: A head is to be stored; else, one is to be read.
        """
        if self.draft_model is not None and (self.draft_model.has_heads_names if adding else not self.stored):
            raise CheckpointError(f"{self.checkpoint.path}: {self.draft_model.refusal}")

    def role(self, canonical: str) -> str:
        """Return the role in a canonical name: `token_norm`, `block`, ..."""
        return canonical.split(".")[1]

    def of_module(self, index: int) -> dict[str, str]:
        """Return canonical name -> tensor name, of one module."""
        return {canonical: name for canonical, name in self.stored.items() if canonical.startswith(f"{index}.")}

    def info(self, canonical: str) -> TensorInfo:
        return self.checkpoint.tensors[self.stored[canonical]]

    def published(self, canonical: str) -> str:
        """Return the name that the family publishes for that tensor of the head, with this checkpoint's wrapper."""
        return self.family.published(canonical, self.num_layers, wrapper=self.wrapper)

    def spellings(self, canonicals: Iterable[str]) -> set[str]:
        """Return the tensor names of these stored tensors, duplicates included."""
        return {name for each in canonicals for name in self.duplicates.get(each, (self.stored[each],))}

    @cached_property
    def own(self) -> list[str]:
        """The canonical names that are stored, without copies of the trunk's tensors, sorted."""
        return sorted(self.stored.keys() - self.copies.keys())

    @cached_property
    def copies(self) -> dict[str, str]:
        """Canonical name -> tensor name of the shared tensors that are stored again inside the modules."""
        copies = self.family.copies
        return {canonical: name for canonical, name in self.stored.items() if self.role(canonical) in copies}

    @cached_property
    def running_paths(self) -> Mapping[str, str]:
        """Path in a trunk layer of the files -> path in that layer of the running model."""
        root = self.family.names["block"].format(module=0, layer=self.num_layers)
        paths: dict[str, str] = {}
        for path in dict.fromkeys(chain.from_iterable(self.layers.values())):
            canonical = self.family.canonical(f"{root}.{path}", self.num_layers) or ""
            paths[path] = canonical.removeprefix("0.block.") if canonical.startswith("0.block.") else path
        return paths

    @cached_property
    def wrapper(self) -> str:
        """The prefix that this checkpoint's names have, one of `Family.wrappers` or ""."""
        return self.family.wrapper(self.stored.values() or self.shared.values())


def count_layers(checkpoint: Checkpoint) -> int:
    """Return the number of the trunk's decoder layers by its config, or by that of its text model."""
    keys = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
    for key in keys:
        if count := lookup_count(checkpoint.config, key):
            return count
    for key in ("layers_block_type", "hybrid_override_pattern"):  # Nemotron-H: one entry, or one letter, per layer
        layer_types = lookup(checkpoint.config, key)
        if isinstance(layer_types, str):  # Megatron's also has the head's, after a slash, and | between stages
            layer_types = layer_types.partition("/")[0].replace("|", "")
        if isinstance(layer_types, list | str) and layer_types:
            return len(layer_types)
    given = (f"{key} = {value!r:.60}" for key in keys if (value := lookup(checkpoint.config, key)) is not None)
    problem = f"has {next(given, 'none')}" if checkpoint.config else "is absent or empty"
    raise CheckpointError(
        f"{checkpoint.path}: num_hidden_layers, an integer of 1 or more, is needed to know where the head begins, and "
        f"config.json {problem}. Give a folder or hub id with the model's own config.json."
    )


def _fitted(family: Family, canonicals: Iterable[str]) -> Family:
    """Return the family with the form in which the head's experts are stored, if that is one form."""
    forms = expert_forms(canonicals)
    form = next(iter(forms)) if len(forms) == 1 else family.experts
    return family if form == family.experts else replace(family, experts=form)


def _published(family: Family, canonical: str, names: list[str], num_layers: int) -> str:
    published = family.published(canonical, num_layers)
    return next((name for name in names if name.endswith(published)), names[0])
