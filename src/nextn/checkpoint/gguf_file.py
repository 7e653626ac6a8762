"""Read a GGUF file's metadata, tensor table and values; the files of a split model are read as one.

No count in a file is trusted beyond the bytes that exist. Knows nothing of heads.

Quantized types whose blocks stay as they are in a checkpoint have sizes and names of tensors here, by ggml's
src/ggml-common.h.
"""

import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nextn.errors import CheckpointError, ConfigError
from nextn.text_format import install_command

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

Scalar = int | float | bool | str

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: value types by their number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
# The largest published headers are below 20 MiB, nearly all of it vocabulary.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # of a split model
_MAX_HEADER = 1 << 26
_MAX_DIMS, _MAX_ROW, _MAX_FILES = 4, 1 << 20, 1000
_MAX_VALUES = 10_000  # one for each layer
SUPERBLOCK = 256  # values of a block of a K-quant
_BLOCK = 32  # of the other types
_PREFIX = "weight_"
_MMPROJ = "the vision or audio part of a model (mmproj), without a language model: give the model's own file"
_IMATRIX = "an importance matrix for llama-quantize, and no model: give the model's own file"
# general.type, or general.architecture of older files -> what a file is that holds no model.
_OTHERS = {
    "mmproj": _MMPROJ, "clip": _MMPROJ, "imatrix": _IMATRIX,
    "adapter": "an adapter: merge it into its model first, with llama-export-lora",
    "vocab": "a vocabulary without weights: give the model's own file",
}  # fmt: skip
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
WITH_MINIMA = ("Q4_1", "Q5_1")  # besides K-quants


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table."""

    name: str
    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]  # in ggml's order: the contiguous dimension first
    file: Path
    begin: int  # offset in `file`
    nbytes: int
    scale: "GgufTensor | None" = None  # what the values are multiplied by: one value, or one for each expert

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.num_rows if self.num_rows else 0

    def read(self, begin: int, end: int) -> bytes:
        """Read the bytes from `begin` to `end` of the tensor's own."""
        with self.file.open("rb") as file:
            file.seek(self.begin + begin)
            data = file.read(min(end, self.nbytes) - begin)
        if len(data) < end - begin:
            message = f"{self.file}: {brief(self.name)} is truncated. Another process is changing the file."
            raise CheckpointError(message)
        return data

    def middle(self) -> bytes:
        """Read up to 8 rows from the middle of the tensor, at most `_MAX_ROW` bytes; b"" if one row is longer."""
        rows = self._middle_rows
        return self.read(rows.start * self.row_bytes, rows.stop * self.row_bytes)

    @property
    def _middle_rows(self) -> range:
        count = min(8, _MAX_ROW // self.row_bytes) if self.row_bytes else 0
        first = self.num_rows // 2 if count else 0
        return range(first, min(first + count, self.num_rows))

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[1:], dtype=object))

    def rows(self, begin: int, end: int) -> NDArray[np.float32]:
        """Dequantize rows of `shape[0]` values, [rows, values]. The quantization must be one of `readable_kinds`."""
        from gguf.quants import dequantize

        data = np.frombuffer(self.read(begin * self.row_bytes, end * self.row_bytes), np.uint8)
        with np.errstate(all="ignore"):  # a hostile scale may be infinite
            return self._scaled(dequantize(data.reshape(end - begin, self.row_bytes), self.kind), begin)

    def _scaled(self, rows: NDArray[np.float32], begin: int) -> NDArray[np.float32]:
        if self.scale is None:
            return rows
        scales = self.scale.rows(0, 1)[0]
        scaled: NDArray[np.float32] = rows * scales[(begin + np.arange(len(rows))) // self.shape[1] % len(scales), None]
        return scaled

    def values(self) -> NDArray[np.float64] | None:
        """Dequantize `middle`; None for a quantization that the gguf package does not support."""
        rows = self._middle_rows
        if not rows or self.kind not in readable_kinds():
            return None
        return self.rows(rows.start, rows.stop).astype(np.float64).reshape(-1)

    def agrees_with(self, other: "GgufTensor") -> bool:
        """Whether the middle rows are the same up to quantization; True for types that are not read."""
        if self.kind == other.kind and self.scale is None and other.scale is None:
            return self.middle() == other.middle()
        a, b = self.values(), other.values()
        if a is None or b is None or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return True
        return bool(np.linalg.norm(a - b) <= 0.5 * np.linalg.norm(b))


@dataclass(frozen=True)
class GgufFile:
    """The metadata and tensors of one model."""

    path: Path
    metadata: dict[str, Scalar] = field(repr=False)  # scalars by key; of an array, its length under `<key>[]`
    tensors: dict[str, GgufTensor] = field(repr=False)
    # Of arrays with at most _MAX_VALUES numbers.
    arrays: dict[str, tuple[int | float | bool, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Open a file; ConfigError without the gguf package, CheckpointError for damaged, foreign or missing files."""
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"GGUF files need the gguf package: {install_command('gguf')}") from error
        if (named := _PART.fullmatch(path.name)) and named[2] != "00001":  # the first alone has the model's metadata
            first_path = path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf")
            path = first_path if first_path.is_file() else path
        first = _read(path)
        kinds = (first.metadata.get(f"general.{key}") for key in ("type", "architecture"))
        if what := next((_OTHERS[kind] for kind in kinds if isinstance(kind, str) and kind in _OTHERS), ""):
            raise CheckpointError(f"{path}: this is {what}.")
        tensors = dict(first.tensors)
        for number, other in enumerate(others := _others(path, first.metadata), start=1):
            part = _read(other)
            _expect(other, part.metadata, "split.no", number)
            added = part.tensors
            if duplicates := tensors.keys() & added.keys():
                raise CheckpointError(
                    f"{other}: {brief(min(duplicates))} is also in another file of the split. Split the model again."
                )
            tensors |= added
        if others:
            _expect(path, first.metadata, "split.tensors.count", len(tensors))
        return replace(first, path=path, tensors=_with_scales(tensors))


def _with_scales(tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the tensors with their scales (`X.scale` beside `X.weight`, as of NVFP4), and without those of inputs."""
    found, beside = dict[str, GgufTensor](), set[str]()
    for name, tensor in tensors.items():
        stem = name.removesuffix("weight")
        scale = tensors.get(f"{stem}scale") if stem != name and len(tensor.shape) in (2, 3) else None
        if scale is not None and scale.kind.name == "F32" and scale.shape in ((1,), tensor.shape[2:]):
            beside |= {scale.name, f"{stem}input_scale"}
            tensor = replace(tensor, scale=scale)
        found[name] = tensor
    return {name: tensor for name, tensor in found.items() if name not in beside}


def _others(path: Path, metadata: dict[str, Scalar]) -> list[Path]:
    """Return the other files of a split model; llama.cpp names them `<stem>-00001-of-00003.gguf`."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return []
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > _MAX_FILES:
        raise CheckpointError(
            f"{path}: one of {count} files, whose names must end in -00001-of-{count:05d}.gguf. Only `llama-gguf-split "
            "--merge` joins them."
        )
    names = [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    absent = [name for name in names if not path.with_name(name).is_file()]
    if absent:
        message = f"{path}: {len(absent)} of its {count} files are missing, such as {absent[0]}. Download all of them."
        raise CheckpointError(message)
    return [path.with_name(name) for name in names if name != path.name]


def _expect(path: Path, metadata: dict[str, Scalar], key: str, value: int) -> None:
    """Raise for a number of a split that llama.cpp compares when it opens the files."""
    if metadata.get(key) != value:
        raise CheckpointError(
            f"{path}: {key} is {brief(metadata.get(key))}, and by the files it is {value}: llama.cpp loads none. "
            "Split the model again, or correct the number (`gguf_set_metadata.py`)."
        )


def _read(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).file()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, struct.error) as error:  # also what `bytes.decode` and `mmap` of an empty file raise
        raise CheckpointError(f"{path}: not a valid GGUF file: {error}. Download or convert it again.") from error


class _HeaderReader:
    """A forward reader; its position never passes the end of the file or _MAX_HEADER."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0
        self.end = min(len(data), _MAX_HEADER)
        self.arrays: dict[str, tuple[int | float | bool, ...]] = {}

    def file(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise ValueError(f"it starts with {self.data[:4]!r}, not with b'GGUF'")
        self.position = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, valid are {_VERSIONS}, little-endian")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = dict(self._pair() for _ in range(num_keys))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {brief(alignment)}, it must be a power of two")
        infos = [self._info() for _ in range(num_tensors)]
        start = -(-self.position // alignment) * alignment
        tensors = {each.name: each for each in (self._tensor(*info, start) for info in infos)}
        if len(tensors) < len(infos):
            raise ValueError("two tensors have the same name")
        _check_layout(tensors.values(), start, alignment)
        return GgufFile(self.path, metadata, tensors, self.arrays)

    def _take(self, count: int) -> bytes:
        if count > self.end - self.position:
            raise ValueError(f"the header ends at byte {self.end}, {count} bytes are due at {self.position}: truncated")
        self.position += count
        return self.data[self.position - count : self.position]

    def _number(self, kind: str) -> int:
        return int(struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0])

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _pair(self) -> tuple[str, Scalar]:
        key, kind = self._text(), self._number("I")
        if kind == _ARRAY:
            return f"{key}[]", self._array(key)
        if kind == _STRING:
            return key, self._text()
        size = struct.calcsize(f"<{self._scalar(kind)}")
        value: Scalar = struct.unpack(f"<{self._scalar(kind)}", self._take(size))[0]
        return key, value

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind}; valid are 0 to 12, without arrays of arrays")
        return _SCALARS[kind]

    def _array(self, key: str) -> int:
        """Keep the numbers of a short array, pass over others; return the length."""
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            for _ in range(count):
                self._take(self._number("Q"))
            return count
        data = self._take(count * struct.calcsize(f"<{self._scalar(kind)}"))
        if count <= _MAX_VALUES:
            self.arrays[key] = struct.unpack(f"<{count}{self._scalar(kind)}", data)
        return count

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._number("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {brief(name)} has {num_dims} dimensions, at most {_MAX_DIMS} are valid")
        shape = tuple(self._number("Q") for _ in range(num_dims))
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in GGML_QUANT_SIZES:
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} has type {kind}, which the gguf package does not know: one of a "
                "fork, such as ik_llama.cpp, or a newer one. Quantize with llama.cpp, or update gguf."
            )
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        count = int(np.prod(shape, dtype=object))
        if not count:
            raise ValueError(f"tensor {brief(name)} has dimensions {shape}, none may be 0")
        if shape and shape[0] % block:
            raise ValueError(f"tensor {brief(name)} has rows of {shape[0]}, not a multiple of the block size {block}")
        begin, nbytes = start + offset, count // block * size
        if max(begin, nbytes, begin + nbytes) > len(self.data):
            raise ValueError(f"tensor {brief(name)} ends at byte {begin + nbytes}, the file at {len(self.data)}")
        return GgufTensor(name, GGMLQuantizationType(kind), shape, self.path, begin, nbytes)


