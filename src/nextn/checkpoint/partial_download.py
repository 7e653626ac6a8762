"""Tensors of a hub checkpoint that are downloaded by range when they are needed, and forgotten after use. No torch.

Each shard has a local sparse file of its full size, in which only the header and the downloaded tensors have content,
so that it is read as a complete shard would be.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes import CDLL, c_int, c_long
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from weakref import finalize

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.remote import ByteSource, LocalFile, RemoteFile
from nextn.checkpoint.safetensors_file import TensorInfo, write_json
from nextn.checkpoint.staging_folder import owned
from nextn.errors import CheckpointError

_RECORD = "ranges.json"
_WORKERS, _PIECE = 8, 8 * 1024 * 1024  # requests at a time, and bytes of each
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of Linux

Range = tuple[int, int]


class PartialDownload:
    """The folder with a checkpoint's sparse files.

    Attributes:
        num_bytes: Downloaded so far.
        seconds: That this took.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path, *, keep: bool) -> None:
        """Hold the folder, which no other process may use meanwhile.

        Args:
            checkpoint: Of a hub id.
            folder: Where the files are.
            keep: Forget nothing, and use what an earlier process left; else all files are removed at the end.

        Raises:
            CheckpointError: Another process holds the folder, it cannot be written, or it is of another checkpoint.
        """
        self.num_bytes, self.seconds, self._lock = 0, 0.0, Lock()
        self._keep, self._identity = keep, {"repo": checkpoint.path, "revision": checkpoint.revision}
        self._stack = ExitStack()
        with _writing(folder):
            stage = self._stack.enter_context(owned(folder, inside=keep))
        finalize(self, self._stack.close)
        self._folder = folder if keep else stage
        present = self._read_record()
        self._files = {
            name: PartialFile(self, source, self._folder / name, header.tensors.values(), present.get(name, {}))
            for name, header in checkpoint.headers.items()
            if isinstance(source := checkpoint.sources[name], RemoteFile)
        }
        self.checkpoint = replace(checkpoint, sources={**checkpoint.sources, **self._files})

    @property
    def rate(self) -> float:
        """Bytes per second of all downloads so far; 0 before the first."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    def _read_record(self) -> dict[str, dict[int, int]]:
        """Ranges that an earlier process left, by file."""
        path = self._folder / _RECORD
        if not path.exists():
            return {}
        try:
            record = json.loads(path.read_text())
            identity, files = {key: record[key] for key in self._identity}, record["files"]
            present = {name: {int(begin): int(end) for begin, end in ranges} for name, ranges in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not readable: {error}. Remove the folder to start again") from error
        if identity != self._identity:
            was, now = ("{repo} at {revision}".format(**each) for each in (identity, self._identity))
            raise CheckpointError(f"{self._folder} holds shards of {was}, not of {now}; give another folder")
        return present

    def _write_record(self) -> None:
        if self._keep:
            files = {name: sorted(file.present.items()) for name, file in self._files.items() if file.present}
            write_json(self._folder / _RECORD, {**self._identity, "files": files})


class PartialFile:
    """A shard on a hub, of which some tensors are on disk; a `ByteSource` that reads those there, others by request."""

    def __init__(
        self,
        download: PartialDownload,
        remote: ByteSource,
        path: Path,
        tensors: Iterable[TensorInfo],
        present: Mapping[int, int],
    ) -> None:
        self.download, self.path, self.name = download, path, remote.name
        self._remote, self._local = remote, LocalFile(path, remote.name)
        ranges = [(info.begin, info.end) for info in tensors]
        self._header_end = min((begin for begin, _ in ranges), default=0)
        self._size = max((end for _, end in ranges), default=0)
        self.present = dict(present) if path.exists() and path.stat().st_size == self._size else {}

    def __str__(self) -> str:
        return str(self._remote)

    def start(self, length: int) -> tuple[bytes, int]:
        return self._remote.start(length)

    def read(self, begin: int, end: int) -> bytes:
        is_local = any(first <= begin and end <= last for first, last in self.present.items())
        return (self._local if is_local else self._remote).read(begin, end)

    def fetch(self, ranges: Iterable[Range], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Download those tensors, each given by its complete range, that are not on disk.

        Adjacent ones take one range, which is requested in pieces, several at a time.

        Raises:
            CheckpointError: The hub does not answer, or the file cannot be written.
        """
        wanted = set(ranges)
        if not self._missing(wanted):  # without waiting for another thread's download
            return
        with self.download._lock, _writing(self.path):
            missing, started = self._missing(wanted), time.perf_counter()
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
            self.download._write_record()

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
        """Free the disk space of tensors that are not needed any more, unless they are to be kept."""
        if self.download._keep:
            return
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; free some space, or choose another folder"
        ) from error


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The C library's fallocate; None on other systems than Linux, where files keep what was written."""
    try:
        function = CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes, function.restype = [c_int, c_int, c_long, c_long], c_int
    return function
