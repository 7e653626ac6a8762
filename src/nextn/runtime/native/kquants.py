"""Packed weights of GGUF's K-quants (csrc/kquants.cpp), with the codes, scales and minima of the file.

Activations are rounded to sixteen bits as for other weights of few bits (quantization.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.checkpoint.gguf_blocks import KQuantWeight
from nextn.checkpoint.gguf_types import BLOCK_TYPES, K_QUANTS, SUPERBLOCK
from nextn.runtime.native.abi import Q4_K
from nextn.runtime.native.grouped import COLUMNS
from nextn.runtime.native.memory import merge_weights, rows_per_slice
from nextn.runtime.native.quantization import GROUP, round_rows


class KQuantFormat(NamedTuple):
    """The packed layout of one type."""

    kind: str  # one of `K_QUANTS`

    @property
    def type(self) -> int:
        """The packed type in product.h."""
        return Q4_K + K_QUANTS.index(self.kind)

    @property
    def _high_bits(self) -> int:
        """Bits of a code above the lower four."""
        return BLOCK_TYPES[self.kind].bits - 4

    def packed_bytes(self, n: int, k: int) -> int:
        """Return the size of a packed weight [N, K]."""
        _, _, bits, group_size = BLOCK_TYPES[self.kind]
        factors = (4 + SUPERBLOCK // group_size) * (1 if self.kind == "Q6_K" else 2)
        return -(-n // COLUMNS) * COLUMNS * k // SUPERBLOCK * (SUPERBLOCK * bits // 8 + factors)

    def pack_rows(self, weight: KQuantWeight, take: Callable[[int], Tensor]) -> Tensor:
        """Pack a weight [N, K], some rows at a time, in memory that `take` allocates."""
        n, k = weight.codes.shape
        memory, num_rows = take(self.packed_bytes(n, k)), rows_per_slice(weight.codes, COLUMNS)
        for start in range(0, n, num_rows):
            rows = weight.map(lambda part, start=start: part[start : start + num_rows])
            first, size = (self.packed_bytes(count, k) for count in (start, len(rows.codes)))
            self._pack(rows, memory[first : first + size])
        return memory

    def _pack(self, weight: KQuantWeight, packed: Tensor) -> None:
        """Pack in blocks of 32 output channels: for each superblock scales, factors of groups, and codes."""
        missing, k = -len(weight.codes) % COLUMNS, weight.codes.shape[1]
        padded = weight.map(lambda part: torch.nn.functional.pad(part, (0, 0, 0, missing)))
        parts = [padded.scales, padded.min_scales, padded.group_scales, padded.group_mins]
        blocks = [_by_superblock(part, k).view(torch.uint8).flatten(2) for part in parts if part is not None]
        blocks.append(self._codes(padded.codes))
        packed.view(torch.uint8).view(*blocks[0].shape[:2], -1).copy_(torch.cat(blocks, dim=-1))

    def _codes(self, codes: Tensor) -> Tensor:
        """The codes [N, K] of each block and superblock: runs of steps, their higher bits first."""
        bits = self._high_bits
        num_steps = 4 // bits if bits else 1
        runs = codes.view(-1, 2, COLUMNS // 2, codes.shape[1] // SUPERBLOCK, SUPERBLOCK // 4 // num_steps, num_steps, 4)
        halves = runs.permute(1, 0, 3, 4, 5, 2, 6).flatten(-2)  # [half, block, superblock, run, step, 64]
        low = (halves[0] & 15) | halves[1] << 4
        if not bits:
            return low.flatten(2)
        places = (
            torch.arange(2 * num_steps, dtype=torch.uint8).view(num_steps, 2).T[:, None, None, None, :, None] * bits
        )
        high = (halves >> 4 << places).sum((0, 4), dtype=torch.uint8)  # no two share a bit
        return torch.cat((high[..., None, :], low), dim=-2).flatten(2)


def _by_superblock(part: Tensor, k: int) -> Tensor:
    """Arrange scales or factors [N, groups] as [block, superblock, pair of groups, channel, group of the pair]."""
    of_superblock = part.shape[1] // (k // SUPERBLOCK)
    pairs = part.view(-1, COLUMNS, k // SUPERBLOCK, -(-of_superblock // 2), min(of_superblock, 2))
    return pairs.permute(0, 2, 3, 1, 4).contiguous()


def merge_kquants(weights: Sequence[KQuantWeight], parts: int, columns: int) -> KQuantWeight:
    """Merge weights of one type as `merge_weights` does."""
    first, *others = weights
    if not others and parts == 1:
        return first
    return first.map(lambda *each: merge_weights(each, parts, columns), *others)


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
