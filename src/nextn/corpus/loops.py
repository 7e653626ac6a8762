"""Texts that repeat themselves: a model that has lost its thread, which any head drafts well."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nextn.corpus.data import Ids

TELLING = 200  # below so many tokens loops cannot be told for sure, see `Degeneracy.looping`


@dataclass(frozen=True)
class Degeneracy:
    """How repetitive a text is; acceptance measured on a loop says nothing about the head.

    distinct: distinct 8-grams / all 8-grams. longest_run: most repetitions of one token in a row. loop: share of the
    longest stretch, anywhere, that repeats at least three times with one period; period: that period, 0 if none.
    """

    distinct: float
    longest_run: int
    loop: float
    period: int

    @property
    def looping(self) -> bool:
        """A quarter of the text is one loop, or fewer than 3 in 10 of its 8-grams are distinct.

        On windows of CPython's sources, as bytes, it is wrong for 0.2 % at 400 bytes and for 1.1 % at most from 200
        to 4000; texts below 200 bytes are too short to tell (3 % at 128: indentation and rulers).
        """
        return self.loop >= 0.25 or self.distinct < 0.3


def degeneracy(text: str | Sequence[int] | Ids, *, max_period: int = 256) -> Degeneracy:
    """text: a str (taken as bytes) or ids [T]. Loops of up to max_period tokens are looked for."""
    ids = np.frombuffer(text.encode(), np.uint8) if isinstance(text, str) else np.asarray(text)
    periods = range(1, min(max_period, len(ids) // 3) + 1)
    stretches = [(_recurrence(ids, period) + period, -period) for period in periods]
    loop, period = max((found for found in stretches if found[0] >= -3 * found[1]), default=(0, 0))
    return Degeneracy(
        distinct=_distinct(ids, 8),
        longest_run=min(_recurrence(ids, 1) + 1, len(ids)),
        loop=loop / max(len(ids), 1),
        period=-period,
    )


def cautions(of: str, total: int, *, loops: int, short: int) -> list[str]:
    """What to say of figures over the texts of so many prompts, `of` a temperature: how many loop or are too short."""
    said = []
    if loops == total:
        said.append(f"{of}: every text loops, and loops are easy to draft: these figures say little")
    elif loops:
        said.append(f"{of}: {loops} of {total} prompts gave loops and are left out")
    if short:
        said.append(f"{of}: {short} of {total} prompts gave texts below {TELLING} tokens: loops may be missed")
    return said


def _recurrence(ids: Ids, period: int) -> int:
    # Length of the longest stretch of i with ids[i] == ids[i - period].
    breaks = np.flatnonzero(np.concatenate([[True], ids[period:] != ids[:-period], [True]]))
    return int(np.diff(breaks).max()) - 1


def _distinct(ids: Ids, size: int) -> float:
    if len(ids) < size:
        return 1.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, size)
    return len(np.unique(grams, axis=0)) / len(grams)
