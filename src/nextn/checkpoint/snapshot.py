"""Make a checkpoint's files local: download from the hub what loading needs, as files or in parts. Imports no torch.

Tensors of a partial download are requested by range when they are needed, and forgotten after use. Each shard has a
local sparse file of its full size, in which only the header and the downloaded tensors have content, so that it is read
as a complete shard would be.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ctypes import CDLL, c_int, c_long
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from threading import Lock
from weakref import finalize

import huggingface_hub as hub
from huggingface_hub import is_offline_mode

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint, shipped_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.remote import ADVICE, ByteSource, LocalFile, RemoteFile, split_hub_id
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.checkpoint.staging_folder import owned, writing
from nextn.errors import CheckpointError

# Config, tokenizer, chat template. A pattern with a slash never matches: other folders hold other formats.
_OTHER_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_WORKERS, _PIECE = 8, 8 * 1024 * 1024  # requests at a time, and bytes of each
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of Linux

Range = tuple[int, int]


def on_disk(inventory: Inventory) -> Inventory:
    """Return the inventory of the same checkpoint with local files; of a hub checkpoint, download those `needed`.

    The hub's client shows progress and resumes interrupted downloads. Raises CheckpointError if the download failed, or
    the cache lacks files.
    """
    if not _remote(inventory):
        return inventory
    checkpoint = inventory.checkpoint
    patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in needed(inventory)]
    folder = _download(checkpoint.path, checkpoint.ref, patterns)
    return Inventory.of(Checkpoint.open(folder), family=inventory.family)


def in_parts(inventory: Inventory) -> Inventory:
    """Return the inventory of the same checkpoint; tensors on the hub are downloaded when they are read.

    With HF_HUB_OFFLINE=1 it is returned as it is. Raises CheckpointError as `on_disk` and `PartialDownload`.
    """
    checkpoint = inventory.checkpoint
    if is_offline_mode() or not _remote(inventory):
        return inventory
    folder = _download(checkpoint.path, checkpoint.ref, _OTHER_FILES)
    cache = Path(hub.constants.HF_HUB_CACHE) / f"nextn--{checkpoint.path.replace('/', '--')}"
    partial = PartialDownload(checkpoint, cache).checkpoint
    others = {name: LocalFile(path, name) for name in partial.sources if (path := folder / name).is_file()}
    return replace(inventory, checkpoint=replace(partial, sources={**partial.sources, **others}))


def _remote(inventory: Inventory) -> list[str]:
    """The needed files that are on the hub only."""
    sources = inventory.checkpoint.sources
    return [name for name in needed(inventory) if isinstance(sources.get(name), RemoteFile)]


def _download(hub_id: str, ref: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx2's; httpx's in hub 1

    try:
        folder = hub.snapshot_download(
            hub_id, revision=ref, allow_patterns=list(patterns), local_files_only=is_offline_mode()
        )
    except (HTTPError, OSError) as error:  # the hub's own errors derive from these
        raise CheckpointError(f"{hub_id}: {_reason(error)}. Completed files are kept; try again.") from error
    return Path(folder)


def small_files(source: str) -> Path:
    """Return the folder with the config and tokenizer of a local checkpoint or hub id; no weights are downloaded.

    Raises CheckpointError if there is none.
    """
    if Path(shipped_path(source)).exists() or (named := split_hub_id(source)) is None:
        return folder_of(Checkpoint.open(source))
    return _download(*named, _OTHER_FILES)


def folder_of(checkpoint: Checkpoint) -> Path:
    """Return the folder of a local checkpoint, where its config.json is."""
    config = checkpoint.sources.get(CONFIG)
    if checkpoint.stored_names:
        raise CheckpointError(f"{checkpoint.path}: a head alone; give its trunk, and this head with --head")
    if not isinstance(config, LocalFile):
        message = f"{checkpoint.path}: no {CONFIG} there or next to it. Give the model's own folder or hub id."
        raise CheckpointError(message)
    return config.path.parent


def needed(inventory: Inventory) -> list[str]:
    """Return the files that loading opens: indexed ones, others with tensors of a head, config and tokenizer."""
    checkpoint = inventory.checkpoint
    named = set(checkpoint.files) - set(checkpoint.unindexed)
    names = [*inventory.spellings(inventory.stored), *inventory.shared.values(), *inventory.unrecognized]
    named |= {checkpoint.tensors[name].file for name in names}
    tops = (name for name in checkpoint.sources if "/" not in name)
    others = {name for name in tops if any(fnmatch(name, each) for each in _OTHER_FILES)}
    return sorted(named | others)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; choose another cache with HF_HOME"
    response = getattr(error, "response", None)
    if response is None:
        return f"the download failed: {error}"
    advice = ADVICE.get(response.headers.get("X-Error-Code", "")) or ADVICE.get(response.status_code)
    return f"the download failed with HTTP {response.status_code}: {advice or error}"


class PartialDownload:
    """The folder with a checkpoint's sparse files, which are removed at the end."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Hold the folder; raise CheckpointError if another process holds it, or it cannot be written."""
        self.num_bytes, self.seconds, self._lock = 0, 0.0, Lock()  # downloaded so far, and the time it took
        stack = ExitStack()
        with writing(folder):
            stage = stack.enter_context(owned(folder))
        finalize(self, stack.close)
        files = {
            name: PartialFile(self, source, stage / name, header.tensors.values())
            for name, header in checkpoint.headers.items()
            if isinstance(source := checkpoint.sources[name], RemoteFile)
        }
        self.checkpoint = replace(checkpoint, sources={**checkpoint.sources, **files})

    @property
    def rate(self) -> float:
        """Bytes per second of all downloads so far; 0 before the first."""
        return self.num_bytes / self.seconds if self.seconds else 0.0


