"""Stored tensors into trunk and head, each accounted for, and a head's tensors for a file.

Knows the family's names and layouts; not how tensors are read (`TensorReader`) or what a head computes.
"""

import shlex
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.mapped_memory import release_pages
from nextn.checkpoint.tensors import READABLE, StoredTensor, TensorReader, is_activation_scale, is_finite
from nextn.errors import CheckpointError
from nextn.family_table import lookup
from nextn.model.head import Head
from nextn.model.packed_experts import can_keep_codes, pack_experts
from nextn.model.packed_linear import StandIns
from nextn.model.shared_kv_head import SharedKVHead
from nextn.model.stored_experts import EXPERT, StoredExperts, find_layout, run_in_groups, separable_experts
from nextn.model.stored_layout import to_runtime_layout, to_stored_layout
from nextn.model.trunk import Trunk
from nextn.text_format import some

_EXPERTS_AT_ONCE = 8  # of those that are loaded while they run
_MAX_LISTED = 20  # problems of a trunk, which may have many thousand quantized weights


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Detach a tensor and cast it to dtype, if one is given and the tensor is floating-point."""
    return value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()


def head_tensors(
    head: Head, copies: bool = True, *, dtype: torch.dtype | None = None, wrapper: str = ""
) -> dict[str, Tensor]:
    """Return the head's tensors under their published names, with the trunk's `wrapper`, in the family's stored layout.

    With `copies` of shared tensors in each MTP layer, where the family stores them. `dtype` casts all but the tensors
    that always stay fp32.
    """
    state = {name: cast(value, None if head.keeps_fp32(name) else dtype) for name, value in _own(head).items()}
    if copies:
        shared = {"embedding": head.trunk.embedding.weight, "output": head.trunk.output.weight}
        for index in range(head.num_modules):
            # clone: safetensors refuses two names for one storage, and the file does hold it twice
            roles = [role for role in head.family.copies if role not in head.family.read_only_copies]
            state |= {f"{index}.{role}.weight": cast(shared[role], dtype).clone() for role in roles}
    stored, layers = to_stored_layout(head, state), head.trunk.num_layers
    return {head.family.published(name, layers, wrapper=wrapper): value.contiguous() for name, value in stored.items()}


def trunk_state(weights: TensorReader) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the trunk's tensors by stored name, and notes. A shared tensor stored only by the head is included.

    Raises CheckpointError listing the tensors of the trunk whose scales are missing or do not fit.
    """
    inventory = weights.inventory
    heads = inventory.spellings(inventory.stored)
    state = {name: weights.stored(name) for name in weights.names() if name not in heads}
    notes = []
    wrapper = inventory.family.wrapper([info.name for info in inventory.layers.get(0, {}).values()])
    for role in inventory.family.copies:
        tied = role == "output" and lookup(inventory.checkpoint.config, "tie_word_embeddings")
        copy = inventory.stored.get(f"0.{role}.weight")
        if role not in inventory.shared and copy is not None and not tied:
            name = inventory.family.shared_name(role, wrapper=wrapper)
            state[name] = weights.stored(copy)
            notes.append(f"the trunk has no {name}: {copy}, the head's copy of it, is used")
    names = [tensor.name for tensor in state.values() if weights.is_quantized(tensor.name)]
    problems = [text for name in names if (text := weights.problem(name))]
    if problems:
        title = f"{inventory.checkpoint.path}: the trunk cannot be read"
        raise CheckpointError("\n".join(filter(None, [_listed(title, problems, _MAX_LISTED), trunk_advice(inventory)])))
    return state, notes


def trunk_advice(inventory: Inventory) -> str:
    """Return what the audit's errors say to do where a trunk does not load; "" if it has none."""
    from nextn.audit_rules import fixes  # here, as it imports all rules

    advice = fixes(inventory, restoring=False)
    return f"`nextn audit {shlex.quote(inventory.checkpoint.path)}` shows details. {advice}" if advice else ""


def meta_head(inventory: Inventory, trunk: Trunk) -> Head:
    """Build the head on the meta device: parameters that are never loaded cannot be read by accident."""
    with torch.device("meta"):
        if inventory.family.trunk_kv:
            return SharedKVHead(inventory.family, trunk, inventory.checkpoint.config)
        return Head(inventory.family, trunk, num_modules=inventory.declared)


