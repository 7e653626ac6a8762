"""The kit against our own decoder: a healthy one passes, one with an injected fault breaks the clause of that fault."""

import json
from dataclasses import replace

import numpy as np
import pytest
from decoding_engine import Server, drawn, faulty, seen
from quick import case, others_slow
from tiny import FIXTURES, refrain

from nextn.cli import main
from nextn.conformance.build import build_record
from nextn.conformance.check import ConformanceReport, ReadingFit, check, clauses
from nextn.conformance.engine_run import ConformanceRun, from_files, run_greedy
from nextn.conformance.record import CLAUSES, FILE, Canary, CanaryPrompt, RecordedReading, clause_of, prompt_counts
from nextn.engines.answers import EngineAnswer
from nextn.engines.counters import Counters
from nextn.errors import ConfigError, EngineError
from nextn.evaluate.faults import FAULTS
from nextn.settings import Contract

INJECTED = [fault.name for fault in FAULTS if not fault.rule]
QUICK = ("pairs-off-by-one",)
# No trained fixture has an output head of its own, or reads the trunk's keys (test_shared_kv_head.py).
NOT_HERE = {"own-lm-head-lost", *CLAUSES[-1].faults}
# The fixtures are surer of their text than canaries: hotter, rules of acceptance differ as they do there.
HEAT = 3.0
NAMES = ["glm", "glm_one", "glm_two", "qwen"]


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    """Records of the fixtures, made once: name -> Canary."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            found = build_record(
                FIXTURES / name, refrain(8, 33, seed=10**6).tolist(), count=6, tokens=24, temperature=HEAT
            )
            (folder / FILE).write_text(json.dumps(found))
            made[name] = Canary.read(folder)
        return made[name]

    return of


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.more
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("k", others_slow([1, 3, 4], 3))
def test_a_correct_engine_passes(kits, trained, k, whole):
    """Whether it drafts beyond the end of a text or not."""
    canary = kits("glm_one")
    report = check(canary, seen(trained["glm_one"], Contract(), canary, k, whole=whole))
    assert not report.failed
    assert report.num_speculative_tokens == k
    assert report.fits[0].distance == 0
    assert {each.name: each.outcome for each in report.checks}["C8"] == "passed"


@pytest.mark.more
@pytest.mark.parametrize(
    ("fault", "names"),
    [
        *(case(fault, ("glm", "glm_one"), quick=True) for fault in QUICK),
        *(case(fault, NAMES, quick=False) for fault in INJECTED if fault not in NOT_HERE),
    ],
    ids=str,
)
def test_each_fault_is_named(fault, names, kits, trained):
    """The confusion test: decoded under the fault, the engine breaks its clause wherever the fault changes a count, and
    it changes one in some fixture."""
    shown = []
    for name in names:
        injected = faulty(trained[name], fault)
        if injected is None:
            continue
        canary = kits(name)
        report = check(canary, seen(*injected, canary, 4))
        assert report.fits[0].distance == 0
        if any(fit.distance == 0 and fit.reading.name in ("right", "rounded") for fit in report.fits):
            assert report.is_right
            continue
        assert clause_of(fault).id in [each.name for each in report.broken]
        assert fault in [each.name for each in report.explanations]
        shown.append(name)
    assert shown, f"{fault} changes no count in any fixture"


@pytest.mark.more
def test_an_engine_over_http(kits, trained, tmp_path, capsys):
    """Counters are read around each prompt, and caches are not used."""
    canary, server = kits("glm"), Server(trained["glm"])
    try:
        assert exit_code(["check", canary.folder, "--engine", server.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["num_speculative_tokens"] == 3
        assert found["outcome"] == "passed"
        salts = {body["cache_salt"] for body in server.asked[1:]}
        assert len(salts) == len(canary.prompts)
        server.model, server.contract = faulty(trained["glm"], "no-prefill")
        assert exit_code(["check", canary.folder, "--engine", server.url]) == 1
        output = capsys.readouterr().out
        assert "C5" in output
        assert "ml-explore/mlx-lm#990" in output
        assert "breaks C5 (prefill)" in " ".join(output.split())
    finally:
        server.stop()


@pytest.mark.more
def test_texts_that_differ(kits, trained, capsys):
    """A token other than the trunk's, which is far ahead: rollback, and its counts are not compared."""
    canary, server = kits("glm"), Server(trained["glm"], wrong=True)
    try:
        assert exit_code(["check", canary.folder, "--engine", server.url, "--json"]) == 1
    finally:
        server.stop()
    found = json.loads(capsys.readouterr().out)
    assert found["num_speculative_tokens"] == 3
    results = {each["name"]: each for each in found["checks"]}
    assert results["C8"]["outcome"] == "failed"
    assert "new token 5" in results["C8"]["expected"]
    assert results["C5"]["outcome"] == "inconclusive"


