"""Ratios of likelihoods are calibrated, on simulated texts; fine is said only where lost drafts would show."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from nextn.cli.diagnose import _EXIT_CODES, _show_diagnosis
from nextn.engines.counters import FIRST_TOKENS, Counters
from nextn.errors import ConfigError, EngineError
from nextn.evaluate.diagnose import INCONCLUSIVE, Diagnosis
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.hypotheses import (
    MIN_WORKLOAD_SPREAD,
    UNKNOWN_WORKLOAD_SPREAD,
    ExpectedCounts,
    ObservedCounts,
    observed_counts,
)
from nextn.evaluate.likelihoods import (
    NO_FAULT,
    NUMERICS,
    Cause,
    Evidence,
    _beta_binomial,
    can_decide,
    chi_square_above,
    combine_causes,
    expected_ratio,
    indistinguishable_from,
    name_causes,
    needed_evidence,
    rank_causes,
)
from nextn.evaluate.observed_case import ObservedCase
from nextn.evaluate.workload import ReferencePlan

# Half of the drafts are accepted, equally in every text.
EVEN = ExpectedCounts("even", [[100.0, 50.0]] * 5, [[50.0, 25.0]] * 5)
ONE_SIGMA = 0.3173
RIGHT, NEAR, FAR = (0.7, 0.6, 0.5, 0.4), (0.66, 0.56, 0.46, 0.36), (0.7, 0.3, 0.3, 0.3)


def texts(rng, rates, count, *, rounds=12, spread=0.8, shift=0.0):
    """(drafted, accepted) [count, depths]: the log-odds of all depths of a text share one offset."""
    odds = np.log(rates) - np.log1p(-np.array(rates)) + rng.normal(shift, spread, (count, 1))
    left, offered, kept = np.full(count, rounds), [], []
    for column in (1 / (1 + np.exp(-odds))).T:
        offered.append(left)
        left = rng.binomial(left, column)
        kept.append(left)
    return np.array(offered).T, np.array(kept).T


def expected(rng, name, rates, count, **settings):
    return ExpectedCounts(name, *(side.tolist() for side in texts(rng, rates, count, **settings)))


def seen(rng, rates, count, *, as_length=False, **settings):
    offered, kept = (side.sum(0) for side in texts(rng, rates, count, **settings))
    if as_length:
        return ObservedCounts(length=1 + kept.sum() / offered[0], rounds=int(offered[0]))
    return ObservedCounts(tuple(map(int, offered)), tuple(map(int, kept)))


@pytest.mark.more
@pytest.mark.parametrize("as_length", [False, True])
@pytest.mark.parametrize(("num_ref", "num_engine"), [(100, 100), (30, 300), (60, 15)])
def test_ratios_are_calibrated(num_ref, num_engine, as_length):
    """A wrong hypothesis is R times likelier than the right one no more often than once in R; the right one's p-value
    is uniform. Taking rounds as independent, or depths, or the reference as exact, fails this."""
    rng, ratios, p_values = np.random.default_rng(num_ref), [], []
    for _ in range(300):
        right, near = expected(rng, NO_FAULT, RIGHT, num_ref), expected(rng, "near", NEAR, num_ref)
        found = {
            each.name: each
            for each in rank_causes(Evidence(seen(rng, RIGHT, num_engine, as_length=as_length), [right, near]))
        }
        ratios.append(found["near"].ratio_to(found[NO_FAULT]))
        p_values.append(found[NO_FAULT].p_value)
    assert np.mean(np.array(ratios) > 10) < 0.1
    assert np.mean(np.array(ratios) > 100) < 0.03
    assert 0.005 < np.mean(np.array(p_values) < 0.05) < 0.1


def test_the_true_one_is_found():
    rng = np.random.default_rng(0)
    hypotheses = [expected(rng, name, rates, 100) for name, rates in ((NO_FAULT, RIGHT), ("far", FAR))]
    for name, rates in ((NO_FAULT, RIGHT), ("far", FAR)):
        causes = rank_causes(Evidence(seen(rng, rates, 100), hypotheses))
        assert causes[0].name == name
        assert name_causes(causes) == (name,)
        assert causes[0].ratio == 1
        assert causes[1].ratio < 1e-3
        assert causes[0].length == pytest.approx(1 + sum(np.cumprod(causes[0].rates)), abs=0.02)


def test_more_rounds_separate_more():
    rng = np.random.default_rng(1)
    one, other = (expected(rng, name, rates, 200) for name, rates in (("one", RIGHT), ("other", NEAR)))
    few, many = seen(rng, RIGHT, 5), seen(rng, RIGHT, 400)
    assert 1 <= expected_ratio(Evidence(few), one, other) < expected_ratio(Evidence(many), one, other)
    twin, far = replace(one, name="twin"), expected(rng, "far", FAR, 200)
    assert indistinguishable_from("one", Evidence(many, [one, twin, far])) == ("twin",)
    assert indistinguishable_from("far", Evidence(many, [one, twin, far])) == ()
    assert expected_ratio(Evidence(many), far, one) > 1e6
    # Several observations separate what one does not.
    middling = seen(rng, RIGHT, 30)
    assert indistinguishable_from("one", Evidence(middling, [one, other])) == ("other",)
    assert indistinguishable_from("one", *[Evidence(middling, [one, other])] * 12) == ()


def test_none_of_them():
    """What fits nothing is not given the name of what is nearest; what is a little off is no fault."""
    rng = np.random.default_rng(2)
    hypotheses = [expected(rng, name, rates, 200) for name, rates in ((NO_FAULT, RIGHT), ("far", FAR))]
    causes = rank_causes(Evidence(seen(rng, (0.3, 0.8, 0.8, 0.8), 200), hypotheses))
    assert name_causes(causes) == ()
    assert causes[0].p_value < 1e-6
    assert name_causes(rank_causes(Evidence(seen(rng, (0.72, 0.61, 0.5, 0.4), 100), hypotheses))) == (NO_FAULT,)


def test_a_little_likelier_is_no_fault():
    rng = np.random.default_rng(3)
    hypotheses = [expected(rng, NO_FAULT, RIGHT, 40), expected(rng, "near", NEAR, 40)]
    causes = rank_causes(Evidence(seen(rng, NEAR, 10), hypotheses))
    assert name_causes(causes) == (NO_FAULT,)


def test_another_workload_is_no_fault():
    """Other prompts may move all depths by as much as domains differ; with the same prompts, that is a fault."""
    rng = np.random.default_rng(4)
    parts = [texts(rng, RIGHT, 40, shift=shift) for shift in (-0.8, 0.0, 0.9)]
    domains = [name for name in "abc" for _ in range(40)]
    offered, kept = (np.concatenate([part[side] for part in parts]).tolist() for side in (0, 1))
    fine = ExpectedCounts(NO_FAULT, offered, kept, domains)
    near = replace(fine, name="near", num_accepted=(np.array(kept) * 0.7).tolist())
    harder = seen(rng, RIGHT, 200, shift=-0.9)
    assert name_causes(rank_causes(Evidence(harder, [fine, near], other_workload=True))) == (NO_FAULT,)
    assert name_causes(rank_causes(Evidence(harder, [fine, near]))) != (NO_FAULT,)
    assert 0.4 < fine.workload_spread[0] < 1.5
    assert (replace(fine, domains=()).workload_spread == UNKNOWN_WORKLOAD_SPREAD).all()


@pytest.mark.more
@pytest.mark.parametrize("as_length", [False, True])
def test_expected_values_are_less_noisy_than_samples(as_length):
    """Expected values instead of sampled counts: the engine still samples, so its counts vary more."""
    rng, p_values = np.random.default_rng(5), []
    for _ in range(500):
        offered = np.full((600, 1), 10.0)
        chances = 1 / (1 + np.exp(-rng.normal(0.5, 1.0, (660, 1))))
        fine = ExpectedCounts(NO_FAULT, offered.tolist(), (offered * chances[60:]).tolist(), is_expectation=True)
        kept = int(rng.binomial(10, chances[:60]).sum())
        counted = ObservedCounts(length=1 + kept / 600, rounds=600) if as_length else ObservedCounts((600,), (kept,))
        p_values.append(rank_causes(Evidence(counted, [fine]))[0].p_value)
    assert np.mean(np.array(p_values) < 0.01) < 0.014


def test_two_temperatures_add_up():
    rng = np.random.default_rng(6)
    parts = [
        rank_causes(Evidence(seen(rng, RIGHT, 60), [expected(rng, NO_FAULT, RIGHT, 60), expected(rng, "far", FAR, 60)]))
        for _ in "ab"
    ]
    both = combine_causes(parts)
    assert both[0].log_likelihood == pytest.approx(sum(part[0].log_likelihood for part in parts))
    assert [each.name for each in both] == [NO_FAULT, "far"]
    assert combine_causes([parts[0], parts[1][:1]])[0].name == parts[1][0].name


def cause(name, log_likelihood, misfit=0.5):
    return Cause(name, log_likelihood, misfit, (), 1.0)


@pytest.mark.parametrize(
    ("causes", "names"),
    [
        ([cause("a", 0), cause(NO_FAULT, -math.log(50))], (NO_FAULT,)),
        ([cause("a", 0), cause("b", -math.log(5)), cause("c", -math.log(20)), cause(NO_FAULT, -10)], ("a", "b")),
        ([cause("a", 0, 1e-6), cause(NO_FAULT, -10)], ()),
        ([cause(NO_FAULT, 0, 1e-6), cause("a", -1)], ()),
        ([cause("a", 0), cause(NO_FAULT, -1, 1e-6)], ("a",)),  # hardly less likely, and still far off
        ([cause("a", 0), cause("b", -10)], ("a",)),
        ([cause("a", 0, 0.0015), cause("b", -1), cause("c", -3), cause(NO_FAULT, -10, 1e-6)], ("b",)),
    ],
)
def test_who_is_named(causes, names):
    assert name_causes(causes) == names


def test_the_worst_fit_of_several():
    """Of this many chances to be far off one will be; and no ratio is too large for a float."""
    parts = [[cause("a", 0, 0.2)], [cause("a", -9000, 0.9)]]
    assert combine_causes(parts)[0].p_value == pytest.approx(0.4)
    assert combine_causes([[cause("a", 0, 0.9)]] * 2)[0].p_value == 1
    assert [each.name for each in combine_causes([[cause("a", -5), cause("b", -1)], [cause("a", -5)]])] == ["a"]
    assert 1e290 < parts[0][0].ratio_to(parts[1][0]) < math.inf


@pytest.mark.parametrize("offered", [1, 2, 5, 40])
@pytest.mark.parametrize("effect", [1.0, 1.5])
def test_distribution_of_counts(offered, effect):
    """It sums to 1, and accepted / drafted has the requested variance, as far as this few rounds allow."""
    share, rate = min(0.999, effect / offered), 0.3
    probs = np.exp([_beta_binomial(kept, offered, rate, share) for kept in range(offered + 1)])
    shares = np.arange(offered + 1) / offered
    assert probs.sum() == pytest.approx(1)
    assert probs @ shares == pytest.approx(rate)
    assert probs @ (shares - rate) ** 2 == pytest.approx((1 if offered == 1 else share) * rate * (1 - rate), rel=1e-3)


def test_two_rounds_vary_no_more_than_two_can():
    """One text gives little information, but the engine's counts have a distribution."""
    one = ExpectedCounts("one", [[9.0]], [[5.0]])
    found = [rank_causes(Evidence(ObservedCounts((2,), (kept,)), [one]))[0].log_likelihood for kept in range(3)]
    assert sum(map(math.exp, found)) == pytest.approx(1)


