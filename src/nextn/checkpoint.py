"""Checkpoints as bytes: safetensors headers, the index, config.json, reads by range, atomic writes.

Knows neither torch nor what a head is. A file that lies about itself raises CheckpointError; an index and files that
merely disagree are listed in `Checkpoint.problems`, so that an audit can show them all.
"""

import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, BinaryIO, Literal

from huggingface_hub import is_offline_mode

from nextn.errors import CheckpointError
from nextn.remote import LocalFile, Source, cached_folder, folder_files, readable, repo_files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Bits per element. The order is that of `enum Dtype` in the safetensors crate (tensor.rs, 0.8): files are laid out by
# it, last first, which puts wide elements before narrow ones.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}

FIRST_READ = 256 * 1024  # holds a header of about 2,000 tensors; a longer one costs a second read
MAX_HEADER = 100_000_000  # the crate's own limit
MAX_JSON = 256 * 1024 * 1024
CHUNK = 32 * 1024 * 1024
WORKERS = 16
SAMPLE = 4096

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What one safetensors file says about itself."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(source: Source | Path) -> Header:
    """Parse and check a safetensors header by the rules of the safetensors README, section "Format".

    Every byte of the file must belong to exactly one tensor. Memory is bounded by the bytes that are really there.
    """
    source = LocalFile(source, source.name) if isinstance(source, Path) else source
    first, size = source.start(FIRST_READ)
    try:
        data_begin = 8 + _header_length(first, size)
        rest = source.read(len(first), data_begin) if len(first) < data_begin else b""
        return _parse_header(first[8:data_begin] + rest, file=source.name, size=size)
    except (ValueError, RecursionError) as error:  # also what `bytes.decode` and `json.loads` raise
        raise CheckpointError(f"{source}: not a sound safetensors file: {error}. Fetch or write it again.") from error


def _header_length(first: bytes, size: int) -> int:
    if first.startswith(b"version https://git-lfs"):
        raise ValueError("it is a Git LFS pointer, the weights were not fetched: run `git lfs pull`")
    if size < 8:
        raise ValueError(f"it has {size} bytes, the length field alone takes 8")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER:
        raise ValueError(f"the header claims {length} bytes, at most {MAX_HEADER} are allowed")
    if length > size - 8:
        raise ValueError(f"the header claims {length} bytes, {size - 8} follow: truncated, or a file of another kind")
    return length


def _parse_header(blob: bytes, *, file: str, size: int) -> Header:
    if blob[:1] != b"{":
        raise ValueError(f"the header starts with {blob[:1]!r}, it must start with b'{{'")
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
    """No overlaps and no holes, up to the last byte: the format forbids them so that nothing can hide in a file."""
    order = sorted(tensors, key=lambda info: (info.begin, info.end))
    if order and (end := order[-1].end) > size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}: it is truncated by {end - size} bytes")
    at = start
    for info in order:
        if info.begin != at:
            what = "overlaps the one before" if info.begin < at else "leaves a hole before it"
            raise ValueError(f"tensor {brief(info.name)} starts at byte {info.begin}, not at {at}: it {what}")
        at = info.end
    if at != size:
        raise ValueError(f"{size - at} bytes after the last tensor belong to none")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor to be written: its bytes, little-endian and in C order, or a function that yields them in pieces."""

    dtype: str
    shape: Sequence[int]
    data: Chunk | Callable[[], Iterable[Chunk]]


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets the name `path` once the block has ended well and its bytes are on disk.

    After any exception, an interrupt or a full disk included, `path` is as it was and no other file is left.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}. It is as it was.") from error
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
            if (at := file.tell() - 8 - len(header)) != end:
                raise CheckpointError(f"{path}: tensor {name} ended at byte {at} of the data, its shape says {end}.")


def _layout(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None) -> tuple[dict[str, int], bytes]:
    """Where each tensor ends, in the order of the file, and the header."""
    sizes = {name: _nbytes(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    ends: dict[str, int] = {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-RANK[tensors[name].dtype], name)):
        ends[name] = at + sizes[name]
        shape = list(tensors[name].shape)
        table[name] = {"dtype": tensors[name].dtype, "shape": shape, "data_offsets": [at, ends[name]]}
        at = ends[name]
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    return ends, header + b" " * (-len(header) % 8)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write `value` as indented JSON, keys in their order."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    with atomic(path) as file:
        file.write(text.encode() + b"\n")


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index that tells loaders which file holds which tensor; `total_size` is the bytes of all tensors."""
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})


