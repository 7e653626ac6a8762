"""Whether counts and reference are enough to exclude a fault, and how much more would be. Imports no torch.

`no-fault` is concluded only if the evidence would reveal an engine that loses half of the accepted drafts: the counts
expected of such an engine must be `MIN_SEPARATING_RATIO` times likelier under that loss than without a fault.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts
from nextn.evaluate.likelihoods import (
    MIN_SEPARATING_RATIO,
    NO_FAULT,
    Evidence,
    expected_ratio,
    name_causes,
    rank_causes,
)

_MIN_SHARE = 0.5  # of the accepted drafts; an engine that accepts less has a fault
_MAX_FACTOR = 256  # of the evidence at hand; nobody collects more


@dataclass(frozen=True)
class NeededEvidence:
    """What would decide between no fault and half of the drafts lost, with the evidence at hand. All estimates."""

    reference_tokens: int  # new tokens of the reference's texts
    reference_texts: int
    reference_tokens_now: int
    engine_rounds: int | None  # None if the engine's counts are enough as they are
    engine_rounds_now: int | None


def can_decide(evidence: Sequence[Evidence]) -> bool:
    """Return whether this much evidence decides between no fault and half of the drafts lost.

    If the engine accepted less than half of what is expected, its own counts must exclude `no-fault`, too.
    """
    total = 0.0
    for item in evidence:
        faultless = without_fault(item.expected)
        total += math.log(max(expected_ratio(item, _halved(faultless), faultless), 1e-300))
        causes = rank_causes(item._replace(expected=[faultless]))
        has_lost_half = item.counts.acceptance_length - 1 < _MIN_SHARE * faultless.accepted_per_round[0]
        if has_lost_half and name_causes(causes) == (NO_FAULT,):
            return False
    return total >= math.log(MIN_SEPARATING_RATIO)


def needed_evidence(evidence: Sequence[Evidence], *, driven: bool) -> NeededEvidence | None:
    """Return the least multiple of the evidence that decides; None if no amount of it does.

    driven: the engine answers the reference's own prompts, so more prompts add to both sides. Otherwise only the
    reference grows, since a log cannot be extended; the engine's counts grow as well if that is not enough.
    """
    texts = [without_fault(item.expected) for item in evidence]
    tokens = sum(round(each.counts[0][:, 0].sum() * (1 + each.accepted_per_round[0])) for each in texts)
    if not can_decide([_scaled(item, _MAX_FACTOR, _MAX_FACTOR) for item in evidence]):
        return None
    for factor, engine_factor in _factors(driven=driven):
        if can_decide([_scaled(item, factor, engine_factor) for item in evidence]):
            rounds = _num_rounds(evidence)
            needed = None if engine_factor == 1 or rounds is None else rounds * engine_factor
            num_texts = max(len(each.num_drafted) for each in texts)
            return NeededEvidence(tokens * factor, num_texts * factor, tokens, needed, rounds)
    return None


def without_fault(expected: Sequence[ExpectedCounts]) -> ExpectedCounts:
    return next(each for each in expected if each.name == NO_FAULT)


def _factors(*, driven: bool) -> Iterator[tuple[int, int]]:
    """Yield pairs of factors (of the reference, of the engine's counts), the smallest first."""
    powers = [2**power for power in range(1, _MAX_FACTOR.bit_length())]
    if not driven:
        yield from ((factor, 1) for factor in powers)
    yield from ((factor, factor) for factor in powers)


def _halved(faultless: ExpectedCounts) -> ExpectedCounts:
    """Return the counts with half of the accepted drafts: a_1 is halved, the deeper a_k stay."""
    drafted = [[row[0], *(_MIN_SHARE * count for count in row[1:])] for row in faultless.num_drafted]
    accepted = [[_MIN_SHARE * count for count in row] for row in faultless.num_accepted]
    return replace(faultless, name="half", num_drafted=drafted, num_accepted=accepted)


def _scaled(item: Evidence, factor: int, engine_factor: int) -> Evidence:
    """Return the evidence with `factor` times the texts and `engine_factor` times the engine's rounds."""
    faultless, observed = without_fault(item.expected), item.counts
    more_texts = replace(
        faultless,
        num_drafted=[*faultless.num_drafted] * factor,
        num_accepted=[*faultless.num_accepted] * factor,
        domains=[*faultless.domains] * factor,
    )
    counts = ObservedCounts(
        tuple(count * engine_factor for count in observed.num_drafted),
        tuple(count * engine_factor for count in observed.num_accepted),
        observed.length,
        None if observed.rounds is None else observed.rounds * engine_factor,
    )
    return item._replace(counts=counts, expected=[more_texts])


def _num_rounds(evidence: Sequence[Evidence]) -> int | None:
    """Return the rounds that the engine counted; None if it does not report them."""
    rounds = [item.counts.num_drafted[0] if item.counts.num_drafted else item.counts.rounds for item in evidence]
    return None if None in rounds else sum(count or 0 for count in rounds)
