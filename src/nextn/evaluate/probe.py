"""Which convention a head's weights fit: try the variants of `conventions` on sampled texts, one and two at a time.

Scores are numbers of accepted drafts per position, summed over depths. By rule `argmax` a score does not depend on how
sharp the head's distribution is, which many variants change; by rule `ratio` it does, and so it also shows conventions
that change hardly anything else. A convention is looked for by `argmax` first. Comparisons are paired by text. Their
intervals hold for all comparisons together (Bonferroni; a quarter of the error each for the single changes and the
pairs of each rule), as the best of a hundred variants is better than most by chance alone.

A gain alone proves no wrong convention: damaged, undertrained and stale heads also gain by some variants, because any
change of scale may help weights that are not at an optimum. So a variant is named only if controls, which are changes
of norm weights that no engine and no converter makes, reach no more than it does, and add next to nothing to it: a
sound head that is read correctly is at an optimum, and a damaged one is not, whichever way it is read. And it must
restore what a sound head of this trunk gives: at depth 1, most of what drafting the trunk's own argmax would.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from operator import add, mul
from typing import Literal

from torch import Tensor

from nextn.errors import ConfigError
from nextn.evaluate.conventions import Variant, apply_variants, norm_roles, set_norms, variants
from nextn.evaluate.teacher_forced import PERFECT, ReferenceText, ScoredText, score_texts, trunk_outputs
from nextn.family_table import Stage
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.settings import Contract
from nextn.stats.acceptance import conditional_rates, rates_record
from nextn.stats.intervals import Estimate, paired_difference

Rule = Literal["argmax", "ratio"]  # see `teacher_forced.RULES`
RULES: tuple[Rule, ...] = ("argmax", "ratio")
_NUM_FIRST, _NUM_BEST = 4, 12  # pairs are tried on the first texts; this many of the best on all of them
_MAX_NEW_TOKENS = 48  # of a text that is scored
_MIN_WORKING = 0.1  # accepted drafts per position, below which no variant can be called right
_MIN_GAIN = 0.02  # accepted drafts per position, below which a difference is not worth reporting
# Controls: factors and summands of effective norm weights, of each role and of all together.
_FACTORS, _SUMMANDS = (0.5, 0.5**0.5, 2**0.5, 2.0), (-0.5, 0.5)
# The most that controls may gain, as shares of a convention's gain: without the convention, and in addition to it.
_MAX_BEFORE, _MAX_AFTER = 1.1, 0.1
_MIN_SHARE = 2 / 3  # of a perfect head's a_1, that a named convention has to reach

# family: nothing tried is better. other: the weights fit another convention. unexplained: another one is better, but so
# are controls. nothing-works: no convention gives acceptance.
Outcome = Literal["family", "other", "unexplained", "nothing-works"]

DEFINITIONS = {
    "accepted_per_position": "drafts, depths 1..K together, over all positions of the texts alike; argmax "
    "drafts, accepted with the trunk's probability (rule argmax), which does not depend on how sharp the head's "
    "distribution is; for pairs (t_i+1, h_i+1) without depth 1, which any head that passes this state on has right",
    "accepted_per_position_sampled": "the same with drafts sampled from the head and verified one by one (rule ratio)",
    "acceptance": "a_1..a_K over all positions alike, conditional on the shallower depths, by rule argmax",
    "gain": "accepted_per_position less that of the family's convention, paired by text; its interval is for all "
    "comparisons together",
    "best": "by each rule, the conventions with the fewest changes that the best one does not beat: beyond that "
    f"interval and by {_MIN_GAIN} or more; [] = the family's",
    "controls": "changes that no engine or converter makes: effective norm weights of one role, or of all, times "
    "1/2, 1/sqrt(2), sqrt(2) or 2, or plus or minus 1/2; tried for a best that is not the family's. gain_before: the "
    "largest score of one of them alone, or in place of one of two changes, less the family's; gain_after: the "
    "largest of one of them in addition to best, less that of best (at least 0)",
    "perfect": "a_1 by rule argmax of a head that always drafts the trunk's argmax: the mean of the trunk's largest "
    "probability",
    "outcome": "family: best is the family's by rule argmax, and by rule ratio, or that one is not explained; other: "
    f"the weights fit best, as gain_before is at most {_MAX_BEFORE:g} and gain_after at most {_MAX_AFTER:g} of its "
    f"gain, and its a_1 at least {_MIN_SHARE:.2f} of perfect; by rule ratio only if best by rule argmax is the "
    f"family's, and not better by more than {_MIN_GAIN}; unexplained: best by rule argmax is not the family's and not "
    "explained so, as in some damaged, undertrained and stale heads; nothing-works: its accepted_per_position is below "
    f"{_MIN_WORKING}",
    "preferred": "best if the outcome is other, else []",
    "ties": "those with as many changes that cannot be distinguished from preferred",
}


@dataclass(frozen=True)
class ConventionScore:
    """The score of one set of variants."""

    keys: tuple[str, ...]  # of the variants; () for the family's convention
    description: str
    rates: tuple[float, ...]  # a_1..a_K over all positions alike, by rule argmax
    num_accepted: Mapping[Rule, tuple[float, ...]] = field(repr=False)  # [texts], expected values
    num_positions: tuple[int, ...] = field(repr=False)  # [texts], where a round can start
    breadth: int = 0  # how much the variants change, to choose among equals

    def accepted_per_position(self, rule: Rule = "argmax") -> float:
        """Return the accepted drafts per position, over all texts."""
        return sum(self.num_accepted[rule]) / sum(self.num_positions)


@dataclass(frozen=True)
class ControlScores:
    """The best scores of controls: what changes without any meaning do for these weights."""

    before: ConventionScore  # alone, or in place of one of two changes
    after: ConventionScore  # in addition to the best convention


@dataclass(frozen=True)
class ProbeReport:
    """The scores of all conventions that were tried."""

    base: ConventionScore  # the family's convention
    alternatives: tuple[ConventionScore, ...]  # all others, best first
    num_pruned: int  # pairs that were ruled out on the first texts
    perfect_rate: float  # a_1 by rule argmax of a head that always drafts the trunk's argmax
    controls: Mapping[Rule, ControlScores] = field(default_factory=dict)  # by the rules that have a `candidate`

    def gain(self, one: ConventionScore, other: ConventionScore, rule: Rule = "argmax") -> Estimate:
        """Return by how much one is better; of 100 probes, 5 have an interval that misses a true difference."""
        num_changes = max(1, len(one.keys), len(other.keys))
        count = sum(len(each.keys) == num_changes for each in self.alternatives)
        count += self.num_pruned if num_changes == 2 else 0
        numbers = one.num_accepted[rule], other.num_accepted[rule]
        return paired_difference(*numbers, one.num_positions, error=0.0125 / max(1, count))

    def beats(self, one: ConventionScore, other: ConventionScore, rule: Rule = "argmax") -> bool:
        """Return whether one is better beyond chance, and by enough to report."""
        gain = self.gain(one, other, rule)
        return gain.low > 0 and gain.value >= _MIN_GAIN

    def best(self, rule: Rule = "argmax") -> ConventionScore:
        """Return the fewest changes that the best score does not beat; among those, the one that changes least."""
        scores = [self.base, *self.alternatives]
        best = max(scores, key=lambda score: score.accepted_per_position(rule))
        equals = [score for score in scores if not self.beats(best, score, rule)]
        return min(equals, key=lambda score: (len(score.keys), score.breadth, -score.accepted_per_position(rule)))

    def candidate(self, rule: Rule) -> ConventionScore | None:
        """Return the best convention by a rule if it drafts and is not the family's, which controls may still explain.

        By rule ratio, none if rule argmax has another best convention, or finds this one worse than the family's.
        """
        best = self.best(rule)
        if not best.keys or best.accepted_per_position(rule) < _MIN_WORKING:
            return None
        if rule == "ratio":
            loss = self.base.accepted_per_position() - best.accepted_per_position()
            return None if self.best().keys or loss > _MIN_GAIN else best
        return best

    def control_gains(self, rule: Rule = "argmax") -> tuple[float, float]:
        """Return what controls gain without the best convention and in addition to it; see DEFINITIONS."""
        if rule not in self.controls:
            return 0.0, 0.0
        before, after = self.controls[rule].before, self.controls[rule].after
        return (
            before.accepted_per_position(rule) - self.base.accepted_per_position(rule),
            max(0.0, after.accepted_per_position(rule) - self.best(rule).accepted_per_position(rule)),
        )

    def is_explained(self, rule: Rule) -> bool:
        """Whether the best convention by a rule explains its gain: controls do not, and a sound head could have it."""
        candidate, (before, after) = self.candidate(rule), self.control_gains(rule)
        if candidate is None or self._is_poor(candidate):
            return False
        gain = candidate.accepted_per_position(rule) - self.base.accepted_per_position(rule)
        return before <= _MAX_BEFORE * gain and after <= _MAX_AFTER * gain

    def _is_poor(self, score: ConventionScore) -> bool:
        """Whether a sound head would draft better at depth 1."""
        return score.rates[0] < _MIN_SHARE * self.perfect_rate

    @property
    def rule(self) -> Rule:
        """The rule by which another convention is named; argmax if none is."""
        return next(filter(self.is_explained, RULES), "argmax")

    @property
    def outcome(self) -> Outcome:
        """The result of the probe."""
        best = self.best()
        if self.is_explained(self.rule):
            return "other"
        if best.accepted_per_position() < _MIN_WORKING:
            return "nothing-works"
        return "unexplained" if best.keys else "family"

    @property
    def preferred(self) -> ConventionScore:
        """The convention that the weights fit; the family's unless another one explains its gain."""
        return self.best(self.rule) if self.outcome == "other" else self.base

    @property
    def ties(self) -> tuple[ConventionScore, ...]:
        """Alternatives not distinguishable from the preferred one, with as many changes (or one, if it has none)."""
        preferred = self.preferred
        if self.outcome == "unexplained":
            return ()
        num_changes = max(1, len(preferred.keys))
        others = [each for each in self.alternatives if each != preferred and len(each.keys) == num_changes]
        return tuple(each for each in others if not self.beats(preferred, each, self.rule))

    @property
    def agrees(self) -> bool:
        """Whether the weights fit the family's row better than, or as well as, anything that was tried."""
        return self.outcome == "family"

    @property
    def is_fault(self) -> bool:
        """Whether the head needs another convention, or drafts by none."""
        too_low = self.base.accepted_per_position() < _MIN_WORKING
        return self.outcome in ("other", "nothing-works") or (self.outcome == "unexplained" and too_low)

    @property
    def summary(self) -> str:
        """The result, in one sentence."""
        rule, best = self.rule, self.best(self.rule)
        score, base_score = best.accepted_per_position(rule), self.base.accepted_per_position(rule)
        gain = self.gain(best, self.base, rule)
        match self.outcome:
            case "nothing-works":
                return (
                    f"no convention works ({score:.2f} accepted drafts per position at best): the weights are "
                    "untrained, damaged, or of another trunk"
                )
            case "family":
                return f"the family's convention is the best: {base_score:.2f} accepted drafts per position"
            case "other":
                return (
                    f"the weights fit {best.description}: {score:.2f} accepted drafts per position, {base_score:.2f} "
                    f"with the family's convention ({gain.value:+.2f}, at least {gain.low:+.2f}, by rule {rule})"
                )
        before, after = self.control_gains()
        reason = (
            f"a_1 is {best.rates[0]:.2f} with it, and {self.perfect_rate:.2f} in a perfect head"
            if self._is_poor(best)
            else f"changes that no engine makes gain {before:.2f} without it and {after:.2f} in addition"
        )
        return (
            f"no convention explains this: {base_score:.2f} accepted drafts per position with the family's convention; "
            f"{best.description} gains {gain.value:.2f}, but {reason}: the weights are damaged, undertrained, or of "
            "another trunk"
        )

    def as_record(self) -> dict[str, object]:
        """Return the JSON document, with null for nan."""
        return {
            "definitions": DEFINITIONS,
            "summary": self.summary,
            "outcome": self.outcome,
            "rule": self.rule,
            "agrees": self.agrees,
            "best": {rule: list(self.best(rule).keys) for rule in RULES},
            "preferred": list(self.preferred.keys),
            "ties": [list(score.keys) for score in self.ties],
            "controls": {rule: self._controls_record(rule) for rule in self.controls},
            "perfect": self.perfect_rate,
            "comparisons": len(self.alternatives) + self.num_pruned,
            "readings": [self._score_record(score) for score in (self.base, *self.alternatives)],
        }

    def _controls_record(self, rule: Rule) -> dict[str, object]:
        before, after = self.control_gains(rule)
        controls = self.controls[rule]
        return {
            "before": controls.before.description,
            "after": controls.after.description,
            "gain_before": before,
            "gain_after": after,
        }

    def _score_record(self, score: ConventionScore) -> dict[str, object]:
        return {
            "keys": list(score.keys),
            "says": score.description,
            "accepted_per_position": score.accepted_per_position(),
            "accepted_per_position_sampled": score.accepted_per_position("ratio"),
            "acceptance": rates_record(score.rates),
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
    combined = [pair for pair in combinations(singles, 2) if is_compatible(*pair)] if pairs else []
    base, scores = scorer.score(()), [scorer.score((variant,)) for variant in singles]
    screened = [(scorer.score(pair, count=_NUM_FIRST).accepted_per_position(), pair) for pair in combined]
    screened.sort(key=lambda each: -each[0])
    scores += [scorer.score(pair) for _, pair in screened[:_NUM_BEST]]
    scores.sort(key=lambda score: -score.accepted_per_position())
    report = ProbeReport(base, tuple(scores), max(0, len(screened) - _NUM_BEST), scorer.perfect_rate)
    candidates = {rule: score for rule in RULES if (score := report.candidate(rule)) is not None}
    by_key = {variant.key: variant for variant in singles}
    controls = {
        rule: _score_controls(scorer, tuple(by_key[key] for key in score.keys), rule)
        for rule, score in candidates.items()
    }
    return replace(report, controls=controls)


def _score_controls(scorer: "_Scorer", best: tuple[Variant, ...], rule: Rule) -> ControlScores:
    """Score every control alone, in place of each change of `best`, and in addition to it; return the best scores."""
    assert scorer.model.head is not None
    controls = list(_controls(scorer.model.head))
    contexts: list[tuple[Variant, ...]] = [(), *((variant,) for variant in best if len(best) > 1)]
    before = [scorer.score((*context, control)) for context in contexts for control in controls]
    after = [scorer.score((*best, control)) for control in controls]
    best_score = partial(max, key=lambda score: score.accepted_per_position(rule))
    return ControlScores(best_score(before), best_score(after))


def _controls(head: Head) -> Iterator[Variant]:
    """Yield changes of norm weights that no engine or converter makes."""
    roles = norm_roles(head)
    for group in [*([role] for role in roles), *([roles] if len(roles) > 1 else [])]:
        where = f"weight of {group[0]}" if len(group) == 1 else "weights of all norms"
        for factor in _FACTORS:
            change = partial(set_norms, partial(mul, factor), group)
            yield Variant(f"control:{where}:*{factor:.2f}", f"{where} times {factor:.2f}", change=change)
        for summand in _SUMMANDS:
            change = partial(set_norms, partial(add, summand), group)
            yield Variant(f"control:{where}:{summand:+g}", f"{where} {summand:+g}", change=change)


def truncate_texts(texts: Sequence[ReferenceText]) -> list[ReferenceText]:
    """Return the texts with their first new tokens only, which limits the time that a hundred scores take."""
    size = _MAX_NEW_TOKENS
    return [replace(text, new=text.new[:size], ended=text.ended and len(text.new) <= size) for text in texts]


def is_compatible(one: Variant, other: Variant) -> bool:
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
        self.perfect_rate = math.nan  # a_1 by rule argmax of a head that always drafts the trunk's argmax
        self._hiddens: dict[Stage, list[TrunkOutput]] = {}

    def score(self, changes: tuple[Variant, ...], *, count: int | None = None) -> ConventionScore:
        """Score these variants together, on the first `count` texts or all."""
        model, contract = apply_variants(self.model, self.contract, changes)
        texts, hiddens = self.texts[:count], self._trunk_outputs(model.trunk)[:count]
        scored = list(score_texts(model, texts, hiddens, self.depths, contract=contract))
        if count is None:
            self.perfect_rate = _rate(scored, 1, PERFECT)
        first = 1 if contract.offset > 0 else 0  # that state predicts the draft of depth 1 without a head
        self.on_score()
        return ConventionScore(
            keys=tuple(each.key for each in changes),
            description=" and ".join(each.description for each in changes) or "the family's convention",
            rates=tuple(_rate(scored, depth) for depth in range(1, self.depths + 1)),
            num_accepted={
                rule: tuple(float(each.survivals[rule].expected[:, first:].sum()) for each in scored) for rule in RULES
            },
            num_positions=tuple(len(each.remaining) for each in scored),
            breadth=sum(each.breadth for each in changes),
        )

    def _trunk_outputs(self, trunk: Trunk) -> list[TrunkOutput]:
        if trunk.stage not in self._hiddens:
            self._hiddens[trunk.stage] = trunk_outputs(trunk, self.texts)
        return self._hiddens[trunk.stage]


def _rate(scored: Sequence[ScoredText], depth: int, rule: str = "argmax") -> float:
    """a_k over all positions that can draft so deep; nan if there is none."""
    drafted = accepted = 0.0
    for each in scored:
        survival, count = each.survivals[rule], max(0, len(each.remaining) - depth + 1)
        drafted += float(survival.given[:count, depth - 1].sum())
        accepted += float(survival.expected[:count, depth - 1].sum())
    return conditional_rates([accepted], [drafted])[0]
