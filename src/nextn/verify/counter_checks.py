"""Checks of what the engine reports beside the text: its log-probabilities, counters that prove MTP is on,
answers from a prefix cache and near the context limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nextn.engines.answers import EngineAnswer, EngineRequest, unique_salt
from nextn.engines.check_result import CheckResult
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint, counters_in_answers, read_counters
from nextn.engines.metrics_formats import prefix_hits
from nextn.errors import EngineError
from nextn.verify.greedy_checks import compare_answers
from nextn.verify.session import NUM_LOGPROBS, VerifySession

_EXACT = 1e-3  # nats: the same number printed twice
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
        if token.logprob > _EXACT or sum(math.exp(min(entry.logprob, 1.0)) for entry in token.top_logprobs) > 1.01:
            wrong.append(f"{where}: not log-probabilities ({token.logprob:.3f}, list sums to more than 1)")
        elif listed is None:
            if (
                token.logprob > token.top_logprobs[-1].logprob + _EXACT
                or token.top_logprobs[0].logprob - token.logprob > tie_gap
            ):
                wrong.append(f"{where}: the chosen token is not in the list of the likeliest")
        elif abs(listed - token.logprob) > _EXACT:
            wrong.append(f"{where}: {token.logprob:.3f} as the token's own, {listed:.3f} in the list")
        elif token.top_logprobs[0].logprob - token.logprob > tie_gap:
            wrong.append(
                f"{where}: another token is likelier by {token.top_logprobs[0].logprob - token.logprob:.2f} nats"
            )
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


def add_readings(session: VerifySession) -> None:
    """Read the counters of each endpoint, except where the first reading failed."""
    for endpoint in session.endpoints:
        readings = session.readings.setdefault(endpoint.url, [])
        if not readings or isinstance(readings[0], Counters):
            readings.append(_reading(endpoint))


def _reading(endpoint: Endpoint) -> Counters | str:
    try:
        return read_counters(endpoint)
    except EngineError as error:
        return str(error)


def mtp_on(session: VerifySession) -> CheckResult:
    """Check by the engine's counters that this run drafted; otherwise no other check is about MTP."""
    for endpoint in session.endpoints:
        session.greedy(endpoint)  # there must be some requests, even if this is the only check
    add_readings(session)
    counters = _run_counters(session, session.target)
    if isinstance(counters, str):
        return CheckResult("mtp-on", "inconclusive", counters, "make the engine expose its counters, or read its log")
    figures: dict[str, object] = {"target": counters.as_record()}
    if not counters.has_drafts:
        return CheckResult("mtp-on", "failed", f"{counters.engine}: nothing was drafted in this run", _OFF, figures)
    reference = None if session.against is None else _run_counters(session, session.against)
    if isinstance(reference, Counters) and reference.has_drafts:
        both = f"the reference drafts too ({reference.num_drafts} rounds): MTP was compared with MTP"
        return CheckResult("mtp-on", "failed", both, "serve --against without speculative decoding", figures)
    return CheckResult("mtp-on", "passed", _rates(counters), "", figures)


_OFF = "start the engine with MTP on: the checks that passed show nothing about it"


def _run_counters(session: VerifySession, endpoint: Endpoint) -> Counters | str:
    """The counts of this run, from the answers themselves without metrics; a string says why there are none."""
    readings = session.readings[endpoint.url]
    counters = [reading for reading in readings if isinstance(reading, Counters)]
    for earlier, later in pairwise(counters):
        later.minus(earlier)  # raises where the engine was restarted in between
    if len(counters) > 1:
        return counters[-1].minus(counters[0])
    return counters_in_answers(session.greedy(endpoint)) or str(readings[0])


def _rates(counters: Counters) -> str:
    if not counters.num_drafts:
        return f"{counters.engine}: {counters.draft_tokens} tokens drafted, {counters.accepted} accepted"
    acceptance = counters.acceptance()
    pairs = zip(acceptance.rates, acceptance.intervals(), strict=True)
    rates = "".join(
        f", a_{depth} {rate:.2f} ({low:.2f} to {high:.2f})" for depth, (rate, (low, high)) in enumerate(pairs, 1)
    )
    summary = f"{counters.engine}: {counters.num_drafts} rounds, AL {acceptance.length:.2f}{rates}"
    return "; ".join([summary, *counters.notes])


_PREFIX = 3000  # tokens: hybrid models cache in blocks of up to a thousand or so


_RESERVE = 64  # tokens left free, as the length of the prompt is estimated


_SUFFIXES = ("\n\nQuestion: what comes next?\nAnswer:", "\n\nThe text above, in other words:")


@dataclass(frozen=True)
class _CachePair:
    """Answers to the same prompt with and without the cache."""

    warm: EngineAnswer
    cold: EngineAnswer
    hits: int | None  # prompt tokens that came from the cache; None where the engine does not report them


