"""Acceptance figures from what was drafted and kept. Imports no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nextn.decode import Round

DEFINITION = (
    "a_k = share of depth-k drafts kept among those whose shallower drafts were all kept (conditional); "
    "AL = tokens emitted per round, the trunk's own token included"
)


@dataclass(frozen=True)
class Acceptance:
    """offered[k-1]: rounds that drafted depth k and kept every shallower draft; kept[k-1]: those that kept it, too.

    emitted: tokens that the num_rounds drafting rounds put out.
    """

    offered: tuple[int, ...]
    kept: tuple[int, ...]
    num_rounds: int
    emitted: int

    @classmethod
    def of(cls, rounds: "Iterable[Round]") -> "Acceptance":
        """Count over decode rounds; the prefill's first token and rounds without drafts do not count."""
        parts = [part for each in rounds for part in each.rows if part.drafts]
        depths = max((len(part.drafts) for part in parts), default=0)
        offered = [sum(len(part.drafts) > k and part.kept >= k for part in parts) for k in range(depths)]
        kept = [sum(part.kept > k for part in parts) for k in range(depths)]
        return cls(tuple(offered), tuple(kept), len(parts), sum(len(part.emitted) for part in parts))

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K; nan where a depth was never offered."""
        return tuple(k / n if n else math.nan for k, n in zip(self.kept, self.offered, strict=True))

    @property
    def length(self) -> float:
        """AL; nan without rounds."""
        return self.emitted / self.num_rounds if self.num_rounds else math.nan

    def intervals(self, z: float = 1.96) -> tuple[tuple[float, float], ...]:
        """Wilson score intervals of a_1..a_K (95 % by default)."""
        return tuple(wilson(k, n, z) for k, n in zip(self.kept, self.offered, strict=True))

    def as_record(self) -> dict[str, object]:
        """What goes into JSON reports."""
        return {
            "definition": DEFINITION,
            "acceptance": [None if math.isnan(rate) else rate for rate in self.rates],
            "interval_95": [list(each) for each in self.intervals()],
            "offered": list(self.offered),
            "kept": list(self.kept),
            "acceptance_length": None if math.isnan(self.length) else self.length,
            "rounds": self.num_rounds,
        }


def wilson(kept: float, offered: float, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of kept / offered; neither need be whole."""
    if not offered:
        return (0.0, 1.0)
    rate, square = kept / offered, z * z / offered
    middle = (rate + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(rate * (1 - rate) / offered + square / (4 * offered))
    return (max(0.0, middle - half), min(1.0, middle + half))
