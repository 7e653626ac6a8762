"""Weights of four and eight bits in groups along K, each group of an output channel with its own scale and zero point.

A weight is (code - zero point) * scale, or code * scale + minimum. Activations are rounded to sixteen bits
(quantization.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.errors import ConfigError
from nextn.runtime.native.abi import INT4, INT4_MINIMA, INT8
from nextn.runtime.native.memory import rows_per_slice
from nextn.runtime.native.quantization import round_rows

COLUMNS = 32  # output channels of a block (csrc/product.h)
GROUPS = (32, 64, 128)  # values along K, of all weights
_ZERO_BITS = 0xFF  # of a scale's float, which hold the zero point (csrc/grouped.cpp)


class GroupedWeight(NamedTuple):
    """A quantized weight [..., N, K] in ceil(K / group) groups."""

    codes: Tensor  # uint8 [..., N, K], from 0 to 2 ** bits - 1
    scales: Tensor  # float32 [..., N, groups]
    zeros: Tensor  # [..., N, groups]: uint8, the code of weight 0; or float16, the weight of code 0, the minimum

    @property
    def has_minima(self) -> bool:
        return self.zeros.dtype == torch.float16

    @property
    def dequantized(self) -> Tensor:
        """The float32 weight that products use."""
        groups, k = self.scales.shape[-1], self.codes.shape[-1]
        size = group_size(k, groups)
        zeros, scales = (each.float().repeat_interleave(size, -1)[..., :k] for each in (self.zeros, self.scales))
        return self.codes * scales + zeros if self.has_minima else (self.codes - zeros) * scales


class GroupedFormat(NamedTuple):
    """How many bits a code has, how many values along K a group, and whether it has a minimum: groups of 32 may."""

    bits: int
    group: int
    has_minima: bool = False

    @property
    def type(self) -> int:
        """The type of product.h."""
        if self.has_minima:
            return INT4_MINIMA + (self.bits == 8)
        return (INT4 if self.bits == 4 else INT8) + GROUPS.index(self.group)

    def packed_bytes(self, n: int, k: int) -> int:
        """Return the size of a packed weight [N, K]."""
        return -(-n // COLUMNS) * -(-k // self.group) * COLUMNS * (self.group * self.bits // 8 + 4)

    def pack_rows(self, weight: GroupedWeight, take: Callable[[int], Tensor]) -> Tensor:
        """Pack [N, K] as `pack` does, some rows at a time, in memory that `take` allocates."""
        n, k = weight.codes.shape
        memory, num_rows = take(self.packed_bytes(n, k)), rows_per_slice(weight.codes, COLUMNS)
        for start in range(0, n, num_rows):
            rows = GroupedWeight(*(each[start : start + num_rows] for each in weight))
            first, size = (self.packed_bytes(count, k) for count in (start, len(rows.codes)))
            self.pack(rows, memory[first : first + size])
        return memory

    def pack(self, weight: GroupedWeight, packed: Tensor) -> None:
        """Pack [N, K] into the bytes that the native products read.

        They are blocks of 32 output channels, each for every group 32 words and the codes, of four bits two a byte.
        """
        n, k = weight.codes.shape
        missing, groups = -n % COLUMNS, weight.scales.shape[-1]
        codes = pad(weight.codes, (0, -k % self.group, 0, missing)).view(torch.int32)  # four along K
        codes = codes.view(-1, COLUMNS, groups, self.group // 4)
        if self.bits == 4:
            codes = codes[:, : COLUMNS // 2] | (codes[:, COLUMNS // 2 :] << 4)
        words = _words(weight)
        blocks = packed.view(torch.int32).view(len(codes), groups, -1)
        blocks[..., :COLUMNS] = pad(words, (0, 0, 0, missing)).view(-1, COLUMNS, groups).transpose(1, 2)
        blocks[..., COLUMNS:].unflatten(-1, (self.group // 4, -1)).copy_(codes.permute(0, 2, 3, 1))


def group_size(k: int, groups: int) -> int:
    """Return the group size if `k` values are in `groups` groups. Raises ConfigError if no kernel supports it."""
    # With few values, several sizes give one group: the smallest holds them all.
    for size in GROUPS:
        if -(-k // size) == groups:
            return size
    raise ConfigError(
        f"{groups} groups of {k} values of a quantized weight; expected groups of 32, 64 or 128 values: "
        f"{', '.join(str(-(-k // size)) for size in GROUPS)}"
    )


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


def _words(weight: GroupedWeight) -> Tensor:
    """Return the int32 words of all groups, see csrc/grouped.cpp."""
    if weight.has_minima:
        scales, minima = (each.half().view(torch.int16).int() for each in (weight.scales, weight.zeros))
        return scales & 0xFFFF | minima << 16
    # The scale is rounded to one whose last eight bits are 0.
    return (weight.scales.float().view(torch.int32) + (_ZERO_BITS + 1) // 2) & ~_ZERO_BITS | weight.zeros.int()
