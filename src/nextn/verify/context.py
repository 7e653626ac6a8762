"""What came before must not change what comes out: a prefix from the cache, a context near the limit."""

from dataclasses import dataclass, replace

from nextn.engines.answers import Answer, Ask
from nextn.engines.endpoint import Endpoint
from nextn.engines.sources import prefix_hits
from nextn.errors import EngineError
from nextn.verify.check import TOP, Check, Session
from nextn.verify.compare import agreement

_PREFIX = 3000  # tokens: hybrid models cache in blocks of up to a thousand or so
_ROOM = 64  # tokens left free beside prompt and answer, as their number is estimated
_SUFFIXES = ("\n\nQuestion: what comes next?\nAnswer:", "\n\nThe text above, in other words:")


@dataclass(frozen=True)
class _Sent:
    """warm, cold: answers to the same prompt with and without the cache. hits: prompt tokens that came from it; None
    where the engine does not tell."""

    warm: Answer
    cold: Answer
    hits: int | None


def prefix_cache(session: Session) -> Check:
    """A shared prefix, sent again: the same text, and proof that the cache was used; no hit, no proof."""
    endpoint, gap = session.target, session.settings.tie_gap
    asks = _asks(session, endpoint)
    sent = _sent(session, endpoint, *asks)
    known = [each.hits for each in sent if each.hits is not None]
    beside = session.at_once(endpoint, asks)
    pairs = [(each.cold, warm) for each, other in zip(sent, beside, strict=True) for warm in (each.warm, other)]
    if session.against is not None:
        pairs += [(session.against.answer(ask), each.warm) for ask, each in zip(asks, sent, strict=True)]
    same = agreement(pairs, tie_gap=gap)
    hits = f"{sum(known)} prompt tokens came from the cache" if known else "the engine does not tell of cache hits"
    check = same.check("prefix-cache", f"{hits}; warm against cold", tie_gap=gap, advice=_CACHE)
    check = replace(check, figures={**check.figures, "cached_tokens": sum(known) if known else None})
    if check.outcome == "passed" and not sum(known):
        told = "the prefix cache was never hit, so this run proves nothing" if known else f"{hits}; texts are the same"
        return replace(check, outcome="unclear", evidence=told, advice=_NO_HIT)
    return check


_CACHE = "the state that the cache restores is not the state at that place; serve without prefix caching until mended"
_NO_HIT = (
    "turn prefix caching on, and let the engine tell: vLLM --enable-prompt-tokens-details or /metrics, SGLang "
    "--enable-cache-report, llama.cpp --metrics"
)


def _asks(session: Session, endpoint: Endpoint) -> list[Ask]:
    """One long prefix of this run's own with two ends."""
    tokens = min(_PREFIX, _limit(session, endpoint) // 2)
    prefix = _text(session, endpoint, tokens)
    return [Ask(prefix + end, session.settings.max_tokens, logprobs=TOP) for end in _SUFFIXES]


def _sent(session: Session, endpoint: Endpoint, first: Ask, second: Ask) -> list[_Sent]:
    """The first prompt twice, then the second, which shares its prefix; each against an answer without the cache."""
    cold = endpoint.answer(first)  # never sent before, as the prefix begins with a text of this run's own
    warm, hits = _counted(endpoint, first)
    shared, shared_hits = _counted(endpoint, second)
    return [_Sent(warm, cold, hits), _Sent(shared, endpoint.answer(replace(second, cold=session.salt())), shared_hits)]


def _counted(endpoint: Endpoint, ask: Ask) -> tuple[Answer, int | None]:
    """An answer, and how much of its prompt came from the cache, by the answer itself or by the engine's counter."""
    before = _hits(endpoint)
    answer = endpoint.answer(ask)
    if answer.cached is not None:
        return answer, answer.cached
    after = _hits(endpoint) if before is not None else None
    return answer, None if before is None or after is None else max(0, round(after - before))


def _hits(endpoint: Endpoint) -> float | None:
    try:
        return prefix_hits(endpoint.metrics(), model=endpoint.served.name)
    except EngineError:
        return None


def long_context(session: Session) -> Check:
    """A prompt near the model's limit: MTP on against off, or cold against warm with one endpoint."""
    endpoint, settings = session.target, session.settings
    limit = _limit(session, endpoint)
    tokens = limit - settings.max_tokens - _ROOM
    ask = Ask(_text(session, endpoint, tokens), settings.max_tokens, logprobs=TOP)
    one = endpoint.answer(ask)
    other = (session.against or endpoint).answer(replace(ask, cold=session.salt()))
    said = f"{one.prompt_tokens or f'about {tokens}'} prompt tokens of {limit}, "
    said += "MTP on against off" if session.against is not None else "asked twice"
    same = agreement([(one, other)], tie_gap=settings.tie_gap)
    advice = "look at positions and their scaling in the head, and at draft tokens beyond the limit"
    check = same.check("long-context", said, tie_gap=settings.tie_gap, advice=advice)
    if endpoint.served.context is None:
        return replace(check, evidence=f"{check.evidence}; the model's own limit is not told")
    return check


def _limit(session: Session, endpoint: Endpoint) -> int:
    contexts = [each.served.context for each in (endpoint, session.against) if each is not None]
    return min([each for each in contexts if each is not None] + [session.settings.context])


def _text(session: Session, endpoint: Endpoint, tokens: int) -> str:
    """Prose of about that many tokens, never more; begins with a text that was never sent."""
    density = endpoint.abilities.density
    size = max(1, int(tokens * density * (0.8 if density > 1.5 else 1.0)))  # words differ in length, bytes do not
    parts = [prompt.text for prompt in session.prompts if isinstance(prompt.text, str)] or ["a plain text. "]
    text, number = f"[{session.salt()}]\n", 0
    while len(text) < size:
        text += f"\n{number + 1}. {parts[number % len(parts)]}\n"
        number += 1
    return text[:size]
