"""The values that the rules in `values` look at: samples of any checkpoint, and every value of a local head.

Samples are complete norm weights and parts of matrices, of head and trunk: at most about 130 reads, in parallel; packed
integers are not decoded. A local head is read completely, as samples may miss NaN, infinity, huge and constant values:
a few threads stream its tensors in small chunks, so the time is that of reading the file and memory stays bounded.
Nothing is decoded there: the bits of a float's magnitude, as an unsigned integer, order as the magnitudes do.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

from nextn.audit_rules.findings import same
from nextn.audit_rules.norm_weights import NormValues, Values
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import evenly_spaced
from nextn.checkpoint.quantization import PLAIN, split_name
from nextn.checkpoint.remote import LocalFile, map_reads
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo

MAX_NORM_BYTES = 256 * 1024  # no norm is larger
SAMPLE_BYTES = 4096  # of each matrix
HEAD_NORMS, HEAD_MATRICES, TRUNK_MATRICES = 40, 48, 16  # tensors to read at most
LAYERS_PER_NORM, LAST_LAYERS = 4, 16  # trunk layers to read for each kind of norm, among this many last ones
# Norms of something other than one hidden state: their weights cross 0 in published checkpoints (mlx-vlm#2041).
_OTHER_NORMS = ("hyper_connection", "hc_", "indexer", "linear_attn", "mamba", "mixer")
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


@dataclass(frozen=True, eq=False)
class SampledValues:
    """Bytes read from the tensors of a head and its trunk."""

    inventory: Inventory
    matrices: Mapping[str, bytes] = field(repr=False)  # canonical name -> a sample of the head's matrix
    norms: Mapping[str, bytes] = field(repr=False)  # canonical name -> all bytes of the head's norm
    # Canonical name of a sampled matrix of the head's block -> its counterpart in one of the trunk's last layers.
    like: Mapping[str, tuple[TensorInfo, bytes]] = field(repr=False)
    # Kind of norm -> the norms of the trunk's last layers, and the final norm, with all their bytes.
    trunk_norms: Mapping[str, Sequence[tuple[TensorInfo, bytes]]] = field(repr=False)

    @classmethod
    def of(cls, inventory: Inventory) -> "SampledValues":
        own = inventory.own
        norms = evenly_spaced([each for each in own if _is_norm(inventory.info(each))], HEAD_NORMS)
        matrices = _choose(inventory, [each for each in own if is_matrix(inventory, inventory.info(each))])
        layers = _last_layers(inventory)
        like = dict(evenly_spaced(sorted(_counterparts(layers, matrices).items()), TRUNK_MATRICES))
        all_trunk_norms = dict(_trunk_norms(inventory, layers))
        head_kinds = {_kind(each, all_trunk_norms) for each in norms}
        trunk_norms = {kind: infos for kind, infos in all_trunk_norms.items() if kind in head_kinds}
        stored, samples = inventory.stored, inventory.checkpoint.samples
        trunk_names = [info.name for infos in trunk_norms.values() for info in infos]
        norm_bytes = iter(samples([*(stored[each] for each in norms), *trunk_names], MAX_NORM_BYTES))
        matrix_names = [*(stored[each] for each in matrices), *(info.name for info in like.values())]
        matrix_bytes = iter(samples(matrix_names, SAMPLE_BYTES))
        return cls(
            inventory,
            norms={each: next(norm_bytes) for each in norms},
            trunk_norms={kind: [(info, next(norm_bytes)) for info in infos] for kind, infos in trunk_norms.items()},
            matrices={each: next(matrix_bytes) for each in matrices},
            like={each: (info, next(matrix_bytes)) for each, info in like.items()},
        )

    @cached_property
    def head_norms(self) -> dict[str, NormValues]:
        """Return tensor name -> effective norm weights, of the norms that can be decoded."""
        return {
            self.inventory.stored[each]: NormValues(self._effective(array), _kind(each, self.trunk_norms))
            for each, data in self.norms.items()
            if (array := decode(data, self.inventory.info(each).dtype)) is not None
        }

    @cached_property
    def trunk_layer_norms(self) -> dict[str, NormValues]:
        """Return the same of the trunk's last layers, concatenated for each kind of norm."""
        return {
            ", ".join(info.name for info, _ in read): NormValues(self._effective(np.concatenate(arrays)), kind)
            for kind, read in self.trunk_norms.items()
            if len(arrays := _decoded((data, info.dtype) for info, data in read)) == len(read)
        }

    @cached_property
    def weights(self) -> dict[str, Values]:
        """Return canonical name -> sampled values, of the matrices that can be decoded; fp8 without its scales."""
        return _floats((each, self.inventory.info(each), data) for each, data in self.matrices.items())

    @cached_property
    def trunk_weights(self) -> dict[str, Values]:
        """Return the same of `like`."""
        return _floats((each, info, data) for each, (info, data) in self.like.items())

    def _effective(self, stored: Values) -> Values:
        return stored + 1 if self.inventory.family.norm_weight == "1+w" else stored


