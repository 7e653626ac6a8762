"""Acceptance figures from drafted and accepted tokens, and confidence intervals over texts. Imports no torch.

The only place that defines a_k (`conditional_rates`) and AL (`mean_length` from counts, `expected_length` from
rates); training, measuring, decoding and the checks of engines use these.

Rounds of one text are correlated, so texts are clusters, each one sample. The interval of a proportion is Wilson's at
the effective number of rounds (Kish 1965; Korn and Graubard 1998): rounds / design effect, with Student's t at
texts - 1 degrees of freedom. Unlike a bootstrap over texts, it has a width at 0 and 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, cast

DEFINITION = (
    "a_k = share of depth-k drafts accepted among those whose shallower drafts were all accepted (conditional); "
    "AL = tokens emitted per round, the bonus token included"
)
INTERVAL = (
    "95 %, by text: Wilson at the effective number of rounds (offered / design effect, at most offered), Student's t "
    "at texts - 1; with one text rounds are taken as independent. AL: jackknife over texts"
)


class DecodedSequence(Protocol):
    """One sequence's part of a decoded round."""

    @property
    def drafts(self) -> Sequence[int]: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def emitted(self) -> Sequence[int]: ...


class DecodedText(Protocol):
    """All rounds of one sequence, such as a `nextn.Result`."""

    @property
    def rounds(self) -> Sequence[DecodedSequence]: ...


class DecodedRound(Protocol):
    """One draft-and-verify round over a batch of sequences, with its wall times in seconds."""

    @property
    def rows(self) -> Sequence[DecodedSequence]: ...
    @property
    def draft_s(self) -> float: ...
    @property
    def verify_s(self) -> float: ...


def conditional_rates(
    num_accepted: Sequence[float], num_drafted: Sequence[float], *, undrafted: float = math.nan
) -> tuple[float, ...]:
    """Return a_1..a_K from counts or expected counts by depth; `undrafted` where a depth was never drafted."""
    return tuple(k / n if n else undrafted for k, n in zip(num_accepted, num_drafted, strict=True))


def expected_length(rates: Sequence[float]) -> float:
    """Return AL at K = len(rates) from conditional acceptances a_1..a_K; a nan (never drafted) ends the sum."""
    survival = total = 1.0
    for rate in rates:
        if math.isnan(rate):
            break
        survival *= rate
        total += survival
    return total


def mean_length(emitted: float, num_rounds: float, *, no_rounds: float = math.nan) -> float:
    """Return AL from the tokens that rounds emitted, bonus tokens included; `no_rounds` without rounds."""
    return emitted / num_rounds if num_rounds else no_rounds


def _parts(decoded: "DecodedRound | DecodedText | DecodedSequence") -> "Iterable[DecodedSequence]":
    """Return the rounds of single sequences of which a round of a batch, or a result, consists."""
    one = (cast(DecodedSequence, decoded),)
    return getattr(decoded, "rows", getattr(decoded, "rounds", one))


