"""Help and completion of the command line: commands in groups, names and options completed by the shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.cli import app
from nextn.text_format import docs_page

PANELS = ["Check", "Fix", "Train", "Decode", "Engines", "Learn"]


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "nextn", *args], capture_output=True, encoding="utf-8", timeout=60, env=os.environ | env
    )


@pytest.mark.more
def test_help_is_grouped():
    """Every command is in a group, and the groups come in this order."""
    assert {command.rich_help_panel for command in get_command(app).commands.values()} == set(PANELS)
    done = run("--help", COLUMNS="100", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert re.findall(r"─ (\w+) ─", done.stdout) == ["Options", *PANELS]
    assert "Usage: nextn " in done.stdout


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "completed"),
    [("nextn me", {"measure"}), ("nextn canary ", {"build", "check"}), ("nextn bench --temp", {"--temperatures"})],
)
def test_shell_completes(words, completed):
    done = run(_NEXTN_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert set(done.stdout.split()) == completed
    assert not done.stderr


@pytest.mark.more
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(shell):
    """Also when it is asked for as `python -m nextn`, where the program's own name is another one."""
    done = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_NEXTN_COMPLETE=complete_" in done.stdout


def commands():
    top = get_command(app).commands
    return {**{name: each for name, each in top.items() if name != "canary"}, **top["canary"].commands}


def test_help_refers_to_the_documentation_site():
    """Each epilog has the name of a page that exists; no text names a file of the repository instead."""
    root = Path(__file__).parent.parent
    for name, command in commands().items():
        page = re.fullmatch("Documentation: `nextn docs (.+)`", command.epilog)[1]
        assert command.epilog == f"Documentation: {docs_page(page)}"
        assert (root / "docs" / f"{page}.md").exists(), name
        texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        assert not any(re.search(r"(?<!main/)docs/", text) for text in texts), name


def test_descriptions_have_no_line_breaks_inside_paragraphs():
    """A terminal wraps them at its own width."""
    assert not [name for name, each in commands().items() if "\n" in (each.help or "").replace("\n\n", "")]


def test_options_mean_one_thing_everywhere():
    """An option of one name has the same short name and the same negation in every command."""
    for name, command in commands().items():
        options = {option: each for each in command.params for option in each.opts}
        assert ("-k" in options) == ("--num-speculative-tokens" in options), name
        if "--chat" in options:
            assert "--no-chat" in options["--chat"].secondary_opts, name


def test_every_command_takes_the_same_names():
    """Whatever takes a checkpoint takes `tiny`, the one in the package."""
    takes = re.compile(r"(folder|file)\b.*\bhub id", re.IGNORECASE)
    for name, command in get_command(app).commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        for each in command.params:
            options = each.opts[0]
            if options == "--head" or (takes.search(each.help or "") and options != "--served-model-name"):
                assert each.callback, (name, options)
                assert each.callback(context, each, "tiny") == str(SHIPPED), (name, options)
