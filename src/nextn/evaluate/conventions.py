"""Other conventions for a head's weights: what an engine or a converter may get wrong, and which one the weights fit.

A variant changes one convention on a copy of the head that shares its tensors; `probe` tries them one and two at a time
on the same sampled texts, and an injected fault is one of them.

The score is the number of accepted drafts per position, summed over depths, by rule `ratio`: at temperature 1 it is
highest where the head's distribution is the trunk's, so that a variant gains nothing by sharper predictions.
Comparisons are paired by text. Their intervals hold for all comparisons together (Bonferroni; half of the error is for
the single changes, half for the pairs), as the best of a hundred variants is better than most by chance alone.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.snapshot import on_disk
from nextn.checkpoint.tensors import TensorReader
from nextn.decoding.drafter import Contract
from nextn.errors import ConfigError
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText, score_texts, trunk_outputs
from nextn.families import Family, Stage
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.model.trunk import TrunkOutput
from nextn.stats.intervals import Estimate, paired_difference

_NORMS = ("token_norm", "hidden_norm", "final_norm")
_MAX_PERMUTED = 3  # MTP layers up to which every order is tried; for more, only the reverse
_NUM_FIRST, _NUM_BEST = 4, 12  # pairs are tried on the first texts; this many of the best on all of them
_MIN_WORKING = 0.1  # accepted drafts per position, below which no variant can be called right
_MIN_GAIN = 0.02  # accepted drafts per position, below which a difference is not worth reporting

DEFINITIONS = {
    "per_column": "accepted drafts per position, depths 1..K together, over all positions of the texts alike; drafts "
    "sampled from the head and verified one by one (rule ratio)",
    "acceptance": "a_1..a_K over all positions alike, conditional on the shallower depths, by the same rule",
    "gain": "per_column less that of the family's convention, paired by text; its interval is for all comparisons "
    "together",
    "wanted": "the conventions with the fewest changes that the best one does not beat: beyond that interval and by "
    f"{_MIN_GAIN} or more; [] = the family's",
    "ties": "those with as many changes that cannot be told from it",
}


@dataclass(frozen=True)
class Variant:
    """A change of one convention."""

    key: str
    description: str
    axis: str = ""  # of the variants with the same axis, at most one applies
    facts: Mapping[str, object] = field(default_factory=dict)  # changed in the family's row
    contract: Mapping[str, object] = field(default_factory=dict)  # changed in the decoding contract
    # Alters a copied head, whose tensors are shared and must be replaced, not written.
    change: Callable[[Head], None] | None = None
    breadth: int = 1  # 2 if it changes several things at once


def apply_variants(model: Model, contract: Contract, variants: Sequence[Variant]) -> tuple[Model, Contract]:
    """Return a changed model, which shares its tensors with `model`, and contract; variants apply in order."""
    assert model.head is not None
    head, trunk = model.head, copy.copy(model.trunk)
    shared: list[object] = [*head.parameters(), *head.buffers(), head.family, head.draft_vocabulary]
    head = copy.deepcopy(head, {id(each): each for each in shared} | {id(model.trunk): trunk})
    for variant in variants:
        family = replace(head.family, **cast(dict[str, Any], dict(variant.facts)))
        trunk.stage = family.hidden
        for part in (head, *head.stack):
            cast(Head, part).family = family
        if variant.change is not None:
            variant.change(head)
        contract = replace(contract, **cast(dict[str, Any], dict(variant.contract)))
    return replace(model, trunk=trunk, head=head, family=head.family, backends={}), contract


def variants(model: Model, contract: Contract, *, copies: Mapping[str, Tensor] | None = None) -> list[Variant]:
    """Return every plausible variant of this head, one convention away from its family's row and the contract.

    copies: Canonical name (`0.output.weight`) -> stored copies that differ from the trunk's tensor.
    """
    assert model.head is not None
    family, head = model.family, model.head
    changes = [
        *_norm_weights(head),
        *_input_orders(head),
        *_hidden_stages(family),
        *_layer_orders(head),
        *_sharing(family, copies or {}),
    ]
    other = "keep" if family.position0 == "zero" else "zero"
    changes.append(Variant("position0", f"the first position's token: {other}", facts={"position0": other}))
    prompt = "not run" if contract.prefill else "run"
    changes.append(Variant("prefill", f"prompt {prompt} through the head", contract={"prefill": not contract.prefill}))
    for offset in (-1, 0, 1):
        if offset != contract.offset:
            description = f"pairs (t_i+1, h_i{offset:+d})" if offset else "pairs (t_i+1, h_i)"
            changes.append(Variant(f"offset:{offset:+d}", description, "offset", contract={"offset": offset}))
    return [replace(each, axis=each.axis or each.key) for each in changes]


def stored_copies(
    source: str,
    model: Model,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
) -> dict[str, Tensor]:
    """Return copies of the trunk's tensors inside a checkpoint's head that differ from them, by canonical name."""
    checkpoint = Checkpoint.open(source, revision=revision, cache_dir=cache_dir, offline=offline)
    inventory = on_disk(Inventory.of(checkpoint), revision=revision, cache_dir=cache_dir, offline=offline)
    copies = {}
    with TensorReader(inventory.checkpoint, inventory.family) as weights:
        for canonical, name in inventory.copies.items():
            ours = model.trunk.embedding if inventory.role(canonical) == "embedding" else model.trunk.output
            if canonical.endswith(".weight") and weights.problem(name) is None:
                stored = weights.read(name).to(ours.weight)
                if stored.shape == ours.weight.shape and not torch.equal(stored, ours.weight):
                    copies[canonical] = stored
    return copies


def _norm_weights(head: Head) -> Iterator[Variant]:
    """Norm weights larger or smaller by one than the row says: w for 1 + w, the reverse, or 1 added twice."""
    roles = sorted({_norm_role(name) for name, _ in _norms(head)}, key=[*_NORMS, "block"].index)
    base = head.family.norm_weight
    conventions = {1: {"w": "1 + w", "1+w": "2 + w"}[base], -1: {"w": "w - 1", "1+w": "w"}[base]}
    for shift, convention in conventions.items():
        description, change = f"weights of all norms: {convention}", partial(_shift_norms, shift, roles)
        yield Variant(f"gain:all:{shift:+d}", description, "gain", change=change, breadth=2)
        for role in roles:
            norms = f"weight of {role}" if role != "block" else "norm weights inside the decoder layer"
            change = partial(_shift_norms, shift, [role])
            yield Variant(f"gain:{role}:{shift:+d}", f"{norms}: {convention}", f"gain:{role}", change=change)


def _norms(head: Head) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in head.named_parameters() if "norm" in name and name.endswith(".weight")]


def _norm_role(name: str) -> str:
    role = name.split(".")[2]
    return role if role in _NORMS else "block"


def _shift_norms(by: int, roles: Sequence[str], head: Head) -> None:
    for name, value in _norms(head):
        if _norm_role(name) in roles:
            parent = head.get_submodule(name.rpartition(".")[0])
            parent.weight = nn.Parameter(value.detach() + by, requires_grad=False)


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


@dataclass(frozen=True)
class ConventionScore:
    """The score of one set of variants."""

    keys: tuple[str, ...]  # of the variants; () for the family's convention
    description: str
    rates: tuple[float, ...]  # a_1..a_K over all positions alike
    num_accepted: tuple[float, ...] = field(repr=False)  # [texts], expected values
    num_positions: tuple[int, ...] = field(repr=False)  # [texts], where a round can start
    breadth: int = 0  # how much the variants change, to choose among equals

    @property
    def accepted_per_position(self) -> float:
        """Accepted drafts per position, over all texts."""
        return sum(self.num_accepted) / sum(self.num_positions)


@dataclass(frozen=True)
class ProbeReport:
    """The scores of all conventions that were tried."""

    base: ConventionScore  # the family's convention
    alternatives: tuple[ConventionScore, ...]  # all others, best first
    num_pruned: int  # pairs that were ruled out on the first texts

    def gain(self, one: ConventionScore, other: ConventionScore) -> Estimate:
        """Return by how much one is better; of 100 probes, 5 have an interval that misses a true difference."""
        num_changes = max(1, len(one.keys), len(other.keys))
        count = sum(len(each.keys) == num_changes for each in self.alternatives)
        count += self.num_pruned if num_changes == 2 else 0
        return paired_difference(one.num_accepted, other.num_accepted, one.num_positions, error=0.025 / max(1, count))

    def beats(self, one: ConventionScore, other: ConventionScore) -> bool:
        """Return whether one is better beyond chance, and by enough to report."""
        gain = self.gain(one, other)
        return gain.low > 0 and gain.value >= _MIN_GAIN

    @property
    def preferred(self) -> ConventionScore:
        """The fewest changes that the best score does not beat; among those, the one that changes least."""
        scores = [self.base, *self.alternatives]
        best = max(scores, key=lambda score: score.accepted_per_position)
        equals = [score for score in scores if not self.beats(best, score)]
        return min(equals, key=lambda score: (len(score.keys), score.breadth, -score.accepted_per_position))

    @property
    def ties(self) -> tuple[ConventionScore, ...]:
        """Alternatives that cannot be told from the preferred one, with as many changes (or one, if it has none)."""
        preferred = self.preferred
        num_changes = max(1, len(preferred.keys))
        others = [each for each in self.alternatives if each != preferred and len(each.keys) == num_changes]
        return tuple(each for each in others if not self.beats(preferred, each))

    @property
    def agrees(self) -> bool:
        """Whether the weights fit the family's row better than, or as well as, anything that was tried."""
        return not self.preferred.keys

    @property
    def works(self) -> bool:
        """Whether any convention gives acceptance at all."""
        return self.preferred.accepted_per_position >= _MIN_WORKING

    @property
    def summary(self) -> str:
        """The result, in one sentence."""
        preferred, base = self.preferred, self.base
        score, base_score = preferred.accepted_per_position, base.accepted_per_position
        if not self.works:
            return (
                f"no convention works ({score:.2f} accepted drafts per position at best): the weights are untrained, "
                "damaged, or of another trunk"
            )
        if self.agrees:
            return f"the family's convention is the best: {base_score:.2f} accepted drafts per position"
        gain = self.gain(preferred, base)
        return (
            f"the weights fit {preferred.description}: {score:.2f} accepted drafts per position, {base_score:.2f} with "
            f"the family's convention ({gain.value:+.2f}, at least {gain.low:+.2f})"
        )

    def as_record(self) -> dict[str, object]:
        """Return the JSON document, with null for nan."""
        return {
            "definitions": DEFINITIONS,
            "verdict": self.summary,
            "agrees": self.agrees,
            "wanted": list(self.preferred.keys),
            "ties": [list(score.keys) for score in self.ties],
            "comparisons": len(self.alternatives) + self.num_pruned,
            "readings": [self._score_record(score) for score in (self.base, *self.alternatives)],
        }

    def _score_record(self, score: ConventionScore) -> dict[str, object]:
        return {
            "keys": list(score.keys),
            "says": score.description,
            "per_column": score.accepted_per_position,
            "acceptance": [None if math.isnan(rate) else rate for rate in score.rates],
            "gain": self.gain(score, self.base).as_record(),
        }


