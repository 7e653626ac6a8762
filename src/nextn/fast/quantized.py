"""Weights in seven bits, a byte each: what a head drafts by where its weights are read more often than multiplied.

A draft is a proposal, so rounding the head that makes it changes no text; it reads half as much. One scale a row
(symmetric, round to nearest), so that no product needs more than a multiplication at its end.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BITS = 7
_ZERO = 2 ** (BITS - 1)  # bytes are so much more, and below 128: such a byte is the end of a bf16 number (csrc/rows.h)
LARGEST = _ZERO - 1
_COLUMNS, _DEPTH = 16, 32  # of a block, and what k is filled up to (csrc/product.h)
_TURNS = (0, 2, 1, 3)  # four of k as they lie


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., N, K] -> whole numbers from -63 to 63 of its shape, int8, and scales [..., N], float32."""
    wide = weight.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = scales.masked_fill(scales == 0, 1.0)
    return (wide / scales[..., None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight in float32 that products with these are products with."""
    return codes.float() * scales[..., None]


def packed(weight: Tensor, take: Callable[[int], Tensor]) -> Tensor:
    """weight [N, K] or [E, N, K] as native products read its seven bits: 1-D, bool as memory is.

    take(size): memory for so many bytes.
    """
    codes, scales = quantized(weight.reshape(-1, *weight.shape[-2:]))
    count, n, k = codes.shape
    columns, depth = -n % _COLUMNS, -k % _DEPTH
    filled = torch.nn.functional.pad(codes, (0, depth, 0, columns)) + _ZERO
    blocks = filled.view(count, -1, _COLUMNS, (k + depth) // 4, 4)[..., _TURNS].transpose(2, 3)
    tails = torch.nn.functional.pad(scales, (0, columns)).contiguous().view(torch.int8)
    whole = torch.cat([blocks.reshape(count, -1), tails], dim=1).flatten()
    memory = take(len(whole))
    memory.view(torch.int8).copy_(whole)
    return memory
