"""Text at temperature 1: the same law with MTP on and off, and the law that the engine itself states.

The first token comes from the prefill; tokens behind it are drafted and accepted or replaced. They are tested apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nextn.engines.answers import Answer, Ask, Token
from nextn.engines.endpoint import Endpoint
from nextn.verify.check import TOP, Check, Session
from nextn.verify.law import Comparison, Table, by_place, calibrated, combined, compared, counts, holm
from nextn.words import counted

_ADVICE = "is the draft's own law used in the accept rule, after the same temperature and filters? See docs/verify.md"
_UNTOLD = "llama.cpp tells none for drafted tokens (llama.cpp#27972)"
_APART = 1_000_003  # seeds of the two endpoints never meet: equal seeds would make equal texts, and hide a difference


_OUTSIDE = "outside the list"


@dataclass(frozen=True)
class _Test:
    """prompt: its place, None for all together."""

    prompt: int | None
    where: str
    found: Comparison

    def told(self) -> str:
        whose = "all prompts" if self.prompt is None else f"prompt {self.prompt + 1}"
        at = f", most at token {self.found.place + 2}" if self.where == "later" else ""
        return f"{whose}, {self.where} tokens: p {self.found.p:.2g}{at}, total variation {self.found.distance:.2f}"


def sampled_law(session: Session) -> Check:
    """The two endpoints' texts against each other, prompt by prompt and all together, in three ways.

    The first token; the later tokens, place by place; and the ranks of the later tokens in the lists of the likeliest,
    which a sharpened or flattened law moves in every context alike.
    """
    settings = session.settings
    if session.against is None:
        return Check(
            "sampled-law", "unclear", "it takes a second endpoint: --against URL of the same model without MTP"
        )
    level = settings.false_alarm / (3 * (_num_prompts(session) + 1))
    tests: list[_Test] = []
    for prompt in range(_num_prompts(session)):
        texts = [each for endpoint in session.endpoints for each in _texts(session, endpoint, prompt)]
        for where, tables in _tables(texts, settings.sampled_tokens).items():
            found = compared(tables, settings.samples, level=level, seed=settings.seed + prompt)
            tests.append(_Test(prompt, where, found))
    for where in dict.fromkeys(each.where for each in tests):
        parts = [each.found for each in tests if each.where == where]
        tests += [_Test(None, where, combined(parts))] if len(parts) > 1 else []
    return _told(tests, session, level)


def _tables(texts: Sequence[Answer], length: int) -> dict[str, list[Table]]:
    """Of both endpoints' texts together, so that a name means the same on both sides."""
    kinds = {type(each.names[0]) if each.tokens else None for each in texts if each.names}
    names = [each.names if len(kinds) == 1 else tuple(each.text) for each in texts]
    tables = {"first": by_place(names, [0]), "later": by_place(names, range(1, length))}
    if all(token.best for each in texts for token in each.tokens) and None not in kinds:
        tables["ranks of later"] = [counts([[_rank(token) for token in each.tokens[1:]] for each in texts])]
    return {where: found for where, found in tables.items() if all(table.shape[1] for table in found)}


def _rank(token: Token) -> str:
    place = next((place for place, each in enumerate(token.best) if each.name == token.name), None)
    return _OUTSIDE if place is None or place >= TOP else str(place)


def _told(tests: Sequence[_Test], session: Session, level: float) -> Check:
    settings = session.settings
    failed = holm([each.found.p for each in tests], settings.false_alarm)
    powers = [each.found.power(level) for each in tests]
    power = max([_any([power for each, power in zip(tests, powers, strict=True) if each.prompt is not None]), *powers])
    evidence = f"{counted(len(tests), 'test')} of {settings.samples} against {settings.samples} texts; "
    evidence += (
        f"smallest p {min(each.found.p for each in tests):.2g}, false alarms {settings.false_alarm:g} over all; "
    )
    evidence += f"power {power:.2f} to find a law sharpened to temperature 0.5"
    wrong = [each for each, bad in zip(tests, failed, strict=True) if bad]
    for each in sorted(wrong, key=lambda each: each.found.p)[:4]:
        evidence += f"; {each.told()}"
    if wrong and all(each.where != "first" for each in wrong):
        evidence += "; only drafted positions differ"
    figures: dict[str, object] = {
        "level": level,
        "tests": [{"prompt": each.prompt, "where": each.where} | each.found.as_record(level) for each in tests],
    }
    if wrong:
        return Check("sampled-law", "failed", evidence, _ADVICE, figures)
    if power < 0.5:
        return Check("sampled-law", "unclear", evidence, "more --samples, or prompts with less certain ends", figures)
    return Check("sampled-law", "passed", evidence, "", figures)


