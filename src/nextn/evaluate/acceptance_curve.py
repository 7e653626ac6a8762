"""Acceptance from the counts of texts: figures at one K, and whether mean acceptance length still grows with K.

Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nextn.stats.acceptance import conditional_rates, expected_length
from nextn.stats.intervals import FEW_TEXTS, Estimate, jackknife, proportion, student_t

# A draft that adds less than this part of AL pays nowhere: a draft step costs more, and so does one more token to
# verify (`nextn bench` and `nextn advise` measure both).
MIN_INCREASE = 0.01

TextCounts = tuple[Sequence[float], Sequence[float]]  # (num_drafted, num_accepted) by depth, of one text


def length_of(counts: Sequence[float]) -> float:
    """Return AL from the sums of num_drafted and num_accepted by depth, one after the other."""
    k = len(counts) // 2
    return expected_length(conditional_rates(counts[k:], counts[:k]))


def _least_width(counts: Sequence[float], num_texts: int) -> float:
    """The half-width of the interval of AL if rounds were independent, by the delta method. counts: see `length_of`."""
    k = len(counts) // 2
    rates = conditional_rates(counts[k:], counts[:k])
    variance = 0.0
    for depth, (rate, drafted) in enumerate(zip(rates, counts[:k], strict=True)):
        if drafted and 0 < rate < 1:
            slope = (expected_length(rates) - expected_length(rates[:depth])) / rate
            variance += slope**2 * rate * (1 - rate) / drafted
    return student_t(num_texts - 1, 0.05) * math.sqrt(variance)


@dataclass(frozen=True)
class AcceptanceFigures:
    """Acceptance of rounds of K drafts over a domain's texts.

    Attributes:
        temperature: Of the texts.
        rule: By which a draft is accepted: `argmax`, `ratio` or `block`.
        num_speculative_tokens: K.
        domain: The prompts' domain; `all` for all of them.
        num_texts: Texts that the figures are of.
        rates: a_1 to a_K, each with its 95 % interval by text: the share of a depth's drafts that were accepted where
            all before them were.
        length: AL, tokens per round with the bonus token, with its interval within 1 to K + 1.
        num_drafted: [K], sums over the texts; of probabilities above temperature 0.
        num_accepted: [K], likewise.

    Example:
        >>> half, length = nextn.Estimate(0.5, 0.4, 0.6), nextn.Estimate(1.5, 1.4, 1.6)
        >>> figures = nextn.AcceptanceFigures(0.0, "argmax", 1, "all", 8, (half,), length, (100.0,), (50.0,))
        >>> figures.rates[0].value, figures.length.value
        (0.5, 1.5)
    """

    temperature: float
    rule: str
    num_speculative_tokens: int
    domain: str
    num_texts: int
    rates: tuple[Estimate, ...]
    length: Estimate
    num_drafted: tuple[float, ...]
    num_accepted: tuple[float, ...]

    @classmethod
    def of(
        cls, counts: Sequence[TextCounts], *, temperature: float, rule: str, k: int, domain: str
    ) -> "AcceptanceFigures":
        """Compute the figures from the counts of each text."""
        drafted, accepted = ([[each[side][depth] for each in counts] for depth in range(k)] for side in (0, 1))
        length = jackknife(length_of, [(*each[0], *each[1]) for each in counts])
        if not math.isnan(length.low):
            # Few texts may agree by chance, or the interval leave what AL can be.
            sums = [*map(sum, drafted), *map(sum, accepted)]
            least = _least_width(sums, len(counts)) if len(counts) < FEW_TEXTS else 0.0
            width = max(length.high - length.value, least)
            length = Estimate(length.value, max(1.0, length.value - width), min(k + 1.0, length.value + width))
        return cls(
            temperature,
            rule,
            k,
            domain,
            len(counts),
            tuple(proportion(*depth) for depth in zip(accepted, drafted, strict=True)),
            length if any(drafted[0]) else Estimate(math.nan, math.nan, math.nan),  # no round, which 1.0 would be of
            tuple(map(sum, drafted)),
            tuple(map(sum, accepted)),
        )

    def as_record(self) -> dict[str, object]:
        """Return the figures for JSON reports; `reference_report.DEFINITIONS` says what each number is."""
        rates = [rate.as_record() for rate in self.rates]
        return {
            "temperature": self.temperature,
            "rule": self.rule,
            "num_speculative_tokens": self.num_speculative_tokens,
            "domain": self.domain,
            "num_texts": self.num_texts,
            "acceptance": [rate["value"] for rate in rates],
            "interval_95": [[rate["low"], rate["high"]] for rate in rates],
            "mean_acceptance_length": self.length.as_record(),
            "num_draft_tokens_per_pos": list(self.num_drafted),
            "num_accepted_tokens_per_pos": list(self.num_accepted),
        }


@dataclass(frozen=True)
class AcceptanceCurve:
    """Counts of the same texts in rounds of K = 1, 2, ... drafts; three values of K or more say something."""

    counts: tuple[Sequence[TextCounts], ...]  # by K - 1, then by text
    num_mtp_layers: int = 1

    @property
    def largest(self) -> int:
        """The largest K."""
        return len(self.counts)

    @cached_property
    def increases(self) -> tuple[Estimate, ...]:
        """How much each draft beyond n adds to AL, as a share of AL@n, for n = 0, 1, ... below the largest K."""
        return tuple(self._increase(n) for n in range(self.largest))

    @cached_property
    def saturated_at(self) -> int | None:
        """The smallest n whose further drafts add less than `MIN_INCREASE` each, by the interval, or None.

        AL is concave in K, so increases fall with n: tests from the largest n down need no correction for their number.
        """
        saturated = None
        for n in reversed(range(self.largest)):
            if not self.increases[n].high < MIN_INCREASE:
                break
            saturated = n
        return saturated

    @property
    def outcome(self) -> str:
        """`saturates`, `increases` (the last draft adds `MIN_INCREASE` or more) or `inconclusive`, by the intervals."""
        if self.saturated_at is not None:
            return "saturates"
        return "increases" if self.increases[-1].low >= MIN_INCREASE else "inconclusive"

    @cached_property
    def decline(self) -> Estimate:
        """Acceptance at the depths beyond `saturated_at` less a_1, at the largest K; nan if it is None."""
        first = self.saturated_at

        def difference(sums: Sequence[float]) -> float:
            drafted, accepted = sums[: self.largest], sums[self.largest :]
            deep = sum(drafted[first:])
            return sum(accepted[first:]) / deep - accepted[0] / drafted[0] if deep else math.nan

        if not first:
            return Estimate(math.nan, math.nan, math.nan)
        return jackknife(difference, [(*drafted, *accepted) for drafted, accepted in self.counts[-1]])

    @property
    def summary(self) -> str:
        """The finding, its likely reason and what would change it."""
        n, last = self.saturated_at, self.increases[-1]
        if n is None:
            added = f"draft {self.largest} adds {_percent(last)} to AL"
            if self.outcome == "increases":
                return f"AL does not saturate up to K = {self.largest}: {added}"
            return f"inconclusive whether AL saturates before K = {self.largest}: {added}; more texts would decide"
        if n == 0:
            return f"drafts do not pay at any K up to {self.largest}: each adds {_percent(self.increases[0])} to AL"
        return f"AL saturates at K = {n}: each draft beyond it adds {_percent(self.increases[n])}; {self._reason(n)}"

    def _reason(self, n: int) -> str:
        drafted, accepted = ([sum(n) for n in zip(*side, strict=True)] for side in zip(*self.counts[-1], strict=True))
        first, deep = accepted[0] / drafted[0], sum(accepted[n:]) / max(sum(drafted[n:]), 1e-9)
        rates = f"a_1 = {first:.2f}, {deep:.2f} beyond depth {n}"
        if self.decline.high < 0:
            trained = (
                f"its {self.num_mtp_layers} MTP layers are for depths 1 to {n}, and deeper drafts reuse the last one"
                if n == self.num_mtp_layers > 1
                else "typical of a head that was not trained on its own drafts that far"
            )
            return f"acceptance falls with depth ({rates}): {trained}; training with depths = {self.largest} may help"
        return (
            f"acceptance does not fall with depth ({rates}): a round ends at its first rejected draft, so only a "
            "higher acceptance rate at every depth would raise AL"
        )

    def as_record(self) -> dict[str, object]:
        """Return the finding for JSON reports."""
        return {
            "outcome": self.outcome,
            "saturated_at": self.saturated_at,
            "increases": [each.as_record() for each in self.increases],
            "decline": self.decline.as_record(),
            "summary": self.summary,
        }

    def _increase(self, n: int) -> Estimate:
        """How much each draft beyond n adds, up to the largest K, as a part of AL@n, paired on texts."""
        ends, fewer = self.counts[-1], self.counts[n - 1] if n else [((), ())] * len(self.counts[-1])

        def increase(sums: Sequence[float]) -> float:
            before, after = length_of(sums[: 2 * n]), length_of(sums[2 * n :])
            return (after / before - 1) / (self.largest - n)

        rows = [(*a[0], *a[1], *b[0], *b[1]) for a, b in zip(fewer, ends, strict=True)]
        found = jackknife(increase, rows)
        deeper = [accepted[n] for _, accepted in ends]
        if any(deeper) or math.isnan(found.high):
            return found
        # Texts that all accept nothing beyond depth n do not vary, which says nothing of the texts that were not seen.
        return replace(found, high=max(found.high, proportion(deeper, [drafted[0] for drafted, _ in ends]).high))


def _percent(increase: Estimate) -> str:
    if math.isnan(increase.low):
        return f"{increase.value:.1%}"
    return f"{increase.value:.1%} ({increase.low:.1%} to {increase.high:.1%})"
