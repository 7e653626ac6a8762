"""Progress of commands that run for long, on standard error: bars on a terminal, else lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

    def __init__(self, description: str, total: float | None, show: Callable[[], None], *, in_gb: bool) -> None:
        self.description, self.total, self.done, self.status = description, total, 0.0, ""
        self._show, self._in_gb = show, in_gb
        self._first: tuple[float, float] | None = None  # time and count after the first step
        self.moved_at = 0.0

    def step(
        self, count: float = 1, *, done: float | None = None, total: float | None = None, status: str = ""
    ) -> None:
        """Count steps, or set how many are `done`; `total` replaces the total, and `status` is shown beside it."""
        self.done = round(self.done + count, 6) if done is None else done  # steps may be parts
        self.status = status
        self.total = self.total if total is None else total
        self.moved_at = time.monotonic()
        self._first = self._first or (self.moved_at, self.done)
        self._show()

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

    screen, meters = console(stderr=True), list[_Meter]()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[meter]}"))
    bars = Progress(*columns, console=screen, transient=True)

    def added(description: str, total: float | None, *, in_gb: bool = False) -> Step:
        if quiet or not screen.is_terminal:
            meters.append(_Meter(description, total, lambda: None, in_gb=in_gb))
            return meters[-1].step
        meter = _Meter(description, total, lambda: draw(), in_gb=in_gb)
        task = bars.add_task(description, total=total, meter=meter)

        def draw() -> None:
            bars.update(task, completed=meter.done, total=meter.total)
            bars.start()

        if total is not None:
            bars.start()
        return meter.step

    def under_way() -> str:
        meter = max((each for each in meters if each.done != each.total), key=lambda each: each.moved_at, default=None)
        return "" if meter is None else f"{meter.description} {meter}".rstrip()

    with nullcontext() if quiet or screen.is_terminal else status_lines(under_way, _EVERY_S):
        try:
            yield added
        finally:
            if bars.live.is_started:
                bars.stop()


@contextmanager
def status_lines(status: Callable[[], str], every_s: float, *, clock: Callable[[], str] = str) -> Iterator[None]:
    """Print `clock` and `status` every `every_s` seconds, or every `SAME_AFTER_S` where there is no news."""
    is_over, printed, due = Event(), "", 0.0

    def show() -> None:
        nonlocal printed, due
        text = status()
        if text and (text != printed or time.monotonic() >= due):
            printed, due = text, time.monotonic() + SAME_AFTER_S
            echo(f"{clock()}{text}", err=True)

    def repeat() -> None:
        while not is_over.wait(every_s):
            show()

    # A thread, because a step may take a minute: one with compilation, or sixteen texts that are decoded at once.
    thread = Thread(target=repeat, daemon=True)
    show()
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def say_doing(what: str, *, quiet: bool = False) -> None:
    """Print what is done next and takes seconds, such as an import, during which no thread may print."""
    if not quiet:
        echo(f"{what} ...", err=True)


def minutes(seconds: float) -> str:
    """Return a time as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
