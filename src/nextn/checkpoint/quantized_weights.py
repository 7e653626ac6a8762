"""Arithmetic of quantized weights as published: block-wise fp8, and codes of four (also fp4) and eight bits. No files.

fp8 weights are e4m3, multiplied by one scale per block. Source:
https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_quant, weight_dequant) and
fp8_cast_bf16.py next to it. In spite of its name, `weight_scale_inv` is multiplied. The codes have scales and zero
points; where they are stored is in `packed_layout`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.checkpoint.packed_layout import PackedWeight, Part
from nextn.checkpoint.quantization import scale_shape
from nextn.errors import CheckpointError
from nextn.family_table import Family, Fp8

FP8_WEIGHT = "F8_E4M3"
FP8_SCALES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")  # U8: the exponents of MXFP8, as bytes
FP8_MAX = 448.0

# Parts of a decoder layer that fp8 releases leave unquantized: routers, gates, small projections of a delta net, and
# what is not a Linear. From modules_to_not_convert in published configs (DeepSeek-V3.2, Qwen3-Next-FP8, Qwen3.5-FP8).
UNQUANTIZED_PARTS = re.compile(
    r"(^|\.)(gate|router|shared_expert_gate|in_proj_(a|b|ba)|([qkv]_)?conv1d|weights_proj|ngram_embedding)\."
)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibbles of a word in the order of output channels
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of the codes of e2m1, times 2
_ONES = {4: 0x11111111, 8: 0x01010101}  # one in each value of a word
# The codes, of four bits from -8 to 7, that the value of the largest size may have: as it is clamped, or does not reach
# the end, the others may be rounded so much better that the squared error is less. The best one of each group is taken.
_ENDS = tuple(-9 + 0.25 * step for step in range(9))
_LANES = 16  # of sums, whose order is that of the native op (packing.cpp)


def quantize_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., M, N] to e4m3 of its shape and fp32 scales [..., ceil(M / rows), ceil(N / columns)].

    Quantizing the dequantized result again, in a dtype that can represent `weight`, gives the same bits.
    """
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., m, rows, n, columns]
    # The scale of a block of zeros must not be 0, as it is divided by.
    scale = (blocks.abs().amax(dim=(-3, -1)) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (weight.float() / _expand(scale, weight.shape, block)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize an e4m3 weight [..., M, N] with scales of shape `scale_shape`, one scale, or one per row, to fp32."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return weight.float() * (scale.float() if scale.numel() == 1 else _expand(scale.float(), weight.shape, block))


class Fp8Weight(NamedTuple):
    """An fp8 weight [N, K] as it is stored."""

    codes: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32, of shape `scale_shape`
    block: tuple[int, int]  # output and input channels that share a scale


def implied_block(shape: Sequence[int], scale: Sequence[int], declared: tuple[int, int]) -> tuple[int, int] | None:
    """Return the block size that scales of shape `scale` imply: the declared one, a row, 32 of it or the tensor.

    None for any other. 32 values of a row are the blocks of MXFP8.

    One scale per row or tensor are compressed-tensors' strategies channel and tensor, without a block in the config.
    """
    if len(shape) >= 2:
        for block in (declared, (1, shape[-1]), (1, 32)):
            if scale_shape(shape, block) == tuple(scale):
                return block
    return declared if tuple(scale) in ((), (1,), (1, 1)) else None


def declared_block(config: Mapping[str, object], family: Family) -> tuple[int, int]:
    """Return the block size of a quantization_config (weight_block_size, block_structure), or the family's."""
    groups = config.get("config_groups")
    weights = [_table(_table(group).get("weights")) for group in _table(groups).values()]
    for block in (config.get("weight_block_size"), *(each.get("block_structure") for each in weights)):
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
    return (family.fp8 or Fp8()).block


def quantize_tensors(tensors: Mapping[str, Tensor], family: Family, num_layers: int) -> dict[str, Tensor]:
    """Quantize those of the published tensors that the family's fp8 release quantizes, and add their scales."""
    fp8 = family.fp8
    assert fp8 is not None
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim >= 2 and is_fp8_matrix(name, family, num_layers):
            weight, scale = quantize_fp8(value, fp8.block)
            suffix = f".{fp8.scale}" if name.endswith(".weight") else f"_{fp8.scale.removeprefix('weight_')}"
            out |= {name: weight, name.removesuffix(".weight") + suffix: scale}
        else:
            out[name] = value
    return out


def is_fp8_matrix(name: str, family: Family, num_layers: int) -> bool:
    """Whether the matrix `name` is fp8 in the family's fp8 release: a Linear of a decoder layer, by its name."""
    if not name.endswith(".weight") and ".experts." not in name:
        return False
    canonical = family.canonical(name, num_layers)
    if canonical is None:
        layer = family.trunk_layer(name)
        return layer is not None and layer[0] < num_layers and UNQUANTIZED_PARTS.search(layer[1]) is None
    role, _, rest = canonical.partition(".")[2].partition(".")
    return family.fp8 is not None and role not in family.fp8.unquantized and UNQUANTIZED_PARTS.search(rest) is None


def fp8_section(plain: Collection[str], family: Family) -> dict[str, object]:
    """Return the quantization_config of a checkpoint in which the modules `plain` are not fp8."""
    assert family.fp8 is not None
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(family.fp8.block),
        "modules_to_not_convert": sorted(plain),
    }


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _expand(scale: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [N, K] as integers: (codes - zeros) * scales, with the zeros and scales of each input channel's group.

    With minima, it is codes * scales + minima.
    """

    codes: Tensor  # uint8 [N, K], from 0 to 2 ** bits - 1
    scales: Tensor  # floating-point [N, groups], as stored
    zeros: Tensor | None  # uint8 [N, groups]; None: 2 ** (bits - 1) everywhere
    bits: int  # 4 or 8
    group_size: int  # input channels; the last group may have fewer
    group_index: Tensor | None = None  # int64 [K], the group of each input channel; None: consecutive channels
    minima: Tensor | None = None  # floating-point [N, groups], of whole groups without zeros and index

    def dequantize(self) -> Tensor:
        """Return the weight in float32: exact where scales have 16 bits, else rounded once."""
        weight, num_groups = self.codes.float(), self.scales.shape[1]
        if self.minima is not None:
            of_groups = torch.unflatten(weight, 1, (num_groups, -1)).mul_(self.scales.float()[..., None])
            return of_groups.add_(self.minima.float()[..., None]).flatten(1)
        zeros = self.zeros.float() if self.zeros is not None else torch.full_like(self.scales, self.middle).float()
        if self.group_index is None and weight.shape[1] == num_groups * self.group_size:
            weight.unflatten(1, (num_groups, -1)).sub_(zeros[..., None]).mul_(self.scales.float()[..., None])
            return weight
        index = self.group_index
        index = torch.arange(weight.shape[1]) // self.group_size if index is None else index
        return weight.sub_(zeros[:, index]).mul_(self.scales.float()[:, index])

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return 1 << self.bits - 1


def round_to_nearest(weight: Tensor, bits: int, group_size: int, importance: Tensor | None = None) -> QuantizedWeight:
    """Quantize a weight [N, K] symmetrically, with scales in its own dtype for groups that divide K.

    8 bits: the largest value has code 127 or -127. 4: of the scales that are tried, the one with the least squared
    error, of which `importance` [K] is how much that of each input channel counts.
    """
    groups, middle = weight.float().unflatten(1, (-1, group_size)), 2 ** (bits - 1)
    least, largest = groups.aminmax(dim=-1)
    if bits == 8:
        scales = torch.maximum(-least, largest) / (middle - 1)
    else:
        # Above 0, as for blocks (`gguf_blocks`): a group that counts nothing has no best scale, and would be lost.
        counts = None if importance is None else importance.float().clamp_min(1e-12).view(-1, group_size)
        scales = _best_scales(groups, torch.where(largest >= -least, largest, least), counts)
    scales = scales.to(weight.dtype)
    scales = scales.masked_fill_(scales == 0, 1.0)
    codes = _nearest_codes(groups, scales.float().reciprocal(), middle).add_(middle)
    return QuantizedWeight(codes.flatten(1).to(torch.uint8), scales, None, bits, group_size)


def _best_scales(groups: Tensor, extremes: Tensor, counts: Tensor | None) -> Tensor:
    """Return the scales [N, groups] of four bits with the least squared error of each group [N, groups, size].

    extremes: Of each group, the value of the largest size. counts: [groups, size], how much each error counts.
    """
    best, scales = torch.full_like(extremes, -1.0), torch.zeros_like(extremes)
    for end in _ENDS:
        codes = _nearest_codes(groups, torch.full_like(extremes, end).div_(extremes), 8)
        counted = codes if counts is None else codes * counts
        above, below = _total(counted * groups), _total(counted * codes)
        less = above.square() / below  # than the squared error of zeros
        is_better = less > best  # not if all values are 0
        best, scales = torch.where(is_better, less, best), torch.where(is_better, above / below, scales)
    return scales


def _nearest_codes(groups: Tensor, inverse: Tensor, middle: int) -> Tensor:
    return (groups * inverse[..., None]).round_().clamp_(-middle, middle - 1)


def _total(values: Tensor) -> Tensor:
    """Sum [..., size] -> [...] in lanes, then over these in their order."""
    first, *rest = torch.unflatten(values, -1, (-1, gcd(values.shape[-1], _LANES))).unbind(-2)
    lanes = sum(rest, first)
    first, *rest = lanes.unbind(-1)
    return sum(rest, first)


def pack_codes(weight: QuantizedWeight) -> Tensor:
    """Pack the codes as compressed-tensors' `weight_packed` does: int32 [N, K * bits / 32]; whole words alone."""
    codes = weight.codes
    return (codes if weight.bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


class Groups(NamedTuple):
    """Scales, zero points and group index of a `QuantizedWeight`."""

    scales: Tensor
    zeros: Tensor | None
    group_index: Tensor | None


def unpack(weight: PackedWeight, read: Callable[[str], Tensor]) -> QuantizedWeight:
    """Read a weight without a `problem`; raise CheckpointError if its group index names a group that has no scales."""
    packed, (rows, columns), bits = read(weight.parts["codes"].name), weight.shape, weight.bits
    match weight.layout:
        case "gptq":
            codes = _split(packed.T, bits)
        case "awq":
            codes = _split(packed, bits)[:, _awq_columns(rows)].T
        case "pack-quantized":
            codes = _split(packed, bits)
        case "int-quantized":
            codes = _unsigned(packed, bits)
        case "fp4-pack-quantized" | "fp4":
            codes = look_up(_split(packed, 4), FP4_VALUES)
    scales, zeros, index = unpack_groups(weight, read)
    return QuantizedWeight(codes[:rows, :columns].contiguous(), scales, zeros, bits, weight.group_size, index)


def unpack_groups(weight: PackedWeight, read: Callable[[str], Tensor]) -> Groups:
    """Read all of a weight but its codes, as `unpack` does."""
    parts: dict[Part, Tensor] = {part: read(info.name) for part, info in weight.parts.items() if part != "codes"}
    rows, bits = weight.shape[0], weight.bits
    scales, zeros = parts["scales"], parts.get("zeros")
    match weight.layout:
        case "gptq":
            # GPTQModel subtracts from the packed word, and other writers store no zero that would borrow.
            scales, zeros = scales.T, _split(parts["zeros"] + weight.zero_offset * _ONES[bits], bits).T
        case "awq":
            scales, zeros = scales.T, _split(parts["zeros"], bits)[:, _awq_columns(rows)].T
        case "pack-quantized" | "int-quantized":
            zeros = _compressed_zeros(weight, zeros)
        case "fp4-pack-quantized" | "fp4":
            scales = _fp4_scales(weight, scales, parts.get("global_scale"))
    scales = scales.reshape(-1, weight.num_groups).expand(rows, -1).contiguous()
    if zeros is not None:
        zeros = zeros[:rows].contiguous()
        zeros = None if bool((zeros == 2 ** (bits - 1)).all()) else zeros
    return Groups(scales, zeros, _group_index(weight, parts.get("group_index")))


def _fp4_scales(weight: PackedWeight, scales: Tensor, global_scale: Tensor | None) -> Tensor:
    """Return the scales of codes that are twice the values of e2m1, in float32."""
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    scales = scales.float() / 2
    if global_scale is None:
        return scales
    # compressed-tensors stores what the scales were multiplied by before they were rounded, ModelOpt the inverse.
    return scales / global_scale if weight.layout == "fp4-pack-quantized" else scales * global_scale


def look_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """Replace codes of four bits by values, which become codes of eight bits."""
    return (torch.tensor(values) + 128).to(torch.uint8)[codes.long()]


def _split(words: Tensor, bits: int) -> Tensor:
    """Split int32 words [..., W] into unsigned values, the lowest bits of a word first."""
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)


def _unsigned(values: Tensor, bits: int) -> Tensor:
    """Convert int8 values to codes, which are larger by 2 ** (bits - 1)."""
    return (values.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)


def _awq_columns(rows: int) -> Tensor:
    return (torch.arange(0, rows, 8)[:, None] + torch.tensor(_AWQ_ORDER)).flatten()


def _compressed_zeros(weight: PackedWeight, zeros: Tensor | None) -> Tensor | None:
    """Zero points [N, groups] of compressed-tensors, which packs them along N or stores them as they are."""
    if zeros is None:
        return None
    if zeros.dtype == torch.int32:
        return _split(zeros.T, weight.bits).T
    return _unsigned(zeros, weight.bits).reshape(-1, weight.num_groups).expand(weight.shape[0], -1)


def _group_index(weight: PackedWeight, stored: Tensor | None) -> Tensor | None:
    """The group of each input channel, if activation ordering has made groups of channels that are not consecutive."""
    if stored is None or bool((stored == -1).all()):  # compressed-tensors: never set
        return None
    index = stored.long()
    if bool((index < 0).any()) or bool((index >= weight.num_groups).any()):
        name = weight.parts["group_index"].name
        raise CheckpointError(
            f"{name}: it has groups from {int(index.min())} to {int(index.max())}; valid are 0 to "
            f"{weight.num_groups - 1}: take the complete checkpoint"
        )
    return None if torch.equal(index, torch.arange(len(index)) // weight.group_size) else index
