"""Detect norm weights stored by the wrong convention: w where the family stores 1 + w, the reverse, or shifted twice.

Pure statistics of effective norm weights, i.e. the factors that multiply; knows no files.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nextn.edit.norm_shift import NEGATIVE

Values = NDArray[np.float64]
Side = Literal["head", "trunk", "both"]

# A mean does not reveal a shift by 1. Published heads scale their two inputs down to means of 0.27 and 0.49 (omlx#3750)
# and trained norms have means from 0.3 to 4, so "below 0.5" is no evidence. What is:
# 1. Sign. A norm weight starts at 1 and hardly ever crosses 0, as a norm that is off learns nothing. Weights less 1 are
#    negative wherever the true weight is below 1, which is a large part of all but the largest ones: one norm is proof.
# 2. Lower bound. Weights plus 1 are all above 1. So are many sound ones, so the bound is necessary, not sufficient.
#    Training that enlarges a weight enlarges its spread in proportion; a shift moves the median and leaves the spread.
#    So the norm is compared with the other side's norm of the same kind, by median and by relative spread, both in
#    logs: it must fit much better with the shift undone. Scaled weights fit equally well either way. Norms without a
#    counterpart (token and hidden norm) are compared with all of the other side's and count half. One norm, or weights
#    that the shift would have left near 1, where training starts anyway, make a suspicion and no proof.
SOME_NEGATIVE = 0.05  # share of negative weights, below `NEGATIVE`, that is suspicious
FIT, BETTER, SUSPICIOUS = 1.0, 0.4, 1.0  # nats: distance with the shift undone; how much smaller it is than as stored
ENOUGH, NORMS = 1.8, 3  # certain: better by this in sum, over at least this many norms
START = 0.35  # weights this close to 1 are where training starts
MIN_SIZE = 8  # a shorter norm has no meaningful quantiles
# Norm weights that are all this close to 1 have their initial values: they are not shifted, for they would be 0.
INITIAL = 0.02


@dataclass(frozen=True)
class NormValues:
    """The effective weights of one norm, or of several of one kind together."""

    values: Values
    kind: str = ""  # equal for norms with the same function in head and trunk; empty without a counterpart


@dataclass(frozen=True)
class NormShift:
    """Norms whose effective weights are `offset` away from their true values."""

    names: tuple[str, ...]
    offset: int
    side: Side
    certain: bool  # False: a suspicion that only measuring the acceptance can settle
    median: float


def shifts(
    head: Mapping[str, NormValues], trunk: Mapping[str, NormValues], *, zero_centered: bool
) -> Iterator[NormShift]:
    """Yield the shifted norms of the head and of the trunk's last layers, by tensor name.

    `zero_centered`: the family stores w for 1 + w, so that a converter may have added 1 to all.
    """
    head, trunk = _usable(head), _usable(trunk)
    negative_head, negative_trunk = _negatives(head, NEGATIVE), _negatives(trunk, NEGATIVE)
    if negative_head or negative_trunk:
        yield from _too_low(head, negative_head, _without(trunk, negative_trunk), "head")
        yield from _too_low(trunk, negative_trunk, _without(head, negative_head), "trunk")
        return
    sides: tuple[tuple[Side, Mapping[str, NormValues]], ...] = (("head", head), ("trunk", trunk))
    for side, norms in sides:
        if suspicious := _negatives(norms, SOME_NEGATIVE):
            yield NormShift(tuple(suspicious), -1, side, certain=False, median=_median(suspicious.values()))
    above_one = _at_least(head, 1) if zero_centered else {}
    if head and trunk and len(above_one) == len(head) and len(_at_least(trunk, 1)) == len(trunk):
        names = (*head, *trunk)
        yield NormShift(names, 1, "both", certain=False, median=_median([*head.values(), *trunk.values()]))
        return
    head_shifts = list(_too_high(head, trunk, "head"))
    yield from head_shifts or _too_high(trunk, head, "trunk")
    inputs = {name: norm for name, norm in above_one.items() if not norm.kind}
    if not head_shifts and len(inputs) > 1 and len(inputs) == sum(not norm.kind for norm in head.values()):
        yield NormShift(tuple(inputs), 1, "head", certain=False, median=_median(inputs.values()))


def _usable(norms: Mapping[str, NormValues]) -> dict[str, NormValues]:
    return {
        name: norm for name, norm in norms.items() if len(norm.values) >= MIN_SIZE and np.isfinite(norm.values).all()
    }


def _without(norms: Mapping[str, NormValues], names: Mapping[str, NormValues]) -> dict[str, NormValues]:
    return {name: norm for name, norm in norms.items() if name not in names}


def _negatives(norms: Mapping[str, NormValues], share: float) -> dict[str, NormValues]:
    return {name: norm for name, norm in norms.items() if np.mean(norm.values < 0) > share}


def _median(norms: Iterable[NormValues]) -> float:
    return float(np.median([np.median(norm.values) for norm in norms]))


def _at_least(norms: Mapping[str, NormValues], bound: int) -> dict[str, NormValues]:
    """Return the norms that a shift may have moved above `bound`."""
    return {name: norm for name, norm in norms.items() if np.quantile(norm.values, 0.01) >= bound
            and np.max(np.abs(norm.values - 1)) > INITIAL}  # fmt: skip


def _too_low(
    norms: Mapping[str, NormValues], proven: Mapping[str, NormValues], other: Mapping[str, NormValues], side: Side
) -> Iterator[NormShift]:
    """Yield the `proven` norms, and with them those that fit the other side better with the shift undone."""
    proven_twice = _negatives({name: NormValues(norm.values + 1) for name, norm in proven.items()}, NEGATIVE)
    if proven_twice:  # of the others, weights above 2 are still positive with one shift undone
        once = {name: replace(norm, values=norm.values + 1) for name, norm in _without(proven, proven_twice).items()}
        proven_twice |= {name: proven[name] for name, norm in once.items() if _is_closer(norm, other, -1)}
    for offset, subset in ((-2, proven_twice), (-1, _without(proven, proven_twice))):
        if not subset:
            continue
        added = {name for name, norm in _without(norms, proven).items()
                 if _score(norm, other, offset) > BETTER or _is_closer(norm, other, offset)}  # fmt: skip
        names = tuple(name for name in norms if name in subset or name in added)
        yield NormShift(names, offset, side, certain=True, median=_median(norms[name] for name in names))


def _too_high(norms: Mapping[str, NormValues], other: Mapping[str, NormValues], side: Side) -> Iterator[NormShift]:
    """Yield at most one shift. An offset of 2 is tried first, as weights that were shifted twice are also above 1."""
    for offset in (2, 1):
        candidates = _at_least(norms, offset)
        scores = {name: _score(norm, other, offset) for name, norm in candidates.items()}
        fitting = {name: score for name, score in scores.items() if score >= BETTER}
        if not fitting:
            continue
        clear = [score for name, score in fitting.items() if np.median(norms[name].values) > 1 + START]
        certain = len(clear) >= NORMS and sum(clear) >= ENOUGH
        names = tuple(
            name for name, norm in candidates.items()
            if name in fitting or (certain and (not norm.kind or _is_closer(norm, other, offset)))
        )  # fmt: skip
        if certain or max(fitting.values()) >= SUSPICIOUS:
            yield NormShift(names, offset, side, certain=certain, median=_median(norms[name] for name in names))
            return


def _score(norm: NormValues, other: Mapping[str, NormValues], offset: int) -> float:
    """Return how much better, in nats, `norm` fits the other side with the shift undone; 0 where it does not fit."""
    counterparts = _counterparts(norm, other)
    pool = counterparts or [each.values for each in other.values()]
    if not pool:
        return 0.0
    reference = np.concatenate(pool)
    undone = _distance(norm.values - offset, reference)
    return (_distance(norm.values, reference) - undone) * (1.0 if counterparts else 0.5) if undone < FIT else 0.0


def _is_closer(norm: NormValues, other: Mapping[str, NormValues], offset: int) -> bool:
    """Whether the median is clearly closer to that of the other side's norm of its kind with the shift undone.

    Enough to add a norm to others whose shift is certain, which a converter seldom shifts alone.
    """
    counterparts = _counterparts(norm, other)
    if not counterparts:
        return False
    reference = _median_and_spread(np.concatenate(counterparts))[0]
    stored, undone = (
        abs(np.log(_median_and_spread(values)[0] / reference)) for values in (norm.values, norm.values - offset)
    )
    return bool(stored - undone > BETTER)


def _counterparts(norm: NormValues, other: Mapping[str, NormValues]) -> list[Values]:
    """Return the other side's norms of the same kind."""
    return [each.values for each in other.values() if norm.kind and each.kind == norm.kind]


def _distance(values: Values, reference: Values) -> float:
    (median, spread), (reference_median, reference_spread) = _median_and_spread(values), _median_and_spread(reference)
    return float(abs(np.log(median / reference_median)) + abs(np.log(spread / reference_spread)))


def _median_and_spread(values: Values) -> tuple[float, float]:
    """Return the median, and the interquartile range relative to it."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    median = max(float(median), 1e-3)
    return median, max(float(high - low) / median, 0.01)
