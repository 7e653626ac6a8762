"""Injected faults are named from counters alone, by position or in total; an engine without a fault is not blamed."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from quick import loop
from served import ServedModel
from tiny import refrain

from nextn.engines.answers import AnswerToken, EngineAnswer
from nextn.engines.client import Budget, Limits
from nextn.engines.counters import COPIED, FIRST_TOKENS, Counters
from nextn.engines.endpoint import Endpoint
from nextn.engines.run_settings import with_settings
from nextn.errors import ConfigError, EngineError
from nextn.evaluate import faults as faults_module
from nextn.evaluate.conventions import apply_variants
from nextn.evaluate.diagnose import Diagnosis
from nextn.evaluate.diagnose_engine import _on_prompts, audit_lines, compare, observed_plan
from nextn.evaluate.engine_counters import read_engine_counters
from nextn.evaluate.engine_probe import documented_faults, engine_priors
from nextn.evaluate.engine_run import (
    EngineObservation,
    ask_prompts,
    count_retokenized,
    diverged_text_share,
    drive_engine,
    split_by_length,
)
from nextn.evaluate.faults import FAULTS, expectations, fault_variant
from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts, engine_depth, observed_counts
from nextn.evaluate.likelihoods import MIN_FIT, NO_FAULT
from nextn.evaluate.observed_case import ObservedCase
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.reference_texts import GeneratedTexts, generate_texts
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.family_table import by_name
from nextn.settings import Contract

PROMPTS = [Prompt(tuple(row.tolist()), "xy"[place % 2]) for place, row in enumerate(refrain(12, 33, seed=10**6))]
OTHERS = [Prompt(tuple(row.tolist()), "x") for row in refrain(16, 33, seed=5)]
PLAN = ReferencePlan(num_speculative_tokens=3, temperatures=(0.0,), max_tokens=20, backend="torch", rule="ratio")


def diagnose(model, prompts, seen, plan, **options):
    """Compare at the plan's K."""
    return compare(model, seen, prompts, plan, plan.num_speculative_tokens, **options)


def counted(model, fault="", *, prompts=OTHERS):
    """What an engine with this fault counts of prompts of its own."""
    contract = Contract()
    if fault:
        found = next(each for each in FAULTS if each.name == fault)
        model, contract = apply_variants(model, contract, [fault_variant(found, model)])
    pooled = generate_texts(model, [prompt.text for prompt in prompts], PLAN, 0.0, contract=contract).pooled
    num_drafts = pooled.num_drafted[0]
    return Counters("vLLM", num_drafts, 3 * num_drafts, sum(pooled.num_accepted), pooled.num_accepted)


@pytest.fixture(scope="module")
def counters(trained):
    return {fault: counted(trained["glm"], fault) for fault in ("", "wrong-hidden", "no-prefill", "pairs-off-by-one")}


@pytest.fixture(scope="module")
def diagnosed(trained, counters):
    """Of the same prompts, in one go: the reference is the slow part."""
    places = tuple(range(len(PROMPTS)))
    return {
        fault: diagnose(trained["glm"], PROMPTS, [EngineObservation(0.0, each, places)], PLAN, source="glm")
        for fault, each in counters.items()
    }


@pytest.mark.more
def test_injected_faults_are_named(diagnosed):
    for fault in ("wrong-hidden", "no-prefill"):
        found = diagnosed[fault]
        assert "nothing-accepted" not in {cause.name for cause in found.causes}  # drafts were accepted
        assert all(found.cause(each).p_value >= MIN_FIT for each in found.undetectable)  # the counts exclude the others
        assert found.named == (fault,)
        assert not found.has_no_fault
        assert found.summary.startswith(fault)
        assert found.checks[0].issues
        assert found.checks[0].advice
    assert "pairs-off-by-one" in {
        *diagnosed["pairs-off-by-one"].named,
        *diagnosed["pairs-off-by-one"].indistinguishable,
    }


def test_a_correct_engine_has_no_fault(diagnosed):
    found = diagnosed[""]
    assert found.named == (NO_FAULT,)
    assert found.has_no_fault
    assert found.checks == []
    assert "head-quantized" in found.undetectable
    assert "wrong-hidden" not in found.undetectable
    assert any("would not show" in note for note in found.notes)
    assert any("faster than plain decoding only where" in note and "advise" in note for note in found.notes)


def test_the_record_is_json(diagnosed):
    record = json.loads(json.dumps(diagnosed["wrong-hidden"].to_dict()))
    assert record["named"] == ["wrong-hidden"]
    assert record["causes"][0]["ratio"] == 1
    assert record["cases"][0]["prompts"] == len(PROMPTS)
    assert set(record["definitions"]) >= {"ratio", "p_value", "named", "indistinguishable", "undetectable"}


