"""The kit against our own decoder: a healthy one passes, one with a planted fault breaks the clause of that fault."""

import json
from dataclasses import replace

import numpy as np
import pytest
from decoding_engine import Server, drawn, faulty, seen
from tiny import FIXTURES, refrain

from nextn.canary.check import check, clauses
from nextn.canary.contract import CLAUSES, clause_of
from nextn.canary.drive import from_files
from nextn.canary.expected import record
from nextn.canary.kit import FILE, Canary, tally
from nextn.cli import main
from nextn.drafting import Contract
from nextn.engines.counters import Counters
from nextn.errors import ConfigError
from nextn.measuring.faults import FAULTS

PLANTED = [fault.name for fault in FAULTS if not fault.rule]
# No trained fixture has an output head of its own.
NOT_HERE = {"own-output-lost"}
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
            found = record(FIXTURES / name, refrain(8, 33, seed=10**6).tolist(), count=6, tokens=24, temperature=HEAT)
            (folder / FILE).write_text(json.dumps(found))
            made[name] = Canary.read(folder)
        return made[name]

    return of


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 4])
def test_a_correct_engine_passes(kits, trained, drafts, whole):
    """Whether it drafts beyond the end of a text or not."""
    canary = kits("glm_one")
    report = check(canary, seen(trained["glm_one"], Contract(), canary, drafts, whole=whole))
    assert not report.failed
    assert report.drafts == drafts
    assert report.fits[0].off == 0
    assert {each.clause.id: each.said for each in report.outcomes}["C8"] == "held"


@pytest.mark.parametrize("fault", [name for name in PLANTED if name not in NOT_HERE])
def test_each_fault_is_named(fault, kits, trained):
    """The confusion test: decoded under the fault, the engine breaks its clause wherever the fault changes a count, and
    it changes one in some fixture."""
    shown = []
    for name in NAMES:
        planted = faulty(trained[name], fault)
        if planted is None:
            continue
        canary = kits(name)
        report = check(canary, seen(*planted, canary, 4))
        assert report.fits[0].off == 0
        if any(fit.off == 0 and fit.reading.name in ("right", "rounded") for fit in report.fits):
            assert report.is_right
            continue
        assert clause_of(fault) in [each.clause for each in report.broken]
        assert fault in [each.name for each in report.named]
        shown.append(name)
    assert shown, f"{fault} changes no count in any fixture"


