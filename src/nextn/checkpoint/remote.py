"""Read files by byte range: local ones, those in the hub's cache, or on a Hugging Face hub over HTTP.

Knows ranges, retries and the hub's errors; knows nothing of the files' content.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import quote

import huggingface_hub as hub  # resolves its names lazily, so this import takes milliseconds
from huggingface_hub import constants

from nextn.errors import CheckpointError
from nextn.redaction import Redactor

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
R = TypeVar("R")
WORKERS = 16
_AT_ONCE = 64 * 1024 * 1024  # bytes of local files that one thread reads as soon as it would have started others
TRIES = 5
FIRST_WAIT = 0.5  # seconds, doubled at each try
LONGEST_WAIT = 60.0  # if the server asks for more, the read fails
TIMEOUT = 20.0  # seconds for a response without a body, and between two of its bytes
RATE = 64 * 1024  # bytes; each time this many are received, a response may take one second more
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_READ_AHEAD = 128 * 1024  # bytes that every Linux kernel reads ahead at once; it may ignore a part of larger requests
MAX_LISTING = 4 * 1024 * 1024
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(?P<ref>(?!.*\.\.)\w[\w./-]{0,199}))?", re.ASCII)
NO_RANGES = (
    "The server does not support range requests; download the files first (`hf download`) and give their folder."
)

# By the hub's X-Error-Code, or by status where a server sends none.
ADVICE: dict[str | int, str] = {
    "GatedRepo": "the repository is gated: accept its terms on its page, then run `hf auth login` or set HF_TOKEN",
    "RepoNotFound": "there is no such repository (nor a local folder of that name), or it is private: check the name, "
    "or run `hf auth login` or set HF_TOKEN",
    "RevisionNotFound": "there is no such revision: give a branch, a tag or a commit of this repository",
    "EntryNotFound": "there is no such file in this revision",
    401: "the hub requires a token, or rejects the one given: run `hf auth login` or set HF_TOKEN; "
    "it answers the same for a name that does not exist, so check that as well",
    403: "the token has no access: accept the terms on the repository's page, or use a token with read access",
    404: "there is no such repository, revision or file: check the names",
    416: "the file is empty or shorter than its own header declares",
}


class ByteSource(Protocol):
    """The bytes of one file. `str()` is its path or URL for messages; failed reads raise CheckpointError."""

    @property
    def name(self) -> str: ...

    def start(self, length: int) -> tuple[bytes, int]:
        """Return at most the first `length` bytes, and the size of the file."""

    def read(self, begin: int, end: int) -> bytes:
        """Return exactly the bytes [begin, end)."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on disk; opened for each read, so threads can share it."""

    path: Path
    name: str
    # Device, inode, size and modification time when it was opened; None for files that never change.
    stamp: tuple[int, int, int, int] | None = None

    @classmethod
    def at(cls, path: Path, name: str) -> "LocalFile":
        """Return the file with its current stamp; OSError if it does not exist."""
        return cls(path, name, _stamp(path))

    def has_changed(self) -> bool:
        """Whether the file was replaced, modified or removed."""
        try:
            return self.stamp is not None and self.stamp != _stamp(self.path)
        except OSError:
            return True

    def __str__(self) -> str:
        return str(self.path)

    def start(self, length: int) -> tuple[bytes, int]:
        with readable(self.path), self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(min(length, size)), size

    def read(self, begin: int, end: int) -> bytes:
        with readable(self.path), self.path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        if len(data) < end - begin:
            raise self._too_short(begin, end, len(data))
        return data

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes from `begin`."""
        count, end = 0, begin + len(buffer)
        with readable(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            while count < len(buffer):
                if not (num := file.readinto(buffer[count:])):
                    raise self._too_short(begin, end, count)
                count += num

    def read_ahead(self, begin: int, end: int) -> None:
        """Ask the kernel to read these bytes into the page cache; reading may continue after this returns."""
        if not hasattr(os, "posix_fadvise"):
            self.read_into(begin, memoryview(bytearray(end - begin)))
            return
        with readable(self.path), self.path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < end:
                raise self._too_short(begin, end, max(0, size - begin))
            for start in range(begin, end, _READ_AHEAD):
                os.posix_fadvise(file.fileno(), start, min(_READ_AHEAD, end - start), os.POSIX_FADV_WILLNEED)

    def _too_short(self, begin: int, end: int, count: int) -> CheckpointError:
        return CheckpointError(f"{self}: bytes {begin}..{end} end at {begin + count}; the file became shorter.")


def map_reads(
    read: Callable[[T], R], items: Sequence[T], sources: Iterable[ByteSource], *, workers: int | None = None
) -> list[R]:
    """Return `read` of each item, in order; its first error is raised.

    It is called in parallel, by `workers` threads (None: WORKERS), unless all files that it reads are local and small.
    """
    sizes = [s.stamp[2] if isinstance(s, LocalFile) and s.stamp is not None else math.inf for s in sources]
    if sum(sizes) <= _AT_ONCE:
        return [read(item) for item in items]
    with ThreadPoolExecutor(workers or WORKERS) as pool:
        return list(pool.map(read, items))


def _stamp(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError in reading `path` into a CheckpointError."""
    try:
        yield
    except OSError as error:
        # A missing file was listed before.
        gone = "; another process is changing the folder, try again" if isinstance(error, FileNotFoundError) else ""
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}{gone}.") from error


