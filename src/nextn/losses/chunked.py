"""The weighted sum of a value of each row of logits that never all exist; its gradients are made in the forward pass.

It knows neither labels nor models: an `Objective` says what a row of logits is worth, and `Work` which rows count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nextn.errors import ConfigError

# (logits [m, V] in fp32 or wider, the places of their rows in Work.rows, is the gradient wanted)
#   -> figures of each row [m, F], d (its first figure) / d logits [m, V] or None. The logits may be overwritten.
Objective = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class Work:
    """Which rows of hidden count [M], what each weighs in the sum [M, 1], and how its logits are valued.

    figures: F, how many of each row the objective returns. chunk, tile: rows of logits that are multiplied out, and of
    these valued, at a time; None: what memory and cache are good for.
    """

    rows: Tensor
    scale: Tensor
    objective: Objective
    chunk: int | None
    figures: int = 1
    tile: int | None = None


def check_chunk(chunk: int | None) -> None:
    """Raises ConfigError for what is no number of rows."""
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk} is not a number of rows. Give 1 or more, or None for about 64 MB of logits.")


def weighted_sum(hidden: Tensor, weight: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """Sum of scale * first figure over work.rows of hidden [N, H] @ weight.T [H, V]; all figures [M, F], detached.

    Both are fp32 (fp64 for fp64). hidden and weight get gradients as far as they require them.
    """
    return _Chunked.apply(hidden, weight, work, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    """Sum of scale * objective(hidden @ weight.T): forward makes the gradients, backward only multiplies them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, work: Work, is_recording: bool) -> tuple[Tensor, Tensor]:
        wide = work.scale.dtype
        values = work.scale.new_zeros(len(work.rows), work.figures)
        grad_hidden = torch.zeros_like(hidden) if is_recording and hidden.requires_grad else None
        # fp32 also for a bf16 weight: after 128 chunks a bf16 sum was 1.7 % off, an fp32 one 0.24 % (bf16 products).
        grad_weight = torch.zeros_like(weight, dtype=wide) if is_recording and weight.requires_grad else None
        dtype = product_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            _fill(hidden, weight.to(dtype), work, values=values, grad_hidden=grad_hidden, grad_weight=grad_weight)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(values)
        return (values[:, :1] * work.scale).sum(), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        made = ctx.saved_tensors
        return *(None if grad is None else grad * grad_total for grad in made), None, None


def _fill(
    hidden: Tensor,
    weight: Tensor,
    work: Work,
    *,
    values: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Fill in the values and add up the gradients that are wanted; the products are made in the dtype of `weight`."""
    wants_grad = grad_hidden is not None or grad_weight is not None
    chunk = work.chunk or _rows_per_chunk(weight, grad_weight)
    buffer = weight.new_empty(min(chunk, len(work.rows)), len(weight))
    for start in range(0, len(work.rows), chunk):
        rows, scale = work.rows[start : start + chunk], work.scale[start : start + chunk]
        inputs = hidden[rows].to(weight.dtype)
        logits = torch.mm(inputs, weight.T, out=buffer[: len(rows)])
        values[start : start + chunk] = _value(
            logits, work, start=start, wants_grad=wants_grad
        )  # logits become dlogits
        if grad_hidden is not None:
            grad_hidden[rows] = (logits @ weight * scale).to(hidden.dtype)
        if grad_weight is not None:
            _add_product(grad_weight, logits, (inputs * scale).to(weight.dtype))


def _value(logits: Tensor, work: Work, *, start: int, wants_grad: bool) -> Tensor:
    """Value the rows of a chunk -> [m, F], a cache-sized tile at a time; the gradient takes the place of the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    tile = work.tile or tile_rows(logits.shape[1], wide, logits.device)
    spare = logits if wide == logits.dtype else torch.empty_like(logits[:tile], dtype=wide)  # fresh pages are slow
    values = []
    for at in range(0, len(logits), tile):
        view = logits[at : at + tile]
        widened = view if spare is logits else spare[: len(view)].copy_(view)
        value, gradient = work.objective(widened, slice(start + at, start + at + len(view)), wants_grad)
        values.append(value)
        if gradient is not None and gradient is not view:
            view.copy_(gradient)
    return torch.cat(values)


def _add_product(grad_weight: Tensor, dlogits: Tensor, inputs: Tensor) -> None:
    """grad_weight += dlogits.T @ inputs, by blocks of the vocabulary: their bf16 product stays in the cache (3x)."""
    block = max(1, _tile_bytes(grad_weight.device) // (grad_weight.itemsize * grad_weight.shape[1]))
    for at in range(0, len(grad_weight), block):
        grad_weight[at : at + block] += dlogits[:, at : at + block].T @ inputs


def _rows_per_chunk(weight: Tensor, grad_weight: Tensor | None) -> int:
    """64 MiB of logits; under a weight gradient at least H/4 rows, a quarter of its size, so that its traffic pays."""
    vocabulary, width = weight.shape
    rows = (64 << 20) // (weight.itemsize * vocabulary)
    return max(1, rows if grad_weight is None else max(rows, width // 4))


def tile_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many rows of logits [V] are valued at a time."""
    return max(1, _tile_bytes(device) // (dtype.itemsize * vocabulary))


def _tile_bytes(device: torch.device) -> int:
    """On a CPU what stays in the cache (softmax 3x faster than whole chunks), on a GPU enough to outlast a launch."""
    return 8 << 20 if device.type == "cpu" else 64 << 20


def wide_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What sums over rows are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What autocast would multiply in (it leaves fp64 alone), else the wider of the two."""
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    is_cast = torch.is_autocast_enabled(device) and dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else dtype
