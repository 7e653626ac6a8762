"""What tests compile: kept beside the user's runtime, so that it is made once for all of them, and for the next run."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

import nextn.runtime.native
from nextn.runtime.native.abi import open_library
from nextn.runtime.native.build import cache_folder

_SOURCES = Path(nextn.runtime.native.__file__).parent / "csrc"


def made_once(make: Callable[[Path], None], *key: object) -> Path:
    """The folder that `make` has filled for this key and these sources, by whichever process or run needed it first."""
    given = [*(path.read_bytes() for path in sorted(_SOURCES.iterdir())), repr([os.environ.get("CXX"), *key]).encode()]
    home = cache_folder() / "tests"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / hashlib.sha256(b"".join(given)).hexdigest()[:16]
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with TemporaryDirectory(dir=home) as unfinished:
                make(Path(unfinished))
                os.replace(unfinished, folder)
                Path(unfinished).mkdir()  # for its own removal
    return folder


def compiled(*more: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The runtime for a generic machine, without tiles or long vectors, and with additional sources and flags."""

    sources = [*more, *sorted(_SOURCES.glob("*.cpp"))]
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", *flags, f"-I{_SOURCES}"]

    def make(folder: Path) -> None:
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *options, "-o", folder / "runtime.so", *sources], check=True)

    key = [*options[:-1], *(path.name for path in sources), *(path.read_text() for path in more)]
    return open_library(made_once(make, *key) / "runtime.so")
