"""The engines' servers as child processes: what does not start, and what is left of it."""

import os
import time

import pytest
from engines.client import Unavailable
from engines.servers import Command, served


def shell(script):
    return Command(["sh", "-c", script])  # the port is an argument of the script


def test_a_server_that_ends_at_its_start_is_unavailable(tmp_path):
    """There is no process to kill any more."""
    log = tmp_path / "log"
    with pytest.raises(Unavailable, match="did not start"), served(shell("echo no such flag; exit 1"), log):
        raise AssertionError
    assert log.read_text() == "no such flag\n"


def test_children_of_a_server_that_ended_are_killed(tmp_path):
    """An engine's workers keep their memory and the log."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = f"sleep 20 > {pipe} & sleep 0.3; exit 1"
    with pytest.raises(Unavailable), served(shell(script), tmp_path / "log"):
        raise AssertionError
    assert any(is_closed(end) or time.sleep(0.05) for _ in range(100))
    os.close(end)


def is_closed(end):
    """Whether no process writes to this pipe."""
    try:
        return os.read(end, 1) == b""
    except BlockingIOError:
        return False