@dataclass(frozen=True)
class Acceptance:
    """Counts over the rounds that drafted at least one token.

    Attributes:
        num_drafted: [K], rounds that drafted depth k and accepted every shallower draft.
        num_accepted: [K], those of them that accepted depth k too.
        num_rounds: Rounds that drafted.
        emitted: Tokens that these rounds emitted, bonus tokens included.
    """

    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]
    num_rounds: int
    emitted: int

    @classmethod
    def of(
        cls, decoded: "Iterable[DecodedRound | DecodedText | DecodedSequence]", *, copied: bool = False
    ) -> "Acceptance":
        """Count over rounds that drafted at least one token.

        Args:
            decoded: Any of `nextn.Result` (several are pooled: every round counts once), `Round` of `nextn.rounds`,
                or `SequenceRound`.
            copied: Count the rounds whose drafts were copied from the text; else those in which the head drafted.

        Returns:
            The counts. The prefill's first token and rounds without drafts do not count.

        Example:
            >>> import nextn
            >>> from nextn.decoding.batch import SequenceRound
            >>> rounds = [SequenceRound(0, (5, 7), 1, (5, 8)), SequenceRound(0, (9, 9), 2, (9, 9, 3))]
            >>> nextn.Acceptance.of(rounds).length
            2.5
        """
        parts = [part for each in decoded for part in _parts(each) if part.drafts]
        parts = [part for part in parts if getattr(part, "copied", False) == copied]
        depths = range(max((len(part.drafts) for part in parts), default=0))
        num_drafted = [sum(len(part.drafts) > k and part.num_accepted >= k for part in parts) for k in depths]
        num_accepted = [sum(part.num_accepted > k for part in parts) for k in depths]
        return cls(tuple(num_drafted), tuple(num_accepted), len(parts), sum(len(part.emitted) for part in parts))

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K; nan where a depth was never drafted."""
        return conditional_rates(self.num_accepted, self.num_drafted)

    @property
    def length(self) -> float:
        """Mean acceptance length (AL); nan without rounds."""
        return mean_length(self.emitted, self.num_rounds)

    def intervals(self, z: float = 1.96) -> tuple[tuple[float, float], ...]:
        """Wilson score intervals of a_1..a_K (95 % by default)."""
        return tuple(wilson_interval(k, n, z) for k, n in zip(self.num_accepted, self.num_drafted, strict=True))

    def as_record(self) -> dict[str, object]:
        """Return the counts and figures for JSON reports."""
        return {
            "definition": DEFINITION,
            "acceptance": [None if math.isnan(rate) else rate for rate in self.rates],
            "interval_95": [list(interval) for interval in self.intervals()],
            "num_draft_tokens_per_pos": list(self.num_drafted),
            "num_accepted_tokens_per_pos": list(self.num_accepted),
            "mean_acceptance_length": None if math.isnan(self.length) else self.length,
            "num_drafts": self.num_rounds,
        }


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Expected counts over the rounds of several sequences, under one acceptance rule."""

    num_drafted: tuple[float, ...]  # [K], as of `Acceptance`
    num_accepted: tuple[float, ...]  # [K]
    emitted: tuple[float, ...] = field(repr=False)  # tokens, of each sequence
    rounds: tuple[float, ...] = field(repr=False)  # of each sequence

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K; 0 for a depth that is never drafted."""
        return conditional_rates(self.num_accepted, self.num_drafted, undrafted=0.0)

    @property
    def length(self) -> float:
        """Mean acceptance length (AL); 0 without rounds."""
        return mean_length(sum(self.emitted), sum(self.rounds), no_rounds=0.0)

    @property
    def deviations(self) -> list[float]:
        """The influence of each sequence on AL, times the number of sequences: their mean is 0."""
        mean = max(sum(self.rounds) / max(len(self.rounds), 1), 1e-9)
        return [
            (emitted - self.length * rounds) / mean for emitted, rounds in zip(self.emitted, self.rounds, strict=True)
        ]


def wilson_interval(num_accepted: float, num_drafted: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of num_accepted / num_drafted; the counts need not be integers."""
    if not num_drafted:
        return (0.0, 1.0)
    rate, square = num_accepted / num_drafted, z * z / num_drafted
    center = (rate + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(rate * (1 - rate) / num_drafted + square / (4 * num_drafted))
    return (max(0.0, center - half), min(1.0, center + half))


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its confidence interval; nan where there was no data to estimate it from."""

    value: float
    low: float
    high: float

    def as_record(self) -> dict[str, float | None]:
        """Return the fields for JSON, with null for nan."""
        return {name: None if math.isnan(value) else value for name, value in vars(self).items()}

    def as_text(self) -> str:
        """Return the value and its interval; an empty text where there was no data."""
        return "" if math.isnan(self.value) else f"{self.value:.3f} ({self.low:.2f}-{self.high:.2f})"


def proportion(num_accepted: Sequence[float], num_drafted: Sequence[float], *, error: float = 0.05) -> Estimate:
    """Estimate sum(num_accepted) / sum(num_drafted), one count per text; `error`: P(the interval misses the truth)."""
    total = sum(num_drafted)
    if total <= 0:
        return Estimate(math.nan, 0.0, 1.0)
    rate = min(1.0, sum(num_accepted) / total)
    used = [(k, n) for k, n in zip(num_accepted, num_drafted, strict=True) if n > 0]
    count, z = total, student_t(math.inf, error)
    if len(used) > 1:
        spread = sum((k - rate * n) ** 2 for k, n in used) * len(used) / (len(used) - 1) / total**2
        design_effect = max(1.0, spread * total / (rate * (1 - rate))) if 0 < rate < 1 else 1.0
        count = total / design_effect * (z / student_t(len(used) - 1, error)) ** 2
    return Estimate(rate, *wilson_interval(rate * count, count, z))


def jackknife(
    statistic: Callable[[Sequence[float]], float], rows: Sequence[Sequence[float]], *, error: float = 0.05
) -> Estimate:
    """Estimate a function of the sums of the rows' columns, with its leave-one-out interval (Quenouille 1956).

    rows: The counts of each text.
    """
    # Sums of what is before and behind each row: subtracting a row from the total would leave rounding where 0 is.
    before, behind = _running_sums(rows), _running_sums(rows[::-1])[::-1]
    value, num_texts = statistic(before[-1]), len(rows)
    if num_texts < 2 or math.isnan(value):
        return Estimate(value, math.nan, math.nan)
    others = [
        statistic([a + b for a, b in zip(*sides, strict=True)]) for sides in zip(before[:-1], behind[1:], strict=True)
    ]
    mean = sum(others) / num_texts
    half = student_t(num_texts - 1, error) * math.sqrt(
        (num_texts - 1) / num_texts * sum((other - mean) ** 2 for other in others)
    )
    return Estimate(value, value - half, value + half)


def _running_sums(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    sums = [[0.0] * len(rows[0] if rows else ())]
    for row in rows:
        sums.append([total + value for total, value in zip(sums[-1], row, strict=True)])
    return sums


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], counts: Sequence[float], *, error: float = 0.05
) -> Estimate:
    """Estimate sum(ours - theirs) / sum(counts), where each sequence has one value per text: a paired comparison."""
    gaps, total = [a - b for a, b in zip(ours, theirs, strict=True)], sum(counts)
    if not total:
        return Estimate(math.nan, math.nan, math.nan)
    value = sum(gaps) / total
    if len(gaps) < 2:
        return Estimate(value, -math.inf, math.inf) if value else Estimate(0.0, 0.0, 0.0)
    spread = sum((gap - value * count) ** 2 for gap, count in zip(gaps, counts, strict=True))
    half = student_t(len(gaps) - 1, error) * math.sqrt(spread * len(gaps) / (len(gaps) - 1)) / total
    return Estimate(value, value - half, value + half)


@cache
def student_t(degrees: float, error: float) -> float:
    """Return the t with P(|T| > t) = error; degrees of freedom: an integer, or inf for the normal distribution."""
    low, high = 0.0, 1.0
    while 1 - _central_probability(high, degrees) > error:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if 1 - _central_probability(middle, degrees) < error else (middle, high)
    return high


def _central_probability(t: float, degrees: float) -> float:
    """P(|T| < t), by Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if math.isinf(degrees):
        return math.erf(t / math.sqrt(2))
    angle, odd = math.atan(t / math.sqrt(degrees)), int(degrees) % 2
    square = math.cos(angle) ** 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, int(degrees) + 1, 2):
        total += term
        term *= square * (k - 1) / k
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