@pytest.mark.slow
def test_totals_alone(trained, counters):
    """Engines without counts by position: the AL is one figure, and enough for large faults."""
    seen = [replace(counters["no-prefill"], per_position=()), Counters("SGLang", length=3.75)]
    low, fine = (
        diagnose(trained["glm"], PROMPTS, [EngineObservation(0.0, each, tuple(range(12)))], PLAN) for each in seen
    )
    assert "no-prefill" in low.named
    assert fine.has_no_fault
    assert any("counts no positions" in note for note in low.notes)
    adapted = replace(counters["no-prefill"], draft_tokens=2 * counters["no-prefill"].num_drafts)
    shorter = diagnose(trained["glm"], PROMPTS, [EngineObservation(0.0, adapted, tuple(range(12)))], PLAN)
    assert not [note for note in shorter.notes if "counts no positions" in note]
    assert [note for note in shorter.notes if "fewer than K tokens" in note]


@pytest.mark.slow
def test_other_prompts_are_another_workload(trained):
    """If the prompts are unknown, a gap that workloads explain is no fault, and a note says so."""
    model = trained["glm_two"]
    right = counted(model)
    some = replace(right, per_position=tuple(round(0.9**k * each) for k, each in enumerate(right.per_position, 1)))
    other = diagnose(model, PROMPTS, [EngineObservation(0.0, some)], PLAN)
    assert other.has_no_fault
    assert any("--drive" in note and "domains" in note for note in other.notes)
    same = replace(
        other,
        cases=tuple(replace(case, observation=replace(case.observation, prompt_indices=(0,))) for case in other.cases),
    )
    assert other.cases[0].other_workload
    assert not same.cases[0].other_workload
    fine = [next(each for each in found.causes if each.name == NO_FAULT) for found in (other, same)]
    assert fine[0].p_value > fine[1].p_value


@pytest.mark.slow
def test_a_poor_head_is_the_weights(trained, counters):
    unset = next(each for each in FAULTS if each.name == "head-unset")
    poor, _ = apply_variants(trained["glm"], Contract(), [unset.variant])
    found = diagnose(poor, PROMPTS, [EngineObservation(0.0, counted(poor), tuple(range(12)))], PLAN)
    assert found.named == ("weights",)
    assert "poor" in found.summary
    assert not found.has_no_fault


@pytest.mark.slow
def test_low_on_long_prompts_alone(trained):
    """No fault of all prompts explains it, and the short ones are as they should be."""
    short, long = counted(trained["glm"], prompts=PROMPTS[:6]), counted(trained["glm"], prompts=PROMPTS[6:])
    places = tuple(range(6)), tuple(range(6, 12))
    low = replace(long, per_position=(1, 0, 0))
    found = diagnose(
        trained["glm"],
        PROMPTS,
        [EngineObservation(0.0, short, places[0]), EngineObservation(0.0, low, places[1])],
        PLAN,
    )
    assert found.named == ("context-length",)
    assert found.checks[0].issues
    right = diagnose(
        trained["glm"],
        PROMPTS,
        [EngineObservation(0.0, short, places[0]), EngineObservation(0.0, long, places[1])],
        PLAN,
    )
    assert right.has_no_fault


def test_observed_counts():
    whole = Counters("vLLM", 100, 300, 120, (70, 40, 10))
    assert observed_counts(whole, 3) == ObservedCounts((100, 70, 40), (70, 40, 10))
    assert observed_counts(replace(whole, per_position=()), 3) == ObservedCounts(length=2.2, rounds=100)
    assert observed_counts(Counters("llama.cpp", None, 300, 120), 3) == ObservedCounts(length=2.2, rounds=100)
    assert observed_counts(Counters("SGLang", length=2.5), 3) == ObservedCounts(length=2.5)
    with pytest.raises(EngineError, match="check that MTP is on"):
        observed_counts(Counters("vLLM", 0, 0, 0), 3)


DEEP, DEEPER, UNKNOWN = (
    Counters("x", 9, 27, 5, (3, 2, 0)),
    Counters("x", 9, 36, 5, (3, 2, 0, 0)),
    Counters("x", length=2),
)
SHORT_ROUNDS = Counters("llama.cpp", 100, 240, 150)  # with K = 8, and drafts that end where the head is unsure


@loop(
    ("parts", "given", "k"),
    [
        ([DEEP], None, 3),
        ([replace(DEEP, per_position=())], None, 3),  # 3 drafts in every round
        ([replace(DEEP, draft_tokens=26, per_position=())], None, 3),  # a text ended within its last round
        ([DEEP, DEEPER], None, 4),
        ([replace(DEEP, per_position_offered=(9, 9, 9, 3))], None, 4),
        ([SHORT_ROUNDS], 8, 8),
        ([SHORT_ROUNDS], 3, 3),
        ([UNKNOWN], 8, 8),
        ([UNKNOWN, DEEP], 3, 3),
    ],
)
def test_k_of_an_engine(parts, given, k):
    assert engine_depth(parts, given) == k


