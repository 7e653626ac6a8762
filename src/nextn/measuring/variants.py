"""Other readings of a head's weights: one convention changed at a time, on a copy that shares the tensors.

What an engine or a converter may have got wrong, and so what `probe` tries and a planted fault does.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.snapshot import on_disk
from nextn.checkpoints.weights import Weights
from nextn.drafting import Contract
from nextn.families import Family
from nextn.head import Head
from nextn.model import Model

_NORMS = ("token_norm", "hidden_norm", "final_norm")
_PERMUTED = 3  # modules up to which every order is tried; beyond, the reverse


@dataclass(frozen=True)
class Variant:
    """key: its name. axis: of several with one axis, at most one applies. says: what it does, in words.

    facts: of the family's row. contract: of decoding. change: alters a copied head, whose tensors are shared and must
    be replaced, not written. breadth: 2 where it changes several things at once.
    """

    key: str
    says: str
    axis: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    contract: Mapping[str, object] = field(default_factory=dict)
    change: Callable[[Head], None] | None = None
    breadth: int = 1


def read_as(model: Model, contract: Contract, variants: Sequence[Variant]) -> tuple[Model, Contract]:
    """The model under these variants, in their order, and the contract. `model` stays as it is; tensors are shared."""
    assert model.head is not None
    head, trunk = model.head, copy.copy(model.trunk)
    tensors = [*head.parameters(), *head.buffers()]
    kept: list[object] = [*tensors, head.family, head.shortlist]
    head = copy.deepcopy(head, {id(each): each for each in kept} | {id(model.trunk): trunk})
    for variant in variants:
        family = replace(head.family, **cast(dict[str, Any], dict(variant.facts)))
        trunk.stage = family.hidden
        for part in (head, *head.stack):
            cast(Head, part).family = family
        if variant.change is not None:
            variant.change(head)
        contract = replace(contract, **cast(dict[str, Any], dict(variant.contract)))
    return replace(model, trunk=trunk, head=head, family=head.family, _engines={}), contract


def variants(model: Model, contract: Contract, *, copies: Mapping[str, Tensor] | None = None) -> list[Variant]:
    """Every reading that this head could have been meant for, one convention away from its row and the contract.

    copies: canonical name (`0.output.weight`) -> stored copies that differ from the trunk's tensor.
    """
    assert model.head is not None
    family, head = model.family, model.head
    found = [*_gains(head), *_joins(head), *_stages(family), *_orders(head), *_sharing(family, copies or {})]
    other = "keep" if family.position0 == "zero" else "zero"
    found.append(Variant("position0", f"the first column's token: {other}", facts={"position0": other}))
    prompt = "not run" if contract.prefill else "run"
    found.append(Variant("prefill", f"prompt {prompt} through the head", contract={"prefill": not contract.prefill}))
    for offset in (-1, 0, 1):
        if offset != contract.offset:
            says = f"pairs (t_i+1, h_i{offset:+d})" if offset else "pairs (t_i+1, h_i)"
            found.append(Variant(f"offset:{offset:+d}", says, "offset", contract={"offset": offset}))
    return [replace(each, axis=each.axis or each.key) for each in found]


def stored_copies(source: str, model: Model) -> dict[str, Tensor]:
    """What a checkpoint stores again inside its head, where it differs from the trunk's tensor, by canonical name."""
    inventory = on_disk(Inventory.of(Checkpoint.open(source)))
    found = {}
    with Weights(inventory.checkpoint, inventory.family) as weights:
        for canonical, name in inventory.copies.items():
            ours = model.trunk.embedding if inventory.role(canonical) == "embedding" else model.trunk.output
            if canonical.endswith(".weight") and weights.problem(name) is None:
                stored = weights.read(name).to(ours.weight)
                if stored.shape == ours.weight.shape and not torch.equal(stored, ours.weight):
                    found[canonical] = stored
    return found


def _gains(head: Head) -> Iterator[Variant]:
    """Norm gains one more or one less than the row reads: w for 1 + w, the reverse, or shifted twice."""
    roles = sorted({_norm_role(name) for name, _ in _norms(head)}, key=[*_NORMS, "block"].index)
    base = head.family.gain
    readings = {1: {"w": "1 + w", "1+w": "2 + w"}[base], -1: {"w": "w - 1", "1+w": "w"}[base]}
    for shift, reading in readings.items():
        said = f"gains of all norms: {reading}"
        yield Variant(f"gain:all:{shift:+d}", said, "gain", change=partial(_shift, shift, roles), breadth=2)
        for role in roles:
            says = f"gain of {role}: {reading}" if role != "block" else f"gains inside the block: {reading}"
            yield Variant(f"gain:{role}:{shift:+d}", says, f"gain:{role}", change=partial(_shift, shift, [role]))


