"""Packed fp8 (e4m3) weights in groups along K, each with one scale per output channel (csrc/fp8.cpp).

Products widen the weights to the model's dtype, so results have the bits of the dequantized matrix.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.runtime.native.abi import FP8, FP8_FLOATS
from nextn.runtime.native.grouped import COLUMNS, GROUPS, GroupedFormat
from nextn.runtime.native.memory import rows_per_slice

# Kernels read the codes as float16, which gives 1/256 of their values, so scales are stored times 256.
_SCALE = 256.0


class Fp8Format(NamedTuple):
    """The packed layout for one group size, and the dtype that products widen the weights to."""

    group: int  # values along K, one of `GROUPS`
    dtype: torch.dtype = torch.bfloat16

    @property
    def type(self) -> int:
        """The packed type in product.h."""
        return (FP8_FLOATS if self.dtype == torch.float32 else FP8) + GROUPS.index(self.group)

    def packed_bytes(self, n: int, k: int) -> int:
        """Return the size of a packed weight [N, K], the same as with 8-bit codes in groups."""
        return GroupedFormat(8, self.group).packed_bytes(n, k)

    def pack_rows(self, codes: Tensor, scales: Tensor, take: Callable[[int], Tensor]) -> Tensor:
        """Pack codes (bytes [N, K]) and float32 scales [N, groups] into memory that `take` allocates."""
        n, k = codes.shape
        memory, num_rows = take(self.packed_bytes(n, k)), rows_per_slice(codes, COLUMNS)
        for start in range(0, n, num_rows):
            end = min(start + num_rows, n)
            first = self.packed_bytes(start, k)
            packed = memory[first : first + self.packed_bytes(end - start, k)]
            self._pack(codes[start:end], scales[start:end], packed)
        return memory

    def _pack(self, codes: Tensor, scales: Tensor, packed: Tensor) -> None:
        """Pack in blocks of 32 output channels: for each group 32 scales, then codes as [pair along K][channel][2]."""
        n, k = codes.shape
        missing, groups = -n % COLUMNS, scales.shape[1]
        pairs = pad(codes, (0, -k % self.group, 0, missing)).view(torch.int16)
        pairs = pairs.view(-1, COLUMNS, groups, self.group // 2)
        values = pad(scales * _SCALE, (0, 0, 0, missing)).view(-1, COLUMNS, groups)
        blocks = packed.view(torch.int16).view(len(pairs), groups, -1)
        blocks[..., : 2 * COLUMNS].view(torch.float32).copy_(values.transpose(1, 2))
        blocks[..., 2 * COLUMNS :].unflatten(-1, (self.group // 2, -1)).copy_(pairs.permute(0, 2, 3, 1))
