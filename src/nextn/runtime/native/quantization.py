"""Quantized weights of seven bits, and activations of sixteen.

Seven bits, symmetric, rounded to nearest, with one scale per output channel, are for a head beside a trunk in bf16: its
drafts are verified, so rounding its weights cannot change the text. Beside weights of four to eight bits (grouped.py,
kquants.py), activations are rounded to int16 in groups of 128 values with one scale each, so that products are sums
of integers: exact, and the same bits in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.runtime.native.abi import BYTES, Runtime
from nextn.runtime.native.memory import rows_per_slice

# Of packed weights (csrc/product.h): K is padded to a multiple of _DEPTH; _COLUMNS output channels are a block.
_DEPTH, _COLUMNS = 32, 16
_LARGEST_WEIGHT = 63  # code


@dataclass(frozen=True)
class SevenBits:
    """The packed form of weights that are quantized as they are packed (csrc/product.h)."""

    type: int = BYTES
    bits: int = 7

    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        return pack_quantized(weight, take, runtime)

    def values(self, weight: Tensor, runtime: Runtime) -> Tensor:
        return dequantize(*quantize(weight))


SEVEN_BITS = SevenBits()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., N, K] to seven bits symmetrically, with one scale per output channel.

    Returns:
        int8 codes of the same shape, from -63 to 63, rounded to nearest, and float32 scales [..., N].
    """
    wide = weight.float()
    scales = wide.abs().amax(-1) / _LARGEST_WEIGHT
    scales = scales.masked_fill(scales == 0, 1.0)
    return (wide / scales[..., None]).round().clamp(-_LARGEST_WEIGHT, _LARGEST_WEIGHT).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight that products with these codes and scales use."""
    return codes.float() * scales[..., None]


@torch.no_grad()
def pack_quantized(weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
    """Quantize weight [N, K] or [E, N, K] into the layout of the native products. `take` allocates bytes."""
    *_, n, k = weight.shape
    columns, depth = n + -n % _COLUMNS, k + -k % _DEPTH
    matrices = weight.reshape(-1, n, k)
    memory = take(columns * (depth + 4) * len(matrices))
    num_rows = rows_per_slice(weight, _COLUMNS)
    for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
        scales = packed[columns * depth :].view(torch.float32)
        for start, rows in slices_released_after_use(matrix, num_rows):
            end = min(start + num_rows, columns)
            blocks = packed[start * depth : end * depth]
            runtime.call("pack_bytes", [blocks, scales[start:end], rows.contiguous()])
    return memory
