"""Quantized weights of seven bits, and activations of sixteen.

Seven bits, symmetric, rounded to nearest, with one scale per output channel, are for a head beside a trunk in bf16: its
drafts are verified, so rounding its weights cannot change the text. Beside weights of four to eight bits (grouped.py,
kquants.py), activations are rounded to int16 in groups of `GROUP` values with one scale each, so that products are sums
of integers: exact, and the same bits in any order.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.runtime.native.abi import BYTES, Runtime
from nextn.runtime.native.memory import rows_per_slice

GROUP = 128  # values of a row of activations with a common scale (csrc/rounded.h)
_DEPTH = 32  # K is padded to a multiple of this (csrc/product.h)
_LARGEST = 2**15 - 1  # code of activations
_LARGEST_CACHED = 127  # of keys and values
_SMALLEST = 1e-30  # activations below this are rounded to 0


class CodeFormat(NamedTuple):
    """A packed form of quantized weights with one scale per output channel (csrc/product.h)."""

    type: int
    bits: int
    columns: int  # output channels of a block
    order: tuple[int, ...]  # of each four values along K
    op: str  # the native op that packs

    @property
    def zero(self) -> int:
        """What is added to a code, so that the byte has no sign."""
        return 2 ** (self.bits - 1)

    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        return pack_quantized(weight, take, self, runtime)


SEVEN_BITS = CodeFormat(BYTES, 7, 16, (0, 2, 1, 3), "pack_bytes")


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., N, K] symmetrically, rounding to nearest, with one scale per output channel.

    Returns:
        int8 codes of the same shape, from -(2 ** (bits - 1) - 1) on, and float32 scales [..., N].
    """
    wide, largest = weight.float(), 2 ** (bits - 1) - 1
    scales = wide.abs().amax(-1) / largest
    scales = scales.masked_fill(scales == 0, 1.0)
    return (wide / scales[..., None]).round().clamp(-largest, largest).to(torch.int8), scales


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
def pack_quantized(
    weight: Tensor, take: Callable[[int], Tensor], code_format: CodeFormat, runtime: Runtime | None = None
) -> Tensor:
    """Quantize weight [N, K] or [E, N, K] into the layout of the native products.

    Args:
        weight: The weight.
        take: Allocates this many bytes.
        code_format: Format of the codes.
        runtime: What packs; by default torch, with the same bits.
    """
    *_, n, k = weight.shape
    columns, depth = n + -n % code_format.columns, k + -k % _DEPTH
    matrices = weight.reshape(-1, n, k)
    memory = take(columns * (depth + 4) * len(matrices))
    num_rows = rows_per_slice(weight, code_format.columns)
    for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
        scales = packed[columns * depth :].view(torch.float32)
        for start, rows in slices_released_after_use(matrix, num_rows):
            end = min(start + num_rows, columns)
            blocks = packed[start * depth : end * depth]
            if runtime is None:
                codes, scales[start : start + len(rows)] = quantize(rows, code_format.bits)
                _pack_rows(codes, blocks, code_format)
            else:
                runtime.call(code_format.op, [blocks, scales[start:end], rows.contiguous()])
    return memory


def _pack_rows(codes: Tensor, blocks: Tensor, code_format: CodeFormat) -> None:
    """Pack some rows of codes into blocks of output channels, each [K / 4, columns, 4]."""
    n, k = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -k % _DEPTH, 0, -n % code_format.columns)).int() + code_format.zero
    values = padded.view(-1, code_format.columns, padded.shape[1] // 4, 4)[..., code_format.order].transpose(1, 2)
    blocks.view(torch.uint8).copy_(values.flatten())
