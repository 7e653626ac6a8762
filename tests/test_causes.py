"""Ratios of likelihoods mean what they say: on simulated texts that are alike inside and differ between themselves."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from nextn.errors import ConfigError
from nextn.measuring.causes import (
    FINE,
    NUMERICS,
    Cause,
    _beta_binomial,
    alike,
    apart,
    chi_square_above,
    joined,
    named,
    ranked,
)
from nextn.measuring.hypotheses import LEAST_WORKLOAD, UNKNOWN_WORKLOAD, Expected, Observed

# Half of what is offered is kept, in every text alike.
EVEN = Expected("even", [[100.0, 50.0]] * 5, [[50.0, 25.0]] * 5)
ONE_SIGMA = 0.3173
RIGHT, NEAR, FAR = (0.7, 0.6, 0.5, 0.4), (0.66, 0.56, 0.46, 0.36), (0.7, 0.3, 0.3, 0.3)


def texts(rng, rates, count, *, rounds=12, spread=0.8, shift=0.0):
    """(offered, kept) [count, depths]: log-odds of all depths of a text move together."""
    odds = np.log(rates) - np.log1p(-np.array(rates)) + rng.normal(shift, spread, (count, 1))
    left, offered, kept = np.full(count, rounds), [], []
    for column in (1 / (1 + np.exp(-odds))).T:
        offered.append(left)
        left = rng.binomial(left, column)
        kept.append(left)
    return np.array(offered).T, np.array(kept).T


def expected(rng, name, rates, count, **settings):
    return Expected(name, *(side.tolist() for side in texts(rng, rates, count, **settings)))


def seen(rng, rates, count, *, as_length=False, **settings):
    offered, kept = (side.sum(0) for side in texts(rng, rates, count, **settings))
    if as_length:
        return Observed(length=1 + kept.sum() / offered[0], rounds=int(offered[0]))
    return Observed(tuple(map(int, offered)), tuple(map(int, kept)))


@pytest.mark.parametrize("as_length", [False, True])
@pytest.mark.parametrize(("num_ref", "num_engine"), [(100, 100), (30, 300), (60, 15)])
def test_ratios_are_calibrated(num_ref, num_engine, as_length):
    """A wrong hypothesis is R times likelier than the right one no more often than once in R; the right one's misfit is
    uniform. Taking rounds as independent, or depths, or the reference as exact, fails this."""
    rng, ratios, misfits = np.random.default_rng(num_ref), [], []
    for _ in range(300):
        right, near = expected(rng, FINE, RIGHT, num_ref), expected(rng, "near", NEAR, num_ref)
        found = {each.name: each for each in ranked(seen(rng, RIGHT, num_engine, as_length=as_length), [right, near])}
        ratios.append(found["near"].over(found[FINE]))
        misfits.append(found[FINE].misfit)
    assert np.mean(np.array(ratios) > 10) < 0.1
    assert np.mean(np.array(ratios) > 100) < 0.03
    assert 0.005 < np.mean(np.array(misfits) < 0.05) < 0.1


def test_the_planted_one_is_found():
    rng = np.random.default_rng(0)
    hypotheses = [expected(rng, name, rates, 100) for name, rates in ((FINE, RIGHT), ("far", FAR))]
    for name, rates in ((FINE, RIGHT), ("far", FAR)):
        causes = ranked(seen(rng, rates, 100), hypotheses)
        assert causes[0].name == name
        assert named(causes) == (name,)
        assert causes[0].ratio == 1
        assert causes[1].ratio < 1e-3
        assert causes[0].length == pytest.approx(1 + sum(np.cumprod(causes[0].rates)), abs=0.02)


def test_more_rounds_tell_more():
    rng = np.random.default_rng(1)
    one, other = (expected(rng, name, rates, 200) for name, rates in (("one", RIGHT), ("other", NEAR)))
    few, many = seen(rng, RIGHT, 5), seen(rng, RIGHT, 400)
    assert 1 <= apart(few, one, other) < apart(many, one, other)
    twin, far = replace(one, name="twin"), expected(rng, "far", FAR, 200)
    assert alike("one", (many, [one, twin, far])) == ("twin",)
    assert alike("far", (many, [one, twin, far])) == ()
    assert apart(many, far, one) > 1e6
    # Two observations tell what one does not.
    middling = seen(rng, RIGHT, 30)
    assert alike("one", (middling, [one, other])) == ("other",)
    assert alike("one", *[(middling, [one, other])] * 12) == ()


def test_none_of_them():
    """What fits nothing is not given the name of what is nearest; what is a little off stays fine."""
    rng = np.random.default_rng(2)
    hypotheses = [expected(rng, name, rates, 200) for name, rates in ((FINE, RIGHT), ("far", FAR))]
    causes = ranked(seen(rng, (0.3, 0.8, 0.8, 0.8), 200), hypotheses)
    assert named(causes) == ()
    assert causes[0].misfit < 1e-6
    assert named(ranked(seen(rng, (0.72, 0.61, 0.5, 0.4), 100), hypotheses)) == (FINE,)


def test_a_little_likelier_than_fine_is_fine():
    rng = np.random.default_rng(3)
    hypotheses = [expected(rng, FINE, RIGHT, 40), expected(rng, "near", NEAR, 40)]
    causes = ranked(seen(rng, NEAR, 10), hypotheses)
    assert named(causes) == (FINE,)


def test_another_workload_is_no_fault():
    """Other prompts move all depths together: by as much as domains differ that is fine; with the same prompts not."""
    rng = np.random.default_rng(4)
    parts = [texts(rng, RIGHT, 40, shift=shift) for shift in (-0.8, 0.0, 0.9)]
    domains = [name for name in "abc" for _ in range(40)]
    offered, kept = (np.concatenate([part[side] for part in parts]).tolist() for side in (0, 1))
    fine = Expected(FINE, offered, kept, domains)
    near = replace(fine, name="near", kept=(np.array(kept) * 0.7).tolist())
    harder = seen(rng, RIGHT, 200, shift=-0.9)
    assert named(ranked(harder, [fine, near], workload=True)) == (FINE,)
    assert named(ranked(harder, [fine, near])) != (FINE,)
    assert 0.4 < fine.workload[0] < 1.5
    assert (replace(fine, domains=()).workload == UNKNOWN_WORKLOAD).all()


@pytest.mark.parametrize("as_length", [False, True])
def test_chances_are_less_noisy_than_draws(as_length):
    """Expected counts instead of drawn ones: the engine still draws, so its counts vary by more than the chances do."""
    rng, misfits = np.random.default_rng(5), []
    for _ in range(500):
        offered = np.full((600, 1), 10.0)
        chances = 1 / (1 + np.exp(-rng.normal(0.5, 1.0, (660, 1))))
        fine = Expected(FINE, offered.tolist(), (offered * chances[60:]).tolist(), chances=True)
        kept = int(rng.binomial(10, chances[:60]).sum())
        counted = Observed(length=1 + kept / 600, rounds=600) if as_length else Observed((600,), (kept,))
        misfits.append(ranked(counted, [fine])[0].misfit)
    assert np.mean(np.array(misfits) < 0.01) < 0.014


def test_two_temperatures_add_up():
    rng = np.random.default_rng(6)
    parts = [
        ranked(seen(rng, RIGHT, 60), [expected(rng, FINE, RIGHT, 60), expected(rng, "far", FAR, 60)]) for _ in "ab"
    ]
    both = joined(parts)
    assert both[0].log_likelihood == pytest.approx(sum(part[0].log_likelihood for part in parts))
    assert [each.name for each in both] == [FINE, "far"]
    assert joined([parts[0], parts[1][:1]])[0].name == parts[1][0].name


def cause(name, log_likelihood, misfit=0.5):
    return Cause(name, log_likelihood, misfit, (), 1.0)


@pytest.mark.parametrize(
    ("causes", "names"),
    [
        ([cause("a", 0), cause(FINE, -math.log(50))], (FINE,)),
        ([cause("a", 0), cause("b", -math.log(5)), cause("c", -math.log(20)), cause(FINE, -10)], ("a", "b")),
        ([cause("a", 0, 1e-6), cause(FINE, -10)], ()),
        ([cause(FINE, 0, 1e-6), cause("a", -1)], ()),
        ([cause("a", 0), cause(FINE, -1, 1e-6)], ("a",)),  # hardly less likely, and still far off
        ([cause("a", 0), cause("b", -10)], ("a",)),
    ],
)
def test_who_is_named(causes, names):
    assert named(causes) == names


def test_the_worst_fit_of_several():
    """Of so many chances to be far off one will be; and no ratio is too large for a float."""
    parts = [[cause("a", 0, 0.2)], [cause("a", -9000, 0.9)]]
    assert joined(parts)[0].misfit == pytest.approx(0.4)
    assert joined([[cause("a", 0, 0.9)]] * 2)[0].misfit == 1
    assert [each.name for each in joined([[cause("a", -5), cause("b", -1)], [cause("a", -5)]])] == ["a"]
    assert 1e290 < parts[0][0].over(parts[1][0]) < math.inf


@pytest.mark.parametrize("offered", [1, 2, 5, 40])
@pytest.mark.parametrize("effect", [1.0, 1.5])
def test_the_law_of_counts(offered, effect):
    """It adds up to 1, and kept / offered has the variance that was asked for, as far as so few rounds can have it."""
    share, rate = min(0.999, effect / offered), 0.3
    law = np.exp([_beta_binomial(kept, offered, rate, share) for kept in range(offered + 1)])
    shares = np.arange(offered + 1) / offered
    assert law.sum() == pytest.approx(1)
    assert law @ shares == pytest.approx(rate)
    assert law @ (shares - rate) ** 2 == pytest.approx((1 if offered == 1 else share) * rate * (1 - rate), rel=1e-3)


def test_two_rounds_vary_no_more_than_two_can():
    """One text tells little, yet the engine's counts have a law."""
    one = Expected("one", [[9.0]], [[5.0]])
    found = [ranked(Observed((2,), (kept,)), [one])[0].log_likelihood for kept in range(3)]
    assert sum(map(math.exp, found)) == pytest.approx(1)


