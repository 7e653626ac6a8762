"""The blocks of GGUF's quantized types: taken apart into codes, scales and minima without rounding, and weights rounded
to Q4_1 and Q8_0. No files.

Source: ggml's src/ggml-common.h (block_q4_K and others) and src/ggml-quants.c (dequantize_row_q4_K and others).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.checkpoint.gguf_file import BLOCK_TYPES, K_QUANTS, WITH_MINIMA
from nextn.checkpoint.quantized_weights import FP4_VALUES, QuantizedWeight, look_up

_SIX_BIT_ZERO = 32  # the code of weight 0 in Q6_K
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_LARGEST_EXPONENT = 252  # of a block of MXFP4 all of whose values are finite in float32
# Bytes of a block that are its float16 scales and minima; of other types, the first two.
_SCALES = {**dict.fromkeys((*WITH_MINIMA, "Q4_K", "Q5_K"), slice(0, 4)), "Q6_K": slice(208, 210)}


@dataclass(frozen=True, eq=False)
class KQuantWeight:
    """A weight [N, K] in superblocks of 256 values, each of several groups.

    A value is scale * group_scale * (code - zero) - min_scale * group_min.
    """

    kind: str  # one of `K_QUANTS`
    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # float32 [N, K / 256]
    group_scales: Tensor  # int8 [N, K / group size]
    min_scales: Tensor | None  # float32 [N, K / 256]; None without minima
    group_mins: Tensor | None  # int8 [N, K / group size]; None without minima

    @property
    def zero(self) -> int:
        """The code of weight 0 in a type without minima."""
        return 0 if self.group_mins is not None else _SIX_BIT_ZERO

    def map(self, change: Callable[..., Tensor], *others: "KQuantWeight") -> "KQuantWeight":
        """Change each tensor, given with those of other weights of the type."""
        parts = [each._tensors for each in (self, *others)]
        changed = [None if each[0] is None else change(*each) for each in zip(*parts, strict=True)]
        return KQuantWeight(self.kind, *changed)  # type: ignore[arg-type]  # codes and scales are never None

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scales, self.group_scales, self.min_scales, self.group_mins

    def dequantize(self) -> Tensor:
        """Return the weight in float32, with the bits of ggml's own dequantization."""
        groups = torch.unflatten(self.codes.float(), 1, (self.group_scales.shape[1], -1)).sub_(self.zero)
        groups.mul_(_of_groups(self.scales, self.group_scales))
        if self.min_scales is not None and self.group_mins is not None:
            groups.sub_(_of_groups(self.min_scales, self.group_mins))
        return groups.flatten(1)


def _of_groups(scales: Tensor, factors: Tensor) -> Tensor:
    """Multiply one factor per group with the scale of its superblock -> [N, groups, 1]."""
    repeats = factors.shape[1] // scales.shape[1]
    return (scales.repeat_interleave(repeats, 1) * factors.float())[..., None]


def take_apart(rows: Tensor, kind: str) -> QuantizedWeight | KQuantWeight:
    """Take the blocks of a weight [N, K] apart: rows of uint8 [N, bytes of a row], of one of `BLOCK_TYPES`."""
    _, num_bytes, bits, group_size = BLOCK_TYPES[kind]
    blocks = rows.unflatten(1, (-1, num_bytes))
    if kind in K_QUANTS:
        return _K_READERS[kind](blocks)
    codes, scales = _READERS[kind](blocks)
    minima = _halves(blocks[..., 2:4]).flatten(1) if kind in WITH_MINIMA else None
    return QuantizedWeight(codes.flatten(1), scales.flatten(1), None, bits, group_size, minima=minima)


def block_scales(rows: Tensor, kind: str) -> Tensor:
    """Read the floating-point scales of a weight, as `take_apart` does, without its codes -> [N, scales].

    A scale is not finite if values of its block are not.
    """
    blocks = rows.unflatten(1, (-1, BLOCK_TYPES[kind].num_bytes))
    if kind == "MXFP4":
        exponents = blocks[..., 0]
        return _mxfp4_scales(exponents).masked_fill(exponents > _LARGEST_EXPONENT, torch.inf)
    return _halves(blocks[..., _SCALES.get(kind, slice(0, 2))]).flatten(1)