def load_tensors(
    head: Head, weights: TensorReader, *, split_experts: bool = False, keep_codes: bool = False
) -> list[str]:
    """Load every tensor of a `meta_head` and return notes. Raises CheckpointError listing all problems.

    With either option, the files of the stored tensors must stay open. `split_experts` leaves experts that are stored
    one by one, and large, in the files: they are checked now, and loaded a few at a time when they run. With
    `keep_codes`, linear layers and experts of the block keep the codes of weights of four and eight bits, and in fp8.
    """
    inventory, comparison = weights.inventory, _HeadTensors(head, weights)
    problems = [*comparison.problems()]
    tensors, split = {}, _stored_experts(head, weights, comparison.expected) if split_experts else {}
    stand_ins = StandIns(head.trunk.dtype)
    kept = _keeping_codes(head, weights, stand_ins) if keep_codes else {}
    packed = _experts_with_codes(head, weights, comparison.expected) if keep_codes and not problems else {}
    for canonical, parameter in comparison.expected.items():
        name = inventory.stored.get(canonical)
        if name is not None and weights.problem(name) is None:
            stem, number = _expert_of(canonical)
            keeps_codes = canonical in kept or stem in packed
            value = weights.checked_scales(name) if keeps_codes else weights.read(name).to(parameter.dtype)
            if not is_finite(value):
                problems.append(f"non-finite: {weights.non_finite(name)}")
            if inventory.role(canonical) in inventory.family.orders and not _is_order(value):
                problems.append(f"not an order: {name} must hold each number from 0 to {value.numel() - 1} once")
            release_pages([value])
            if stem in split:
                split[stem].files.setdefault(number, {})[canonical] = name
            elif stem not in packed:
                tensors[canonical] = kept.get(canonical, value)
    notes = [*comparison.notes(), *comparison.compared(problems)]
    if problems:
        raise _refusal(inventory, problems)
    _assign(head, tensors, without=split.keys() | packed.keys())
    assert not stand_ins.install(head.stack)
    for stem, groups in split.items():
        experts = head.get_submodule(f"stack.{stem}")
        experts.forward = partial(run_in_groups, experts, groups)
    for stem, stored in packed.items():
        pack_experts(head, f"stack.{stem}", stored)
    return notes


def _refusal(inventory: Inventory, problems: Sequence[str]) -> CheckpointError:
    """Return the error with all problems of a head, and what to do about them."""
    from nextn.audit_rules import fixes  # here, as it imports all rules

    path, command = inventory.checkpoint.path, inventory.restore_command(force=True)
    restored = "Download it again." if inventory.family.trunk_kv else f"`{command}` restores a head."
    advice = f"`nextn audit {shlex.quote(path)}` shows details. {fixes(inventory) or restored}"
    return CheckpointError(_listed(f"{path}: the head cannot be loaded", problems) + f"\n{advice}")


def _assign(head: Head, tensors: Mapping[str, Tensor], *, without: Collection[str]) -> None:
    """Set the head's values; the parameters of modules `without`, by the stems of their names, stay on meta."""
    state = {f"stack.{name}": value for name, value in to_runtime_layout(head, tensors).items()}
    left = {name for name, _ in head.named_parameters() if name.rpartition(".")[0].removeprefix("stack.") in without}
    head.load_state_dict(state | {name: head.get_parameter(name) for name in left}, strict=True, assign=True)
    values = [*head.named_parameters(), *head.named_buffers()]
    unset = [name for name, value in values if value.is_meta and name not in left]
    assert not unset, f"{unset} have no value: buffers that are not stored"


def _is_order(value: Tensor) -> bool:
    return bool(torch.equal(value.flatten().long().sort().values, torch.arange(value.numel())))


def _keeping_codes(head: Head, weights: TensorReader, stand_ins: StandIns) -> dict[str, Tensor]:
    """Stand-ins of packed weights that linear layers of a block take as they are stored, by canonical name."""
    linear = {
        f"{name}.weight"
        for name, part in head.stack.named_modules()
        if type(part) is nn.Linear and part.weight.dtype == head.trunk.dtype
    }
    names = {
        canonical: name
        for canonical, name in weights.inventory.stored.items()
        if canonical in linear and weights.inventory.role(canonical) == "block" and weights.has_codes(name)
    }
    return {canonical: stand_ins.of(weights.stored(name)) for canonical, name in names.items()}


