"""Progress of long commands, where it is drawn and where it is printed."""

import io
import time

import pytest
from rich.console import Console

from nextn.cli import progress
from nextn.cli.progress import progress_bars


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_without_a_terminal_is_lines(monkeypatch, capsys):
    """A command that computes for minutes in a pipe says how far it is, also in a long step, and floods no log."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "SAME_AFTER_S", 0.1)
    with progress_bars(quiet=False) as added:
        texts, scores = added("texts", 32), added("scores", 2)
        texts(8)
        time.sleep(0.25)
        texts(24)
        time.sleep(0.05)
        scores(2)
    with progress_bars(quiet=True) as added:
        added("texts", 2)()
        time.sleep(0.05)
    lines = capsys.readouterr().err.splitlines()
    assert [*dict.fromkeys(lines)] == ["texts 8/32", "scores 0/2"]
    assert 1 < lines.count("texts 8/32") < 5


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
