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


def test_progress_without_a_terminal_is_lines(clock, capsys):
    """A command that computes for minutes in a pipe or a CI log says how far it is, and does not flood the log."""
    with progress_bars(quiet=False) as added:
        step = added("texts", 20)
        for _ in range(20):
            clock[0] += 6.0
            step()
    with progress_bars(quiet=True) as added:
        added("texts", 1)()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "texts 3/20, 1:42 left"
    assert len(lines) == 6


def test_a_long_step_shows_a_sign_of_life(monkeypatch, capsys):
    """Sixteen texts are decoded at once, for a minute on a slow machine: what is under way is said again."""
    monkeypatch.setattr(progress, "SAME_AFTER_S", 0.04)
    with progress_bars(quiet=False) as added:
        texts, _ = added("texts", 2), added("scores", 2)
        time.sleep(0.2)
        texts(2)
        capsys.readouterr()
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert 1 < len(lines) < 10
    assert {*lines} == {"scores 0/2"}


def test_time_left_is_that_of_later_steps(clock, capsys):
    """The first step waits, loads and compiles: counting it, the first estimates would be many times too long."""
    with progress_bars(quiet=False) as added:
        step = added("faults", 22)
        clock[0] += 600.0  # another bar
        step()
        clock[0] += 20.0
        step()
    assert capsys.readouterr().err.splitlines() == ["faults 1/22", "faults 2/22, 6:40 left"]


def test_counts_of_bytes_and_a_total_that_is_known_later(clock, capsys):
    with progress_bars(quiet=False) as added:
        step = added("written", None, in_gb=True)
        for done in (1e9, 3e9):
            clock[0] += 20.0
            step(done=done, total=9e9, status="layer 3/9")
    assert capsys.readouterr().err.splitlines()[-1] == "written 3.00/9.00 GB, 1:00 left, layer 3/9"


def test_a_bar_without_total_appears_with_its_first_step(monkeypatch):
    """A bar that is drawn before an error leaves a blank line above it."""
    screen = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(progress, "console", lambda **_: screen)
    with progress_bars(quiet=False) as added:
        step = added("answers", None)
        assert not screen.file.getvalue()
        step(status="12 tok/s")
    assert "12 tok/s" in screen.file.getvalue()
