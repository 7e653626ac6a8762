"""Two greedy answers to one prompt: the first difference, and whether it is a near-tie or a fault.

Behind the first difference the contexts differ, so nothing more is compared. The gap is the larger of what the two
sides tell: rounding moves both sides' log-probabilities a little, a fault moves one side's by much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nextn.engines.answers import Answer, Token
from nextn.engines.documents import shown
from nextn.verify.check import Check

# (which pair, its first answer, place of the first difference) -> the token that a fresh prompt gives there.
Law = Callable[[int, Answer, int], Token | None]
_SHOWN = 3  # differences told in full


@dataclass(frozen=True)
class Difference:
    """place: 0-based, in tokens or characters. one, other: the two tokens; None where a text ends.

    gap: nats between them, or a lower bound; None where no log-probabilities are told.
    """

    prompt: int
    place: int
    one: str | int | None
    other: str | int | None
    gap: float | None

    def told(self, unit: str) -> str:
        apart = "log-probabilities not told" if self.gap is None else f"{self.gap:.2f} nats apart"
        return (
            f"prompt {self.prompt + 1}, {unit} {self.place + 1}: {_word(self.one)} against {_word(self.other)}, {apart}"
        )


@dataclass(frozen=True)
class Agreement:
    """equal: pairs without a difference. compared: tokens (or characters) up to the first differences."""

    unit: str
    equal: int
    compared: int
    ties: tuple[Difference, ...]
    faults: tuple[Difference, ...]
    unknown: tuple[Difference, ...]

    @property
    def num(self) -> int:
        return self.equal + len(self.ties) + len(self.faults) + len(self.unknown)

    def check(self, name: str, said: str, *, tie_gap: float, advice: str) -> Check:
        """said: what was compared with what."""
        evidence = f"{said}: {self.equal} of {self.num} texts identical, {self.compared} {self.unit}s compared"
        if self.ties:
            gaps = ", ".join(f"{each.gap:.2f}" for each in self.ties[:8])
            evidence += f"; {len(self.ties)} part at near-ties (gaps {gaps} nats; up to {tie_gap:g} is rounding)"
        if self.unknown:
            evidence += f"; {len(self.unknown)} differ and no log-probabilities tell whether at a near-tie"
        if self.faults:
            some = "; ".join(each.told(self.unit) for each in self.faults[:_SHOWN])
            evidence += f"; {len(self.faults)} differ beyond a near-tie: {some}"
        outcome = "failed" if self.faults else "unclear" if self.unknown or not self.num else "passed"
        figures = {
            "texts": self.num,
            "identical": self.equal,
            "compared": self.compared,
            "unit": self.unit,
            "tie_gaps": [each.gap for each in self.ties],
            "faults": [vars(each) for each in self.faults],
            "unknown": [vars(each) for each in self.unknown],
        }
        return Check(name, outcome, evidence, "" if outcome == "passed" else advice, figures)  # type: ignore[arg-type]


def agreement(pairs: Sequence[tuple[Answer, Answer]], *, tie_gap: float, law: Law | None = None) -> Agreement:
    """Compare answers pair by pair; a difference up to `tie_gap` nats is a near-tie.

    law: the best tokens behind a pair's common beginning, asked for where neither answer has them.
    """
    found = [_weighed(difference(place, *pair), pair, law) for place, pair in enumerate(pairs)]
    differ = [each for each in found if each is not None]
    compared = sum(
        min(map(len, _names(*pair))) if each is None else each.place for pair, each in zip(pairs, found, strict=True)
    )
    told = [each for each in differ if each.gap is not None]
    return Agreement(
        unit="token" if all(one.tokens and other.tokens for one, other in pairs) else "character",
        equal=len(found) - len(differ),
        compared=compared,
        ties=tuple(each for each in told if (each.gap or 0.0) <= tie_gap),
        faults=tuple(each for each in told if (each.gap or 0.0) > tie_gap),
        unknown=tuple(each for each in differ if each.gap is None),
    )


def difference(prompt: int, one: Answer, other: Answer) -> Difference | None:
    """The first one, or None."""
    names, others = _names(one, other)
    for place, (mine, theirs) in enumerate(zip(names, others, strict=False)):
        if mine != theirs:
            gap = _gap(_at(one, names, place), _at(other, others, place))
            return Difference(prompt, place, mine, theirs, gap)
    if len(names) == len(others):
        return None
    place = min(len(names), len(others))
    gap = _lead(_at(one, names, place) or _at(other, others, place))
    return Difference(prompt, place, _name(names, place), _name(others, place), gap)


def _weighed(found: Difference | None, pair: tuple[Answer, Answer], law: Law | None) -> Difference | None:
    if found is None or found.gap is not None or law is None or found.one is None or found.other is None:
        return found
    token = law(found.prompt, pair[0], found.place)
    gaps = [] if token is None else [token.listed(name) for name in (found.one, found.other)]
    if token is None or not token.best or gaps == [None, None]:
        return found
    below = token.best[-1].logprob  # what is not listed is at most that likely
    one, other = (below if gap is None else gap for gap in gaps)
    return replace(found, gap=abs(one - other))


def _names(one: Answer, other: Answer) -> tuple[Sequence[str | int], Sequence[str | int]]:
    """Tokens where both sides name them alike, else characters."""
    kinds = {type(answer.names[0]) for answer in (one, other) if answer.tokens}
    alike = all(answer.tokens or not answer.text for answer in (one, other)) and len(kinds) < 2
    return (one.names, other.names) if alike else (one.text, other.text)


def _at(answer: Answer, names: Sequence[str | int], place: int) -> Token | None:
    return answer.tokens[place] if names == answer.names and place < len(answer.tokens) else None


def _name(names: Sequence[str | int], place: int) -> str | int | None:
    return names[place] if place < len(names) else None


def _gap(one: Token | None, other: Token | None) -> float | None:
    if one is None or other is None:
        return None
    gaps = [gap for gap in (_one_side(one, other.name), _one_side(other, one.name)) if gap is not None]
    return max(gaps, default=None)


def _one_side(token: Token, name: str | int) -> float | None:
    """Nats between a side's own token and the other's; where the other's is not listed, it is below the last listed."""
    if token.logprob is None or not token.best:
        return None
    listed = token.listed(name)
    return abs(token.logprob - (token.best[-1].logprob if listed is None else listed))


def _lead(token: Token | None) -> float | None:
    """One text goes on where the other ends: the end is at best the second choice of the one that goes on."""
    if token is None or token.logprob is None:
        return None
    rest = [each.logprob for each in token.best if each.name != token.name]
    return abs(token.logprob - max(rest)) if rest else None


def _word(name: str | int | None) -> str:
    return "the end" if name is None else f"token {name}" if isinstance(name, int) else shown(name)
