"""Resident memory of this process, from Linux's /proc."""

import re
from pathlib import Path


def resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak so far) in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024
