"""An engine's draft counts, and the counts that a hypothesis about its fault expects. Imports no torch.

A hypothesis holds how many drafts each text of a reference offered and had accepted under it. The statistics needed to
compare it with an engine follow from that: the variation between texts, correlations between depths, and the spread
between workloads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nextn.engines.counters import ADAPTIVE, FIRST_TOKENS, FULL_SHARE, NOTHING_DRAFTED, Counters
from nextn.errors import ConfigError, EngineError
from nextn.stats.acceptance import conditional_rates, expected_length, length_of_drafts
from nextn.stats.intervals import student_t

# Standard deviations of log(a / (1 - a)) between workloads: the least, and the one where the reference has no domains.
MIN_WORKLOAD_SPREAD, UNKNOWN_WORKLOAD_SPREAD = 0.25, 0.6

_ROUNDING_SHARE = 0.01  # by which an AL from a log may exceed K + 1

Rows = Sequence[Sequence[float]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ObservedCounts:
    """What an engine counted: drafts by depth as in `Acceptance`, or only an acceptance length."""

    num_drafted: tuple[int, ...] = ()  # [depths], at most the hypotheses' K; () without counts by position
    num_accepted: tuple[int, ...] = ()
    length: float | None = None  # AL of an engine without counts by position
    rounds: int | None = None  # that drafted; None if the engine does not report it

    def __post_init__(self) -> None:
        pairs = list(zip(self.num_drafted, self.num_accepted, strict=False))
        if len(self.num_drafted) != len(self.num_accepted) or any(not 0 <= k <= n for n, k in pairs):
            raise ConfigError(
                f"drafted {self.num_drafted}, accepted {self.num_accepted}; expected 0 <= accepted <= drafted at each "
                "depth"
            )
        if not self.num_drafted and self.length is None:
            raise ConfigError("neither counts by depth nor an acceptance length: there is nothing to compare")

    @property
    def rates(self) -> tuple[float, ...]:
        """[depths], a_k; nan for a depth that was never drafted."""
        return conditional_rates(self.num_accepted, self.num_drafted)

    @property
    def acceptance_length(self) -> float:
        """AL: tokens per round, the bonus token included."""
        return expected_length(self.rates) if self.length is None else self.length

    def as_record(self) -> dict[str, object]:
        """Return the counts for JSON reports."""
        counts = {"num_draft_tokens_per_pos": self.num_drafted, "num_accepted_tokens_per_pos": self.num_accepted}
        return counts | {"mean_acceptance_length": self.length, "num_drafts": self.rounds}


@dataclass(frozen=True, eq=False)
class ExpectedCounts:
    """The counts that one hypothesis expects, by text."""

    name: str
    num_drafted: Rows  # [texts][K]
    num_accepted: Rows  # [texts][K]
    domains: Sequence[str] = ()  # [texts], for the spread between workloads; () if all texts are of one domain
    is_expectation: bool = False  # counts are expected values, so the engine's sampling adds to their spread

    def __post_init__(self) -> None:
        shapes = {tuple(map(len, rows)) for rows in (self.num_drafted, self.num_accepted)}
        if len(shapes) != 1 or len(set(*shapes)) != 1 or (self.domains and len(self.domains) != len(self.num_accepted)):
            raise ConfigError(
                f"{self.name}: shapes differ; expected drafted [texts][K], accepted [texts][K] and domains [texts]"
            )

    @property
    def depths(self) -> int:
        return len(self.num_accepted[0])

    def select(self, indices: Sequence[int]) -> "ExpectedCounts":
        """Return the hypothesis over the texts at these indices."""
        return replace(
            self,
            num_drafted=[self.num_drafted[index] for index in indices],
            num_accepted=[self.num_accepted[index] for index in indices],
            domains=[self.domains[index] for index in indices] if self.domains else (),
        )

    @cached_property
    def counts(self) -> Floats:
        """[2, texts, K] float64: drafted, accepted."""
        return np.array([self.num_drafted, self.num_accepted], dtype=np.float64)

    @cached_property
    def num_texts(self) -> int:
        """Texts with a round: others, such as those that ended at once, are no samples."""
        return int((self.counts[0][:, 0] > 0).sum())

    @cached_property
    def raw_rates(self) -> Floats:
        """[K]: a_k; 0 where no text drafted the depth."""
        drafted, accepted = self.counts.sum(1)
        return np.array(conditional_rates(accepted.tolist(), drafted.tolist(), undrafted=0.0))

    @cached_property
    def design_effects(self) -> Floats:
        """[K]: design effects between texts, widened for few texts as in `intervals.proportion`."""
        drafted, accepted = self.counts
        num_texts, total = self.num_texts, drafted.sum(0)
        if num_texts < 2:
            return np.full(self.depths, 4.0)  # unknown; rounds of one text are seldom more correlated than this
        spread = ((accepted - self.raw_rates * drafted) ** 2).sum(0) * num_texts / (num_texts - 1)
        noise = self.raw_rates * (1 - self.raw_rates) * total
        effects: Floats = np.divide(spread, noise, out=np.ones_like(noise), where=noise > 0)
        widening = (student_t(num_texts - 1, 0.05) / student_t(math.inf, 0.05)) ** 2
        effects = np.maximum(effects, 0.0 if self.is_expectation else 1.0)
        return effects * widening

    @cached_property
    def effective_rounds(self) -> Floats:
        """[K]: the number of independent rounds that each a_k is estimated from."""
        num_rounds: Floats = self.counts[0].sum(0) / np.maximum(self.design_effects, 0.05)
        return num_rounds

    @cached_property
    def rates(self) -> Floats:
        """[K]: a_k with half a round added on each side (Jeffreys prior), so never 0 or 1."""
        rounds: Floats = np.minimum(self.effective_rounds, self.counts[0].sum(0))
        return (self.raw_rates * rounds + 0.5) / (rounds + 1)

    @cached_property
    def correlations(self) -> Floats:
        """[K, K]: correlations of a text's residuals between depths, shrunk to 0 for few texts."""
        drafted, accepted = self.counts
        scale = np.sqrt(np.maximum(drafted, 1e-9) * self.rates * (1 - self.rates))
        residuals = np.where(drafted > 0, (accepted - self.raw_rates * drafted) / scale, 0.0)
        size = np.sqrt((residuals**2).sum(0))
        matrix = residuals.T @ residuals / np.maximum(np.outer(size, size), 1e-12)
        matrix = matrix * self.num_texts / (self.num_texts + 10)
        np.fill_diagonal(matrix, 1.0)
        return matrix

    @cached_property
    def workload_spread(self) -> Floats:
        """[K]: standard deviation of log(a / (1 - a)) between domains, beyond sampling noise."""
        names = sorted(set(self.domains))
        if len(names) < 2:
            return np.full(self.depths, UNKNOWN_WORKLOAD_SPREAD)
        parts = [self.select([index for index, name in enumerate(self.domains) if name == group]) for group in names]
        odds = np.log([part.rates / (1 - part.rates) for part in parts])
        noise = np.mean([1 / ((part.effective_rounds + 1) * part.rates * (1 - part.rates)) for part in parts], axis=0)
        spread: Floats = np.maximum(MIN_WORKLOAD_SPREAD, np.sqrt(np.maximum(0.0, odds.var(0, ddof=1) - noise)))
        return spread

    @cached_property
    def accepted_per_round(self) -> tuple[float, float]:
        """Accepted drafts per round (AL - 1), and the variance of that mean over the reference's texts."""
        drafted, accepted = self.counts
        rounds, sums = drafted[:, 0], accepted.sum(1)
        total, num_texts = rounds.sum(), self.num_texts
        if not total:
            return 0.0, 1.0
        mean = sums.sum() / total
        variance = ((sums - mean * rounds) ** 2).sum() * num_texts / max(1, num_texts - 1) / total**2
        return float(mean), float(variance)


