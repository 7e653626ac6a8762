"""What an engine counted of its drafts, and what a hypothesis says that it should have counted. Knows no torch.

A hypothesis is what each text of a reference offered and kept under it; its rates come with what is needed to weigh
them: how much they vary between texts, how depths go together, how far workloads spread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nextn.engines.counters import Counters
from nextn.errors import ConfigError, EngineError
from nextn.figures.estimate import student
from nextn.figures.speedup import expected_length

# Standard deviations of log(a / (1 - a)) between workloads: at least, and where the reference has no domains.
LEAST_WORKLOAD, UNKNOWN_WORKLOAD = 0.25, 0.6

# The share of K drafts a round from which on rounds count as whole.
_WHOLE = 0.95

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Observed:
    """What an engine counted. offered[k-1]: rounds that drafted depth k and had kept every shallower draft; kept[k-1]:
    those that kept it. For an engine without figures by position: () and its length (AL).

    rounds: None where it is not told. The K that it drafts is that of the hypotheses.
    """

    offered: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    length: float | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        pairs = list(zip(self.offered, self.kept, strict=False))
        if len(self.offered) != len(self.kept) or any(not 0 <= kept <= offered for offered, kept in pairs):
            raise ConfigError(f"offered {self.offered}, kept {self.kept}; expected 0 <= kept <= offered at each depth")
        if not self.offered and self.length is None:
            raise ConfigError("neither counts by depth nor an acceptance length: there is nothing to compare")

    @property
    def rates(self) -> list[float]:
        """a_k of each depth; nan where it was not offered."""
        return [kept / asked if asked else math.nan for asked, kept in zip(self.offered, self.kept, strict=True)]

    @property
    def al(self) -> float:
        """AL, tokens a round."""
        return expected_length(self.rates) if self.length is None else self.length


@dataclass(frozen=True, eq=False)
class Expected:
    """One hypothesis. offered, kept: [texts][depths], of rounds as in `Observed`, sums of chances where `chances`.

    domains: of each text, for the spread between workloads; () = all alike. chances: the kept are expectations, so
    that the engine's draws add to their spread.
    """

    name: str
    offered: Rows
    kept: Rows
    domains: Sequence[str] = ()
    chances: bool = False

    def __post_init__(self) -> None:
        shapes = {tuple(map(len, rows)) for rows in (self.offered, self.kept)}
        if len(shapes) != 1 or len(set(*shapes)) != 1 or (self.domains and len(self.domains) != len(self.kept)):
            raise ConfigError(f"{self.name}: offered, kept [texts][depths] and domains [texts] do not belong together")

    @property
    def depths(self) -> int:
        return len(self.kept[0])

    def only(self, places: Sequence[int]) -> "Expected":
        """The same of some of the texts."""
        domains = [self.domains[place] for place in places] if self.domains else ()
        return replace(self, offered=_at(self.offered, places), kept=_at(self.kept, places), domains=domains)

    @cached_property
    def counts(self) -> np.ndarray:
        """[2, texts, depths] float64: offered, kept."""
        return np.array([self.offered, self.kept], dtype=np.float64)

    @cached_property
    def raw(self) -> np.ndarray:
        """[depths]: a_k; 0 where no text offered the depth."""
        offered, kept = self.counts.sum(1)
        return np.divide(kept, offered, out=np.zeros_like(kept), where=offered > 0)

    @cached_property
    def effects(self) -> np.ndarray:
        """[depths]: design effects between texts, widened as `estimate.share` does for few texts."""
        offered, kept = self.counts
        texts, total = len(offered), offered.sum(0)
        if texts < 2:
            return np.full(self.depths, 4.0)  # unknown; rounds of one text are seldom more alike
        spread = ((kept - self.raw * offered) ** 2).sum(0) * texts / (texts - 1)
        noise = self.raw * (1 - self.raw) * total
        found = np.divide(spread, noise, out=np.ones_like(noise), where=noise > 0)
        wide = (student(texts - 1, 0.05) / student(math.inf, 0.05)) ** 2
        return np.maximum(found, 0.0 if self.chances else 1.0) * wide

    @cached_property
    def weights(self) -> np.ndarray:
        """[depths]: how many independent rounds each a_k comes from."""
        return self.counts[0].sum(0) / np.maximum(self.effects, 0.05)

    @cached_property
    def rates(self) -> np.ndarray:
        """[depths]: a_k, drawn to the middle by half a round on each side (Jeffreys), so never 0 or 1."""
        weights = np.minimum(self.weights, self.counts[0].sum(0))
        return (self.raw * weights + 0.5) / (weights + 1)

    @cached_property
    def ties(self) -> np.ndarray:
        """[depths, depths]: how residuals of one text go together, drawn to 0 where texts are few."""
        offered, kept = self.counts
        left = (kept - self.raw * offered) / np.sqrt(np.maximum(offered, 1e-9) * self.rates * (1 - self.rates))
        left = np.where(offered > 0, left, 0.0)
        size = np.sqrt((left**2).sum(0))
        found = left.T @ left / np.maximum(np.outer(size, size), 1e-12)
        found = found * len(offered) / (len(offered) + 10)
        np.fill_diagonal(found, 1.0)
        return found

    @cached_property
    def workload(self) -> np.ndarray:
        """[depths]: the standard deviation of log(a / (1 - a)) between domains, beyond what chance gives."""
        groups = sorted(set(self.domains))
        if len(groups) < 2:
            return np.full(self.depths, UNKNOWN_WORKLOAD)
        parts = [self.only([place for place, name in enumerate(self.domains) if name == group]) for group in groups]
        odds = np.log([each.rates / (1 - each.rates) for each in parts])
        noise = np.mean([1 / ((each.weights + 1) * each.rates * (1 - each.rates)) for each in parts], axis=0)
        return np.maximum(LEAST_WORKLOAD, np.sqrt(np.maximum(0.0, odds.var(0, ddof=1) - noise)))

    @cached_property
    def per_round(self) -> tuple[float, float]:
        """Drafts kept per round (AL - 1), and the variance of that mean over the reference's texts."""
        offered, kept = self.counts
        rounds, stood = offered[:, 0], kept.sum(1)
        total, texts = rounds.sum(), len(rounds)
        if not total:
            return 0.0, 1.0
        mean = stood.sum() / total
        spread = ((stood - mean * rounds) ** 2).sum() * texts / max(1, texts - 1) / total**2
        return float(mean), float(spread)


