"""Saturation of AL over K: published curves, texts that are too few, and how often noise is taken for saturation."""

import math

import numpy as np
import pytest

from nextn.evaluate.acceptance_curve import MIN_INCREASE, AcceptanceCurve, AcceptanceFigures

# AL at K = 1..8 as InferenceX publishes them (golden_al_distribution, 2026-08): DeepSeek-V4-Pro with thinking, where
# 2.55 to 2.58 at K >= 5 are taken as equal, and Qwen3.5-397B-A17B with thinking.
DEEPSEEK_V4 = (1.79, 2.27, 2.49, 2.54, 2.55, 2.555, 2.557, 2.558)
QWEN35 = (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21)


def simulated(survival, *, texts=40, length=300, seed=0, largest=8):
    """Counts of rounds through texts whose positions accept depth k with P(all of 1..k) = survival[k - 1]."""
    rng = np.random.default_rng(seed)
    accepted = [(rng.random(length)[:, None] < np.clip(np.array(survival) * shift, 0, 1)).sum(1).tolist()
                for shift in rng.normal(1, 0.05, texts)]  # fmt: skip
    return AcceptanceCurve(tuple([rounds_of(text, k) for text in accepted] for k in range(1, largest + 1)))


def rounds_of(accepted, k):
    """(num_drafted, num_accepted) by depth of rounds of K = k that follow each other through a text."""
    counts, position = [0.0] * (k + 1), 0
    while position < len(accepted):
        taken = min(accepted[position], k)
        for depth in range(taken + 1):
            counts[depth] += 1
        position += taken + 1
    return counts[:-1], counts[1:]


def survival_of(lengths):
    return np.maximum(np.diff([1.0, *lengths]), 0).tolist()


@pytest.mark.more
def test_published_curves():
    """One saturates at K = 3, because acceptance falls with depth; the other one does not saturate."""
    found = simulated(survival_of(DEEPSEEK_V4))
    assert (found.outcome, found.saturated_at) == ("saturates", 3)
    assert found.decline.high < 0
    assert "acceptance falls with depth (a_1 = 0.80, 0.21 beyond" in found.summary
    assert "depths = 8" in found.summary
    other = simulated(survival_of(QWEN35), texts=80)
    assert (other.outcome, other.saturated_at) == ("increases", None)
    assert "does not saturate up to K = 8" in other.summary


def test_one_acceptance_rate_at_every_depth():
    """AL is bounded by 1 / (1 - a): deeper training would not change that, and is not proposed."""
    found = simulated([0.5**k for k in range(1, 9)])
    assert found.outcome == "saturates"
    assert not found.decline.high < 0
    assert "only a higher acceptance rate" in found.summary


def test_layers_for_the_depths_that_are_accepted():
    curve = simulated(survival_of(DEEPSEEK_V4))
    assert "its 3 MTP layers" in AcceptanceCurve(curve.counts, num_mtp_layers=3).summary


def test_a_head_that_accepts_nothing():
    """Counts without variance have an interval all the same: few rounds do not decide."""
    assert simulated([0.0] * 8).saturated_at == 0
    few = simulated([0.0] * 8, texts=3, length=10)
    assert few.outcome == "inconclusive"
    assert few.increases[-1].high > MIN_INCREASE


def test_few_texts_decide_nothing():
    for texts in (1, 2):
        found = simulated(survival_of(DEEPSEEK_V4), texts=texts, length=80, seed=3)
        assert found.outcome == "inconclusive", found.summary
        assert "inconclusive" in found.summary


@pytest.mark.slow
def test_noise_is_rarely_taken_for_saturation():
    """Each draft of a head adds a little more than the limit: at most one run in 20 says that it saturates."""
    rising = [0.6, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05]
    rising.append(1.2 * MIN_INCREASE * (1 + sum(rising)))
    runs = [simulated(rising, texts=20, seed=seed) for seed in range(100)]
    assert sum(run.saturated_at is not None for run in runs) <= 0.05 * len(runs)


def test_few_texts_that_agree_have_an_interval():
    """Their rounds alone are uncertain: AL at K = 1 is 1 + a_1, and so is its interval, about."""
    twins = [([200.0], [128.0])] * 2
    figures = AcceptanceFigures.of(twins, temperature=0.0, rule="greedy", k=1, domain="all")
    assert figures.length.value == pytest.approx(1.64)
    error = 12.706 * math.sqrt(0.64 * 0.36 / 400)
    assert figures.length.high == pytest.approx(1.64 + error, abs=1e-3)
    many = AcceptanceFigures.of(twins * 3, temperature=0.0, rule="greedy", k=1, domain="all")
    assert many.length.high == pytest.approx(many.length.value)  # of more texts, their spread counts
