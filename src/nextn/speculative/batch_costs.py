"""Seconds of a server's rounds by batch size and number of drafts, learned from rounds. Imports no torch."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nextn.speculative.draft_policy import non_decreasing

# Costs of rounds.
_MIN_RATIO_WEIGHT, _MIN_LEVEL_WEIGHT = 0.15, 0.1  # of a new measurement
_WARMUP_WEIGHT = 3  # measurements that one from before the first request counts as
_AGREEMENT = 1.25  # factor between a cost and what a round took, up to which they agree
# A number of drafts that was not measured at this batch size is tried if its estimated rate, raised by this, exceeds
# the best one: for batch sizes between measured ones close to each other, and for others.
_UNCERTAINTY, _LARGE_UNCERTAINTY = 0.05, 0.3
# Rounds after which the cost of a plain round is out of date: it was measured on another state of the machine, at first
# perhaps on a busy one.
_OLD_AT_FIRST, _OLD = 32, 512
_MAX_FACTOR = 2.0  # by which a single round changes an estimate: the round may have been disturbed


@dataclass
class _CostRow:
    """Costs of rounds of one batch size."""

    seconds: dict[int, float]  # by number of drafts
    num_measured: dict[int, int]  # number of measurements at this batch size, by number of drafts
    uncertainty: float = 0.0  # see _UNCERTAINTY; 0 if the costs do not come from other batch sizes
    num_rounds: int = 0  # observed at this batch size
    plain_at: int = 0  # num_rounds at the last one without drafts
    agreed: set[int] = field(default_factory=set)  # numbers of drafts whose last round in service took about as long

    @property
    def is_measured(self) -> bool:
        return not self.uncertainty


class RoundCosts:
    """Seconds of a round, by batch size and number of drafts."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: Numbers of drafts to choose from, ascending."""
        self.lengths = tuple(lengths)
        self._ends = {self.lengths[0], self.lengths[-1]}
        self._rows: dict[int, _CostRow] = {}

    def set(self, batch_size: int, seconds: Mapping[int, float]) -> None:
        """Set costs that were measured before the first request, by number of drafts: none is below one of fewer."""
        lengths = sorted(seconds)
        costs = dict(zip(lengths, non_decreasing([seconds[length] for length in lengths]), strict=True))
        self._rows[batch_size] = _CostRow(costs, dict.fromkeys(costs, _WARMUP_WEIGHT))

    def row(self, batch_size: int) -> dict[int, float]:
        """Return the seconds of a round by number of drafts, for numbers that are known or lie between known ones.

        Batch sizes without measurements are interpolated, or use the nearest one within a factor of two: only ratios
        between numbers of drafts matter.
        """
        return self._complete(self._row(batch_size).seconds)

    def to_try(self, batch_size: int, rates: Mapping[int, float], best: int) -> int | None:
        """Return a number of drafts that was not measured at this batch size and may be the fastest, or None.

        `rates` are the expected tokens per second by number of drafts, of which `best` has the highest.
        """
        row = self._row(batch_size)
        unknown = [length for length in (self.lengths[-1], self.lengths[0]) if length not in row.seconds]
        if unknown:
            return unknown[0]
        uncertainty = row.uncertainty or _LARGE_UNCERTAINTY
        untried = {
            length: rate
            for length, rate in rates.items()
            if not row.num_measured.get(length) and rate * (1 + uncertainty) > rates[best]
        }
        return max(untried, key=lambda length: untried[length]) if untried else None

    def is_plain_old(self, batch_size: int, rates: Mapping[int, float], best: int) -> bool:
        """Return whether rounds without drafts may be the fastest, but were last measured long ago.

        Only such rounds show what they cost: if they were measured as too slow, drafts that do not pay would stay. They
        are measured soon after the first round, then after ever more rounds.
        """
        row = self._row(batch_size)
        is_near = rates.get(0, 0.0) * (1 + _LARGE_UNCERTAINTY) > rates.get(best, 0.0)
        interval = min(max(_OLD_AT_FIRST, row.plain_at), _OLD)
        return best > 0 and is_near and row.num_rounds - row.plain_at >= interval

    def observe(self, batch_size: int, length: int, seconds: float, *, is_ratio: bool, num_before: int) -> None:
        """Update the costs with the time of a round, after `num_before` rounds of this batch size.

        With `is_ratio` it is attributed to this number of drafts. Otherwise it is attributed to the machine and the
        sequences, and the costs of all numbers of drafts change by the same factor.
        """
        row = self._rows.setdefault(batch_size, self._row(batch_size))
        num = row.num_measured.get(length, 0)
        row.num_measured[length], row.num_rounds = num + 1, row.num_rounds + 1
        row.plain_at = row.plain_at if length else row.num_rounds
        if length not in row.seconds and not self._ends <= row.seconds.keys():
            row.seconds[length] = seconds
            return
        row.seconds = self._complete(row.seconds)
        factor = min(max(seconds / row.seconds[length], 1 / _MAX_FACTOR), _MAX_FACTOR)
        if is_ratio:
            agrees = 1 / _AGREEMENT <= factor <= _AGREEMENT
            (row.agreed.add if agrees else row.agreed.discard)(length)
            row.seconds[length] *= factor ** max(_MIN_RATIO_WEIGHT, 1 / (1 + num))
        else:
            change = factor ** max(_MIN_LEVEL_WEIGHT, 1 / (1 + num_before) if row.uncertainty else 0.0)
            row.seconds = {each: value * change for each, value in row.seconds.items()}

    def is_trusted(self, batch_size: int, length: int) -> bool:
        """Return whether a round in service agreed with this cost: the machine may have been busy before it."""
        return length in self._row(batch_size).agreed

    def _row(self, batch_size: int) -> _CostRow:
        return self._rows.get(batch_size) or self._between(batch_size)

    def _complete(self, seconds: dict[int, float]) -> dict[int, float]:
        """Add interpolated costs for the numbers of drafts between known ones."""
        if len(seconds) == len(self.lengths) or not self._ends <= seconds.keys():
            return seconds
        known, complete = sorted(seconds), dict(seconds)
        for length in self.lengths:
            if length not in seconds:
                upper = bisect_left(known, length)
                complete[length] = _interpolated(length, known[upper - 1], known[upper], seconds)
        return complete

    def _between(self, batch_size: int) -> _CostRow:
        """Estimate costs from those of other, measured batch sizes; empty if none is near."""
        sizes = [size for size, row in self._rows.items() if row.is_measured and self._ends <= row.seconds.keys()]
        lower = max((size for size in sizes if size < batch_size), default=None)
        upper = min((size for size in sizes if size > batch_size), default=None)
        if lower is not None and upper is not None:
            below, above = self.row(lower), self.row(upper)
            seconds = {
                length: _interpolated(batch_size, lower, upper, {lower: below[length], upper: above[length]})
                for length in self.lengths
            }
            is_near = upper <= 2 * lower
            return _CostRow(seconds, {}, _UNCERTAINTY if is_near else _LARGE_UNCERTAINTY)
        nearest = upper if lower is None else lower
        if nearest is None or max(nearest, batch_size) > 2 * min(nearest, batch_size):
            return _CostRow({}, {})
        return _CostRow(dict(self.row(nearest)), {}, _LARGE_UNCERTAINTY)


def _interpolated(at: int, low: int, high: int, values: Mapping[int, float]) -> float:
    return values[low] + (values[high] - values[low]) * (at - low) / (high - low)
