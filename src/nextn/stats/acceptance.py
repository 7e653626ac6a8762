"""Acceptance figures from drafted and accepted tokens. Imports no torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

DEFINITION = (
    "a_k = share of depth-k drafts accepted among those whose shallower drafts were all accepted (conditional); "
    "AL = tokens emitted per round, the bonus token included"
)


class DecodedSequence(Protocol):
    """One sequence's part of a decoded round."""

    @property
    def drafts(self) -> Sequence[int]: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def emitted(self) -> Sequence[int]: ...


class DecodedRound(Protocol):
    """One draft-and-verify round over a batch of sequences, with its wall times in seconds."""

    @property
    def rows(self) -> Sequence[DecodedSequence]: ...
    @property
    def draft_s(self) -> float: ...
    @property
    def verify_s(self) -> float: ...


@dataclass(frozen=True)
class Acceptance:
    """Counts over the rounds that drafted at least one token."""

    num_drafted: tuple[int, ...]  # [K], rounds that drafted depth k and accepted every shallower draft
    num_accepted: tuple[int, ...]  # [K], those of them that accepted depth k too
    num_rounds: int
    emitted: int  # tokens that these rounds emitted, bonus tokens included

    @classmethod
    def of(cls, rounds: Iterable[DecodedRound]) -> "Acceptance":
        """Count over decoded rounds; the prefill's first token and rounds without drafts do not count."""
        parts = [part for each in rounds for part in each.rows if part.drafts]
        depths = range(max((len(part.drafts) for part in parts), default=0))
        num_drafted = [sum(len(part.drafts) > k and part.num_accepted >= k for part in parts) for k in depths]
        num_accepted = [sum(part.num_accepted > k for part in parts) for k in depths]
        return cls(tuple(num_drafted), tuple(num_accepted), len(parts), sum(len(part.emitted) for part in parts))

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K; nan where a depth was never drafted."""
        return tuple(k / n if n else math.nan for k, n in zip(self.num_accepted, self.num_drafted, strict=True))

    @property
    def length(self) -> float:
        """Mean acceptance length (AL); nan without rounds."""
        return self.emitted / self.num_rounds if self.num_rounds else math.nan

    def intervals(self, z: float = 1.96) -> tuple[tuple[float, float], ...]:
        """Wilson score intervals of a_1..a_K (95 % by default)."""
        return tuple(wilson_interval(k, n, z) for k, n in zip(self.num_accepted, self.num_drafted, strict=True))

    def as_record(self) -> dict[str, object]:
        """Return the counts and figures for JSON reports."""
        return {
            "definition": DEFINITION,
            "acceptance": [None if math.isnan(rate) else rate for rate in self.rates],
            "interval_95": [list(interval) for interval in self.intervals()],
            "num_draft_tokens_per_pos": list(self.num_drafted),
            "num_accepted_tokens_per_pos": list(self.num_accepted),
            "mean_acceptance_length": None if math.isnan(self.length) else self.length,
            "num_drafts": self.num_rounds,
        }


def wilson_interval(num_accepted: float, num_drafted: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of num_accepted / num_drafted; the counts need not be integers."""
    if not num_drafted:
        return (0.0, 1.0)
    rate, square = num_accepted / num_drafted, z * z / num_drafted
    center = (rate + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(rate * (1 - rate) / num_drafted + square / (4 * num_drafted))
    return (max(0.0, center - half), min(1.0, center + half))
