"""The build of the native runtime: once per source version, processor and cache folder, safe against killed builders.

A library is built in a temporary folder and renamed into place. Its size and SHA-256 are stored beside it and checked
before it is loaded. The lock is a file lock of the operating system, released when its process ends.
"""

import errno
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

# No -ffast-math: masked scores are -inf.
_FLAGS = ("-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
# What NEXTN_NATIVE_BUILD may be, for developers. `bf16` rounds the inputs of products as processors do that multiply
# bf16; `debug` and those after it check views, indices and sizes (csrc/check.h). The libraries of sanitizers must be
# loaded before Python, and their options say whether a finding ends the process: see the Makefile.
_CHECKED = ("-O1", "-g1", "-fno-omit-frame-pointer", "-DNEXTN_DEBUG")
_BUILDS = {
    "release": ("-O3",),
    "bf16": ("-O3", "-DNEXTN_MULTIPLY_HALVES"),
    "debug": _CHECKED,
    "asan": (*_CHECKED, "-fsanitize=address,undefined", "-fsanitize-recover=address,undefined"),
    "tsan": (*_CHECKED, "-fsanitize=thread"),
}
# What NEXTN_NATIVE_MARCH may be, with the features that it adds to x86-64, as /proc/cpuinfo spells them.
_MARCHES = {
    "native": (),
    "x86-64": (),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2", "popcnt"),
}
_TIMEOUT = 900  # seconds per source file; the slowest takes 17
_MAX_OUTPUT = 1500  # characters of the compiler's output that an error message includes
_log = logging.getLogger(__name__)  # without a configured handler, a warning is one line on stderr


def cache_folder() -> Path:
    """Return the folder of compiled libraries: TORCH_EXTENSIONS_DIR, as for torch's own extensions, or ~/.cache/nextn.

    Raises ConfigError if the variable is not set and the user has no home folder.
    """
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        return Path(configured).absolute() if configured else Path.home() / ".cache" / "nextn"
    except RuntimeError as error:
        message = f"no cache folder for the native runtime: {error}; set TORCH_EXTENSIONS_DIR to a folder"
        raise ConfigError(message) from error


def build_library(sources: Path, cache: Path) -> Path:
    """Return the shared library of the .cpp files in `sources`, built first if the cache has no intact one.

    Several processes and machines may share the cache. Raises ConfigError with the reason if the build fails.
    """
    library = cache / f"nextn_runtime_{_identity(sources)}.so"
    try:
        if not is_intact(library):
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not is_intact(library):  # another process may have built it meanwhile
                    _build(sources, library)
    except OSError as error:
        raise ConfigError(
            f"the native runtime cannot be stored in {cache}: {error.strerror or error}; set TORCH_EXTENSIONS_DIR to a "
            "writable folder"
        ) from error
    return library


def is_intact(library: Path) -> bool:
    """Return whether the library has the size and hash recorded when it was built."""
    try:
        return bool(json.loads(_record(library).read_text(encoding="utf-8")) == _description(library.read_bytes()))
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class BuildStatus:
    """The state of the compiled library, determined without building it."""

    library: Path  # where it is, or would be
    is_built: bool  # it exists and is intact
    compiler: str | None  # first line of the compiler's --version; None without a compiler
    missing: tuple[str, ...]  # tools that a build needs and that are not on the PATH
    problem: str = ""  # why a built library cannot be used on this machine; empty if it can


def status_of(sources: Path, cache: Path) -> BuildStatus:
    """Return whether the library of these sources is in the cache, and which compiler would build it."""
    library = cache / f"nextn_runtime_{_identity(sources)}.so"
    tool = _compiler()[0]
    missing = () if shutil.which(tool) else (tool,)
    return BuildStatus(library, is_intact(library), None if missing else _version_line(tool), missing)


def _compiler() -> list[str]:
    given = os.environ.get("CXX", "")
    try:
        return shlex.split(given) or ["g++"]
    except ValueError as error:
        message = f"CXX is {given!r}: {error}; expected a compiler and its options, as a shell reads them"
        raise ConfigError(message) from error


def _version_line(tool: str) -> str:
    try:
        completed = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{tool}: {error}"
    return next(iter(completed.stdout.splitlines()), tool)


def _march() -> str:
    """The instruction set that the runtime is built for: NEXTN_NATIVE_MARCH, or that of this processor."""
    march = os.environ.get("NEXTN_NATIVE_MARCH") or "native"
    if march not in _MARCHES:
        raise ConfigError(f"NEXTN_NATIVE_MARCH is {march!r}: it can be {', '.join(_MARCHES)}, or unset for native")
    if march != "native" and platform.machine() != "x86_64":
        raise ConfigError(f"NEXTN_NATIVE_MARCH is {march!r}, and this processor is {platform.machine()}: unset it")
    if missing := sorted(set(_MARCHES[march]) - set(_processor().split())):
        raise ConfigError(
            f"NEXTN_NATIVE_MARCH is {march!r}, and this processor has no {', '.join(missing)}: set x86-64, or unset it"
        )
    return march


def _build_kind() -> str:
    """Return how the runtime is built: NEXTN_NATIVE_BUILD, or `release`."""
    kind = os.environ.get("NEXTN_NATIVE_BUILD") or "release"
    if kind not in _BUILDS:
        raise ConfigError(f"NEXTN_NATIVE_BUILD is {kind!r}: it can be {', '.join(_BUILDS)}, or unset for release")
    return kind


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_BUILDS[_build_kind()], f"-march={_march()}")