def test_distribution_of_lengths():
    """Its variance by hand: accepted drafts X of a round have E X = 3/4, E X^2 = 5/4; a step of the log-odds of a_1
    moves E X by 3/8, of a_2 by 1/8."""
    within, numerics, workload = 5 / 4 - 9 / 16, (9 / 64 + 1 / 64) * NUMERICS**2, (UNKNOWN_WORKLOAD_SPREAD / 2) ** 2
    for rounds, other in ((10**12, False), (100, False), (10**12, True)):
        scale = math.sqrt(within / rounds + numerics + workload * other)
        (found,) = rank_causes(
            Evidence(
                ObservedCounts(length=1.75 + scale, rounds=rounds), [EVEN], diverged_share=0.0, other_workload=other
            )
        )
        assert found.p_value == pytest.approx(ONE_SIGMA, abs=1e-3)
        assert found.log_likelihood == pytest.approx(stats.t.logpdf(scale, 4, scale=scale), abs=1e-3)


def test_a_few_rounds_vary_as_one_text_at_most():
    """48 rounds are not a twentieth of a text that varies 20 times as much."""
    uneven = ExpectedCounts("uneven", [[1000.0]] * 40, [[800.0], [400.0]] * 20)
    (found,) = rank_causes(Evidence(ObservedCounts(length=1.02, rounds=48), [uneven]))
    assert found.p_value < 0.02


