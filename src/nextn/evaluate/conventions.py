"""Other conventions for a head's weights: what an engine or a converter may get wrong.

A variant changes one convention on a copy of the head that shares its tensors. `nextn.evaluate.probe` finds the one
that the weights fit; an injected fault is one of them.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from nextn.bounded_json import JsonDict
from nextn.checkpoint.checkpoint import Checkpoint, as_checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.snapshot import on_disk
from nextn.checkpoint.tensors import TensorReader
from nextn.family_table import Family
from nextn.model.head import Head
from nextn.model.layer_types import LayerType
from nextn.model.model import Model
from nextn.model.packed_experts import dequantize
from nextn.model.shared_kv_head import SharedKVHead
from nextn.settings import Contract

_NORMS = ("token_norm", "hidden_norm", "final_norm")
_MAX_PERMUTED = 3  # MTP layers up to which every order is tried; for more, only the reverse


@dataclass(frozen=True)
class Variant:
    """A change of one convention."""

    key: str
    description: str
    axis: str = ""  # of the variants with the same axis, at most one applies
    facts: Mapping[str, object] = field(default_factory=dict)  # changed in the family's row
    contract: Mapping[str, object] = field(default_factory=dict)  # changed in the decoding contract
    # Alters a copied head, whose tensors are shared and must be replaced, not written.
    change: Callable[[Any], None] | None = None
    breadth: int = 1  # 2 if it changes several things at once


def apply_variants(model: Model, contract: Contract, variants: Sequence[Variant]) -> tuple[Model, Contract]:
    """Return a changed model, which shares its tensors with `model`, and contract; variants apply in order."""
    assert model.head is not None
    head, trunk = model.head, copy.copy(model.trunk)
    shared: list[object] = [*head.parameters(), *head.buffers(), head.family, head.draft_vocabulary]
    head = copy.deepcopy(head, {id(each): each for each in shared} | {id(model.trunk): trunk})
    dequantize(head)  # so that all its weights can be changed
    for variant in variants:
        family = replace(head.family, **JsonDict(variant.facts))
        trunk.stage = family.hidden
        head.set_family(family)
        if variant.change is not None:
            variant.change(head)
        contract = replace(contract, **JsonDict(variant.contract))
    return replace(model, trunk=trunk, head=head, family=head.family, backends={}), contract


def variants(model: Model, contract: Contract, *, copies: Mapping[str, Tensor] | None = None) -> list[Variant]:
    """Return every plausible variant of this head, one convention away from its family's row and the contract.

    copies: Canonical name (`0.output.weight`) -> stored copies that differ from the trunk's tensor.
    """
    assert model.head is not None
    family, head = model.family, model.head
    changes = [*_norm_weights(head), *_input_orders(head), *_hidden_stages(family)]
    changes += _reads(head) if isinstance(head, SharedKVHead) else _of_own_keys(head, contract, copies or {})
    return [replace(each, axis=each.axis or each.key) for each in (*changes, *_offsets(contract))]


def _of_own_keys(head: Head, contract: Contract, copies: Mapping[str, Tensor]) -> Iterator[Variant]:
    """What a head with keys of its own may get wrong besides."""
    family = head.family
    yield from _layer_orders(head)
    yield from _sharing(family, copies)
    if head.can_rollout:
        repeats = family.repeated_kv == "own"
        other_kv, words = ("first", "those of the first run") if repeats else ("own", "also their own")
        description = f"depths beyond the last MTP layer read {words} of its keys"
        yield Variant("repeated-kv", description, facts={"repeated_kv": other_kv})
    other = "keep" if family.position0 == "zero" else "zero"
    yield Variant("position0", f"the first position's token: {other}", facts={"position0": other})
    prompt = "not run" if contract.prefill else "run"
    yield Variant("prefill", f"prompt {prompt} through the head", contract={"prefill": not contract.prefill})


def _offsets(contract: Contract) -> Iterator[Variant]:
    """The hidden state of another position in each pair."""
    for offset in (-1, 0, 1):
        if offset != contract.offset:
            description = f"pairs (t_i+1, h_i{offset:+d})" if offset else "pairs (t_i+1, h_i)"
            yield Variant(f"offset:{offset:+d}", description, "offset", contract={"offset": offset})


def _reads(head: SharedKVHead) -> Iterator[Variant]:
    """What a head without keys of its own reads: of which layer, how far back, and from which position."""
    other = "hidden" if head.family.trunk_kv == "token" else "token"
    description = f"queries at the position of the pair's {'hidden state' if other == 'hidden' else 'token'}"
    yield Variant("query-position", description, facts={"trunk_kv": other})
    if others := {each: index for each in head.read_layers if (index := head.earlier_layer(each)) is not None}:
        names = ", ".join(f"{index} for {each.name}" for each, index in others.items())
        yield Variant("kv-layer", f"keys of the trunk's layers {names}", change=partial(_read_layers, others))
    if any(each.window for each in head.read_layers):
        description = "layers with a sliding window see all positions"
        yield Variant("kv-window", description, "windows", change=_without_windows)
        description = "layers with full attention see the sliding window of the others"
        yield Variant("kv-narrow", description, "windows", change=_windows_everywhere)


def _read_layers(layers: Mapping[LayerType, int], head: SharedKVHead) -> None:
    head.read_layers = {**head.read_layers, **layers}


def _without_windows(head: SharedKVHead) -> None:
    head.windows = dict.fromkeys(head.windows)


def _windows_everywhere(head: SharedKVHead) -> None:
    head.windows = dict.fromkeys(head.windows, max(window for window in head.windows.values() if window))


def stored_copies(source: str | Checkpoint, model: Model) -> dict[str, Tensor]:
    """Return copies of the trunk's tensors inside a checkpoint's head that differ from them, by canonical name."""
    inventory = on_disk(Inventory.of(as_checkpoint(source)))
    copies = {}
    with TensorReader(inventory) as weights:
        inventory = weights.inventory
        for canonical, name in inventory.copies.items():
            ours = model.trunk.embedding if inventory.role(canonical) == "embedding" else model.trunk.output
            if canonical.endswith(".weight") and weights.problem(name) is None:
                stored = weights.read(name).to(ours.weight)
                if stored.shape == ours.weight.shape and not torch.equal(stored, ours.weight):
                    copies[canonical] = stored
    return copies


def _norm_weights(head: Head) -> Iterator[Variant]:
    """Norm weights larger or smaller by one than the row says: w for 1 + w, the reverse, or 1 added twice."""
    roles = norm_roles(head)
    base = head.family.norm_weight
    conventions = {1: {"w": "1 + w", "1+w": "2 + w"}[base], -1: {"w": "w - 1", "1+w": "w"}[base]}
    for shift, convention in conventions.items():
        description, change = f"weights of all norms: {convention}", partial(_shift_norms, shift, roles)
        yield Variant(f"norm-weight:all:{shift:+d}", description, "norm-weight", change=change, breadth=2)
        for role in roles:
            norms = f"weight of {role}" if role != "block" else "norm weights inside the decoder layer"
            change = partial(_shift_norms, shift, [role])
            yield Variant(
                f"norm-weight:{role}:{shift:+d}", f"{norms}: {convention}", f"norm-weight:{role}", change=change
            )


def norm_roles(head: Head) -> list[str]:
    """Return the roles of the head's norms, each once: those outside the decoder layer, and `block`."""
    return sorted({_norm_role(name) for name, _ in _norms(head)}, key=[*_NORMS, "block"].index)