def _identity(sources: Path) -> str:
    """Hash of sources, flags and, if they name it, the processor: checkouts and machines may share a cache folder."""
    parts = [
        *(path.read_bytes() for path in sorted(sources.iterdir()) if path.suffix in (".cpp", ".h")),
        " ".join(_flags()).encode(),
        _processor().encode() if _march() == "native" else b"",
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def _processor() -> str:
    """The CPU features that -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
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
        _log.warning("waiting for another process that builds the native runtime in %s", path.parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(sources: Path, library: Path) -> None:
    """Build under the lock. The record is written last: a library without one is built again."""
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise ConfigError(
            f"the native runtime needs the compiler {compiler[0]}, which is not on the PATH: install a C++20 compiler"
        )
    _log.warning("building the native runtime (once, about 40 s) in %s", library.parent)
    for left_over in library.parent.glob(f"{library.stem}.*.tmp"):  # of builders that were killed
        shutil.rmtree(left_over, ignore_errors=True)
    with TemporaryDirectory(
        prefix=f"{library.stem}.", suffix=".tmp", dir=library.parent, ignore_cleanup_errors=True
    ) as folder:
        compiled = _compile(compiler, sources, Path(folder))
        record = Path(folder) / "record.json"
        record.write_text(json.dumps(_description(compiled.read_bytes())), encoding="utf-8")
        compiled.replace(library)
        record.replace(_record(library))


def _compile(compiler: Sequence[str], sources: Path, folder: Path) -> Path:
    """Compile each source in its own process, as many at once as there are CPUs, the largest first."""
    files = sorted(sources.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [folder / f"{path.stem}.o" for path in files]

    def compile_one(source: Path, target: Path) -> None:
        _run([*compiler, *_flags(), "-c", str(source), "-o", str(target)], folder)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, files, objects))  # if one fails, those not yet started are canceled
    library = folder / "runtime.so"
    _run([*compiler, *_flags(), "-shared", *map(str, objects), "-o", str(library)], folder)
    return library


def _run(command: Sequence[str], folder: Path) -> None:
    """Run with temporary files in the folder, which the next builder removes if this one is killed."""
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    try:
        completed = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        message = f"the native runtime could not be built: {command[0]} did not finish in {_TIMEOUT} s"
        raise ConfigError(message) from error
    if completed.returncode:
        output = (completed.stderr or completed.stdout).strip()[:_MAX_OUTPUT]
        if (full := os.strerror(errno.ENOSPC)) in output:
            raise ConfigError(
                f"the native runtime could not be built: {full} in {folder.parent}; free some, or set "
                "TORCH_EXTENSIONS_DIR to another folder"
            )
        status = f"{command[0]} exited with status {completed.returncode}" + (f": {output}" if output else "")
        raise ConfigError(f"the native runtime could not be built: {status}")