def probe(
    model: Model,
    texts: Sequence[ReferenceText],
    depths: int,
    *,
    contract: Contract | None = None,
    copies: Mapping[str, Tensor] | None = None,
    pairs: bool = True,
    on_score: Callable[[], None] = lambda: None,
) -> ProbeReport:
    """Score the head's `variants`, alone and in pairs, on sampled texts of the trunk, at K = depths.

    `contract` is what decoding does now; `copies` as in `variants`. Raises ConfigError for greedy or too short texts.
    """
    if not all(text.temperature for text in texts) or not any(text.remaining for text in texts):
        raise ConfigError("conventions are compared on sampled texts with three new tokens or more; there are none")
    scorer = _Scorer(model, contract or Contract(), [text for text in texts if text.remaining], depths, on_score)
    singles = variants(model, scorer.contract, copies=copies)
    combined = [pair for pair in combinations(singles, 2) if _are_compatible(*pair)] if pairs else []
    base, scores = scorer.score(()), [scorer.score((variant,)) for variant in singles]
    screened = [(scorer.score(pair, count=_NUM_FIRST).accepted_per_position, pair) for pair in combined]
    screened.sort(key=lambda each: -each[0])
    scores += [scorer.score(pair) for _, pair in screened[:_NUM_BEST]]
    scores.sort(key=lambda score: -score.accepted_per_position)
    return ProbeReport(base, tuple(scores), max(0, len(screened) - _NUM_BEST))


