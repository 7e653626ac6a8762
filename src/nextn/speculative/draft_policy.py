"""How many tokens to draft: as many as pay off, given the costs of drafting and verifying and the head's confidence.

Of the model it sees only confidences (the highest probability of each of the head's distributions) and how many drafts
were accepted. Every decision is made before the draft that it concerns is sampled, so that emitted tokens keep the
trunk's distribution. A round may verify copied tokens instead: a copy has probability 1 under its proposal, so q is
one-hot and verification stays exact. Imports no torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

from nextn.errors import ConfigError
from nextn.speculative.copy_choice import CopyChoice, CopyRun, RoundValues, choose_alone
from nextn.stats.acceptance import expected_length
from nextn.stats.speedup import Costs

# Lower edges of the confidence bins: finer near 1, where long chains are decided.
EDGES = tuple(1 - (1 - index / 16) ** 2 for index in range(16))
# The weight of the prior, in drafts, and the time constant with which drafts are forgotten, in rounds.
_PRIOR, _MEMORY = 4.0, 512.0
# How much cost the rate is averaged over, in baseline steps: before the first round, while drafting, and while decoding
# is plain, when rounds that draft are few and must show their effect soon.
_FIRST, _LONG, _SHORT = 12.0, 256.0, 8.0
PROBE_INTERVAL = 32  # rounds from one that drafts to the next while decoding is plain
# A plan is used for 1 / _SHARE of the rounds seen so far, and at most _LONGEST: what changes in fewer is noise.
_SHARE, _LONGEST = 8, 16
_ALWAYS = 2**31  # rounds
_LARGE = 1e9  # weights of rounds are rescaled beyond this
_TYPICAL = 0.7  # initial acceptance rate
# What one more position of the trunk's pass and one draft step cost where nothing was measured, in baseline steps.
_POSITION_COST, _STEP_COST = 0.1, 0.15


@dataclass(frozen=True)
class RoundPlan:
    """When to go on drafting in one round, as data that native code can follow.

    A distribution falls into the last bin b with edges[b] <= its confidence. After the head step of depth k + 1:
    survival *= table[b]; end without this draft if survival < take[k]; sample it;
    end if k + 1 = max_speculative_tokens or survival < go[k].
    """

    max_speculative_tokens: int
    edges: tuple[float, ...] = (0.0,)
    table: tuple[float, ...] = (1.0,)  # by bin: the probability that a draft is accepted
    take: tuple[float, ...] = ()  # by depth: the survival that a draft must reach
    go: tuple[float, ...] = ()  # by depth: the same for one more head step

    @property
    def ignores_confidence(self) -> bool:
        return len(self.edges) == 1

    def bin(self, confidence: float) -> int:
        return _bin(self.edges, confidence)

    def begin(self, limit: int | None = None) -> "DraftProgress":
        """Start a sequence's drafts, at most `limit`."""
        most = self.max_speculative_tokens
        return DraftProgress(self, most if limit is None else min(limit, most))


@dataclass
class DraftProgress:
    """The drafts of one sequence in one round."""

    plan: RoundPlan
    limit: int
    confidences: list[float] = field(default_factory=list)  # of all distributions seen, drafted from or not
    num_draft_tokens: int = 0
    survival: float = 1.0
    ended: bool = False

    @property
    def can_extend(self) -> bool:
        """Whether to run the head once more."""
        return not self.ended and self.num_draft_tokens < self.limit

    def extend(self, confidence: float) -> bool:
        """Decide, before sampling, whether to draft from the distribution with this confidence."""
        assert self.can_extend, "drafting has ended"
        plan = self.plan
        self.confidences.append(confidence)
        self.survival *= plan.table[plan.bin(confidence)]
        is_taken = self.survival >= plan.take[self.num_draft_tokens]
        self.ended = not is_taken or self.survival < plan.go[self.num_draft_tokens]
        self.num_draft_tokens += is_taken
        return is_taken


