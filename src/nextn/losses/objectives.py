"""The losses of a head against its frozen trunk's law, in chunks of the logits: what a draft is worth when served.

Column i of depth k predicts token i+k+1; the law it should have is the trunk's at column i+k. No gradient reaches the
trunk's side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.losses.chunked import Work, check_chunk, product_dtype, tile_rows, weighted_sum, wide_dtype
from nextn.losses.divergences import FIGURES, OVERLAP, VALUE, scorer
from nextn.losses.loss import IGNORE, Targets, denominators
from nextn.losses.teacher import Laws, Teacher, places_in

__all__ = ["OBJECTIVES", "HeadLoss", "Teacher", "head_loss"]

OBJECTIVES = ("ce", "kl", "reverse-kl", "tv", "lk", "lk-hybrid", "e2e-tv")


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """The loss to differentiate, and of what it was made, by depth 1..D; all but total add up over parts of a batch.

    sums: of the objective over the valid columns (for "e2e-tv" of 1 - alpha_1 ... alpha_k). overlap: of alpha = 1 - TV
    = sum min(p, q). match: columns whose argmax q is argmax p. nll: of the labels, in nats. All at the temperature.
    """

    total: Tensor  # scalar with gradient
    sums: Tensor  # [D] fp32 or wider, as are overlap and nll; detached
    counts: Tensor  # [D] int64, valid columns
    overlap: Tensor  # [D]
    match: Tensor  # [D] int64
    nll: Tensor  # [D]


def head_loss(
    hiddens: Sequence[Tensor],
    weights: Tensor | Sequence[Tensor],
    teacher: Teacher,
    targets: Targets,
    *,
    objective: str = "kl",
    depth_weights: Sequence[float] | None = None,
    chunk: int | None = None,
    denominator: Literal["valid", "tokens"] | Tensor = "valid",
    scale: float = 1.0,
    shortlist: Tensor | None = None,
) -> HeadLoss:
    """(scale / D) sum_k w_k sums_k / denominator_k of hiddens[k-1] [B, T-k, H] of depth k = 1..D.

    weights: output head [V, H] of all depths, or one each. denominator: the depth's own valid columns ("valid"), the
    trunk's ("tokens"), or a tensor [D], with which parts of a batch add up to the whole as in `loss.mtp_loss`.
    shortlist: ascending ids [N] that the head drafts from; weights are then these rows [N, H], p keeps its mass
    outside, and labels outside cost nothing. chunk: rows of logits that exist at a time; None: about 64 MB.
    Raises ConfigError for what does not fit together.
    """
    labels = [targets.labels(k) for k in range(1, len(hiddens) + 1)]
    outputs = [weights] * len(hiddens) if isinstance(weights, Tensor) else list(weights)
    shares = (1.0,) * len(hiddens) if depth_weights is None else tuple(depth_weights)
    _check(objective, hiddens, outputs, teacher, labels, shares, shortlist)
    check_chunk(chunk)
    counts = torch.stack([(wanted != IGNORE).sum() for wanted in labels])
    over = denominators(denominator, counts, (targets.labels(0) != IGNORE).sum())
    per_column = over.new_tensor(shares, dtype=wide_dtype(hiddens[0], outputs[0])) * (scale / len(hiddens)) / over
    batch = _Batch(teacher, _groups(hiddens, outputs, labels), chunk=chunk, shortlist=shortlist)
    scales = per_column.where(counts > 0, 0).expand(labels[0].shape[0] * (labels[0].shape[1] + 1), -1)
    total, table = _score_chain(batch, scales) if objective == "e2e-tv" else batch.score(objective, scales)
    sums, overlap, match, nll = table.sum(0).unbind(-1)
    return HeadLoss(total=total, sums=sums, counts=counts, overlap=overlap, match=match.round().long(), nll=nll)


@dataclass(frozen=True, eq=False)
class _Group:
    """Depths that share an output weight, with M valid rows in the order of the teacher's columns."""

    hidden: Tensor  # [N, H] of all its depths, with gradient
    weight: Tensor
    rows: Tensor  # [M] into hidden
    depths: Tensor  # [M] from 0
    columns: Tensor  # [M] of B * T
    labels: Tensor  # [M]


