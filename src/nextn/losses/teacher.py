"""The law that a head should have, made a block of columns at a time, so that all depths of a column share it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.losses.chunked import product_dtype


@dataclass(frozen=True, eq=False)
class Teacher:
    """hidden: the trunk's normed states [B, T, H], as its output head reads them; weight: that output head [V, H].

    temperature > 0 divides the trunk's and the head's logits alike: the law that is sampled when serving.
    """

    hidden: Tensor
    weight: Tensor
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class Law:
    """Of m rows: p [m, N] over what the head drafts from, free to be overwritten; all else is [m, 1].

    mass: sum of p (below 1 under a shortlist); negentropy: sum of p log p; best: where argmax p stands, -1 for outside.
    """

    p: Tensor
    mass: Tensor
    negentropy: Tensor
    best: Tensor


class Laws:
    """A teacher's laws at the ascending columns [M] (of B * T) of rows; tiles of rows are asked for in their order."""

    def __init__(
        self,
        teacher: Teacher,
        columns: Tensor,
        *,
        dtype: torch.dtype,
        tile: int,
        block: int,
        shortlist: Tensor | None = None,
    ) -> None:
        """dtype: of p; tile, block: how many rows are asked for, and columns made, at most; shortlist: ids [N]."""
        self.shortlist, self._temperature = shortlist, teacher.temperature
        self._states = teacher.hidden.detach().flatten(0, 1)
        self._weight = teacher.weight.detach().to(product_dtype(teacher.hidden, teacher.weight))
        self._columns, self._at = columns.unique_consecutive(return_inverse=True)
        self._places = self._at.tolist()  # on the host, once: no tile waits for the device
        self._made = range(0)
        block, vocabulary = min(block, len(self._columns)), len(self._weight)
        width = vocabulary if shortlist is None else len(shortlist)
        self._logits = self._weight.new_empty(block, vocabulary)
        self._laws = self._weight.new_empty(block, width, dtype=dtype)
        self._facts = self._laws.new_empty(block, 2)
        self._best = columns.new_empty(block, 1)
        self.tile = self._laws.new_empty(min(tile, len(columns)), width)  # of the rows asked for last

    def of(self, rows: slice) -> Law:
        """The law of each of the rows, in place of those given before."""
        first, last = self._places[rows.start], self._places[rows.stop - 1]
        if last not in self._made:
            self._make(range(first, min(first + len(self._laws), len(self._columns))))
        at = self._at[rows] - self._made.start
        mass, negentropy = self._facts[at].split(1, dim=1)
        p = torch.index_select(self._laws, 0, at, out=self.tile[: len(at)])
        return Law(p=p, mass=mass, negentropy=negentropy, best=self._best[at])

    def _make(self, places: range) -> None:
        self._made = places
        states = self._states[self._columns[places.start : places.stop]].to(self._weight.dtype)
        logits = torch.mm(states, self._weight.T, out=self._logits[: len(places)])
        for start in range(0, len(places), len(self.tile)):
            self._soften(logits[start : start + len(self.tile)], start)

    def _soften(self, logits: Tensor, start: int) -> None:
        """Logits [t, V] -> the laws and facts of the block's columns from `start` on."""
        at = slice(start, start + len(logits))
        scaled = logits.to(self._laws.dtype)
        if self._temperature != 1:
            scaled = scaled.div_(self._temperature)
        top, best = scaled.max(-1, keepdim=True)
        law = torch.softmax(scaled.sub_(top), -1)  # as of the head's logits, so that equal logits are equal laws
        log_mass = -law.gather(1, best).log()
        if self.shortlist is not None:
            law, scaled = law.index_select(1, self.shortlist), scaled.index_select(1, self.shortlist)
            best = places_in(self.shortlist, best)
        self._laws[at] = law
        mass = law.sum(-1, keepdim=True)
        negentropy = scaled.mul_(law).sum(-1, keepdim=True) - mass * log_mass
        self._facts[at] = torch.cat([mass, negentropy], dim=1)
        self._best[at] = best


def places_in(ids: Tensor, wanted: Tensor) -> Tensor:
    """Where each of wanted stands in the ascending ids [N]; -1 where it does not."""
    at = torch.searchsorted(ids, wanted).clamp_max(len(ids) - 1)
    return at.where(ids[at] == wanted, -1)
