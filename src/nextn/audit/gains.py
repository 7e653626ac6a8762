"""Norm gains stored by the wrong convention: w where the family stores 1 + w, the reverse, or shifted twice.

Pure statistics of gains as they multiply; knows no files.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Gains = NDArray[np.float64]
Side = Literal["head", "trunk", "both"]

# A shift by 1 cannot be read off a mean. Published heads damp their two inputs to means of 0.27 and 0.49 (omlx#3750)
# and trained norms have means from 0.3 to 4, so "below 0.5" is no sign of anything. What is:
# 1. Sign. A gain starts at 1 and hardly ever crosses 0, as a norm that is off learns nothing. Gains less 1 are negative
#    wherever the true gain is below 1, which is a large part of all but the largest ones: one norm is proof enough.
# 2. Floor. Gains plus 1 are all above 1. So are many sound ones, so the floor is needed and proves nothing. Training
#    that makes a gain larger makes it spread in proportion; a shift moves the median and leaves the spread. So the
#    norm is compared with the other side's of the same kind, by median and by relative spread, both in logs: it must
#    fit much better with the shift undone. Scaled gains fit either way equally well. Norms without a counterpart
#    (token and hidden norm) are held against all of the other side's and count half. One norm, or gains that the
#    shift would have left near 1, where they start anyway, make a doubt and no verdict.
NEGATIVE, SOME_NEGATIVE = 0.2, 0.05  # shares; a trained norm has none, or a few
FIT, BETTER, DOUBT = 1.0, 0.4, 1.0  # nats: how well a norm fits with the shift undone, how much better than as it is
ENOUGH, NORMS = 1.8, 3  # better by this in all, over at least so many norms
START = 0.35  # gains this close to 1 are where training starts
MEMBERS = 8  # a shorter norm has no quantiles to speak of


@dataclass(frozen=True)
class Norm:
    """gains: as they multiply. kind: equal for norms that do the same in head and trunk; empty without counterpart."""

    gains: Gains
    kind: str = ""


@dataclass(frozen=True)
class Shift:
    """names: the norms whose gains lie `by` from where they should. sure: whether that is a verdict or a doubt."""

    names: tuple[str, ...]
    by: int
    whose: Side
    sure: bool
    median: float


def shifts(head: Mapping[str, Norm], trunk: Mapping[str, Norm], *, zero_centred: bool) -> Iterator[Shift]:
    """What is shifted; `trunk` holds last layers. zero_centred: the family stores w for 1 + w, so that a converter may
    have added 1 to all.
    """
    head, trunk = _long(head), _long(trunk)
    low_head, low_trunk = _negatives(head, NEGATIVE), _negatives(trunk, NEGATIVE)
    if low_head or low_trunk:
        yield from _below(head, low_head, _without(trunk, low_trunk), "head")
        yield from _below(trunk, low_trunk, _without(head, low_head), "trunk")
        return
    sides: tuple[tuple[Side, Mapping[str, Norm]], ...] = (("head", head), ("trunk", trunk))
    for whose, side in sides:
        if doubtful := _negatives(side, SOME_NEGATIVE):
            yield Shift(tuple(doubtful), -1, whose, sure=False, median=_median(doubtful.values()))
    whole = _floored(head, 1) if zero_centred else {}
    if head and trunk and len(whole) == len(head) and len(_floored(trunk, 1)) == len(trunk):
        names = (*head, *trunk)
        yield Shift(names, 1, "both", sure=False, median=_median([*head.values(), *trunk.values()]))
        return
    of_head = list(_above(head, trunk, "head"))
    yield from of_head or _above(trunk, head, "trunk")
    inputs = {name: norm for name, norm in whole.items() if not norm.kind}
    if not of_head and len(inputs) > 1 and len(inputs) == sum(not norm.kind for norm in head.values()):
        yield Shift(tuple(inputs), 1, "head", sure=False, median=_median(inputs.values()))


def _long(side: Mapping[str, Norm]) -> dict[str, Norm]:
    return {name: norm for name, norm in side.items() if len(norm.gains) >= MEMBERS and np.isfinite(norm.gains).all()}


def _without(side: Mapping[str, Norm], names: Mapping[str, Norm]) -> dict[str, Norm]:
    return {name: norm for name, norm in side.items() if name not in names}


def _negatives(side: Mapping[str, Norm], share: float) -> dict[str, Norm]:
    return {name: norm for name, norm in side.items() if np.mean(norm.gains < 0) > share}


def _median(norms: Iterable[Norm]) -> float:
    return float(np.median([np.median(norm.gains) for norm in norms]))


def _floored(side: Mapping[str, Norm], floor: int) -> dict[str, Norm]:
    return {name: norm for name, norm in side.items() if np.quantile(norm.gains, 0.01) >= floor}


def _below(
    side: Mapping[str, Norm], proven: Mapping[str, Norm], other: Mapping[str, Norm], whose: Side
) -> Iterator[Shift]:
    """Where some are proven to be too low, those that fit better with the shift undone are, too."""
    lower = _negatives({name: Norm(norm.gains + 1) for name, norm in proven.items()}, NEGATIVE)
    for by, few in ((-2, lower), (-1, _without(proven, lower))):
        rest = _without(side, proven)
        names = [
            name for name in side if name in few or (few and name in rest and _score(side[name], other, by) > BETTER)
        ]
        if names:
            yield Shift(tuple(names), by, whose, sure=True, median=_median(side[name] for name in names))


def _above(side: Mapping[str, Norm], other: Mapping[str, Norm], whose: Side) -> Iterator[Shift]:
    """Two before one: what was shifted twice is also above 1."""
    for by in (2, 1):
        floored = _floored(side, by)
        scores = {name: _score(norm, other, by) for name, norm in floored.items()}
        fitting = {name: score for name, score in scores.items() if score >= BETTER}
        if not fitting:
            continue
        clear = [score for name, score in fitting.items() if np.median(side[name].gains) > 1 + START]
        sure = len(clear) >= NORMS and sum(clear) >= ENOUGH
        names = tuple(name for name in floored if name in fitting or (sure and not side[name].kind))
        if sure or max(fitting.values()) >= DOUBT:
            yield Shift(names, by, whose, sure=sure, median=_median(side[name] for name in names))
            return


def _score(norm: Norm, other: Mapping[str, Norm], by: int) -> float:
    """By how much, in nats, `norm` fits the other side better with the shift undone; 0 where it does not fit."""
    same = [each.gains for each in other.values() if norm.kind and each.kind == norm.kind]
    like = same or [each.gains for each in other.values()]
    if not like:
        return 0.0
    reference = np.concatenate(like)
    undone = _distance(norm.gains - by, reference)
    return (_distance(norm.gains, reference) - undone) * (1.0 if same else 0.5) if undone < FIT else 0.0


def _distance(gains: Gains, reference: Gains) -> float:
    median, spread = _shape(gains)
    its_median, its_spread = _shape(reference)
    return abs(np.log(median / its_median)) + abs(np.log(spread / its_spread))


def _shape(gains: Gains) -> tuple[float, float]:
    """Median, and distance of the quartiles relative to it."""
    low, median, high = np.quantile(gains, [0.25, 0.5, 0.75])
    median = max(float(median), 1e-3)
    return median, max(float(high - low) / median, 0.01)