NO_DRAFTS = RoundPlan(0)  # plain decoding


def candidate_lengths(most: int) -> tuple[int, ...]:
    """Return the numbers of drafts to choose from, ascending: all up to 4, then about every half power of two."""
    steps = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    return (*(step for step in steps if step < most), most)


class DraftLength(Protocol):
    """A policy for the number of drafts per round. A class that inherits from it learns nothing by default."""

    def plan(self) -> RoundPlan:
        """Return the plan of the next round."""

    def rounds_unchanged(self, batch_size: int) -> int:
        """Return for how many rounds of this batch size `plan` will stay the same, whatever they bring."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn what a round took: the tokens that all sequences got, and its time."""
        return

    def learn(self, confidences: Sequence[float], *, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from one sequence's part of a round: confidences, number of drafts, and how many were accepted.

        Without confidences, from a round in which no sequence drafted.
        """
        return

    def choose(self, runs: Sequence[CopyRun]) -> CopyChoice:
        """Choose what the next round drafts: each sequence's copy, or what `plan` lets the head draft."""

    def observe_copies(self, num_draft_tokens: int, seconds: float) -> None:
        """Learn what a round without the head took that verified up to so many copied tokens of a sequence."""
        return

    @property
    def reason(self) -> str:
        """Why this many tokens are drafted now, for users."""


@dataclass(frozen=True)
class FixedLength(DraftLength):
    """Always K drafts, ended early by a confidence below p_min. Raises ConfigError for values out of range."""

    num_speculative_tokens: int
    p_min: float = 0.0

    def __post_init__(self) -> None:
        num = self.num_speculative_tokens
        if num < 0 or not 0 <= self.p_min <= 1:
            raise ConfigError(f"num_speculative_tokens = {num}, p_min = {self.p_min}; expected >= 0, and 0 to 1")

    def plan(self) -> RoundPlan:
        return self._plan

    @cached_property
    def _plan(self) -> RoundPlan:
        num, always = self.num_speculative_tokens, (0.0,) * self.num_speculative_tokens
        if not self.p_min:
            return RoundPlan(num, take=always, go=always)
        return RoundPlan(num, (0.0, self.p_min), (0.0, 1.0), (1.0,) * num, always)

    def rounds_unchanged(self, batch_size: int) -> int:
        return _ALWAYS

    def choose(self, runs: Sequence[CopyRun]) -> CopyChoice:
        """Choose by typical costs and acceptance, for each sequence alone."""
        num = self.num_speculative_tokens
        verify = [1 + _POSITION_COST * count for count in range(max(num, _longest(runs)) + 1)]
        rate = expected_length([_TYPICAL] * num) / (verify[num] + _STEP_COST * num)
        return _choose_alone(runs, rate, verify)

    @property
    def reason(self) -> str:
        minimum = f", while the head's confidence is at least {self.p_min:.0%}" * (self.p_min > 0)
        return f"{self.num_speculative_tokens} drafts per round{minimum}"


class ConfidenceCalibration:
    """The acceptance rate by confidence bin: what was observed, weighted against a prior.

    The prior should be high: a bin that is never drafted from is never learned. For the same reason a bin that is no
    longer seen drifts back to it.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = tuple(prior)
        # Instead of decaying all bins every round, each round has a larger weight than the one before.
        self._verified, self._accepted, self._weight = [0.0] * len(prior), [0.0] * len(prior), 1.0

    def learn(self, bins: Sequence[int], num_accepted: int) -> None:
        """Learn the bins of one round's drafts up to the first rejected one; the first `num_accepted` were accepted."""
        self._weight = weight = self._weight / (1 - 1 / _MEMORY)
        for index in bins:
            self._verified[index] += weight
        for index in bins[:num_accepted]:
            self._accepted[index] += weight
        if weight > _LARGE:
            self._verified = [value / weight for value in self._verified]
            self._accepted = [value / weight for value in self._accepted]
            self._weight = 1.0

    @property
    def table(self) -> tuple[float, ...]:
        """The acceptance rate of each bin."""
        weight = _PRIOR * self._weight
        bins = zip(self._accepted, self._verified, self.prior, strict=True)
        return tuple([(accepted + weight * prior) / (verified + weight) for accepted, verified, prior in bins])

    @property
    def mean(self) -> float:
        """The acceptance rate over all drafts seen."""
        weight = _PRIOR * self._weight
        return (sum(self._accepted) + weight * _TYPICAL) / (sum(self._verified) + weight)


class AdaptiveLength(DraftLength):
    """Drafts on while one more draft is expected to bring more tokens per cost than rounds have brought so far.

    After k drafts it drafts another one if survival / (c + v(k+2) - v(k+1)) > S, where v(m) is the cost of a trunk pass
    over m positions, c that of a draft step, both in baseline steps, and S the tokens per cost of recent rounds
    (`rate`). This is optimal for the long-run rate if costs per draft do not fall (Dinkelbach's ratio; survival cannot
    grow). Where drafting brings less than plain decoding, rounds are plain except for one in 32. The rule learns the
    acceptance rate by confidence while it is used; one object may serve many sequences.
    """

    def __init__(self, costs: Costs, *, limit: int | None = None, overhead: float = 0.0) -> None:
        """costs, overhead: see `speedup.DEFINITION`. limit: the most drafts of a round; None: as many as costs cover.

        Raises ConfigError for a limit beyond the costs.
        """
        self.limit = costs.max_speculative_tokens if limit is None else limit
        if not 1 <= self.limit <= costs.max_speculative_tokens:
            raise ConfigError(
                f"limit = {limit}; expected 1 to {costs.max_speculative_tokens}, the drafts that costs are known for"
            )
        self._copy_costs = _at_least_1(costs.v)
        self.v, self.c, self.overhead = _at_least_1(costs.v[: self.limit + 1]), costs.c, overhead
        self._verify_costs = [after - before for before, after in pairwise(self.v)]  # of one more position
        self._step_costs = [self.c + cost for cost in self._verify_costs]
        # Drafts sampled from flat distributions are accepted as often as others; in greedy decoding they are not.
        priors = [max(_TYPICAL, (low + high) / 2) for low, high in pairwise((*EDGES, 1.0))]
        self.calibration = ConfidenceCalibration(priors)
        rates = [expected_length([_TYPICAL] * num) / self._round_cost(num, num) for num in range(1, self.limit + 1)]
        self.cost, self.tokens = _FIRST, _FIRST * max(rates)
        self.plain_rounds = 0  # since the last round that drafted
        self._thresholds: dict[float, tuple[list[float], list[float]]] = {}  # by the mean acceptance, to a hundredth
        self._last_plan = NO_DRAFTS
        # Rounds that drafted: all, those since the plan was made, and how many it is used for.
        self._learned = self._since = self._span = 0

    @property
    def rate(self) -> float:
        """Tokens per cost of a baseline step, of the last rounds that drafted."""
        return self.tokens / self.cost

    @property
    def pays(self) -> bool:
        return self.rate > 1

    @property
    def reason(self) -> str:
        if self.pays:
            return f"drafting: recently {self.rate:.2f} x plain decoding"
        return f"plain: drafting gave {self.rate:.2f} x plain decoding; tried again every {PROBE_INTERVAL} rounds"

    def plan(self) -> RoundPlan:
        if self._since >= self._span:
            if not self.pays and self.plain_rounds < PROBE_INTERVAL - 1:
                return NO_DRAFTS
            self._last_plan, self._since = self._new_plan(), 0
            self._span = min(_LONGEST, 1 + self._learned // _SHARE) if self.pays else 1
        return self._last_plan

    def rounds_unchanged(self, batch_size: int) -> int:
        remaining = self._span - self._since
        if remaining > 0:
            return -(-remaining // batch_size)
        return max(1, PROBE_INTERVAL - 1 - self.plain_rounds)

    def _new_plan(self) -> RoundPlan:
        rate, mean = max(1.0, self.rate), max(0.01, round(self.calibration.mean, 2))
        if mean not in self._thresholds:
            self._thresholds[mean] = self._unit_thresholds(mean)
        take, go = (tuple([rate * value for value in values]) for values in self._thresholds[mean])
        return RoundPlan(self.limit, EDGES, self.calibration.table, take, go)

    def _unit_thresholds(self, mean: float) -> tuple[list[float], list[float]]:
        """`take` and `go` at a rate of 1, where drafts not yet seen are accepted with probability `mean`."""
        steps = self._step_costs
        take = [_threshold([cost, *steps[depth + 1 :]], mean) for depth, cost in enumerate(self._verify_costs)]
        # The next distribution is unseen when its head step is decided on: it counts as an average one.
        return take, [_threshold(steps[depth + 1 :], mean) / mean for depth in range(self.limit)]

    def learn(self, confidences: Sequence[float], *, num_draft_tokens: int, num_accepted: int) -> None:
        if not confidences:
            self.plain_rounds += 1
            return
        self.plain_rounds, self._learned, self._since = 0, self._learned + 1, self._since + 1
        bins = [_bin(EDGES, confidence) for confidence in confidences]
        self.calibration.learn(bins[: min(num_draft_tokens, num_accepted + 1)], num_accepted)
        self.tokens += num_accepted + 1
        self.cost += self._round_cost(num_draft_tokens, len(confidences))
        decay = min(1.0, (_LONG if self.pays else _SHORT) / self.cost)
        self.tokens, self.cost = self.tokens * decay, self.cost * decay

    def choose(self, runs: Sequence[CopyRun]) -> CopyChoice:
        """Choose by the measured costs and the rate of the head's rounds, for each sequence alone."""
        return _choose_alone(runs, max(1.0, self.rate), self._copy_costs)

    def _round_cost(self, num_draft_tokens: int, steps: int) -> float:
        return self.v[num_draft_tokens] + steps * self.c + self.overhead * (steps > 0)


def _choose_alone(runs: Sequence[CopyRun], rate: float, verify: Sequence[float]) -> CopyChoice:
    """Choose for each sequence alone, among lengths up to the copies' and those that have a cost."""
    lengths = candidate_lengths(min(_longest(runs), len(verify) - 1))
    return choose_alone(runs, RoundValues(rate, {length: verify[length] for length in lengths}))


def _longest(runs: Sequence[CopyRun]) -> int:
    return max(len(run.tokens) for run in runs)


def _at_least_1(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(1.0, value) for value in non_decreasing(values))


def non_decreasing(values: Sequence[float]) -> tuple[float, ...]:
    """The closest non-decreasing values (isotonic regression by pool adjacent violators): a pass over more tokens that
    was measured as cheaper is noise, in its own value and its neighbors' alike."""
    pools: list[tuple[float, int]] = []  # (sum, number)
    for value in values:
        total, num = value, 1
        while pools and pools[-1][0] * num > total * pools[-1][1]:
            other_total, other_num = pools.pop()
            total, num = total + other_total, num + other_num
        pools.append((total, num))
    return tuple(total / num for total, num in pools for _ in range(num))


def _bin(edges: Sequence[float], confidence: float) -> int:
    return max(0, bisect_right(edges, confidence) - 1)


def _threshold(costs: Sequence[float], mean: float) -> float:
    """The least survival of the next draft at which going on pays off at a rate of 1; 0 after the last.

    It is the minimum over going on by 1, 2, ... drafts at these costs, with `mean` acceptance after the next one.
    """
    totals, gains = accumulate(costs), accumulate(mean**depth for depth in range(len(costs)))
    return min((total / gain for total, gain in zip(totals, gains, strict=True)), default=0.0)