def _norms(head: Head) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in head.named_parameters() if "norm" in name and name.endswith(".weight")]


def _norm_role(name: str) -> str:
    role = name.split(".")[2]
    return role if role in _NORMS else "block"


def _shift(by: int, roles: Sequence[str], head: Head) -> None:
    for name, value in _norms(head):
        if _norm_role(name) in roles:
            parent = head.get_submodule(name.rpartition(".")[0])
            parent.weight = nn.Parameter(value.detach() + by, requires_grad=False)


def _joins(head: Head) -> Iterator[Variant]:
    family = head.family
    if "projection" in family.names:
        other = "embedding_first" if family.concat == "hidden_first" else "hidden_first"
        yield Variant("concat", f"projection of {other.replace('_', ' ')}", facts={"concat": other})
    elif _swappable(head):
        yield Variant("concat", "the projections of token and hidden state exchanged", change=_swap)


def _swappable(head: Head) -> bool:
    first = cast(Any, head.stack[0])
    return first.token_projection.weight.shape == first.hidden_projection.weight.shape


def _swap(head: Head) -> None:
    for module in head.stack:
        module.token_projection, module.hidden_projection = module.hidden_projection, module.token_projection


def _stages(family: Family) -> Iterator[Variant]:
    """Which state is eaten, and which is handed on; streams have no other form."""
    for fact, says in (("hidden", "hidden state eaten"), ("recycled", "state handed on")):
        here = getattr(family, fact)
        if here in ("post", "pre") and (fact == "hidden" or "final_norm" in family.names):
            other = "pre" if here == "post" else "post"
            yield Variant(fact, f"{says}: {other}-norm", facts={fact: other})


def _orders(head: Head) -> Iterator[Variant]:
    """Which module stands at which depth."""
    count = head.num_modules
    if count == 1:
        return
    places = list(range(count))
    orders = permutations(places) if count <= _PERMUTED else [tuple(reversed(places))]
    for order in orders:
        if list(order) != places:
            key = "-".join(str(place + 1) for place in order)
            yield Variant(f"order:{key}", f"modules in the order {key}", "order", change=partial(_ordered, order))
    yield Variant(
        "order:first", "module 1 loaded in every place", "order", change=partial(_ordered, tuple([0] * count))
    )
    yield Variant("order:one", "module 1 alone, again and again", "order", change=partial(_ordered, (0,)))
    if head.family.order in ("chained", "unchained", "recursive"):
        other = "chained" if head.family.order == "unchained" else "unchained"
        eaten = "the last one's state" if other == "chained" else "the trunk's"
        yield Variant("chained", f"each module eats {eaten}", facts={"order": other})


def _ordered(order: Sequence[int], head: Head) -> None:
    head.stack = nn.ModuleList([head.stack[place] for place in order])


def _sharing(family: Family, copies: Mapping[str, Tensor]) -> Iterator[Variant]:
    """The head's own embedding or output head against the trunk's."""
    for role in ("embedding", "output"):
        stored = {int(name.split(".")[0]): value for name, value in copies.items() if name.split(".")[1] == role}
        if role in family.own:
            own = tuple(each for each in family.own if each != role)
            yield Variant(f"own:{role}", f"{role}: the trunk's", facts={"own": own})
        elif stored:
            facts = {"own": (*family.own, role)}
            yield Variant(f"own:{role}", f"{role}: the stored copy", facts=facts, change=partial(_own, role, stored))


def _own(role: str, stored: Mapping[int, Tensor], head: Head) -> None:
    for index, module in enumerate(head.stack):
        weight = stored.get(index, stored[min(stored)]).to(head.trunk.output.weight)
        with torch.device("meta"):
            rows, size = weight.shape
            holder = nn.Embedding(rows, size) if role == "embedding" else nn.Linear(size, rows, bias=False)
        holder.weight = nn.Parameter(weight, requires_grad=False)
        setattr(module, role, holder)
