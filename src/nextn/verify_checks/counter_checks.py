"""Checks of what the engine reports beside the text: its log-probabilities, and counters that prove MTP is on."""

import math
import shlex
from collections.abc import Sequence

from nextn.engines.answers import EngineAnswer
from nextn.engines.check_result import CheckResult
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.verify_checks.session import VerifySession

_EXACT = 1e-3  # nats: the same number printed twice
_END = 1  # token of an answer that engines count and may not list: that of its end
_LOGPROBS = (
    "log-probabilities are lost, or belong to another sequence, where a round emits several tokens; "
    "known: llama.cpp#27972, vllm#53488, #38711, #34497"
)


def logprobs(session: VerifySession) -> CheckResult:
    """Check that each token is listed with its log-probability and is the likeliest, and that MTP on and off agree."""
    settings, target = session.settings, session.target
    if not target.capabilities.logprobs:
        return CheckResult("logprobs", "inconclusive", "the engine returns no log-probabilities")
    answers = session.greedy(target)
    wrong = _faults(answers, settings.tie_gap)
    num = sum(len(answer.tokens) for answer in answers)
    if lost := sum(max(0, (answer.completion_tokens or 0) - _END - len(answer.tokens)) for answer in answers):
        wrong.append(f"{lost} tokens of the answers are missing from their lists, which have {num}")
    evidence = f"{num} greedy tokens: each is in its list with its log-probability, and the likeliest there"
    figures: dict[str, object] = {"tokens": num}
    if session.against is not None and session.against.capabilities.logprobs:
        differences = _differences(answers, session.greedy(session.against))
        if differences:
            median, largest = sorted(differences)[len(differences) // 2], max(differences)
            figures |= {"median_difference": median, "largest_difference": largest}
            summary = f"MTP on and off differ by {median:.3f} nats (median), {largest:.3f} at most"
            evidence += f"; {summary}"
            if median > settings.tie_gap / 4 or largest > 4 * settings.tie_gap:
                wrong.append(summary)
    if not num and not wrong:
        return CheckResult("logprobs", "inconclusive", "no answer has log-probabilities, and none says its length")
    if wrong:
        return CheckResult("logprobs", "failed", "; ".join(wrong[:4]), _LOGPROBS, figures)
    return CheckResult("logprobs", "passed", evidence, "", figures)


def _faults(answers: Sequence[EngineAnswer], tie_gap: float) -> list[str]:
    tokens = [
        (prompt, position, token)
        for prompt, answer in enumerate(answers)
        for position, token in enumerate(answer.tokens)
    ]
    unlisted = sum(token.logprob is None or not token.top_logprobs for _, _, token in tokens)
    zero = sum(token.logprob == 0.0 for _, _, token in tokens)
    wrong = [f"{unlisted} of {len(tokens)} tokens come without a list of the likeliest"] if unlisted else []
    if zero > len(tokens) / 2:
        return [*wrong, f"{zero} of {len(tokens)} log-probabilities are exactly 0.0, as if every token were certain"]
    for prompt, position, token in tokens:
        where = f"prompt {prompt + 1}, token {position + 1}"
        listed = token.listed(token.name)
        if token.logprob is None or not token.top_logprobs:
            continue
        lead = token.top_logprobs[0].logprob - token.logprob
        if token.logprob > _EXACT or sum(math.exp(min(entry.logprob, 1.0)) for entry in token.top_logprobs) > 1.01:
            wrong.append(f"{where}: not log-probabilities ({token.logprob:.3f}, list sums to more than 1)")
        elif listed is None:
            if token.logprob > token.top_logprobs[-1].logprob + _EXACT or lead > tie_gap:
                wrong.append(f"{where}: the chosen token is not in the list of the likeliest")
        elif abs(listed - token.logprob) > _EXACT:
            wrong.append(f"{where}: {token.logprob:.3f} as the token's own, {listed:.3f} in the list")
        elif lead > tie_gap:
            wrong.append(f"{where}: another token is likelier by {lead:.2f} nats")
    return wrong


def _differences(ones: Sequence[EngineAnswer], others: Sequence[EngineAnswer]) -> list[float]:
    """Absolute difference in nats at each token before the texts diverge."""
    differences = []
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one.tokens, other.tokens, strict=False):
            if a.name != b.name:
                break
            if a.top_logprobs and b.top_logprobs and a.logprob is not None and b.logprob is not None:
                differences.append(abs(a.logprob - b.logprob))
    return differences


def mtp_on(session: VerifySession) -> CheckResult:
    """Check by the engine's counters that this run drafted; otherwise no other check is about MTP."""
    for endpoint in session.endpoints:
        session.greedy(endpoint)  # there must be some requests, even if this is the only check
    counters = _run_counters(session, session.target)
    if counters is None:
        advice = "make the engine expose its counters, or read its log"
        return CheckResult("mtp-on", "inconclusive", session.counters[session.target.address].no_counters, advice)
    figures: dict[str, object] = {"target": counters.as_record()}
    if not counters.has_drafts:
        return CheckResult("mtp-on", "failed", f"{counters.engine}: nothing was drafted in this run", _OFF, figures)
    reference = None if session.against is None else _run_counters(session, session.against)
    if reference is not None and reference.has_drafts:
        both = f"the reference drafts too ({reference.num_drafts} rounds): MTP was compared with MTP"
        return CheckResult("mtp-on", "failed", both, "serve --against without speculative decoding", figures)
    if counters.accepted == 0:
        found = f"no draft was accepted; {_rates(counters)}"
        advice = _REJECTED.format(shlex.quote(session.target.address))
        return CheckResult("mtp-on", "inconclusive", found, advice, figures)
    return CheckResult("mtp-on", "passed", _rates(counters), "", figures)


_OFF = "start the engine with MTP on: the checks that passed show nothing about it"
_REJECTED = "`nextn diagnose MODEL --engine {} --drive` says why; what passed shows nothing about accepted drafts"


def _run_counters(session: VerifySession, endpoint: Endpoint) -> Counters | None:
    return session.counters[endpoint.address].gained(session.greedy(endpoint))


def _rates(counters: Counters) -> str:
    if not counters.num_drafts:
        return f"{counters.engine}: {counters.draft_tokens} tokens drafted, {counters.accepted} accepted"
    acceptance = counters.acceptance()
    pairs = zip(acceptance.rates, acceptance.intervals(), strict=True)
    rates = "".join(
        f", a_{depth} {rate:.2f} ({low:.2f} to {high:.2f})"
        for depth, (rate, (low, high)) in enumerate(pairs, 1)
        if not math.isnan(rate)
    )
    summary = f"{counters.engine}: {counters.num_drafts} rounds, AL {acceptance.length:.2f}{rates}"
    return "; ".join([summary, *counters.notes])
