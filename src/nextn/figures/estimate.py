"""Figures with intervals from texts, each of which is one draw: rounds of one text are alike. Imports no torch.

Texts are clusters. A share's interval is Wilson's at the effective number of rounds (Kish 1965; Korn and Graubard
1998): rounds / design effect, with Student's t at texts - 1 degrees of freedom. It keeps a width at 0 and 1, where a
bootstrap over texts has none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from nextn.figures.acceptance import wilson

INTERVAL = (
    "95 %, by text: Wilson at the effective number of rounds (offered / design effect, at most offered), Student's t "
    "at texts - 1; with one text rounds are taken as independent. AL: jackknife over texts"
)


@dataclass(frozen=True)
class Estimate:
    """value between low and high; nan where there was nothing to estimate it from."""

    value: float
    low: float
    high: float

    def as_record(self) -> dict[str, float | None]:
        """What goes into JSON: null for nan."""
        return {name: None if math.isnan(value) else value for name, value in vars(self).items()}


def share(kept: Sequence[float], offered: Sequence[float], *, error: float = 0.05) -> Estimate:
    """sum(kept) / sum(offered), one of each per text; error: how often the interval may miss."""
    total = sum(offered)
    if total <= 0:
        return Estimate(math.nan, 0.0, 1.0)
    rate = min(1.0, sum(kept) / total)
    used = [(k, n) for k, n in zip(kept, offered, strict=True) if n > 0]
    count, z = total, student(math.inf, error)
    if len(used) > 1:
        spread = sum((k - rate * n) ** 2 for k, n in used) * len(used) / (len(used) - 1) / total**2
        effect = max(1.0, spread * total / (rate * (1 - rate))) if 0 < rate < 1 else 1.0
        count = total / effect * (z / student(len(used) - 1, error)) ** 2
    return Estimate(rate, *wilson(rate * count, count, z))


def jackknifed(figure: Callable[[Sequence[int]], float], num_texts: int, *, error: float = 0.05) -> Estimate:
    """figure(places of texts) over all texts, and the spread that leaving out one at a time shows (Quenouille 1956)."""
    places = list(range(num_texts))
    value = figure(places)
    if num_texts < 2 or math.isnan(value):
        return Estimate(value, math.nan, math.nan)
    others = [figure([each for each in places if each != out]) for out in places]
    mean = sum(others) / num_texts
    half = student(num_texts - 1, error) * math.sqrt(
        (num_texts - 1) / num_texts * sum((each - mean) ** 2 for each in others)
    )
    return Estimate(value, value - half, value + half)


def difference(
    ours: Sequence[float], theirs: Sequence[float], counts: Sequence[float], *, error: float = 0.05
) -> Estimate:
    """sum(ours - theirs) / sum(counts), the three per text: a paired comparison on the same texts."""
    gaps, total = [a - b for a, b in zip(ours, theirs, strict=True)], sum(counts)
    if not total:
        return Estimate(math.nan, math.nan, math.nan)
    value = sum(gaps) / total
    if len(gaps) < 2:
        return Estimate(value, -math.inf, math.inf) if value else Estimate(0.0, 0.0, 0.0)
    spread = sum((gap - value * count) ** 2 for gap, count in zip(gaps, counts, strict=True))
    half = student(len(gaps) - 1, error) * math.sqrt(spread * len(gaps) / (len(gaps) - 1)) / total
    return Estimate(value, value - half, value + half)


@cache
def student(freedom: float, error: float) -> float:
    """The t that |T| exceeds with probability `error`; freedom: a whole number, or inf for the normal law."""
    low, high = 0.0, 1.0
    while 1 - _inside(high, freedom) > error:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if 1 - _inside(middle, freedom) < error else (middle, high)
    return high


def _inside(t: float, freedom: float) -> float:
    """P(|T| < t), by Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if math.isinf(freedom):
        return math.erf(t / math.sqrt(2))
    angle, odd = math.atan(t / math.sqrt(freedom)), int(freedom) % 2
    square = math.cos(angle) ** 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, int(freedom) + 1, 2):
        total += term
        term *= square * (k - 1) / k
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
