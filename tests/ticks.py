"""A clock for threads that print every few seconds: a test decides when the time is up."""

from threading import Semaphore


class Ticks:
    """Stands in for the event that such a thread waits for."""

    def __init__(self) -> None:
        self._is_over, self._waiting, self._next = False, Semaphore(0), Semaphore(0)

    def wait(self, seconds: float) -> bool:
        self._waiting.release()
        self._next.acquire()
        return self._is_over

    def set(self) -> None:
        self._is_over = True
        self._next.release()

    def tick(self) -> None:
        """Let the thread print once, and wait until it has."""
        self._waiting.acquire()
        self._next.release()
        self._waiting.acquire()
        self._waiting.release()