def test_no_counters(kits, trained, capsys):
    canary, server = kits("glm"), Server(trained["glm"], metrics=False)
    try:
        assert exit_code(["check", canary.folder, "--engine", server.url, "-k", "3", "--json"]) == 1
    finally:
        server.stop()
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["checks"] if each["outcome"] == "failed"] == ["C14"]


RULES = [("ratio", ""), ("block", ""), ("match", "exact-match"), ("argmax", "argmax-drafts")]


def sampling_rule(canary, model, k, found):
    """The result for C13."""
    report = check(canary, seen(model, Contract(), canary, k), num_speculative_tokens=k, sampled_run=found)
    return next(each for each in report.checks if each.name == "C13")


@pytest.mark.more
@pytest.mark.parametrize(("k", "whole"), others_slow([(1, True), (4, True), (4, False)], (4, True)))
@pytest.mark.parametrize(("rule", "fault"), RULES)
def test_the_rule_of_acceptance_is_named(rule, fault, k, whole, kits, trained):
    """The decoder under each rule: at the least and the largest K, whether its last rounds are whole or cut."""
    canary, model = kits("glm"), trained["glm"]
    result = sampling_rule(canary, model, k, drawn(model, canary, k, rule, whole=whole))
    assert result.outcome == ("failed" if fault else "passed")
    assert result.fault == fault
    assert bool(result.expected and result.seen) is bool(fault)
    assert ("jundot/omlx#3370" in result.issues) is (rule == "match")
    if k > 1 and not fault:
        assert f"counts as with {rule}" in result.evidence


@pytest.mark.more
@pytest.mark.parametrize("ending", others_slow(["whole", "cut"], "whole"))
@pytest.mark.parametrize("rule", [rule for rule, _ in RULES])
def test_expected_counts_are_those_of_decoding(rule, ending, kits, trained):
    """Rounds, and those that accepted each depth, as many in a pass as the decoder counts."""
    canary, passes = kits("glm"), 24
    recorded = next(each for each in canary.sampled.rules if each.name == rule)
    offered, accepted = (np.array(side).mean(0) for side in recorded.counts[3][ending])
    found = drawn(trained["glm"], canary, 3, rule, passes=passes, whole=ending == "whole").counters.acceptance()
    for ours, theirs in ((offered, found.num_drafted), (accepted, found.num_accepted)):
        assert np.array(theirs) / passes == pytest.approx(ours, rel=0.12 if rule == "argmax" else 0.06, abs=0.5)


@pytest.mark.one_case
@pytest.mark.parametrize(("rule", "fault"), RULES)
def test_the_rule_by_the_acceptance_length(rule, fault, kits, trained):
    """llama.cpp's timings: accepted drafts as far as the text goes, rounds from its tokens, no positions."""
    canary, model = kits("glm"), trained["glm"]
    found = drawn(model, canary, 3, rule, whole=False)
    tokens, texts = sum(len(text) for texts in found.texts for text in texts), 8 * len(canary.prompts)
    rounds = tokens - texts - found.counters.accepted
    without_positions = replace(found, counters=replace(found.counters, per_position=(), num_drafts=rounds))
    result = sampling_rule(canary, model, 3, without_positions)
    assert (result.outcome, result.fault) == ("failed" if fault else "passed", fault)