def _halves(parts: Tensor) -> Tensor:
    return parts.contiguous().view(torch.float16)


def _floats(parts: Tensor) -> Tensor:
    return _halves(parts)[..., 0].float()


def _nibbles(parts: Tensor, run: int) -> Tensor:
    """Split bytes [..., B] in runs of `run` bytes, each the low nibbles of as many values, then the high ones."""
    runs = parts.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _fields(parts: Tensor, bits: int) -> Tensor:
    """Split bytes [..., B] into values of a few bits, the lowest of a byte first."""
    return (parts[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & (1 << bits) - 1).flatten(-2)


def _high_bits(parts: Tensor, bits: int) -> Tensor:
    """Split 32 bytes [..., 32] into 32 values each of their lowest, next, ... bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (parts[..., None, :] >> shifts & (1 << bits) - 1).flatten(-2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    codes = _nibbles(blocks[..., 6:], 16) | _fields(blocks[..., 2:6], 1) << 4
    return codes + (128 - 16), _halves(blocks[..., :2])


def _mxfp4_scales(exponents: Tensor) -> Tensor:
    """Return half of each block's scale, as the codes are doubled."""
    return torch.ldexp(torch.tensor(1.0), exponents.float() - 128)


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    high = _fields(blocks[..., 2:4], 2)
    factors = (_nibbles(blocks[..., 4:8], 1) | high << 4).float() - 32
    return look_up(_nibbles(blocks[..., 8:], 16), _IQ4_VALUES), _floats(blocks[..., :2])[..., None] * factors


def _with_minima(kind: str, blocks: Tensor, codes: Tensor) -> KQuantWeight:
    """Read the scales and minima of six bits of Q4_K and Q5_K: those of the last four groups are in pieces."""
    first, second, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    group_scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=-1)
    group_mins = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=-1)
    of_scales, of_mins = (each.flatten(1).to(torch.int8) for each in (group_scales, group_mins))
    scales, min_scales = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    return KQuantWeight(kind, codes.flatten(1), scales, of_scales, min_scales, of_mins)


def _q6_k(blocks: Tensor) -> KQuantWeight:
    low, high = _nibbles(blocks[..., :128], 64), blocks[..., 128:192].unflatten(-1, (2, 32))
    codes = low | _high_bits(high, 2).flatten(-2) << 4
    group_scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return KQuantWeight("Q6_K", codes.flatten(1), _floats(blocks[..., 208:]), group_scales.flatten(1), None, None)


_READERS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "Q4_0": lambda blocks: (_nibbles(blocks[..., 2:], 16), _halves(blocks[..., :2])),
    "Q4_1": lambda blocks: (_nibbles(blocks[..., 4:], 16), _halves(blocks[..., :2])),
    "Q5_0": _q5_0,
    "Q5_1": lambda blocks: (
        _nibbles(blocks[..., 8:], 16) | _fields(blocks[..., 4:8], 1) << 4, _halves(blocks[..., :2])
    ),
    "Q8_0": lambda blocks: (blocks[..., 2:] ^ 128, _halves(blocks[..., :2])),
    "IQ4_NL": lambda blocks: (look_up(_nibbles(blocks[..., 2:], 16), _IQ4_VALUES), _halves(blocks[..., :2])),
    "MXFP4": lambda blocks: (
        look_up(_nibbles(blocks[..., 1:], 16), FP4_VALUES), _mxfp4_scales(blocks[..., :1])
    ),
    "IQ4_XS": _iq4_xs,
}  # fmt: skip
_K_READERS: Mapping[str, Callable[[Tensor], KQuantWeight]] = {
    "Q4_K": lambda blocks: _with_minima("Q4_K", blocks, _nibbles(blocks[..., 16:], 32)),
    "Q5_K": lambda blocks: _with_minima(
        "Q5_K", blocks, _nibbles(blocks[..., 48:], 32) | _high_bits(blocks[..., 16:48], 1) << 4
    ),
    "Q6_K": _q6_k,
}


