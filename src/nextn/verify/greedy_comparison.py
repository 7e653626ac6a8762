"""Compare two greedy answers to one prompt: find the first difference, and whether it is a near-tie or a fault.

After the first difference the contexts differ, so nothing more is compared. The gap is the larger one of the two sides:
rounding moves the log-probabilities of both sides a little, a fault moves those of one side by much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nextn.engines.answers import AnswerToken, EngineAnswer
from nextn.engines.json_values import short_repr
from nextn.verify.session import CheckResult

# (index of the pair, its first answer, position of the first difference) -> the token that a new prompt gives there.
TokenSource = Callable[[int, EngineAnswer, int], AnswerToken | None]
_MAX_SHOWN = 3  # differences reported in full


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

    def as_record(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "prompt": self.prompt, "place": self.position, "one": self.one, "other": self.other, "gap": self.gap,
        }  # fmt: skip


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
            "faults": [fault.as_record() for fault in self.faults],
            "unknown": [difference.as_record() for difference in self.unknown],
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
    for position, (name, other_name) in enumerate(zip(names, others, strict=False)):
        if name != other_name:
            gap = _gap(_at(one, names, position), _at(other, others, position))
            return Difference(prompt, position, name, other_name, gap)
    if len(names) == len(others):
        return None
    position = min(len(names), len(others))
    gap = _lead(_at(one, names, position) or _at(other, others, position))
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