class PartialFile:
    """A shard on a hub, of which some tensors are on disk; a `ByteSource` that reads those there, others by request."""

    def __init__(
        self, download: PartialDownload, remote: ByteSource, path: Path, tensors: Iterable[TensorInfo]
    ) -> None:
        self.download, self.path, self.name = download, path, remote.name
        self._remote, self._local = remote, LocalFile(path, remote.name)
        ranges = [(info.begin, info.end) for info in tensors]
        self._header_end = min((begin for begin, _ in ranges), default=0)
        self._size = max((end for _, end in ranges), default=0)
        self.present: dict[int, int] = {}  # begin -> end of the ranges on disk

    def __str__(self) -> str:
        return str(self._remote)

    def start(self, length: int) -> tuple[bytes, int]:
        return self._remote.start(length)

    def read(self, begin: int, end: int) -> bytes:
        is_local = any(first <= begin and end <= last for first, last in self.present.items())
        return (self._local if is_local else self._remote).read(begin, end)

    def fetch(self, ranges: Iterable[Range], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Download those tensors, each given by its complete range, that are not on disk.

        Adjacent ones take one range, which is requested in pieces, several at a time. Raises CheckpointError if the hub
        does not answer, or the file cannot be written.
        """
        requested = set(ranges)
        if not self._missing(requested):  # without waiting for another thread's download
            return
        with self.download._lock, writing(self.path):
            missing, started = self._missing(requested), time.perf_counter()
            missing = missing if self.present else [(0, self._header_end), *missing]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "x+b") as file:
                file.truncate(self._size)
                if not self._download(_pieces(missing), file.fileno(), should_stop):
                    return
                os.fsync(file.fileno())
            self.present |= dict(missing)
            self.download.num_bytes += sum(end - begin for begin, end in missing)
            self.download.seconds += time.perf_counter() - started

    def _missing(self, ranges: Iterable[Range]) -> list[Range]:
        return sorted(each for each in ranges if self.present.get(each[0]) != each[1])

    def _download(self, pieces: Iterable[Range], file: int, should_stop: Callable[[], bool]) -> bool:
        """Write the pieces; return whether all of them are there."""

        def copy(piece: Range) -> bool:
            if should_stop():
                return False
            data, offset = memoryview(self._remote.read(*piece)), piece[0]
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written
            return True

        pool = ThreadPoolExecutor(_WORKERS)
        try:
            return all(pool.map(copy, pieces))
        finally:
            pool.shutdown(cancel_futures=True)

    def forget(self, ranges: Iterable[Range]) -> None:
        """Free the disk space of tensors that are not needed any more."""
        with self.download._lock, self.path.open("r+b") as file:
            for begin, end in ranges:
                if self.present.pop(begin, None) is not None and (fallocate := _fallocate()) is not None:
                    fallocate(file.fileno(), _PUNCH_HOLE, begin, end - begin)


def _pieces(ranges: Iterable[Range]) -> Iterator[Range]:
    """Merge sorted ranges that follow each other without a gap, and cut them into pieces of one request each."""
    merged: list[Range] = []
    for begin, end in ranges:
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    for first, last in merged:
        yield from ((begin, min(begin + _PIECE, last)) for begin in range(first, last, _PIECE))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The C library's fallocate; None on other systems than Linux, where files keep what was written."""
    try:
        function = CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = [c_int, c_int, c_long, c_long], c_int
    return function
