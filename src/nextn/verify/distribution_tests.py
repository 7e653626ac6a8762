"""Tests of sampled text: whether two sets have one distribution, and tokens the probabilities that are stated.

No I/O: token names in, p-values out. Two sets are compared by permutation, which is exact for small counts, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

TokenName = str | int
_CHUNK = 512  # permutations at once: memory stays below a few MB
Table = NDArray[np.float32]  # [texts, distinct names]: how often each text has each name


@dataclass(frozen=True)
class Comparison:
    """A comparison of two sets of texts."""

    statistic: float
    null: NDArray[np.float64]  # the statistic when texts are exchanged at random
    sharpened: NDArray[np.float64]  # the same if one distribution had temperature 0.5 (shares squared, renormalized)
    worst: int  # index of the table where the sets differ most
    distance: float  # total variation there: half the sum of the differences of shares, noise included

    @property
    def p(self) -> float:
        return (1 + int((self.null >= self.statistic - 1e-9).sum())) / (1 + len(self.null))

    def power(self, level: float) -> float:
        """Return the probability of detecting the sharpened distribution by a test of this level."""
        return float((self.sharpened > np.quantile(self.null, 1 - level)).mean())

    def as_record(self, level: float) -> dict[str, object]:
        return {"p": self.p, "power": self.power(level), "place": self.worst, "distance": self.distance}


def combine(parts: Sequence[Comparison]) -> Comparison:
    """Combine several prompts into one test: texts are exchanged within each, and the statistics added up."""
    worst = max(parts, key=lambda part: part.distance)
    return Comparison(
        sum(part.statistic for part in parts),
        np.sum([part.null for part in parts], axis=0),
        np.sum([part.sharpened for part in parts], axis=0),
        worst.worst,
        worst.distance,
    )


def position_tables(texts: Sequence[Sequence[TokenName]], positions: Sequence[int]) -> list[Table]:
    """Return a table per position: which token each text has there; the end of a text counts as a token."""
    return [count_table([[repr(text[at]) if at < len(text) else ""] for text in texts]) for at in positions]


def count_table(texts: Sequence[Sequence[TokenName]]) -> Table:
    """Count how often each text has each name."""
    indices = {name: index for index, name in enumerate(dict.fromkeys(name for text in texts for name in text))}
    table = np.zeros((len(texts), len(indices)), dtype=np.float32)
    for row, text in enumerate(texts):
        for name in text:
            table[row, indices[name]] += 1
    return table


def compare(tables: Sequence[Table], num: int, *, level: float, seed: int) -> Comparison:
    """Compare the first `num` texts with the others by a permutation test on chi-square, summed over tables.

    Complete texts are exchanged, so neither the tables nor the tokens of a text need be independent. level: of this one
    test; the number of permutations is such that p can fall well below it.
    """
    rng = np.random.default_rng(seed)
    is_first = np.arange(len(tables[0])) < num
    statistics = np.array([_chi_square(table, is_first[None])[0] for table in tables])
    worst = int(statistics.argmax())
    sums = [tables[worst][rows].sum(axis=0) for rows in (is_first, ~is_first)]
    distance = np.abs(sums[0] / max(sums[0].sum(), 1) - sums[1] / max(sums[1].sum(), 1)).sum() / 2
    null = _permuted(tables, num, rounds=max(999, math.ceil(4 / level)), rng=rng)
    return Comparison(float(statistics.sum()), null, _sharpened(tables, num, rng=rng), worst, float(distance))


def _chi_square(table: Table, labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Two-sample chi-square per row of labels [rounds, texts]: sum of (o - e)^2 / e over both samples."""
    total = table.sum(axis=0).astype(np.float64)
    share = labels.sum(axis=1, keepdims=True) / labels.shape[1]
    observed = labels.astype(np.float32) @ table
    # (o1 - e1)^2 / e1 + (o2 - e2)^2 / e2 with o2 - e2 = -(o1 - e1).
    return ((observed - share * total) ** 2 / (share * (1 - share) * total)).sum(axis=1)


def _permuted(tables: Sequence[Table], num: int, *, rounds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    sums = []
    for start in range(0, rounds, _CHUNK):
        keys = rng.random((min(_CHUNK, rounds - start), len(tables[0])))
        labels = keys.argsort(axis=1) < num
        sums.append(sum(_chi_square(table, labels) for table in tables))
    return np.concatenate(sums)


def _sharpened(tables: Sequence[Table], num: int, *, rng: np.random.Generator) -> NDArray[np.float64]:
    """By simulation from the pooled shares of each table, as if its samples were independent."""
    rounds, share = 200, num / len(tables[0])
    sums = np.zeros(rounds)
    for table in tables:
        probs = table.sum(axis=0, dtype=np.float64)
        num_samples, probs = round(probs.sum()), probs / probs.sum()
        ones = rng.multinomial(round(share * num_samples), probs, size=rounds)
        others = rng.multinomial(num_samples - round(share * num_samples), probs**2 / (probs**2).sum(), size=rounds)
        total = ones + others
        expected = np.maximum(share * (1 - share) * total, 1e-12)
        sums += np.where(total > 0, (ones - share * total) ** 2 / expected, 0).sum(axis=1)
    return sums


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which tests fail, with a probability of any false alarm of at most `level` (Holm 1979)."""
    failed = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        failed[index] = True
    return failed


@dataclass(frozen=True)
class ProbabilityCalibration:
    """How often an event was sampled, against its stated probability."""

    num: int  # samples
    seen: int
    expected: float
    p: float  # two-sided
    smallest: float  # excess share of the event that is detected with 80 % power


def calibrate(samples: Sequence[tuple[bool, float]], *, level: float) -> ProbabilityCalibration | None:
    """Test samples (whether the event occurred, its stated probability); None if they are too certain to show anything.

    Samples of one text depend on each other, but each is unbiased given those before it, so the sum is a martingale
    and its variance the sum of p (1 - p).
    """
    variance = sum(prob * (1 - prob) for _, prob in samples)
    if variance < 10:  # too few for the normal approximation
        return None
    seen, expected = sum(occurred for occurred, _ in samples), sum(prob for _, prob in samples)
    score = abs(seen - expected) / math.sqrt(variance)
    normal = NormalDist()
    smallest = (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(0.8)) * math.sqrt(variance) / len(samples)
    return ProbabilityCalibration(len(samples), seen, expected, math.erfc(score / math.sqrt(2)), smallest)
