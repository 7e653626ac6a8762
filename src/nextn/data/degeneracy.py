"""Detection of degenerate (repetitive) text: a model stuck in repetition, which any head drafts well."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from nextn.data.corpus import Ids
from nextn.text_format import counted, some

_FEW_TEXTS = 5  # fewer that remain say little, as of `stats.intervals`, which is above this layer
MIN_TOKENS = 200  # shorter texts cannot be classified reliably, see `Degeneracy.is_degenerate`
_MAX_PERIOD = 256  # tokens of a period that is searched for


@dataclass(frozen=True)
class Degeneracy:
    """How repetitive a text is. Acceptance measured on degenerate text says nothing about the head."""

    distinct: float  # distinct 8-grams / all 8-grams
    loop: float  # share of the longest stretch, anywhere, that repeats at least three times with one period
    period: int  # that period in tokens, 0 if there is none

    @property
    def is_degenerate(self) -> bool:
        """Whether a quarter of the text is one periodic stretch, or fewer than 3 in 10 of its 8-grams are distinct.

        On excerpts of CPython's sources, as bytes, the false positives are 0.2 % at 400 bytes and at most 1.1 % from
        200 to 4000; texts below 200 bytes are too short (3 % at 128: indentation and rulers).
        """
        return self.loop >= 0.25 or self.distinct < 0.3


def degeneracy(text: str | Sequence[int] | Ids) -> Degeneracy:
    """Measure a str (as bytes) or ids [T]."""
    ids = np.frombuffer(text.encode(), np.uint8) if isinstance(text, str) else np.asarray(text)
    periods = range(1, min(_MAX_PERIOD, len(ids) // 3) + 1)
    stretches = [(_recurrence(ids, period) + period, -period) for period in periods]
    length, period = max((stretch for stretch in stretches if stretch[0] >= -3 * stretch[1]), default=(0, 0))
    return Degeneracy(distinct=_distinct(ids, 8), loop=length / max(len(ids), 1), period=-period)


def degeneracy_notes(
    temperature: float, total: int, *, degenerate: Collection[int], short: int, measured: Collection[float] = ()
) -> list[str]:
    """Return notes for a report on figures over `total` prompts, of which some gave degenerate or short texts.

    `degenerate` are indices of prompts, `short` is the number of those below `MIN_TOKENS`, and `measured` the
    temperatures that the report has.
    """
    notes, left = [], total - len(degenerate)
    label = f"temperature {temperature:g}"
    sampled = ". Use other prompts"
    if not temperature:
        higher = f"temperature {max(measured):g}, or use other prompts" if any(measured) else "--temperatures 1"
        sampled = f". Sampled text repeats itself less: compare at {higher}"
    if not left:
        notes.append(
            f"{label}: every text is degenerate (repetitive), which is easy to draft: the figures mean little{sampled}"
        )
    elif degenerate:
        which = some([str(index + 1) for index in sorted(degenerate)], 8)
        verb, noun = ("is", "prompt") if len(degenerate) == 1 else ("are", "prompts")
        few = "" if left >= _FEW_TEXTS else f", too few{sampled}"
        notes.append(
            f"{label}: {len(degenerate)} of {total} texts {verb} degenerate (repetitive), which is easy to draft, and "
            f"{verb} left out ({noun} {which}): the figures are of {counted(left, 'text')}{few}"
        )
    if short:
        notes.append(
            f"{label}: {short} of {total} prompts gave texts below {MIN_TOKENS} tokens: repetition may be missed"
        )
    return notes


def _recurrence(ids: Ids, period: int) -> int:
    """The length of the longest stretch of i with ids[i] == ids[i - period]."""
    breaks = np.flatnonzero(np.concatenate([[True], ids[period:] != ids[:-period], [True]]))
    return int(np.diff(breaks).max()) - 1


def _distinct(ids: Ids, size: int) -> float:
    if len(ids) < size:
        return 1.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, size)
    return len(np.unique(grams, axis=0)) / len(grams)
