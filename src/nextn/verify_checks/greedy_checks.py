"""Greedy text must not depend on drafting, repetition, concurrent requests, streaming, or decoding versus prefill.

Two answers to one prompt are compared up to their first difference, which is a near-tie or a fault; after it the
contexts differ, so nothing more is compared. The gap is the larger one of the two sides: rounding moves the
log-probabilities of both sides a little, a fault moves those of one side by much.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from nextn.bounded_json import short_repr
from nextn.engines.answers import AnswerToken, EngineAnswer, common_prefix
from nextn.engines.check_result import CheckResult
from nextn.text_format import counted, docs_page
from nextn.verify_checks.session import VerifySession

_DRAFTING = f"compare logits at the position named; known causes: {docs_page('reference/verify')}"
_MAX_REPLAYS = 6  # positions per text
# (index of the pair, its first answer, position of the first difference) -> the token that a new prompt gives there.
TokenSource = Callable[[int, EngineAnswer, int], AnswerToken | None]
_MAX_SHOWN = 3  # differences reported in full


def greedy(session: VerifySession) -> CheckResult:
    """Compare MTP on with MTP off; with one endpoint, two runs of it, which shows only that it is deterministic."""
    target, gap = session.target, session.settings.tie_gap
    if session.against is None:
        second = [target.answer(session.greedy_request(prompt)) for prompt in session.prompts]
        pairs = list(zip(session.greedy(target), second, strict=True))
        agreement = compare_answers(pairs, tie_gap=gap, token_source=_token_source(session))
        return agreement.check("greedy", "requested twice", tie_gap=gap, advice=_DRAFTING)
    pairs = list(zip(session.greedy(target), session.greedy(session.against), strict=True))
    agreement = compare_answers(pairs, tie_gap=gap, token_source=_token_source(session))
    check = agreement.check("greedy", "MTP on against off", tie_gap=gap, advice=_DRAFTING)
    domains = sorted({session.prompts[fault.prompt].domain for fault in agreement.faults})
    return replace(check, evidence=f"{check.evidence}; domains: {', '.join(domains)}") if domains else check


def _token_source(session: VerifySession) -> TokenSource:
    """Return a source of single tokens from the endpoint without MTP, if there is one, else from the target."""
    endpoint = session.against or session.target

    def next_token(prompt: int, answer: EngineAnswer, position: int) -> AnswerToken | None:
        result = session.next_token(endpoint, session.prompts[prompt].text, answer, position)
        return result.tokens[0] if result is not None and result.tokens else None

    return next_token


def replay(session: VerifySession) -> CheckResult:
    """Request decoded tokens again, each as the first one after its context, where nothing is drafted."""
    endpoint, gap = session.target, session.settings.tie_gap
    pairs, origins, drift = [], [], 0.0
    for index, (prompt, answer) in enumerate(zip(session.prompts, session.greedy(endpoint), strict=True)):
        for position in _replay_positions(len(answer.tokens)):
            replayed = session.next_token(endpoint, prompt.text, answer, position)
            if replayed is None:
                break
            pairs.append((_only(answer, position), _only(replayed, 0)))
            origins.append((index, position))
            drift = max(drift, _drift(answer, position, replayed))
    if not pairs:
        needs = "it needs token ids in answers and prompts (vLLM, llama.cpp), without --chat"
        return CheckResult("replay", "inconclusive", f"the engine returns no token ids: {needs}")
    subject = f"{counted(len(pairs), 'decoded token')} against the first token of a new prompt that ends there"
    agreement = compare_answers(pairs, tie_gap=gap)
    located = [(fault, *origins[fault.prompt]) for fault in agreement.faults]
    faults = tuple(replace(fault, prompt=index, position=position) for fault, index, position in located)
    check = replace(agreement, faults=faults).check("replay", subject, tie_gap=gap, advice=_DRAFTING)
    check = replace(check, evidence=f"{check.evidence}; log-probabilities of equal tokens differ by up to {drift:.3f}")
    if check.outcome == "passed" and drift > gap:
        return replace(
            check, outcome="failed", advice="verification computes other logits than prefill: compare the two"
        )
    return check


def _replay_positions(length: int) -> list[int]:
    """Evenly spaced from the first drafted token on; token 0 comes from prefill."""
    step = max(1, (length - 1) // _MAX_REPLAYS)
    return list(range(1, length, step))[:_MAX_REPLAYS]


def _only(answer: EngineAnswer, position: int) -> EngineAnswer:
    return replace(answer, text="", tokens=answer.tokens[position : position + 1])


def _drift(answer: EngineAnswer, position: int, replayed: EngineAnswer) -> float:
    one, other = answer.tokens[position], replayed.tokens[0] if replayed.tokens else None
    if other is None or one.name != other.name or not one.top_logprobs or not other.top_logprobs:
        return 0.0  # llama.cpp writes 0.0, and no list, where it has none
    if one.logprob is None or other.logprob is None:
        return 0.0
    return abs(one.logprob - other.logprob)


def concurrency(session: VerifySession) -> CheckResult:
    """Compare concurrent requests with the same requests alone."""
    target, settings = session.target, session.settings
    # Few prompts are repeated, as one request alone is no batch.
    numbers = [number % len(session.prompts) for number in range(max(len(session.prompts), settings.concurrency))]
    alone = [session.greedy(target)[number] for number in numbers]
    batched = session.answer_all(target, [session.greedy_request(session.prompts[number]) for number in numbers])
    pairs = list(zip(alone, batched, strict=True))
    token_source = _token_source(session)
    agreement = compare_answers(
        pairs, tie_gap=settings.tie_gap, token_source=lambda index, *rest: token_source(numbers[index], *rest)
    )
    subject = f"{min(settings.concurrency, len(batched))} at once against alone"
    advice = f"sequences of a batch are mixed up; known causes: {docs_page('reference/verify')}"
    faults = tuple(replace(fault, prompt=numbers[fault.prompt]) for fault in agreement.faults)
    check = replace(agreement, faults=faults).check("concurrency", subject, tie_gap=settings.tie_gap, advice=advice)
    owners = [_owner(session.greedy(target), batched[fault.prompt], numbers[fault.prompt])
              for fault in agreement.faults]  # fmt: skip
    swaps = [f"prompt {fault.prompt + 1} got the answer to prompt {owner + 1}"
             for fault, owner in zip(faults, owners, strict=True) if owner is not None]  # fmt: skip
    return replace(check, evidence="; ".join([check.evidence, *swaps[:3]])) if swaps else check


def _owner(answers: list[EngineAnswer], answer: EngineAnswer, prompt: int) -> int | None:
    """Index of another prompt whose answer this is, if any."""
    others = (index for index in range(len(answers)) if index != prompt)
    return next((index for index in others if answers[index].names == answer.names), None)


def streaming(session: VerifySession) -> CheckResult:
    """Compare streamed answers with unstreamed ones. A difference counts if it occurs twice."""
    target = session.target
    wrong: list[str] = []
    num = min(4, len(session.prompts))
    for index in range(num):
        request = session.greedy_request(session.prompts[index])
        unstreamed = session.greedy(target)[index]
        for _ in range(2):
            streamed = target.stream(replace(request, logprobs=0))
            if streamed.text == unstreamed.text and streamed.finish_reason == unstreamed.finish_reason:
                break
            unstreamed = target.answer(request)
        else:
            wrong.append(_stream_difference(index, unstreamed, streamed))
    if wrong:
        advice = "chunks are lost or repeated where a round gives several tokens; see the engine's detokenizer"
        return CheckResult("streaming", "failed", "; ".join(wrong), advice)
    return CheckResult("streaming", "passed", f"{counted(num, 'stream')} equal the unstreamed answers")


def _stream_difference(prompt: int, unstreamed: EngineAnswer, streamed: EngineAnswer) -> str:
    difference = first_difference(prompt, EngineAnswer(unstreamed.text, None), EngineAnswer(streamed.text, None))
    if difference is None:
        reasons = f"{streamed.finish_reason!r} streamed, {unstreamed.finish_reason!r} unstreamed"
        return f"prompt {prompt + 1}: finish_reason {reasons}"
    return f"prompt {prompt + 1}: streamed text differs from character {difference.position + 1} on, twice"


@dataclass(frozen=True)
class Difference:
    """The first difference between two answers."""

    prompt: int
    position: int  # from 0, in tokens or characters
    one: str | int | None  # a token; None where the text ends
    other: str | int | None
    gap: float | None  # nats between them, or a lower bound; None without log-probabilities

    def describe(self, unit: str) -> str:
        """Return the difference as text. unit: token or character."""
        gap = "no log-probabilities" if self.gap is None else f"{self.gap:.2f} nats apart"
        position = f"prompt {self.prompt + 1}, {unit} {self.position + 1}"
        return f"{position}: {_token_text(self.one)} against {_token_text(self.other)}, {gap}"


@dataclass(frozen=True)
class Agreement:
    """How far pairs of answers agree."""

    unit: str  # token or character
    equal: int  # pairs without a difference
    compared: int  # tokens or characters up to the first differences
    ties: tuple[Difference, ...]
    faults: tuple[Difference, ...]
    unknown: tuple[Difference, ...]

    @property
    def num(self) -> int:
        return self.equal + len(self.ties) + len(self.faults) + len(self.unknown)

    def check(self, name: str, subject: str, *, tie_gap: float, advice: str) -> CheckResult:
        """Return the result of a check. subject: what was compared with what."""
        evidence = f"{subject}: {self.equal} of {self.num} texts identical, {self.compared} {self.unit}s compared"
        if self.ties:
            gaps = ", ".join(f"{tie.gap:.2f}" for tie in self.ties[:8])
            evidence += f"; {len(self.ties)} diverge at near-ties (gaps {gaps} nats; up to {tie_gap:g} is rounding)"
        if self.unknown:
            evidence += (
                f"; {len(self.unknown)} differ, and without log-probabilities it is unknown whether at a near-tie"
            )
        if self.faults:
            details = "; ".join(fault.describe(self.unit) for fault in self.faults[:_MAX_SHOWN])
            evidence += f"; {len(self.faults)} differ beyond a near-tie: {details}"
        outcome = "failed" if self.faults else "inconclusive" if self.unknown or not self.num else "passed"
        figures = {
            "texts": self.num,
            "identical": self.equal,
            "compared": self.compared,
            "unit": self.unit,
            "tie_gaps": [tie.gap for tie in self.ties],
            "faults": list(map(asdict, self.faults)),
            "unknown": list(map(asdict, self.unknown)),
        }
        return CheckResult(name, outcome, evidence, "" if outcome == "passed" else advice, figures)  # type: ignore[arg-type]


def compare_answers(
    pairs: Sequence[tuple[EngineAnswer, EngineAnswer]], *, tie_gap: float, token_source: TokenSource | None = None
) -> Agreement:
    """Compare answers pair by pair; a difference of up to `tie_gap` nats is a near-tie.

    token_source: requests the likeliest tokens after a pair's common prefix, where neither answer has them.
    """
    results = [_with_gap(first_difference(index, *pair), pair, token_source) for index, pair in enumerate(pairs)]
    differences = [result for result in results if result is not None]
    compared = sum(
        min(map(len, _names(*pair))) if result is None else result.position
        for pair, result in zip(pairs, results, strict=True)
    )
    with_gap = [difference for difference in differences if difference.gap is not None]
    return Agreement(
        unit="token" if all(one.tokens and other.tokens for one, other in pairs) else "character",
        equal=len(results) - len(differences),
        compared=compared,
        ties=tuple(difference for difference in with_gap if (difference.gap or 0.0) <= tie_gap),
        faults=tuple(difference for difference in with_gap if (difference.gap or 0.0) > tie_gap),
        unknown=tuple(difference for difference in differences if difference.gap is None),
    )


def first_difference(prompt: int, one: EngineAnswer, other: EngineAnswer) -> Difference | None:
    """Find the first difference; None for equal answers. prompt: index of the prompt."""
    names, others = _names(one, other)
    position = common_prefix(names, others)
    if position == len(names) == len(others):
        return None
    token, other_token = _at(one, names, position), _at(other, others, position)
    does_end = position in (len(names), len(others))
    gap = _lead(token or other_token) if does_end else _gap(token, other_token)
    return Difference(prompt, position, _name(names, position), _name(others, position), gap)


def _with_gap(
    difference: Difference | None, pair: tuple[EngineAnswer, EngineAnswer], token_source: TokenSource | None
) -> Difference | None:
    if difference is None or difference.gap is not None or token_source is None:
        return difference
    if difference.one is None or difference.other is None:
        return difference
    token = token_source(difference.prompt, pair[0], difference.position)
    logprobs = [] if token is None else [token.listed(name) for name in (difference.one, difference.other)]
    if token is None or not token.top_logprobs or logprobs == [None, None]:
        return difference
    bound = token.top_logprobs[-1].logprob  # what is not listed is at most that likely
    one, other = (bound if logprob is None else logprob for logprob in logprobs)
    return replace(difference, gap=abs(one - other))


def _names(one: EngineAnswer, other: EngineAnswer) -> tuple[Sequence[str | int], Sequence[str | int]]:
    """Tokens where both sides name them alike, else characters."""
    name_types = {type(answer.names[0]) for answer in (one, other) if answer.tokens}
    is_comparable = all(answer.tokens or not answer.text for answer in (one, other)) and len(name_types) < 2
    return (one.names, other.names) if is_comparable else (one.text, other.text)


def _at(answer: EngineAnswer, names: Sequence[str | int], position: int) -> AnswerToken | None:
    return answer.tokens[position] if names == answer.names and position < len(answer.tokens) else None


def _name(names: Sequence[str | int], position: int) -> str | int | None:
    return names[position] if position < len(names) else None


def _gap(one: AnswerToken | None, other: AnswerToken | None) -> float | None:
    if one is None or other is None:
        return None
    gaps = [gap for gap in (_one_side(one, other.name), _one_side(other, one.name)) if gap is not None]
    return max(gaps, default=None)


def _one_side(token: AnswerToken, name: str | int) -> float | None:
    """Nats between a side's own token and the other's, which is below the last listed one where it is not listed."""
    if token.logprob is None or not token.top_logprobs:
        return None
    listed = token.listed(name)
    return abs(token.logprob - (token.top_logprobs[-1].logprob if listed is None else listed))


def _lead(token: AnswerToken | None) -> float | None:
    """One text continues where the other ends: for the longer one, the end is at best the second choice."""
    if token is None or token.logprob is None:
        return None
    rest = [entry.logprob for entry in token.top_logprobs if entry.name != token.name]
    return abs(token.logprob - max(rest)) if rest else None


def _token_text(name: str | int | None) -> str:
    return "the end" if name is None else f"token {name}" if isinstance(name, int) else short_repr(name)
