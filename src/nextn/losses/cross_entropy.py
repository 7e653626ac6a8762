"""Cross-entropy of labels, in chunks of the logits."""

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.losses.chunked import Objective, SelectedRows, check_chunk, weighted_sum, wide_dtype

IGNORE = -100


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    row_weights: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of row_weights * nll over the rows of hidden [N, H], and nll [N], detached; weight is [V, H].

    Both are fp32 (fp64 for fp64). Rows labeled IGNORE cost nothing and have nll 0. Gradients of hidden and weight, if
    required, are computed in the forward pass; no more than `chunk` rows of logits exist at a time.
    """
    if labels.shape != hidden.shape[:1] or (row_weights is not None and row_weights.shape != labels.shape):
        raise ConfigError(
            f"labels {tuple(labels.shape)} and row weights need one number per row of hidden {tuple(hidden.shape)}."
        )
    check_chunk(chunk)
    rows = (labels != IGNORE).nonzero()[:, 0]
    scale = torch.ones_like(rows) if row_weights is None else row_weights[rows]
    scale = scale[:, None].to(wide_dtype(hidden, weight))
    selected = SelectedRows(rows=rows, scale=scale, objective=_label_nll(labels[rows]), chunk=chunk)
    total, values = weighted_sum(hidden, weight, selected)
    return total, values.new_zeros(len(hidden)).index_copy(0, rows, values[:, 0])


def _label_nll(labels: Tensor) -> Objective:
    def objective(logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        label = labels[rows, None]
        chosen = logits.gather(1, label)
        top = logits.amax(-1, keepdim=True)
        mass = logits.sub_(top).exp_().sum(-1, keepdim=True)
        nll = mass.log() + (top - chosen)
        if not wants_grad:
            return nll, None
        return nll, logits.div_(mass).scatter_add_(1, label, torch.full_like(chosen, -1))

    return objective