def test_what_does_not_show_the_rule(kits, trained):
    canary, model = kits("glm"), trained["glm"]
    found = drawn(model, canary, 3, "ratio")
    few = Counters("ours", 6, 18, 5, (4, 1, 0))
    none = Counters("ours", 0, 0, 0, (0, 0, 0))
    short = tuple(tuple(text[:-2] for text in texts) for texts in found.texts)
    for other, words in (
        (replace(found, counters=None, no_counts_reason="nothing at /metrics"), "nothing at /metrics"),
        (replace(found, counters=few), "cannot be distinguished in this many rounds"),
        (replace(found, counters=none), "counts no round that drafted"),
        (replace(found, texts=found.texts[:1] * 8), "the same texts at every seed"),
        (replace(found, texts=short), "ignore_eos"),
        (None, "--sampled"),
    ):
        result = sampling_rule(canary, model, 3, other)
        assert result.outcome == "inconclusive"
        assert words in result.evidence


def test_no_known_rule(kits, trained):
    """What accepts less than every rule breaks the clause without a name; what accepts more may be no lossless rule."""
    canary, model = kits("glm"), trained["glm"]
    found = drawn(model, canary, 3, "ratio")
    rounds = found.counters.num_drafts
    for accepted, expected_outcome, words in (
        ((0, 0, 0), "failed", "accepts less than ratio"),
        ((rounds,) * 3, "inconclusive", "verify"),
    ):
        counters = Counters("ours", rounds, 3 * rounds, sum(accepted), accepted)
        outcome = sampling_rule(canary, model, 3, replace(found, counters=counters))
        assert outcome.outcome == expected_outcome
        assert words in outcome.evidence


@pytest.mark.more
def test_other_faults_hide_the_rule(kits, trained):
    """A head that does not see the prompt accepts less at any temperature."""
    canary, model = kits("glm"), trained["glm"]
    injected = seen(model, Contract(prefill=False), canary, 3)
    report = check(canary, injected, sampled_run=drawn(model, canary, 3, "ratio"))
    results = {each.name: each for each in report.checks}
    assert results["C5"].outcome == "failed"
    assert results["C13"].outcome == "inconclusive"
    assert "greedy counts" in results["C13"].evidence


@pytest.mark.slow
def test_sampled_over_http(kits, trained, capsys):
    """A request for each prompt and pass, seeds differ, texts do not end before; one clause breaks and is named."""
    canary, server = kits("glm"), Server(trained["glm"], rule="match")
    try:
        assert exit_code(["check", canary.folder, "--engine", server.url, "--sampled", "2"]) == 1
    finally:
        server.stop()
    output = " ".join(capsys.readouterr().out.split())
    assert "breaks C13 (sampling rule)" in output
    assert "counts as with exact-match" in output
    assert "known in jundot/omlx#3370" in output
    count = len(canary.prompts)
    asked = server.asked[1 + count :]
    assert len(server.asked) == 1 + 3 * count
    assert len({body["seed"] for body in asked}) == len({body["cache_salt"] for body in asked}) == 2 * count
    assert {body["temperature"] for body in asked} == {canary.sampled.temperature}
    assert all(body["ignore_eos"] for body in asked)


@pytest.mark.parametrize(
    ("how", "words"),
    [case({"metrics": False}, "no metrics", quick=False), ({"seeds": False}, "the same texts at every seed")],
)
def test_sampled_without_an_answer(how, words, kits, trained, capsys):
    canary, server = kits("glm"), Server(trained["glm"], **how)
    try:
        exit_code(["check", canary.folder, "--engine", server.url, "--sampled", "2", "-k", "3", "--json"])
    finally:
        server.stop()
    found = json.loads(capsys.readouterr().out)
    clause = next(each for each in found["checks"] if each["name"] == "C13")
    assert clause["outcome"] == "inconclusive"
    assert words in clause["evidence"]
    assert found["sampled"]["passes"] == 2


def exit_code(arguments):
    """Exit code of `nextn canary ...`."""
    import sys

    sys.argv = ["nextn", "canary", *map(str, arguments)]
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_files_in_place_of_an_engine(kits, trained, tmp_path):
    """Answers with counters of all prompts together."""
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    answers, counters = tmp_path / "answers.jsonl", tmp_path / "counters.json"
    answers.write_text("\n".join(json.dumps({"tokens": text}) for text in found.texts))
    counters.write_text(json.dumps([each.as_record() for _, each in found.counts]))
    report = check(canary, from_files(canary, answers, counters))
    assert not report.failed
    assert report.num_speculative_tokens == 3
    assert len(report.run.counts) == 1
    assert exit_code(["check", canary.folder, "--answers", answers, "--counters", counters]) == 0


