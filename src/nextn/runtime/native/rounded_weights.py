"""Weights that are rounded to four or eight bits in groups as they are packed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.runtime.native.abi import Runtime
from nextn.runtime.native.grouped import COLUMNS, GroupedFormat, GroupedWeight
from nextn.runtime.native.memory import rows_per_slice


@torch.no_grad()
def quantize_groups(weight: Tensor, bits: int, group: int, runtime: Runtime) -> GroupedWeight:
    """Quantize weight [N, K] in bfloat16 or float32 symmetrically, as `round_to_nearest` does.

    The scales of a weight in float32 are rounded to sixteen bits.
    """
    (n, k), groups = weight.shape, -(-weight.shape[1] // group)
    codes, zeros = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, groups, dtype=torch.uint8)
    scales = torch.empty(n, groups)
    outs = [codes.view(torch.bool), scales, zeros.view(torch.bool)]
    runtime.call("quantize_groups", [*outs, weight.contiguous()], [bits, group])
    return GroupedWeight(codes, scales, zeros)


class RoundedFormat(NamedTuple):
    """The packed form of weights that are rounded to `bits` as they are packed, in groups of `group` values along K."""

    bits: int
    group: int

    @property
    def layout(self) -> GroupedFormat:
        return GroupedFormat(self.bits, self.group)

    @property
    def type(self) -> int:
        """A type of product.h."""
        return self.layout.type

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + 4 / self.group

    @torch.no_grad()
    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        """Quantize weight [N, K] or [E, N, K] into the layout of the native products. `take` allocates bytes."""
        *_, n, k = weight.shape
        matrices, layout = weight.reshape(-1, n, k), self.layout
        memory = take(layout.packed_bytes(n, k) * len(matrices))
        num_rows = rows_per_slice(weight, COLUMNS)
        for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
            for start, rows in slices_released_after_use(matrix, num_rows):
                first, size = (layout.packed_bytes(count, k) for count in (start, len(rows)))
                layout.pack(quantize_groups(rows, self.bits, self.group, runtime), packed[first : first + size])
        return memory

    @torch.no_grad()
    def values(self, weight: Tensor, runtime: Runtime) -> Tensor:
        """Return the float32 values that products use of a weight [..., K]."""
        rows = weight.reshape(-1, weight.shape[-1])
        return quantize_groups(rows, self.bits, self.group, runtime).dequantized.view(weight.shape)


# What `Trunk.weights` int4 and int8 are.
FOUR_BITS, EIGHT_BITS = RoundedFormat(4, 32), RoundedFormat(8, 64)
