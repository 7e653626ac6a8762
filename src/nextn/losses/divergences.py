"""Divergences between a head's distribution q and the trunk's p, its target, a tile of rows at a time, with gradients.

The trunk's distribution is computed a block of positions at a time and shared by all depths. Each divergence takes the
tile [m, N] of logits, q and p, overwrites all three, and returns its value [m, 1], the overlap alpha = sum min(p, q)
[m, 1] and, if needed, d value / d logits.

Over a part of the vocabulary, frequent tokens are kept, and others are drawn at random to stand for the rest: with n of
the R that are not kept, log(R / n) is added to the logits of both, so sums over the rest are estimated without bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor
from torch.nn import functional

from nextn.losses.chunked import Objective, product_dtype
from nextn.losses.mtp_loss import Targets

# Values of a row: the divergence, the overlap, whether argmax q = argmax p, the label's negative log-likelihood.
VALUE, OVERLAP, NUM_VALUES = 0, 1, 4
ETA = 3.0  # how fast the hybrid moves from KL to TV as the overlap grows (arXiv 2602.23881)
_COLUMNS = 8  # products with an odd number of columns are slow


@dataclass(frozen=True, eq=False)
class Teacher:
    """The trunk's side of a distillation loss."""

    hidden: Tensor  # [B, T, H], the trunk's final_hidden
    weight: Tensor  # [V, H], its lm_head
    temperature: float = 1.0  # > 0; divides the trunk's and the head's logits, to match sampling when serving
    cap: float | None = None  # of the trunk's logits z, which are cap * tanh(z / cap) then, before the temperature
    head_cap: float | None = None  # of the head's


@dataclass(frozen=True, eq=False)
class TeacherDistribution:
    """The trunk's distributions for m rows."""

    p: Tensor  # [m, N]; may be overwritten
    mass: Tensor  # [m, 1], sum of p: 1, except for rounding
    negentropy: Tensor  # [m, 1], sum of p log p
    best: Tensor  # [m, 1], index of argmax p


class TeacherBatch:
    """A teacher's distributions at the ascending positions [M] (of B * T) of rows; tiles must be requested in order."""

    def __init__(self, teacher: Teacher, positions: Tensor, *, dtype: torch.dtype, tile: int, block: int) -> None:
        """Allocate the buffers for rows at `positions` [M], at most `tile` a request and `block` computed at a time."""
        self._temperature, self._cap = teacher.temperature, teacher.cap
        self._states = teacher.hidden.detach().flatten(0, 1)
        self._weight = teacher.weight.detach().to(product_dtype(teacher.hidden, teacher.weight))
        self._positions, self._position_of = positions.unique_consecutive(return_inverse=True)
        self._position_list = self._position_of.tolist()  # copied to the host once, so that no tile synchronizes
        self._current = range(0)
        block, vocabulary = min(block, len(self._positions)), len(self._weight)
        self._logits = self._weight.new_empty(block, vocabulary)
        self._probs = self._weight.new_empty(block, vocabulary, dtype=dtype)
        self._stats = self._probs.new_empty(block, 2)
        self._best = positions.new_empty(block, 1)
        self.tile = self._probs.new_empty(min(tile, len(positions)), vocabulary)  # of the last request

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
        if self._cap is not None:
            scaled = scaled.div_(self._cap).tanh_().mul_(self._cap)
        if self._temperature != 1:
            scaled = scaled.div_(self._temperature)
        top, best = scaled.max(-1, keepdim=True)
        probs = torch.softmax(scaled.sub_(top), -1)  # as for the head: equal logits give equal probs
        log_mass = -probs.gather(1, best).log()
        self._probs[index] = probs
        mass = probs.sum(-1, keepdim=True)
        negentropy = scaled.mul_(probs).sum(-1, keepdim=True) - mass * log_mass
        self._stats[index] = torch.cat([mass, negentropy], dim=1)
        self._best[index] = best


@dataclass(frozen=True, eq=False)
class _Tile:
    z: Tensor  # [m, N] logits over temperature, the largest of each row 0
    q: Tensor  # [m, N] their softmax
    probs: TeacherDistribution
    label: Tensor  # [m, 1] index of the label
    log_mass: Tensor  # [m, 1] log sum exp z
    nll: Tensor  # [m, 1] of the label


_Score = tuple[Tensor, Tensor, Tensor | None]


