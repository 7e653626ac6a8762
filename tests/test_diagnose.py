"""Planted faults are named from counters alone, by position or in total; what is no fault is called none."""

import json
from dataclasses import replace

import pytest
from served import ServedModel
from tiny import refrain

from nextn.benchmarking.workload import Prompt
from nextn.drafting import Contract
from nextn.engines.answers import Answer, Token
from nextn.engines.client import Budget, Limits
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.errors import ConfigError, EngineError
from nextn.measuring.cases import check_drafts
from nextn.measuring.causes import FINE
from nextn.measuring.diagnose import diagnose
from nextn.measuring.drive import Seen, driven, halves
from nextn.measuring.faults import FAULTS, planted
from nextn.measuring.hypotheses import Observed, depth_of, observation
from nextn.measuring.plan import Plan
from nextn.measuring.texts import continued
from nextn.measuring.variants import read_as

PROMPTS = [Prompt(tuple(row.tolist()), "xy"[place % 2]) for place, row in enumerate(refrain(12, 33, seed=10**6))]
OTHERS = [Prompt(tuple(row.tolist()), "x") for row in refrain(16, 33, seed=5)]
PLAN = Plan(drafts=3, temperatures=(0.0,), max_tokens=20, path="plain", rule="ratio")


def counted(model, fault="", *, prompts=OTHERS):
    """What an engine with this fault counts of prompts of its own."""
    contract = Contract()
    if fault:
        found = next(each for each in FAULTS if each.name == fault)
        model, contract = read_as(model, contract, [planted(found, model)])
    pooled = continued(model, [prompt.text for prompt in prompts], PLAN, 0.0, contract=contract).pooled
    drafts = pooled.offered[0]
    return Counters("vLLM", drafts, 3 * drafts, sum(pooled.kept), pooled.kept)


@pytest.fixture(scope="module")
def counters(trained):
    return {fault: counted(trained["glm"], fault) for fault in ("", "wrong-hidden", "no-prefill", "pair-shifted")}


@pytest.fixture(scope="module")
def diagnosed(trained, counters):
    """Of the same prompts, in one go: the reference is the slow part."""
    places = tuple(range(len(PROMPTS)))
    return {
        fault: diagnose(trained["glm"], PROMPTS, [Seen(0.0, each, places)], PLAN, source="glm")
        for fault, each in counters.items()
    }


def test_planted_faults_are_named(diagnosed):
    for fault in ("wrong-hidden", "no-prefill"):
        found = diagnosed[fault]
        assert found.named == (fault,)
        assert not found.is_fine
        assert found.words.startswith(fault)
        assert found.suspects[0].issues
        assert found.suspects[0].advice
    assert "pair-shifted" in {*diagnosed["pair-shifted"].named, *diagnosed["pair-shifted"].alike}


def test_a_right_engine_is_fine(diagnosed):
    found = diagnosed[""]
    assert found.named == (FINE,)
    assert found.is_fine
    assert found.suspects == []
    assert "head-quantised" in found.hidden
    assert "wrong-hidden" not in found.hidden
    assert any("would not show" in note for note in found.notes)


def test_the_record_is_json(diagnosed):
    record = json.loads(json.dumps(diagnosed["wrong-hidden"].as_record()))
    assert record["named"] == ["wrong-hidden"]
    assert record["causes"][0]["ratio"] == 1
    assert record["cases"][0]["prompts"] == len(PROMPTS)
    assert set(record["definitions"]) >= {"ratio", "misfit", "named", "alike", "hidden"}


def test_totals_alone(trained, counters):
    """Engines that tell no positions: the AL is one figure, and enough for large faults."""
    seen = [replace(counters["no-prefill"], per_position=()), Counters("SGLang", length=3.75)]
    low, fine = (diagnose(trained["glm"], PROMPTS, [Seen(0.0, each, tuple(range(12)))], PLAN) for each in seen)
    assert "no-prefill" in low.named
    assert fine.is_fine
    assert any("counts no positions" in note for note in low.notes)


def test_other_prompts_are_another_workload(trained):
    """Where nobody knows what was asked, a gap that workloads explain is no fault, and it is said."""
    model = trained["glm_two"]
    right = counted(model)
    some = replace(right, per_position=tuple(round(0.9**k * each) for k, each in enumerate(right.per_position, 1)))
    other = diagnose(model, PROMPTS, [Seen(0.0, some)], PLAN)
    assert other.is_fine
    assert any("--drive" in note and "domains" in note for note in other.notes)
    same = replace(other, cases=tuple(replace(case, seen=replace(case.seen, places=(0,))) for case in other.cases))
    assert other.cases[0].workload
    assert not same.cases[0].workload
    fine = [next(each for each in found.causes if each.name == FINE) for found in (other, same)]
    assert fine[0].misfit > fine[1].misfit