_LARGEST = 15  # code of four bits
# Shares of a group's range that the codes leave out at each end to begin with; the best result of each group is taken.
_MARGINS = (0.0, 0.06, 0.12)
_STEPS = 2  # of fitting scale and minimum to the codes, and choosing the codes again
_MAX_HALF = torch.finfo(torch.float16).max


def round_to_blocks(weight: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Round a weight [N, K] to blocks of 32 input channels with scales in float16, as uint8 [N, bytes of a row].

    Q4_1: of the scales and minima that are tried, those with the least squared error of each group, of which
    `importance` [K] is how much that of each input channel counts. Q8_0: the largest value of a group has code 127 or
    -127.
    """
    # Values of a group first: torch sums much faster over the outer dimension.
    groups = weight.float().unflatten(1, (-1, BLOCK_TYPES[kind].size)).permute(2, 0, 1).contiguous()
    if kind == "Q8_0":
        scales = _rounded_halves(groups.abs().amax(0) / 127)
        codes = (groups / scales.float().masked_fill(scales == 0, 1)).round_().clamp_(-127, 127)
        parts = [_bytes(scales), codes.to(torch.int8).view(torch.uint8).permute(1, 2, 0)]
    else:
        assert kind == "Q4_1", kind
        counts = None if importance is None else importance.float().clamp_min(1e-12).view(-1, len(groups)).T[:, None]
        scales, minima = _fitted(groups, counts)
        first, second = _codes(groups, scales, minima).to(torch.uint8).permute(1, 2, 0).chunk(2, dim=-1)
        parts = [_bytes(_rounded_halves(scales)), _bytes(_rounded_halves(minima)), first | second << 4]
    return torch.cat(parts, dim=-1).flatten(1)


def _fitted(groups: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scales and minima [N, groups], rounded to float16, with the least squared error of groups [32, N, groups].

    counts: [32, 1, groups], how much the error of each value counts.
    """
    least, largest = groups.amin(0), groups.amax(0)
    least_error = torch.full_like(least, torch.inf)
    best = torch.zeros_like(least), least
    for margin in _MARGINS:
        cut = (largest - least) * margin
        scales, minima = (largest - least - 2 * cut) / _LARGEST, least + cut
        for _ in range(_STEPS):
            scales, minima = _regression(groups, _codes(groups, scales, minima), counts)
        error = _codes(groups, scales, minima).mul_(scales).add_(minima).sub_(groups).square_()
        total = (error if counts is None else error.mul_(counts)).sum(0)
        is_better = total < least_error
        least_error = torch.where(is_better, total, least_error)
        best = torch.where(is_better, scales, best[0]), torch.where(is_better, minima, best[1])
    return best


def _regression(groups: Tensor, codes: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the line through the values over their codes with the least squared error, rounded to float16."""
    weights = groups.new_ones(len(groups), 1, 1) if counts is None else counts
    total = weights.sum(0)
    mean_code, mean_value = ((part * weights).sum(0) / total for part in (codes, groups))
    from_mean = codes - mean_code
    weighted = from_mean * weights
    slope = (weighted * groups).sum(0) / (weighted * from_mean).sum(0).clamp_min(1e-30)
    scales = _rounded_halves(slope.clamp_min(0)).float()
    return scales, _rounded_halves(mean_value - scales * mean_code).float()


def _codes(groups: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return (groups - minima).div_(scales.masked_fill(scales == 0, 1)).round_().clamp_(0, _LARGEST)


def _rounded_halves(values: Tensor) -> Tensor:
    return values.clamp(-_MAX_HALF, _MAX_HALF).half()


def _bytes(halves: Tensor) -> Tensor:
    return halves[..., None].view(torch.uint8)
