"""The native runtime compiled for a generic machine: without tiles or long vectors."""

import ctypes
import os
import subprocess
from pathlib import Path

import nextn.runtime.native
from nextn.runtime.native.abi import open_library

_SOURCES = Path(nextn.runtime.native.__file__).parent / "csrc"
# What `open_library` looks for functions in, and linear layers.
_NAMES = (
    "runtime",
    "gemm",
    "packing",
    "tiles",
    "lanes",
    "rounded",
    "int8",
    "grouped",
    "kquants",
    "fp8",
    "blocks",
    "chain",
    "sampling",
    "rounds",
    "layout",
)


def compiled(folder: Path, *more: Path) -> ctypes.CDLL:
    """Compile the runtime with additional sources into the folder."""
    path, compiler = folder / "runtime.so", os.environ.get("CXX", "g++")
    sources = [*more, *(_SOURCES / f"{name}.cpp" for name in _NAMES)]
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", f"-I{_SOURCES}", "-o", path, *sources]
    subprocess.run(command, check=True)
    return open_library(path)
