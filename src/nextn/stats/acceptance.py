"""Acceptance rates and mean acceptance length (AL) from drafted and accepted tokens. Imports no torch.

This module alone defines a_k (`conditional_rates`) and AL: `mean_length` from emitted tokens, `length_of_drafts` from
counts of drafts, `expected_length` from rates. The first two differ in rounds that the end of a text cuts short: these
emit no bonus token, and counts of drafts do not show it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast

from nextn.stats.intervals import wilson_interval

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


class DecodedText(Protocol):
    """All rounds of one sequence, such as a `nextn.Result`."""

    @property
    def rounds(self) -> Sequence[DecodedSequence]: ...


class DecodedRound(Protocol):
    """One draft-and-verify round over a batch of sequences."""

    @property
    def rows(self) -> Sequence[DecodedSequence]: ...


def conditional_rates(
    num_accepted: Sequence[float], num_drafted: Sequence[float], *, undrafted: float = math.nan
) -> tuple[float, ...]:
    """Return a_1..a_K from counts or expected counts by depth; `undrafted` where a depth was never drafted."""
    return tuple(k / n if n else undrafted for k, n in zip(num_accepted, num_drafted, strict=True))


def expected_length(rates: Sequence[float]) -> float:
    """Return AL at K = len(rates) from conditional acceptances a_1..a_K; a nan (never drafted) ends the sum."""
    survival = total = 1.0
    for rate in rates:
        if math.isnan(rate):
            break
        survival *= rate
        total += survival
    return total


def rates_record(rates: Iterable[float]) -> list[float | None]:
    """Return rates for JSON reports, with null for a depth that was never drafted (nan)."""
    return [None if math.isnan(rate) else rate for rate in rates]


def mean_length(emitted: float, num_rounds: float, *, no_rounds: float = math.nan) -> float:
    """Return AL from the tokens that rounds emitted, bonus tokens included; `no_rounds` without rounds."""
    return emitted / num_rounds if num_rounds else no_rounds


def length_of_drafts(num_accepted: float, num_rounds: float, *, no_rounds: float = math.nan) -> float:
    """Return AL as engines report it: 1 + accepted drafts per round; `no_rounds` without rounds."""
    return mean_length(num_rounds + num_accepted, num_rounds, no_rounds=no_rounds)


def _parts(decoded: "DecodedRound | DecodedText | DecodedSequence") -> "Iterable[DecodedSequence]":
    """Return the single-sequence rounds of a batch's round, a result, or a single-sequence round itself."""
    return getattr(decoded, "rows", getattr(decoded, "rounds", (cast(DecodedSequence, decoded),)))


@dataclass(frozen=True)
class Acceptance:
    """Counts over the rounds that drafted at least one token.

    Attributes:
        num_drafted: [K], rounds that drafted depth k and accepted every shallower draft.
        num_accepted: [K], those of them that also accepted depth k.
        num_rounds: Rounds that drafted.
        emitted: Tokens that these rounds emitted, bonus tokens included.

    Example:
        >>> counts = nextn.Acceptance(num_drafted=(10, 8), num_accepted=(8, 4), num_rounds=10, emitted=22)
        >>> counts.rates, counts.length
        ((0.8, 0.5), 2.2)
    """

    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]
    num_rounds: int
    emitted: int

    @classmethod
    def of(cls, decoded: Iterable[DecodedRound | DecodedText | DecodedSequence], *, copied: bool = False) -> Self:
        """Count over rounds that drafted at least one token.

        Args:
            decoded: `nextn.Result`s, `Round`s of `nextn.rounds`, or `SequenceRound`s; the rounds of all are pooled.
            copied: Count the rounds whose drafts were copied from the text, instead of those in which the head drafted.

        Returns:
            The counts. The prefill's first token and rounds without drafts do not count.

        Example:
            >>> results = nextn.generate(nextn.load("tiny"), ["def add("], nextn.Settings(max_tokens=16))
            >>> nextn.Acceptance.of(results) == results[0].acceptance
            True
        """
        drafted = (part for each in decoded for part in _parts(each) if part.drafts)
        parts = [part for part in drafted if getattr(part, "copied", False) == copied]
        depths = range(max((len(part.drafts) for part in parts), default=0))
        num_drafted = [sum(len(part.drafts) > k and part.num_accepted >= k for part in parts) for k in depths]
        num_accepted = [sum(part.num_accepted > k for part in parts) for k in depths]
        return cls(tuple(num_drafted), tuple(num_accepted), len(parts), sum(len(part.emitted) for part in parts))

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K; nan where a depth was never drafted."""
        return conditional_rates(self.num_accepted, self.num_drafted)

    @property
    def length(self) -> float:
        """Mean acceptance length (AL); nan without rounds."""
        return mean_length(self.emitted, self.num_rounds)

    def intervals(self, z: float = 1.96) -> tuple[tuple[float, float], ...]:
        """Wilson score intervals of a_1..a_K (95 % by default)."""
        return tuple(wilson_interval(k, n, z) for k, n in zip(self.num_accepted, self.num_drafted, strict=True))

    def as_record(self) -> dict[str, object]:
        """Return the counts and figures for JSON reports."""
        return {
            "definition": DEFINITION,
            "acceptance": rates_record(self.rates),
            "interval_95": [list(interval) for interval in self.intervals()],
            "num_draft_tokens_per_pos": list(self.num_drafted),
            "num_accepted_tokens_per_pos": list(self.num_accepted),
            "mean_acceptance_length": None if math.isnan(self.length) else self.length,
            "num_drafts": self.num_rounds,
        }