@pytest.mark.more
def test_llama_timings_have_no_positions(kits, trained, tmp_path):
    """Counters of each answer, without positions: rounds and accepted drafts alone still show a fault."""
    canary = kits("glm_one")
    for contract, failed in ((Contract(), False), (Contract(prefill=False), True)):
        found = seen(trained["glm_one"], contract, canary, 3)
        lines = [
            {"tokens": text, "timings": {"draft_n": each.draft_tokens, "draft_n_accepted": each.accepted,
                                         "predicted_n": len(text)}}
            for text, (_, each) in zip(found.texts, found.counts, strict=True)
        ]  # fmt: skip
        answers = tmp_path / "answers.jsonl"
        answers.write_text("\n".join(map(json.dumps, lines)))
        report = check(canary, from_files(canary, answers, None))
        assert report.failed is failed
        assert ("C5" in [each.name for each in report.broken]) is failed


def test_counts_that_do_not_add_up(kits, trained):
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    doubled = [(at, replace(each, num_drafts=3 * each.num_drafts)) for at, each in found.counts]
    report = check(canary, replace(found, counts=tuple(doubled)))
    assert "C14" in [each.name for each in report.broken]


def test_rounding_is_no_finding(kits, trained):
    """One draft less in one prompt, which no fault gives: within what arithmetic may flip."""
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    (at, first), *others = found.counts
    less = replace(
        first, accepted=first.accepted - 1, per_position=(*first.per_position[:2], first.per_position[2] - 1)
    )
    report = check(canary, replace(found, counts=((at, less), *others)))
    assert report.fits[0].distance == 1
    assert report.is_right


