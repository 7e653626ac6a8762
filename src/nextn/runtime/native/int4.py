"""Weights that are rounded to four bits, in groups with zero points, without calibration data."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.runtime.native.abi import Runtime
from nextn.runtime.native.grouped import COLUMNS, GroupedFormat, GroupedWeight
from nextn.runtime.native.memory import rows_per_slice

GROUP = 64  # values along K with a common scale


@torch.no_grad()
def quantize_int4(weight: Tensor, group: int, runtime: Runtime) -> GroupedWeight:
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
    return GroupedWeight(codes, scales, zeros)


class Int4Format(NamedTuple):
    """The packed form of weights that are quantized to four bits as they are packed."""

    group: int = GROUP

    @property
    def type(self) -> int:
        return GroupedFormat(4, self.group).type

    @property
    def bytes_per_weight(self) -> float:
        return 1 / 2 + 4 / self.group

    @torch.no_grad()
    def pack(self, weight: Tensor, take: Callable[[int], Tensor], runtime: Runtime) -> Tensor:
        """Quantize weight [N, K] or [E, N, K] into the layout of the native products. `take` allocates bytes."""
        *_, n, k = weight.shape
        matrices, layout = weight.reshape(-1, n, k), GroupedFormat(4, self.group)
        memory = take(layout.packed_bytes(n, k) * len(matrices))
        num_rows = rows_per_slice(weight, COLUMNS)
        for matrix, packed in zip(matrices, memory.view(len(matrices), -1), strict=True):
            for start, rows in slices_released_after_use(matrix, num_rows):
                first, size = (layout.packed_bytes(count, k) for count in (start, len(rows)))
                layout.pack(quantize_int4(rows, self.group, runtime), packed[first : first + size])
        return memory
