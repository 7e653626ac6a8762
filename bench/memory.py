"""What a process holds in memory, as Linux counts it."""

import re
from pathlib import Path


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
