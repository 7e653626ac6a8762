"""Rules against their definitions, fixed lengths and an oracle on simulated heads; exactness by enumeration."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
import torch
from distributions import TOKENWISE, continued, emitted, in_blocks, number, random_distributions
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import loop

from nextn.errors import ConfigError
from nextn.speculative.draft_policy import (
    EDGES,
    AdaptiveLength,
    ConfidenceCalibration,
    FixedLength,
    RoundPlan,
)
from nextn.speculative.verification import accept_block
from nextn.stats.speedup import Costs, Spread, best_k, expected_speedup

FLAT = tuple(1 + 0.005 * num for num in range(17))
STEEP = tuple(1 + 0.06 * num for num in range(17))
# A head: the confidence of each distribution of a round, and the chance that a draft of it is accepted.
Distributions = Iterator[tuple[float, float]]


def costs(v, c):
    return Costs(1, 64, tuple(Spread(each, 0, 0, 1) for each in v), Spread(c, 0, 0, 1))


def constant(rate, *, reported=None) -> Callable[[random.Random, int], Distributions]:
    def distributions(draw, turn):
        while True:
            yield rate if reported is None else reported, rate

    return distributions


def bimodal(sure, unsure, *, reported=None) -> Callable[[random.Random, int], Distributions]:
    """Seven distributions of ten are sure. reported: their confidences, where these are not the acceptances."""

    def distributions(draw, turn):
        while True:
            is_sure = draw.random() < 0.7
            rate = sure if is_sure else unsure
            yield (rate if reported is None else reported[not is_sure]), rate

    return distributions


def drifting(draw, turn):
    """An easy text, a hard one, an easy one, ..."""
    while True:
        yield 0.5, 0.9 if turn // 500 % 2 == 0 else 0.15


@dataclass
class Result:
    tokens: int = 0
    cost: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def rate(self):
        return self.tokens / self.cost


def simulated(rule, head, v, c, *, rounds=2000, seed=0) -> Result:
    draw, found = random.Random(seed), Result()
    for turn in range(rounds):
        progress, distributions, accepted = rule.plan().begin(), head(draw, turn), []
        while progress.can_extend:
            confidence, rate = next(distributions)
            if progress.extend(confidence):
                accepted.append(draw.random() < rate)
        kept = (*accepted, False).index(False)
        rule.learn(progress.confidences, num_draft_tokens=progress.num_draft_tokens, num_accepted=kept)
        found.tokens += kept + 1
        found.cost += v[progress.num_draft_tokens] + c * len(progress.confidences)
        found.lengths.append(progress.num_draft_tokens)
    return found


def best_fixed(rate, v, c):
    """By the formula, for drafts that all stand with this probability on average."""
    rates = [rate] * (len(v) - 1)
    return expected_speedup(costs(v, c), rates, best_k(costs(v, c), rates))


class Oracle(FixedLength):
    """Knows each distribution's acceptance (its confidence), and continues down to the best of many floors."""

    def __init__(self, v, c, rate):
        super().__init__(len(v) - 1)
        object.__setattr__(self, "rule", (v, c, rate))

    def plan(self):
        v, c, rate = self.rule
        grid = tuple(place / 1000 for place in range(1001))
        go = tuple(rate * (c + v[min(k + 2, len(v) - 1)] - v[k + 1]) / 0.8 for k in range(len(v) - 1))
        take = tuple(rate * (v[k + 1] - v[k]) for k in range(len(v) - 1))
        return RoundPlan(len(v) - 1, grid, grid, take, go)


def oracle(head, v, c, **how):
    return max(simulated(Oracle(v, c, 1 + step / 2), head, v, c, **how).rate for step in range(8))


@pytest.mark.more
@loop(("v", "c"), [(FLAT, 0.07), (STEEP, 0.05), (FLAT, 0.2)])
@loop("rate", [0.5, 0.7, 0.85, 0.95])
def test_near_the_best_length_where_all_drafts_are_alike(rate, v, c):
    """A floor of another depth, a rate that does not settle: with nothing to tell probs apart, the best K is best."""
    for reported in (rate, 0.3, 0.01):
        found = simulated(AdaptiveLength(costs(v, c)), constant(rate, reported=reported), v, c).rate
        assert found > 0.95 * best_fixed(rate, v, c), reported