def test_counts_of_the_same_text_vary_by_chance_alone():
    """diverged_share = 0: by the binomial of the engine's rounds, whatever differs between texts."""
    assert rank_causes(Evidence(ObservedCounts((100,), (55,)), [EVEN], diverged_share=0.0))[0].p_value == pytest.approx(
        ONE_SIGMA, abs=0.01
    )
    uneven = ExpectedCounts("uneven", [[1000.0]] * 40, [[900.0], [100.0]] * 20)
    same, other = (
        rank_causes(Evidence(ObservedCounts((100,), (65,)), [uneven], diverged_share=fresh))[0].p_value
        for fresh in (0.0, 1.0)
    )
    assert same < 0.003
    assert other > 0.5


def test_apart_by_the_rounds_that_reach_each_depth():
    other = ExpectedCounts("other", EVEN.num_drafted, [[50.0, 5.0]] * 5)
    right, wrong = rank_causes(Evidence(ObservedCounts((800, 400), (400, 200)), [EVEN, other]))
    assert expected_ratio(Evidence(ObservedCounts((800, 800), (0, 0))), EVEN, other) == pytest.approx(
        right.ratio_to(wrong)
    )


def test_design_effects():
    """By hand: residuals of 3 in two texts of 10 rounds; widened as Student's t is."""
    wide = (stats.t.ppf(0.975, 1) / stats.norm.ppf(0.975)) ** 2
    two = ExpectedCounts("two", [[10.0]] * 2, [[8.0], [2.0]])
    assert two.design_effects[0] == pytest.approx(2 * (9 + 9) / (20 / 4) * wide, rel=1e-3)
    level = replace(two, num_accepted=[[5.0], [5.0]])
    assert level.design_effects[0] == pytest.approx(wide, rel=1e-3)  # counts are never less noisy than binomial samples
    assert replace(level, is_expectation=True).design_effects[0] == 0  # expectations are
    assert (ExpectedCounts("one", [[9.0, 5.0]], [[5.0, 2.0]]).effective_rounds < [9, 5]).all()