def same_values(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Compare two tensors by `same`, or samples of their values to rounding where only their float dtypes differ."""
    infos = [checkpoint.info(each) for each in (a, b)]
    dtypes = {info.dtype for info in infos}
    if len(dtypes) == 1 or not dtypes <= PLAIN or infos[0].shape != infos[1].shape:
        return same(checkpoint, *infos)
    count = prod(infos[0].shape)
    values: list[Values] = []
    for info in infos:
        size = DTYPES[info.dtype] // 8
        starts = {place * (max(0, count - SAMPLE_BYTES) // 7) for place in range(8)}
        offsets = [(info, start * size) for start in sorted(starts)]
        blocks = checkpoint.read_blocks(offsets, SAMPLE_BYTES * size)
        values.append(np.concatenate(_decoded((block, info.dtype) for block in blocks)))
    return bool(np.allclose(values[0], values[1], rtol=2**-8, atol=2**-24, equal_nan=True))


@np.errstate(invalid="ignore")  # numpy warns of some NaN in a cast
def decode(data: bytes, dtype: str) -> Values | None:
    """Decode little-endian floats; None for a dtype of packed or integer values."""
    match dtype:
        case "BF16":
            return _bits(np.frombuffer(data, "<u2").astype("<u4") << 16, "<f4")
        case "F16" | "F32" | "F64":
            return np.frombuffer(data, f"<f{int(dtype[1:]) // 8}").astype(np.float64)
        case "F8_E5M2":
            return _bits(np.frombuffer(data, "u1").astype("<u2") << 8, "<f2")
        case "F8_E4M3":
            return _E4M3.take(np.frombuffer(data, "u1"))
    return None


def _bits(bits: NDArray[np.integer], kind: str) -> Values:
    return bits.view(kind).astype(np.float64)


def _e4m3() -> Values:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; 0x7F and 0xFF are NaN, there is no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -size, size))


_E4M3 = _e4m3()


def _floats(parts: Iterable[tuple[str, TensorInfo, bytes]]) -> dict[str, Values]:
    arrays = {name: decode(data, info.dtype) for name, info, data in parts}
    return {name: array for name, array in arrays.items() if array is not None and len(array)}


def _decoded(parts: Iterable[tuple[bytes, str]]) -> list[Values]:
    return [array for data, dtype in parts if (array := decode(data, dtype)) is not None]


def _is_norm(info: TensorInfo) -> bool:
    name = info.name
    return (
        len(info.shape) == 1
        and "norm" in name
        and name.endswith("weight")
        and 0 < info.nbytes <= MAX_NORM_BYTES
        and not any(other in name for other in _OTHER_NORMS)
    )


def is_matrix(inventory: Inventory, info: TensorInfo) -> bool:
    """Test for a matrix other than scales and zero points, whose values may all be equal."""
    suffix = split_name(info.name, inventory.checkpoint.tensors)[1]
    return len(info.shape) > 1 and not any(part in suffix for part in ("scale", "offset", "zero", "absmax", "biases"))


def _choose(inventory: Inventory, names: Sequence[str]) -> list[str]:
    """Choose the same matrices in every module; experts, which are many and alike, are a fourth of them."""
    share = max(4, HEAD_MATRICES // max(1, len(inventory.modules)))
    chosen: list[str] = []
    for index in inventory.modules[:HEAD_MATRICES]:
        module = [each for each in names if each.startswith(f"{index}.")]
        experts = evenly_spaced([each for each in module if ".experts." in each], max(1, share // 4))
        others = [each for each in module if ".experts." not in each]
        chosen += experts + evenly_spaced(others, share - len(experts))
    return chosen


def _path(canonical: str) -> str:
    """Return the running model's path inside the block; "" for a tensor outside it."""
    return canonical.partition(".block.")[2]


def _last_layers(inventory: Inventory) -> list[dict[str, TensorInfo]]:
    """Return the trunk's last layers, last first, by running paths; enough to have one of each attention type."""
    running = inventory.running_paths
    indices = sorted(inventory.layers, reverse=True)[:LAST_LAYERS]
    return [{running[path]: info for path, info in inventory.layers[index].items()} for index in indices]


def _counterparts(layers: Sequence[Mapping[str, TensorInfo]], matrices: Sequence[str]) -> dict[str, TensorInfo]:
    """Return canonical name -> tensor of the same path, in the layer that has most of them."""
    best: dict[str, TensorInfo] = {}
    for layer in layers:
        best = max(best, {each: layer[_path(each)] for each in matrices if _path(each) in layer}, key=len)
    return best


def _kind(canonical: str, trunk: Container[str]) -> str:
    """Return what a norm shares with one of the trunk: its path in the layers, `final`, or ""."""
    path = "final" if canonical.split(".")[1] == "final_norm" else _path(canonical)
    return path if path in trunk else ""


def _trunk_norms(
    inventory: Inventory, layers: Sequence[Mapping[str, TensorInfo]]
) -> Iterator[tuple[str, list[TensorInfo]]]:
    for path in sorted({path for layer in layers for path, info in layer.items() if _is_norm(info)}):
        yield path, [layer[path] for layer in layers if path in layer][:LAYERS_PER_NORM]
    root = inventory.shared.get("embedding", "").removesuffix(".weight").rpartition(".")[0]
    names = [f"{root}.{last}.weight".removeprefix(".") for last in ("norm", "norm_f", "final_layernorm")]
    final = [inventory.checkpoint.tensors[name] for name in names if name in inventory.checkpoint.tensors]
    if final:
        yield "final", final[:1]


@dataclass(frozen=True)
class TensorSummary:
    """What all values of one float tensor have in common; of fp8, as stored, without scales."""

    num_nonfinite: int
    largest: float  # magnitude
    constant: float | None  # the only value, where all are equal; None for others


@dataclass(frozen=True)
class AllValues:
    """The summaries of all float tensors of a head, scales included."""

    tensors: dict[str, TensorSummary]  # by tensor name; packed integers are left out
    num_bytes: int  # read

    @classmethod
    def of(cls, inventory: Inventory) -> "AllValues":
        """Read the head. Raises CheckpointError if a file cannot be read."""
        checkpoint = inventory.checkpoint
        infos = [checkpoint.tensors[name] for name in inventory.spellings(inventory.stored)]
        infos = sorted((i for i in infos if i.dtype in _FLOATS and i.nbytes), key=lambda info: (info.file, info.begin))
        summaries = map_reads(
            lambda info: _summary(checkpoint, info), infos, checkpoint.sources.values(), workers=_WORKERS
        )
        tensors = {info.name: summary for info, summary in zip(infos, summaries, strict=True)}
        return cls(tensors, sum(info.nbytes for info in infos))


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
