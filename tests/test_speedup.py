"""Formulas against enumeration, published formulas and numpy."""

import itertools
import math
import random

import numpy as np
import pytest

from nextn.stats.acceptance import expected_length
from nextn.stats.speedup import Costs, Spread, best_k, break_even, expected_speedup, uniform_rate


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
