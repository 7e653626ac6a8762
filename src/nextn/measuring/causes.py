"""Which hypothesis explains what an engine counted of its drafts: likelihoods of its counts under each. Knows no torch.

A hypothesis is what each text of a reference offered and kept under it. The law of the engine's counts at depth k is
beta-binomial around the hypothesis' a_k. Its variance has four parts:

- the engine's rounds: binomial, times the design effect between texts, as rounds of one text are alike (Kish 1965);
- the hypothesis' own figure, which comes from finitely many texts;
- arithmetic: no two engines round alike (`NUMERICS`);
- the workload, where the engine's prompts are not those of the reference: how far its domains spread.

Depths are tied by a Gaussian copula: a hard text is hard at every depth, and an easy workload lifts all of them.
Otherwise four depths that say the same thing would count as four proofs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nextn.errors import ConfigError
from nextn.measuring.hypotheses import Expected, Observed

FINE = "fine"
# Ratios of likelihoods: a fault is named from the first on (against "fine"), told from another from the second on; two
# hypotheses cannot be told apart where the ratio to be expected between them is below the third.
NAMED, TOLD, APART = 100.0, 10.0, 100.0
UNFIT = 0.001  # a cause whose misfit is below does not fit
NUMERICS = 0.05  # standard deviation of log(a / (1 - a)) between kernels that are all right
_TOGETHER = 0.8  # correlation of the workload's effect between depths
_FAR = 8.0  # residuals beyond so many standard deviations are cut, in the copula alone
_SURE = 1e8  # a beta law of that weight is a point


@dataclass(frozen=True)
class Cause:
    """One hypothesis, judged. log_likelihood: of the engine's counts under it. misfit: how probable counts as far off
    are where it holds; a best cause that fits badly is none. rates: the a_k that it expects; length: the AL."""

    name: str
    log_likelihood: float
    misfit: float
    rates: tuple[float, ...]
    length: float
    ratio: float = field(default=1.0)

    def as_record(self) -> dict[str, object]:
        """What goes into JSON."""
        told = {"acceptance": list(self.rates), "length": self.length}
        return {name: getattr(self, name) for name in ("name", "log_likelihood", "ratio", "misfit")} | told

    def over(self, other: "Cause") -> float:
        """How many times likelier the counts are under this one; at most 1e300."""
        return math.exp(min(690.0, self.log_likelihood - other.log_likelihood))

    def times(self, other: "Cause") -> str:
        """`over` in words."""
        ratio = self.over(other)
        told = f"{ratio:.0f}" if ratio < 1e6 else f"10^{min(30.0, math.log10(ratio)):.0f}"
        return f"{told} times" if ratio < 1e30 else f"more than {told} times"


def ranked(
    observed: Observed, expected: Sequence[Expected], *, fresh: float = 1.0, workload: bool = False
) -> list[Cause]:
    """All hypotheses, the likeliest first; `ratio`: of its likelihood to that of the first.

    fresh: the share of the engine's text that is not the reference's own; 1 = all of it, so both vary between texts.
    workload: the engine's prompts are not those of the reference. Raises ConfigError for more depths than expected.
    """
    return _ordered([_judged(observed, each, fresh, workload=workload) for each in expected])


def joined(parts: Sequence[Sequence[Cause]]) -> list[Cause]:
    """Several observations of one engine, such as of two temperatures: likelihoods multiply, the worst fit counts."""
    same: dict[str, list[Cause]] = {}
    for each in (cause for part in parts for cause in part):
        same.setdefault(each.name, []).append(each)
    whole = [found for found in same.values() if len(found) == len(parts)]
    return _ordered(
        [
            replace(
                found[0],
                log_likelihood=sum(each.log_likelihood for each in found),
                misfit=min(1.0, len(found) * min(each.misfit for each in found)),
            )
            for found in whole
        ]
    )


def apart(observed: Observed, true: Expected, other: Expected, *, fresh: float = 1.0, workload: bool = False) -> float:
    """The ratio of likelihoods, true to other, that an engine with as many rounds shows where `true` holds exactly."""
    seen = _typical(observed, true)
    right, wrong = (_judged(seen, each, fresh, workload=workload) for each in (true, other))
    return right.over(wrong)


def alike(
    name: str, *cases: tuple[Observed, Sequence[Expected]], fresh: float = 1.0, workload: bool = False
) -> tuple[str, ...]:
    """Hypotheses that so many rounds cannot tell from this one where it holds.

    cases: what was observed at each temperature, with the same hypotheses in the same order.
    """
    names = [each.name for each in cases[0][1]]
    place, totals = names.index(name), [0.0] * len(names)
    for seen, expected in cases:
        for other, hypothesis in enumerate(expected):
            totals[other] += math.log(apart(seen, expected[place], hypothesis, fresh=fresh, workload=workload))
    return tuple(each for each, total in zip(names, totals, strict=True) if each != name and total < math.log(APART))


def named(causes: Sequence[Cause]) -> tuple[str, ...]:
    """The causes that the counts speak for: those that the likeliest does not beat by `TOLD`; ("fine",) unless it is
    beaten by `NAMED`; () where even the likeliest does not fit (once in 1000 if it holds)."""
    best = causes[0]
    fine = next((each for each in causes if each.name == FINE), None)
    if fine is not None and best.over(fine) < NAMED and fine.misfit >= UNFIT:
        return (FINE,)
    if best.misfit < UNFIT:
        return ()
    return tuple(each.name for each in causes if best.over(each) < TOLD and each.name != FINE)


def _ordered(causes: Sequence[Cause]) -> list[Cause]:
    found = sorted(causes, key=lambda each: -each.log_likelihood)
    return [replace(each, ratio=each.over(found[0])) for each in found]


def _typical(observed: Observed, true: Expected) -> Observed:
    """What an engine with as many rounds would count if a hypothesis held exactly."""
    if not observed.offered:
        return replace(observed, length=1 + true.per_round[0])
    offered, left = [], float(observed.offered[0])
    for rate in true.rates[: len(observed.offered)]:
        offered.append(left)
        left *= float(rate)
    kept = [round(count * float(rate)) for count, rate in zip(offered, true.rates, strict=False)]
    return replace(observed, offered=tuple(map(round, offered)), kept=tuple(map(min, kept, map(round, offered))))


def _judged(observed: Observed, expected: Expected, fresh: float, *, workload: bool) -> Cause:
    if len(observed.offered) > expected.depths:
        depths = f"{expected.depths} depths are expected, the engine drafts {len(observed.offered)}"
        raise ConfigError(f"{expected.name}: {depths}")
    by_depth = bool(observed.offered)
    likely, misfit = (_by_depth if by_depth else _by_length)(observed, expected, fresh, workload=workload)
    rates = tuple(map(float, expected.raw))
    return Cause(expected.name, likely, misfit, rates, 1 + expected.per_round[0])


def _by_depth(observed: Observed, expected: Expected, fresh: float, *, workload: bool) -> tuple[float, float]:
    """(log-likelihood, misfit) of counts by depth."""
    used = [k for k, offered in enumerate(observed.offered) if offered]
    if not used:
        return 0.0, 1.0
    offered, kept = (np.array([side[k] for k in used], float) for side in (observed.offered, observed.kept))
    rates, ties = expected.rates[used], expected.ties[np.ix_(used, used)]
    noise = rates * (1 - rates)
    effects = expected.effects[used] + (1.0 if expected.chances else 0.0)
    eye = np.eye(len(used))
    drift = expected.workload[used] if workload else np.zeros(len(used))
    # Each part relative to a(1-a), with how it goes together between depths.
    parts: list[tuple[np.ndarray, np.ndarray]] = [
        (fresh * np.maximum(1.0, effects) / offered, ties),
        (fresh / (expected.weights[used] + 2), ties),
        (NUMERICS**2 * noise, eye),
        (drift**2 * noise, _TOGETHER + (1 - _TOGETHER) * eye),
    ]
    share = sum(part for part, _ in parts)
    share = np.minimum(np.maximum(share, 1 / offered), 0.999)
    terms = [_beta_binomial(*each) for each in zip(kept, offered, rates, share, strict=True)]
    covariance = sum(np.sqrt(np.outer(part, part)) * tie for part, tie in parts)
    scale = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(scale, scale) * 0.98 + 0.02 * eye
    residuals = (2 * np.arcsin(np.sqrt(kept / offered)) - 2 * np.arcsin(np.sqrt(rates))) / np.sqrt(share)
    cut = np.clip(residuals, -_FAR, _FAR)
    copula = -0.5 * (np.linalg.slogdet(correlation)[1] + cut @ (np.linalg.solve(correlation, cut) - cut))
    square = float(residuals @ np.linalg.solve(correlation, residuals))
    return float(sum(terms) + copula), chi_square_above(square, len(used))


def _beta_binomial(kept: float, offered: float, rate: float, share: float) -> float:
    """log P(kept | offered), with variance `share` x rate (1 - rate) of kept / offered."""
    alike = (offered * share - 1) / (offered - 1) if offered > 1 else 0.0
    weight = min(_SURE, (1 - alike) / max(alike, 1 / _SURE))
    a, b = rate * weight, (1 - rate) * weight
    choose = math.lgamma(offered + 1) - math.lgamma(kept + 1) - math.lgamma(offered - kept + 1)
    return choose + _log_beta(kept + a, offered - kept + b) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _by_length(observed: Observed, expected: Expected, fresh: float, *, workload: bool) -> tuple[float, float]:
    """The same of an acceptance length: Student's t around the hypothesis', at texts - 1 degrees of freedom."""
    assert observed.length is not None
    mean, spread = expected.per_round
    reach, rounds = np.cumprod(expected.rates), float(expected.counts[0][:, 0].sum())
    within = float((reach * (2 * np.arange(expected.depths) + 1)).sum() - reach.sum() ** 2)
    theirs = observed.rounds or rounds or 1.0
    drawn = max(spread * rounds / theirs + (within / theirs if expected.chances else 0.0), within / theirs)
    # What a step of log(a / (1 - a)) at depth k moves: all that lies behind it.
    moved = reach[::-1].cumsum()[::-1] * (1 - expected.rates)
    drift = expected.workload if workload else np.zeros(expected.depths)
    known = float((moved**2).sum() * NUMERICS**2 + (moved * drift).sum() ** 2)
    variance = max(fresh * (drawn + spread), within / theirs) + known
    freedom = max(1, len(expected.kept) - 1)
    t = (observed.length - 1 - mean) / math.sqrt(variance)
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi * variance)
    return constant - (freedom + 1) / 2 * math.log1p(t * t / freedom), chi_square_above(t * t, 1)


def chi_square_above(value: float, freedom: int) -> float:
    """P(chi-square > value) (Abramowitz and Stegun 26.4.4, 26.4.5)."""
    half = value / 2
    if freedom % 2:
        total, term = math.erfc(math.sqrt(half)), math.exp(-half) * math.sqrt(half / math.pi) * 2
        for k in range(3, freedom + 1, 2):
            total, term = total + term, term * value / k
        return total
    total = term = math.exp(-half)
    for k in range(1, freedom // 2):
        term *= half / k
        total += term
    return total
