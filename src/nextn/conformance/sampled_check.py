"""Which acceptance rule an engine's sampled runs show, by the counts that each rule expects."""

from collections.abc import Sequence

from nextn.conformance.engine_run import SampledRun
from nextn.conformance.record import AcceptanceRule, Canary, Clause
from nextn.engines.check_result import CheckResult
from nextn.engines.counters import Counters
from nextn.errors import EngineError
from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts, observed_counts
from nextn.evaluate.likelihoods import (
    MIN_FAULT_FIT,
    MIN_FIT,
    MIN_NAMED_RATIO,
    Cause,
    Evidence,
    name_causes,
    rank_causes,
)
from nextn.text_format import rate_text

# The last round of a text may be truncated; where rounds are shorter than this share of K, others are, too.
_MIN_FULL = 0.8


def check_acceptance_rule(clause: Clause, canary: Canary, k: int, run: SampledRun) -> CheckResult:
    """Check that the counts above temperature 0 are those of an allowed rule; inconclusive where several rules fit.

    clause: that about the acceptance rule. k: draft tokens per round.
    """
    if run.counters is None:
        return clause.result("inconclusive", run.no_counts_reason or "the engine reports no counts")
    if problem := _problem(canary, run):
        return clause.result("inconclusive", problem)
    try:
        observed = observed_counts(run.counters, k, full_share=_MIN_FULL)
    except EngineError as error:
        return clause.result("inconclusive", f"at temperature {canary.sampled.temperature:g}: {error}")
    expected = hypotheses(canary.sampled.rules, run.counters, observed, k)
    return _outcome(clause, canary, observed, rank_causes(Evidence(observed, expected)))


def hypotheses(
    rules: Sequence[AcceptanceRule], counters: Counters, observed: ObservedCounts, k: int
) -> list[ExpectedCounts]:
    """Return what each rule gives in these counts. An AL is of all rounds, and of the drafts within the text only."""
    is_cut = counters.draft_tokens is not None and counters.draft_tokens < k * (counters.num_drafts or 0)
    expected = []
    for rule in rules:
        offered, accepted = rule.counts[k]["cut" if is_cut else "whole"]
        if not observed.num_drafted:
            offered, accepted = rule.counts[k]["whole"][0], rule.counts[k]["cut"][1]
        expected.append(ExpectedCounts(rule.name, offered, accepted, is_expectation=True))
    return expected


def _problem(canary: Canary, run: SampledRun) -> str:
    """Why the texts are not what was requested; "" where they are."""
    temperature, texts = f"{canary.sampled.temperature:g}", [text for texts in run.texts for text in texts]
    are_equal = [len(set(of_prompt)) == 1 for of_prompt in zip(*run.texts, strict=True)]
    greedy = [prompt.tokens[: canary.max_tokens] for prompt in canary.prompts]
    if all(are_equal) and (len(run.texts) > 1 or list(run.texts[0]) == greedy):
        return (
            f"the same texts at every seed: the engine does not sample at temperature {temperature}, or ignores seeds"
        )
    short = sum(len(text) < canary.max_tokens for text in texts)
    if short:
        return (
            f"{short} of {len(texts)} texts at temperature {temperature} end before token {canary.max_tokens}: the "
            "engine must continue after an end of text (ignore_eos)"
        )
    return ""


def _outcome(clause: Clause, canary: Canary, observed: ObservedCounts, causes: Sequence[Cause]) -> CheckResult:
    rules = {rule.name: rule for rule in canary.sampled.rules}
    allowed, wrong = ([cause for cause in causes if bool(rules[cause.name].fault) is bad] for bad in (False, True))
    best, rival = causes[0], (allowed if rules[causes[0].name].fault else wrong)[0]
    seen = _figures(observed.rates, observed.acceptance_length)
    if best.p_value < (MIN_FAULT_FIT if rules[best.name].fault else MIN_FIT):
        return _unknown_rule(clause, observed, allowed)
    odds = f"{best.ratio_text(rival)} likelier than with {rules[rival.name].fault or rival.name}"
    if best.ratio_to(rival) < MIN_NAMED_RATIO:
        both = " and ".join(sorted(rules[cause.name].fault or cause.name for cause in (best, rival)))
        evidence = f"{both} cannot be distinguished in this many rounds ({seen}): raise --sampled"
        return clause.result("inconclusive", evidence)
    if not rules[best.name].fault:
        return clause.result("passed", f"counts as with {best.name}, {odds}: {seen}; expected {_expected(best)}")
    matches = [rules[name] for name in name_causes(causes) if rules[name].fault]
    names, descriptions = (" or ".join(getattr(rule, field) for rule in matches) for field in ("fault", "description"))
    issues = tuple(dict.fromkeys(issue for rule in matches for issue in rule.issues))
    evidence = f"counts as with {names} ({descriptions}), {odds}"
    return clause.result("failed", evidence, expected=_expected(allowed[0]), seen=seen, fault=names, issues=issues)


def _unknown_rule(clause: Clause, observed: ObservedCounts, allowed: Sequence[Cause]) -> CheckResult:
    """No rule fits. One that accepts less than every allowed rule breaks the clause; one that accepts more may change
    the distribution of the text, which counts do not show."""
    lowest, seen = min(allowed, key=lambda cause: cause.length), _figures(observed.rates, observed.acceptance_length)
    if observed.acceptance_length < lowest.length:
        evidence = f"accepts less than {lowest.name}, and unlike any known rule"
        return clause.result("failed", evidence, expected=_expected(lowest), seen=seen, fault="unknown-rule")
    evidence = f"the counts fit no known rule: {seen}; {lowest.name} gives {_expected(lowest)}"
    advice = "check by `nextn verify` that the texts have the trunk's distribution"
    return clause.result("inconclusive", f"{evidence}; {advice}")


def _expected(cause: Cause) -> str:
    return _figures(cause.rates, cause.length)


def _figures(rates: Sequence[float], al: float) -> str:
    """rates: per depth, nan where nothing was offered; empty where an engine does not count by position."""
    text = " ".join(map(rate_text, rates))
    return f"{'a_k ' + text + ', ' if text else ''}AL {al:.2f}"