def scorer(name: str, distributions: TeacherBatch, labels: Tensor, *, teacher: Teacher) -> Objective:
    """Build the objective of rows with labels [M]."""
    temperature, cap = teacher.temperature, teacher.head_cap
    divergence, buffer = _DIVERGENCES[name], torch.empty_like(distributions.tile)

    def objective(logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        probs, label = distributions.distribution(rows), labels[rows, None]
        z, slope = logits, None
        if cap is not None:
            z = logits.div_(cap).tanh_()
            slope = 1 - z.square()
            z.mul_(cap)
        z = z if temperature == 1 else z.div_(temperature)
        top, best = z.max(-1, keepdim=True)
        q = torch.softmax(z.sub_(top), -1, out=buffer[: len(z)])
        log_mass = -q.gather(1, best).log()
        tile = _Tile(z, q, probs, label, log_mass, nll=log_mass - z.gather(1, label))
        value, overlap, gradient = divergence(tile, wants_grad)
        if gradient is not None and temperature != 1:
            gradient.div_(temperature)
        if gradient is not None and slope is not None:
            gradient.mul_(slope)
        return torch.cat([value, overlap, (best == probs.best).to(value.dtype), tile.nll], dim=1), gradient

    return objective


def _ce(tile: _Tile, wants_grad: bool) -> _Score:
    overlap = _overlap(tile)
    if not wants_grad:
        return tile.nll, overlap, None
    return tile.nll, overlap, tile.q.scatter_add_(1, tile.label, torch.full_like(tile.nll, -1))


def _kl(tile: _Tile, wants_grad: bool) -> _Score:
    value, overlap = _kl_value(tile), _overlap(tile)
    if not wants_grad:
        return value, overlap, None
    return value, overlap, tile.q.sub_(tile.probs.p)


def _reverse_kl(tile: _Tile, wants_grad: bool) -> _Score:
    """KL(q || p); p is clamped to the dtype's smallest normal number, so that nothing is infinite."""
    p, q = tile.probs.p, tile.q
    overlap = torch.minimum(p, q).sum(-1, keepdim=True)
    log_ratio = tile.z.sub_(tile.log_mass).sub_(p.clamp_min_(torch.finfo(p.dtype).tiny).log_())
    terms = torch.mul(q, log_ratio, out=p)
    value = terms.sum(-1, keepdim=True)
    return value, overlap, terms.sub_(q.mul_(value)) if wants_grad else None


def _tv(tile: _Tile, wants_grad: bool) -> _Score:
    overlap = _overlap(tile)
    if not wants_grad:
        return 1 - overlap, overlap, None
    below, share = _below(tile)
    return 1 - overlap, overlap, tile.q.mul_(share).sub_(below)


def _lk(tile: _Tile, wants_grad: bool) -> _Score:
    """-log alpha, whose gradient is TV's divided by alpha: it does not vanish where p and q hardly overlap."""
    overlap = _overlap(tile)
    guarded = overlap.clamp_min(torch.finfo(overlap.dtype).tiny)
    if not wants_grad:
        return -guarded.log(), overlap, None
    below, share = _below(tile)
    return -guarded.log(), overlap, tile.q.mul_(share / guarded).sub_(below.div_(guarded))


def _lk_hybrid(tile: _Tile, wants_grad: bool) -> _Score:
    """lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha), which is treated as a constant."""
    kl, overlap = _kl_value(tile), _overlap(tile)
    lam = (-ETA * overlap).exp()
    value = lam * kl + (1 - lam) * (1 - overlap)
    if not wants_grad:
        return value, overlap, None
    below, share = _below(tile)
    p = torch.lerp(below, tile.probs.p, lam, out=tile.probs.p)
    return value, overlap, tile.q.mul_(torch.lerp(share, tile.probs.mass, lam)).sub_(p)


def _kl_value(tile: _Tile) -> Tensor:
    """Sum of p log(p / q); overwrites the logits."""
    cross = tile.z.mul_(tile.probs.p).sum(-1, keepdim=True)
    return tile.probs.negentropy - cross + tile.probs.mass * tile.log_mass


def _overlap(tile: _Tile) -> Tensor:
    """Sum of min(p, q), which overwrites the logits."""
    return torch.minimum(tile.probs.p, tile.q, out=tile.z).sum(-1, keepdim=True)


def _below(tile: _Tile) -> tuple[Tensor, Tensor]:
    """q where q < p, else 0, which overwrites min(p, q); and its sum [m, 1].

    d TV / d z = q (sum - [q < p]), as d alpha / d q = [q < p].
    """
    below = tile.z.lt_(tile.probs.p).mul_(tile.q)
    return below, below.sum(-1, keepdim=True)


_DIVERGENCES: dict[str, Callable[[_Tile, bool], _Score]] = {
    "ce": _ce,
    "kl": _kl,
    "reverse-kl": _reverse_kl,
    "tv": _tv,
    "lk": _lk,
    "lk-hybrid": _lk_hybrid,
}


@dataclass(frozen=True, eq=False)
class SampledVocabulary:
    """The tokens of one batch's loss."""

    ids: Tensor  # [N] int64, ascending
    offsets: Tensor  # [N] fp32, log of how many tokens each stands for

    @classmethod
    def of(cls, tokens: Tensor, frequent: Tensor, num_drawn: int, *, vocab_size: int, seed: int) -> "SampledVocabulary":
        """Take the batch's tokens, the frequent ones, and `num_drawn` of the others: the same for the same batch."""
        kept = torch.zeros(vocab_size, dtype=torch.bool)
        kept[frequent] = True
        kept[tokens.flatten().cpu()] = True
        others = (~kept).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(seed + int(tokens.sum()))
        drawn = others[torch.randperm(len(others), generator=generator)[:num_drawn]]
        offsets = torch.zeros(vocab_size)
        if len(drawn):
            offsets[drawn] = log(len(others) / len(drawn))
        kept[drawn] = True
        ids = kept.nonzero()[:, 0]
        return cls(ids.to(tokens.device), offsets[ids].to(tokens.device))

    def targets(self, targets: Targets) -> Targets:
        """Number the tokens by their places in `ids`; every token of the batch has one."""
        return replace(targets, tokens=torch.searchsorted(self.ids, targets.tokens))

    def weights(self, weights: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Return rows [N, H + 8] of each lm_head weight [V, H], with the offsets as the first further column."""
        column = functional.pad(self.offsets[:, None] * temperature, (0, _COLUMNS - 1))
        rows = {id(each): torch.cat([each[self.ids], column.to(each)], dim=1) for each in weights}
        return [rows[id(each)] for each in weights]

    def inputs(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return states [..., H + 8], for products with `weights`."""
        return [
            torch.cat([state, functional.pad(torch.ones_like(state[..., :1]), (0, _COLUMNS - 1))], dim=-1)
            for state in states
        ]
