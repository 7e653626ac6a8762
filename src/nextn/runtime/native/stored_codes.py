"""Weights of a quantized checkpoint, packed for the native products with their stored codes.

Nothing is rounded, except that float32 scales of integers are rounded to 16 bits.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nextn.checkpoint.quantized_weights import QuantizedWeight
from nextn.model.packed_linear import StoredCodes, StoredFp8, StoredIntegers, StoredKQuant
from nextn.runtime.native.abi import FP8, FP8_FLOATS
from nextn.runtime.native.grouped import COLUMNS, GROUPS, GroupedFormat, GroupedWeight, KQuantFormat, merge_kquants
from nextn.runtime.native.memory import merge_weights, rows_per_slice
from nextn.text_format import some

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


def unsupported(codes: StoredCodes) -> str | None:
    """Return why no native product supports these codes; None if one does."""
    if isinstance(codes, StoredFp8):
        return None if _fp8_group(codes) else f"blocks of {codes.block[0]} x {codes.block[1]}"
    if isinstance(codes, StoredKQuant):
        return None
    integers = _integers(codes)
    if integers.is_reordered:
        return "reordered groups (desc_act)"
    return None if _group(integers) else f"groups of {integers.group_size}"


def notes_on(weights: Iterable[StoredCodes]) -> list[str]:
    """Return notes on weights that the native backend dequantizes."""
    names: dict[str, list[str]] = {}
    for codes in weights:
        if (reason := unsupported(codes)) is not None:
            names.setdefault(reason, []).append(codes.name)
    return [
        f"the native backend dequantizes {some(each, 1)}, as no product supports {reason}"
        for reason, each in names.items()
    ]


def type_of_codes(codes: StoredCodes) -> int:
    """Return the packed type (product.h) of supported codes."""
    if isinstance(codes, StoredFp8):
        return _fp8_format(codes).type
    if isinstance(codes, StoredKQuant):
        return KQuantFormat(codes.kind).type
    return _format(_integers(codes)).type


@torch.no_grad()
def pack_stored(weights: Sequence[StoredCodes], parts: int, columns: int, take: Callable[[int], Tensor]) -> Tensor:
    """Pack weights [N, K] of one type into one matrix, see `merge_weights`. `take` allocates bytes."""
    if isinstance(weights[0], StoredFp8):
        return _pack_fp8([codes for codes in weights if isinstance(codes, StoredFp8)], parts, columns, take)
    if isinstance(weights[0], StoredKQuant):
        k_quants = [codes for codes in weights if isinstance(codes, StoredKQuant)]
        merged = merge_kquants([codes.weight() for codes in k_quants], parts, columns)
        return KQuantFormat(weights[0].kind).pack_rows(merged, take)
    return _pack_integers([_integers(codes) for codes in weights], parts, columns, take)


def _pack_fp8(weights: Sequence[StoredFp8], parts: int, columns: int, take: Callable[[int], Tensor]) -> Tensor:
    layout, stored = _fp8_format(weights[0]), [codes.weight() for codes in weights]
    codes = merge_weights([weight.codes.view(torch.uint8) for weight in stored], parts, columns)
    all_scales = []
    for scales, (rows, size), shape in ((each.scales, each.block, each.codes.shape) for each in stored):
        of_rows = scales.repeat_interleave(rows, 0)[: shape[0]]
        num_groups = -(-shape[1] // layout.group)
        all_scales.append(of_rows.repeat_interleave(-(-size // layout.group), 1)[:, :num_groups])
    packed = layout.pack_rows(codes, merge_weights(all_scales, parts, columns), take)
    for each in weights:
        each.stored.release()
    return packed


def _pack_integers(
    weights: Sequence[StoredIntegers], parts: int, columns: int, take: Callable[[int], Tensor]
) -> Tensor:
    stored, layout = [codes.integers() for codes in weights], _format(weights[0])
    tensors = zip(*(_in_groups(weight, layout.group) for weight in stored), strict=True)
    return layout.pack_rows(GroupedWeight(*(merge_weights(each, parts, columns) for each in tensors)), take)


def _integers(codes: StoredCodes) -> StoredIntegers:
    assert isinstance(codes, StoredIntegers)
    return codes


def _format(codes: StoredIntegers) -> GroupedFormat:
    group = _group(codes)
    assert group is not None, "supported codes"
    return GroupedFormat(codes.bits, group, codes.has_minima)


def _group(codes: StoredIntegers) -> int | None:
    return _group_of(codes.group_size, codes.num_groups)


def _fp8_format(codes: StoredFp8) -> Fp8Format:
    group = _fp8_group(codes)
    assert group is not None, "supported codes"
    return Fp8Format(group, codes.stand_in.dtype)


def _fp8_group(codes: StoredFp8) -> int | None:
    size = codes.block[1]
    num_groups = -(-codes.stand_in.shape[1] // size)
    return max(GROUPS) if num_groups == 1 else _group_of(size, num_groups)


def _group_of(size: int, num_groups: int) -> int | None:
    """The largest group size of the kernels that divides the stored one; None if there is none."""
    sizes = (each for each in reversed(GROUPS) if size % each == 0)
    return next(sizes, GROUPS[0] if num_groups == 1 else None)


def _in_groups(weight: QuantizedWeight, group: int) -> GroupedWeight:
    """The weight in smaller groups: a stored group becomes several with the same scale and zero point."""
    if weight.minima is not None:
        return GroupedWeight(weight.codes, weight.scales.float(), weight.minima)
    num_groups, repeats = -(-weight.codes.shape[1] // group), -(-weight.group_size // group)
    zeros = torch.full(weight.scales.shape, weight.middle, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    scales, zeros = (each.repeat_interleave(repeats, 1)[:, :num_groups] for each in (weight.scales.float(), zeros))
    return GroupedWeight(weight.codes, scales, zeros)


# Kernels read the codes as float16, which gives 1/256 of their values, so scales are stored times 256.
