"""Greedy text must not depend on drafting, repetition, concurrent requests, streaming, or decoding versus prefill."""

from dataclasses import replace

from nextn.engines.answers import AnswerToken, EngineAnswer
from nextn.text_format import counted, docs_page
from nextn.verify.greedy_comparison import TokenSource, compare_answers, first_difference
from nextn.verify.session import CheckResult, VerifySession

_DRAFTING = f"compare logits at the position named; known causes: {docs_page('reference/verify')}"
_MAX_REPLAYS = 6  # positions per text


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
    """From the endpoint without MTP, if there is one."""
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
    alone = session.greedy(target)
    batched = session.answer_all(target, [session.greedy_request(prompt) for prompt in session.prompts])
    pairs = list(zip(alone, batched, strict=True))
    agreement = compare_answers(pairs, tie_gap=settings.tie_gap, token_source=_token_source(session))
    subject = f"{min(settings.concurrency, len(batched))} at once against alone"
    advice = f"sequences of a batch are mixed up; known causes: {docs_page('reference/verify')}"
    check = agreement.check("concurrency", subject, tie_gap=settings.tie_gap, advice=advice)
    owners = [_owner(alone, batched[fault.prompt], fault.prompt) for fault in agreement.faults]
    swaps = [f"prompt {fault.prompt + 1} got the answer to prompt {owner + 1}"
             for fault, owner in zip(agreement.faults, owners, strict=True) if owner is not None]  # fmt: skip
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