def test_the_law_of_lengths():
    """Its variance by hand: kept drafts X of a round have E X = 3/4, E X^2 = 5/4; a step of the log-odds of a_1 moves
    E X by 3/8, of a_2 by 1/8."""
    within, numerics, workload = 5 / 4 - 9 / 16, (9 / 64 + 1 / 64) * NUMERICS**2, (UNKNOWN_WORKLOAD / 2) ** 2
    for rounds, other in ((10**12, False), (100, False), (10**12, True)):
        scale = math.sqrt(within / rounds + numerics + workload * other)
        (found,) = ranked(Observed(length=1.75 + scale, rounds=rounds), [EVEN], fresh=0.0, workload=other)
        assert found.misfit == pytest.approx(ONE_SIGMA, abs=1e-3)
        assert found.log_likelihood == pytest.approx(stats.t.logpdf(scale, 4, scale=scale), abs=1e-3)


def test_counts_of_the_same_text_vary_by_chance_alone():
    """fresh = 0: by the binomial of the engine's rounds, whatever differs between texts."""
    assert ranked(Observed((100,), (55,)), [EVEN], fresh=0.0)[0].misfit == pytest.approx(ONE_SIGMA, abs=0.01)
    uneven = Expected("uneven", [[1000.0]] * 40, [[900.0], [100.0]] * 20)
    same, other = (ranked(Observed((100,), (65,)), [uneven], fresh=fresh)[0].misfit for fresh in (0.0, 1.0))
    assert same < 0.003
    assert other > 0.5


