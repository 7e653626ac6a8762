"""Progress of long commands, where it is drawn and where it is printed."""

import io

import pytest
from rich.console import Console
from ticks import Ticks

from nextn.cli import progress
from nextn.cli.progress import progress_bars


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_without_a_terminal_is_lines(clock, monkeypatch, capsys):
    """A command that computes for minutes in a pipe says how far it is, also in a long step, and floods no log."""
    ticks = Ticks()
    monkeypatch.setattr(progress, "Event", lambda: ticks)
    with progress_bars(quiet=False) as added:
        texts, scores = added("texts", 32), added("scores", 2)
        texts(8)
        for _ in range(10):
            ticks.tick()
            clock[0] += progress._EVERY_S
        texts(24)
        ticks.tick()
        scores(2)
        ticks.tick()
    assert capsys.readouterr().err.splitlines() == [*["texts 8/32"] * 3, "scores 0/2"]


def test_quiet_commands_print_no_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "status_lines", None)
    with progress_bars(quiet=True) as added:
        added("texts", 2)()
    assert not capsys.readouterr().err


def test_time_left_is_that_of_later_steps(clock):
    """The first step waits, loads and compiles: counting it, the first estimates would be many times too long."""
    with progress_bars(quiet=True) as added:
        step = added("faults", 22)
        clock[0] += 600.0  # another bar
        step()
        assert str(step.__self__) == "1/22"
        clock[0] += 20.0
        step()
    assert str(step.__self__) == "2/22, 6:40 left"


def test_counts_of_bytes_and_a_total_that_is_known_later(clock):
    with progress_bars(quiet=True) as added:
        step = added("written", None, in_gb=True)
        for done in (1e9, 3e9):
            clock[0] += 20.0
            step(done=done, total=9e9, status="layer 3/9")
    assert str(step.__self__) == "3.00/9.00 GB, 1:00 left, layer 3/9"


def test_a_bar_without_total_appears_with_its_first_step(monkeypatch):
    """A bar that is drawn before an error leaves a blank line above it."""
    screen = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(progress, "console", lambda **_: screen)
    with progress_bars(quiet=False) as added:
        step = added("answers", None)
        assert not screen.file.getvalue()
        step(status="12 tok/s")
    assert "12 tok/s" in screen.file.getvalue()
