"""Tests of sampled text: are two sets of texts of one law, and are tokens drawn with the probabilities stated?

Pure: names in, p-values out. Exact by permutation where two sets are compared, so that no expected count is too small.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Name = str | int
Text = Sequence[Name]
_CHUNK = 512  # permutations at once: memory stays below a few MB


Table = NDArray[np.float32]  # [texts, distinct things]: how often each text has each


@dataclass(frozen=True)
class Comparison:
    """Two sets of texts. found: the statistic. null: what it is when texts are exchanged at random. sharp: what it
    would be, were one law sharpened to temperature 0.5 (each share squared and renormalised).

    place: the table where the sets differ most. distance: half the sum of differences of the shares there (total
    variation, noise included).
    """

    found: float
    null: NDArray[np.float64]
    sharp: NDArray[np.float64]
    place: int
    distance: float

    @property
    def p(self) -> float:
        return (1 + int((self.null >= self.found - 1e-9).sum())) / (1 + len(self.null))

    def power(self, level: float) -> float:
        """The chance to find the sharpened law by a test of this level."""
        return float((self.sharp > np.quantile(self.null, 1 - level)).mean())

    def as_record(self, level: float) -> dict[str, object]:
        return {"p": self.p, "power": self.power(level), "place": self.place, "distance": self.distance}


def combined(parts: Sequence[Comparison]) -> Comparison:
    """One test of several prompts: texts are exchanged within each, and the statistics added up."""
    worst = max(parts, key=lambda part: part.distance)
    found, null, sharp = (
        sum(part.found for part in parts),
        np.sum([part.null for part in parts], axis=0),
        np.sum([part.sharp for part in parts], axis=0),
    )
    return Comparison(found, null, sharp, worst.place, worst.distance)


def by_place(texts: Sequence[Text], places: Sequence[int]) -> list[Table]:
    """A table per place: which token a text has there; its end is a token, too."""
    return [counts([[repr(text[place]) if place < len(text) else ""] for text in texts]) for place in places]


def counts(texts: Sequence[Sequence[Name]]) -> Table:
    """One table: how often each text has each name."""
    known = {name: column for column, name in enumerate(dict.fromkeys(name for text in texts for name in text))}
    table = np.zeros((len(texts), len(known)), dtype=np.float32)
    for row, text in enumerate(texts):
        for name in text:
            table[row, known[name]] += 1
    return table


def compared(tables: Sequence[Table], num: int, *, level: float, seed: int) -> Comparison:
    """Chi-square summed over tables, the first `num` texts against the rest; its law by exchanging texts between them.

    Whole texts are exchanged, so neither the tables nor the tokens of a text need be independent. level: of this one
    test; the number of permutations is such that p can fall well below it.
    """
    rng = np.random.default_rng(seed)
    label = np.arange(len(tables[0])) < num
    found = np.array([_chi_square(table, label[None])[0] for table in tables])
    worst = int(found.argmax())
    sums = [tables[worst][rows].sum(axis=0) for rows in (label, ~label)]
    apart = np.abs(sums[0] / max(sums[0].sum(), 1) - sums[1] / max(sums[1].sum(), 1)).sum() / 2
    null = _permuted(tables, num, rounds=max(999, math.ceil(4 / level)), rng=rng)
    return Comparison(float(found.sum()), null, _sharpened(tables, num, rng=rng), worst, float(apart))


def _chi_square(table: Table, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Two-sample chi-square per row of labels [rounds, texts]: sum of (o - e)^2 / e over both samples."""
    total = table.sum(axis=0).astype(np.float64)
    share = labels.sum(axis=1, keepdims=True) / labels.shape[1]
    seen = labels.astype(np.float32) @ table
    # (o1 - e1)^2 / e1 + (o2 - e2)^2 / e2 with o2 - e2 = -(o1 - e1).
    return ((seen - share * total) ** 2 / (share * (1 - share) * total)).sum(axis=1)


def _permuted(tables: Sequence[Table], num: int, *, rounds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    sums = []
    for start in range(0, rounds, _CHUNK):
        keys = rng.random((min(_CHUNK, rounds - start), len(tables[0])))
        labels = keys.argsort(axis=1) < num
        sums.append(sum(_chi_square(table, labels) for table in tables))
    return np.concatenate(sums)


def _sharpened(tables: Sequence[Table], num: int, *, rng: np.random.Generator) -> NDArray[np.float64]:
    """By simulation from the pooled shares of each table, as if its draws were independent."""
    rounds, share = 200, num / len(tables[0])
    sums = np.zeros(rounds)
    for table in tables:
        law = table.sum(axis=0, dtype=np.float64)
        draws, law = round(law.sum()), law / law.sum()
        ones = rng.multinomial(round(share * draws), law, size=rounds)
        others = rng.multinomial(draws - round(share * draws), law**2 / (law**2).sum(), size=rounds)
        total = ones + others
        expected = np.maximum(share * (1 - share) * total, 1e-12)
        sums += np.where(total > 0, (ones - share * total) ** 2 / expected, 0).sum(axis=1)
    return sums


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which tests fail, with the chance of any false one at most `level` (Holm 1979)."""
    failed = [False] * len(p_values)
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        if p_values[place] > level / (len(p_values) - rank):
            break
        failed[place] = True
    return failed


@dataclass(frozen=True)
class Calibration:
    """How often the likeliest token was drawn against how often it should have been.

    num draws, seen and expected counts, p two-sided. smallest: the share by which top tokens would have to be drawn too
    often to be found with 80 % power.
    """

    num: int
    seen: int
    expected: float
    p: float
    smallest: float


def calibrated(draws: Sequence[tuple[bool, float]], *, level: float) -> Calibration | None:
    """draws: (was it the likeliest token, its stated probability). None where the draws are too sure to tell anything.

    Draws of one text depend on each other, but each is right on average given those before it, so the sum is a
    martingale and its variance the sum of p (1 - p).
    """
    variance = sum(chance * (1 - chance) for _, chance in draws)
    if variance < 10:  # too few for the normal law
        return None
    seen, expected = sum(top for top, _ in draws), sum(chance for _, chance in draws)
    score = abs(seen - expected) / math.sqrt(variance)
    normal = NormalDist()
    smallest = (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(0.8)) * math.sqrt(variance) / len(draws)
    return Calibration(len(draws), seen, expected, math.erfc(score / math.sqrt(2)), smallest)
