"""Which hypothesis explains an engine's draft counts: the likelihood of the counts under each. Imports no torch.

The distribution of the engine's counts at depth k is beta-binomial around the hypothesis' a_k. Its variance has four
parts:

- the engine's rounds: binomial, times the design effect between texts, as rounds of one text are correlated (Kish
  1965);
- the hypothesis' own rate, which is estimated from finitely many texts;
- arithmetic: no two engines round alike (`NUMERICS`);
- the workload, where the engine's prompts are not those of the reference: how far its domains spread.

Depths are tied by a Gaussian copula: a hard text is hard at every depth, and an easy workload raises all of them.
Otherwise four correlated depths would count as four independent observations.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nextn.errors import ConfigError
from nextn.evaluate.hypotheses import ExpectedCounts, ObservedCounts

NO_FAULT = "no-fault"
# Ratios of likelihoods.
MIN_NAMED_RATIO = 100.0  # from which on a fault is named rather than "no-fault"
MIN_DISTINCT_RATIO = 10.0  # from which on the likeliest fault excludes another
MIN_SEPARATING_RATIO = 100.0  # to be expected between hypotheses that can be distinguished
MIN_FIT = 0.001  # counts with a smaller p-value are not those of an engine without fault
MIN_FAULT_FIT = 0.01  # a fault with a smaller p-value does not explain the counts
NUMERICS = 0.05  # standard deviation of log(a / (1 - a)) between correct kernels
_DEPTH_CORRELATION = 0.8  # of the workload's effect between depths
_MAX_RESIDUAL = 8.0  # residuals are clipped at this many standard deviations, in the copula only
_MAX_WEIGHT = 1e8  # a beta distribution of this weight is a point


@dataclass(frozen=True)
class Cause:
    """One hypothesis, with how well it explains the counts."""

    name: str
    log_likelihood: float  # of the engine's counts
    p_value: float  # probability of counts as far off as these if it holds; the likeliest cause may still not fit
    rates: tuple[float, ...]  # the a_k that it expects
    length: float  # the AL that it expects
    ratio: float = 1.0  # its likelihood relative to that of the likeliest cause

    def as_record(self) -> dict[str, object]:
        """Return the fields for JSON reports."""
        likelihoods = {"log_likelihood": self.log_likelihood, "ratio": self.ratio, "p_value": self.p_value}
        acceptance = {"acceptance": list(self.rates), "mean_acceptance_length": self.length}
        return {"name": self.name} | likelihoods | acceptance

    def ratio_to(self, other: "Cause") -> float:
        """Return how many times likelier the counts are under this cause; at most 1e300."""
        return math.exp(min(690.0, self.log_likelihood - other.log_likelihood))

    def is_separated(self, other: "Cause") -> bool:
        """Whether the counts make one of the two clearly likelier."""
        return abs(self.log_likelihood - other.log_likelihood) >= math.log(MIN_SEPARATING_RATIO)

    def ratio_text(self, other: "Cause") -> str:
        """Return `ratio_to` as text, such as "12 times"."""
        ratio = self.ratio_to(other)
        text = f"{ratio:,.0f}" if ratio < 1e6 else f"10^{min(30.0, math.log10(ratio)):.0f}"
        return f"{text} times" if ratio < 1e30 else f"more than {text} times"


class Evidence(NamedTuple):
    """The counts of one observation, and what each hypothesis expects of it."""

    counts: ObservedCounts
    expected: Sequence[ExpectedCounts] = ()
    # Of the reference's text, from the first token that differs from the engine's; at 1 the counts of both vary between
    # texts independently.
    diverged_share: float = 1.0
    other_workload: bool = False  # the engine's prompts are not those of the reference


def rank_causes(evidence: Evidence) -> list[Cause]:
    """Return all hypotheses, the likeliest first. Raises ConfigError if the engine drafts deeper than they do."""
    return _sorted([_evaluate(evidence, each) for each in evidence.expected])


def combine_causes(parts: Sequence[Sequence[Cause]], *, priors: Mapping[str, float] = {}) -> list[Cause]:
    """Combine several observations of one engine, such as two temperatures: likelihoods multiply, the worst fit counts.

    Causes that are not in every part are left out. The likelihood of those in `priors` is multiplied by these odds.
    """
    by_name: dict[str, list[Cause]] = {}
    for cause in (cause for part in parts for cause in part):
        by_name.setdefault(cause.name, []).append(cause)
    return _sorted(
        [
            replace(
                causes[0],
                log_likelihood=sum(cause.log_likelihood for cause in causes)
                + math.log(priors.get(causes[0].name, 1.0)),
                p_value=min(1.0, len(causes) * min(cause.p_value for cause in causes)),
            )
            for causes in by_name.values()
            if len(causes) == len(parts)
        ]
    )


def expected_ratio(evidence: Evidence, true: ExpectedCounts, other: ExpectedCounts) -> float:
    """Return the ratio of likelihoods, true to other, for an engine with as many rounds where `true` holds exactly."""
    typical = evidence._replace(counts=_typical_counts(evidence.counts, true))
    return _evaluate(typical, true).ratio_to(_evaluate(typical, other))


def indistinguishable_from(name: str, *evidence: Evidence) -> tuple[str, ...]:
    """Return the hypotheses of all evidence that this many rounds cannot distinguish from the named one."""
    names = [each.name for each in evidence[0].expected]
    index, totals = names.index(name), [0.0] * len(names)
    for item in evidence:
        for other, hypothesis in enumerate(item.expected):
            totals[other] += math.log(expected_ratio(item, item.expected[index], hypothesis))
    limit = math.log(MIN_SEPARATING_RATIO)
    return tuple(each for each, total in zip(names, totals, strict=True) if each != name and total < limit)


def name_causes(causes: Sequence[Cause], *, only_length: bool = False) -> tuple[str, ...]:
    """Return the causes that the counts support, likeliest first.

    ("no-fault",) unless a fault is `MIN_NAMED_RATIO` times likelier; else the faults that fit (p-value of at least
    `MIN_FAULT_FIT`), are likelier than no fault, and which the likeliest cause exceeds by less than
    `MIN_DISTINCT_RATIO`, if there are any. only_length: The counts are an AL, which distinguishes no causes that fit:
    the likelihood then says mostly how narrow a cause's own interval is.
    """
    best = causes[0]
    faultless = next((cause for cause in causes if cause.name == NO_FAULT), None)
    if faultless is not None and best.ratio_to(faultless) < MIN_NAMED_RATIO and faultless.p_value >= MIN_FIT:
        return (NO_FAULT,)
    most = math.inf if only_length else MIN_DISTINCT_RATIO
    likelier = causes if faultless is None else causes[: causes.index(faultless)]
    return tuple(each.name for each in likelier if each.p_value >= MIN_FAULT_FIT and best.ratio_to(each) < most)


def _sorted(causes: Sequence[Cause]) -> list[Cause]:
    ordered = sorted(causes, key=lambda cause: -cause.log_likelihood)
    return [replace(cause, ratio=cause.ratio_to(ordered[0])) for cause in ordered]


def _typical_counts(observed: ObservedCounts, true: ExpectedCounts) -> ObservedCounts:
    """What an engine with as many rounds would count if a hypothesis held exactly."""
    if not observed.num_drafted:
        return replace(observed, length=1 + true.accepted_per_round[0])
    drafted, reaching = [], float(observed.num_drafted[0])
    for rate in true.rates[: len(observed.num_drafted)]:
        drafted.append(reaching)
        reaching *= float(rate)
    accepted = [round(count * float(rate)) for count, rate in zip(drafted, true.rates, strict=False)]
    return replace(
        observed, num_drafted=tuple(map(round, drafted)), num_accepted=tuple(map(min, accepted, map(round, drafted)))
    )


def _evaluate(evidence: Evidence, expected: ExpectedCounts) -> Cause:
    observed = evidence.counts
    if len(observed.num_drafted) > expected.depths:
        depths = f"{expected.depths} depths are expected, the engine drafts {len(observed.num_drafted)}"
        raise ConfigError(f"{expected.name}: {depths}; take a reference with as many drafts as the engine")
    fit = _fit_by_depth if observed.num_drafted else _fit_by_length
    log_likelihood, p_value = fit(evidence, expected)
    rates = tuple(map(float, expected.raw_rates))
    return Cause(expected.name, log_likelihood, p_value, rates, 1 + expected.accepted_per_round[0])


def _fit_by_depth(evidence: Evidence, expected: ExpectedCounts) -> tuple[float, float]:
    """(log-likelihood, p-value) of counts by depth."""
    observed, diverged_share = evidence.counts, evidence.diverged_share
    used = [k for k, count in enumerate(observed.num_drafted) if count]
    if not used:
        return 0.0, 1.0
    sides = observed.num_drafted, observed.num_accepted
    drafted, accepted = (np.array([side[k] for k in used], float) for side in sides)
    rates, correlations = expected.rates[used], expected.correlations[np.ix_(used, used)]
    noise = rates * (1 - rates)
    effects = expected.design_effects[used] + (1.0 if expected.is_expectation else 0.0)
    eye = np.eye(len(used))
    drift = expected.workload_spread[used] if evidence.other_workload else np.zeros(len(used))
    # (variance relative to a(1-a), correlation between depths) of each part.
    parts: list[tuple[np.ndarray, np.ndarray]] = [
        (diverged_share * np.maximum(1.0, effects) / drafted, correlations),
        (diverged_share / (expected.effective_rounds[used] + 2), correlations),
        (NUMERICS**2 * noise, eye),
        (drift**2 * noise, _DEPTH_CORRELATION + (1 - _DEPTH_CORRELATION) * eye),
    ]
    share = sum(part for part, _ in parts)
    share = np.minimum(np.maximum(share, 1 / drafted), 0.999)
    terms = [_beta_binomial(*each) for each in zip(accepted, drafted, rates, share, strict=True)]
    covariance = sum(np.sqrt(np.outer(part, part)) * correlation for part, correlation in parts)
    scale = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(scale, scale) * 0.98 + 0.02 * eye
    # The arcsine transform makes the variance independent of the rate.
    residuals = (2 * np.arcsin(np.sqrt(accepted / drafted)) - 2 * np.arcsin(np.sqrt(rates))) / np.sqrt(share)
    clipped = np.clip(residuals, -_MAX_RESIDUAL, _MAX_RESIDUAL)
    copula = -0.5 * (np.linalg.slogdet(correlation)[1] + clipped @ (np.linalg.solve(correlation, clipped) - clipped))
    square = float(residuals @ np.linalg.solve(correlation, residuals))
    return float(sum(terms) + copula), chi_square_above(square, len(used))


def _beta_binomial(accepted: float, drafted: float, rate: float, share: float) -> float:
    """log P(accepted | drafted), where accepted / drafted has variance `share` x rate (1 - rate)."""
    overdispersion = (drafted * share - 1) / (drafted - 1) if drafted > 1 else 0.0
    weight = min(_MAX_WEIGHT, (1 - overdispersion) / max(overdispersion, 1 / _MAX_WEIGHT))
    a, b = rate * weight, (1 - rate) * weight
    choose = math.lgamma(drafted + 1) - math.lgamma(accepted + 1) - math.lgamma(drafted - accepted + 1)
    return choose + _log_beta(accepted + a, drafted - accepted + b) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _fit_by_length(evidence: Evidence, expected: ExpectedCounts) -> tuple[float, float]:
    """(log-likelihood, p-value) of an AL: Student's t around the hypothesis', at texts - 1 degrees of freedom."""
    observed = evidence.counts
    assert observed.length is not None
    mean, spread = expected.accepted_per_round
    survival, rounds = np.cumprod(expected.rates), float(expected.counts[0][:, 0].sum())
    within = float((survival * (2 * np.arange(expected.depths) + 1)).sum() - survival.sum() ** 2)
    engine_rounds = observed.rounds or rounds or 1.0
    sampling = within / engine_rounds
    # Rounds are of one text at least: fewer than a text of the reference has vary as one text does, and by sampling.
    texts = engine_rounds * expected.num_texts / max(rounds, 1.0)
    own = sampling if expected.is_expectation or texts < 1 else 0.0
    between = max(spread * expected.num_texts / max(texts, 1.0) + own, sampling)
    # The derivative of the AL by log(a / (1 - a)) at depth k: everything deeper changes with it.
    gradient = survival[::-1].cumsum()[::-1] * (1 - expected.rates)
    drift = expected.workload_spread if evidence.other_workload else np.zeros(expected.depths)
    systematic = float((gradient**2).sum() * NUMERICS**2 + (gradient * drift).sum() ** 2)
    variance = max(evidence.diverged_share * (between + spread), sampling) + systematic
    degrees = max(1, expected.num_texts - 1)
    t = (observed.length - 1 - mean) / math.sqrt(variance)
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi * variance)
    return constant - (degrees + 1) / 2 * math.log1p(t * t / degrees), chi_square_above(t * t, 1)


def chi_square_above(value: float, degrees: int) -> float:
    """Return P(chi-square > value) (Abramowitz and Stegun 26.4.4, 26.4.5)."""
    half = value / 2
    if degrees % 2:
        total, term = math.erfc(math.sqrt(half)), math.exp(-half) * math.sqrt(half / math.pi) * 2
        for k in range(3, degrees + 1, 2):
            total, term = total + term, term * value / k
        return total
    total = term = math.exp(-half)
    for k in range(1, degrees // 2):
        term *= half / k
        total += term
    return total


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
            counts = [item.counts for item in evidence]
            known = [each.num_drafted[0] if each.num_drafted else each.rounds for each in counts]
            rounds = None if None in known else sum(count or 0 for count in known)
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
