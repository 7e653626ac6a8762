"""Between files and modules: stored tensors into trunk and head, each accounted for, and a head's tensors for a file.

Knows the family's names and forms; not how tensors are read (`weights`) or what a head computes.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from nextn.checkpoints import fp8
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.layout import deinterleave, fuse_experts, interleave, join_pairs, part_pairs, split_experts
from nextn.checkpoints.weights import Stored, Weights, is_activation_scale
from nextn.errors import CheckpointError
from nextn.families import lookup
from nextn.head import Head
from nextn.trunk import Trunk


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """value, detached, in dtype if that is given and it holds floating numbers."""
    return value.detach().to(dtype) if dtype is not None and value.is_floating_point() else value.detach()


def stored_form(head: Head, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's own state, by canonical name, in the form that the family stores; `running_form` undoes it."""
    state = part_pairs(interleave(state, head.family.interleaved), head.family.joined)
    return split_experts(state, head.family.experts)


def running_form(head: Head, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return join_pairs(fuse_experts(deinterleave(state, head.family.interleaved)), head.family.joined)


def head_tensors(
    head: Head, copies: bool = True, *, dtype: torch.dtype | None = None, wrapper: str = ""
) -> dict[str, Tensor]:
    """The head's tensors under their published names, experts one by one where the family stores them so.

    copies: the shared ones again inside each module, as the family stores them. dtype: cast to it what does not keep
    fp32 whatever the model's dtype (None = as is). wrapper: one of the family's, which the trunk's names have.
    """
    state = {name: cast(value, None if head.keeps_fp32(name) else dtype) for name, value in _own(head).items()}
    if copies:
        shared = {"embedding": head.trunk.embedding.weight, "output": head.trunk.output.weight}
        for index in range(head.num_modules):
            # clone: safetensors refuses two names for one storage, and the file does hold it twice
            roles = [role for role in head.family.copies if role not in head.family.unwritten]
            state |= {f"{index}.{role}.weight": cast(shared[role], dtype).clone() for role in roles}
    stored, layers = stored_form(head, state), head.trunk.num_layers
    return {head.family.published(name, layers, wrapper=wrapper): value.contiguous() for name, value in stored.items()}


def trunk_state(inventory: Inventory, weights: Weights) -> tuple[dict[str, Stored], list[str]]:
    """Stored name -> tensor of the trunk, and notes; a shared tensor that the head alone holds is the trunk's, too.

    Raises CheckpointError that lists every tensor of the trunk whose scales are missing or do not fit.
    """
    heads = inventory.spellings(inventory.stored)
    state = {name: weights.stored(name) for name in weights.names() if name not in heads}
    notes = []
    for role in inventory.family.copies:
        tied = role == "output" and lookup(inventory.checkpoint.config, "tie_word_embeddings")
        copy = inventory.stored.get(f"0.{role}.weight")
        if role not in inventory.shared and copy is not None and not tied:
            name = inventory.family.shared_name(role, wrapper=_trunk_wrapper(inventory))
            state[name] = weights.stored(copy)
            notes.append(f"the trunk has no {name}: {copy}, the head's copy of it, is used")
    quantised = [name for name in state if inventory.checkpoint.tensors[state[name].name].dtype == fp8.WEIGHT]
    problems = [text for name in quantised if (text := weights.problem(state[name].name))]
    if problems:
        raise CheckpointError(_listed(f"{inventory.checkpoint.path}: the trunk cannot be read", problems))
    return state, notes


def empty_head(inventory: Inventory, trunk: Trunk) -> Head:
    """A head without values: what `fill` does not set can be used by nobody."""
    with torch.device("meta"):
        return Head(inventory.family, trunk, num_modules=inventory.promised)


def fill(head: Head, inventory: Inventory, weights: Weights) -> list[str]:
    """Set every tensor of an `empty_head` from the file -> notes. Raises a CheckpointError that lists all problems."""
    account = _Account(head, inventory, weights)
    problems = [*account.problems()]
    tensors = {}
    for canonical, parameter in account.wanted.items():
        name = inventory.stored.get(canonical)
        if name is not None and weights.problem(name) is None:
            tensors[canonical] = weights.read(name).to(parameter.dtype)
            if not bool(torch.isfinite(tensors[canonical]).all()):
                problems.append(f"non-finite: {weights.non_finite(name)}")
    notes = [*account.notes(), *account.compared(problems)]
    if problems:
        path = inventory.checkpoint.path
        advice = f"`nextn audit {path}` says more; `nextn restore {path} --from BASE` puts a head back."
        raise CheckpointError(_listed(f"{path}: the head is not whole", problems) + f"\n{advice}")
    state = {f"stack.{name}": value for name, value in running_form(head, tensors).items()}
    head.load_state_dict(state, strict=True, assign=True)
    left = [name for name, value in [*head.named_parameters(), *head.named_buffers()] if value.is_meta]
    assert not left, f"{left} have no value: buffers that are not stored"
    return notes


def _own(head: Head) -> dict[str, Tensor]:
    return {name.removeprefix("stack."): value for name, value in head.state_dict().items()}


class _Account:
    """Every tensor that is the head's, or looks like it, against what the head wants."""

    def __init__(self, head: Head, inventory: Inventory, weights: Weights) -> None:
        self.head, self.inventory, self.weights = head, inventory, weights
        self.tensors = inventory.checkpoint.tensors
        self.wanted = stored_form(head, _own(head))
        beside = set(weights.scales.values())
        stored = {canonical: name for canonical, name in inventory.stored.items() if name not in beside}
        self.scales = [name for name in stored.values() if is_activation_scale(name)]
        self.copies = {
            canonical: name
            for canonical, name in inventory.copies.items()
            if canonical.endswith(".weight") and int(canonical.split(".")[0]) < head.num_modules and name not in beside
        }
        known = {*self.wanted, *self.copies}
        self.extra = [name for each, name in stored.items() if each not in known and name not in self.scales]
        self.twice = [*self._twice()]

    def problems(self) -> Iterator[str]:
        """All that headers tell, and spellings and files that contradict each other."""
        yield from self._missing()
        for extra in self.extra:
            yield f"unexpected: {extra} {self.tensors[extra].shape}"
        for stranger in self.inventory.strangers:
            yield f"unexpected: {stranger}, which looks like a head's, and is no name of {self.head.family.name}"
        for canonical, parameter in self.wanted.items():
            name = self.inventory.stored.get(canonical)
            if name is not None and self.tensors[name].shape != tuple(parameter.shape):
                yield f"mis-shaped: {name} {self.tensors[name].shape}, expected {tuple(parameter.shape)}"
        for each in sorted({*self.wanted, *self.copies} & self.inventory.stored.keys()):
            if (text := self.weights.problem(self.inventory.stored[each])) is not None:
                yield text
        for first, second, same in self.twice:
            if not same:
                yield f"duplicated: {first} and {second} differ"

    def notes(self) -> Iterator[str]:
        for first, second, same in self.twice:
            if same:
                yield f"{first} and {second} are the same, bit for bit"
        if self.scales:
            yield f"scales of activations ({len(self.scales)}, such as {self.scales[0]}) are of no use here"
        files = {self.tensors[name].file for name in self.inventory.stored.values()}
        for file in sorted(files & set(self.inventory.checkpoint.unindexed)):
            yield f"the head is in {file}, which the index does not name: engines that go by the index miss it"

    def compared(self, problems: list[str]) -> Iterator[str]:
        """Notes on copies that differ from the trunk's tensor; non-finite ones go to problems."""
        for canonical, name in sorted(self.copies.items()):
            if self.weights.problem(name) is not None:
                continue
            trunk, copy = self.head.trunk, self.weights.read(name)
            own = (trunk.embedding if self.inventory.role(canonical) == "embedding" else trunk.output).weight.detach()
            if not bool(torch.isfinite(copy).all()):
                problems.append(f"non-finite: {self.weights.non_finite(name)}")
            elif copy.shape != own.shape:
                yield f"{name} has shape {tuple(copy.shape)}, the trunk's {tuple(own.shape)}; the trunk's is used"
            elif gap := (copy.to(own) - own).abs().max().item():
                yield f"{name} differs from the trunk's by up to {gap:.3g}; the trunk's is used"

    def _missing(self) -> Iterator[str]:
        inventory = self.inventory
        index = inventory.checkpoint.index or {}
        for canonical, parameter in self.wanted.items():
            if canonical not in inventory.stored:
                name = inventory.published(canonical)
                where = f"; by the index it is in {index[name]}" if name in index else ""
                yield f"missing: {name} {tuple(parameter.shape)}{where}"

    def _twice(self) -> Iterator[tuple[str, str, bool]]:
        """Two places of one tensor, and whether they agree: two spellings, or one name in two files."""
        checkpoint = self.inventory.checkpoint
        for names in self.inventory.twice.values():
            first, *others = [self.tensors[name] for name in names]
            yield from ((first.name, other.name, checkpoint.same(first, other)) for other in others)
        ours = {*self.inventory.stored.values(), *self.inventory.shared.values()}
        for name in sorted(ours & {each.tensor for each in checkpoint.problems if each.kind == "duplicate"}):
            used = self.tensors[name]
            for info in (header.tensors[name] for header in checkpoint.headers.values() if name in header.tensors):
                if info.file != used.file:
                    yield f"{name} in {used.file}", f"in {info.file}", checkpoint.same(used, info)


def _trunk_wrapper(inventory: Inventory) -> str:
    return inventory.family.wrapper([info.name for info in inventory.layers.get(0, {}).values()])


def _listed(title: str, problems: Iterable[str]) -> str:
    lines = [*problems]
    return f"{title}, {len(lines)} problem{'s' if len(lines) > 1 else ''}:\n  " + "\n  ".join(lines)
