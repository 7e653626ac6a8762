"""Distillation losses of a head on its frozen trunk's distribution, in chunks of the logits.

Position i of depth k predicts token i+k+1; its target is the trunk's distribution at position i+k. No gradient reaches
the trunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.losses.chunked import IGNORE, SelectedRows, check_chunk, product_dtype, tile_rows, weighted_sum, wide_dtype
from nextn.losses.divergences import NUM_VALUES, OVERLAP, VALUE, Teacher, TeacherBatch, scorer
from nextn.losses.mtp_loss import Targets, denominators

OBJECTIVES = ("ce", "kl", "reverse-kl", "tv", "lk", "lk-hybrid", "e2e-tv")


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """The loss to differentiate, and sums by depth 1..D, which add up over parts of a batch.

    Sums are over valid positions, at the teacher's temperature, detached, and in fp32 or wider.
    """

    total: Tensor  # scalar with gradient
    sums: Tensor  # [D], of the objective (for "e2e-tv": of 1 - alpha_1 ... alpha_k)
    counts: Tensor  # [D] int64, valid positions
    overlap: Tensor  # [D], of alpha = 1 - TV = sum min(p, q)
    match: Tensor  # [D] int64, positions whose argmax q is argmax p
    nll: Tensor  # [D], of the labels, in nats


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
) -> HeadLoss:
    """Compute (scale / D) sum_k w_k sums_k / denominator_k over depths k = 1..D. Raises ConfigError.

    `hiddens` are final_hidden [B, T-k, H] of each depth, `weights` the lm_head [V, H] of all depths, or one for each,
    and `depth_weights` the w_k (None: all 1). `chunk` rows of logits exist at a time; None: about 64 MB. The
    denominator is the depth's own number of valid positions ("valid"), the trunk's ("tokens"), or a tensor [D], with
    which the losses of parts of a batch add up to that of the whole, as in `mtp_loss`.
    """
    labels = [targets.labels(k) for k in range(1, len(hiddens) + 1)]
    outputs = [weights] * len(hiddens) if isinstance(weights, Tensor) else list(weights)
    weights_by_depth = (1.0,) * len(hiddens) if depth_weights is None else tuple(depth_weights)
    _check(objective, hiddens, outputs, teacher, labels, weights_by_depth)
    check_chunk(chunk)
    counts = torch.stack([(label != IGNORE).sum() for label in labels])
    divisors = denominators(denominator, counts, (targets.labels(0) != IGNORE).sum())
    dtype = wide_dtype(hiddens[0], outputs[0])
    row_weights = divisors.new_tensor(weights_by_depth, dtype=dtype) * (scale / len(hiddens)) / divisors
    batch = _DistillationBatch(teacher, _group_by_weight(hiddens, outputs, labels), chunk=chunk)
    scales = row_weights.where(counts > 0, 0).expand(labels[0].shape[0] * (labels[0].shape[1] + 1), -1)
    total, table = _score_chain(batch, scales) if objective == "e2e-tv" else batch.score(objective, scales)
    sums, overlap, match, nll = table.sum(0).unbind(-1)
    return HeadLoss(total=total, sums=sums, counts=counts, overlap=overlap, match=match.round().long(), nll=nll)


@dataclass(frozen=True, eq=False)
class _Group:
    """Depths that share an lm_head weight, with M valid rows in the order of the teacher's positions."""

    hidden: Tensor  # [N, H] of all its depths, with gradient
    weight: Tensor
    rows: Tensor  # [M] into hidden
    depths: Tensor  # [M] from 0
    positions: Tensor  # [M] of B * T
    labels: Tensor  # [M]