def _groups(hiddens: Sequence[Tensor], outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[_Group]:
    shared = {id(weight): weight for weight in outputs}.values()
    return [
        _group([k for k, each in enumerate(outputs) if each is weight], weight, hiddens, labels) for weight in shared
    ]


def _group(depths: list[int], weight: Tensor, hiddens: Sequence[Tensor], labels: Sequence[Tensor]) -> _Group:
    wanted = torch.cat([labels[k].flatten() for k in depths])
    length = labels[0].shape[1] + 1
    columns = torch.cat([_columns(labels[k], length).flatten() for k in depths])
    depth = torch.cat([labels[k].new_full((labels[k].numel(),), k) for k in depths])
    rows = (wanted != IGNORE).nonzero()[:, 0]
    rows = rows[(columns + depth)[rows].argsort(stable=True)]
    hidden = torch.cat([hiddens[k].flatten(0, 1) for k in depths])
    return _Group(hidden, weight, rows, depth[rows], columns[rows], wanted[rows])


def _columns(labels: Tensor, length: int) -> Tensor:
    """Number the columns of labels [B, T-k] as those of [B, T]."""
    rows, columns = (torch.arange(n, device=labels.device) for n in labels.shape)
    return rows[:, None] * length + columns


@dataclass(frozen=True, eq=False)
class _Batch:
    teacher: Teacher
    groups: list[_Group]
    chunk: int | None
    shortlist: Tensor | None

    def score(self, name: str, per_column: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of per_column [B * T, D] * divergence, and a table [B * T, D, F] of figures; 0 where none is valid."""
        total, table = per_column.new_zeros(()), per_column.new_zeros(*per_column.shape, FIGURES)
        for group in self.groups:
            part, figures = self._score(group, name, per_column[group.columns, group.depths])
            total = total + part
            table[group.columns, group.depths] = figures
        return total, table

    def _score(self, group: _Group, name: str, scale: Tensor) -> tuple[Tensor, Tensor]:
        tile, block = self._sizes(group)
        laws = Laws(
            self.teacher,
            group.columns + group.depths + 1,
            dtype=torch.promote_types(product_dtype(group.hidden, group.weight), torch.float32),
            tile=tile,
            block=block,
            shortlist=self.shortlist,
        )
        labels = group.labels if self.shortlist is None else places_in(self.shortlist, group.labels)
        work = Work(
            rows=group.rows,
            scale=scale[:, None],
            objective=scorer(name, laws, labels, temperature=self.teacher.temperature),
            chunk=self.chunk,
            figures=FIGURES,
            tile=tile,
        )
        return weighted_sum(group.hidden, group.weight, work)

    def _sizes(self, group: _Group) -> tuple[int, int]:
        """Rows of a tile, columns of a block. Three tiles live beside it: on a GPU each is a quarter of the loss's."""
        device = group.hidden.device
        tile = tile_rows(len(self.teacher.weight), torch.float32, device)
        tile = max(1, tile // (1 if device.type == "cpu" else 4))
        return min(tile, self.chunk or tile), min(2 * tile, self.chunk or 2 * tile)


def _score_chain(batch: _Batch, per_column: Tensor) -> tuple[Tensor, Tensor]:
    """1 - alpha_1 ... alpha_k of each column (arXiv 2606.12370, eq. 13): overlaps first, then TV times its slope.

    A depth without a label is no link of its column's chain.
    """
    with torch.no_grad():
        _, table = batch.score("tv", per_column)
    valid = torch.zeros_like(per_column, dtype=torch.bool)
    for group in batch.groups:
        valid[group.columns, group.depths] = True
    overlaps = table[..., OVERLAP].where(valid, 1)
    table[..., VALUE] = (1 - overlaps.cumprod(1)).where(valid, 0)
    value = (table[..., VALUE] * per_column).sum()
    if not torch.is_grad_enabled():
        return value, table
    linear, _ = batch.score("tv", _chain_slopes(overlaps, per_column * valid))
    return value + (linear - linear.detach()), table


def _chain_slopes(overlaps: Tensor, scales: Tensor) -> Tensor:
    """d sum_j scales_j (1 - alpha_1 ... alpha_j) / d TV_k of [C, D] -> [C, D]."""
    slopes, tail = torch.empty_like(overlaps), torch.zeros_like(overlaps[:, 0])
    before = torch.nn.functional.pad(overlaps[:, :-1].cumprod(1), (1, 0), value=1.0)
    for k in reversed(range(overlaps.shape[1])):
        tail = tail + scales[:, k]  # of all depths from k on, what their survival from k + 1 on weighs
        slopes[:, k] = before[:, k] * tail
        tail = tail * overlaps[:, k]
    return slopes


def _check(
    objective: str,
    hiddens: Sequence[Tensor],
    outputs: Sequence[Tensor],
    teacher: Teacher,
    labels: Sequence[Tensor],
    shares: Sequence[float],
    shortlist: Tensor | None,
) -> None:
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective {objective!r} is unknown. Use one of {', '.join(OBJECTIVES)}.")
    if not hiddens or not len(hiddens) == len(outputs) == len(shares):
        raise ConfigError(
            f"{len(hiddens)} hiddens, {len(outputs)} weights and {len(shares)} depth weights: one of each per depth, "
            "and one depth at least, are needed."
        )
    if not 0 < teacher.temperature < float("inf"):
        raise ConfigError(f"temperature {teacher.temperature} has no law. Give a number > 0; 1 is the model's own law.")
    for k, (hidden, wanted) in enumerate(zip(hiddens, labels, strict=True), start=1):
        if hidden.shape[:-1] != wanted.shape:
            raise ConfigError(
                f"hidden of depth {k} is {tuple(hidden.shape)}; [B, T-{k}] = {tuple(wanted.shape)} is needed."
            )
    rows, length = labels[0].shape
    if tuple(teacher.hidden.shape[:-1]) != (rows, length + 1):
        raise ConfigError(
            f"the teacher's hidden is {tuple(teacher.hidden.shape)}; [B, T] = {(rows, length + 1)} is needed."
        )
    drafted = len(teacher.weight) if shortlist is None else len(shortlist)
    for weight in outputs:
        if len(weight) != drafted:
            raise ConfigError(f"an output weight is {tuple(weight.shape)}; the head drafts from {drafted} tokens.")
