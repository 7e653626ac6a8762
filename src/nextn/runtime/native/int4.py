"""Weights of four bits: codes in groups along K, each group of an output channel with its own scale and zero point.

A weight is (code - zero point) * scale, and is quantized without calibration data. Activations are rounded to int8 as
for weights of eight bits, see quantization.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.errors import ConfigError
from nextn.runtime.native.abi import INT4, Runtime
from nextn.runtime.native.memory import rows_per_slice
from nextn.runtime.native.quantization import round_rows

GROUP = 64  # values along K with a common scale, of weights that are quantized here
BYTES_PER_WEIGHT = 1 / 2 + 4 / GROUP
_COLUMNS = 32  # output channels of a block (csrc/product.h)
GROUPS = (32, 64, 128)  # values along K, of all weights
_ZERO_BITS = 0xFF  # of a scale's float, which hold the zero point (csrc/int4.cpp)


class Int4Weight(NamedTuple):
    """A quantized weight [..., N, K] in ceil(K / group) groups."""

    codes: Tensor  # uint8 [..., N, K], from 0 to 15
    scales: Tensor  # float32 [..., N, groups]
    zeros: Tensor  # uint8 [..., N, groups]: the code of weight 0

    @property
    def dequantized(self) -> Tensor:
        """The float32 weight that products use."""
        groups, k = self.scales.shape[-1], self.codes.shape[-1]
        size = group_size(k, groups)
        zeros, scales = (each.repeat_interleave(size, -1)[..., :k] for each in (self.zeros, self.scales))
        return (self.codes.float() - zeros.float()) * scales


def group_size(k: int, groups: int) -> int:
    """Return the group size if `k` values are in `groups` groups. Raises ConfigError if no kernel supports it."""
    # With few values, several sizes give one group: the smallest holds them all.
    for size in GROUPS:
        if -(-k // size) == groups:
            return size
    raise ConfigError(
        f"{groups} groups of {k} values of an int4 weight; expected groups of 32, 64 or 128 values: "
        f"{', '.join(str(-(-k // size)) for size in GROUPS)}"
    )


@torch.no_grad()
def quantize_int4(weight: Tensor, group: int, runtime: Runtime) -> Int4Weight:
    """Quantize weight [N, K] in bfloat16 or float32 with zero points, rounding to nearest.

    The range of a group reaches from its least to its largest value and contains 0. Parts of it, 80 to 95 %, are tried,
    too: values beyond are clamped, but the others have a finer scale. The part with the least squared error is taken.
    """
    (n, k), groups = weight.shape, -(-weight.shape[1] // group)
    codes, zeros = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, groups, dtype=torch.uint8)
    scales = torch.empty(n, groups)
    runtime.call(
        "quantize_int4", [codes.view(torch.bool), scales, zeros.view(torch.bool), weight.contiguous()], [group]
    )
    return Int4Weight(codes, scales, zeros)


def int4_linear(x: Tensor, weight: Int4Weight) -> Tensor:
    """Multiply activations [..., K] with a weight [N, K] -> float32 [..., N], as the native op does."""
    size = group_size(weight.codes.shape[-1], weight.scales.shape[-1])
    rounded, row_scales = round_rows(x)
    values = rounded.flatten(-2).unflatten(-1, (-1, size))[..., : weight.scales.shape[-1], :]
    codes = pad(weight.codes.float(), (0, -weight.codes.shape[-1] % size)).unflatten(-1, (-1, size))
    sums = torch.einsum("...gk,ngk->...ng", values, codes - weight.zeros[..., None].float())  # whole numbers
    scales = row_scales.repeat_interleave(rounded.shape[-1] // size, -1)[..., None, : weight.scales.shape[-1]]
    return (sums * (scales * weight.scales)).sum(-1)


class Int4Format(NamedTuple):
    """The packed form of weights that are quantized to four bits as they are packed (csrc/int4.cpp)."""

    group: int = GROUP

    @property
    def type(self) -> int:
        return INT4 + GROUPS.index(self.group)

    @torch.no_grad()
    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        """Quantize weight [N, K] or [E, N, K] into the layout of the native products. `take` allocates bytes."""
        *_, n, k = weight.shape
        matrices = weight.reshape(-1, n, k)
        memory = take(packed_bytes(n, k, self.group) * len(matrices))
        num_rows = rows_per_slice(weight, _COLUMNS)
        for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
            for start, rows in slices_released_after_use(matrix, num_rows):
                first, size = (packed_bytes(count, k, self.group) for count in (start, len(rows)))
                pack_int4(quantize_int4(rows, self.group, runtime), self.group, packed[first : first + size])
        return memory


def packed_bytes(n: int, k: int, group: int) -> int:
    """Return the size of a packed weight [N, K]."""
    return -(-n // _COLUMNS) * -(-k // group) * _COLUMNS * (group // 2 + 4)


def pack_int4_rows(weight: Int4Weight, group: int, take: Callable[[int], Tensor]) -> Tensor:
    """Pack [N, K] as `pack_int4` does, some rows at a time, in memory that `take` allocates."""
    n, k = weight.codes.shape
    memory, num_rows = take(packed_bytes(n, k, group)), rows_per_slice(weight.codes, _COLUMNS)
    for start in range(0, n, num_rows):
        rows = Int4Weight(*(each[start : start + num_rows] for each in weight))
        first, size = (packed_bytes(count, k, group) for count in (start, len(rows.codes)))
        pack_int4(rows, group, memory[first : first + size])
    return memory


def _storable(scales: Tensor) -> Tensor:
    """Round float32 scales to those whose last eight bits are 0."""
    return ((scales.view(torch.int32) + (_ZERO_BITS + 1) // 2) & ~_ZERO_BITS).view(torch.float32)


def pack_int4(weight: Int4Weight, group: int, packed: Tensor) -> None:
    """Pack [N, K] into the bytes that the native products read.

    They are blocks of 32 output channels, each for every group 32 words and two codes a byte.
    """
    n, k = weight.codes.shape
    missing = -n % _COLUMNS
    codes = pad(weight.codes, (0, -k % group, 0, missing)).view(torch.int32)  # four along K
    codes = codes.view(-1, _COLUMNS, weight.scales.shape[-1], group // 4)
    halves = codes[:, : _COLUMNS // 2] | (codes[:, _COLUMNS // 2 :] << 4)
    words = _storable(weight.scales.float()).view(torch.int32) | weight.zeros.int()
    blocks = packed.view(torch.int32).view(len(codes), weight.scales.shape[-1], -1)
    blocks[..., :_COLUMNS] = pad(words, (0, 0, 0, missing)).view(-1, _COLUMNS, words.shape[-1]).transpose(1, 2)
    blocks[..., _COLUMNS:].unflatten(-1, (group // 4, -1)).copy_(halves.permute(0, 2, 3, 1))