def test_rates_of_few_rounds():
    """Half a round on each side; expectations, which vary little, count as no more rounds than they are of."""
    sure = ExpectedCounts("sure", [[9.0]] * 5, [[8.9]] * 5, is_expectation=True)
    assert sure.rates[0] == pytest.approx((44.5 + 0.5) / 46)
    assert ExpectedCounts("rare", [[0.25]] * 2, [[0.125]] * 2, is_expectation=True).raw_rates[0] == 0.5
    nothing = ExpectedCounts("nothing", [[0.0]] * 5, [[0.0]] * 5)
    assert (
        rank_causes(Evidence(ObservedCounts(length=1.5), [nothing]))[0].p_value > 0.5
    )  # it expects nothing, so nothing contradicts it


def test_domains_differ_by_more_than_chance():
    domains = [name for name in "ab" for _ in range(5)]
    level = ExpectedCounts(
        "level", [[4.0]] * 10, [[1.0], [2.0], [1.0], [2.0], [2.0], [3.0], [2.0], [3.0], [2.0], [2.0]]
    )
    assert replace(level, domains=domains).workload_spread[0] == MIN_WORKLOAD_SPREAD
    assert replace(level, domains=["a"] * 10).workload_spread[0] == UNKNOWN_WORKLOAD_SPREAD