@pytest.mark.more
@pytest.mark.parametrize("reported", [None, (0.6, 0.4), (0.99, 0.95), (0.05, 0.5)])
def test_beats_every_length_where_the_head_knows_its_doubts(reported):
    """A rule that does not look at confidences, or that trusts them as they are."""
    found = simulated(AdaptiveLength(costs(FLAT, 0.1)), bimodal(0.97, 0.2, reported=reported), FLAT, 0.1).rate
    fixed, known = bounds()
    assert found > 1.06 * fixed
    assert found > 0.95 * known


@cache
def bounds():
    """What the best fixed length, and what one who knows each probs's acceptance, makes of a head with doubts."""
    return best_fixed(0.7 * 0.97 + 0.3 * 0.2, FLAT, 0.1), oracle(bimodal(0.97, 0.2), FLAT, 0.1)


def test_goes_back_to_plain_decoding():
    """Drafting that goes on at a loss, or probes that cost more than they are worth; and it says so."""
    rule = AdaptiveLength(costs(FLAT, 0.3))
    found = simulated(rule, constant(0.2), FLAT, 0.3)
    assert found.rate > 0.98
    assert sum(map(bool, found.lengths[100:])) < 0.1 * 1900
    assert not rule.pays
    assert rule.reason.startswith("plain")