@dataclass(frozen=True, slots=True)
class Problem:
    """One disagreement between the index and the files; `file` is where the fault shows."""

    kind: Literal["missing_file", "missing_tensor", "misplaced", "duplicate", "unlisted"]
    file: str
    tensor: str | None
    message: str


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The files of one checkpoint, opened: headers, config and index are read, tensors are read when asked for.

    `tensors` covers all files; where two files hold the same name, the index decides, else model.safetensors, else the
    first file by name.
    `sources` are all files by name. `revision` is the commit of a hub checkpoint.
    """

    path: str
    config: dict[str, object] = field(repr=False)
    index: dict[str, str] | None = field(repr=False)
    headers: dict[str, Header] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    problems: tuple[Problem, ...] = field(repr=False)
    sources: Mapping[str, Source] = field(repr=False)
    revision: str | None = None

    @classmethod
    def open(
        cls,
        path_or_id: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        offline: bool = False,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> "Checkpoint":
        """Open a folder, a .safetensors file (with the config.json beside it, if any) or a hub id "org/name".

        The keyword options are for hub ids. Of a hub checkpoint only headers, config and index are fetched, and nothing
        is stored; files that the hub's cache holds are read there. `offline` reads that cache alone.
        Raises for a damaged header or JSON file, and where there is no safetensors file.
        """
        path = Path(path_or_id).expanduser()
        with readable(path):
            if path.is_dir():
                return _assemble(str(path), folder_files(path))
            if path.is_file() and path.suffix == ".safetensors":
                files = [file for file in (path, path.with_name(CONFIG)) if file.is_file()]
                return _assemble(str(path), {file.name: LocalFile(file, file.name) for file in files})
            hub_id = str(path_or_id)
            if path.exists() or isinstance(path_or_id, Path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id, re.ASCII):
                raise CheckpointError(f"{path_or_id}: neither a folder, a .safetensors file nor a hub id (org/name).")
        if offline or is_offline_mode():
            folder = cached_folder(hub_id, revision=revision, cache_dir=cache_dir)
            return _assemble(hub_id, folder_files(folder), revision=folder.name)
        sources, commit = repo_files(hub_id, revision=revision, cache_dir=cache_dir, token=token, endpoint=endpoint)
        return _assemble(hub_id, sources, revision=commit)

    @property
    def files(self) -> tuple[str, ...]:
        """The safetensors files, by name."""
        return tuple(self.headers)

    @property
    def unindexed(self) -> tuple[str, ...]:
        """Files that no loader opens which follows the index or, without one, the name model.safetensors."""
        if self.index is None and SINGLE not in self.headers:
            return ()
        named = {SINGLE} if self.index is None else set(self.index.values())
        return tuple(file for file in self.headers if file not in named)

    def info(self, name: str) -> TensorInfo:
        """The tensor called `name`; CheckpointError if there is none."""
        if name not in self.tensors:
            some = ", ".join(list(self.tensors)[:3])
            raise CheckpointError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}, such as {some}.")
        return self.tensors[name]

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes in order, at most CHUNK at a time."""
        info = self.info(name)
        source = self.sources[info.file]
        for begin in range(info.begin, info.end, CHUNK):
            yield source.read(begin, min(begin + CHUNK, info.end))

    def raw(self, name: str) -> RawTensor:
        """The tensor as `write_safetensors` takes it; its bytes are read when they are written."""
        info = self.info(name)
        return RawTensor(info.dtype, info.shape, lambda: self.chunks(name))

    def samples(self, names: Sequence[str], size: int = SAMPLE) -> list[bytes]:
        """The middle `size` bytes of each named tensor, whole where it is smaller; read side by side."""
        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(lambda name: self._middle(self.info(name), size), names))

    def _middle(self, info: TensorInfo, size: int) -> bytes:
        # Whole elements, whatever their width: the widest has 16 bytes.
        begin = info.begin + max(0, info.nbytes - size) // 2 // 16 * 16
        return self.sources[info.file].read(begin, min(begin + size, info.end))

    def read_bytes(self, name: str) -> bytes:
        return b"".join(self.chunks(name))

    def read_numpy(self, name: str) -> "NDArray[np.generic]":
        """The tensor as an array, perhaps read-only. BF16 becomes float32 (exact); a dtype that numpy lacks raises."""
        import numpy as np

        info = self.info(name)
        if info.dtype == "BF16":
            halves = np.frombuffer(self.read_bytes(name), "<u2").astype("<u4")
            return (halves << 16).view("<f4").reshape(info.shape)
        if info.dtype not in NUMPY:
            valid = ", ".join(["BF16", *NUMPY])
            raise CheckpointError(f"{self.path}: {name} is {info.dtype}, as an array come {valid}. Use read_bytes.")
        return np.frombuffer(self.read_bytes(name), NUMPY[info.dtype]).reshape(info.shape)

    def read_json(self, name: str) -> dict[str, object] | None:
        """Another JSON file of the checkpoint, such as hf_quant_config.json; None where it is absent."""
        return _load_json(self.sources[name]) if name in self.sources else None


