"""What the engine tells beside the text: log-probabilities that belong to it, and counters that prove MTP is on."""

import math
from collections.abc import Sequence
from itertools import pairwise

from nextn.engines import sources
from nextn.engines.answers import Answer
from nextn.engines.counters import Counters, summed
from nextn.engines.endpoint import Endpoint
from nextn.errors import EngineError
from nextn.verify.check import Check, Session

_EXACT = 1e-3  # nats: the same number printed twice
_LOGPROBS = (
    "log-probabilities are lost, or are another row's, where several tokens come at once; "
    "known: llama.cpp#27972, vllm#53488, #38711, #34497"
)


def logprobs(session: Session) -> Check:
    """The chosen token stands in its own list with its own number, is the likeliest, and MTP on and off agree."""
    settings, target = session.settings, session.target
    if not target.abilities.logprobs:
        return Check("logprobs", "unclear", "the engine tells no log-probabilities")
    answers = session.greedy(target)
    wrong = _faults(answers, settings.tie_gap)
    num = sum(len(each.tokens) for each in answers)
    evidence = f"{num} greedy tokens: each is in its list with its number, and the likeliest there"
    figures: dict[str, object] = {"tokens": num}
    if session.against is not None and session.against.abilities.logprobs:
        apart = _apart(answers, session.greedy(session.against))
        if apart:
            middle, most = sorted(apart)[len(apart) // 2], max(apart)
            figures |= {"median_difference": middle, "largest_difference": most}
            said = f"MTP on and off differ by {middle:.3f} nats (median), {most:.3f} at most"
            evidence += f"; {said}"
            if middle > settings.tie_gap / 4 or most > 4 * settings.tie_gap:
                wrong.append(said)
    if wrong:
        return Check("logprobs", "failed", "; ".join(wrong[:4]), _LOGPROBS, figures)
    return Check("logprobs", "passed", evidence, "", figures)


def _faults(answers: Sequence[Answer], tie_gap: float) -> list[str]:
    tokens = [(row, place, token) for row, each in enumerate(answers) for place, token in enumerate(each.tokens)]
    untold = sum(token.logprob is None or not token.best for _, _, token in tokens)
    zero = sum(token.logprob == 0.0 for _, _, token in tokens)
    wrong = [f"{untold} of {len(tokens)} tokens come without a list of the likeliest"] if untold else []
    if zero > len(tokens) / 2:
        return [*wrong, f"{zero} of {len(tokens)} log-probabilities are exactly 0.0, as if every token were certain"]
    for row, place, token in tokens:
        where = f"prompt {row + 1}, token {place + 1}"
        listed = token.listed(token.name)
        if token.logprob is None or not token.best:
            continue
        if token.logprob > _EXACT or sum(math.exp(min(each.logprob, 1.0)) for each in token.best) > 1.01:
            wrong.append(f"{where}: not log-probabilities ({token.logprob:.3f}, list sums to more than 1)")
        elif listed is None:
            if token.logprob > token.best[-1].logprob + _EXACT or token.best[0].logprob - token.logprob > tie_gap:
                wrong.append(f"{where}: the token that came is not in the list of the likeliest")
        elif abs(listed - token.logprob) > _EXACT:
            wrong.append(f"{where}: {token.logprob:.3f} alone, {listed:.3f} in the list")
        elif token.best[0].logprob - token.logprob > tie_gap:
            wrong.append(f"{where}: another token is likelier by {token.best[0].logprob - token.logprob:.2f} nats")
    return wrong


def _apart(ones: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """|difference| at each token before the texts part."""
    found = []
    for one, other in zip(ones, others, strict=True):
        for mine, theirs in zip(one.tokens, other.tokens, strict=False):
            if mine.name != theirs.name:
                break
            if mine.best and theirs.best and mine.logprob is not None and theirs.logprob is not None:
                found.append(abs(mine.logprob - theirs.logprob))
    return found


def read_counters(session: Session) -> None:
    """Add a reading per endpoint; none where the first one failed."""
    for endpoint in session.endpoints:
        known = session.readings.setdefault(endpoint.url, [])
        if not known or isinstance(known[0], Counters):
            known.append(_reading(endpoint))


def _reading(endpoint: Endpoint) -> Counters | str:
    try:
        return sources.from_metrics(endpoint.metrics(), model=endpoint.served.name)
    except EngineError as error:
        return str(error)


def mtp_on(session: Session) -> Check:
    """The engine's own counters must have moved in this run; without them nothing above is about MTP."""
    for endpoint in session.endpoints:
        session.greedy(endpoint)  # something must have been asked, also if this is the only check
    read_counters(session)
    found = _moved(session, session.target)
    if isinstance(found, str):
        return Check("mtp-on", "unclear", found, "let the engine show its counters, or read its log")
    figures: dict[str, object] = {"target": found.as_record()}
    if not found.drafted:
        return Check("mtp-on", "failed", f"{found.engine}: nothing was drafted in this run", _OFF, figures)
    reference = None if session.against is None else _moved(session, session.against)
    if isinstance(reference, Counters) and reference.drafted:
        both = f"the reference drafts too ({reference.drafts} rounds): MTP was compared with MTP"
        return Check("mtp-on", "failed", both, "serve --against without speculative decoding", figures)
    return Check("mtp-on", "passed", _rates(found), "", figures)


_OFF = "start the engine with MTP on: the checks passed say nothing about it"


def _moved(session: Session, endpoint: Endpoint) -> Counters | str:
    """What was counted during the run; from the answers themselves where there are no metrics."""
    told = session.readings[endpoint.url]
    counters = [each for each in told if isinstance(each, Counters)]
    for earlier, later in pairwise(counters):
        later.minus(earlier)  # raises where the engine was started anew in between
    if len(counters) > 1:
        return counters[-1].minus(counters[0])
    own = summed(each for answer in session.greedy(endpoint) if (each := sources.from_json(answer.raw)) is not None)
    return own or str(told[0])


def _rates(found: Counters) -> str:
    if not found.drafts:
        return f"{found.engine}: {found.draft_tokens} tokens drafted, {found.accepted} kept"
    figures = found.acceptance()
    pairs = zip(figures.rates, figures.intervals(), strict=True)
    rates = ", ".join(
        f"a_{depth} {rate:.2f} ({low:.2f} to {high:.2f})" for depth, (rate, (low, high)) in enumerate(pairs, 1)
    )
    said = f"{found.engine}: {found.drafts} rounds, AL {figures.length:.2f}" + (f", {rates}" if rates else "")
    return "; ".join([said, *found.notes])
