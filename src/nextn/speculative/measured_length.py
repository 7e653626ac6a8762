"""How many tokens a server drafts: the number with the most expected tokens per second.

The acceptance rate depends on model and text, so it is estimated once for all batch sizes. The time of a round depends
on the batch size and the number of drafts; it is measured before the first request if possible, and refined by real
rounds. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from nextn.speculative.batch_costs import RoundCosts
from nextn.speculative.copy_choice import CopyChoice, CopyRun, RoundValues, choose_copies
from nextn.speculative.draft_policy import FixedLength, RoundPlan, candidate_lengths
from nextn.stats.acceptance import expected_length

# Acceptance rates, in drafts of one depth.
_INITIAL_RATE = 0.7
_PRIOR_WEIGHT = 4.0  # of the initial rate
_DECAY = 512.0  # drafts after which the weight of one has fallen to 1 / e
_MAX_OLD_WEIGHT = 64.0  # of earlier drafts when a probe begins: they may be out of date
_MIN_LEARNED = 8.0  # below this, a probe starts at once

# Decisions and probes, in rounds unless noted.
# Rounds without drafts show nothing of the acceptance, and longer runs of them are cheaper.
_DECISION_INTERVAL, _PLAIN_INTERVAL = 16, 64
_TRIAL_ROUNDS = 4  # with a number of drafts whose cost is unknown
_PROBE_DRAFTS = 16  # drafts that a probe should verify; a larger batch needs fewer rounds for that
_MAX_PROBE_SHARE = 0.01  # share of the time that probes may cost
_MIN_PROBE_INTERVAL, _MAX_PROBE_INTERVAL = 256, 4096
_CHANGED = 0.1  # relative change of the expected tokens after which the next probe comes sooner
# A change must gain at least the first margin, because it is not free. Plain decoding is preferred by the second one,
# because drafting has costs outside of rounds: the head also processes prompts.
_CHANGE_MARGIN, _PLAIN_MARGIN = 0.02, 0.03

# In the first rounds after a change of the number of drafts, a different time is attributed to that number; later, to
# the machine and the sequences. This needs some rounds before the change, too.
_RATIO_ROUNDS, _ROUNDS_BEFORE_RATIO = 8, 3


class AcceptanceEstimate:
    """The acceptance rate by depth, given that the drafts before it were accepted."""

    def __init__(self, max_speculative_tokens: int) -> None:
        self._drafted, self._accepted = ([0.0] * max_speculative_tokens for _ in range(2))

    def learn(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add one sequence's part of a round."""
        decay = 1 - 1 / _DECAY
        for depth in range(min(num_draft_tokens, num_accepted + 1, len(self._drafted))):
            self._drafted[depth] = self._drafted[depth] * decay + 1
            self._accepted[depth] = self._accepted[depth] * decay + (depth < num_accepted)

    def fade(self) -> None:
        """Reduce the weight of earlier drafts, so that later ones count more."""
        for depth, drafted in enumerate(self._drafted):
            if drafted > _MAX_OLD_WEIGHT:
                self._accepted[depth] *= _MAX_OLD_WEIGHT / drafted
                self._drafted[depth] = _MAX_OLD_WEIGHT

    @property
    def num_learned(self) -> float:
        """Weight of the observed drafts of depth 1; 0 if there are none."""
        return self._drafted[0] if self._drafted else 0.0

    @property
    def rates(self) -> list[float]:
        """Acceptance rates by depth; a depth that was rarely drafted is close to the one before it."""
        rates, before = [], _INITIAL_RATE
        for drafted, accepted in zip(self._drafted, self._accepted, strict=True):
            before = (accepted + _PRIOR_WEIGHT * before) / (drafted + _PRIOR_WEIGHT)
            rates.append(before)
        return rates

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Return the expected tokens per sequence of a round with this many drafts, including the bonus token."""
        return expected_length(self.rates[:num_draft_tokens])

    def expected_by_length(self) -> list[float]:
        """Return `expected_tokens` for 0, 1, ... drafts."""
        return list(accumulate(accumulate([1.0, *self.rates], mul)))


def _typical_cost(batch_size: int, num_draft_tokens: int) -> float:
    """A round over so many drafts per sequence, in rounds without any: the first row costs ten times each other one."""
    return 1 + batch_size * num_draft_tokens / (9 + batch_size)


@dataclass
class _Probe:
    """Rounds of more drafts than usual, which update the acceptance rates."""

    length: int  # number of drafts
    expected_tokens: float  # of so many drafts, before the probe
    rate: float  # tokens/s without the probe
    tokens: int = 0
    seconds: float = 0.0


class MeasuredLength:
    """Drafts the number of tokens with the most expected tokens per second, by acceptance rates and times of rounds.

    It is for servers, where the time of a round depends on the batch size: `at` gives the policy of a batch. While
    fewer than K tokens are drafted, rare probes with more drafts, of at most 1 % of the time, update the acceptance
    rates. Where drafts would not be faster even if all were accepted, as in large batches, they only correct the times.
    """

    def __init__(self, max_speculative_tokens: int, num_copy_tokens: int = 0) -> None:
        """Create a policy without measurements, of at most so many drafts, or copies, of a sequence per round."""
        self._max = max_speculative_tokens
        # Of rounds that verify copies and do not run the head.
        self.copy_costs = RoundCosts(candidate_lengths(num_copy_tokens)[num_copy_tokens > 0 :])
        self.acceptance = AcceptanceEstimate(max_speculative_tokens)
        self.costs = RoundCosts(candidate_lengths(max_speculative_tokens))
        self._lengths = {length: FixedLength(length) for length in self.costs.lengths}
        self._batch_size = 0
        self._length, self._rounds_left = max_speculative_tokens, 0  # until the next decision
        self._chosen = max_speculative_tokens  # the number before a check of plain rounds, or the present one
        self._rounds_since_change = self._rounds_before_change = 0  # measured ones, of this batch size
        # The first round after a change is not measured: the head may also process positions that it had deferred.
        self._is_first = True
        # Rounds since the last one with K drafts or of a probe, since the last one with any, and from probe to probe.
        self._since_max, self._since_drafts, self._probe_interval = 0, 0, float(_MIN_PROBE_INTERVAL)
        self._probe: _Probe | None = None

    def at(self, batch_size: int) -> "BatchLength":
        """Return the policy of a batch of this size."""
        return BatchLength(self, batch_size)

    def best(self, batch_size: int) -> int:
        """Return the number of drafts for a batch of this size; K while the costs are unknown."""
        rates = self.rates(batch_size)
        if 0 not in rates or self._max not in rates:
            return self._max
        scores = {length: rate * (1 + _PLAIN_MARGIN * (length == 0)) for length, rate in rates.items()}
        best = max(scores, key=lambda length: scores[length])
        current = scores.get(self._chosen, 0.0)
        return best if scores[best] > current * (1 + _CHANGE_MARGIN) else self._chosen

    def rates(self, batch_size: int) -> dict[int, float]:
        """Return the expected tokens per second by number of drafts, for numbers whose cost is known."""
        expected, row = self.acceptance.expected_by_length(), self.costs.row(batch_size)
        return {length: batch_size * expected[length] / row[length] for length in sorted(row)}

    def plan(self, batch_size: int) -> RoundPlan:
        """Return the plan of the next round."""
        if batch_size != self._batch_size:
            self._batch_size, self._rounds_left, self._probe = batch_size, 0, None
            self._rounds_since_change = self._rounds_before_change = 0
            self._is_first = True
        if self._rounds_left <= 0:
            self._decide()
        return self._lengths[self._length].plan()

    def choose(self, runs: Sequence[CopyRun]) -> CopyChoice:
        """Choose copies for this batch, by the measured times; by typical ones while there are none."""
        size, length = len(runs), self.plan(len(runs)).max_speculative_tokens
        seconds = self.costs.row(size)
        if not {0, length} <= seconds.keys():
            return self._lengths[length].choose(runs)
        verify = {count: seconds[0] * _typical_cost(size, count) for count in (length, *self.copy_costs.lengths)}
        measured = self.copy_costs.row(size)
        verify |= {count: max(measured[count], seconds[0]) for count in measured} | {0: seconds[0]}
        expected = self.acceptance.expected_tokens(length)
        return choose_copies(runs, RoundValues(size * expected / seconds[length], verify, length, expected))

    def observe_copies(self, batch_size: int, num_draft_tokens: int, seconds: float) -> None:
        """Learn the time of a round that verified up to so many copied tokens of a sequence, and no drafts."""
        if num_draft_tokens in self.copy_costs.lengths:
            self.copy_costs.observe(batch_size, num_draft_tokens, seconds, is_ratio=True, num_before=0)

    def rounds_unchanged(self, batch_size: int) -> int:
        """Return for how many rounds `plan` stays the same."""
        self.plan(batch_size)
        return self._rounds_left

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn the tokens and the time of a round of the current batch."""
        self._rounds_left -= 1
        if self._probe is not None:
            self._probe.tokens, self._probe.seconds = self._probe.tokens + num_tokens, self._probe.seconds + seconds
        self._since_max = 0 if self._length == self._max else self._since_max + 1
        self._since_drafts = 0 if self._length else self._since_drafts + 1
        if self._is_first:
            self._is_first = False
            return
        self._rounds_since_change += 1
        is_ratio = self._rounds_since_change <= _RATIO_ROUNDS and self._rounds_before_change >= _ROUNDS_BEFORE_RATIO
        num_before = self._rounds_since_change - 1 + self._rounds_before_change
        self.costs.observe(self._batch_size, self._length, seconds, is_ratio=is_ratio, num_before=num_before)

    def _decide(self) -> None:
        """Set the number of drafts, and for how many rounds to keep it."""
        if self._probe is not None:
            self._end_probe(self._probe)
        size = self._batch_size
        best, rates = self.best(size), self.rates(size)
        trial = self.costs.to_try(size, rates, best)
        longest = self._longest_useful(best, rates)
        is_unlearned = self.acceptance.num_learned < _MIN_LEARNED
        num_rounds = -(-_PROBE_DRAFTS // size)
        if self._length == 0 and not is_unlearned:
            num_rounds = max(2, num_rounds)  # the first one is not measured
        if trial is not None:
            self._change(trial, _TRIAL_ROUNDS)
        elif self.costs.is_plain_old(size, rates, best):
            self._change(0, _RATIO_ROUNDS)
            self._chosen = best
        elif (is_unlearned and longest > best) or self._is_stale(best, longest, rates, num_rounds):
            longest = longest if longest > best else self._max
            self._probe = _Probe(longest, self.acceptance.expected_tokens(longest), rates[best])
            self.acceptance.fade()
            self._change(longest, num_rounds)
        else:
            self._change(best, _DECISION_INTERVAL if best else _PLAIN_INTERVAL)

    def _longest_useful(self, best: int, rates: Mapping[int, float]) -> int:
        """Return the largest number of drafts that would be faster than `best` if all were accepted; 0: none.

        It is K while the cost of K drafts is not trusted.
        """
        if not self.costs.is_trusted(self._batch_size, self._max):
            return self._max
        row = self.costs.row(self._batch_size)
        least = rates.get(best, 0.0) * (1 + _PLAIN_MARGIN * (best == 0))
        return max((each for each in row if self._batch_size * (each + 1) / row[each] > least), default=0)

    def _is_stale(self, best: int, longest: int, rates: Mapping[int, float], num_probe_rounds: int) -> bool:
        """Return whether so many drafts were last verified so long ago that a probe costs little."""
        row, since = self.costs.row(self._batch_size), self._since_max if best else self._since_drafts
        if longest <= best:
            return best < self._max and since >= _MAX_PROBE_INTERVAL
        lost = num_probe_rounds * row[longest] / row[best] * (1 - rates[longest] / rates[best])
        return since >= max(self._probe_interval, lost / _MAX_PROBE_SHARE)

    def _end_probe(self, probe: _Probe) -> None:
        """Set when the next probe comes: the later, the more this one cost; sooner if acceptance has changed."""
        self._probe, self._since_max = None, 0
        change = self.acceptance.expected_tokens(probe.length) / probe.expected_tokens - 1
        lost_s = max(0.0, probe.seconds - probe.tokens / probe.rate)
        round_s = min(self.costs.row(self._batch_size).values())
        shortest = max(_MIN_PROBE_INTERVAL, lost_s / round_s / _MAX_PROBE_SHARE)
        scaled = self._probe_interval * (2 if abs(change) < _CHANGED else 0.5)
        self._probe_interval = min(max(shortest, scaled), _MAX_PROBE_INTERVAL)

    def _change(self, length: int, num_rounds: int) -> None:
        self._chosen, self._rounds_left = length, num_rounds
        if length != self._length:
            self._length, self._is_first = length, True
            self._rounds_before_change, self._rounds_since_change = self._rounds_since_change, 0


@dataclass(frozen=True)
class BatchLength:
    """The `DraftLength` of a batch of one size, by `MeasuredLength`."""

    policy: MeasuredLength
    batch_size: int

    def plan(self) -> RoundPlan:
        return self.policy.plan(self.batch_size)

    def rounds_unchanged(self, batch_size: int) -> int:
        return self.policy.rounds_unchanged(self.batch_size)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.policy.observe(num_tokens, seconds)

    def choose(self, runs: Sequence[CopyRun]) -> CopyChoice:
        return self.policy.choose(runs)

    def observe_copies(self, num_draft_tokens: int, seconds: float) -> None:
        self.policy.observe_copies(self.batch_size, num_draft_tokens, seconds)

    def learn(self, confidences: Sequence[float], *, num_draft_tokens: int, num_accepted: int) -> None:
        if confidences:
            self.policy.acceptance.learn(num_draft_tokens, num_accepted)

    @property
    def reason(self) -> str:
        rates = self.policy.rates(self.batch_size)
        expected = ", ".join(f"K = {length}: {rate:.0f} tokens/s" for length, rate in rates.items())
        return f"{self.plan().max_speculative_tokens} drafts per round; expected: {expected}"