def set_norms(change: Callable[[Tensor], Tensor], roles: Sequence[str], head: Head) -> None:
    """Change the effective weights of the norms with these roles.

    Weights that are all zero were lost, whatever their convention, and stay zero: adding 1 to them would make a norm
    that works, and prove nothing.
    """
    offset = 1.0 if head.family.norm_weight == "1+w" else 0.0
    for name, value in _norms(head):
        effective = value.detach().float() + offset
        if _norm_role(name) in roles and effective.any():
            parent = head.get_submodule(name.rpartition(".")[0])
            parent.weight = nn.Parameter((change(effective) - offset).to(value.dtype), requires_grad=False)


def _norms(head: Head) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in head.named_parameters() if "norm" in name and name.endswith(".weight")]


def _norm_role(name: str) -> str:
    role = name.split(".")[2]
    return role if role in _NORMS else "block"


def _shift_norms(by: int, roles: Sequence[str], head: Head) -> None:
    set_norms(lambda weight: weight + by, roles, head)


def _input_orders(head: Head) -> Iterator[Variant]:
    """The order of token and hidden state in the projection."""
    family = head.family
    first = cast(Any, head.stack[0])
    if "projection" in family.names:
        other = "embedding_first" if family.concat == "hidden_first" else "hidden_first"
        yield Variant("concat", f"projection of {other.replace('_', ' ')}", facts={"concat": other})
    elif first.token_projection.weight.shape == first.hidden_projection.weight.shape:
        yield Variant("concat", "the projections of token and hidden state exchanged", change=_swap_projections)