def _assemble(path: str, sources: Mapping[str, Source], *, revision: str | None = None) -> Checkpoint:
    index = _weight_map(sources[INDEX]) if INDEX in sources else None
    named = set(index.values()) if index else set()
    # Files such as ._model.safetensors are resource forks that macOS leaves behind.
    files = [n for n in sorted(sources) if n.endswith(".safetensors") and (n in named or not re.search(r"^\.|/", n))]
    if not files:
        raise CheckpointError(f"{path}: no .safetensors file. {_instead(list(sources))}")
    headers = _read_headers([sources[name] for name in files])
    tensors, problems = _reconcile(headers, index)
    config = _load_json(sources[CONFIG]) if CONFIG in sources else {}
    return Checkpoint(path, config, index, headers, tensors, tuple(problems), sources, revision)


def _instead(names: Sequence[str]) -> str:
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if not pickles:
        return f"It has {', '.join(names[:5]) or 'no files'}. Give the place that holds the weights."
    return (
        f"It has {', '.join(pickles[:3])}, but pickle is not read, as it can run code. Convert each file with "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW_FILE), which keeps every tensor."
    )


def _read_headers(sources: Sequence[Source]) -> dict[str, Header]:
    """Damaged local files are all named at once; a remote failure ends it, as the next request would meet the same."""
    headers: dict[str, Header] = {}
    failures: list[CheckpointError] = []
    with ThreadPoolExecutor(min(WORKERS, len(sources))) as pool:
        reading = [pool.submit(read_header, source) for source in sources]
        try:
            for source, header in zip(sources, reading, strict=True):
                try:
                    headers[source.name] = header.result()
                except CheckpointError as error:
                    failures.append(error)
                    if not isinstance(source, LocalFile):
                        raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        raise CheckpointError("\n".join(map(str, failures))) from failures[0]
    return headers


def _weight_map(source: Source) -> dict[str, str]:
    weight_map = _load_json(source).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{source}: weight_map is {brief(weight_map)}, it must map tensor names to file names.")
    return weight_map


def _reconcile(
    headers: Mapping[str, Header], index: Mapping[str, str] | None
) -> tuple[dict[str, TensorInfo], list[Problem]]:
    problems: list[Problem] = []
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(headers, key=lambda file: file != SINGLE):  # the one that loaders open without an index
        for name, info in headers[file].tensors.items():
            first = tensors.setdefault(name, info)
            if first is not info:
                problems.append(Problem("duplicate", file, name, f"{name} is in {first.file} and in {file}"))
                if index and index.get(name) == file:
                    tensors[name] = info
    if index is not None:
        problems += _against_index(tensors, index, set(headers))
    return tensors, problems


def _against_index(tensors: Mapping[str, TensorInfo], index: Mapping[str, str], files: set[str]) -> Iterator[Problem]:
    named = Counter(index.values())
    for file in sorted(named.keys() - files):
        yield Problem("missing_file", file, None, f"the index puts {named[file]} tensors in {file}, which is absent")
    for name, file in index.items():
        info = tensors.get(name)
        if info is None and file in files:
            yield Problem("missing_tensor", file, name, f"the index puts {name} in {file}, which does not hold it")
        elif info is not None and info.file != file:
            yield Problem("misplaced", info.file, name, f"the index puts {name} in {file}, it is in {info.file}")
    for name, info in tensors.items():
        if info.file in named and name not in index:
            yield Problem("unlisted", info.file, name, f"{info.file} holds {name}, which the index does not list")


def _load_json(source: Source) -> dict[str, object]:
    data, size = source.start(MAX_JSON)
    if size > len(data):
        raise CheckpointError(f"{source}: {size} bytes of JSON, at most {MAX_JSON} are read.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not readable as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: holds {brief(value)}, it must be a JSON object.")
    return value


def fingerprint(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """SHA-256 over name, dtype, shape and bytes of the named tensors: the same however files divide them."""
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        info = checkpoint.info(name)
        digest.update(json.dumps([name, info.dtype, info.shape]).encode())
        for piece in checkpoint.chunks(name):
            digest.update(piece)
    return digest.hexdigest()