def depth_of(counters: Counters) -> int | None:
    """K: the deepest draft; None where it is not told."""
    if counters.per_position:
        return max(len(counters.per_position), len(counters.per_position_offered))
    if counters.drafts and counters.draft_tokens:
        return math.ceil(counters.draft_tokens / counters.drafts)
    return None


def observation(counters: Counters, drafts: int, *, whole: float = _WHOLE) -> Observed:
    """Counts by position, else the AL by counts, else the engine's own. Raises EngineError for none of them.

    whole: the share of K drafts a round from which on rounds count as whole. Where they are shorter, counts by position
    do not say how many were offered: then the AL.
    """
    shorter = counters.draft_tokens is not None and counters.draft_tokens < whole * drafts * (counters.drafts or 0)
    if counters.per_position and (counters.per_position_offered or not shorter):
        found = counters.acceptance()
        return Observed(found.offered, found.kept)
    rounds = counters.drafts or (counters.draft_tokens or 0) // drafts
    if rounds and counters.accepted is not None:
        return Observed(length=1 + counters.accepted / rounds, rounds=rounds)
    if counters.length is not None:
        return Observed(length=counters.length)
    raise EngineError(f"{counters.engine}: counts no round that drafted; is MTP on, and was anything asked?")


def _at(rows: Rows, places: Sequence[int]) -> Rows:
    return [rows[place] for place in places]
