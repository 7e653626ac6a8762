"""Help and completion of the command line: commands in groups, names and options completed by the shell."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from nextn.cli import app

PANELS = ["Check", "Fix", "Train", "Decode", "Engines", "Learn"]


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "nextn", *args], capture_output=True, text=True, timeout=60, env=os.environ | env
    )


def test_help_is_grouped():
    """Every command is in a group, and the groups come in this order."""
    assert {command.rich_help_panel for command in get_command(app).commands.values()} == set(PANELS)
    done = run("--help", COLUMNS="100")
    assert done.returncode == 0
    assert re.findall(r"─ (\w+) ─", done.stdout) == ["Options", *PANELS]
    assert "Usage: nextn " in done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [("nextn me", {"measure"}), ("nextn canary ", {"build", "check"}), ("nextn bench --temp", {"--temperatures"})],
)
def test_shell_completes(words, completed):
    done = run(_NEXTN_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert set(done.stdout.split()) == completed
    assert not done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(shell):
    """Also when it is asked for as `python -m nextn`, where the program's own name is another one."""
    done = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_NEXTN_COMPLETE=complete_" in done.stdout