def test_counts_of_nothing_known(kits, trained):
    """No clause is blamed, and still it does not pass."""
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    half = [
        (at, Counters("x", per_position=(each.per_position[0] // 2,) * 3, num_drafts=None))
        for at, each in found.counts
    ]  # fmt: skip
    report = check(canary, replace(found, counts=tuple(half)))
    assert report.failed
    assert not report.explanations
    assert not report.broken
    assert "no known fault" in report.summary


def test_near_ties_are_no_finding(kits, trained):
    canary = kits("glm")
    found = seen(trained["glm"], Contract(), canary, 3)
    other = (*found.texts[0][:4], (found.texts[0][4] + 1) % 40, *found.texts[0][5:])
    gaps = (*canary.prompts[0].gaps[:4], 0.1, *canary.prompts[0].gaps[5:])
    level = replace(canary, prompts=(replace(canary.prompts[0], gaps=gaps), *canary.prompts[1:]))
    texts = replace(found, texts=(other, *found.texts[1:]))
    assert not check(level, texts).failed
    assert [each.name for each in check(canary, texts).broken] == ["C8"]


@pytest.mark.more
def test_an_engine_by_its_convention(kits, trained):
    """GLM's head in vLLM hands on another state and zeroes the first position: both clauses are named."""
    canary = kits("glm")
    reading = next(each for each in canary.readings if each.name == "engine:vllm")
    assert set(clauses(reading)) == {"C4", "C7"}
    assert reading.rounds != canary.right.rounds
    assert "stale-head-cache" not in {
        each.name for each in kits("glm_two").readings
    }  # its positions are run again in any case


def small(*others, prompts=2, rounds=(1, 1, 0)):
    """A record made by hand, at K = 2: texts of six tokens, of which the fourth is nearly level."""
    asked = CanaryPrompt("", (0,), tuple(range(1, 12)), (1.0, 1.0, 1.0, 0.25, *[1.0] * 7))
    readings = tuple(RecordedReading(name, name, {2: (rounds,) * prompts}) for name in ("right", *others))
    return Canary("x", "glm4_moe", 6, 0.25, (2,), (asked,) * prompts, readings, {})


TEXT = (1, 2, 3, 4, 5, 6)


def report_with_distances(offs, counts=()):
    """A report on counts that are so far away from each reading, with a slack of 2."""
    canary = small(*list(offs)[1:])
    fits = sorted((ReadingFit(each, offs[each.name]) for each in canary.readings), key=lambda fit: fit.distance)
    return ConformanceReport(canary, ConformanceRun((TEXT, TEXT), counts), 2, (), tuple(fits), tolerance=2)


@pytest.mark.parametrize(
    ("offs", "named"),
    [
        ({"right": 0, "no-prefill": 0}, ["right"]),
        ({"right": 2, "no-prefill": 1}, ["right"]),  # what rounding may flip
        ({"right": 2, "no-prefill": 0}, ["no-prefill"]),  # within it, and exactly a fault's
        ({"right": 9, "rounded": 1, "no-prefill": 1}, ["right"]),
        ({"right": 3, "no-prefill": 2, "stale-head-cache": 2}, ["no-prefill", "stale-head-cache"]),
        ({"right": 8, "no-prefill": 3}, ["no-prefill"]),
        ({"right": 20, "no-prefill": 15}, []),
    ],
)
def test_what_explains_the_counts(offs, named):
    assert [each.name for each in report_with_distances(offs).explanations] == named


def test_what_counts_can_show():
    """A clause is held only if each of its faults would have shown, beside what the counts are off anyway."""
    found = report_with_distances({"right": 0, "norm-offset-missing": 0, "inputs-swapped": 9, "no-prefill": 9})
    results = {each.name: (each.outcome, each.evidence) for each in found.checks}
    assert results["C2"] == ("inconclusive", "norm-offset-missing gives the same counts at K = 2")
    assert results["C3"] == ("inconclusive", "this head cannot show it")
    assert results["C5"] == ("passed", "no-prefill would differ by 9 accepted drafts")
    assert results["C13"] == ("inconclusive", "greedy texts do not show it; --sampled 8 requests others")
    found = report_with_distances({"right": 2, "wrong-hidden": 1, "no-prefill": 2, "pairs-off-by-one": 3})
    results = {each.name: each.outcome for each in found.checks}
    assert (results["C1"], results["C3"], results["C5"]) == ("passed", "inconclusive", "inconclusive")


def test_faults_with_the_same_counts():
    """Each of their clauses names the other; what was counted is added up over prompts that accepted fewer depths."""
    counts = ((0,), Counters("x", 3, 6, 3, (2, 1))), ((1,), Counters("x", 3, 6, 1, (1,)))
    found = report_with_distances({"right": 9, "no-prefill": 0, "stale-head-cache": 0}, counts)
    assert [each.name for each in found.broken] == ["C5", "C6"]
    assert found.broken[0].evidence.endswith("the same counts as stale-head-cache")
    assert found.broken[0].seen == "rounds 6; accepted 4; by position 3, 1"


@pytest.mark.parametrize(
    ("text", "place", "near", "seen"),
    [
        ((1, 2, 3, 9, 5, 6), 3, True, ""),
        ((1, 2, 9, 4, 5, 6), 2, False, "9"),
        ((1, 2, 3), 3, False, "the end"),  # a text that ends is no near-tie
        ((*TEXT, 7), 5, False, "6"),
    ],
)
def test_where_a_text_parts(text, place, near, seen):
    report = check(small(), ConformanceRun((text, TEXT), ()), num_speculative_tokens=2)
    assert [(each.prompt, each.position, each.is_near_tie) for each in report.differences] == [(0, place, near)]
    outcome = next(each for each in report.checks if each.name == "C8")
    assert (outcome.outcome, outcome.seen) == ("passed" if near else "failed", seen)
    both = check(small(), ConformanceRun((text, text), ()), num_speculative_tokens=2)
    assert next(each.outcome for each in both.checks if each.name == "C8") == ("inconclusive" if near else "failed")


def test_counters_of_all_prompts_at_once():
    """They are compared even if a text parts at a near-tie; those of that prompt alone are not."""
    texts, right = ((1, 2, 3, 9, 5, 6), TEXT), Counters("x", 6, 12, 4, (4, 0))
    assert [each.distance for each in check(small(), ConformanceRun(texts, (((0, 1), right),))).fits] == [0]
    assert check(small(), ConformanceRun(texts, (((0,), right),))).fits == ()


def test_counts_of_other_texts_pass_nothing():
    """All texts part at a near-tie, so that no counts compare: not one clause is shown, and none is said to hold."""
    parted = (1, 2, 3, 9, 5, 6)
    counts = tuple(((at,), Counters("x", 3, 6, 2, (2, 0))) for at in range(2))
    report = check(small(), ConformanceRun((parted, parted), counts), num_speculative_tokens=2)
    assert {each.outcome for each in report.checks} == {"inconclusive"}
    assert (report.outcome, report.failed) == ("inconclusive", False)
    assert "shows no clause" in report.summary
    without_rounds = tuple((places, replace(each, num_drafts=None)) for places, each in counts)
    report = check(small(), ConformanceRun((TEXT, TEXT), without_rounds), num_speculative_tokens=2)
    assert {each.name: each.outcome for each in report.checks}["C14"] == "inconclusive"


def test_a_k_below_the_engines_own():
    """Catches counts of the first positions alone taken for all of them; positions that keep nothing are no drafts."""
    counts = tuple(((at,), Counters("x", 2, 6, 4, (2, 1, 1))) for at in range(2))
    with pytest.raises(ConfigError, match="K = 0; the canary holds counts for K = "):
        check(small(), ConformanceRun((TEXT, TEXT), ()), num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="K = 2, but the engine accepted drafts at position 3"):
        check(small(), ConformanceRun((TEXT, TEXT), counts), num_speculative_tokens=2)
    empty = tuple((places, replace(each, per_position=(2, 2, 0))) for places, each in counts)
    assert check(small(), ConformanceRun((TEXT, TEXT), empty), num_speculative_tokens=2).num_speculative_tokens == 2


def test_rounds_that_some_answers_do_not_report():
    """They are no reason to pass over those that others tell, neither for K nor for the sum."""
    counts = ((0,), Counters("x", None, 6, 2)), ((1,), Counters("x", 9, 18, 2))
    report = check(small(), ConformanceRun((TEXT, TEXT), counts))
    assert report.num_speculative_tokens == 2
    assert next(each for each in report.broken if each.name == "C14").evidence.startswith("prompts 1:")


@pytest.mark.parametrize(("prompts", "slack"), [(2, 2), (25, 3)])
def test_slack_grows_with_the_drafts(prompts, slack):
    counts = tuple(((at,), Counters("x", 2, 4, 4, (2, 2))) for at in range(prompts))
    assert check(small(prompts=prompts, rounds=(2, 2)), ConformanceRun((TEXT,) * prompts, counts)).tolerance == slack


def test_only_recorded_k():
    canary = small()
    for asked in (
        lambda: check(canary, ConformanceRun((TEXT, TEXT), ()), num_speculative_tokens=9),
        lambda: canary.counts(canary.right, 9, [0]),
    ):
        with pytest.raises(ConfigError, match="K = 9; the canary holds counts for K = 2"):
            asked()


def test_figures_of_a_record():
    """The AL of its rounds; positions that an engine does not report accepted nothing."""
    canary = small()
    assert canary.length(canary.right, 2) == pytest.approx(1 + 2 / 3)
    assert prompt_counts([2, 0, 2, 1], 3, 10).distance(Counters("x", 4, 12, 3, (3,))) == 2


class Late:
    """An endpoint whose counters rise by 4 a prompt, some readings after the answer; with `timings` in place of
    them where `late` is None."""

    served = type("Served", (), {"name": "x"})

    def __init__(self, answer, *, late=0, rises=4):
        self.given, self.late, self.rises, self.asked, self.read = answer, late, rises, [], 99

    def metrics(self):
        if self.late is None:
            raise EngineError("no metrics here")
        self.read += 1
        rounds = self.rises * (len(self.asked) - (self.read <= self.late))
        names = {"drafts": rounds, "draft_tokens": 2 * rounds, "accepted_tokens": rounds}
        return "".join(f"vllm:spec_decode_num_{name}_total {value}\n" for name, value in names.items())

    def answer(self, ask):
        self.asked.append(ask)
        self.read = 0
        return self.given


@pytest.mark.parametrize(("late", "rises"), [(0, 4), (5, 4), (0, 0)])
def test_counters_that_are_late(monkeypatch, late, rises):
    """Two equal readings are none yet while they are those from before the answer; an engine may never draft."""
    monkeypatch.setattr("nextn.engines.ask._POLL_S", 0)
    found = run_greedy(Late(EngineAnswer("ab", "length"), late=late, rises=rises), small())
    assert [(places, each.num_drafts) for places, each in found.counts] == [((0,), rises), ((1,), rises)]


def test_an_engine_that_returns_text_alone():
    """Its bytes are the ids; counters may come with each answer. No run is served from the cache of another."""
    endpoint, ticks = (
        Late(EngineAnswer("\u00e9", "length", raw={"timings": {"draft_n": 4, "draft_n_accepted": 3}}), late=None),
        [],
    )
    for _ in range(2):
        found = run_greedy(endpoint, small(), on_prompt=lambda: ticks.append(1))
    assert found.texts == ((0xC3, 0xA9),) * 2
    assert [each.accepted for _, each in found.counts] == [3, 3]
    assert found.no_counts_reason == "no metrics here"
    bodies = [each.body("x", chat=False, extra_fields=True) for each in endpoint.asked]
    assert len({body["cache_salt"] for body in bodies}) == len(ticks) == 4


def test_answers_of_a_file(tmp_path):
    """Texts stand for their bytes, empty lines for nothing; one answer a prompt, and counters from somewhere."""
    path, line = tmp_path / "answers.jsonl", json.dumps({"text": "\u00e9"}) + "\n"
    path.write_text(line + "\n" + line)
    found = from_files(small(), path, None)
    assert found.texts == ((0xC3, 0xA9),) * 2
    assert "give --counters" in next(
        each.evidence for each in check(small(), found, num_speculative_tokens=2).broken if each.name == "C14"
    )
    path.write_text(line * 3)
    with pytest.raises(ConfigError, match="3 answers; the canary has 2 prompts"):
        from_files(small(), path, None)


@pytest.mark.parametrize("text", ["[]", "x", '{"format": 1}', '{"format": 1, "settings": null, "prompts": 1}'])
def test_what_is_no_record(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"not the record of a canary|build it again"):
        Canary.read(tmp_path)


@pytest.mark.parametrize(
    ("accepted", "rounds", "positions"),
    [
        ([2, 0, 2, 1], "4", ["3", "2", "0"]),  # 1 + 3 + 1 + 3 + 2 = 10 tokens, none too many
        ([3, 3, 3], "2 to 3", ["2 to 3", "2 to 3", "2 to 3"]),  # one is missing in the last: some do not draft
        ([2, 2, 0, 3], "4", ["3", "2 to 3", "0 to 1"]),  # two are missing
    ],
)
def test_the_last_round(accepted, rounds, positions):
    """Drafts that reach beyond the last token may be counted or not."""
    found = prompt_counts(accepted, 3, 10)
    assert (str(found.rounds), list(map(str, found.positions))) == (rounds, positions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--engine URL"),
        (["--engine", "localhost:1", "--counters", "x"], "--counters belongs to --answers"),
        (["--answers", "absent.jsonl"], "cannot be read"),
        (["--answers", "absent.jsonl", "--sampled", "8"], "--sampled needs --engine"),
        (["--engine", "localhost:1"], "nothing answers"),
    ],
)
def test_usage(kits, arguments, message, capsys):
    assert exit_code(["check", kits("glm").folder, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_canary(tmp_path, capsys):
    assert exit_code(["check", tmp_path, "--engine", "localhost:1"]) == 2
    assert "canary build" in capsys.readouterr().err
    (tmp_path / FILE).write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="format 1"):
        Canary.read(tmp_path)


def test_clauses_name_every_fault_once():
    """A fault that no clause is about could not be named."""
    named = [fault for clause in CLAUSES for fault in clause.faults]
    assert len(set(named)) == len(named)
    assert {fault.name for fault in FAULTS} <= set(named)
    assert [clause.id for clause in CLAUSES] == [f"C{number}" for number in range(1, len(CLAUSES) + 1)]
