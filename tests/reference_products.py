"""Slow references in torch of what the native runtime does with rounded activations and packed weights."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.checkpoint.gguf_blocks import KQuantWeight
from nextn.checkpoint.gguf_file import SUPERBLOCK
from nextn.runtime.native.grouped import GroupedWeight, group_size
from nextn.runtime.native.weight_packing import quantize

GROUP = 128  # values of a row of activations with a common scale (csrc/rounded.h)
_LARGEST = 2**15 - 1  # code of activations
_LARGEST_CACHED = 127  # of keys and values
_SMALLEST = 1e-30  # activations below this are rounded to 0


def round_rows(x: Tensor, group: int = GROUP, largest: int = _LARGEST) -> tuple[Tensor, Tensor]:
    """Round activations [..., K] to codes of up to `largest` in groups of values.

    Returns:
        Codes [..., groups, group] as float32, zeros beyond K, and float32 scales [..., groups].
    """
    groups = pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    extent = groups.abs().amax(-1)
    # A number divided by a tensor would be rounded twice.
    inverse = torch.full_like(extent, largest).div(extent).where(extent >= _SMALLEST, 0.0)
    return (groups * inverse[..., None]).round(), extent / largest


def round_cached(x: Tensor) -> Tensor:
    """Return the float32 values of keys or values [..., size] that an int8 KV cache holds, as the native op does."""
    codes, scales = round_rows(x, x.shape[-1], _LARGEST_CACHED)
    return (codes * scales[..., None]).squeeze(-2)


def grouped_linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Multiply activations [..., K] with a weight [N, K] -> float32 [..., N], as the native op does."""
    size = group_size(weight.codes.shape[-1], weight.scales.shape[-1])
    rounded, row_scales = round_rows(x)
    values = rounded.flatten(-2).unflatten(-1, (-1, size))[..., : weight.scales.shape[-1], :]
    codes = pad(weight.codes.float(), (0, -weight.codes.shape[-1] % size)).unflatten(-1, (-1, size))
    zeros = 0 if weight.has_minima else weight.zeros[..., None]
    sums = torch.einsum("...gk,ngk->...ng", values.double(), codes.double() - zeros).float()  # of whole numbers
    scales = row_scales.repeat_interleave(rounded.shape[-1] // size, -1)[..., None, : weight.scales.shape[-1]]
    products = sums * (scales * weight.scales)
    if weight.has_minima:
        products = products + scales * values.sum(-1)[..., None, :] * weight.zeros.float()
    return products.sum(-1)


def kquant_linear(x: Tensor, weight: KQuantWeight) -> Tensor:
    """Multiply activations [..., K] with a weight [N, K] -> float32 [..., N], as the native op does."""
    rounded, row_scales = round_rows(x)  # [..., K / 128, 128]
    size = weight.codes.shape[1] // weight.group_scales.shape[1]
    groups = (weight.codes.double() - weight.zero).unflatten(1, (-1, GROUP // size, size))
    values = rounded.double().unflatten(-1, (-1, size))
    sums = torch.einsum("...agk,nagk->...nag", values, groups).float()  # of whole numbers
    scaled = (sums * weight.group_scales.float().unflatten(1, (-1, GROUP // size))).sum(-1)
    scaled = scaled * weight.scales.repeat_interleave(SUPERBLOCK // GROUP, 1)
    if weight.min_scales is not None and weight.group_mins is not None:
        group_mins = weight.group_mins.float().unflatten(1, (-1, GROUP // size))
        minima = torch.einsum("...ag,nag->...na", values.sum(-1).float(), group_mins)
        scaled = scaled - minima * weight.min_scales.repeat_interleave(SUPERBLOCK // GROUP, 1)
    return (scaled * row_scales[..., None, :]).sum(-1)


def pack_in_torch(weight: Tensor) -> Tensor:
    """Pack a weight [N, K] as `pack_quantized` does: blocks of 16 output channels, each [K / 4, 16, 4], then scales."""
    codes, scales = quantize(weight)
    padded = pad(codes, (0, -codes.shape[1] % 32, 0, -len(codes) % 16)).int() + 64
    values = padded.view(-1, 16, padded.shape[1] // 4, 4)[..., (0, 2, 1, 3)].transpose(1, 2)
    parts = [values.flatten().to(torch.uint8), pad(scales, (0, -len(codes) % 16)).view(torch.uint8)]
    return torch.cat(parts).view(torch.bool)