def test_apart_by_the_rounds_that_reach_each_depth():
    other = Expected("other", EVEN.offered, [[50.0, 5.0]] * 5)
    right, wrong = ranked(Observed((800, 400), (400, 200)), [EVEN, other])
    assert apart(Observed((800, 800), (0, 0)), EVEN, other) == pytest.approx(right.over(wrong))


def test_design_effects():
    """By hand: residuals of 3 in two texts of 10 rounds; widened as Student's t is."""
    wide = (stats.t.ppf(0.975, 1) / stats.norm.ppf(0.975)) ** 2
    two = Expected("two", [[10.0]] * 2, [[8.0], [2.0]])
    assert two.effects[0] == pytest.approx(2 * (9 + 9) / (20 / 4) * wide, rel=1e-3)
    level = replace(two, kept=[[5.0], [5.0]])
    assert level.effects[0] == pytest.approx(wide, rel=1e-3)  # counts are never less noisy than draws
    assert replace(level, chances=True).effects[0] == 0  # expectations are
    assert (Expected("one", [[9.0, 5.0]], [[5.0, 2.0]]).weights < [9, 5]).all()


def test_rates_of_few_rounds():
    """Half a round on each side; expectations, which vary little, count as no more rounds than they are of."""
    sure = Expected("sure", [[9.0]] * 5, [[8.9]] * 5, chances=True)
    assert sure.rates[0] == pytest.approx((44.5 + 0.5) / 46)
    assert Expected("rare", [[0.25]] * 2, [[0.125]] * 2, chances=True).raw[0] == 0.5
    nothing = Expected("nothing", [[0.0]] * 5, [[0.0]] * 5)
    assert ranked(Observed(length=1.5), [nothing])[0].misfit > 0.5  # it says nothing, so nothing contradicts it


