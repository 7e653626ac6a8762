"""A plugin for runs of the native tests under sanitizers (`-p sanitized`): what makes their findings likely.

Memory of the runtime is allocated in its exact size, from the heap that AddressSanitizer watches, not in maps and
chunks that go on behind a tensor; and the runtime has several threads, as torch has one.
"""

from unittest.mock import patch

import torch

from nextn.runtime.native import memory
from nextn.runtime.native.abi import load

NUM_THREADS = 4


def pytest_sessionstart() -> None:
    memory._map_private = lambda size: torch.zeros(size, dtype=torch.uint8).numpy()  # type: ignore[assignment]
    memory.HugePages.take = lambda self, size: torch.zeros(size, dtype=torch.bool)  # type: ignore[method-assign]
    with patch.object(torch, "get_num_threads", return_value=NUM_THREADS):
        load()