def engine_depth(parts: Sequence[Counters], given: int | None, *, full_share: float = FULL_SHARE) -> int:
    """Return K, the largest number of tokens that the engine drafts in a round, by its counters or as `given`.

    Counts by position show K. Totals show only the mean number of drafts per round: a lower bound of K, because an
    engine may draft fewer tokens in some rounds; K itself if the mean is at least `full_share` of it. Raises
    ConfigError if K is neither shown nor given, or the counters contradict the given K.
    """
    counted = max((max(len(each.per_position), len(each.per_position_offered)) for each in parts), default=0)
    counted = counted or max((each.k or 0 for each in parts), default=0)
    # A text that ends within a round distorts the mean a little, hence the tolerance below.
    means = [each.draft_tokens / each.num_drafts for each in parts if each.draft_tokens and each.num_drafts]
    mean = max(means, default=0.0)
    if counted:  # positions that never accepted a draft may be left out
        counted = max(counted, math.ceil(full_share * mean - 1e-9))
    if parts and all(each.has_drafts is False for each in parts):
        raise ConfigError(f"{parts[0].engine}: {NOTHING_DRAFTED}")
    if given is None:
        if counted or (mean and mean >= full_share * math.ceil(mean)):
            return counted or math.ceil(mean)
        shown = f"drafts {mean:.2f} tokens per round on average, which does not show K" if mean else "does not report K"
        raise ConfigError(
            f"the engine {shown}: give -k as it is set there (vLLM num_speculative_tokens, SGLang "
            "--speculative-num-steps, llama.cpp --spec-draft-n-max), or --flags with the engine's command line"
        )
    if counted not in (0, given):
        raise ConfigError(f"-k {given}, but the engine's counters are for K = {counted}; leave -k out or correct it")
    if given < full_share * mean:
        raise ConfigError(f"-k {given}, but the engine drafted {mean:.2f} tokens per round on average; correct -k")
    return given


