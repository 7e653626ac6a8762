"""How many tokens to draft: as many as pay, by what drafting and verifying cost and by how sure the head is.

Of the model it sees confidences, the highest probability of each law of the head, and how many drafts were kept. Every
decision falls before the draft that it is about is drawn, so that the text keeps the trunk's law. Imports no torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

from nextn.errors import ConfigError
from nextn.figures.speedup import Costs, expected_length

# Where bins of confidence begin: finer near 1, where a long chain is decided.
EDGES = tuple(1 - (1 - place / 16) ** 2 for place in range(16))
# What a prior weighs, in drafts, and how soon drafts are forgotten, in rounds.
_PRIOR, _MEMORY = 4.0, 512.0
# What the rate is judged by, in plain steps: before the first round, while drafting, and while decoding is plain, when
# rounds that draft are few and must tell soon.
_FIRST, _LONG, _SHORT = 12.0, 256.0, 8.0
PROBE = 32  # rounds from one that drafts to the next while decoding is plain
# A rule is kept for a share of the rounds seen so far, and for no more than this many: what is new in fewer is noise.
_SHARE, _LONGEST = 8, 16
_ALWAYS = 2**31  # rounds
_LARGE = 1e9  # weights of rounds beyond this are scaled down
_USUAL = 0.7  # the acceptance to begin with


@dataclass(frozen=True)
class RoundPlan:
    """The rule of one round, as data that native code can follow.

    A law falls into the last bin b with edges[b] <= its confidence. After the head step of depth k + 1:
    survival *= table[b]; end without this draft if survival < take[k]; draw it;
    end if k + 1 = max_drafts or survival < go[k].
    """

    max_drafts: int
    edges: tuple[float, ...] = (0.0,)
    table: tuple[float, ...] = (1.0,)  # by bin: the chance that a draft of this law stands
    take: tuple[float, ...] = ()  # by depth: what the survival of a draft must reach
    go: tuple[float, ...] = ()  # by depth: the same for one more head step

    @property
    def is_blind(self) -> bool:
        """Whether it asks for no confidence."""
        return len(self.edges) == 1

    def bin(self, confidence: float) -> int:
        return _bin(self.edges, confidence)

    def begin(self, limit: int | None = None) -> "Chain":
        """limit: no more drafts than this, whatever the plan says."""
        return Chain(self, self.max_drafts if limit is None else min(limit, self.max_drafts))


@dataclass
class Chain:
    """The drafts of one row in one round. confidences: of all laws that were asked about, drafted from or not."""

    plan: RoundPlan
    limit: int
    confidences: list[float] = field(default_factory=list)
    drafts: int = 0
    survival: float = 1.0
    ended: bool = False

    @property
    def further(self) -> bool:
        """Whether to run the head once more."""
        return not self.ended and self.drafts < self.limit

    def more(self, confidence: float) -> bool:
        """Whether to draft from the law of this confidence. To be asked before the draft is drawn."""
        assert self.further, "the chain has ended"
        plan, at = self.plan, self.plan.bin(confidence)
        self.confidences.append(confidence)
        self.survival *= plan.table[at]
        taken = self.survival >= plan.take[self.drafts]
        self.ended = not taken or self.survival < plan.go[self.drafts]
        self.drafts += taken
        return taken


NONE = RoundPlan(0)  # plain decoding


class DraftLength(Protocol):
    """Sets how many tokens each round drafts."""

    def plan(self) -> RoundPlan:
        """The rule of the next round."""

    def holds(self, rows: int) -> int:
        """Rounds of so many rows for which `plan` says what it just said, whatever they bring."""

    def learn(self, confidences: Sequence[float], *, drafts: int, kept: int) -> None:
        """What became of a row's round: its chain's confidences and drafts, and how many of them were kept."""

    @property
    def reason(self) -> str:
        """Why this many tokens are drafted now, in words."""


@dataclass(frozen=True)
class Fixed:
    """Always `num_drafts`, or fewer: none from a law whose confidence is below p_min. Raises ConfigError."""

    num_drafts: int
    p_min: float = 0.0

    def __post_init__(self) -> None:
        if self.num_drafts < 0 or not 0 <= self.p_min <= 1:
            raise ConfigError(f"{self.num_drafts=}, {self.p_min=}; expected a number of drafts, and p_min from 0 to 1")

    def plan(self) -> RoundPlan:
        return self._plan

    @cached_property
    def _plan(self) -> RoundPlan:
        num, always = self.num_drafts, (0.0,) * self.num_drafts
        if not self.p_min:
            return RoundPlan(num, take=always, go=always)
        return RoundPlan(num, (0.0, self.p_min), (0.0, 1.0), (1.0,) * num, always)

    def holds(self, rows: int) -> int:
        return _ALWAYS

    def learn(self, confidences: Sequence[float], *, drafts: int, kept: int) -> None:
        pass

    @property
    def reason(self) -> str:
        return f"{self.num_drafts} drafts a round" + (f", while the head is {self.p_min:.0%} sure" * (self.p_min > 0))


class Calibration:
    """The share of drafts that stand, by bin of confidence: what was seen, weighed against a prior.

    The prior should be high: a bin that is never drafted from is never learned. For the same reason a bin that is no
    longer seen drifts back to it.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = tuple(prior)
        # Rather than all bins shrinking at every round, each round counts more than the one before, this much.
        self._offered, self._kept, self._weight = [0.0] * len(prior), [0.0] * len(prior), 1.0

    def learn(self, places: Sequence[int], kept: int) -> None:
        """The drafts of one round that were offered, all those before them having stood; the first `kept` stood."""
        self._weight = weight = self._weight / (1 - 1 / _MEMORY)
        for place in places:
            self._offered[place] += weight
        for place in places[:kept]:
            self._kept[place] += weight
        if weight > _LARGE:
            self._offered, self._kept = ([value / weight for value in each] for each in (self._offered, self._kept))
            self._weight = 1.0

    @property
    def table(self) -> tuple[float, ...]:
        prior = _PRIOR * self._weight
        seen = zip(self._kept, self._offered, self.prior, strict=True)
        return tuple([(kept + prior * hope) / (offered + prior) for kept, offered, hope in seen])

    @property
    def mean(self) -> float:
        """Over all drafts seen."""
        prior = _PRIOR * self._weight
        return (sum(self._kept) + prior * _USUAL) / (sum(self._offered) + prior)