@pytest.mark.parametrize(
    ("parts", "given", "error"),
    [
        ([UNKNOWN], None, "does not report K: give -k"),
        ([SHORT_ROUNDS], None, "drafts 2.40 tokens per round on average, which does not show K: give -k"),
        ([DEEP], 4, "-k 4, but the engine's counters are for K = 3"),
        ([DEEP, DEEPER], 3, "-k 3, but the engine's counters are for K = 4"),
        ([SHORT_ROUNDS], 2, "-k 2, but the engine drafted 2.40 tokens per round on average"),
    ],
)
def test_k_of_an_engine_that_is_unknown_or_wrong(parts, given, error):
    with pytest.raises(ConfigError, match=error):
        engine_depth(parts, given)


def test_halves():
    assert split_by_length([[0] * 9] * 4) == [(0, 1, 2, 3)]
    assert split_by_length([[0] * size for size in (9, 90, 8, 80)]) == [(0, 2), (1, 3)]
    assert split_by_length([[0], [0] * 90]) == [(0, 1)]


@pytest.fixture
def serve(trained):
    running = []

    def started(*faults, **settings):
        running.append(ServedModel(*faults, model=trained["glm"], **settings))
        return Endpoint.open(running[-1].url, Budget(Limits(seconds=60)))

    yield started
    for each in running:
        each.stop()


def drive(serve, trained, *faults, **settings):
    endpoint = serve(*faults, **settings)
    seen = drive_engine(endpoint, trained["glm"], PROMPTS, PLAN)
    return diagnose(trained["glm"], PROMPTS, seen, PLAN)


@pytest.mark.slow
def test_driving(serve, trained):
    """The same prompts: the engine's text is the reference's, its counts are, too."""
    found = drive(serve, trained)
    assert found.has_no_fault
    assert found.cases[0].diverged_share == 0
    assert not found.cases[0].other_workload
    assert drive(serve, trained, contract=Contract(prefill=False)).named == ("no-prefill",)


@pytest.mark.slow
def test_driving_where_others_ask_too(serve, trained):
    found = drive(serve, trained, "busy")
    assert found.cases[0].other_workload
    assert any("other requests were counted" in note for note in found.notes)


@pytest.mark.more
def test_counters_reset_in_mid_run(serve, trained):
    with pytest.raises(EngineError, match="reset during the run"):
        drive(serve, trained, "reset")


@pytest.mark.slow
def test_another_trunk_is_noted(serve, trained):
    found = drive(serve, trained, "other-trunk")
    assert any("differs from this checkpoint" in note for note in found.notes)


@pytest.mark.slow
def test_another_template_is_noted(trained, counters):
    """By the prompt tokens that the engine reports."""
    prompts = [prompt.text for prompt in PROMPTS]
    answers = tuple(EngineAnswer("", "length", (AnswerToken("x", 1),), prompt_ids=(1, *prompt)) for prompt in prompts)
    found = diagnose(trained["glm"], PROMPTS, [EngineObservation(0.0, counters[""], tuple(range(12)), answers)], PLAN)
    assert found.cases[0].num_retokenized == 12
    assert found.cases[0].other_workload
    assert any(note.startswith("template: for 12 of 12") for note in found.notes)


def expects(name, *rates, texts=50):
    """A hypothesis whose rates are equal in all texts."""
    offered, kept, left = [], [], 10.0
    for rate in rates:
        offered.append(left)
        left *= rate
        kept.append(left)
    return ExpectedCounts(name, [offered] * texts, [kept] * texts)


def case(kept, *hypotheses, num_drafted=1000, temperature=0.0, **known):
    """Of an engine that accepted this many drafts at depths 1 and 2."""
    seen = EngineObservation(temperature, Counters("x", per_position=kept), (0,), **known)
    return ObservedCase(seen, ObservedCounts((num_drafted, kept[0]), kept), hypotheses, 1.0, 0)


GOOD, BAD = expects(NO_FAULT, 0.7, 0.5), expects("no-prefill", 0.3, 0.5)


@pytest.mark.parametrize(
    ("cases", "named"),
    [
        ([case((700, 350), GOOD), case((100, 10), GOOD)], ("context-length",)),
        ([case((700, 350), GOOD), case((950, 900), GOOD)], ("inconclusive",)),  # long prompts accept more: no fault
        ([case((100, 10), GOOD), case((100, 10), GOOD)], ()),  # low on short ones, too
        ([case((100, 10), GOOD)], ()),
        ([case((700, 350), GOOD, expects("no-prefill", 0.7, 0.5)), case((300, 150), GOOD, BAD)], ("no-prefill",)),
        ([case((20, 10), expects(NO_FAULT, 0.15, 0.5), expects("no-prefill", 0.02, 0.5))], ("no-prefill",)),
        ([case((150, 75), expects(NO_FAULT, 0.15, 0.5), expects("no-prefill", 0.02, 0.5))], ("weights",)),
        ([case((800, 400), GOOD, expects("head-quantized", 0.8, 0.5))], ("inconclusive",)),  # what fits loses nothing
    ],
)
def test_named_causes(cases, named):
    """By hand: a fault that explains the counts comes before the length of prompts, and before a poor head."""
    assert Diagnosis("x", None, tuple(cases)).named == named