def test_an_engine_over_http(kits, trained, tmp_path, capsys):
    """Counters are read around each prompt, and caches are not used."""
    canary, server = kits("glm"), Server(trained["glm"])
    try:
        assert verdict(["check", canary.folder, "--engine", server.url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["drafts"] == 3
        assert not found["failed"]
        salts = {body["cache_salt"] for body in server.asked[1:]}
        assert len(salts) == len(canary.prompts)
        server.model, server.contract = faulty(trained["glm"], "no-prefill")
        assert verdict(["check", canary.folder, "--engine", server.url]) == 1
        told = capsys.readouterr().out
        assert "C5" in told
        assert "ml-explore/mlx-lm#990" in told
        assert "breaks C5 (prefill)" in " ".join(told.split())
    finally:
        server.stop()


def test_texts_that_differ(kits, trained, capsys):
    """A token other than the trunk's, which is far ahead: rollback, and its counts are not compared."""
    canary, server = kits("glm"), Server(trained["glm"], wrong=True)
    try:
        assert verdict(["check", canary.folder, "--engine", server.url, "-k", "3", "--json"]) == 1
    finally:
        server.stop()
    found = json.loads(capsys.readouterr().out)
    said = {each["clause"]: each for each in found["clauses"]}
    assert said["C8"]["said"] == "broken"
    assert "new token 5" in said["C8"]["expected"]
    assert said["C5"]["said"] == "untold"


def test_no_counters(kits, trained, capsys):
    canary, server = kits("glm"), Server(trained["glm"], metrics=False)
    try:
        assert verdict(["check", canary.folder, "--engine", server.url, "-k", "3", "--json"]) == 1
    finally:
        server.stop()
    found = json.loads(capsys.readouterr().out)
    assert [each["clause"] for each in found["clauses"] if each["said"] == "broken"] == ["C14"]


RULES = [("ratio", ""), ("block", ""), ("match", "exact-match"), ("argmax", "argmax-drafts")]


def sampling_rule(canary, model, drafts, found):
    """What is said of C13."""
    report = check(canary, seen(model, Contract(), canary, drafts), drafts=drafts, drawn=found)
    return next(each for each in report.outcomes if each.clause.id == "C13")


@pytest.mark.parametrize(("drafts", "whole"), [(1, True), (4, True), (4, False)])
@pytest.mark.parametrize(("rule", "fault"), RULES)
def test_the_rule_of_acceptance_is_told(rule, fault, drafts, whole, kits, trained):
    """The decoder under each rule: at the least and the largest K, whether its last rounds are whole or cut."""
    canary, model = kits("glm"), trained["glm"]
    said = sampling_rule(canary, model, drafts, drawn(model, canary, drafts, rule, whole=whole))
    assert said.said == ("broken" if fault else "held")
    assert said.fault == fault
    assert bool(said.expected and said.seen) is bool(fault)
    assert ("jundot/omlx#3370" in said.issues) is (rule == "match")
    if drafts > 1 and not fault:
        assert f"counts as with {rule}" in said.evidence


@pytest.mark.parametrize("ending", ["whole", "cut"])
@pytest.mark.parametrize("rule", [rule for rule, _ in RULES])
def test_expected_counts_are_those_of_decoding(rule, ending, kits, trained):
    """Rounds, and those that kept each depth, as many in a pass as the decoder counts."""
    canary, passes = kits("glm"), 24
    told = next(each for each in canary.sampled.rules if each.name == rule)
    offered, kept = (np.array(side).mean(0) for side in told.counts[3][ending])
    found = drawn(trained["glm"], canary, 3, rule, passes=passes, whole=ending == "whole").counters.acceptance()
    for ours, theirs in ((offered, found.offered), (kept, found.kept)):
        assert np.array(theirs) / passes == pytest.approx(ours, rel=0.12 if rule == "argmax" else 0.06, abs=0.5)


@pytest.mark.parametrize(("rule", "fault"), RULES)
def test_the_rule_by_the_acceptance_length(rule, fault, kits, trained):
    """llama.cpp's timings: kept drafts as far as the text goes, rounds from its tokens, no positions."""
    canary, model = kits("glm"), trained["glm"]
    found = drawn(model, canary, 3, rule, whole=False)
    tokens, texts = sum(len(text) for texts in found.texts for text in texts), 8 * len(canary.prompts)
    rounds = tokens - texts - found.counters.accepted
    told = replace(found, counters=replace(found.counters, per_position=(), drafts=rounds))
    said = sampling_rule(canary, model, 3, told)
    assert (said.said, said.fault) == ("broken" if fault else "held", fault)


def test_what_does_not_tell_the_rule(kits, trained):
    canary, model = kits("glm"), trained["glm"]
    found = drawn(model, canary, 3, "ratio")
    few = Counters("ours", 6, 18, 5, (4, 1, 0))
    none = Counters("ours", 0, 0, 0, (0, 0, 0))
    short = tuple(tuple(text[:-2] for text in texts) for texts in found.texts)
    for other, words in (
        (replace(found, counters=None, without="nothing at /metrics"), "nothing at /metrics"),
        (replace(found, counters=few), "cannot be told apart in so many rounds"),
        (replace(found, counters=none), "counts no round that drafted"),
        (replace(found, texts=found.texts[:1] * 8), "the same texts at every seed"),
        (replace(found, texts=short), "ignore_eos"),
        (None, "--sampled"),
    ):
        said = sampling_rule(canary, model, 3, other)
        assert said.said == "untold"
        assert words in said.evidence


def test_no_known_rule(kits, trained):
    """What keeps less than every rule breaks the clause without a name; what keeps more may be no lossless rule."""
    canary, model = kits("glm"), trained["glm"]
    found = drawn(model, canary, 3, "ratio")
    rounds = found.counters.drafts
    for kept, said, words in (((0, 0, 0), "broken", "keeps less than ratio"), ((rounds,) * 3, "untold", "verify")):
        counters = Counters("ours", rounds, 3 * rounds, sum(kept), kept)
        outcome = sampling_rule(canary, model, 3, replace(found, counters=counters))
        assert outcome.said == said
        assert words in outcome.evidence


def test_other_faults_hide_the_rule(kits, trained):
    """A head that does not see the prompt keeps less at any temperature."""
    canary, model = kits("glm"), trained["glm"]
    planted = seen(model, Contract(prefill=False), canary, 3)
    report = check(canary, planted, drawn=drawn(model, canary, 3, "ratio"))
    said = {each.clause.id: each for each in report.outcomes}
    assert said["C5"].said == "broken"
    assert said["C13"].said == "untold"
    assert "greedy counts" in said["C13"].evidence


def test_sampled_over_http(kits, trained, capsys):
    """A request for each prompt and pass, seeds differ, texts do not end before; one clause breaks and is named."""
    canary, server = kits("glm"), Server(trained["glm"], rule="match")
    try:
        assert verdict(["check", canary.folder, "--engine", server.url, "--sampled", "--passes", "2"]) == 1
    finally:
        server.stop()
    told = " ".join(capsys.readouterr().out.split())
    assert "breaks C13 (sampling rule)" in told
    assert "counts as with exact-match" in told
    assert "met in jundot/omlx#3370" in told
    count = len(canary.prompts)
    asked = server.asked[1 + count :]
    assert len(server.asked) == 1 + 3 * count
    assert len({body["seed"] for body in asked}) == len({body["cache_salt"] for body in asked}) == 2 * count
    assert {body["temperature"] for body in asked} == {canary.sampled.temperature}
    assert all(body["ignore_eos"] for body in asked)


@pytest.mark.parametrize(
    ("how", "words"), [({"metrics": False}, "no metrics"), ({"seeds": False}, "the same texts at every seed")]
)
def test_sampled_without_an_answer(how, words, kits, trained, capsys):
    canary, server = kits("glm"), Server(trained["glm"], **how)
    try:
        verdict(["check", canary.folder, "--engine", server.url, "--sampled", "--passes", "2", "-k", "3", "--json"])
    finally:
        server.stop()
    found = json.loads(capsys.readouterr().out)
    said = next(each for each in found["clauses"] if each["clause"] == "C13")
    assert said["said"] == "untold"
    assert words in said["evidence"]
    assert found["sampled"]["passes"] == 2


def verdict(arguments):
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
    assert report.drafts == 3
    assert len(report.seen.counts) == 1
    assert verdict(["check", canary.folder, "--answers", answers, "--counters", counters]) == 0


def test_llama_timings_have_no_positions(kits, trained, tmp_path):
    """Counters of each answer, without positions: rounds and kept drafts alone still tell a fault."""
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
        assert ("C5" in [each.clause.id for each in report.broken]) is failed


def test_counts_that_do_not_add_up(kits, trained):
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    doubled = [(at, replace(each, drafts=3 * each.drafts)) for at, each in found.counts]
    report = check(canary, replace(found, counts=tuple(doubled)))
    assert "C14" in [each.clause.id for each in report.broken]


def test_rounding_is_no_finding(kits, trained):
    """One draft less in one prompt, which no fault gives: within what arithmetic may flip."""
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    (at, first), *others = found.counts
    less = replace(
        first, accepted=first.accepted - 1, per_position=(*first.per_position[:2], first.per_position[2] - 1)
    )
    report = check(canary, replace(found, counts=((at, less), *others)))
    assert report.fits[0].off == 1
    assert report.is_right


def test_counts_of_nothing_known(kits, trained):
    """No clause is blamed, and still it does not pass."""
    canary = kits("glm_one")
    found = seen(trained["glm_one"], Contract(), canary, 3)
    half = [
        (at, Counters("x", per_position=(each.per_position[0] // 2,) * 3, drafts=None))
        for at, each in found.counts
    ]  # fmt: skip
    report = check(canary, replace(found, counts=tuple(half)))
    assert report.failed
    assert not report.named
    assert not report.broken
    assert "no known fault" in report.words


def test_near_ties_are_no_finding(kits, trained):
    canary = kits("glm")
    found = seen(trained["glm"], Contract(), canary, 3)
    other = (*found.texts[0][:4], (found.texts[0][4] + 1) % 40, *found.texts[0][5:])
    gaps = (*canary.prompts[0].gaps[:4], 0.1, *canary.prompts[0].gaps[5:])
    level = replace(canary, prompts=(replace(canary.prompts[0], gaps=gaps), *canary.prompts[1:]))
    texts = replace(found, texts=(other, *found.texts[1:]))
    assert not check(level, texts).failed
    assert [each.clause.id for each in check(canary, texts).broken] == ["C8"]


def test_an_engine_by_its_convention(kits, trained):
    """GLM's head in vLLM hands on another state and zeroes the first column: both clauses are told."""
    canary = kits("glm")
    reading = next(each for each in canary.readings if each.name == "engine:vllm")
    assert set(clauses(reading)) == {"C4", "C7"}


@pytest.mark.parametrize(
    ("kept", "rounds", "positions"),
    [
        ([2, 0, 2, 1], "4", ["3", "2", "0"]),  # 1 + 3 + 1 + 3 + 2 = 10 tokens, none too many
        ([3, 3, 3], "2 to 3", ["2 to 3", "2 to 3", "2 to 3"]),  # one is missing in the last: some do not draft
        ([2, 2, 0, 3], "4", ["3", "2 to 3", "0 to 1"]),  # two are missing
    ],
)
def test_the_last_round(kept, rounds, positions):
    """Drafts that reach beyond the last token may be counted or not."""
    found = tally(kept, 3, 10)
    assert (found.rounds.words, [each.words for each in found.positions]) == (rounds, positions)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--engine URL"),
        (["--engine", "localhost:1", "--counters", "x"], "--counters belongs to --answers"),
        (["--answers", "absent.jsonl"], "cannot be read"),
        (["--answers", "absent.jsonl", "--sampled"], "--sampled belongs to --engine"),
        (["--engine", "localhost:1"], "nothing answers"),
    ],
)
def test_usage(kits, arguments, said, capsys):
    assert verdict(["check", kits("glm").folder, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_no_canary(tmp_path, capsys):
    assert verdict(["check", tmp_path, "--engine", "localhost:1"]) == 2
    assert "canary build" in capsys.readouterr().err
    (tmp_path / FILE).write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="format 1"):
        Canary.read(tmp_path)


def test_clauses_name_every_fault_once():
    """A fault that no clause is about could not be told."""
    named = [fault for clause in CLAUSES for fault in clause.faults]
    assert len(set(named)) == len(named)
    assert {fault.name for fault in FAULTS} <= set(named)
    assert [clause.id for clause in CLAUSES] == [f"C{number}" for number in range(1, len(CLAUSES) + 1)]