def folder_files(path: Path) -> dict[str, ByteSource]:
    """Return the files of a folder by name, and the safetensors files of its subfolders by "sub/name"."""
    with readable(path):
        # Hidden subfolders hold stages of writers, or caches.
        paths = [file for pattern in ("*", "[!.]*/*.safetensors") for file in sorted(path.glob(pattern))]
        _refuse_special(paths)
        files = [file for file in paths if file.is_file()]
        names = [file.relative_to(path).as_posix() for file in files]
        return {name: LocalFile.at(file, name) for name, file in zip(names, files, strict=True)}


def _refuse_special(paths: Iterable[Path]) -> None:
    """Raise CheckpointError for a pipe, socket or device under a name to read: reading it might never end."""
    for path in paths:
        if path.suffix in (".safetensors", ".json") and path.exists() and not (path.is_file() or path.is_dir()):
            message = f"{path}: is a pipe, socket or device; a checkpoint has regular files only. Remove it."
            raise CheckpointError(message)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL; each read is one request, repeated when the network or the server fails."""

    url: str
    name: str
    hub: "HubReader" = field(repr=False)

    def __str__(self) -> str:
        return self.url

    def start(self, length: int) -> tuple[bytes, int]:
        return self.hub.fetch(self.url, 0, length)

    def read(self, begin: int, end: int) -> bytes:
        data, size = self.hub.fetch(self.url, begin, end)
        if len(data) < end - begin:
            raise CheckpointError(f"{self}: bytes {begin}..{end} were requested, the file has {size}.")
        return data


def split_hub_id(name: str) -> tuple[str, str | None] | None:
    """Split "org/name" or "org/name@ref" into the hub id and the branch, tag or commit; None for other names."""
    found = _HUB_ID.fullmatch(name)
    return None if found is None else (found["id"], found["ref"])


def repo_files(
    repo_id: str, ref: str | None, *, token: str | None, endpoint: str | None
) -> tuple[dict[str, ByteSource], str]:
    """Return the files of a hub repository, and the commit; files in the hub's cache are local files."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not in an __all__

    _check_id(repo_id)
    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    reader = HubReader(build_hf_headers(token=token))
    commit, names = _list(f"{endpoint}/api/models/{repo_id}/revision/{quote(ref or 'main', safe='')}", reader)
    sources: dict[str, ByteSource] = {}
    for name in names:
        cached = hub.try_to_load_from_cache(repo_id, name, revision=commit)
        url = hub.hf_hub_url(repo_id, name, revision=commit, endpoint=endpoint)  # all reads see one commit
        sources[name] = LocalFile(Path(cached), name) if isinstance(cached, str) else RemoteFile(url, name, reader)
    return sources, commit


def cached_folder(repo_id: str, ref: str | None) -> Path:
    """Return the hub cache's folder for that revision, without any request; CheckpointError if it has none."""
    _check_id(repo_id)
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
        path = hub.try_to_load_from_cache(repo_id, name, revision=ref)
        if isinstance(path, str):
            return Path(path).parent
    where = f"revision {ref or 'main'} is not in the cache {constants.HF_HUB_CACHE}"
    raise CheckpointError(f"{repo_id}: offline, and {where}. Run `hf download {repo_id}` while online.")


def _check_id(repo_id: str) -> None:
    try:
        hub.hf_hub_url(repo_id, "config.json")
    except ValueError as error:
        raise CheckpointError(f"{repo_id}: neither a local file or folder nor a hub id: {error}") from error


def _list(url: str, reader: "HubReader") -> tuple[str, list[str]]:
    data, _ = reader.fetch(url, 0, MAX_LISTING)
    try:
        listing = json.loads(reader.redactor.text(data.decode()))
        names = [str(file["rfilename"]) for file in listing["siblings"]]
        commit = str(listing["sha"])
        if not re.fullmatch(r"[\w.-]{1,100}", commit):
            raise ValueError(f"the commit {commit[:100]!r}")
        "".join(names).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        message = f"{url}: the response is not a repository listing: {reason}. Check HF_ENDPOINT."
        raise CheckpointError(message) from error
    return commit, [name for name in names if not {"", ".", ".."} & set(re.split(r"[/\\]", name))]