def test_a_length_of_an_unknown_number_of_rounds_is_noted():
    """Of a line of a log: as many rounds as the reference has are assumed."""
    notes = []
    for rounds in (None, 1000):
        seen = EngineObservation(0.0, Counters("x", length=1.9), (0,))
        one = ObservedCase(seen, ObservedCounts(length=1.9, rounds=rounds), (GOOD, BAD), 1.0, 0)
        reference = SimpleNamespace(origin_warnings=(), stream=None)
        notes.append(" ".join(Diagnosis("x", reference, (one,)).notes))
    assert ["shows no number of rounds" in each for each in notes] == [True, False]


def test_summary_of_a_diagnosis():
    unknown = [Diagnosis("x", None, (case(kept, GOOD),)).summary for kept in ((950, 900), (100, 10))]
    assert [": AL 2.85" in unknown[0], "nextn verify" in unknown[0], "below it" in unknown[1]] == [True] * 3
    poor = expects(NO_FAULT, 0.05, 0.05)
    own = [Diagnosis("x", None, (case((950, 900), poor, exclusive=each),)).summary for each in (True, False)]
    assert ["easier prompts" in each for each in (*unknown, *own)] == [False, False, False, True]
    driven, other = (Diagnosis("x", None, (case((950, 900), poor, exclusive=each),)) for each in (True, False))
    for above in (driven, other):
        assert (above.outcome, above.named, above.needed) == ("inconclusive", ("inconclusive",), None)
    low = Diagnosis("x", None, (case((10, 1), GOOD, exclusive=False),))
    assert low.outcome == "failed"  # what is lost is a finding on any prompts
    some, many, countless = (
        Diagnosis("x", None, (case((count * 3 // 10, count * 3 // 20), GOOD, BAD, num_drafted=count),)).summary
        for count in (40, 100, 10**6)
    )
    assert re.search(r"; [\d,]+ times", some)
    assert re.search(r"; 10\^\d+ times", many)
    assert "; more than 10^30 times" in countless


def test_the_summary_has_the_figures_of_the_case_that_decides():
    """A fault that only shows above temperature 0 is not reported with the greedy figures, which it does not change."""
    greedy = case((700, 350), GOOD, expects("exact-match", 0.7, 0.5))
    sampled = case((300, 150), GOOD, expects("exact-match", 0.3, 0.5), temperature=1.0)
    for cases in ((greedy, sampled), (sampled, greedy)):
        summary = Diagnosis("x", None, cases).summary
        assert summary.startswith("exact-match: AL 1.45 where this head should give 2.05 at temperature 1; ")
    unknown = Diagnosis("x", None, (case((700, 350), GOOD), case((100, 10), GOOD, temperature=1.0))).summary
    assert "AL 1.11 where this head should give 2.05 at temperature 1, below" in unknown
    fine = Diagnosis("x", None, (greedy, replace(greedy, observation=sampled.observation))).summary
    assert fine.endswith("AL 2.05 where this head should give 2.05 at temperature 0")


def test_the_headline_has_the_odds_against_the_next_cause():
    """What an engine that was not driven is assumed to do is in it, too."""
    seen = case((100, 10), expects(NO_FAULT, 0.7, 0.5), BAD, expects("head-unset", 0.1, 0.1))
    assert "times likelier than the next cause, no-prefill, and " in Diagnosis("x", None, (seen,)).summary
    near = case((6, 0), *seen.expected, expects("inputs-swapped", 0.22, 0.1), num_drafted=60)
    found = Diagnosis("x", None, (near,))
    assert (found.named, found.indistinguishable) == (("head-unset",), ("inputs-swapped",))
    assert "than the next cause that these counts tell apart, no-prefill, and " in found.summary
    seen = replace(seen, observation=replace(seen.observation, prompt_indices=None))
    found = Diagnosis("x", None, (seen,))
    assert found.named == ("head-unset",)
    assert found.summary.endswith("if the engine is greedy")
    assert [
        "sha256sum" in found.next_checks[0],
        "loader" in found.next_checks[1],
        "--drive" in found.next_checks[-1],
    ] == [True] * 3
    prior = replace(found, priors={"head-unset": 1e-90})
    assert prior.causes[0].name != "head-unset"
    assert Diagnosis("x", None, (case((700, 350), GOOD),)).next_checks == []


def test_causes_that_the_counts_tell_apart_are_not_listed_as_like():
    """Expected to be too few rounds to tell two causes apart, which these counts nevertheless do."""
    found = Diagnosis("x", None, (case((100, 10), expects(NO_FAULT, 0.7, 0.5), BAD, expects("head-unset", 0.1, 0.1)),))
    for name in found.indistinguishable:
        assert not found.cause(name).is_separated(found.causes[0])
    for name in found.undetectable:
        assert not found.cause(name).is_separated(found.cause(NO_FAULT))


def test_a_cause_that_is_as_excluded_as_no_fault_is_not_listed_as_possible():
    """Of two texts: it is near `no-fault`, and both are far less likely than the cause that is named."""
    few = {name: expects(name, rate, 0.5, texts=2) for name, rate in ((NO_FAULT, 0.5), ("pairs-off-by-one", 0.47))}
    found = Diagnosis("x", None, (case((20, 1), *few.values(), expects("head-unset", 0.02, 0.1)),))
    assert found.named == ("head-unset",)
    assert found.cause("pairs-off-by-one").p_value >= MIN_FIT
    assert found.undetectable == ()


def test_named_causes_are_not_listed_as_indistinguishable():
    twin = replace(BAD, name="stale-head-cache")
    found = Diagnosis("x", None, (case((300, 150), GOOD, BAD, twin, expects("near", 0.301, 0.5)),))
    assert sorted(found.named) == ["near", "no-prefill", "stale-head-cache"]
    assert found.indistinguishable == ()


def test_a_cause_that_does_not_fit_is_not_listed_as_like():
    """With two texts the odds against it are small, and the counts exclude it; nothing is listed twice."""
    causes = [("no-prefill", 0.83), (NO_FAULT, 0.83), ("nothing-accepted", 0.0), ("head-unset", 0.0)]
    seen = case((0, 0), *(expects(name, rate, rate, texts=2) for name, rate in causes))
    seen = replace(seen, counts=ObservedCounts(length=1.0))
    found = Diagnosis("x", None, (replace(seen, observation=replace(seen.observation, prompt_indices=None)),))
    assert found.named == ("nothing-accepted", "head-unset")
    assert not found.cause(NO_FAULT).is_separated(found.causes[0])
    assert found.cause(NO_FAULT).p_value < MIN_FIT
    assert found.indistinguishable == ()
    assert not {*found.named, *found.indistinguishable} & {*found.undetectable}


def test_by_length_alone_all_causes_that_fit_are_named():
    """None of them is likelier because its own interval is narrow: here the one that is nearest."""
    narrow, texts = expects("head-2-bit", 0.1, 0.1), [expects("x", *rates, texts=6) for rates in ((0, 0), (0.5, 0.5))]
    drafted, accepted = (
        [row for each in texts for row in getattr(each, side)] for side in ("num_drafted", "num_accepted")
    )
    wide = ExpectedCounts("no-prefill", drafted, accepted)
    seen = replace(case((0, 0), GOOD, narrow, wide), counts=ObservedCounts(length=1.11, rounds=400))
    found = Diagnosis("x", None, (seen,))
    assert found.cause("no-prefill").ratio < 0.1
    assert found.named == ("head-2-bit", "no-prefill")
    assert found.indistinguishable == ()
    assert "AL alone cannot distinguish" in found.summary


def test_accepted_drafts_of_a_case():
    assert case((700, 350), GOOD).num_accepted == pytest.approx(1.05)
    assert replace(case((700, 350), GOOD), counts=ObservedCounts(length=2.5)).num_accepted == 1.5


def test_other_text_is_noted_if_comparable():
    """For greedy text with token ids, and only if most of it differs."""
    answers = (EngineAnswer("x", "length", (AnswerToken("x", 1),)),)
    found = case((700, 350), GOOD, answers=answers)
    notes = {share: ["60%" in note for note in replace(found, diverged_share=share).notes] for share in (0.4, 0.6)}
    assert notes == {0.4: [], 0.6: [True]}
    assert replace(found, observation=replace(found.observation, temperature=1.0)).notes == []


def test_rounds_that_were_shorter_than_k():
    """Counts by position do not say how many rounds drafted so deep, unless the engine reports it."""
    short = Counters("vLLM", 100, 201, 120, (70, 40, 10))
    assert observed_counts(short, 3) == ObservedCounts(length=2.2, rounds=100)
    assert observed_counts(replace(short, per_position_offered=(100, 60, 41)), 3) == ObservedCounts(
        (100, 70, 40), (70, 40, 10)
    )
    assert engine_depth([short], None) == 3


@pytest.mark.parametrize(
    ("length", "named"), [(1.75, ("inconclusive",)), (2.3, ("inconclusive",)), (1.3, ("no-prefill",))]
)
def test_short_rounds_are_blamed_only_where_they_accept_too_little(length, named):
    """Rounds of one draft accept a_1 = 0.7 of an engine without fault, those of two 1.05."""
    counts = ObservedCounts(length=length, rounds=1000)
    hypotheses = GOOD, expects("no-prefill", 0.2, 0.5)
    adaptive = with_settings(Counters("x", length=length), ["--speculative-algorithm EAGLE --speculative-adaptive"])
    for counters in (Counters("x", 1000, 1300, 800, (700, 100)), Counters("x", 1000, 1300, 800), adaptive):
        seen = EngineObservation(0.0, counters, (0,))
        found = Diagnosis("x", None, (ObservedCase(seen, counts, hypotheses, 1.0, 0),))
        assert (found.named, found.needed) == (named, None)
        assert ("--fixed-k" in found.summary) == found.is_inconclusive


def test_an_engine_that_copies_drafts_is_not_blamed():
    """Copies take the rounds that are easy; the head accepts less in the others."""
    low = case((100, 10), GOOD, BAD)
    seen = replace(low.observation, counters=replace(low.observation.counters, notes=(COPIED,)))
    found = Diagnosis("x", None, (replace(low, observation=seen),))
    assert (found.named, found.needed, "without --copy" in found.summary) == (("inconclusive",), None, True)


def test_share_of_novel_text():
    """Up to the first other token; a text that ends sooner is the reference's as far as it goes."""
    drawn = GeneratedTexts((ReferenceText((7,), (1, 2, 3, 4)), ReferenceText((8,), (5, 6, 7, 8))), (), None)
    measured = SimpleNamespace(text_source="", generated={0.0: drawn, 1.0: drawn})

    def answer(*ids, prompt=None):
        return EngineAnswer("x", "stop", tuple(AnswerToken("x", each) for each in ids), prompt_ids=prompt)

    seen = EngineObservation(0.0, Counters("x"), (0, 1), (answer(1, 2), answer(5, 6, 0, 8, prompt=(8,))))
    assert diverged_text_share(seen, measured) == 0.5
    assert diverged_text_share(replace(seen, temperature=1.0), measured) == 1
    assert count_retokenized(seen, measured) == 0
    assert count_retokenized(replace(seen, answers=(answer(1, prompt=(9,)), answer(5))), measured) == 1


def test_hypotheses_by_temperature(trained):
    """Greedy decoding has one rule of acceptance; above it each has its own, of chances. All know the domains."""
    plan, seen = replace(PLAN, temperatures=(0.0, 1.0), max_tokens=12), []
    rules = [each for each in FAULTS if each.rule]
    measured = reference_acceptance(trained["glm_two"], PROMPTS[:6], plan)
    found = expectations(measured, trained["glm_two"], faults=rules, on_fault=lambda: seen.append(1))
    assert len(seen) == len(rules)
    for temperature, hypotheses in found.items():
        assert [each.name for each in hypotheses] == [NO_FAULT, "nothing-accepted", *[each.name for each in rules]]
        assert all(list(each.domains) == list("xyxyxy") for each in hypotheses)
        fine, nothing, *wrong = hypotheses
        assert nothing.raw_rates.max() == 0
        for each in (fine, *wrong):
            assert each.is_expectation == (temperature > 0)
        assert all((each.raw_rates[0] < fine.raw_rates[0]) == (temperature > 0) for each in wrong)


def test_repetitive_texts_of_the_same_prompts_count():
    """An engine counts repetitive texts of the same prompts too; for other prompts they are left out."""
    measured = SimpleNamespace(text_indices=lambda temperature: {0, 2})
    uneven = ExpectedCounts(NO_FAULT, [[1.0], [2.0], [3.0]], [[0.0]] * 3)
    for places, sizes in (((1, 2), [2, 3]), (None, [1, 3])):
        (found,) = _on_prompts([uneven], measured, EngineObservation(0.0, Counters("x"), places))
        assert found.counts[0][:, 0].tolist() == sizes


class Counting:
    """An endpoint whose counters are Counters: before and after."""

    served, chat = SimpleNamespace(name="x"), False

    def __init__(self, answers, *readings):
        self.answers, self.readings, self.asked, self.lock = answers, list(readings), [], Lock()

    def metrics(self):
        return self.readings[bool(self.asked)]

    def answer(self, request):
        with self.lock:
            self.asked.append(request)
        found = self.answers[request.prompt[0]]
        if isinstance(found, EngineError):
            raise found
        return found


@pytest.fixture
def asked(monkeypatch):
    """Ask prompts of one token each -> (observation, endpoint, number of answer callbacks)."""
    monkeypatch.setattr("nextn.engines.ask.from_metrics", lambda text, model: text)

    def run(answers, after, *, temperature=0.0, seed=3):
        endpoint, calls = (
            Counting(answers, replace(after, num_drafts=0, draft_tokens=0, accepted=0, emitted=0), after),
            [],
        )
        prompts = [(place,) for place in range(len(answers))]
        seen = ask_prompts(
            endpoint, prompts, range(len(answers)), temperature, 5, seed=seed, on_answer=lambda: calls.append(1)
        )
        return seen, endpoint, len(calls)

    return run


def answers_of(count, **known):
    return [EngineAnswer(str(place), "length", **known) for place in range(count)]


IDS = {"tokens": tuple(AnswerToken("x", 1) for _ in range(5))}


def test_each_prompt_has_a_seed_and_a_cache_of_its_own(asked):
    """And every answer comes back, in the prompts' order, though only some are asked at once."""
    counters, salts = Counters("x", 20, 60, 30, emitted=50), []
    for temperature, seed in ((0.0, 3), (1.0, 3), (0.0, 4), (0.0, 3)):  # the last is the first once more
        seen, endpoint, num_calls = asked(answers_of(11), counters, temperature=temperature, seed=seed)
        assert [each.text for each in seen.answers] == [str(place) for place in range(11)]
        assert num_calls == 11
        assert sorted(ask.seed for ask in endpoint.asked) == list(range(seed, seed + 11))
        salts += [each.body("x", chat=False, extra_fields=True)["cache_salt"] for each in endpoint.asked]
    assert len(set(salts)) == len(salts)


def test_a_refused_prompt_ends_the_drive(asked):
    with pytest.raises(EngineError, match="too long"):
        asked([*answers_of(2), EngineError("too long")], Counters("x", 2, 6, 3))


@pytest.mark.parametrize(
    ("accepted", "known", "exclusive"),
    [
        (40, IDS, True),  # 60 tokens for 50: the last round of each may give K too many
        (80, IDS, False),
        (80, {"completion_tokens": 5}, False),
        (80, {"completion_tokens": 50}, True),
        (80, {}, True),  # nobody knows
    ],
)
def test_whether_the_run_was_exclusive(asked, accepted, known, exclusive):
    seen, _, _ = asked(answers_of(10, **known), Counters("x", 20, 60, accepted))
    assert seen.exclusive == exclusive


def test_the_first_token_of_a_request_is_no_draft(asked):
    """SGLang counts it with what its rounds gave; no other engine does."""
    for accepted, notes, kept, emitted in (
        (30, (FIRST_TOKENS, "x"), 20, 40),
        (4, (FIRST_TOKENS, "x"), 0, 40),
        (30, ("x",), 30, 50),
    ):
        after = Counters("SGLang", 20, None, accepted, emitted=50, notes=notes)
        seen, _, _ = asked(answers_of(10), after)
        assert (seen.counters.accepted, seen.counters.emitted, seen.counters.notes) == (kept, emitted, ("x",))


def test_an_address_is_asked_and_ids_go_through_no_template(trained):
    with pytest.raises(EngineError, match="nothing answers"):
        read_engine_counters("http://localhost:9/v1", Budget(Limits(seconds=5)))
    endpoint = SimpleNamespace(chat=True)
    with pytest.raises(ConfigError, match="cannot go through a chat template"):
        drive_engine(endpoint, trained["glm"], PROMPTS, PLAN)


@pytest.fixture
def plans(monkeypatch):
    """The plans of the references that `diagnose` measures, which are replaced by empty ones."""
    found, drawn = [], GeneratedTexts((ReferenceText((7,), (1, 2, 3)),), (), None)

    def reference(model, prompts, plan, **_):
        found.append(plan)
        generated = dict.fromkeys(plan.temperatures, drawn)
        return ReferenceReport(plan, Contract(), tuple(prompts), generated, {}, "decoder")

    monkeypatch.setattr("nextn.evaluate.diagnose_engine.reference_acceptance", reference)
    monkeypatch.setattr("nextn.evaluate.diagnose_engine.expectation", lambda name, *_: replace(GOOD, name=name))
    monkeypatch.setattr(
        "nextn.evaluate.diagnose_engine.expectations",
        lambda measured, *_, **__: {each: [GOOD] for each in measured.generated},
    )
    return found


def test_the_reference_drafts_as_the_engine_does(plans):
    """As deep as it ever did, at the temperatures that were seen."""
    seen = [
        EngineObservation(0.0, Counters("x", 9, None, 5, (5,)), (0,)),
        EngineObservation(0.7, Counters("x", 9, None, 5, (3, 2)), (0,)),
    ]
    plan, prompts = replace(PLAN, num_speculative_tokens=1), [Prompt((7,), "x")]
    model = SimpleNamespace(family=by_name("glm4_moe"))
    diagnose(model, prompts, seen, observed_plan(seen, plan, None))
    assert [(each.num_speculative_tokens, each.temperatures) for each in plans] == [(2, (0.0, 0.7))]
    diagnose(model, prompts, [EngineObservation(0.0, UNKNOWN, (0,))], plan)
    assert plans[1].num_speculative_tokens == 1
    with pytest.raises(ConfigError, match="are for K = 2"):
        diagnose(model, prompts, seen, plan)


@pytest.mark.parametrize(
    ("chat", "template", "prompt", "places", "other"),
    [
        (None, "x", "text", None, [False]),
        (True, "x", "text", None, [False]),
        (False, "x", "text", None, [True]),
        (False, "x", "text", (0,), []),  # the same prompts, so the same template
        (False, None, "text", None, []),
        (False, "x", (7,), None, []),
        (None, "x", Prompt("text", "x", later=("more",)), None, []),  # a conversation needs the template
    ],
)
def test_the_other_template_is_a_cause(plans, chat, template, prompt, places, other):
    """Of prompts that nobody knows, where there is a template that they may have gone through, or not."""
    model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template), family=by_name("glm4_moe"))
    seen = [EngineObservation(0.0, DEEP, places)]
    asked = prompt if isinstance(prompt, Prompt) else Prompt(prompt, "x")
    found = diagnose(model, [asked], seen, replace(PLAN, chat=chat))
    assert [plan.chat for plan in plans[1:]] == other
    assert ("template" in {each.name for each in found.cases[0].expected}) == bool(other)


def test_audit_lines(monkeypatch):
    findings = [SimpleNamespace(severity=each, rule="r", found=f"a {each}") for each in ("error", "warning", "note")]
    found = {("x", None): findings, ("x", "y"): findings[1:]}
    monkeypatch.setattr(
        "nextn.evaluate.diagnose_engine.audit", lambda x, *, head: SimpleNamespace(findings=found[x, head])
    )
    assert audit_lines("x", None) == ["audit: error, r: a error", "audit: warning, r: a warning"]
    assert audit_lines("x", "y") == ["audit: warning, r: a warning"]


def test_an_engine_without_a_tokenizer():
    """It takes prompts of token ids only, which are what it is asked."""
    engine, budget = FakeEngine("no-tokenizer"), Budget(Limits(seconds=20, answer_s=5))
    try:
        assert Endpoint.open(engine.url, budget).capabilities.extra_fields
        with pytest.raises(EngineError, match="no tokenizer"):
            Endpoint.open(engine.url, budget, chat=True)
    finally:
        engine.stop()


def test_faults_that_an_engines_published_code_does_not_have():
    """Of a head that reads the trunk's keys: vLLM's queries are elsewhere than transformers', llama.cpp's are not."""
    vllm, llama = (engine_priors(by_name("gemma4_assistant"), engine) for engine in ("vLLM", "llama.cpp"))
    assert llama.keys() - vllm.keys() == {"query-shifted"}
    assert {"wrong-keys", "window-lost", "inputs-swapped"} <= vllm.keys()


def test_faults_that_an_engines_published_code_has(diagnosed):
    """vLLM passes on the state before GLM's norm: conventions that are not the family's, of engines that run it."""
    found = replace(diagnosed["wrong-hidden"], documented=("wrong-hidden", "position0"))
    assert any(note.endswith("published code for this family has wrong-hidden") for note in found.notes)
    assert "wrong-next-hidden" in documented_faults(by_name("glm4_moe"), "vLLM")
    assert documented_faults(by_name("glm4_moe"), "llama.cpp") == documented_faults(by_name("glm4_moe"), "mlx") == ()


def test_nothing_drafted_is_reported_before_k():
    """K is of no use where no round drafted."""
    with pytest.raises(ConfigError, match="no round that drafted; check that MTP is on"):
        engine_depth([Counters("vLLM", None, 0, 0)], None)


@pytest.mark.parametrize("num_faults", [None, 0, 2])
def test_an_interrupted_diagnosis_shows_what_it_has(here, tmp_path, monkeypatch, num_faults):
    """The counts; once the head is measured, also its acceptance and the faults that were compared. No cause is named.

    num_faults: how many were compared; None: interrupted before the head was measured.
    """
    seen, measure = [], faults_module.measure_under_fault

    def interrupted(*args, **options):
        if len(seen) == (num_faults or 0):
            raise KeyboardInterrupt
        seen.append(args[2].name)
        return measure(*args, **options)

    if num_faults is None:
        monkeypatch.setattr("nextn.evaluate.diagnose_engine.reference_acceptance", interrupted)
    monkeypatch.setattr(faults_module, "measure_under_fault", interrupted)
    file, prompts, record = tmp_path / "counts.json", tmp_path / "prompts.jsonl", tmp_path / "record.json"
    file.write_text('{"num_drafts": 50, "num_draft_tokens": 100, "num_accepted_tokens": 10}')
    prompts.write_text('{"prompt": "def add(a, b):"}\n')
    asked = ("diagnose", "tiny", "--engine", file, "--prompts", prompts, "--max-tokens", 8, "--backend", "torch")
    code, out, err = here(*asked, "--out", record)
    assert code == 130
    if num_faults is None:
        assert err.splitlines()[-1] == "interrupted"
        assert "10 of 100 draft tokens accepted" in out
        return
    found = json.loads(record.read_text())
    assert not found["complete"]
    assert found["named"] == ["inconclusive"]
    assert {each["name"] for each in found["causes"]} == {NO_FAULT, *seen}
    assert found["untested"][: len(FAULTS) - num_faults] == [each.name for each in FAULTS[num_faults:]]
    assert all(name in out for name in (NO_FAULT, *seen, found["untested"][0]))


def test_counts_come_through_a_pipe():
    """`docker logs NAME | nextn diagnose --engine -`"""
    done = subprocess.run(
        [sys.executable, "-m", "nextn", "diagnose", "--engine", "-"], capture_output=True, encoding="utf-8", timeout=60,
        input="SpecDecoding metrics: Mean acceptance length: 1.01, Accepted throughput: 0.1 tokens/s, Drafted "
        "throughput: 30.00 tokens/s, Accepted: 3 tokens, Drafted: 900 tokens, Per-position acceptance rate: 0.010, "
        "0.000, 0.000, Avg Draft acceptance rate: 0.3%\n",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "3 of 900 draft tokens accepted" in done.stdout
    assert "--engine HOST:PORT --drive" in " ".join(done.stdout.split())


def test_a_pipe_is_not_asked(here):
    for asked in (("diagnose", "tiny", "--engine", "-", "--drive"), ("measure", "tiny", "--engine", "-#model")):
        code, _, err = here(*asked)
        assert (code, "standard input cannot be asked" in err) == (2, True)
