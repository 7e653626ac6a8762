"""Fine is said only where half of the drafts lost would show; otherwise the data cannot decide, and how much would."""

from types import SimpleNamespace

import pytest

from nextn.cli.diagnose import _EXIT_CODES, _show_diagnosis
from nextn.engines.counters import FIRST_TOKENS, Counters
from nextn.errors import EngineError
from nextn.evaluate.diagnose import INCONCLUSIVE, Diagnosis, ObservedCase
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts, observed_counts
from nextn.evaluate.likelihoods import NO_FAULT, Evidence, can_decide, needed_evidence
from nextn.evaluate.workload import ReferencePlan


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