class _FailedTry(Exception):
    """A request that is worth repeating; `wait` is what the server asked for, in seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class HubReader:
    """A reader of byte ranges over HTTP that sends the token with each request and never returns or raises it.

    Threads can share it. It does not use huggingface_hub's session, whose timeouts bound each read, not a response.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        from nextn.bounded_http import client

        # Ranges of the file itself, not of a compressed form.
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self.redactor = Redactor(headers.get("authorization", "").removeprefix("Bearer ") or None)
        self._http: httpx2.Client = client(follow_redirects=True)

    def fetch(self, url: str, begin: int, end: int) -> tuple[bytes, int]:
        """Return those of the bytes [begin, end) that exist, and the size of the file; retry after a failure.

        Raises CheckpointError after the last try.
        """
        for attempt in range(TRIES):
            try:
                return self._get(url, begin, end)
            except _FailedTry as failed:
                wait = max(failed.wait, FIRST_WAIT * 2**attempt)
                if attempt + 1 == TRIES or wait > LONGEST_WAIT:
                    asked = f", and the server asks to wait {failed.wait:.0f} s" if failed.wait else ""
                    tries = f"{attempt + 1} of {TRIES} tries"
                    remedy = "Try later, with a token, or with a local copy (`hf download`)."
                    raise CheckpointError(f"{url}: {failed}{asked} ({tries}). {remedy}") from failed
            sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _get(self, url: str, begin: int, end: int) -> tuple[bytes, int]:
        import httpx2

        from nextn.bounded_http import Deadline

        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        deadline, body = Deadline(TIMEOUT, rate=RATE), bytearray()
        try:
            with self._http.stream("GET", url, headers=headers, timeout=deadline) as response:
                _check_status(url, response.status_code, response.headers, self.redactor)
                expected, size = _expected_length(url, begin, end, headers=response.headers, redactor=self.redactor)
                for piece in response.iter_raw():
                    body += piece
                    if len(body) > expected:
                        message = f"{url}: the server sends more than the {expected} bytes requested. {NO_RANGES}"
                        raise CheckpointError(message)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            slow = f": less than {RATE // 1024} KiB/s" if isinstance(error, httpx2.ReadTimeout) and body else ""
            raise _FailedTry(f"{type(error).__name__} {self.redactor.text(str(error))[:300]}{slow}") from error
        if size is not None and len(body) < expected:
            raise _FailedTry(f"the response ended after {len(body)} of {expected} bytes")
        return self.redactor.data(bytes(body)), len(body) if size is None else size


def _check_status(url: str, status: int, headers: Mapping[str, str], redactor: Redactor) -> None:
    if status in TRANSIENT:
        raise _FailedTry(f"HTTP {status}", _asked_wait(headers) if status in (429, 503) else 0.0)
    if status not in (200, 206):
        advice = ADVICE.get(headers.get("X-Error-Code", "")) or ADVICE.get(status)
        message = redactor.text(headers.get("X-Error-Message", "unexpected status"))[:200]
        raise CheckpointError(f"{url}: HTTP {status}: {advice or message}.")


def _asked_wait(headers: Mapping[str, str]) -> float:
    """Return the seconds in Retry-After or in the hub's own `RateLimit: "api";r=0;t=55`."""
    value = headers.get("Retry-After") or headers.get("RateLimit") or ""
    match = re.search(r"(?:^|;\s*t=)([0-9]{1,6})\s*$", value)
    return float(match[1]) if match else 0.0


def _expected_length(
    url: str, begin: int, end: int, *, headers: Mapping[str, str], redactor: Redactor
) -> tuple[int, int | None]:
    """Return how many bytes may come, and the size of the file where the response has it."""
    if "Content-Range" not in headers:  # the complete file, which is correct only if that was requested
        match = re.fullmatch(r"[0-9]{1,19}", headers.get("Content-Length", ""))
        length = int(match[0]) if match else None
        if begin or (length or 0) > end:
            raise CheckpointError(f"{url}: the server sends the complete file. {NO_RANGES}")
        return (end if length is None else length), length
    match = re.fullmatch(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})", headers["Content-Range"])
    first, last, size = map(int, match.groups()) if match else (-1, -1, -1)
    if first != begin or last + 1 != min(end, size):
        actual = redactor.text(headers["Content-Range"])[:80]
        raise CheckpointError(f"{url}: requested bytes {begin}-{end - 1}, the server sends {actual!r}. {NO_RANGES}")
    return last + 1 - first, size
