"""Text files: reading one, and those that are always there, the sources of Python's standard library."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nextn.errors import ConfigError

_TEST_FOLDERS = {"test", "tests", "idle_test"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def read_text(path: Path) -> str:
    """A UTF-8 text, its line ends as they are. Raises ConfigError for a file that is none."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name readable text files") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); convert it or leave it out") from error
    if "\0" in text:
        raise ConfigError(f"{path}: holds a NUL byte, so it is no text file; convert it or leave it out")
    return text


def standard_library(*, tests: bool = False) -> list[Path]:
    """The running interpreter's own Python sources, ordered by relative path; without its tests unless asked for.

    CPython 3.11: 732 files, 12.1 MB; the numbers differ between versions. It is not all code: `encodings` (1.4 MB of
    tables that resemble each other) and `pydoc_data` (0.8 MB of prose) are in. Installed packages, the build's own
    configuration and files that are not UTF-8 text are left out. Raises ConfigError where no sources are installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(_sources(root, tests=tests), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise ConfigError(f"{root} holds no Python sources (an interpreter without them); name text files instead")
    return [path for path in paths if _is_text(path)]


def _sources(root: Path, *, tests: bool) -> Iterator[Path]:
    skipped = _FOREIGN_FOLDERS if tests else _FOREIGN_FOLDERS | _TEST_FOLDERS
    for folder, folders, files in os.walk(root):
        # `config-*` and `_sysconfigdata*` hold the paths and flags of the machine that built the interpreter.
        folders[:] = [name for name in folders if name not in skipped and not name.startswith("config-")]
        yield from (
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _is_text(path: Path) -> bool:
    try:
        read_text(path)
    except ConfigError:
        return False
    return True