def test_the_same_texts_separate_sooner():
    """diverged_share = 0: neither side varies between texts, so fewer rounds are needed."""
    rng = np.random.default_rng(7)
    fine, near = expected(rng, NO_FAULT, RIGHT, 30), expected(rng, "near", NEAR, 30)
    observed = ObservedCounts(tuple(map(int, fine.counts[0].sum(0))), tuple(map(int, fine.counts[1].sum(0))))
    loose, tight = (rank_causes(Evidence(observed, [fine, near], diverged_share=fresh)) for fresh in (1.0, 0.0))
    assert tight[1].ratio < loose[1].ratio
    assert tight[0].name == NO_FAULT


def test_edges():
    """Nothing accepted, nothing drafted, all accepted, one text: never nan; impossible counts are refused."""
    none = ExpectedCounts("none", [[9.0, 0.0]] * 5, [[0.0, 0.0]] * 5)
    all_ = ExpectedCounts("all", [[9.0, 9.0]] * 5, [[9.0, 9.0]] * 5)
    alone = ExpectedCounts("alone", [[9.0, 5.0]], [[5.0, 2.0]])
    dead = ExpectedCounts("dead", [[0.0, 0.0]] * 5, [[0.0, 0.0]] * 5)
    for observed in (
        ObservedCounts((100, 0), (0, 0)),
        ObservedCounts((2, 1), (1, 1)),
        ObservedCounts((100, 100), (100, 100)),
        ObservedCounts((0, 0), (0, 0)),
        ObservedCounts(length=1.0),
        ObservedCounts(length=1.0, rounds=10**7),
        ObservedCounts((10**8, 10**7), (10**7, 10**6)),
    ):
        causes = rank_causes(Evidence(observed, [none, all_, alone, dead], other_workload=True))
        assert all(math.isfinite(each.log_likelihood) and 0 <= each.p_value <= 1 + 1e-9 for each in causes)
    assert rank_causes(Evidence(ObservedCounts((100, 0), (0, 0)), [all_, none]))[0].name == "none"
    assert rank_causes(Evidence(ObservedCounts(length=1.0, rounds=100), [all_, none]))[0].name == "none"
    assert rank_causes(Evidence(ObservedCounts((100, 100), (100, 100)), [none, all_]))[0].name == "all"
    with pytest.raises(ConfigError, match="accepted <= drafted"):
        ObservedCounts((3,), (4,))
    with pytest.raises(ConfigError, match="accepted <= drafted"):
        ObservedCounts((3,), (-1,))
    with pytest.raises(ConfigError, match="nothing to compare"):
        ObservedCounts()
    with pytest.raises(ConfigError, match="engine drafts 3"):
        rank_causes(Evidence(ObservedCounts((9, 9, 9), (9, 9, 9)), [none]))
    with pytest.raises(ConfigError, match="shapes differ"):
        ExpectedCounts("x", [[1.0, 1.0]], [[1.0]])
    with pytest.raises(ConfigError, match="shapes differ"):
        replace(EVEN, domains=["x"])


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8])
def test_chi_square(freedom):
    for value in (0.0, 0.5, 3.0, 20.0, 60.0):
        assert chi_square_above(value, freedom) == pytest.approx(stats.chi2.sf(value, freedom), rel=1e-9, abs=1e-15)


def fine(*rates, texts, rounds=10.0):
    """What a head with these a_k gives in this many texts."""
    offered, kept, left = [], [], rounds
    for rate in rates:
        offered.append(left)
        left *= rate
        kept.append(left)
    return ExpectedCounts(NO_FAULT, [offered] * texts, [kept] * texts)


def diagnosis(counts, hypothesis, *, prompts=(0,)):
    seen = EngineObservation(0.0, Counters("vLLM"), prompts)
    reference = SimpleNamespace(
        plan=ReferencePlan(2), origin_warnings=[], stream=None, domains=(), published_record=dict
    )
    return Diagnosis("x", reference, (ObservedCase(seen, counts, (hypothesis,), 1.0, 0),))


SHORT = fine(0.9, 0.8, texts=2)  # two texts of some 25 tokens
LONG = fine(0.9, 0.8, texts=60)


