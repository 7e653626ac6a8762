"""Weights of a quantized checkpoint in the layout of the native products, with the codes that they are stored with.

Nothing is rounded, except scales in float32 of four-bit weights, to 16 bits.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from nextn.checkpoint.quantized_weights import QuantizedWeight
from nextn.model.packed_linear import StoredCodes
from nextn.runtime.native.abi import INT4, INT8
from nextn.runtime.native.int4 import GROUPS, Int4Weight, pack_int4_rows
from nextn.runtime.native.memory import merge_weights
from nextn.runtime.native.quantization import EIGHT_BITS, pack_codes
from nextn.text_format import some


def unsupported(codes: StoredCodes) -> str | None:
    """Return why no native product reads these codes; None if one does."""
    if codes.is_ordered:
        return "groups in an order of their own (desc_act)"
    if codes.bits == 8 and codes.num_groups > 1:
        return "8 bits in groups"
    if codes.bits == 8 and not codes.is_symmetric:
        return "8 bits with zero points"
    return f"groups of {codes.group_size}" if codes.bits == 4 and _group(codes) is None else None


def notes_on(weights: Iterable[StoredCodes]) -> list[str]:
    """Return notes on weights that the native backend does not decode with their own codes."""
    names: dict[str, list[str]] = {}
    for codes in weights:
        if (reason := unsupported(codes)) is not None:
            names.setdefault(reason, []).append(codes.name)
    return [
        f"the native backend dequantizes {some(each, 1)}, as no product reads {reason}"
        for reason, each in names.items()
    ]


def type_of_codes(codes: StoredCodes) -> int:
    """Return the type of product.h that supported codes are packed as."""
    return INT8 if codes.bits == 8 else INT4 + GROUPS.index(_group(codes) or 0)


@torch.no_grad()
def pack_stored(weights: Sequence[StoredCodes], parts: int, columns: int, take: Callable[[int], Tensor]) -> Tensor:
    """Pack weights [N, K] of one type in one matrix, see `merge_weights`. `take` allocates bytes."""
    stored = [codes.integers() for codes in weights]
    if weights[0].bits == 8:
        signed = [weight.codes.bitwise_xor(0x80).view(torch.int8) for weight in stored]
        scales = merge_weights([weight.scales.float() for weight in stored], parts, columns)
        return pack_codes(merge_weights(signed, parts, columns), scales[:, 0], EIGHT_BITS, take)
    group = _group(weights[0])
    assert group is not None
    tensors = zip(*(_in_groups(weight, group) for weight in stored), strict=True)
    return pack_int4_rows(Int4Weight(*(merge_weights(each, parts, columns) for each in tensors)), group, take)


def _group(codes: StoredCodes) -> int | None:
    """The largest group of the kernels that the stored groups consist of."""
    sizes = (size for size in reversed(GROUPS) if codes.group_size % size == 0)
    return next(sizes, GROUPS[0] if codes.num_groups == 1 else None)


def _in_groups(weight: QuantizedWeight, group: int) -> Int4Weight:
    """The weight in smaller groups: each stored group is several with the same scale and zero point."""
    num_groups, repeats = -(-weight.codes.shape[1] // group), -(-weight.group_size // group)
    zeros = torch.full(weight.scales.shape, weight.middle, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    scales, zeros = (each.repeat_interleave(repeats, 1)[:, :num_groups] for each in (weight.scales.float(), zeros))
    return Int4Weight(weight.codes, scales, zeros)