def prefix_cache(session: VerifySession) -> CheckResult:
    """Compare answers with and without cached prefixes; inconclusive if the cache was never hit."""
    endpoint, gap = session.target, session.settings.tie_gap
    requests = _requests(session, endpoint)
    cache_pairs = _cache_pairs(session, endpoint, *requests)
    known = [pair.hits for pair in cache_pairs if pair.hits is not None]
    batched = session.answer_all(endpoint, requests)
    pairs = [(pair.cold, warm) for pair, other in zip(cache_pairs, batched, strict=True) for warm in (pair.warm, other)]
    if session.against is not None:
        against = [session.against.answer(request) for request in requests]
        pairs += [(answer, pair.warm) for answer, pair in zip(against, cache_pairs, strict=True)]
    hits = f"{sum(known)} prompt tokens came from the cache" if known else "the engine does not report cache hits"
    agreement = compare_answers(pairs, tie_gap=gap)
    check = agreement.check("prefix-cache", f"{hits}; warm against cold", tie_gap=gap, advice=_CACHE)
    check = replace(check, figures={**check.figures, "cached_tokens": sum(known) if known else None})
    if check.outcome == "passed" and not sum(known):
        no_hit = "the prefix cache was never hit, so this run proves nothing"
        evidence = no_hit if known else f"{hits}; texts are the same"
        return replace(check, outcome="inconclusive", evidence=evidence, advice=_NO_HIT)
    return check


_CACHE = "the cache restores another state than that at its position; serve without prefix caching until it is fixed"


_NO_HIT = (
    "turn prefix caching on, and its reporting: vLLM --enable-prompt-tokens-details or /metrics, SGLang "
    "--enable-cache-report, llama.cpp --metrics"
)


def _requests(session: VerifySession, endpoint: Endpoint) -> list[EngineRequest]:
    """One long prefix, unique to this run, with two endings."""
    tokens = min(_PREFIX, _limit(session, endpoint) // 2)
    prefix = _text(session, endpoint, tokens)
    max_tokens = session.settings.max_tokens
    return [EngineRequest(prefix + suffix, max_tokens, logprobs=NUM_LOGPROBS) for suffix in _SUFFIXES]


def _cache_pairs(
    session: VerifySession, endpoint: Endpoint, first: EngineRequest, second: EngineRequest
) -> list[_CachePair]:
    """Send the first prompt twice, then the second, which shares its prefix; each also without the cache."""
    cold = endpoint.answer(first)  # never sent before, as the prefix begins with a salt
    warm, hits = _answer_with_hits(endpoint, first)
    shared, shared_hits = _answer_with_hits(endpoint, second)
    shared_cold = endpoint.answer(replace(second, cache_salt=unique_salt()))
    return [_CachePair(warm, cold, hits), _CachePair(shared, shared_cold, shared_hits)]


def _answer_with_hits(endpoint: Endpoint, request: EngineRequest) -> tuple[EngineAnswer, int | None]:
    """An answer, and its cached prompt tokens, by the answer itself or by the engine's counter."""
    before = _hits(endpoint)
    answer = endpoint.answer(request)
    if answer.cached_tokens is not None:
        return answer, answer.cached_tokens
    after = _hits(endpoint) if before is not None else None
    return answer, None if before is None or after is None else max(0, round(after - before))


def _hits(endpoint: Endpoint) -> float | None:
    try:
        return prefix_hits(endpoint.metrics(), model=endpoint.served.name)
    except EngineError:
        return None


def long_context(session: VerifySession) -> CheckResult:
    """Compare answers to a prompt near the context limit: MTP on with off, or two runs of one endpoint."""
    endpoint, settings = session.target, session.settings
    limit = _limit(session, endpoint)
    tokens = limit - settings.max_tokens - _RESERVE
    request = EngineRequest(_text(session, endpoint, tokens), settings.max_tokens, logprobs=NUM_LOGPROBS)
    one = endpoint.answer(request)
    other = (session.against or endpoint).answer(replace(request, cache_salt=unique_salt()))
    subject = f"{one.prompt_tokens or f'about {tokens}'} prompt tokens of {limit}, "
    subject += "MTP on against off" if session.against is not None else "requested twice"
    agreement = compare_answers([(one, other)], tie_gap=settings.tie_gap)
    advice = "check positions and their scaling in the head, and draft tokens beyond the limit"
    check = agreement.check("long-context", subject, tie_gap=settings.tie_gap, advice=advice)
    if endpoint.served.context is None:
        return replace(check, evidence=f"{check.evidence}; the engine does not report the model's own limit")
    return check


def _limit(session: VerifySession, endpoint: Endpoint) -> int:
    contexts = [each.served.context for each in (endpoint, session.against) if each is not None]
    return min([context for context in contexts if context is not None] + [session.settings.context])


def _text(session: VerifySession, endpoint: Endpoint, tokens: int) -> str:
    """Prose of about that many tokens, never more; begins with a salt."""
    chars_per_token = endpoint.capabilities.chars_per_token
    margin = 0.8 if chars_per_token > 1.5 else 1.0  # words differ in length, bytes do not
    size = max(1, int(tokens * chars_per_token * margin))
    parts = [prompt.text for prompt in session.prompts if isinstance(prompt.text, str)] or ["a plain text. "]
    text, number = f"[{unique_salt()}]\n", 0
    while len(text) < size:
        text += f"\n{number + 1}. {parts[number % len(parts)]}\n"
        number += 1
    return text[:size]
