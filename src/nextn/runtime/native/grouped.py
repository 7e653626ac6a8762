"""Weights of four and eight bits in groups along K, each group of an output channel with its own scale and zero point.

A weight is (code - zero point) * scale, or code * scale + minimum. Activations are rounded to sixteen bits
(quantization.py). The codes are those of a file, GGUF's K-quants with their minima
included (csrc/kquants.cpp), or weights are rounded as they are packed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.checkpoint.gguf_blocks import KQuantWeight
from nextn.checkpoint.gguf_file import BLOCK_TYPES, K_QUANTS, SUPERBLOCK
from nextn.checkpoint.mapped_memory import slices_released_after_use
from nextn.errors import ConfigError
from nextn.runtime.native.abi import INT4, INT4_MINIMA, INT8, Q4_K, Runtime
from nextn.runtime.native.memory import merge_weights, rows_per_slice

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


def _words(weight: GroupedWeight) -> Tensor:
    """Return the int32 words of all groups, see csrc/grouped.cpp."""
    if weight.has_minima:
        scales, minima = (each.half().view(torch.int16).int() for each in (weight.scales, weight.zeros))
        return scales & 0xFFFF | minima << 16
    # The scale is rounded to one whose last eight bits are 0.
    return (weight.scales.float().view(torch.int32) + (_ZERO_BITS + 1) // 2) & ~_ZERO_BITS | weight.zeros.int()


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
