"""Quantized weights of seven bits, and activations of sixteen.

Seven bits, symmetric, rounded to nearest, with one scale per output channel, are for a head beside a trunk in bf16: its
drafts are verified, so rounding its weights cannot change the text. Beside weights of four to eight bits (grouped.py,
kquants.py), activations are rounded to int16 in groups of `GROUP` values with one scale each, so that products are sums
of integers: exact, and the same bits in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.runtime.native.abi import BYTES, Runtime
from nextn.runtime.native.memory import rows_per_slice

GROUP = 128  # values of a row of activations with a common scale (csrc/rounded.h)
# Of packed weights (csrc/product.h): K is padded to a multiple of _DEPTH; _COLUMNS output channels are a block, with
# each four values along K in this order.
_DEPTH, _COLUMNS, _ORDER = 32, 16, (0, 2, 1, 3)
_LARGEST_WEIGHT = 63  # code
_ZERO = 64  # what is added to a code, so that the byte has no sign
_LARGEST = 2**15 - 1  # code of activations
_LARGEST_CACHED = 127  # of keys and values
_SMALLEST = 1e-30  # activations below this are rounded to 0


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


def round_rows(x: Tensor, group: int = GROUP, largest: int = _LARGEST) -> tuple[Tensor, Tensor]:
    """Round activations [..., K] to codes of up to `largest` in groups of values.

    Returns:
        Codes [..., groups, group] as float32, zeros beyond K, and float32 scales [..., groups].
    """
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    extent = groups.abs().amax(-1)
    # A number divided by a tensor would be rounded twice.
    inverse = torch.full_like(extent, largest).div(extent).where(extent >= _SMALLEST, 0.0)
    return (groups * inverse[..., None]).round(), extent / largest


def round_cached(x: Tensor) -> Tensor:
    """Return the float32 values of keys or values [..., size] that an int8 KV cache holds, as the native op does."""
    codes, scales = round_rows(x, x.shape[-1], _LARGEST_CACHED)
    return (codes * scales[..., None]).squeeze(-2)


@torch.no_grad()
def pack_quantized(weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime | None = None) -> Tensor:
    """Quantize weight [N, K] or [E, N, K] into the layout of the native products.

    Args:
        weight: The weight.
        take: Allocates this many bytes.
        runtime: What packs; by default torch, with the same bits.
    """
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
            if runtime is None:
                codes, scales[start : start + len(rows)] = quantize(rows)
                _pack_rows(codes, blocks)
            else:
                runtime.call("pack_bytes", [blocks, scales[start:end], rows.contiguous()])
    return memory


def _pack_rows(codes: Tensor, blocks: Tensor) -> None:
    """Pack some rows of codes into blocks of output channels, each [K / 4, columns, 4]."""
    n, k = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -k % _DEPTH, 0, -n % _COLUMNS)).int() + _ZERO
    values = padded.view(-1, _COLUMNS, padded.shape[1] // 4, 4)[..., _ORDER].transpose(1, 2)
    blocks.view(torch.uint8).copy_(values.flatten())
