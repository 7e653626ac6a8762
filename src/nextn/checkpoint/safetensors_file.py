"""Read and check the header of one safetensors file, and write such files atomically.

Which files make up a checkpoint is decided in `checkpoint`.
"""

import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO

from safetensors import SafetensorError

from nextn.bounded_json import JsonLimits
from nextn.checkpoint.remote import ByteSource, LocalFile
from nextn.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# Bits per element. The order is that of `enum Dtype` in the safetensors crate (tensor.rs, 0.8): files are laid out by
# it, last first, which puts wide elements before narrow ones.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}

FIRST_READ = 256 * 1024  # a header of about 2,000 tensors; a longer one needs a second read
MAX_HEADER = 100_000_000  # the crate's own limit
# Of one checkpoint, all files together. DeepSeek-V3 has 91,000 tensors in 12 MB of headers; Kimi-K2 in NVFP4 280,000.
MAX_TENSORS = 500_000
MAX_HEADERS = 128 * 1024 * 1024
# Commas and opening brackets of a tensor of five dimensions, and of the metadata.
_TENSOR_VALUES, _METADATA_VALUES = 12, 100_000

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one safetensors file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


class HeaderBudget:
    """The remaining budget for the headers of one checkpoint; shared by the threads that read them."""

    def __init__(self, num_bytes: int = MAX_HEADERS, num_tensors: int = MAX_TENSORS) -> None:
        self._most = {"bytes": num_bytes, "tensors": num_tensors}
        self._used = dict.fromkeys(self._most, 0)
        self._lock = Lock()

    def take(self, unit: str, count: int) -> None:
        """Take `count` of `unit` ("bytes" or "tensors"); ValueError if the checkpoint then exceeds the budget."""
        with self._lock:
            self._used[unit] += count
            used, most = self._used[unit], self._most[unit]
        if used > most:
            raise ValueError(f"the headers up to this file hold {used:,} {unit}, at most {most:,} are read")


def read_header(source: ByteSource | Path, budget: HeaderBudget | None = None) -> Header:
    """Parse and check a safetensors header by the rules of the safetensors README, section "Format".

    Every byte of the file must belong to exactly one tensor. Memory is bounded by the file's real size. `budget` is
    shared by all headers of a checkpoint; without one, the file counts as a checkpoint of its own.
    """
    budget = budget or HeaderBudget()
    source = LocalFile(source, source.name) if isinstance(source, Path) else source
    first, size = source.start(FIRST_READ)
    try:
        length = _header_length(first, size)
        budget.take("bytes", length)
        data_begin = 8 + length
        rest = source.read(len(first), data_begin) if len(first) < data_begin else b""
        return _parse_header(first[8:data_begin] + rest, file=source.name, size=size, budget=budget)
    except (ValueError, RecursionError) as error:  # also what `bytes.decode` and `json.loads` raise
        raise CheckpointError(f"{source}: not a valid safetensors file: {error}. Download or save it again.") from error


def placeholder(first: bytes) -> str:
    """Return what a file that begins with `first` is in place of one of the model's; "" if it is neither."""
    if first.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, the file itself was not downloaded: run `git lfs pull`"
    # The length of a header may begin with "<", but its other bytes are not those of a text.
    is_page = first.lstrip().startswith(b"<") and min(first[:8]) >= ord("\t")
    return _page(first[:40]) if is_page else ""


def _page(text: bytes) -> str:
    return (
        f"it is text that starts with {text.decode(errors='replace')!r}, as a server sends in place of a file that "
        "needs a login or does not exist"
    )


def _header_length(first: bytes, size: int) -> int:
    if sentence := placeholder(first):
        raise ValueError(sentence)
    if size < 8:
        raise ValueError(f"it has {size} bytes, the length field alone takes 8")
    if (text := first[:40]).isascii() and text.decode().isprintable():
        raise ValueError(_page(text))
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER:
        raise ValueError(f"the header claims {length} bytes, at most {MAX_HEADER} are allowed")
    if length > size - 8:
        raise ValueError(f"the header claims {length} bytes, {size - 8} follow: truncated, or a file of another kind")
    return length


