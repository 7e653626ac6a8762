"""The number of torch threads of a run on the CPU: all, or one where the machine is busy with other work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class ThreadChoice:
    """Chooses between all torch threads and one, by the speed of steps.

    Beside other work, a step with several threads waits for the one that is not scheduled, and may take ten times as
    long as with one.
    """

    def __init__(self) -> None:
        self._all, self._speeds = torch.get_num_threads(), list[float]()
        torch.set_num_threads(1)

    def update(self, speed: float) -> None:
        """Take the speed of a step. The first one warms up, the second has one thread, the others have all.

        As soon as one of these is slower than the second, all others have one thread.
        """
        self._speeds.append(speed)
        if len(self._speeds) == 2:
            torch.set_num_threads(self._all)
        elif len(self._speeds) > 2 and speed < self._speeds[1]:
            torch.set_num_threads(1)


@contextmanager
def chosen_threads(*, enabled: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function that takes the speed of each step and chooses the threads of the next; restore them at the end.

    enabled: Otherwise it does nothing. The number of threads may change the last bits of a step.
    """
    before = torch.get_num_threads()
    try:
        yield ThreadChoice().update if enabled and before > 1 else lambda speed: None
    finally:
        torch.set_num_threads(before)
