"""Intervals, speedups and pictures: against scipy, enumeration and published formulas."""

import errno
import itertools
import math
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from quick import loop
from scipy.stats import binomtest, t

from nextn.decoding.generate import Result
from nextn.decoding.records import Round, SequenceRound
from nextn.errors import ConfigError
from nextn.evaluate.acceptance_curve import length_of
from nextn.evaluate.hypotheses import ExpectedCounts
from nextn.stats import plots
from nextn.stats.acceptance import Acceptance, expected_length, rates_record
from nextn.stats.intervals import Estimate, jackknife, paired_difference, proportion, student_t
from nextn.stats.speedup import Costs, Spread, best_k, break_even, expected_speedup, uniform_rate
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


def costs(v, c, step=2.0):
    """Costs with these v(1), v(2), ... and c."""
    return Costs(1, 64, tuple(Spread(step * each, 0, 0, 1) for each in v), Spread(step * c, 0, 0, 1))


@pytest.mark.parametrize("rates", [[], [0.3], [0.9, 0.5, 0.7, 0.2], [1.0, 1.0], [0.0, 0.9]])
def test_expected_length_is_the_enumeration(rates):
    """With the right number of factors, and the bonus token."""
    total = 0.0
    for accepted in itertools.product([True, False], repeat=len(rates)):
        chance = math.prod(rate if is_accepted else 1 - rate for rate, is_accepted in zip(rates, accepted, strict=True))
        total += chance * (1 + len(list(itertools.takewhile(bool, accepted))))
    assert expected_length(rates) == pytest.approx(total, abs=1e-12)
    assert expected_length([*rates, 0.0, math.nan]) == pytest.approx(total, abs=1e-12)  # a depth never offered


@pytest.mark.parametrize(("rate", "c", "k"), [(0.8, 0.05, 7), (0.5, 0.2, 2), (0.95, 0.1, 1)])
def test_speedup_with_a_flat_trunk_is_leviathans(rate, c, k):
    """Leviathan et al. 2211.17192, Theorem 3.8: v(K) in place of v(K+1), c counted K + 1 times."""
    flat = costs([1.0] * (k + 1), c)
    theorem = (1 - rate ** (k + 1)) / ((1 - rate) * (k * c + 1))
    assert expected_speedup(flat, [rate] * k, k) == pytest.approx(theorem)


def test_speedup_uses_its_own_depths():
    """AL of the first K depths only, the pass of K + 1 tokens, o once; baseline decoding has no overhead."""
    each = costs([1.0, 1.5, 4.0], 0.25)
    assert expected_speedup(each, [0.5, 0.5], 1, overhead=0.25) == pytest.approx(1.5 / (1.5 + 0.25 + 0.25))
    assert expected_speedup(each, [0.5, 0.5], 2) == pytest.approx(1.75 / 4.5)
    assert expected_speedup(each, [0.5, 0.5], 0, overhead=9) == 1


def test_best_is_the_maximum_and_may_be_zero():
    """The best K is also compared with baseline decoding."""
    each = costs([1.0, 1.1, 1.2, 3.0], 0.1)
    assert best_k(each, [0.9, 0.9, 0.9]) == 2
    assert best_k(each, [0.1, 0.1, 0.1]) == 0
    assert best_k(each, [0.9, 0.9, 0.9], overhead=5) == 0


def test_break_even_is_where_speed_up_is_one():
    """For K = 1 it is v(2) + c - 1; for others the speedup there is 1; None where even certainty does not pay."""
    rng = random.Random(0)
    for k in range(1, 6):
        each = costs([1.0, *sorted(1 + 0.2 * k * rng.random() for _ in range(k))], 0.3 * rng.random())
        found = break_even(each, k, overhead=0.1)
        assert expected_speedup(each, [found] * k, k, overhead=0.1) == pytest.approx(1)
    assert break_even(costs([1, 1.2], 0.1), 1) == pytest.approx(0.3)
    assert break_even(costs([1, 1.9], 0.2), 1) is None


def test_uniform_rate_inverts_length():
    assert uniform_rate(expected_length([0.7] * 5), 5) == pytest.approx(0.7)
    assert uniform_rate(2.01, 1) is None


@pytest.mark.parametrize("values", [[3.0], [1.0, 4.0], [5.0, 1.0, 2.0, 9.0, 4.0]])
def test_spread_is_the_quartiles(values):
    found = Spread.of(values)
    assert (found.low, found.median, found.high) == pytest.approx(tuple(np.percentile(values, [25, 50, 75])))
    assert found.num == len(values)
    assert Spread.of([]).as_record() == {"num": 0, "median": None, "low": None, "high": None}  # NaN is no JSON


@pytest.mark.more
def test_a_home_that_cannot_be_written_is_no_warning(tmp_path):
    """For matplotlib, which takes a temporary folder for its cache there."""
    code = "from nextn.stats import plots; from nextn.stats.intervals import Estimate; "
    code += "plots.curves(plots.Path('a.png'), {'all': [Estimate(1.5, 1.2, 1.8)]})"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG_"))}
    env |= {"HOME": os.devnull, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.stderr, done.returncode, (tmp_path / "a.png").exists()) == ("", 0, True)


def test_more_rows_than_colors(tmp_path):
    plots.curves(tmp_path / "a.png", {str(row): [Estimate(1.5, 1.2, 1.8)] for row in range(30)})
    assert (tmp_path / "a.png").exists()


def test_a_figure_on_a_full_disk(tmp_path, monkeypatch):
    """The picture that is there stays, and nothing half-written is left."""
    draw = partial(plots.curves, tmp_path / "a.png", {"all": [Estimate(1.5, 1.2, 1.8)]})
    draw()
    before = (tmp_path / "a.png").read_bytes()

    def full(figure, path):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(ConfigError, match=r"a\.png: cannot be written: No space left"):
        draw()
    assert [each.read_bytes() for each in tmp_path.iterdir() if each.is_file()] == [before]