@pytest.mark.more
def test_follows_a_text_that_changes():
    """A fall-back for good, or one that comes when the hard text is over."""
    rule = AdaptiveLength(costs(FLAT, 0.25))
    found = simulated(rule, drifting, FLAT, 0.25, rounds=4000)
    assert found.rate > 1.04 * max(
        simulated(FixedLength(num), drifting, FLAT, 0.25, rounds=4000).rate for num in (1, 2, 3, 4, 6)
    )
    easy = [turn for turn in range(1000, 4000) if turn // 500 % 2 == 0 and turn % 500 >= 200]
    hard = [turn for turn in range(500, 4000) if turn // 500 % 2 == 1 and turn % 500 >= 200]
    assert sum(found.lengths[turn] > 1 for turn in easy) > 0.8 * len(easy)
    assert sum(found.lengths[turn] for turn in hard) < 0.3 * len(hard)


@pytest.mark.more
def test_a_bin_is_tried_again():
    """A confidence that once was worthless and is never drafted from again, although it now is worth much."""
    rule = AdaptiveLength(costs(STEEP, 0.05))
    simulated(rule, bimodal(0.97, 0.0, reported=(0.99, 0.3)), STEEP, 0.05, rounds=1000)
    before = rule.plan().table[rule.plan().bin(0.3)]
    simulated(rule, bimodal(0.97, 0.95, reported=(0.99, 0.3)), STEEP, 0.05, rounds=3000)
    assert before < 0.2
    assert rule.plan().table[rule.plan().bin(0.3)] > 0.85


def test_a_plan_is_followed_by_hand():
    """The comparison of a depth's survival with another depth's floor, with <= for <, or before the draft for after."""
    plan = RoundPlan(4, (0.0, 0.5), (0.25, 0.5), (0.0, 0.25, 0.2, 0.0), (0.0, 0.25, 0.2, 0.0))
    progress = plan.begin()
    assert [progress.can_extend, progress.extend(0.5), progress.can_extend] == [True, True, True]
    assert (progress.extend(0.9), progress.can_extend, progress.num_draft_tokens) == (True, True, 2), (
        "0.25 is no less than 0.25"
    )
    assert (progress.extend(0.5), progress.can_extend, progress.num_draft_tokens) == (False, False, 2), (
        "0.125 is less than 0.2"
    )
    assert progress.confidences == [0.5, 0.9, 0.5]
    progress = plan.begin()
    assert (progress.extend(0.5), progress.extend(0.4), progress.can_extend, progress.num_draft_tokens) == (
        True,
        False,
        False,
        1,
    )
    progress = RoundPlan(4, take=(0.0,) * 4, go=(1.0, 1.1, 0.0, 0.0)).begin()
    assert (
        progress.extend(0.1),
        progress.can_extend,
        progress.extend(0.1),
        progress.can_extend,
        progress.num_draft_tokens,
    ) == (
        True,
        True,
        True,
        False,
        2,
    )
    assert plan.begin(0).can_extend is False
    assert plan.begin(9).limit == 4
    progress = plan.begin(1)
    assert (progress.extend(0.9), progress.can_extend) == (True, False)


@given(st.floats(0, 1))
@settings(deadline=None, derandomize=True)
def test_bins_hold_their_confidences(confidence):
    plan = RoundPlan(1, EDGES)
    place = plan.bin(confidence)
    assert EDGES[place] <= confidence
    assert place == len(EDGES) - 1 or confidence < EDGES[place + 1]


def test_floors_are_the_rule():
    """survival / (c + v(k+2) - v(k+1)) > S: a margin of the wrong depth, or without the draft step."""
    v = (1.0, 1.1, 1.3, 1.6)
    rule = AdaptiveLength(costs(v, 0.1))
    plan = rule.plan()
    assert plan.take == pytest.approx([rule.rate * margin for margin in (0.1, 0.2, 0.3)])
    assert plan.go[:2] == pytest.approx([rule.rate * (0.1 + margin) / 0.7 for margin in (0.2, 0.3)])
    assert rule.plan() == plan


class Shrinking:
    """`Calibration` by its definition: 4 drafts of the prior, and all that was seen shrinks by 1/512 a round."""

    def __init__(self, prior):
        self.prior, self.num_drafted, self.num_accepted = prior, [0.0] * len(prior), [0.0] * len(prior)

    def learn(self, places, kept):
        for values in (self.num_drafted, self.num_accepted):
            values[:] = [value * 511 / 512 for value in values]
        for depth, place in enumerate(places):
            self.num_drafted[place] += 1
            self.num_accepted[place] += depth < kept

    @property
    def table(self):
        seen = zip(self.num_accepted, self.num_drafted, self.prior, strict=True)
        return tuple((kept + 4 * hope) / (offered + 4) for kept, offered, hope in seen)

    @property
    def mean(self):
        return (sum(self.num_accepted) + 4 * 0.7) / (sum(self.num_drafted) + 4)


def test_calibration_is_its_definition():
    """Also behind the rounds at which its weights are scaled down, every 10,600."""
    draw, prior = random.Random(1), [0.5 + place / 32 for place in range(16)]
    rules = ConfidenceCalibration(prior), Shrinking(prior)
    for turn in range(12_000):
        places = [draw.randrange(16) for _ in range(draw.randrange(5))]
        for rule in rules:
            rule.learn(places, len(places) // 2)
        if turn % 1000 == 0 or 10_590 < turn < 10_660:
            assert rules[0].table == pytest.approx(rules[1].table)
            assert rules[0].mean == pytest.approx(rules[1].mean)


@pytest.mark.more
def test_calibration_lasts():
    """Weights that overflow in a server that runs for long: 1.002 to the power of its rounds."""
    rule = ConfidenceCalibration([0.5])
    for _ in range(370_000):
        rule.learn((), 0)
    assert rule.table == (0.5,)


def test_what_is_learned_of_a_round():
    """Drafts behind the first that is rejected, and distributions that were not drafted from, give no evidence."""
    rule, edges = AdaptiveLength(costs(FLAT, 0.1), overhead=0.5), RoundPlan(1, EDGES)
    before = rule.calibration.table
    rule.learn([0.97, 0.5, 0.2], num_draft_tokens=2, num_accepted=0)
    rule.learn([0.97, 0.1], num_draft_tokens=1, num_accepted=1)
    assert [rule.calibration.table[at] == pytest.approx(value) for at, value in enumerate(before)] == [
        at != edges.bin(0.97) for at in range(len(before))
    ]


def test_the_rate_by_hand():
    """Tokens by what rounds cost, the head's steps without a draft and the overhead of a round that drafts among it."""
    rule = AdaptiveLength(costs(FLAT, 0.1), overhead=0.5)
    best = best_k(costs(FLAT, 0.1), [0.7] * 16, overhead=0.5)
    assert rule.rate == pytest.approx(expected_speedup(costs(FLAT, 0.1), [0.7] * 16, best, overhead=0.5))
    tokens, cost = rule.tokens, rule.cost
    rule.learn([0.9, 0.9, 0.2], num_draft_tokens=2, num_accepted=1)
    assert (rule.tokens, rule.cost) == pytest.approx((tokens + 2, cost + FLAT[2] + 3 * 0.1 + 0.5))


def test_how_long_rounds_are_remembered():
    """256 baseline steps while drafting pays; 8 while it does not, so that a text which turned easy shows soon."""
    rule = AdaptiveLength(costs(FLAT, 0.1))
    for kept, longest in ((6, 256), (0, 8)):
        for _ in range(600):
            rule.learn([0.9] * 6, num_draft_tokens=6, num_accepted=kept)
        assert rule.cost == pytest.approx(longest)
    rule.tokens = rule.cost
    assert not rule.pays  # what brings as much as plain decoding is not worth it


def test_probes_of_plain_decoding():
    """Every 32nd round drafts, by what is known by then and at floors of plain decoding's rate."""
    rule, drafted = AdaptiveLength(costs(FLAT, 0.1)), []
    for _ in range(600):
        rule.learn([0.9] * 16, num_draft_tokens=16, num_accepted=0)
    for turn in range(100):
        plan = rule.plan()
        if plan.max_speculative_tokens:
            drafted.append(turn)
            assert plan.take[0] == pytest.approx(FLAT[1] - 1)
            assert plan.table == rule.calibration.table
            rule.learn([0.9], num_draft_tokens=1, num_accepted=0)
        else:
            rule.learn([], num_draft_tokens=0, num_accepted=0)
    assert drafted == [31, 63, 95]


def test_what_is_hoped_of_confidences():
    """At first drafts are accepted as often as the head is sure, and no less often than they are on average."""
    table = AdaptiveLength(costs(FLAT, 0.1)).plan().table
    assert table[0] == pytest.approx(0.7)
    assert table[-1] == pytest.approx((EDGES[-1] + 1) / 2)


@pytest.mark.parametrize(
    ("measured", "used"),
    [((1.0, 1.4, 1.1, 1.1, 2.0), (1.0, 1.2, 1.2, 1.2, 2.0)), ((1.0, 0.8, 1.2), (1.0, 1.0, 1.2))],
)
def test_costs_that_fall_are_pooled(measured, used):
    assert AdaptiveLength(costs(measured, 0.1)).v == pytest.approx(used)


# Drafts at temperature 1 by the head's confidence, as recorded: (share of drafts, acceptance rate).
RECORDED = {0.08: (0.15, 0.77), 0.35: (0.25, 0.70), 0.85: (0.25, 0.82), 0.97: (0.35, 0.95)}


def recorded(draw, turn):
    shares = [share for share, _ in RECORDED.values()]
    while True:
        reported = draw.choices(list(RECORDED), shares)[0]
        yield reported, RECORDED[reported][1]


@pytest.mark.more
@pytest.mark.parametrize(("v", "c"), [(FLAT, 0.07), (STEEP, 0.05)])
def test_settles_within_a_few_dozen_rounds(v, c):
    """A rate that begins far off, a rule that goes on jumping. Over many texts, as single ones are luck."""
    mean = sum(share * rate for share, rate in RECORDED.values())
    best = best_k(costs(v, c), [mean] * (len(v) - 1))
    aimed = simulated(FixedLength(best), recorded, v, c, rounds=8000).rate
    first, later = Result(), []
    for seed in range(100, 220):
        rule = AdaptiveLength(costs(v, c))
        text = simulated(rule, recorded, v, c, rounds=48, seed=seed)
        first.tokens, first.cost = first.tokens + text.tokens, first.cost + text.cost
        if seed < 110:
            lengths = simulated(rule, recorded, v, c, rounds=300, seed=seed).lengths
            later.append(sum(lengths) / len(lengths))
    assert first.rate > 0.97 * aimed
    assert best - 2 < min(later) <= max(later) < best + 2


def test_a_rule_is_kept_while_little_is_new():
    """A rule made anew in each round, or one that is kept although drafting stopped paying."""
    rule, seen = AdaptiveLength(costs(FLAT, 0.07)), []
    for turn in range(200):
        seen.append(rule.plan())
        rule.learn([0.9] * 6, num_draft_tokens=6, num_accepted=(6, 3)[turn % 2])
    changes = [turn for turn in range(1, 200) if seen[turn] is not seen[turn - 1]]
    assert changes[:7] == list(range(1, 8))
    assert all(later - turn <= 17 for turn, later in pairwise(changes))
    assert len(changes) < 40
    for _ in range(600):
        rule.learn([0.9] * 6, num_draft_tokens=6, num_accepted=0)
    assert rule.plan().max_speculative_tokens == 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9])
def test_a_plan_holds_as_long_as_it_says(rows, rate):
    """Whatever comes of the rounds; behind them it may be another one."""
    rule, draw, lasting = AdaptiveLength(costs(FLAT, 0.3)), random.Random(5), []
    for _ in range(150):
        plan = rule.plan()
        lasting.append(rule.rounds_unchanged(rows))
        for _ in range(lasting[-1]):
            assert rule.plan() is plan
            for _ in range(rows if plan.max_speculative_tokens else 1):
                kept = sum(draw.random() < rate for _ in range(plan.max_speculative_tokens))
                rule.learn(
                    [0.9] * plan.max_speculative_tokens, num_draft_tokens=plan.max_speculative_tokens, num_accepted=kept
                )
    assert min(lasting) == 1
    assert max(lasting) > 5


def test_a_jump_of_the_costs_is_looked_beyond():
    """One dear row before many that cost nothing: it pays together with those."""
    v = (1.0, 1.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5)
    found = simulated(AdaptiveLength(costs(v, 0.0)), constant(0.97), v, 0.0)
    assert found.rate > 0.97 * best_fixed(0.97, v, 0.0) > 1.1 * expected_speedup(costs(v, 0.0), [0.97], 1)


def test_noise_in_the_costs_is_no_speedup():
    """A pass over more tokens that was measured as cheaper: floors below 0."""
    plan = AdaptiveLength(costs((1.0, 1.2, 1.1, 1.3), 0.0)).plan()
    assert min(plan.take) >= 0


@pytest.mark.parametrize("p_min", [0.0, 0.6, 1.0])
def test_fixed_is_fixed(p_min):
    rule = FixedLength(3, p_min)
    progress, taken = rule.plan().begin(), []
    for confidence in (1.0, 0.6, 0.59, 1.0):
        if progress.can_extend:
            taken.append(progress.extend(confidence))
    assert taken == {0.0: [True] * 3, 0.6: [True, True, False], 1.0: [True, False]}[p_min]
    assert not FixedLength(0).plan().begin().can_extend
    assert "3 drafts" in rule.reason
    assert ("confidence" in rule.reason) == (p_min > 0)


@pytest.mark.more
@pytest.mark.parametrize("rule", [TOKENWISE, (accept_block, in_blocks)], ids=["one by one", "block"])
def test_stopping_before_the_draw_is_exact(rule):
    """A stop that sees the draft it leaves out moves the distribution; the plan's sees the distribution alone."""
    p = [random_distributions(3**j, 3, seed=j) for j in range(4)]
    q = [random_distributions(3**j, 3, seed=10 + j) for j in range(3)]
    plan = RoundPlan(3, (0.0, 0.6, 0.8), (0.7, 0.8, 0.9), (0.0, 0.55, 0.4), (0.5, 0.6, 0.0))

    def by_plan(drafts):
        return torch.tensor([_length(plan, q, path) for path in drafts.tolist()])

    def by_draw(drafts):
        """Drops a draft because its own probability is low."""
        return (q[0][0][drafts[:, 0]] > 0.4) * 3

    lengths = by_plan(torch.cartesian_prod(*[torch.arange(3)] * 3))
    assert lengths.unique().tolist() == [1, 2, 3]
    found, _ = emitted(p, q, by_plan, rule=rule)
    torch.testing.assert_close(found, continued(p[0], p[1:]), atol=1e-12, rtol=0)
    wrong, _ = emitted(p, q, by_draw, rule=rule)
    assert (wrong - continued(p[0], p[1:])).abs().max() > 1e-3


def _length(plan, q, path):
    progress = plan.begin()
    while progress.can_extend and progress.extend(
        q[progress.num_draft_tokens][number(torch.tensor([path])[:, : progress.num_draft_tokens], 3)].max().item()
    ):
        pass
    return progress.num_draft_tokens


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedLength(-1),
        lambda: FixedLength(2, 1.5),
        lambda: AdaptiveLength(costs(FLAT, 0.1), limit=17),
        lambda: AdaptiveLength(costs(FLAT, 0.1), limit=0),
    ],
)
def test_what_is_no_length(make):
    with pytest.raises(ConfigError, match="expected"):
        make()
