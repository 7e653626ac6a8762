"""What MTP is worth in theory: acceptance and costs -> tokens per round, speed-up, best K, break-even.

Imports no torch and measures nothing.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DEFINITION = (
    "speed-up(K) = AL(K) / (v(K+1) + K c + o), AL(K) = 1 + sum over k <= K of a_1 ... a_k; v(m): an m-token trunk "
    "pass, c: one draft step, o: what a round costs beside them; all three in plain one-token steps"
)


@dataclass(frozen=True)
class Spread:
    """median, and the quartiles around it, of num values."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Quartiles by linear interpolation; nan without values."""
        if len(values) < 2:
            only = values[0] if values else math.nan
            return cls(only, only, only, len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def as_record(self) -> dict[str, object]:
        """What goes into JSON reports."""
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {"num": self.num, **{name: None if math.isnan(value) else value for name, value in values.items()}}


@dataclass(frozen=True)
class Costs:
    """steps[m-1]: seconds of an m-token trunk pass; draft: seconds of one draft step; for `batch` rows at once, each
    with `context` columns before."""

    batch: int
    context: int
    steps: tuple[Spread, ...]
    draft: Spread

    @property
    def v(self) -> tuple[float, ...]:
        """v(1), v(2), ...: an m-token trunk pass in plain one-token steps."""
        return tuple(step.median / self.steps[0].median for step in self.steps)

    @property
    def c(self) -> float:
        """A draft step in plain one-token steps."""
        return self.draft.median / self.steps[0].median

    @property
    def max_drafts(self) -> int:
        return len(self.steps) - 1

    def of_round(self, drafts: int) -> float:
        """v(K+1) + K c."""
        return self.v[drafts] + drafts * self.c

    def as_record(self) -> dict[str, object]:
        """What goes into JSON reports."""
        return {
            "batch": self.batch,
            "context": self.context,
            "v": list(self.v),
            "c": self.c,
            "step_s": [step.as_record() for step in self.steps],
            "draft_s": self.draft.as_record(),
        }


def expected_length(rates: Sequence[float]) -> float:
    """AL at K = len(rates) from conditional acceptances a_1..a_K; nan (never offered) ends the sum."""
    survival = total = 1.0
    for rate in rates:
        if math.isnan(rate):
            break
        survival *= rate
        total += survival
    return total


def expected_speedup(costs: Costs, rates: Sequence[float], drafts: int, *, overhead: float = 0.0) -> float:
    """By `DEFINITION`, with the first `drafts` of the rates; 1 at K = 0."""
    return expected_length(rates[:drafts]) / (costs.of_round(drafts) + overhead) if drafts else 1.0


def best_drafts(costs: Costs, rates: Sequence[float], *, overhead: float = 0.0) -> int:
    """The K with the highest expected speed-up; 0 where none beats plain decoding."""
    choices = range(min(len(rates), costs.max_drafts) + 1)
    return max(choices, key=lambda drafts: expected_speedup(costs, rates, drafts, overhead=overhead))


def break_even(costs: Costs, drafts: int, *, overhead: float = 0.0) -> float | None:
    """The acceptance, the same at every depth, at which K = `drafts` costs what it gives; None: not even 1 does."""
    return alike(costs.of_round(drafts) + overhead, drafts)


def alike(length: float, drafts: int) -> float | None:
    """The acceptance that gives this AL at K = `drafts`, if it is the same at every depth; None beyond K + 1."""
    if length > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length([middle] * drafts) < length else (low, middle)
    return high