@dataclass(frozen=True, eq=False)
class _StoredExperts:
    """The experts of one MTP layer, in files; copies of the head share it."""

    head: Head
    weights: TensorReader
    stem: str  # of their canonical names
    dtype: torch.dtype
    files: dict[int, dict[str, str]] = field(default_factory=dict)  # expert -> canonical name -> stored name

    @property
    def numbers(self) -> list[int]:
        return sorted(self.files)

    def __deepcopy__(self, memo: object) -> "_StoredExperts":
        return self

    def __call__(self, experts: nn.Module) -> Generator[tuple[int, int], None, None]:
        """See `ExpertGroups`."""
        unloaded = dict(experts.named_parameters())
        device = self.head.trunk.device
        with closing(self.read(unloaded)) as groups:
            try:
                for first, end, values in groups:
                    for own, value in values.items():
                        setattr(experts, own, nn.Parameter(value.to(device), requires_grad=False))
                    yield first, end
            finally:
                for own, value in unloaded.items():
                    setattr(experts, own, value)

    def read(self, stacked: Mapping[str, Tensor]) -> Generator[tuple[int, int, dict[str, Tensor]], None, None]:
        """Yield (first, end) of a few experts at a time, with their stacked parameters, named as in `stacked`.

        Raises CheckpointError for values that are not finite.
        """
        if (ahead := self.ahead(stacked)) is not None:
            return ahead.groups()
        return self._converted_groups()

    def ahead(self, stacked: Mapping[str, Tensor]) -> StoredExperts | None:
        """Return the experts, if their parameters are stored tensors one after the other, and otherwise None."""
        kinds = [{EXPERT.sub(".experts.*.", kind): name for kind, name in self.files[n].items()} for n in self.numbers]
        if any(each.keys() != kinds[0].keys() for each in kinds):
            return None
        values = {canonical: self.weights.read(name).to(self.dtype) for canonical, name in self.files[0].items()}
        made = {name: value[0] for name, value in self._stack(values).items()}
        layout = find_layout(made, {EXPERT.sub(".experts.*.", kind): value for kind, value in values.items()})
        for name in kinds[0].values():
            self.weights.release(name)
        if layout is None or made.keys() != stacked.keys():
            return None
        return StoredExperts(self.weights, layout, kinds, {name: (v.shape, v.dtype) for name, v in made.items()})

    def _converted_groups(self) -> Generator[tuple[int, int, dict[str, Tensor]], None, None]:
        for first in range(0, len(self.numbers), _EXPERTS_AT_ONCE):
            numbers = self.numbers[first : first + _EXPERTS_AT_ONCE]
            part = {canonical: name for number in numbers for canonical, name in self.files[number].items()}
            values = {canonical: self.weights.read(name).to(self.dtype) for canonical, name in part.items()}
            yield first, first + len(numbers), self._stack(values)
            for name in part.values():
                self.weights.release(name)

    def _stack(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, by their own names, of experts by canonical name."""
        stacked = to_runtime_layout(self.head, values)
        return {name.removeprefix(f"{self.stem}."): value for name, value in stacked.items()}


def _stored_experts(head: Head, weights: TensorReader, expected: Mapping[str, Tensor]) -> dict[str, _StoredExperts]:
    """Experts that are to stay in the files, by the stem of their canonical names."""
    implementation = getattr(head.trunk.config, "_experts_implementation", None)
    modules = {id(found) for layer in head.stack if (found := separable_experts(layer, implementation)) is not None}
    stems = {_expert_of(canonical)[0] for canonical in expected} - {""}
    own = [stem for stem in stems if id(head.get_submodule(f"stack.{stem}")) in modules]
    return {
        stem: _StoredExperts(head, weights, stem, next(head.get_submodule(f"stack.{stem}").parameters()).dtype)
        for stem in own
    }


def _experts_with_codes(head: Head, weights: TensorReader, expected: Mapping[str, Tensor]) -> dict[str, StoredExperts]:
    """Experts that keep their codes, by the stem of their canonical names."""
    files: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for canonical in expected:
        stem, number = _expert_of(canonical)
        if stem:
            files[stem][number][canonical] = weights.inventory.stored[canonical]
    found = {}
    for stem, own in files.items():
        experts = head.get_submodule(f"stack.{stem}")
        if all(weights.has_codes(name) for names in own.values() for name in names.values()):
            stacked = dict(experts.named_parameters())
            dtypes = {value.dtype for value in stacked.values()}
            stored = _StoredExperts(head, weights, stem, dtypes.pop(), own).ahead(stacked) if len(dtypes) == 1 else None
            if stored is not None and can_keep_codes(experts, stored):
                found[stem] = stored
    return found


def _expert_of(canonical: str) -> tuple[str, int]:
    """The stem and the number of an expert's tensor; ("", -1) of another tensor."""
    match = EXPERT.search(canonical)
    return (f"{canonical[: match.start()]}.experts", int(match[1])) if match else ("", -1)


def _own(head: Head) -> dict[str, Tensor]:
    return {name.removeprefix("stack."): value for name, value in head.state_dict().items()}


class _HeadTensors:
    """Every stored tensor that is the head's, or looks like it, compared with what the head expects."""

    def __init__(self, head: Head, weights: TensorReader) -> None:
        self.head, self.inventory, self.weights = head, (inventory := weights.inventory), weights
        self.tensors = inventory.checkpoint.tensors
        self.expected = to_stored_layout(head, _own(head))
        scale_names = set(weights.scales.values())
        stored = {canonical: name for canonical, name in inventory.stored.items() if name not in scale_names}
        self.scales = [name for name in stored.values() if is_activation_scale(name)]
        self.copies = {
            canonical: name
            for canonical, name in inventory.copies.items()
            if canonical.endswith(".weight")
            and int(canonical.split(".")[0]) < head.num_modules
            and name not in scale_names
        }
        self.packed_otherwise = weights.packed_otherwise(inventory.stored.values())
        known = {*self.expected, *self.copies}
        self.unexpected = [name for key, name in stored.items() if key not in known and name not in self.scales
                           and name not in self.packed_otherwise
                           and not name.endswith(".rotary_emb.inv_freq")]  # fmt: skip
        self.duplicates = [*self._duplicates()]

    def problems(self) -> Iterator[str]:
        """Problems visible in the file headers, and spellings or files that contradict each other."""
        yield from self._missing()
        packed = dict.fromkeys(self.packed_otherwise.values())
        for kind in dict.fromkeys(kind for _, kind in packed):
            modules = [module for module, other in packed if other == kind]
            yield f"packed: {some(modules)}, as {kind}; valid are {READABLE}"
        for extra in self.unexpected:
            yield f"unexpected: {extra} {self.tensors[extra].shape}"
        for extra in self.inventory.unrecognized:
            yield f"unexpected: {extra}, which looks like a head's, but is not a name of {self.head.family.name}"
        for canonical, parameter in self.expected.items():
            name = self.inventory.stored.get(canonical)
            if name is None or name in self.packed_otherwise or self.weights.problem(name) is not None:  # listed below
                continue
            if self.tensors[name].shape != tuple(parameter.shape):
                yield f"mis-shaped: {name} {self.tensors[name].shape}, expected {tuple(parameter.shape)}"
        for key in sorted({*self.expected, *self.copies} & self.inventory.stored.keys()):
            name = self.inventory.stored[key]
            if name not in self.packed_otherwise and (text := self.weights.problem(name)) is not None:
                yield text
        for first, second, is_same in self.duplicates:
            if not is_same:
                yield f"duplicated: {first} and {second} differ"

    def notes(self) -> Iterator[str]:
        for first, second, is_same in self.duplicates:
            if is_same:
                yield f"{first} and {second} are identical"
        if self.scales:
            yield f"scales of activations ({len(self.scales)}, such as {self.scales[0]}) are not used"
        files = {self.tensors[name].file for name in self.inventory.stored.values()}
        for file in sorted(files & set(self.inventory.checkpoint.unindexed)):
            yield f"the head is in {file}, which the index does not list: engines that follow the index miss it"

    def compared(self, problems: list[str]) -> Iterator[str]:
        """Notes on copies that differ from the trunk's tensor; non-finite ones are appended to problems."""
        for canonical, name in sorted(self.copies.items()):
            if self.weights.problem(name) is not None:
                continue
            trunk, copy = self.head.trunk, self.weights.read(name)
            own = (trunk.embedding if self.inventory.role(canonical) == "embedding" else trunk.output).weight.detach()
            if not is_finite(copy):
                problems.append(f"non-finite: {self.weights.non_finite(name)}")
            elif copy.shape != own.shape:
                yield f"{name} has shape {tuple(copy.shape)}, the trunk's {tuple(own.shape)}; the trunk's is used"
            elif gap := (copy.to(own) - own).abs().max().item():
                yield f"{name} differs from the trunk's by up to {gap:.3g}; the trunk's is used"

    def _missing(self) -> Iterator[str]:
        inventory = self.inventory
        index = inventory.checkpoint.index or {}
        packed = {f"{module}.weight" for module, _ in self.packed_otherwise.values()}
        for canonical, parameter in self.expected.items():
            if canonical not in inventory.stored and inventory.published(canonical) not in packed:
                name = inventory.published(canonical)
                where = f"; by the index it is in {index[name]}" if name in index else ""
                yield f"missing: {name} {tuple(parameter.shape)}{where}"

    def _duplicates(self) -> Iterator[tuple[str, str, bool]]:
        """Two locations of one tensor, and whether they agree: two spellings, or one name in two files."""
        checkpoint = self.inventory.checkpoint
        for names in self.inventory.duplicates.values():
            first, *others = [self.tensors[name] for name in names]
            yield from ((first.name, other.name, checkpoint.same(first, other)) for other in others)
        ours = {*self.inventory.stored.values(), *self.inventory.shared.values()}
        for name in sorted(ours & {each.tensor for each in checkpoint.problems if each.kind == "duplicate"}):
            used = self.tensors[name]
            for info in (header.tensors[name] for header in checkpoint.headers.values() if name in header.tensors):
                if info.file != used.file:
                    yield f"{name} in {used.file}", f"in {info.file}", checkpoint.same(used, info)


def _listed(title: str, problems: Sequence[str], most: int | None = None) -> str:
    lines = [*problems[:most], *([f"and {len(problems) - most} more"] if most and problems[most:] else [])]
    return f"{title}, {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n  " + "\n  ".join(lines)
