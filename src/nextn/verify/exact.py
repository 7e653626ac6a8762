"""Greedy text must not depend on drafting, on repetition, on neighbours, on streaming, or on being decoded at all."""

from dataclasses import replace

from nextn.engines.answers import Answer, Token
from nextn.verify.check import Check, Session
from nextn.verify.compare import Law, agreement, difference
from nextn.words import counted

_DRAFTING = "compare logits at the place told; known causes: docs/verify.md"
_REPLAYS = 6  # places per text


def greedy(session: Session) -> Check:
    """MTP on against MTP off; with one endpoint, against itself, which shows only that it repeats itself."""
    target, gap = session.target, session.settings.tie_gap
    if session.against is None:
        again = [target.answer(session.ask(prompt)) for prompt in session.prompts]
        same = agreement(list(zip(session.greedy(target), again, strict=True)), tie_gap=gap, law=_law(session))
        return same.check("greedy", "asked twice", tie_gap=gap, advice=_DRAFTING)
    pairs = list(zip(session.greedy(target), session.greedy(session.against), strict=True))
    same = agreement(pairs, tie_gap=gap, law=_law(session))
    check = same.check("greedy", "MTP on against off", tie_gap=gap, advice=_DRAFTING)
    domains = sorted({session.prompts[each.prompt].domain for each in same.faults})
    return replace(check, evidence=f"{check.evidence}; domains: {', '.join(domains)}") if domains else check


def _law(session: Session) -> Law:
    """From the endpoint without MTP, if there is one."""
    endpoint = session.against or session.target

    def law(prompt: int, answer: Answer, place: int) -> Token | None:
        found = session.behind(endpoint, session.prompts[prompt].text, answer, place)
        return found.tokens[0] if found is not None and found.tokens else None

    return law


def replay(session: Session) -> Check:
    """Each token of a decoded text is asked for again as the first one behind its context, where nothing is drafted."""
    endpoint, gap = session.target, session.settings.tie_gap
    pairs, origins, drift = [], [], 0.0
    for row, (prompt, answer) in enumerate(zip(session.prompts, session.greedy(endpoint), strict=True)):
        for place in _places(len(answer.tokens)):
            again = session.behind(endpoint, prompt.text, answer, place)
            if again is None:
                break
            pairs.append((_only(answer, place), _only(again, 0)))
            origins.append((row, place))
            drift = max(drift, _drift(answer, place, again))
    if not pairs:
        needs = "it needs token ids in answers and prompts (vLLM, llama.cpp), without --chat"
        return Check("replay", "unclear", f"the engine tells no token ids: {needs}")
    said = f"{counted(len(pairs), 'decoded token')} against the first token of a fresh prompt that ends there"
    same = agreement(pairs, tie_gap=gap)
    faults = [replace(each, prompt=origins[each.prompt][0], place=origins[each.prompt][1]) for each in same.faults]
    check = replace(same, faults=tuple(faults)).check("replay", said, tie_gap=gap, advice=_DRAFTING)
    check = replace(check, evidence=f"{check.evidence}; log-probabilities of equal tokens differ by up to {drift:.3f}")
    if check.outcome == "passed" and drift > gap:
        return replace(check, outcome="failed", advice="the verify pass computes other logits than the prefill does")
    return check


def _places(length: int) -> list[int]:
    """Evenly spaced, the first drafted token included; the very first one is not decoded."""
    step = max(1, (length - 1) // _REPLAYS)
    return list(range(1, length, step))[:_REPLAYS]


def _only(answer: Answer, place: int) -> Answer:
    return replace(answer, text="", tokens=answer.tokens[place : place + 1])


def _drift(answer: Answer, place: int, again: Answer) -> float:
    one, other = answer.tokens[place], again.tokens[0] if again.tokens else None
    if other is None or one.name != other.name or not one.best or not other.best:
        return 0.0  # llama.cpp writes 0.0, and no list, where it knows none
    if one.logprob is None or other.logprob is None:
        return 0.0
    return abs(one.logprob - other.logprob)


def concurrency(session: Session) -> Check:
    """All prompts at once give what each gives alone."""
    target, settings = session.target, session.settings
    alone = session.greedy(target)
    beside = session.at_once(target, [session.ask(prompt) for prompt in session.prompts])
    same = agreement(list(zip(alone, beside, strict=True)), tie_gap=settings.tie_gap, law=_law(session))
    said = f"{min(settings.concurrency, len(beside))} at once against alone"
    advice = "batch rows mix: docs/verify.md names known causes"
    check = same.check("concurrency", said, tie_gap=settings.tie_gap, advice=advice)
    swapped = [_owner(alone, beside[each.prompt], each.prompt) for each in same.faults]
    taken = [f"prompt {each.prompt + 1} got the answer to prompt {owner + 1}"
             for each, owner in zip(same.faults, swapped, strict=True) if owner is not None]  # fmt: skip
    return replace(check, evidence="; ".join([check.evidence, *taken[:3]])) if taken else check


def _owner(answers: list[Answer], found: Answer, but: int) -> int | None:
    """Whose answer that is, if it is another prompt's."""
    return next((place for place, each in enumerate(answers) if place != but and each.names == found.names), None)


def streaming(session: Session) -> Check:
    """The pieces of a stream add up to the whole answer. A difference counts if it comes again."""
    target = session.target
    wrong: list[str] = []
    num = min(4, len(session.prompts))
    for place in range(num):
        ask = session.ask(session.prompts[place])
        whole = session.greedy(target)[place]
        for _ in range(2):
            told = target.stream(replace(ask, logprobs=0))
            if told.text == whole.text and told.finish == whole.finish:
                break
            whole = target.answer(ask)
        else:
            wrong.append(_first(place, whole, told))
    if wrong:
        advice = "pieces are lost or repeated where a round gives several tokens; see the engine's detokeniser"
        return Check("streaming", "failed", "; ".join(wrong), advice)
    return Check("streaming", "passed", f"{counted(num, 'stream')} equal the whole answers")


def _first(place: int, whole: Answer, told: Answer) -> str:
    found = difference(place, Answer(whole.text, None), Answer(told.text, None))
    if found is None:
        return f"prompt {place + 1}: finish_reason {told.finish!r} streamed, {whole.finish!r} whole"
    return f"prompt {place + 1}: streamed text differs from character {found.place + 1} on, twice"