def _swap_projections(head: Head) -> None:
    for module in head.stack:
        module.token_projection, module.hidden_projection = module.hidden_projection, module.token_projection


def _hidden_stages(family: Family) -> Iterator[Variant]:
    """Hidden states before or after the norm, as the head's input and as the state passed on; streams have one form."""
    for fact, description in (("hidden", "the head's input"), ("next_hidden", "state passed on")):
        stage = getattr(family, fact)
        if family.trunk_kv and fact == "next_hidden":  # it is projected, not normalized
            continue
        if stage in ("post", "pre") and (fact == "hidden" or "final_norm" in family.names):
            other = "pre" if stage == "post" else "post"
            yield Variant(fact, f"{description}: {other}-norm", facts={fact: other})


def _layer_orders(head: Head) -> Iterator[Variant]:
    """Which MTP layer runs at which depth."""
    count = head.num_modules
    if count == 1:
        return
    indices = list(range(count))
    orders = permutations(indices) if count <= _MAX_PERMUTED else [tuple(reversed(indices))]
    for order in orders:
        if list(order) != indices:
            key = "-".join(str(index + 1) for index in order)
            yield Variant(f"order:{key}", f"MTP layers in the order {key}", "order", change=partial(_reorder, order))
    first = partial(_reorder, tuple([0] * count))
    yield Variant("order:first", "MTP layer 1 loaded at every depth", "order", change=first)
    yield Variant("order:one", "MTP layer 1 alone, recursively", "order", change=partial(_reorder, (0,)))
    if head.family.order in ("chained", "unchained", "recursive"):
        other = "chained" if head.family.order == "unchained" else "unchained"
        head_input = "the previous layer's state" if other == "chained" else "the trunk's state"
        yield Variant("chained", f"each MTP layer takes {head_input}", facts={"order": other})


def _reorder(order: Sequence[int], head: Head) -> None:
    head.stack = nn.ModuleList([head.stack[index] for index in order])


def _sharing(family: Family, copies: Mapping[str, Tensor]) -> Iterator[Variant]:
    """The head's own embed_tokens or lm_head instead of the trunk's, and the reverse."""
    for role in ("embedding", "output"):
        stored = {int(name.split(".")[0]): value for name, value in copies.items() if name.split(".")[1] == role}
        if role in family.own:
            own = tuple(each for each in family.own if each != role)
            yield Variant(f"own:{role}", f"{role}: the trunk's", facts={"own": own})
        elif stored:
            facts, change = {"own": (*family.own, role)}, partial(_use_copies, role, stored)
            yield Variant(f"own:{role}", f"{role}: the stored copy", facts=facts, change=change)


def _use_copies(role: str, stored: Mapping[int, Tensor], head: Head) -> None:
    for index, module in enumerate(head.stack):
        weight = stored.get(index, stored[min(stored)]).to(head.trunk.output.weight)
        with torch.device("meta"):
            rows, size = weight.shape
            holder = nn.Embedding(rows, size) if role == "embedding" else nn.Linear(size, rows, bias=False)
        holder.weight = nn.Parameter(weight, requires_grad=False)
        setattr(module, role, holder)
