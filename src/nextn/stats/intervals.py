"""Confidence intervals over texts. Imports no torch.

Rounds of one text are correlated, so texts are clusters, each one sample. The interval of a proportion is Wilson's at
the effective number of rounds (Kish 1965; Korn and Graubard 1998): rounds / design effect, with Student's t at
texts - 1 degrees of freedom. Unlike a bootstrap over texts, it has a width at 0 and 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

INTERVAL = (
    "95 %, by text: Wilson at the effective number of rounds (offered / design effect, at most offered), Student's t "
    "at texts - 1; with one text rounds are taken as independent. AL: jackknife over texts; of "
    "fewer than 5, at least that of independent rounds"
)


FEW_TEXTS = 5  # fewer say little: their spread may be small by chance


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
    """A value with the ends of its confidence interval.

    Attributes:
        value: The estimate; nan where there was no data to make it from.
        low: The lower end of the interval, of 95 % unless said otherwise.
        high: The upper end.

    Example:
        >>> nextn.Estimate(0.8, 0.7, 0.9).as_text()
        '0.800 (0.70-0.90)'
    """

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


def jackknife(statistic: Callable[[Sequence[float]], float], rows: Sequence[Sequence[float]]) -> Estimate:
    """Estimate a function of the sums of the rows' columns, with its leave-one-out interval (Quenouille 1956).

    rows: The counts of each text; those without any, such as of a text that ended at once, are no samples.
    """
    rows = [row for row in rows if any(row)] or rows[:1]
    # Sums of what is before and behind each row: subtracting a row from the total would leave rounding where 0 is.
    before, behind = _running_sums(rows), _running_sums(rows[::-1])[::-1]
    value, num_texts = statistic(before[-1]), len(rows)
    if num_texts < 2 or math.isnan(value):
        return Estimate(value, math.nan, math.nan)
    pairs = zip(before[:-1], behind[1:], strict=True)
    others = [statistic([a + b for a, b in zip(*sides, strict=True)]) for sides in pairs]
    mean = sum(others) / num_texts
    half = student_t(num_texts - 1, 0.05) * math.sqrt(
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