def truncate_texts(texts: Sequence[ReferenceText], *, tokens: int = 48) -> list[ReferenceText]:
    """Return the texts with their first new tokens only, which limits the time that a hundred scores take."""
    return [replace(text, new=text.new[:tokens], ended=text.ended and len(text.new) <= tokens) for text in texts]


def _are_compatible(one: Variant, other: Variant) -> bool:
    """Whether both can apply: they are neither two values of one fact, nor a change of all norms and of one."""
    first, second = one.axis, other.axis
    return first != second and not first.startswith(f"{second}:") and not second.startswith(f"{first}:")


class _Scorer:
    """Scores variants on the same texts; the trunk's states are computed once per stage."""

    def __init__(
        self,
        model: Model,
        contract: Contract,
        texts: Sequence[ReferenceText],
        depths: int,
        on_score: Callable[[], None],
    ) -> None:
        self.model, self.contract, self.texts, self.depths, self.on_score = model, contract, texts, depths, on_score
        self._hiddens: dict[Stage, list[TrunkOutput]] = {}

    def score(self, changes: tuple[Variant, ...], *, count: int | None = None) -> ConventionScore:
        """Score these variants together, on the first `count` texts or all."""
        model, contract = apply_variants(self.model, self.contract, changes)
        stage = model.trunk.stage
        if stage not in self._hiddens:
            self._hiddens[stage] = trunk_outputs(model.trunk, self.texts)
        texts, hiddens = self.texts[:count], self._hiddens[stage][:count]
        scored = list(score_texts(model, texts, hiddens, self.depths, contract=contract))
        self.on_score()
        return ConventionScore(
            keys=tuple(each.key for each in changes),
            description=" and ".join(each.description for each in changes) or "the family's convention",
            rates=tuple(_rate(scored, depth) for depth in range(1, self.depths + 1)),
            num_accepted=tuple(float(each.survivals["ratio"].expected.sum()) for each in scored),
            num_positions=tuple(len(each.remaining) for each in scored),
            breadth=sum(each.breadth for each in changes),
        )


def _rate(scored: Sequence[ScoredText], depth: int) -> float:
    """a_k over all positions that can draft so deep; nan if there is none."""
    drafted = accepted = 0.0
    for each in scored:
        survival, count = each.survivals["ratio"], max(0, len(each.remaining) - depth + 1)
        drafted += float(survival.given[:count, depth - 1].sum())
        accepted += float(survival.expected[:count, depth - 1].sum())
    return accepted / drafted if drafted else math.nan
