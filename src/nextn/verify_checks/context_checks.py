"""Answers must not depend on the prefix cache, nor break near the context limit."""

from dataclasses import dataclass, replace

from nextn.engines.answers import EngineAnswer, EngineRequest, unique_salt
from nextn.engines.check_result import CheckResult
from nextn.engines.endpoint import Endpoint
from nextn.engines.metrics_formats import prefix_hits
from nextn.errors import EngineError
from nextn.verify_checks.greedy_checks import compare_answers
from nextn.verify_checks.session import NUM_LOGPROBS, VerifySession

_PREFIX = 3000  # tokens: hybrid models cache in blocks of up to a thousand or so
_RESERVE = 64  # tokens left free, as the length of the prompt is estimated
_BANDS = (1, 4, 16)  # prompts of the limit and of these parts of it
_SHORTEST = 900  # tokens of a part's prompt
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
    cache_pairs = _cache_pairs(endpoint, *requests)
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


def _cache_pairs(endpoint: Endpoint, first: EngineRequest, second: EngineRequest) -> list[_CachePair]:
    """Send the first prompt twice, then the second, which shares its prefix; each also without the cache."""
    cold = endpoint.answer(first)  # never sent before, as the prefix begins with a salt
    warm, hits = _answer_with_hits(endpoint, first)
    shared, shared_hits = _answer_with_hits(endpoint, second)
    shared_cold = endpoint.answer(replace(second, use_cache=False))
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
    """Compare answers to long prompts, one near the context limit: MTP on with off, or two runs of one endpoint."""
    endpoint, settings = session.target, session.settings
    limit, pairs, sizes = _limit(session, endpoint), [], []
    reserve = settings.max_tokens + _RESERVE
    for part in (each for each in _BANDS if each == 1 or limit // each >= _SHORTEST + reserve):
        tokens = limit // part - reserve
        request = EngineRequest(_text(session, endpoint, tokens), settings.max_tokens, logprobs=NUM_LOGPROBS)
        one = endpoint.answer(request)
        pairs.append((one, (session.against or endpoint).answer(replace(request, use_cache=False))))
        sizes.append(str(one.prompt_tokens or f"about {tokens}"))
    subject = f"{', '.join(sizes)} prompt tokens of {limit}, "
    subject += "MTP on against off" if session.against is not None else "requested twice"
    agreement = compare_answers(pairs, tie_gap=settings.tie_gap)
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
