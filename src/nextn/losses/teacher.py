"""The trunk's distribution as a head's target, computed a block of positions at a time and shared by all depths."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.losses.chunked import product_dtype


@dataclass(frozen=True, eq=False)
class Teacher:
    """The trunk's side of a distillation loss."""

    hidden: Tensor  # [B, T, H], the trunk's final_hidden
    weight: Tensor  # [V, H], its lm_head
    temperature: float = 1.0  # > 0; divides the trunk's and the head's logits, to match sampling when serving


@dataclass(frozen=True, eq=False)
class TeacherDistribution:
    """The trunk's distributions for m rows, over what the head drafts from."""

    p: Tensor  # [m, N]; may be overwritten
    mass: Tensor  # [m, 1], sum of p: below 1 with a draft vocabulary
    negentropy: Tensor  # [m, 1], sum of p log p
    best: Tensor  # [m, 1], index of argmax p; -1 if the head cannot draft it


class TeacherBatch:
    """A teacher's distributions at the ascending positions [M] (of B * T) of rows; tiles must be requested in order."""

    def __init__(
        self,
        teacher: Teacher,
        positions: Tensor,
        *,
        dtype: torch.dtype,
        tile: int,
        block: int,
        draft_vocabulary: Tensor | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            teacher: The trunk's side.
            positions: [M], the position of each row.
            dtype: Of p.
            tile: The most rows per request.
            block: The most positions computed at a time.
            draft_vocabulary: Ascending ids [N]; None: the whole vocabulary.
        """
        self.draft_vocabulary, self._temperature = draft_vocabulary, teacher.temperature
        self._states = teacher.hidden.detach().flatten(0, 1)
        self._weight = teacher.weight.detach().to(product_dtype(teacher.hidden, teacher.weight))
        self._positions, self._position_of = positions.unique_consecutive(return_inverse=True)
        self._position_list = self._position_of.tolist()  # copied to the host once, so that no tile synchronizes
        self._current = range(0)
        block, vocabulary = min(block, len(self._positions)), len(self._weight)
        width = vocabulary if draft_vocabulary is None else len(draft_vocabulary)
        self._logits = self._weight.new_empty(block, vocabulary)
        self._probs = self._weight.new_empty(block, width, dtype=dtype)
        self._stats = self._probs.new_empty(block, 2)
        self._best = positions.new_empty(block, 1)
        self.tile = self._probs.new_empty(min(tile, len(positions)), width)  # of the last request

    def distribution(self, rows: slice) -> TeacherDistribution:
        """Return the distributions of the rows; they overwrite those returned before."""
        first, last = self._position_list[rows.start], self._position_list[rows.stop - 1]
        if last not in self._current:
            self._compute_block(range(first, min(first + len(self._probs), len(self._positions))))
        index = self._position_of[rows] - self._current.start
        mass, negentropy = self._stats[index].split(1, dim=1)
        p = torch.index_select(self._probs, 0, index, out=self.tile[: len(index)])
        return TeacherDistribution(p=p, mass=mass, negentropy=negentropy, best=self._best[index])

    def _compute_block(self, block: range) -> None:
        self._current = block
        states = self._states[self._positions[block.start : block.stop]].to(self._weight.dtype)
        logits = torch.mm(states, self._weight.T, out=self._logits[: len(block)])
        for start in range(0, len(block), len(self.tile)):
            self._store_probs(logits[start : start + len(self.tile)], start)

    def _store_probs(self, logits: Tensor, start: int) -> None:
        """Store probabilities and statistics of logits [t, V] for the block's positions from `start` on."""
        index = slice(start, start + len(logits))
        scaled = logits.to(self._probs.dtype)
        if self._temperature != 1:
            scaled = scaled.div_(self._temperature)
        top, best = scaled.max(-1, keepdim=True)
        probs = torch.softmax(
            scaled.sub_(top), -1
        )  # computed as for the head's logits, so that equal logits give equal probs
        log_mass = -probs.gather(1, best).log()
        if self.draft_vocabulary is not None:
            probs, scaled = probs.index_select(1, self.draft_vocabulary), scaled.index_select(1, self.draft_vocabulary)
            best = index_in(self.draft_vocabulary, best)
        self._probs[index] = probs
        mass = probs.sum(-1, keepdim=True)
        negentropy = scaled.mul_(probs).sum(-1, keepdim=True) - mass * log_mass
        self._stats[index] = torch.cat([mass, negentropy], dim=1)
        self._best[index] = best


def index_in(ids: Tensor, tokens: Tensor) -> Tensor:
    """Return the index of each token in the ascending ids [N]; -1 where it is not in them."""
    index = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
    return index.where(ids[index] == tokens, -1)
