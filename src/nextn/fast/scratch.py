"""Memory that replays share for what lies between their operations: one after the other, each as if it had it alone.

A window of another size than the last one then finds its place in the processor's caches, and all sizes together take
what the largest takes.
"""

import torch
from torch import Tensor

from nextn.fast.pages import mapped

_RESERVED = 64 * 2**20  # bytes of address space; memory is what is written to


class Scratch:
    """Hands out the same memory again and again, larger memory where that is too small. What one replay leaves in it
    is overwritten by the next one to run."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """size bytes from the start of a cache line on, as a 1-D uint8 tensor of any values."""
        if size > len(self._memory):
            self._memory = torch.frombuffer(mapped(max(size, _RESERVED)), dtype=torch.uint8)
        return self._memory[:size]
