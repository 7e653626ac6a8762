"""What a head's law q is worth against the trunk's law p, a tile of rows at a time, with the gradient in the logits.

Each divergence takes the tile [m, N] of logits, q and p, writes over all three, and returns its value [m, 1], the
overlap alpha = sum min(p, q) [m, 1] and, if wanted, d value / d logits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.losses.chunked import Objective
from nextn.losses.teacher import Law, Laws

# Figures of a row: the value, the overlap, whether argmax q = argmax p, the label's negative log-likelihood.
VALUE, OVERLAP, FIGURES = 0, 1, 4
ETA = 3.0  # how fast the hybrid leaves KL for TV as the overlap grows (arXiv 2602.23881)


@dataclass(frozen=True, eq=False)
class _Tile:
    z: Tensor  # [m, N] logits over temperature, the largest of each row 0
    q: Tensor  # [m, N] their softmax
    law: Law
    label: Tensor  # [m, 1] where the label stands, -1 if the head cannot draft it
    log_mass: Tensor  # [m, 1] log sum exp z
    nll: Tensor  # [m, 1] of the label; 0 without one
    is_partial: bool  # p has mass outside of what the head drafts from


_Score = tuple[Tensor, Tensor, Tensor | None]


def scorer(name: str, laws: Laws, labels: Tensor, *, temperature: float) -> Objective:
    """The objective of rows with labels [M] (places in what the head drafts from, or -1), with `FIGURES`."""
    divergence, spare = _DIVERGENCES[name], torch.empty_like(laws.tile)

    def objective(logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        law, label = laws.of(rows), labels[rows, None]
        z = logits if temperature == 1 else logits.div_(temperature)
        top, best = z.max(-1, keepdim=True)
        q = torch.softmax(z.sub_(top), -1, out=spare[: len(z)])
        log_mass = -q.gather(1, best).log()
        nll = (log_mass - z.gather(1, label.clamp_min(0))).where(label >= 0, 0)
        tile = _Tile(z, q, law, label, log_mass, nll, is_partial=laws.shortlist is not None)
        value, overlap, gradient = divergence(tile, wants_grad)
        if gradient is not None and temperature != 1:
            gradient.div_(temperature)
        return torch.cat([value, overlap, (best == law.best).to(value.dtype), nll], dim=1), gradient

    return objective


def _ce(tile: _Tile, wants_grad: bool) -> _Score:
    overlap = _overlap(tile)
    if not wants_grad:
        return tile.nll, overlap, None
    has_label = (tile.label >= 0).to(tile.q.dtype)
    gradient = tile.q.mul_(has_label) if tile.is_partial else tile.q
    return tile.nll, overlap, gradient.scatter_add_(1, tile.label.clamp_min(0), -has_label)


def _kl(tile: _Tile, wants_grad: bool) -> _Score:
    value, overlap = _kl_value(tile), _overlap(tile)
    if not wants_grad:
        return value, overlap, None
    q = tile.q.mul_(tile.law.mass) if tile.is_partial else tile.q
    return value, overlap, q.sub_(tile.law.p)


def _reverse_kl(tile: _Tile, wants_grad: bool) -> _Score:
    """KL(q || p); a p that the dtype cannot hold counts as the least that it can, so that nothing is infinite."""
    p, q = tile.law.p, tile.q
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
    """-log alpha, whose gradient is TV's over alpha: no smaller where the laws hardly meet."""
    overlap = _overlap(tile)
    guarded = overlap.clamp_min(torch.finfo(overlap.dtype).tiny)
    if not wants_grad:
        return -guarded.log(), overlap, None
    below, share = _below(tile)
    return -guarded.log(), overlap, tile.q.mul_(share / guarded).sub_(below.div_(guarded))


def _lk_hybrid(tile: _Tile, wants_grad: bool) -> _Score:
    """lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha), which is taken for a constant."""
    kl, overlap = _kl_value(tile), _overlap(tile)
    lam = (-ETA * overlap).exp()
    value = lam * kl + (1 - lam) * (1 - overlap)
    if not wants_grad:
        return value, overlap, None
    below, share = _below(tile)
    p = torch.lerp(below, tile.law.p, lam, out=tile.law.p)
    return value, overlap, tile.q.mul_(torch.lerp(share, tile.law.mass, lam)).sub_(p)


def _kl_value(tile: _Tile) -> Tensor:
    """Sum of p log(p / q) over what the head drafts from; the logits are lost."""
    cross = tile.z.mul_(tile.law.p).sum(-1, keepdim=True)
    return tile.law.negentropy - cross + tile.law.mass * tile.log_mass


def _overlap(tile: _Tile) -> Tensor:
    """Leaves min(p, q) in the place of the logits."""
    return torch.minimum(tile.law.p, tile.q, out=tile.z).sum(-1, keepdim=True)


def _below(tile: _Tile) -> tuple[Tensor, Tensor]:
    """q where it is below p (there alone more of it adds overlap), in the place of min(p, q), and its sum [m, 1].

    d TV / d z = q (sum - [q < p]), as d alpha / d q = [q < p].
    """
    below = tile.z.lt_(tile.law.p).mul_(tile.q)
    return below, below.sum(-1, keepdim=True)


_DIVERGENCES: dict[str, Callable[[_Tile, bool], _Score]] = {
    "ce": _ce,
    "kl": _kl,
    "reverse-kl": _reverse_kl,
    "tv": _tv,
    "lk": _lk,
    "lk-hybrid": _lk_hybrid,
}