def _check_layout(tensors: Iterable[GgufTensor], start: int, alignment: int) -> None:
    """Raise ValueError for tensors that overlap or are not aligned, which llama.cpp refuses, too."""
    last: GgufTensor | None = None
    for tensor in sorted(tensors, key=lambda each: (each.begin, each.nbytes)):
        if (offset := tensor.begin - start) % alignment:
            raise ValueError(f"tensor {brief(tensor.name)} has offset {offset}, not a multiple of {alignment}")
        if last is not None and tensor.nbytes and tensor.begin < last.begin + last.nbytes:
            raise ValueError(f"tensor {brief(tensor.name)} at offset {offset} overlaps {brief(last.name)}")
        last = tensor if tensor.nbytes else last


@cache
def readable_kinds() -> "tuple[GGMLQuantizationType, ...]":
    """Return the types of tensors that the gguf package dequantizes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    readable = []
    for kind in GGMLQuantizationType:
        with suppress(NotImplementedError), np.errstate(all="ignore"):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            readable.append(kind)
    return tuple(readable)


def bits(tensor: GgufTensor) -> float:
    """Return the bits per weight, scales included."""
    count = int(np.prod(tensor.shape, dtype=object))
    return 8 * tensor.nbytes / count if count else 0.0


class BlockType(NamedTuple):
    """Sizes of a block of one type."""

    size: int  # values of a block
    num_bytes: int  # bytes of a block
    bits: int  # bits of a code after it was taken apart
    group_size: int  # values with a common scale


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_BLOCK, 18, 4, 32),
    "Q4_1": BlockType(_BLOCK, 20, 4, 32),
    "Q5_0": BlockType(_BLOCK, 22, 8, 32),
    "Q5_1": BlockType(_BLOCK, 24, 8, 32),
    "Q8_0": BlockType(_BLOCK, 34, 8, 32),
    "IQ4_NL": BlockType(_BLOCK, 18, 8, 32),
    "MXFP4": BlockType(_BLOCK, 17, 8, 32),
    "IQ4_XS": BlockType(SUPERBLOCK, 136, 8, 32),
    "Q4_K": BlockType(SUPERBLOCK, 144, 4, 32),
    "Q5_K": BlockType(SUPERBLOCK, 176, 5, 32),
    "Q6_K": BlockType(SUPERBLOCK, 210, 6, 16),
}


def blocks_name(kind: str) -> str:
    """Return what the tensor with a weight's blocks is called after the module's name: `weight_q4_k`."""
    return f"{_PREFIX}{kind.lower()}"


BLOCK_NAMES = {blocks_name(kind): kind for kind in BLOCK_TYPES}


def named_kind(name: str) -> str | None:
    """Return the type that the last part of a tensor's name states, known or not; None if it states none."""
    return name.removeprefix(_PREFIX).upper() if name.startswith(_PREFIX) else None