def test_domains_differ_by_more_than_chance():
    domains = [name for name in "ab" for _ in range(5)]
    level = Expected("level", [[4.0]] * 10, [[1.0], [2.0], [1.0], [2.0], [2.0], [3.0], [2.0], [3.0], [2.0], [2.0]])
    assert replace(level, domains=domains).workload[0] == LEAST_WORKLOAD
    assert replace(level, domains=["a"] * 10).workload[0] == UNKNOWN_WORKLOAD


def test_the_same_texts_are_told_apart_sooner():
    """fresh = 0: neither side varies between texts, so fewer rounds tell."""
    rng = np.random.default_rng(7)
    fine, near = expected(rng, FINE, RIGHT, 30), expected(rng, "near", NEAR, 30)
    observed = Observed(tuple(map(int, fine.counts[0].sum(0))), tuple(map(int, fine.counts[1].sum(0))))
    loose, tight = (ranked(observed, [fine, near], fresh=fresh) for fresh in (1.0, 0.0))
    assert tight[1].ratio < loose[1].ratio
    assert tight[0].name == FINE


def test_edges():
    """Nothing kept, nothing offered, all kept, one text: figures, never nan; counts that cannot be are refused."""
    none = Expected("none", [[9.0, 0.0]] * 5, [[0.0, 0.0]] * 5)
    all_ = Expected("all", [[9.0, 9.0]] * 5, [[9.0, 9.0]] * 5)
    alone = Expected("alone", [[9.0, 5.0]], [[5.0, 2.0]])
    dead = Expected("dead", [[0.0, 0.0]] * 5, [[0.0, 0.0]] * 5)
    for observed in (
        Observed((100, 0), (0, 0)),
        Observed((2, 1), (1, 1)),
        Observed((100, 100), (100, 100)),
        Observed((0, 0), (0, 0)),
        Observed(length=1.0),
        Observed(length=1.0, rounds=10**7),
        Observed((10**8, 10**7), (10**7, 10**6)),
    ):
        causes = ranked(observed, [none, all_, alone, dead], workload=True)
        assert all(math.isfinite(each.log_likelihood) and 0 <= each.misfit <= 1 + 1e-9 for each in causes)
    assert ranked(Observed((100, 0), (0, 0)), [all_, none])[0].name == "none"
    assert ranked(Observed(length=1.0, rounds=100), [all_, none])[0].name == "none"
    assert ranked(Observed((100, 100), (100, 100)), [none, all_])[0].name == "all"
    with pytest.raises(ConfigError, match="kept <= offered"):
        Observed((3,), (4,))
    with pytest.raises(ConfigError, match="kept <= offered"):
        Observed((3,), (-1,))
    with pytest.raises(ConfigError, match="nothing to compare"):
        Observed()
    with pytest.raises(ConfigError, match="engine drafts 3"):
        ranked(Observed((9, 9, 9), (9, 9, 9)), [none])
    with pytest.raises(ConfigError, match="do not belong together"):
        Expected("x", [[1.0, 1.0]], [[1.0]])
    with pytest.raises(ConfigError, match="do not belong together"):
        replace(EVEN, domains=["x"])


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8])
def test_chi_square(freedom):
    for value in (0.0, 0.5, 3.0, 20.0, 60.0):
        assert chi_square_above(value, freedom) == pytest.approx(stats.chi2.sf(value, freedom), rel=1e-9, abs=1e-15)