class Adaptive:
    """Drafts on while one draft more is expected to bring more tokens per cost than rounds have brought so far.

    That rule is optimal for the long-run rate where costs per draft do not fall (Dinkelbach's ratio; survival cannot
    grow): survival / (c + v(k+2) - v(k+1)) > S. Where drafting brings less than plain decoding, rounds are plain but
    for one in 32. It learns what confidences are worth as it goes; one object may serve many rows.
    """

    def __init__(self, costs: Costs, *, limit: int | None = None, overhead: float = 0.0) -> None:
        """limit: the most drafts of a round, by default as many as the costs tell. overhead: o of `speedup.DEFINITION`.

        Raises ConfigError for a limit beyond the costs.
        """
        self.limit = costs.max_drafts if limit is None else limit
        if not 1 <= self.limit <= costs.max_drafts:
            raise ConfigError(f"limit = {limit}; expected 1 to {costs.max_drafts}, the drafts that costs are known for")
        self.v, self.c, self.overhead = _rising(costs.v[: self.limit + 1]), costs.c, overhead
        rows = [after - before for before, after in pairwise(self.v)]
        self._rows, self._steps = rows, [self.c + row for row in rows]
        # Drafts that are sampled from flat laws stand as often as others do; in greedy decoding they do not.
        hopes = [max(_USUAL, (low + high) / 2) for low, high in pairwise((*EDGES, 1.0))]
        self.stands = Calibration(hopes)
        usual = [expected_length([_USUAL] * num) / self._price(num, num) for num in range(1, self.limit + 1)]
        self.price, self.tokens = _FIRST, _FIRST * max(usual)
        self.waited = 0
        self._floors: dict[float, tuple[list[float], list[float]]] = {}  # by the usual acceptance, to a hundredth
        self._kept = NONE
        # Rounds that drafted: all, those since the rule was made, and how many it is kept for.
        self._learned = self._since = self._span = 0

    @property
    def rate(self) -> float:
        """Tokens per cost of a plain step, of the last rounds that drafted."""
        return self.tokens / self.price

    @property
    def pays(self) -> bool:
        return self.rate > 1

    @property
    def reason(self) -> str:
        if self.pays:
            return f"drafting: {self.rate:.2f} x plain decoding of late"
        return f"plain: drafting gave {self.rate:.2f} x plain decoding; tried again every {PROBE} rounds"

    def plan(self) -> RoundPlan:
        if self._since >= self._span:
            if not self.pays and self.waited < PROBE - 1:
                return NONE
            self._kept, self._since = self._made(), 0
            self._span = min(_LONGEST, 1 + self._learned // _SHARE) if self.pays else 1
        return self._kept

    def holds(self, rows: int) -> int:
        left = self._span - self._since
        return max(1, -(-(left if left > 0 else PROBE - 1 - self.waited) // rows))

    def _made(self) -> RoundPlan:
        rate, usual = max(1.0, self.rate), max(0.01, round(self.stands.mean, 2))
        if usual not in self._floors:
            self._floors[usual] = self._floors_at(usual)
        take, go = (tuple([rate * floor for floor in floors]) for floors in self._floors[usual])
        return RoundPlan(self.limit, EDGES, self.stands.table, take, go)

    def _floors_at(self, usual: float) -> tuple[list[float], list[float]]:
        """`take` and `go` at a rate of 1, where laws not yet seen stand with this probability."""
        rows, steps = self._rows, self._steps
        take = [_floor([row, *steps[depth + 1 :]], usual) for depth, row in enumerate(rows)]
        # The next law is unseen when its head step is decided on: it counts as a usual one.
        return take, [_floor(steps[depth + 1 :], usual) / usual for depth in range(self.limit)]

    def learn(self, confidences: Sequence[float], *, drafts: int, kept: int) -> None:
        if not confidences:
            self.waited += 1
            return
        self.waited, self._learned, self._since = 0, self._learned + 1, self._since + 1
        places = [_bin(EDGES, confidence) for confidence in confidences]
        self.stands.learn(places[: min(drafts, kept + 1)], kept)
        self.tokens += kept + 1
        self.price += self._price(drafts, len(confidences))
        fade = min(1.0, (_LONG if self.pays else _SHORT) / self.price)
        self.tokens, self.price = self.tokens * fade, self.price * fade

    def _price(self, drafts: int, steps: int) -> float:
        return self.v[drafts] + steps * self.c + self.overhead * (steps > 0)


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """The closest values from 1 on that do not fall (pool adjacent violators): a pass over more tokens that was
    measured as cheaper is noise, of its own and of what is beside it alike."""
    pools: list[tuple[float, int]] = []  # (sum, number)
    for value in values:
        total, num = value, 1
        while pools and pools[-1][0] * num > total * pools[-1][1]:
            before, others = pools.pop()
            total, num = total + before, num + others
        pools.append((total, num))
    return tuple(max(1.0, total / num) for total, num in pools for _ in range(num))


def _bin(edges: Sequence[float], confidence: float) -> int:
    return max(0, bisect_right(edges, confidence) - 1)


def _floor(steps: Sequence[float], usual: float) -> float:
    """The least survival of the next draft at which going on pays a rate of 1: the best of going on by 1, 2, ...
    drafts at these costs, of which each after the next stands as usual. 0 behind the last."""
    prices, worths = accumulate(steps), accumulate(usual**place for place in range(len(steps)))
    return min((price / worth for price, worth in zip(prices, worths, strict=True)), default=0.0)
