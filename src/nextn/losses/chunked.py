"""Weighted sums of a value per row of logits, a chunk of logits at a time; gradients are computed in the forward pass.

Knows no models: an `Objective`, such as that of `cross_entropy`, maps rows of logits to values, and `SelectedRows` says
which rows count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nextn.errors import ConfigError

# (logits [m, V] in fp32 or wider, the slice of SelectedRows.rows that they belong to, whether the gradient is needed)
#   -> values [m, F], d (first value) / d logits [m, V] or None. The logits may be overwritten.
Objective = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """The rows of hidden states that count, their weights, and the objective of their logits."""

    rows: Tensor  # [M], indices
    scale: Tensor  # [M, 1], weights in the sum
    objective: Objective
    chunk: int | None  # rows of logits that are computed at a time; None: by memory
    num_values: int = 1  # F, of each row, that the objective returns
    tile: int | None = None  # rows of a chunk that are passed to the objective at a time; None: by cache size


def check_chunk(chunk: int | None) -> None:
    """Raise ConfigError if chunk is not a number of rows."""
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk} is not a number of rows. Give 1 or more, or None for about 64 MB of logits.")


def weighted_sum(hidden: Tensor, weight: Tensor, selected: SelectedRows) -> tuple[Tensor, Tensor]:
    """Sum scale * first value over the selected rows of hidden [N, H] @ weight.T [H, V], with gradients of both.

    Return the sum, and all values [M, F], detached; fp32 (fp64 for fp64).
    """
    total, values = _ChunkedSum.apply(hidden, weight, selected, torch.is_grad_enabled())
    return total, values


class _ChunkedSum(torch.autograd.Function):
    """Sum of scale * objective(hidden @ weight.T): forward computes the gradients, backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, selected: SelectedRows, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        wide = selected.scale.dtype
        values = selected.scale.new_zeros(len(selected.rows), selected.num_values)
        grad_hidden = torch.zeros_like(hidden) if needs_grad and hidden.requires_grad else None
        # fp32 also for a bf16 weight: after 128 chunks a bf16 sum was 1.7 % off, an fp32 one 0.24 % (bf16 products).
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad and weight.requires_grad else None
        dtype = product_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            _fill(hidden, weight.to(dtype), selected, values=values, grad_hidden=grad_hidden, grad_weight=grad_weight)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(values)
        return (values[:, :1] * selected.scale).sum(), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        return *(None if grad is None else grad * grad_total for grad in grads), None, None


def _fill(
    hidden: Tensor,
    weight: Tensor,
    selected: SelectedRows,
    *,
    values: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Fill in the values and accumulate the needed gradients; products are computed in the dtype of `weight`."""
    wants_grad = grad_hidden is not None or grad_weight is not None
    chunk = selected.chunk or _rows_per_chunk(weight, grad_weight)
    buffer = weight.new_empty(min(chunk, len(selected.rows)), len(weight))
    for start in range(0, len(selected.rows), chunk):
        rows, scale = selected.rows[start : start + chunk], selected.scale[start : start + chunk]
        inputs = hidden[rows].to(weight.dtype)
        logits = torch.mm(inputs, weight.T, out=buffer[: len(rows)])
        # Overwrites the logits with their gradients.
        values[start : start + chunk] = _evaluate(logits, selected, start=start, wants_grad=wants_grad)
        if grad_hidden is not None:
            grad_hidden[rows] = (logits @ weight * scale).to(hidden.dtype)
        if grad_weight is not None:
            _add_product(grad_weight, logits, (inputs * scale).to(weight.dtype))


def _evaluate(logits: Tensor, selected: SelectedRows, *, start: int, wants_grad: bool) -> Tensor:
    """Evaluate a chunk's rows -> [m, F], a cache-sized tile at a time; gradients overwrite the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    tile = selected.tile or tile_rows(logits.shape[1], wide, logits.device)
    spare = logits if wide == logits.dtype else torch.empty_like(logits[:tile], dtype=wide)  # fresh pages are slow
    values = []
    for at in range(0, len(logits), tile):
        view = logits[at : at + tile]
        widened = view if spare is logits else spare[: len(view)].copy_(view)
        value, gradient = selected.objective(widened, slice(start + at, start + at + len(view)), wants_grad)
        values.append(value)
        if gradient is not None and gradient is not view:
            view.copy_(gradient)
    return torch.cat(values)


def _add_product(grad_weight: Tensor, dlogits: Tensor, inputs: Tensor) -> None:
    """grad_weight += dlogits.T @ inputs, by blocks of the vocabulary whose bf16 product fits the cache (3x faster)."""
    block = max(1, _tile_bytes(grad_weight.device) // (grad_weight.itemsize * grad_weight.shape[1]))
    for at in range(0, len(grad_weight), block):
        grad_weight[at : at + block] += dlogits[:, at : at + block].T @ inputs


def _rows_per_chunk(weight: Tensor, grad_weight: Tensor | None) -> int:
    """64 MiB of logits; with a weight gradient at least H/4 rows, to amortize the memory traffic of its update."""
    vocabulary, width = weight.shape
    rows = (64 << 20) // (weight.itemsize * vocabulary)
    return max(1, rows if grad_weight is None else max(rows, width // 4))


def tile_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of logits [V] are evaluated at a time."""
    return max(1, _tile_bytes(device) // (dtype.itemsize * vocabulary))


def _tile_bytes(device: torch.device) -> int:
    """What fits a CPU's cache (softmax 3x faster than on whole chunks); on a GPU, enough to hide kernel launches.

    On an H200, a loss of 4 depths over 49,152 tokens takes 2.8 times as long with 64 MiB.
    """
    return 8 << 20 if device.type == "cpu" else 1 << 30


def wide_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of sums over rows: fp32, or fp64 for fp64."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would multiply (never for fp64), else the wider of the two."""
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    is_cast = torch.is_autocast_enabled(device) and dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else dtype


IGNORE = -100


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, row_weights: Tensor | None = None, chunk: int | None = None
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
