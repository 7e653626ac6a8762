"""How many tokens a server drafts: the number that promises the most tokens per second.

The probability that a draft is accepted is a property of model and text: it is estimated once for all batch sizes. What
a round costs depends on the batch size and K: it is measured beforehand where possible, and refined by real rounds.
Imports no torch.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from nextn.speculative.draft_policy import FixedLength, RoundPlan
from nextn.stats.acceptance import expected_length

_TYPICAL = 0.7  # acceptance rate before the first draft
_PRIOR = 4.0  # its weight, in drafts
_MEMORY = 512.0  # drafts of a depth after which one has faded to 1 / e
_FADED = 64.0  # weight of what was known before a probe, in drafts: it may be out of date
_PROBE_DRAFTS = 16  # that a probe should verify; a larger batch needs fewer rounds
_UNLEARNED = 8  # drafts, below which a probe comes at once
_PROBE_SHARE = 0.01  # of the time that probes may cost
_FIRST_SPAN, _LONG_SPAN = 256, 4096  # rounds between probes: the fewest, and the most
_NEWS = 0.1  # change of the expected tokens after which the next probe comes sooner
_SPAN = 16  # rounds between decisions
_TRIAL = 4  # rounds of a number of drafts whose cost is unknown
# What fewer drafts must gain less, and more drafts more: a change is not free, and drafting has costs beside rounds,
# as the head processes prompts.
_CHANGE_MARGIN, _PLAIN_MARGIN = 0.02, 0.03
_RATIO_WEIGHT, _LEVEL_WEIGHT = 0.15, 0.1  # least weight of a new measurement
_SURE = 3  # measurements that one from before the first request counts as
_FRESH = 8  # rounds after a change of K whose times count as a property of K, later ones as one of the machine
_SETTLED = 3  # rounds before the change that this takes
# A number of drafts that was not measured at this batch size is tried where it may be faster than the best one by its
# estimate and so much: between batch sizes that were measured, and elsewhere.
_DOUBT, _LARGE_DOUBT = 0.05, 0.3
_MOST_FACTOR = 2.0  # by which one round moves an estimate at most: it may have been disturbed


def candidate_lengths(max_speculative_tokens: int) -> tuple[int, ...]:
    """Return the numbers of drafts to choose from, ascending: all up to 4, then about every half power of two."""
    steps = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    return (*(step for step in steps if step < max_speculative_tokens), max_speculative_tokens)


class AcceptanceEstimate:
    """The probability, by depth, that a draft is accepted if those before it were."""

    def __init__(self, max_speculative_tokens: int) -> None:
        """Create an estimate that nothing was learned for."""
        self._drafted, self._accepted = ([0.0] * max_speculative_tokens for _ in range(2))

    def learn(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from one sequence's part of a round."""
        fading = 1 - 1 / _MEMORY
        for depth in range(min(num_draft_tokens, num_accepted + 1, len(self._drafted))):
            self._drafted[depth] = self._drafted[depth] * fading + 1
            self._accepted[depth] = self._accepted[depth] * fading + (depth < num_accepted)

    def fade(self) -> None:
        """Let what follows weigh more than what is known."""
        for depth, drafted in enumerate(self._drafted):
            if drafted > _FADED:
                self._accepted[depth] *= _FADED / drafted
                self._drafted[depth] = _FADED

    @property
    def num_learned(self) -> float:
        """Weight of the first drafts seen; 0: none."""
        return self._drafted[0] if self._drafted else 0.0

    @property
    def rates(self) -> list[float]:
        """By depth; a depth that was seldom drafted is close to the one before it."""
        rates, before = [], _TYPICAL
        for drafted, accepted in zip(self._drafted, self._accepted, strict=True):
            before = (accepted + _PRIOR * before) / (drafted + _PRIOR)
            rates.append(before)
        return rates

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Return the tokens that a round with this many drafts brings a sequence, the bonus token included."""
        return expected_length(self.rates[:num_draft_tokens])

    def expected_by_length(self) -> list[float]:
        """Return `expected_tokens` of 0, 1, ... drafts."""
        return list(accumulate(accumulate([1.0, *self.rates], mul)))


@dataclass
class _CostRow:
    """Of one batch size."""

    seconds: dict[int, float]  # by number of drafts
    num_measured: dict[int, int]  # the same: measurements of this batch size
    doubt: float = 0.0  # see _DOUBT

    @property
    def is_source(self) -> bool:
        return not self.doubt


class RoundCosts:
    """Seconds of a round, by batch size and number of drafts."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: the numbers of drafts to choose from, ascending."""
        self.lengths = tuple(lengths)
        self._ends = {self.lengths[0], self.lengths[-1]}
        self._rows: dict[int, _CostRow] = {}

    def set(self, batch_size: int, seconds: Mapping[int, float]) -> None:
        """Enter what was measured beforehand."""
        self._rows[batch_size] = _CostRow(dict(seconds), dict.fromkeys(seconds, _SURE))

    def row(self, batch_size: int) -> dict[int, float]:
        """Return the seconds by number of drafts, of those that are known or lie between known ones.

        Batch sizes without rounds of their own are interpolated, or take the nearest one within a factor of two: only
        ratios matter.
        """
        return self._complete(self._row(batch_size).seconds)

    def to_try(self, batch_size: int, rates: Mapping[int, float], best: int) -> int | None:
        """Return a number of drafts that was not measured at this batch size and may be the fastest, None without one.

        Args:
            batch_size: Sequences.
            rates: Expected tokens per second by number of drafts.
            best: The number with the most.
        """
        row = self._row(batch_size)
        unknown = [length for length in (self.lengths[-1], self.lengths[0]) if length not in row.seconds]
        if unknown:
            return unknown[0]
        doubt = row.doubt or _LARGE_DOUBT
        untried = {
            length: rate
            for length, rate in rates.items()
            if not row.num_measured.get(length) and rate * (1 + doubt) > rates[best]
        }
        return max(untried, key=lambda length: untried[length]) if untried else None

    def observe(self, batch_size: int, length: int, seconds: float, *, is_ratio: bool, num_before: int) -> None:
        """Learn from a real round.

        Args:
            batch_size: Sequences.
            length: Number of drafts.
            seconds: Of the round.
            is_ratio: Whether its time is a property of this number of drafts, else one of the machine at present,
                and of the sequences: then the costs of all numbers change by the same factor.
            num_before: Rounds of this batch size just before it.
        """
        row = self._rows.setdefault(batch_size, self._row(batch_size))
        num = row.num_measured.get(length, 0)
        row.num_measured[length] = num + 1
        if length not in row.seconds and not self._ends <= row.seconds.keys():
            row.seconds[length] = seconds
            return
        row.seconds = self._complete(row.seconds)
        factor = min(max(seconds / row.seconds[length], 1 / _MOST_FACTOR), _MOST_FACTOR)
        if is_ratio:
            row.seconds[length] *= factor ** max(_RATIO_WEIGHT, 1 / (1 + num))
        else:
            change = factor ** max(_LEVEL_WEIGHT, 1 / (1 + num_before) if row.doubt else 0.0)
            row.seconds = {each: value * change for each, value in row.seconds.items()}

    def _row(self, batch_size: int) -> _CostRow:
        return self._rows.get(batch_size) or self._between(batch_size)

    def _complete(self, seconds: dict[int, float]) -> dict[int, float]:
        """Add the numbers of drafts between the known ones."""
        if len(seconds) == len(self.lengths) or not self._ends <= seconds.keys():
            return seconds
        known, complete = sorted(seconds), dict(seconds)
        for length in self.lengths:
            if length not in seconds:
                upper = bisect_left(known, length)
                complete[length] = _interpolated(length, known[upper - 1], known[upper], seconds)
        return complete

    def _between(self, batch_size: int) -> _CostRow:
        """Costs by those of other batch sizes that were measured themselves; empty where none is near."""
        sizes = [size for size, row in self._rows.items() if row.is_source and self._ends <= row.seconds.keys()]
        lower = max((size for size in sizes if size < batch_size), default=None)
        upper = min((size for size in sizes if size > batch_size), default=None)
        if lower is not None and upper is not None:
            below, above = self.row(lower), self.row(upper)
            seconds = {
                length: _interpolated(batch_size, lower, upper, {lower: below[length], upper: above[length]})
                for length in self.lengths
            }
            is_near = upper <= 2 * lower
            return _CostRow(seconds, {}, _DOUBT if is_near else _LARGE_DOUBT)
        nearest = upper if lower is None else lower
        if nearest is None or max(nearest, batch_size) > 2 * min(nearest, batch_size):
            return _CostRow({}, {})
        return _CostRow(dict(self.row(nearest)), {}, _LARGE_DOUBT)


