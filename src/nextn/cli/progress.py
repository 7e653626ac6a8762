"""Progress of commands that run for long, on standard error: bars on a terminal, else lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from nextn.cli.screen import console, echo

Step = Callable[..., None]  # called with a count, by default 1; see `_Meter.step`
_EVERY_S = 15.0  # between lines
SAME_AFTER_S = 60.0  # a line without news is printed again, as a sign of life


class _Meter:
    """Counts steps of a known or unknown total, and predicts when the others are done.

    The clock starts at the end of the first step: before it the model is loaded, kernels are compiled, or another bar
    runs.
    """

    def __init__(self, description: str, total: float | None, show: Callable[["_Meter"], None], *, in_gb: bool) -> None:
        self.description, self.total, self.done, self.status = description, total, 0.0, ""
        self._show, self._in_gb = show, in_gb
        self._first: tuple[float, float] | None = None  # time and count after the first step

    def step(
        self, count: float = 1, *, done: float | None = None, total: float | None = None, status: str = ""
    ) -> None:
        """Count steps, or set how many are `done`; `total` replaces the total, and `status` is shown beside it."""
        self.done, self.status = self.done + count if done is None else done, status
        self.total = self.total if total is None else total
        self._first = self._first or (time.monotonic(), self.done)
        self._show(self)

    def __str__(self) -> str:
        of_all = "" if self.total is None else f"/{self._number(self.total)}"
        count = f"{self._number(self.done)}{of_all}{' GB' if self._in_gb else ''}" if self.done or of_all else ""
        return ", ".join(filter(None, (count, self._left(), self.status)))

    def _number(self, count: float) -> str:
        return f"{count / 1e9:.2f}" if self._in_gb else f"{count:,.0f}"

    def _left(self) -> str:
        since, counted = self._first or (0.0, self.done)
        if self.total is None or self.done == counted:
            return ""
        return f"{minutes((time.monotonic() - since) / (self.done - counted) * (self.total - self.done))} left"


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[Callable[..., Step]]:
    """Yield progress(description, total, in_gb=False), which adds a bar and returns a function that advances it.

    Without a terminal, lines take the place of bars, also during long steps. A bar without total appears with its
    first step: above an error, it would leave a blank line.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    screen, lines = console(stderr=True), _Lines()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[meter]}"))
    bars = Progress(*columns, console=screen, transient=True)

    def added(description: str, total: float | None, *, in_gb: bool = False) -> Step:
        if quiet or not screen.is_terminal:
            meter = _Meter(description, total, _ignored if quiet else lines.show, in_gb=in_gb)
            return meter.step if quiet else lines.added(meter).step
        meter = _Meter(description, total, lambda meter: draw(), in_gb=in_gb)
        task = bars.add_task(description, total=total, meter=meter)

        def draw() -> None:
            bars.update(task, completed=meter.done, total=meter.total)
            bars.start()

        if total is not None:
            bars.start()
        return meter.step

    try:
        yield added
    finally:
        lines.end()
        if bars.live.is_started:
            bars.stop()


def _ignored(meter: _Meter) -> None:
    pass


class _Lines:
    """Prints meters at most every `_EVERY_S` seconds, and not at their end; in long steps, what is under way."""

    def __init__(self) -> None:
        self._meters: list[_Meter] = []
        self._latest: _Meter | None = None
        self._printed_at, self._is_over = time.monotonic(), Event()
        self._thread = Thread(target=self._repeat, daemon=True)

    def added(self, meter: _Meter) -> _Meter:
        self._meters.append(meter)
        if self._thread.ident is None:
            self._thread.start()
        return meter

    def show(self, meter: _Meter) -> None:
        self._latest = meter
        if time.monotonic() - self._printed_at >= _EVERY_S and meter.done != meter.total:
            self._print(meter)

    def end(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _print(self, meter: _Meter) -> None:
        self._printed_at = time.monotonic()
        echo(f"{meter.description} {meter}".rstrip(), err=True)

    def _repeat(self) -> None:
        while not self._is_over.wait(SAME_AFTER_S / 4):
            under_way = (each for each in (self._latest, *self._meters) if each and each.done != each.total)
            if time.monotonic() - self._printed_at >= SAME_AFTER_S and (meter := next(under_way, None)) is not None:
                self._print(meter)


def minutes(seconds: float) -> str:
    """Return a time as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
