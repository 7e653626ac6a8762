"""The native runtime compiled for no machine in particular: without tiles or long vectors."""

import ctypes
import os
import subprocess
from pathlib import Path

import nextn.fast
from nextn.fast.native import bound

_SOURCES = Path(nextn.fast.__file__).parent / "csrc"
# What `bound` looks for functions in, and linear layers.
_NAMES = ("runtime", "gemm", "tiles", "lanes", "blocks", "chain", "sampling", "rounds", "layout")


def compiled(folder: Path, *more: Path) -> ctypes.CDLL:
    """With more sources beside its own; the library lies in the folder."""
    path, compiler = folder / "runtime.so", os.environ.get("CXX", "g++")
    sources = [*more, *(_SOURCES / f"{name}.cpp" for name in _NAMES)]
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", f"-I{_SOURCES}", "-o", path, *sources]
    subprocess.run(command, check=True)
    return bound(path)