def _interpolated(at: int, low: int, high: int, values: Mapping[int, float]) -> float:
    return values[low] + (values[high] - values[low]) * (at - low) / (high - low)


@dataclass
class _Probe:
    """Rounds of K that show what is accepted, while fewer tokens are drafted."""

    expected_tokens: float  # of K drafts, before it
    rate: float  # tokens/s that it is measured against
    tokens: int = 0
    seconds: float = 0.0


class MeasuredLength:
    """Drafts the number of tokens with the most expected tokens per second: (1 + sum of products of acceptance) / cost.

    For servers: what a round costs there depends on the batch. `at` gives the policy of a batch. Where less than K is
    drafted for long, rare probes of K, of at most 1 % of the time, show whether more is accepted than before.
    """

    def __init__(self, max_speculative_tokens: int) -> None:
        """max_speculative_tokens: K, the most drafts of a round."""
        self._max = max_speculative_tokens
        self.acceptance = AcceptanceEstimate(max_speculative_tokens)
        self.costs = RoundCosts(candidate_lengths(max_speculative_tokens))
        self._plans = {length: FixedLength(length).plan() for length in self.costs.lengths}
        self._batch_size = 0
        self._length, self._left = max_speculative_tokens, 0  # for so many more rounds
        self._rounds_since_change = self._rounds_before_change = 0  # of this batch size, measured ones
        self._is_first = True  # round after a change: the head may also process positions that it had put off
        # Rounds since the last one of K drafts, rounds since the last drafts, and how many of them bring a probe.
        self._since_most, self._since_drafts, self._span = 0, 0, float(_FIRST_SPAN)
        self._probe: _Probe | None = None

    def at(self, batch_size: int) -> "BatchLength":
        """Return the policy of a batch of this size."""
        return BatchLength(self, batch_size)

    def best(self, batch_size: int) -> int:
        """Return the number of drafts for a batch of this size by what is known, K before anything is."""
        rates = self.rates(batch_size)
        if 0 not in rates or self._max not in rates:
            return self._max
        scores = {length: rate * (1 + _PLAIN_MARGIN * (length == 0)) for length, rate in rates.items()}
        best = max(scores, key=lambda length: scores[length])
        current = scores.get(self._length, 0.0)
        return best if scores[best] > current * (1 + _CHANGE_MARGIN) else self._length

    def rates(self, batch_size: int) -> dict[int, float]:
        """Return the expected tokens per second by number of drafts, of those whose cost is known."""
        expected, row = self.acceptance.expected_by_length(), self.costs.row(batch_size)
        return {length: batch_size * expected[length] / row[length] for length in sorted(row)}

    def plan(self, batch_size: int) -> RoundPlan:
        """Return the plan of the next round."""
        if batch_size != self._batch_size:
            self._batch_size, self._left, self._probe = batch_size, 0, None
            self._rounds_since_change = self._rounds_before_change = 0
            self._is_first = True
        if self._left <= 0:
            self._decide()
        return self._plans[self._length]

    def rounds_unchanged(self, batch_size: int) -> int:
        """Return for how many rounds `plan` stays the same."""
        self.plan(batch_size)
        return self._left

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn what a round of the current batch took."""
        self._left -= 1
        if self._probe is not None:
            self._probe.tokens, self._probe.seconds = self._probe.tokens + num_tokens, self._probe.seconds + seconds
        self._since_most = 0 if self._length == self._max else self._since_most + 1
        self._since_drafts = 0 if self._length else self._since_drafts + 1
        if self._is_first:
            self._is_first = False
            return
        self._rounds_since_change += 1
        is_ratio = self._rounds_since_change <= _FRESH and self._rounds_before_change >= _SETTLED
        num_before = self._rounds_since_change - 1 + self._rounds_before_change
        self.costs.observe(self._batch_size, self._length, seconds, is_ratio=is_ratio, num_before=num_before)

    def _decide(self) -> None:
        """Set the number of drafts, and for how many rounds it stays."""
        if self._probe is not None:
            self._end_probe(self._probe)
        size = self._batch_size
        best, rates = self.best(size), self.rates(size)
        trial = self.costs.to_try(size, rates, best)
        is_unlearned = self.acceptance.num_learned < _UNLEARNED
        num_rounds = -(-_PROBE_DRAFTS // size)
        if self._length == 0 and not is_unlearned:
            num_rounds = max(2, num_rounds)  # the first one is no measure of the cost
        if trial is not None:
            self._change(trial, _TRIAL)
        elif best < self._max and (is_unlearned or self._is_stale(best, rates, num_rounds)):
            self._probe = _Probe(self.acceptance.expected_tokens(self._max), rates[best])
            self.acceptance.fade()
            self._change(self._max, num_rounds)
        else:
            self._change(best, _SPAN)

    def _is_stale(self, best: int, rates: Mapping[int, float], num_probe_rounds: int) -> bool:
        """Return whether it is so long since drafts were verified that a probe would cost little."""
        row, since = self.costs.row(self._batch_size), self._since_most if best else self._since_drafts
        lost = num_probe_rounds * row[self._max] / row[best] * (1 - rates[self._max] / rates[best])
        return since >= max(self._span, lost / _PROBE_SHARE)

    def _end_probe(self, probe: _Probe) -> None:
        """Let the next one come the later, the more this one has cost; soon, where it brought news."""
        self._probe = None
        change = self.acceptance.expected_tokens(self._max) / probe.expected_tokens - 1
        lost_s = max(0.0, probe.seconds - probe.tokens / probe.rate)
        round_s = min(self.costs.row(self._batch_size).values())
        least = max(_FIRST_SPAN, lost_s / round_s / _PROBE_SHARE)
        grown = self._span * (2 if abs(change) < _NEWS else 0.5)
        self._span = min(max(least, grown), _LONG_SPAN)

    def _change(self, length: int, num_rounds: int) -> None:
        self._left = num_rounds
        if length != self._length:
            self._length, self._is_first = length, True
            self._rounds_before_change, self._rounds_since_change = self._rounds_since_change, 0


@dataclass(frozen=True)
class BatchLength:
    """`MeasuredLength` for a batch of one size, a `DraftLength`."""

    policy: MeasuredLength
    batch_size: int

    def plan(self) -> RoundPlan:
        return self.policy.plan(self.batch_size)

    def rounds_unchanged(self, batch_size: int) -> int:
        return self.policy.rounds_unchanged(self.batch_size)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.policy.observe(num_tokens, seconds)

    def learn(self, confidences: Sequence[float], *, num_draft_tokens: int, num_accepted: int) -> None:
        if confidences:
            self.policy.acceptance.learn(num_draft_tokens, num_accepted)

    @property
    def reason(self) -> str:
        rates = self.policy.rates(self.batch_size)
        expected = ", ".join(f"K = {length} promises {rate:.0f} tokens/s" for length, rate in rates.items())
        return f"{self.plan().max_speculative_tokens} drafts per round: {expected}"