def _any(powers: Sequence[float]) -> float:
    """Chance that at least one test finds it."""
    none = 1.0
    for power in powers:
        none *= 1 - power
    return 1 - none


def sampled_own(session: Session) -> Check:
    """Are the likeliest tokens, and those outside their list, drawn as often as the engine's own probabilities say?

    One endpoint is enough. The first shows a law that was sharpened, the second one that was flattened or mixed up.
    """
    settings = session.settings
    if not session.target.abilities.logprobs:
        return Check("sampled-own", "unclear", "the engine tells no log-probabilities")
    texts = [each for prompt in range(_num_prompts(session)) for each in _texts(session, session.target, prompt)]
    parts = {"first": [each.tokens[:1] for each in texts], "later": [each.tokens[1:] for each in texts]}
    level = settings.false_alarm / (len(parts) * len(_EVENTS))
    found = {
        f"{where} tokens: {name}": calibrated(
            [event(token) for row in rows for token in row if token.best], level=level
        )
        for where, rows in parts.items()
        for name, event in _EVENTS.items()
    }
    tested = {name: each for name, each in found.items() if each is not None}
    if not any(name.startswith("later") for name in tested):
        return Check("sampled-own", "unclear", "the text is too certain: hardly a draw could have come out otherwise")
    if any(not token.best for each in texts for token in each.tokens):
        return Check("sampled-own", "unclear", "not all tokens come with log-probabilities", _UNTOLD)
    failed = holm([each.p for each in tested.values()], settings.false_alarm)
    evidence = "; ".join(
        f"{name} was drawn {each.seen} times in {each.num}, {each.expected:.0f} by its stated probability "
        f"(p {each.p:.2g}; {100 * each.smallest:.1f} points would be found)"
        for name, each in tested.items()
    )
    figures: dict[str, object] = {name: vars(each) for name, each in tested.items()}
    outcome = "failed" if any(failed) else "passed"
    return Check("sampled-own", outcome, evidence, _ADVICE if any(failed) else "", figures)  # type: ignore[arg-type]


def _likeliest(token: Token) -> tuple[bool, float]:
    return token.name == token.best[0].name, math.exp(min(0.0, token.best[0].logprob))


def _outside(token: Token) -> tuple[bool, float]:
    """vLLM adds a token that was drawn to the list, behind those asked for."""
    listed = sum(math.exp(min(0.0, each.logprob)) for each in token.best[:TOP])
    return _rank(token) == _OUTSIDE, max(0.0, 1 - listed)


_EVENTS = {"the likeliest": _likeliest, f"one {_OUTSIDE}": _outside}


def _num_prompts(session: Session) -> int:
    return min(session.settings.sampled_prompts, len(session.prompts))


def _texts(session: Session, endpoint: Endpoint, prompt: int) -> list[Answer]:
    """`samples` texts at temperature 1, each with a seed of its own; asked for once."""
    key = (endpoint.url, prompt)
    if key not in session.sampled:
        settings = session.settings
        start = settings.seed + _APART * (1 + prompt + (0 if endpoint is session.target else _num_prompts(session)))
        text = _spread(session)[prompt].text
        asks = [
            Ask(text, settings.sampled_tokens, temperature=1.0, seed=start + each, logprobs=TOP)
            for each in range(settings.samples)
        ]
        session.sampled[key] = session.at_once(endpoint, asks)
    return session.sampled[key]


def _spread(session: Session) -> list:
    """The sampled prompts: from as many domains as there are."""
    step = max(1, len(session.prompts) // _num_prompts(session))
    return list(session.prompts[::step])
