"""The build of the native runtime: once for each source, processor and cache folder, whatever happens to a builder.

A library is made in a folder of its own and renamed into place; its size and SHA-256 lie beside it and are compared
before it is loaded. The lock is the operating system's: it ends with the process that holds it.
"""

import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from nextn.errors import ConfigError

# No -ffast-math: -inf in masked scores must stay what it is.
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
_TIMEOUT = 900  # seconds for one source; the longest takes 17
_MESSAGE = 1500  # characters of the compiler's output that an error repeats
_log = logging.getLogger(__name__)  # without a handler of the program's, a warning is one line on stderr


def cache_folder() -> Path:
    """Return the folder of built libraries: TORCH_EXTENSIONS_DIR, as for torch's own extensions, or ~/.cache/nextn.

    Raises:
        ConfigError: The user has no home folder.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        return Path(named).absolute() if named else Path.home() / ".cache" / "nextn"
    except RuntimeError as error:
        raise ConfigError(f"no folder for the native runtime: {error}; set TORCH_EXTENSIONS_DIR to one") from error


def built(sources: Path, cache: Path) -> Path:
    """Return the shared library of the .cpp files in `sources`, built if the cache has no whole one.

    Args:
        sources: A folder of .cpp files and their headers.
        cache: Where libraries are kept; several processes and machines may share it.

    Raises:
        ConfigError: It cannot be built, with the reason.
    """
    library = cache / f"nextn_runtime_{_identity(sources)}.so"
    try:
        if not is_whole(library):
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not is_whole(library):  # another process may have built it meanwhile
                    _build(sources, library)
    except OSError as error:
        raise ConfigError(
            f"the native runtime cannot be kept in {cache}: {error.strerror or error}; set TORCH_EXTENSIONS_DIR to a "
            "folder that can be written"
        ) from error
    return library


def is_whole(library: Path) -> bool:
    """Whether the library has the size and hash that were noted when it was built."""
    try:
        return json.loads(_record(library).read_text()) == _description(library.read_bytes())
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class BuildStatus:
    """What `built` would find, without building anything.

    Args:
        library: Path of the compiled library, whether it exists or not.
        is_built: Whether it exists and is whole.
        compiler: First line that the compiler prints for --version; None if there is no compiler.
        missing: Tools that a build needs and that are not on the PATH.
        problem: Why a library that is built cannot be used here; empty if it can.
    """

    library: Path
    is_built: bool
    compiler: str | None
    missing: tuple[str, ...]
    problem: str = ""


def status_of(sources: Path, cache: Path) -> BuildStatus:
    """Report whether the library of these sources is in the cache, and by which compiler it would be built."""
    library = cache / f"nextn_runtime_{_identity(sources)}.so"
    tool = _compiler()[0]
    missing = () if shutil.which(tool) else (tool,)
    return BuildStatus(library, is_whole(library), None if missing else _version_line(tool), missing)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _version_line(tool: str) -> str:
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{tool}: {error}"
    return next(iter(done.stdout.splitlines()), tool)


def _identity(sources: Path) -> str:
    """By what is built, how and for which processor: checkouts and machines may share a cache folder."""
    parts = [
        *(path.read_bytes() for path in sorted(sources.iterdir())),
        " ".join(_FLAGS).encode(),
        _processor().encode(),
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"


def _record(library: Path) -> Path:
    return library.with_suffix(".json")


def _description(content: bytes) -> dict[str, object]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("waiting for another build of the native runtime; %s", path.parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(sources: Path, library: Path) -> None:
    """Under the lock. The record comes last: a library without one is built again."""
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise ConfigError(f"the native runtime is built by {compiler[0]}, which is not there: install a C++20 compiler")
    _log.warning("building the native runtime, about 40 s, once; %s", library.parent)
    for left_over in library.parent.glob(f"{library.stem}.*.tmp"):  # by builders that were killed
        shutil.rmtree(left_over, ignore_errors=True)
    with TemporaryDirectory(
        prefix=f"{library.stem}.", suffix=".tmp", dir=library.parent, ignore_cleanup_errors=True
    ) as own:
        made = _compiled(compiler, sources, Path(own))
        record = Path(own) / "record.json"
        record.write_text(json.dumps(_description(made.read_bytes())))
        made.replace(library)
        record.replace(_record(library))


def _compiled(compiler: Sequence[str], sources: Path, folder: Path) -> Path:
    """One process a source, as many at once as there are processors; those that take longest first."""
    files = sorted(sources.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [folder / f"{path.stem}.o" for path in files]

    def compile_one(source: Path, target: Path) -> None:
        _run([*compiler, *_FLAGS, "-c", str(source), "-o", str(target)], folder)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, files, objects))  # cancels what has not begun when one fails
    library = folder / "runtime.so"
    _run([*compiler, *_FLAGS, "-shared", *map(str, objects), "-o", str(library)], folder)
    return library


def _run(command: Sequence[str], folder: Path) -> None:
    """The compiler's own temporary files go to the folder too, which the next builder removes if this one is killed."""
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the native runtime could not be built: {command[0]} ran for {_TIMEOUT} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[:_MESSAGE]
        raise ConfigError(f"the native runtime could not be built: {command[0]} ended with {done.returncode}: {said}")
