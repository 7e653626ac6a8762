"""Read every value of a local head: NaN, infinity, huge and constant values, which samples may miss.

Tensors are streamed in small chunks by a few threads, so the time is that of reading the file and memory stays bounded.
Nothing is decoded: the bits of a float's magnitude, as an unsigned integer, order as the magnitudes do.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce

import numpy as np

from nextn.audit.norm_weights import Values
from nextn.audit.sampled_values import decode
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import TensorInfo

_CHUNK = 1024 * 1024  # bytes, so that a chunk is still in the processor's cache when its values are compared
_WORKERS = 4
# dtype -> (bytes of a value, bits of the smallest magnitude that is not finite).
_FLOATS = {
    "F64": (8, 0x7FF0000000000000),
    "F32": (4, 0x7F800000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E5M2": (1, 0x7C),
    "F8_E4M3": (1, 0x7F),
}


@dataclass(frozen=True)
class TensorSummary:
    """What all values of one float tensor have in common; of fp8, as stored, without scales."""

    num_nonfinite: int
    largest: float  # magnitude
    constant: float | None  # the only value, where all are equal; None for others


@dataclass(frozen=True)
class WholeValues:
    """The summaries of all float tensors of a head, scales included."""

    tensors: dict[str, TensorSummary]  # by tensor name; packed integers are left out
    num_bytes: int  # read

    @classmethod
    def of(cls, inventory: Inventory) -> "WholeValues":
        """Read the head. Raises CheckpointError if a file cannot be read."""
        infos = head_floats(inventory)
        with ThreadPoolExecutor(_WORKERS) as pool:
            summaries = pool.map(lambda info: _summary(inventory.checkpoint, info), infos)
            tensors = dict(zip((info.name for info in infos), summaries, strict=True))
        return cls(tensors, sum(info.nbytes for info in infos))


def head_floats(inventory: Inventory) -> list[TensorInfo]:
    """Return the head's float tensors, in the order of the files."""
    names = inventory.spellings(inventory.stored)
    infos = [inventory.checkpoint.tensors[name] for name in names]
    return sorted((i for i in infos if i.dtype in _FLOATS and i.nbytes), key=lambda info: (info.file, info.begin))


def is_local(inventory: Inventory) -> bool:
    """Whether all files that hold the head are on this machine's disks."""
    names = inventory.spellings(inventory.stored)
    sources = inventory.checkpoint.sources
    return all(isinstance(sources[inventory.checkpoint.tensors[name].file], LocalFile) for name in names)


@dataclass(frozen=True, slots=True)
class _Range:
    """The range of the bit patterns of some values, positive and negative ones apart (as signed integers)."""

    low: int  # as signed integers: of negative values, those with the smallest magnitude are largest
    high: int
    top: int  # as unsigned integers: the negative value with the largest magnitude, if there is one
    num_nonfinite: int

    def __or__(self, other: "_Range") -> "_Range":
        return _Range(
            min(self.low, other.low),
            max(self.high, other.high),
            max(self.top, other.top),
            self.num_nonfinite + other.num_nonfinite,
        )


def _summary(checkpoint: Checkpoint, info: TensorInfo) -> TensorSummary:
    size, limit = _FLOATS[info.dtype]
    ranges = reduce(_Range.__or__, (_range(chunk, size, limit) for chunk in checkpoint.chunks(info, _CHUNK)))
    largest = max(_magnitudes(ranges, size))
    value = _to_float(ranges.low, size, info.dtype) if ranges.low == ranges.high else None
    return TensorSummary(ranges.num_nonfinite, abs(_to_float(largest, size, info.dtype)), value)


def _range(data: bytes, size: int, limit: int) -> _Range:
    signed, unsigned = np.frombuffer(data, f"<i{size}"), np.frombuffer(data, f"<u{size}")
    found = _Range(int(signed.min()), int(signed.max()), int(unsigned.max()), 0)
    if max(_magnitudes(found, size)) < limit:
        return found
    magnitudes = unsigned & ((1 << 8 * size - 1) - 1)
    return _Range(found.low, found.high, found.top, int(np.count_nonzero(magnitudes >= limit)))


def _magnitudes(bits: _Range, size: int) -> Iterable[int]:
    """The bits of the largest positive and the largest negative magnitude."""
    sign = 1 << 8 * size - 1
    return max(0, bits.high), bits.top - sign if bits.top >= sign else 0


def _to_float(bits: int, size: int, dtype: str) -> float:
    values: Values | None = decode((bits % (1 << 8 * size)).to_bytes(size, "little"), dtype)
    assert values is not None
    return float(values[0])