def observed_counts(counters: Counters, k: int, *, full_share: float = FULL_SHARE) -> ObservedCounts:
    """Return counts by position if possible, else the AL from total counts, else the engine's own AL.

    Rounds of fewer than `full_share` x K drafts on average are not full: counts by position do not say then how many
    drafts were offered, and the AL is used. Raises EngineError if the counters hold none of the three,
    or are impossible with K.
    """
    _check_possible(counters, k)
    shorter = counters.draft_tokens is not None and counters.draft_tokens < full_share * k * (counters.num_drafts or 0)
    if counters.per_position and (counters.per_position_offered or not shorter):
        acceptance = counters.acceptance()
        return ObservedCounts(acceptance.num_drafted, acceptance.num_accepted)
    is_adaptive = ADAPTIVE in counters.notes
    rounds = counters.num_drafts or (0 if is_adaptive else (counters.draft_tokens or 0) // k)
    if rounds and counters.accepted is not None:
        return ObservedCounts(length=length_of_drafts(counters.accepted, rounds), rounds=rounds)
    if rounds and counters.emitted is not None:
        return ObservedCounts(length=counters.emitted / rounds, rounds=rounds)
    if counters.length is not None:
        return ObservedCounts(length=counters.length)
    if is_adaptive and counters.draft_tokens:
        raise EngineError(
            f"{counters.engine}: adapts how many tokens a round drafts, and counts no rounds, so its acceptance "
            "length is not known: turn that off, or give figures that show rounds"
        )
    raise EngineError(f"{counters.engine}: {NOTHING_DRAFTED}")


def _check_possible(counters: Counters, k: int) -> None:
    """Raise EngineError for an AL that K drafts and a bonus token per round cannot give.

    Up to K + 2 where the first token of each request, which comes from no round, is among the counted ones.
    """
    counted = (
        length_of_drafts(counters.accepted, counters.num_drafts) if counters.num_drafts and counters.accepted else None
    )
    most = k + 2 if FIRST_TOKENS in counters.notes else k + 1
    for length, limit in ((counted, most), (counters.length, k + 1)):
        if length is not None and not 1 <= length <= limit * (1 + _ROUNDING_SHARE):
            raise EngineError(
                f"{counters.engine}: a mean acceptance length of {length:.2f} is impossible with K = {k}: a round "
                f"gives 1 to K + 1 = {k + 1} tokens. Correct -k, or check that the counts are of one engine and one K"
            )