def _parse_header(blob: bytes, *, file: str, size: int, budget: HeaderBudget) -> Header:
    if blob[:1] != b"{":
        raise ValueError(f"the header starts with {blob[:1]!r}, it must start with b'{{'")
    # An upper bound: names can also contain a "{".
    num_tensors = max(0, blob.count(b"{") - 1 - (b'"__metadata__"' in blob))
    budget.take("tensors", num_tensors)
    JsonLimits(MAX_HEADER, _TENSOR_VALUES * num_tensors + _METADATA_VALUES).check_values(blob)
    table = json.loads(blob.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    metadata = _metadata(table.pop("__metadata__", None))
    "".join([*table, *metadata, *metadata.values()]).encode()  # a lone surrogate, which JSON can escape, raises here
    start = 8 + len(blob)
    tensors = {name: _tensor(name, entry, file=file, start=start) for name, entry in table.items()}
    _check_layout(tensors.values(), start=start, size=size)
    return Header(tensors, metadata)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {brief(name)} appears {times} times")
    return table


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _metadata(entry: object) -> dict[str, str]:
    if entry is None:
        return {}
    if not isinstance(entry, dict):
        raise ValueError(f"__metadata__ is {brief(entry)}, it must map strings to strings")
    for key, value in entry.items():
        if not isinstance(value, str):
            raise ValueError(f"__metadata__[{brief(key)}] is {brief(value)}, it must be a string")
    return entry


def _tensor(name: str, entry: object, *, file: str, start: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            nbytes = _nbytes(name, dtype, shape)
        case _:
            raise ValueError(f"tensor {brief(name)} is {brief(entry)}, it must hold dtype, shape and data_offsets")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 2**63:
        raise ValueError(f"tensor {brief(name)} has data_offsets {brief([begin, end])}, valid are 0 <= begin <= end")
    if end - begin != nbytes:
        raise ValueError(f"tensor {brief(name)} has {end - begin} bytes, {dtype} {brief(shape)} takes {nbytes}")
    return TensorInfo(name, dtype, tuple(shape), file, start + begin, start + end)


def _nbytes(name: str, dtype: str, shape: Sequence[object]) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"tensor {brief(name)} has dtype {brief(dtype)}, valid are {', '.join(DTYPES)}")
    count = 1
    for dim in shape:
        if type(dim) is not int or dim < 0:  # `type`, as True is an int
            raise ValueError(f"tensor {brief(name)} has dimension {brief(dim)}, it must be a whole number >= 0")
        count *= dim
        if count >= 2**63:
            raise ValueError(f"tensor {brief(name)} has shape {brief(shape)}, which overflows 63 bits")
    if count * DTYPES[dtype] % 8:
        raise ValueError(f"tensor {brief(name)} has {count} elements of {dtype}, which do not fill whole bytes")
    return count * DTYPES[dtype] // 8


def _check_layout(tensors: Iterable[TensorInfo], *, start: int, size: int) -> None:
    """Check that there are no overlaps and no gaps, which the format forbids so that nothing can hide in a file."""
    order = sorted(tensors, key=lambda info: (info.begin, info.end))
    if order and (end := order[-1].end) > size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}: it is truncated by {end - size} bytes")
    position = start
    for info in order:
        if info.begin != position:
            what = "overlaps the one before" if info.begin < position else "leaves a gap before it"
            raise ValueError(f"tensor {brief(info.name)} starts at byte {info.begin}, not at {position}: it {what}")
        position = info.end
    if position != size:
        raise ValueError(f"{size - position} bytes after the last tensor belong to none")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor to write: its bytes, little-endian and in C order, or a function that yields them in pieces."""

    dtype: str
    shape: Sequence[int]
    data: Chunk | Callable[[], Iterable[Chunk]]


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write that is renamed to `path` when the block ends without an exception and it is on disk.

    After any exception, including an interrupt or a full disk, `path` is unchanged and no other file is left.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("xb") as file:
            mode = os.fstat(file.fileno()).st_mode
            yield file
        # The safetensors library replaces the file by one of its own, which only its owner may read.
        with temp.open("rb+") as written:
            os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())
        temp.replace(path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path}: cannot be written: {reason}. It is unchanged.") from error
    finally:
        with suppress(OSError):
            temp.unlink()


def write_safetensors(
    path: Path, tensors: Mapping[str, RawTensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors`, one piece in memory at a time, byte for byte as the safetensors library would."""
    try:
        spans, header = _layout(tensors, metadata)
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}.") from error
    with atomic(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, end in spans.items():
            data = tensors[name].data
            for piece in data() if callable(data) else [data]:
                file.write(piece)
            if (position := file.tell() - 8 - len(header)) != end:
                message = f"{path}: tensor {name} ends at byte {position} of the data, by its shape at {end}."
                raise CheckpointError(message)


def _layout(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None) -> tuple[dict[str, int], bytes]:
    """Return the end of each tensor's data, in file order, and the header."""
    sizes = {name: _nbytes(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    ends: dict[str, int] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-RANK[tensors[name].dtype], name)):
        ends[name] = offset + sizes[name]
        shape = list(tensors[name].shape)
        table[name] = {"dtype": tensors[name].dtype, "shape": shape, "data_offsets": [offset, ends[name]]}
        offset = ends[name]
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    return ends, header + b" " * (-len(header) % 8)


def write_tensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write tensors of torch atomically."""
    from safetensors.torch import save_file

    with atomic(path) as file:
        save_file(tensors, file.name, metadata=metadata)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write `value` as indented JSON, keys in their order."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    with atomic(path) as file:
        file.write(text.encode() + b"\n")