def test_a_poor_head_is_the_weights(trained, counters):
    unset = next(each for each in FAULTS if each.name == "head-unset")
    poor, _ = read_as(trained["glm"], Contract(), [unset.variant])
    found = diagnose(poor, PROMPTS, [Seen(0.0, counted(poor), tuple(range(12)))], PLAN)
    assert found.named == ("weights",)
    assert "poor" in found.words
    assert not found.is_fine


def test_low_on_long_prompts_alone(trained):
    """No fault of all prompts explains it, and the short ones are as they should be."""
    short, long = counted(trained["glm"], prompts=PROMPTS[:6]), counted(trained["glm"], prompts=PROMPTS[6:])
    places = tuple(range(6)), tuple(range(6, 12))
    low = replace(long, per_position=(1, 0, 0))
    found = diagnose(trained["glm"], PROMPTS, [Seen(0.0, short, places[0]), Seen(0.0, low, places[1])], PLAN)
    assert found.named == ("context-length",)
    assert found.suspects[0].issues
    right = diagnose(trained["glm"], PROMPTS, [Seen(0.0, short, places[0]), Seen(0.0, long, places[1])], PLAN)
    assert right.is_fine


def test_what_counters_say():
    whole = Counters("vLLM", 100, 300, 120, (70, 40, 10))
    assert observation(whole, 3) == Observed((100, 70, 40), (70, 40, 10))
    assert depth_of(whole) == 3
    assert observation(replace(whole, per_position=()), 3) == Observed(length=2.2, rounds=100)
    assert depth_of(replace(whole, per_position=())) == 3
    assert observation(Counters("llama.cpp", None, 300, 120), 3) == Observed(length=2.2, rounds=100)
    assert observation(Counters("SGLang", length=2.5), 3) == Observed(length=2.5)
    with pytest.raises(EngineError, match="is MTP on"):
        observation(Counters("vLLM", 0, 0, 0), 3)
    with pytest.raises(ConfigError, match="give its number with --drafts"):
        check_drafts([Seen(0.0, Counters("SGLang", length=2.5))], None)
    with pytest.raises(ConfigError, match="are of 3"):
        check_drafts([Seen(0.0, whole)], 4)
    check_drafts([Seen(0.0, Counters("SGLang", length=2.5))], 4)


def test_halves():
    assert halves([[0] * 9] * 4) == [(0, 1, 2, 3)]
    assert halves([[0] * size for size in (9, 90, 8, 80)]) == [(0, 2), (1, 3)]
    assert halves([[0], [0] * 90]) == [(0, 1)]


@pytest.fixture
def serve(trained):
    running = []

    def started(*faults, **settings):
        running.append(ServedModel(*faults, model=trained["glm"], **settings))
        return Endpoint.open(running[-1].url, Budget(Limits(requests=200, seconds=60)))

    yield started
    for each in running:
        each.stop()


def drive(serve, trained, *faults, **settings):
    endpoint = serve(*faults, **settings)
    seen = driven(endpoint, trained["glm"], PROMPTS, PLAN)
    return diagnose(trained["glm"], PROMPTS, seen, PLAN)


def test_driving(serve, trained):
    """The same prompts: the engine's text is the reference's, its counts are, too."""
    found = drive(serve, trained)
    assert found.is_fine
    assert found.cases[0].fresh == 0
    assert not found.cases[0].workload
    assert drive(serve, trained, contract=Contract(prefill=False)).named == ("no-prefill",)


def test_driving_where_others_ask_too(serve, trained):
    found = drive(serve, trained, "busy")
    assert found.cases[0].workload
    assert any("others asked" in note for note in found.notes)


def test_counters_reset_in_mid_run(serve, trained):
    with pytest.raises(EngineError, match="reset in mid-run"):
        drive(serve, trained, "reset")


def test_another_trunk_is_told(serve, trained):
    found = drive(serve, trained, "other-trunk")
    assert any("not what this checkpoint says" in note for note in found.notes)


def test_another_template_is_told(trained, counters):
    """By the prompt tokens that the engine says it read."""
    prompts = [prompt.text for prompt in PROMPTS]
    answers = tuple(Answer("", "length", (Token("x", 1),), prompt_ids=(1, *prompt)) for prompt in prompts)
    found = diagnose(trained["glm"], PROMPTS, [Seen(0.0, counters[""], tuple(range(12)), answers)], PLAN)
    assert found.cases[0].templated == 12
    assert found.cases[0].workload
    assert any(note.startswith("template: of 12 of 12") for note in found.notes)
