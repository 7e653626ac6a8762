"""Weights of a quantized checkpoint, packed for the native products with their stored codes.

Nothing is rounded, except that float32 scales of integers are rounded to 16 bits.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from nextn.checkpoint.quantized_weights import QuantizedWeight
from nextn.model.packed_linear import StoredCodes, StoredFp8, StoredIntegers, StoredKQuant
from nextn.runtime.native.fp8 import Fp8Format
from nextn.runtime.native.grouped import GROUPS, GroupedFormat, GroupedWeight
from nextn.runtime.native.kquants import KQuantFormat, merge_kquants
from nextn.runtime.native.memory import merge_weights
from nextn.text_format import some


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