@pytest.mark.parametrize(
    ("counts", "hypothesis", "prompts", "named"),
    [
        (ObservedCounts((99, 0), (0, 0)), SHORT, None, (INCONCLUSIVE,)),  # 0 of 198, two short prompts
        (ObservedCounts(length=2.6, rounds=4), SHORT, (0,), (INCONCLUSIVE,)),
        (ObservedCounts((3, 3), (3, 2)), LONG, (0,), (INCONCLUSIVE,)),  # three rounds of the engine
        (ObservedCounts((99, 89), (89, 71)), SHORT, None, (INCONCLUSIVE,)),  # as it should be, but who knows
        (ObservedCounts((600, 540), (540, 432)), LONG, (0,), (NO_FAULT,)),
        (ObservedCounts(length=2.62, rounds=600), LONG, (0,), (NO_FAULT,)),
        (ObservedCounts((600, 0), (0, 0)), LONG, (0,), ()),  # nothing accepted, and enough seen
        (ObservedCounts(length=1.0, rounds=600), LONG, None, ()),
    ],
)
def test_decidability_of_rates(counts, hypothesis, prompts, named):
    found = diagnosis(counts, hypothesis, prompts=prompts)
    assert found.named == named
    assert _EXIT_CODES[found.outcome] == {(NO_FAULT,): 0, (INCONCLUSIVE,): 3}.get(named, 1)
    assert (found.to_dict()["outcome"] == "passed") == (named == (NO_FAULT,)) if prompts is not None else True
    assert found.checks == []


def test_the_needed_tokens_decide():
    """What is named as enough is enough, and half of it is not."""
    for counts in (ObservedCounts((99, 89), (89, 71)), ObservedCounts((3, 3), (3, 2)), ObservedCounts((99, 0), (0, 0))):
        for workload in (False, True):
            evidence = [Evidence(counts, [SHORT], 1.0, workload)]
            assert not can_decide(evidence)
            needed = needed_evidence(evidence, driven=not workload)
            factor = needed.reference_texts // 2
            assert needed.reference_tokens == needed.reference_tokens_now * factor
            engine_factor = 1 if needed.engine_rounds is None else needed.engine_rounds // needed.engine_rounds_now
            enough, too_few = (
                [Evidence(multiply(counts, max(1, engine_factor // half)), [fine(0.9, 0.8, texts=2 * factor // half)],
                          1.0, workload)]
                for half in (1, 2)
            )  # fmt: skip
            assert can_decide(enough)
            assert not can_decide(too_few)


def multiply(counts, factor):
    sides = ([count * factor for count in side] for side in (counts.num_drafted, counts.num_accepted))
    return ObservedCounts(*map(tuple, sides))


def test_nothing_decides_between_workloads_that_differ_as_much():
    """Where the head's a_1 is low and the prompts are unknown, domains differ by more than a factor of two."""
    low = fine(0.3, texts=20)
    found = diagnosis(ObservedCounts((600,), (180,)), low, prompts=None)
    assert found.is_inconclusive
    assert found.needed is None
    assert "--drive" in found.summary
    assert diagnosis(ObservedCounts((600,), (180,)), low).has_no_fault


def test_it_is_shown(capsys):
    found = diagnosis(ObservedCounts((99, 89), (89, 71)), SHORT)
    _show_diagnosis(found)
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("inconclusive  "))
    assert f"{found.needed.reference_tokens:,} tokens" in line
    assert found.to_dict()["needed"]["reference_tokens"] == found.needed.reference_tokens


@pytest.mark.parametrize(
    ("counters", "k"),
    [
        (Counters("SGLang", length=7.0), 4),
        (Counters("SGLang", length=0.4), 4),
        (Counters("llama.cpp", 10, None, 61), 4),
        (Counters("SGLang", 10, None, 70, notes=(FIRST_TOKENS,)), 4),
        (Counters("vLLM", 10, None, 25, length=5.5), 4),
    ],
)
def test_impossible_lengths(counters, k):
    with pytest.raises(EngineError, match=rf"is impossible with K = {k}"):
        observed_counts(counters, k)


def test_lengths_at_the_limit_are_possible():
    for counters in (Counters("SGLang", length=5.0), Counters("SGLang", 10, None, 45, notes=(FIRST_TOKENS,))):
        assert observed_counts(counters, 4).acceptance_length >= 5
