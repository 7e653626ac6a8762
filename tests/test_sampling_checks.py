"""The tests of sampled text: their false alarms are as rare as stated, and they find what they say they would."""

import numpy as np
import pytest

from nextn.verify_checks.sampling_checks import calibrate, combine, compare, count_table, holm, position_tables

PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def texts(rng, probs, num, length=4):
    return [tuple(row) for row in rng.choice(len(probs), p=probs, size=(num, length)).tolist()]


def test_tables():
    """The end of a text is a token of its own; counts are per text."""
    tables = position_tables([(1, 2), (1,), (3, 2)], [0, 1])
    assert tables[0].tolist() == [[1, 0], [1, 0], [0, 1]]
    assert tables[1].tolist() == [[1, 0], [0, 1], [1, 0]]
    assert count_table([["a", "b", "a"], [], ["b"]]).tolist() == [[2, 1], [0, 0], [0, 1]]


@pytest.mark.more
def test_equal_distributions_give_even_p_values():
    """p below x in a share x of runs, also where tokens of one text are all the same, as whole texts are exchanged."""
    rng = np.random.default_rng(0)
    p_values = []
    for seed in range(120):
        rows = [(row[0],) * 4 for row in texts(rng, PROBS, 40)]
        p_values.append(compare(position_tables(rows, range(4)), 20, level=0.05, seed=seed).p)
    assert 0.005 <= np.mean(np.array(p_values) <= 0.05) <= 0.11
    assert 0.4 <= np.mean(p_values) <= 0.6


def test_a_sharpened_distribution_is_found():
    rng = np.random.default_rng(1)
    sharp = PROBS**2 / (PROBS**2).sum()
    found = compare(position_tables(texts(rng, PROBS, 60) + texts(rng, sharp, 60), range(4)), 60, level=0.01, seed=0)
    assert found.p < 0.003
    assert found.power(0.01) > 0.8


def test_place_of_the_difference():
    """Only the third token differs."""
    rng = np.random.default_rng(2)
    ones, others = texts(rng, PROBS, 60), [(a, b, 0, d) for a, b, _, d in texts(rng, PROBS, 60)]
    found = compare(position_tables(ones + others, range(4)), 60, level=0.01, seed=0)
    assert (found.worst, found.p < 0.01) == (2, True)
    assert 0.4 < found.distance < 0.8


def test_prompts_together_find_more():
    """A shift that no prompt shows alone; and prompts of one distribution together show none."""
    rng = np.random.default_rng(6)
    mild = PROBS**1.5 / (PROBS**1.5).sum()
    parts = [compare(position_tables(texts(rng, PROBS, 60) + texts(rng, mild, 60), range(4)), 60, level=0.01, seed=seed)
             for seed in range(12)]  # fmt: skip
    found = combine(parts)
    assert found.p < 0.003 < min(part.p for part in parts)
    assert found.power(0.01) >= max(part.power(0.01) for part in parts)
    alike = [
        compare(position_tables(texts(rng, PROBS, 120), range(4)), 60, level=0.01, seed=seed) for seed in range(12)
    ]
    assert combine(alike).p > 0.05


def test_power_is_what_happens():
    """The stated power against simulated runs of the sharpened distribution."""
    rng = np.random.default_rng(3)
    sharp = PROBS**2 / (PROBS**2).sum()
    stated = compare(position_tables(texts(rng, PROBS, 60, 1), [0]), 30, level=0.05, seed=0).power(0.05)
    hits = [
        compare(position_tables(texts(rng, PROBS, 30, 1) + texts(rng, sharp, 30, 1), [0]), 30, level=0.05, seed=seed).p
        <= 0.05
        for seed in range(100)
    ]
    assert np.mean(hits) == pytest.approx(stated, abs=0.2)


def test_holm():
    """Each p against level / how many are left, in order; the first that passes ends the search."""
    assert holm([0.001, 0.04, 0.02], 0.05) == [True, True, True]
    assert holm([0.03, 0.04, 0.02], 0.05) == [False, False, False]
    assert holm([0.2, 0.001, 0.03], 0.05) == [False, True, False]
    assert holm([], 0.05) == []


def test_calibrated():
    rng = np.random.default_rng(4)
    chances = rng.uniform(0.2, 0.9, 400)
    right = [(bool(rng.random() < chance), float(chance)) for chance in chances]
    found = calibrate(right, level=0.01)
    assert found.p > 0.01
    assert found.num == 400
    assert found.expected == pytest.approx(chances.sum())
    greedy = [(top or rng.random() < 0.3, chance) for top, chance in right]
    assert calibrate(greedy, level=0.01).p < 1e-4
    assert 0.05 < found.smallest < 0.12


def test_calibrated_false_alarms():
    rng = np.random.default_rng(5)
    p_values = [calibrate([(bool(rng.random() < 0.6), 0.6) for _ in range(100)], level=0.05).p for _ in range(400)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_certain_samples_show_nothing():
    assert calibrate([(True, 0.999)] * 1000, level=0.01) is None
    assert calibrate([], level=0.01) is None
