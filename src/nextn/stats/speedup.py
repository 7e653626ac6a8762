"""The expected value of MTP: from acceptance and costs to tokens per round, speedup, best K and break-even.

Imports no torch and measures nothing.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nextn.stats.acceptance import expected_length

DEFINITION = (
    "speedup(K) = AL(K) / (v(K+1) + K c + o), AL(K) = 1 + sum over k <= K of a_1 ... a_k; v(m): an m-token trunk "
    "pass, c: one draft step, o: overhead of a round; all three in units of a baseline (one-token) step"
)


@dataclass(frozen=True)
class Spread:
    """The median of `num` values, and their quartiles."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Compute quartiles by linear interpolation of the values that are not nan; nan without any."""
        values = [value for value in values if not math.isnan(value)]
        if len(values) < 2:
            only = values[0] if values else math.nan
            return cls(only, only, only, len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def as_record(self) -> dict[str, object]:
        """Return the fields for JSON reports, with null for nan."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {"num": self.num, **{name: None if math.isnan(value) else value for name, value in values.items()}}


@dataclass(frozen=True)
class Costs:
    """Times of trunk passes and draft steps, in seconds, for `batch` sequences with `context` tokens in the cache."""

    batch: int
    context: int
    steps: tuple[Spread, ...]  # steps[m-1] is the time of an m-token trunk pass
    draft: Spread  # the time of one draft step

    @property
    def v(self) -> tuple[float, ...]:
        """v(1), v(2), ...: the cost of an m-token trunk pass in baseline steps."""
        return tuple(step.median / self.steps[0].median for step in self.steps)

    @property
    def c(self) -> float:
        """The cost of a draft step in baseline steps."""
        return self.draft.median / self.steps[0].median

    @property
    def max_speculative_tokens(self) -> int:
        """The largest K whose verification was timed."""
        return len(self.steps) - 1

    def round_cost(self, k: int) -> float:
        """v(K+1) + K c."""
        return self.v[k] + k * self.c

    def as_record(self) -> dict[str, object]:
        """Return the costs for JSON reports."""
        return {
            "batch": self.batch,
            "context": self.context,
            "v": list(self.v),
            "c": self.c,
            "step_s": [step.as_record() for step in self.steps],
            "draft_s": self.draft.as_record(),
        }


def expected_speedup(costs: Costs, rates: Sequence[float], k: int, *, overhead: float = 0.0) -> float:
    """Return the speedup of `DEFINITION` at K = k, from the first K rates; 1 at K = 0."""
    return expected_length(rates[:k]) / (costs.round_cost(k) + overhead) if k else 1.0


def best_k(costs: Costs, rates: Sequence[float], *, overhead: float = 0.0) -> int:
    """Return the K with the highest expected speedup; 0 where none beats baseline decoding."""
    choices = range(min(len(rates), costs.max_speculative_tokens) + 1)
    return max(choices, key=lambda k: expected_speedup(costs, rates, k, overhead=overhead))


def break_even(costs: Costs, k: int, *, overhead: float = 0.0) -> float | None:
    """Return the acceptance, equal at all depths, with speedup 1 at K = k; None if there is none."""
    return uniform_rate(costs.round_cost(k) + overhead, k)


def uniform_rate(length: float, k: int) -> float | None:
    """Return the acceptance, equal at all depths, that gives this AL at K = k; None for an AL above K + 1."""
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length([middle] * k) < length else (low, middle)
    return high
