"""Weights in fp8 (e4m3) in groups along K, each group of an output channel with its own scale (csrc/fp8.cpp).

Products widen the weights to the type of the activations, so they have the bits of the dequantized matrix.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.runtime.native.abi import FP8
from nextn.runtime.native.grouped import COLUMNS, GROUPS, GroupedFormat
from nextn.runtime.native.memory import rows_per_slice

# Kernels multiply the codes with 256 times their scales: the codes as float16 are 256 times less.
_SCALE = 256.0


class Fp8Format(NamedTuple):
    """How many values along K a group has, of `GROUPS`."""

    group: int

    @property
    def type(self) -> int:
        """The type of product.h."""
        return FP8 + GROUPS.index(self.group)

    def packed_bytes(self, n: int, k: int) -> int:
        """Return the size of a packed weight [N, K]: that of eight bits in groups."""
        return GroupedFormat(8, self.group).packed_bytes(n, k)

    def pack_rows(self, codes: Tensor, scales: Tensor, take: Callable[[int], Tensor]) -> Tensor:
        """Pack codes, bytes [N, K], and float32 scales [N, groups] in memory that `take` allocates."""
        n, k = codes.shape
        memory, num_rows = take(self.packed_bytes(n, k)), rows_per_slice(codes, COLUMNS)
        for start in range(0, n, num_rows):
            end = min(start + num_rows, n)
            first = self.packed_bytes(start, k)
            packed = memory[first : first + self.packed_bytes(end - start, k)]
            self._pack(codes[start:end], scales[start:end], packed)
        return memory

    def _pack(self, codes: Tensor, scales: Tensor, packed: Tensor) -> None:
        """Pack blocks of 32 output channels: for each group 32 scales, then the codes, [pair along K][channel][2]."""
        n, k = codes.shape
        missing, groups = -n % COLUMNS, scales.shape[1]
        pairs = pad(codes, (0, -k % self.group, 0, missing)).view(torch.int16)
        pairs = pairs.view(-1, COLUMNS, groups, self.group // 2)
        values = pad(scales * _SCALE, (0, 0, 0, missing)).view(-1, COLUMNS, groups)
        blocks = packed.view(torch.int16).view(len(pairs), groups, -1)
        blocks[..., : 2 * COLUMNS].view(torch.float32).copy_(values.transpose(1, 2))
        blocks[..., 2 * COLUMNS :].unflatten(-1, (self.group // 2, -1)).copy_(pairs.permute(0, 2, 3, 1))
