"""Intervals by text: quantiles against scipy, and how often they hold what is true."""

import math
import random

import pytest
from quick import loop
from scipy.stats import binomtest, t

from nextn.decoding.generate import Result
from nextn.decoding.records import Round, SequenceRound
from nextn.evaluate.acceptance_curve import length_of
from nextn.evaluate.hypotheses import ExpectedCounts
from nextn.stats.acceptance import Acceptance, rates_record
from nextn.stats.intervals import Estimate, jackknife, paired_difference, proportion, student_t
from nextn.text_format import rate_text
from nextn.train.evaluation import ExpectedAcceptance


def test_counts_and_expected_counts_have_the_same_figures():
    """What decoding counted and what training expects differ only where there was nothing to count."""
    counted = Acceptance((9, 6, 0), (6, 2, 0), num_rounds=9, emitted=17)
    expected = ExpectedAcceptance((9.0, 6.0, 0.0), (6.0, 2.0, 0.0), emitted=(10.0, 7.0), rounds=(5.0, 4.0))
    assert counted.rates[:2] == expected.rates[:2] == (6 / 9, 2 / 6)
    assert math.isnan(counted.rates[2])
    assert rates_record(counted.rates) == [*counted.rates[:2], None]
    assert rate_text(counted.rates[2]) == "-"
    assert expected.rates[2] == 0.0
    assert counted.length == expected.length == 17 / 9
    assert math.isnan(Acceptance((), (), 0, 0).length)
    assert ExpectedAcceptance((), (), (), ()).length == 0.0


@loop("freedom", [1, 2, 3, 4, 7, 15, 40, 199])
@loop("error", [0.05, 0.01, 3e-4])
def test_student(freedom, error):
    assert student_t(freedom, error) == pytest.approx(t.ppf(1 - error / 2, freedom), rel=1e-6)


def test_student_of_many():
    assert student_t(math.inf, 0.05) == pytest.approx(1.959964, abs=1e-5)
    assert student_t(10**4 + 1, 0.05) == pytest.approx(1.96, abs=1e-3)


def test_one_text_is_wilsons():
    found, wanted = proportion([30], [50]), binomtest(30, 50).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


def test_nothing_offered():
    found = proportion([0, 0], [0, 0])
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0, 1)
    assert found.as_record()["value"] is None
    assert found.as_text() == ""
    assert Estimate(0.55, 0.129, 0.906).as_text() == "0.550 (0.13-0.91)"


def test_texts_that_differ_widen_it():
    """The same pooled rate: equal in all texts, or 1 in half of them and 0 in the others."""
    equal, different = proportion([5] * 10, [10] * 10), proportion([10, 0] * 5, [10] * 10)
    assert equal.value == different.value == 0.5
    assert different.high - different.low > 2 * (equal.high - equal.low)


@pytest.mark.parametrize("share_of", [0.0, 1.0])
def test_it_has_a_width_at_the_ends(share_of):
    found = proportion([10 * share_of] * 6, [10] * 6)
    assert found.value == share_of
    assert 0.03 < found.high - found.low < 0.2


@pytest.mark.parametrize("mean", [0.15, 0.6, 0.9])
def test_coverage(mean):
    """Texts with rates of their own (beta, as heads have by prompt): 95 % means 95 %, or a little more."""
    rng, hits, runs = random.Random(1), 0, 400
    for _ in range(runs):
        accepted, offered = [], []
        for _ in range(16):
            rate, count = rng.betavariate(6 * mean, 6 * (1 - mean)), rng.randint(30, 60)
            accepted.append(sum(rng.random() < rate for _ in range(count)))
            offered.append(count)
        found = proportion(accepted, offered)
        hits += found.low <= mean <= found.high
    assert hits / runs > 0.92


def test_jackknife_of_a_mean():
    """For a mean it is the textbook interval."""
    values = [1.0, 4.0, 2.0, 8.0, 5.0]
    found = jackknife(lambda sums: sums[0] / sums[1], [(value, 1.0) for value in values])
    mean, deviation = 4.0, (sum((v - 4) ** 2 for v in values) / 4 / 5) ** 0.5
    assert found.value == mean
    assert found.high - mean == pytest.approx(t.ppf(0.975, 4) * deviation)
    assert math.isnan(jackknife(lambda sums: 1.0, [(1.0,)]).low)


def test_texts_without_a_round_make_no_interval_narrower():
    """They ended at once, and are no samples; where there is nothing else, nothing is known."""
    counts = [(10.0, 8.0), (10.0, 2.0), (12.0, 6.0)]
    alone, beside = (jackknife(length_of, [*counts, *[(0.0, 0.0)] * more]) for more in (0, 20))
    assert beside == alone
    assert proportion(*zip(*[(k, n) for n, k in [*counts, (0, 0)]], strict=True)).low == pytest.approx(
        proportion(*zip(*[(k, n) for n, k in counts], strict=True)).low
    )
    assert math.isnan(jackknife(length_of, [(0.0, 0.0)] * 3).low)
    alone, beside = (
        ExpectedCounts("x", *([[each[side]] for each in counts] + [[0.0]] * more for side in (0, 1)))
        for more in (0, 20)
    )
    assert (beside.num_texts, *beside.design_effects) == (3, *alone.design_effects)
    assert beside.accepted_per_round == alone.accepted_per_round


def test_pairs_see_what_pools_cannot():
    """Texts differ much, the two sides little and always in the same direction."""
    theirs = [float(10 * place) for place in range(8)]
    ours = [value + 1 + 0.1 * (place % 2) for place, value in enumerate(theirs)]
    found = paired_difference(ours, theirs, [100.0] * 8)
    assert 0 < found.low < found.value < found.high
    assert found.value == pytest.approx(0.0105)
    deviation = (8 * 0.05**2 / 7 / 8) ** 0.5 / 100  # of the mean of gaps that are 0.05 off theirs
    assert found.high - found.value == pytest.approx(t.ppf(0.975, 7) * deviation)
    same = paired_difference(ours, ours, [100.0] * 8)
    assert (same.low, same.value, same.high) == (0, 0, 0)
    assert paired_difference([3.0], [1.0], [10.0]).low == -math.inf


def test_results_rounds_and_parts_are_pooled_alike():
    """Rounds of a batch, rounds of one sequence and whole results give the same counts."""
    parts = [SequenceRound(0, (), 0, (4,)), SequenceRound(0, (5, 7), 1, (5, 8)), SequenceRound(0, (9, 9), 2, (9, 9, 3))]
    parts.append(SequenceRound(0, (6, 6), 0, (4,)))  # its second draft was never verified
    rounds = [Round((part,), 0.1, 0.1) for part in parts]
    result = Result("", (), "length", tuple(parts), Acceptance.of(rounds), 0.0, 0.2, 0.2)
    expected = Acceptance((3, 2), (2, 1), 3, 6)
    assert [Acceptance.of(each) for each in (rounds, parts, [result])] == [expected] * 3
    assert Acceptance.of([result, result]).num_rounds == 6
    assert Acceptance.of([Round((), 0.1, 0.1)]).num_rounds == 0
