"""Files of weights that are mapped, and that another program may truncate while they are in use."""

import ctypes
from collections.abc import Iterable
from pathlib import Path

from nextn.errors import ConfigError
from nextn.runtime.native.abi import load

_MAPS = Path("/proc/self/maps")


def zero_lost_pages(files: Iterable[Path]) -> bool:
    """Let pages of these files that are lost by a truncation read as zeros, for as long as the process runs.

    Otherwise the first access ends the process with SIGBUS. The caller has to look at the files before it uses what was
    computed (`FileStamps`). Files that are mapped later are not covered.

    Returns:
        Whether it was possible: on Linux, with the native library, once per process.
    """
    names = {str(file.resolve()) for file in files}
    bounds = [bound for name, *pair in _mappings() if name in names for bound in pair]
    try:
        library = load().library
    except ConfigError:
        return False
    return (
        bool(bounds) and library.nextn_zero_lost_pages((ctypes.c_int64 * len(bounds))(*bounds), len(bounds) // 2) == 0
    )


def _mappings() -> Iterable[tuple[str, int, int]]:
    """Yield the file, begin and end of each mapping of a file (proc(5))."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith("/"):
            begin, end = (int(part, 16) for part in addresses.split("-"))
            yield name, begin, end
