"""Logits: the product of final hidden states with an lm_head, in float32.

Rounded to bfloat16, the two highest logits of a position are equal at one position in twenty, and the argmax is then
decided by their order.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nextn.model.packed_linear import PackedLinear

_VALUES = 2**19  # of an lm_head that are widened at once: they stay in a core's caches

# A custom op, because a recorded pass has it as one operation, which needs no float32 copy of the weight.
_LIBRARY = torch.library.Library("nextn", "DEF")
_LIBRARY.define("float_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
FLOAT_LINEAR = torch.ops.nextn.float_linear


def logits_of(output: nn.Module, final_hidden: Tensor) -> Tensor:
    """Compute the logits [..., V] of final hidden states [..., H] in float32, or float64 if the lm_head's weight is.

    The result of an lm_head of another type than nn.Linear and PackedLinear, such as one with an adapter, is what that
    layer computes in its own dtype.
    """
    if not isinstance(output, PackedLinear) and type(output) is not nn.Linear:
        logits: Tensor = output(final_hidden.to(next(output.parameters()).dtype))
        return logits.float()
    return float_linear(final_hidden, output.weight, output.bias)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., K] with a weight [N, K] -> [..., N] in float32, or float64 if the weight is."""
    if weight.dtype in (torch.float32, torch.float64):
        return functional.linear(x.to(weight.dtype), weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product: Tensor = FLOAT_LINEAR(x, weight, bias)
    return product


@torch.library.impl(_LIBRARY, "float_linear", "CompositeExplicitAutograd")
def _float_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    product = _mm_on_cuda(rows, weight) if weight.is_cuda else _mm_in_slices(rows, weight)
    return (product if bias is None else product + bias.float()).view(*x.shape[:-1], len(weight))


def _mm_on_cuda(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(rows.to(weight.dtype), weight.t(), out_dtype=torch.float32)


def _mm_in_slices(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply by torch's float32 kernels, one slice of the weight at a time: `mm` has an out_dtype only on CUDA."""
    rows, size = rows.float(), max(_VALUES // weight.shape[1], 1)
    out = rows.new_empty(len(rows), len(weight))
    slice_of_weight = rows.new_empty(min(size, len(weight)), weight.shape[1])
    for start in range(0, len(weight), size):
        part = weight[start : start + size]
        widened = slice_of_weight[: len(part)].copy_(part)
        out[:, start : start + size] = torch.mm(rows, widened.t())
    return out