def _group_by_weight(hiddens: Sequence[Tensor], outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[_Group]:
    groups = []
    for shared in {id(weight): weight for weight in outputs}.values():
        depths = [k for k, weight in enumerate(outputs) if weight is shared]
        groups.append(_new_group(depths, shared, hiddens, labels))
    return groups


def _new_group(depths: list[int], weight: Tensor, hiddens: Sequence[Tensor], labels: Sequence[Tensor]) -> _Group:
    label = torch.cat([labels[k].flatten() for k in depths])
    length = labels[0].shape[1] + 1
    positions = torch.cat([_flat_positions(labels[k], length).flatten() for k in depths])
    depth = torch.cat([labels[k].new_full((labels[k].numel(),), k) for k in depths])
    rows = (label != IGNORE).nonzero()[:, 0]
    rows = rows[(positions + depth)[rows].argsort(stable=True)]
    hidden = torch.cat([hiddens[k].flatten(0, 1) for k in depths])
    return _Group(hidden, weight, rows, depth[rows], positions[rows], label[rows])


def _flat_positions(labels: Tensor, length: int) -> Tensor:
    """Return the indices into [B * T] of labels [B, T-k]."""
    rows, positions = (torch.arange(n, device=labels.device) for n in labels.shape)
    return rows[:, None] * length + positions


@dataclass(frozen=True, eq=False)
class _DistillationBatch:
    teacher: Teacher
    groups: list[_Group]
    chunk: int | None

    def score(self, name: str, weights_by_position: Tensor) -> tuple[Tensor, Tensor]:
        """Sum weights_by_position [B * T, D] * divergence; also return all values [B * T, D, F], 0 where invalid."""
        total, table = (
            weights_by_position.new_zeros(()),
            weights_by_position.new_zeros(*weights_by_position.shape, NUM_VALUES),
        )
        for group in self.groups:
            part, values = self._score(group, name, weights_by_position[group.positions, group.depths])
            total = total + part
            table[group.positions, group.depths] = values
        return total, table

    def _score(self, group: _Group, name: str, scale: Tensor) -> tuple[Tensor, Tensor]:
        tile, block = self._sizes(group)
        distributions = TeacherBatch(
            self.teacher,
            group.positions + group.depths + 1,
            dtype=torch.promote_types(product_dtype(group.hidden, group.weight), torch.float32),
            tile=tile,
            block=block,
        )
        work = SelectedRows(
            rows=group.rows,
            scale=scale[:, None],
            objective=scorer(name, distributions, group.labels, teacher=self.teacher),
            chunk=self.chunk,
            num_values=NUM_VALUES,
            tile=tile,
        )
        return weighted_sum(group.hidden, group.weight, work)

    def _sizes(self, group: _Group) -> tuple[int, int]:
        """Rows of a tile, positions of a block. There are four tiles at a time: on a GPU each gets a quarter."""
        device = group.hidden.device
        tile = tile_rows(len(self.teacher.weight), torch.float32, device)
        tile = max(1, tile // (1 if device.type == "cpu" else 4))
        return min(tile, self.chunk or tile), min(2 * tile, self.chunk or 2 * tile)


def _score_chain(batch: _DistillationBatch, weights_by_position: Tensor) -> tuple[Tensor, Tensor]:
    """1 - alpha_1 ... alpha_k at each position (arXiv 2606.12370, eq. 13): overlaps first, then TV times its slope.

    A depth without a label is left out of its position's chain.
    """
    with torch.no_grad():
        _, table = batch.score("tv", weights_by_position)
    valid = torch.zeros_like(weights_by_position, dtype=torch.bool)
    for group in batch.groups:
        valid[group.positions, group.depths] = True
    alphas = table[..., OVERLAP].where(valid, 1)
    table[..., VALUE] = (1 - alphas.cumprod(1)).where(valid, 0)
    value = (table[..., VALUE] * weights_by_position).sum()
    if not torch.is_grad_enabled():
        return value, table
    linear, _ = batch.score("tv", _chain_slopes(alphas, weights_by_position * valid))
    return value + (linear - linear.detach()), table


def _chain_slopes(alphas: Tensor, scales: Tensor) -> Tensor:
    """d sum_j scales_j (1 - alpha_1 ... alpha_j) / d TV_k of [C, D] -> [C, D]."""
    slopes, tail = torch.empty_like(alphas), torch.zeros_like(alphas[:, 0])
    before = torch.nn.functional.pad(alphas[:, :-1].cumprod(1), (1, 0), value=1.0)
    for k in reversed(range(alphas.shape[1])):
        tail = tail + scales[:, k]  # sum over j >= k of scales_j alpha_{k+1} ... alpha_j
        slopes[:, k] = before[:, k] * tail
        tail = tail * alphas[:, k]
    return slopes


def _check(
    objective: str,
    hiddens: Sequence[Tensor],
    outputs: Sequence[Tensor],
    teacher: Teacher,
    labels: Sequence[Tensor],
    weights_by_depth: Sequence[float],
) -> None:
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective {objective!r} is unknown. Use one of {', '.join(OBJECTIVES)}.")
    if not hiddens or not len(hiddens) == len(outputs) == len(weights_by_depth):
        raise ConfigError(
            f"{len(hiddens)} hiddens, {len(outputs)} weights and {len(weights_by_depth)} depth weights; expected "
            "one of each per depth, and at least one depth."
        )
    if not 0 < teacher.temperature < float("inf"):
        message = f"temperature {teacher.temperature}: expected a finite number > 0; 1 keeps the model's probs."
        raise ConfigError(message)
    for k, (hidden, label) in enumerate(zip(hiddens, labels, strict=True), start=1):
        if hidden.shape[:-1] != label.shape:
            expected = f"[B, T-{k}] = {tuple(label.shape)}"
            raise ConfigError(f"hidden of depth {k} is {tuple(hidden.shape)}; {expected} is needed.")
    rows, length = labels[0].shape
    if tuple(teacher.hidden.shape[:-1]) != (rows, length + 1):
        message = f"the teacher's hidden is {tuple(teacher.hidden.shape)}; [B, T] = {(rows, length + 1)} is needed."
        raise ConfigError(message)
    for weight in outputs:
        if len(weight) != len(teacher.weight):
            shape = tuple(weight.shape)
            raise ConfigError(f"an lm_head weight is {shape}; the trunk has {len(teacher.weight)} tokens.")
