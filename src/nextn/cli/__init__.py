"""The command line: a table of commands over library functions, and the only folder that prints.

Heavy imports are inside the commands, so `nextn --help` answers at once. Exit codes: 0 done, 1 findings, 2 usage error,
3 too few data to decide (`diagnose`), 130 Ctrl-C, 141 when the reader of a pipe has closed it.
"""

import os
import re
import sys
from dataclasses import fields
from importlib import import_module
from inspect import getdoc
from typing import Annotated

import typer
from typer import Option

from nextn import __version__
from nextn.cli.commands import COMMANDS, GROUPS
from nextn.cli.screen import echo, flush_streams, guard_streams, print_error, visible
from nextn.errors import NextnError
from nextn.text_format import docs_page


def build_app(only: str | None = None) -> typer.Typer:
    """Build the command line. With the name of a command, the modules of the others are not imported."""
    built = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Multi-Token Prediction: train heads, decode with them losslessly, and find out why drafts are rejected.",
        epilog=f"Documentation: {docs_page('index')}",
    )
    built.callback(invoke_without_command=True)(root)
    groups = {name: typer.Typer(no_args_is_help=True, help=text) for name, text in GROUPS.items()}
    for panel, commands in COMMANDS.items():
        for name, command in commands.items():
            group, _, own = name.rpartition(" ")
            if only in (None, group or name):
                run = getattr(import_module(f"nextn.cli.{command.module}"), own)
                epilog = f"Documentation: {docs_page(command.page)}"
                text = re.sub(r"(?<!\n)\n(?!\n)", " ", getdoc(run) or "")  # typer would keep the source's line breaks
                calls = (f"`{' '.join(filter(None, ('nextn', name, call)))}`" for call in command.calls)
                text, summary = "\n\n".join((*calls, text)), command.summary
                place = groups[group] if group else built
                place.command(rich_help_panel=None if group else panel, epilog=epilog, help=text, short_help=summary)(
                    run
                )
    for name, place in groups.items():
        if only in (None, name):
            built.add_typer(place, name=name, rich_help_panel="Engines")
    return built


def __getattr__(name: str) -> typer.Typer:
    """The attribute `app`, with all commands, is built when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = built = build_app()
    return built


def main() -> None:
    """Run `nextn`; an error of the user's becomes one line and an exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    guard_streams()
    try:
        _run()
    except NextnError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:  # such as an unusable cache or configuration folder of a library
        if error.filename is None:
            raise
        path = visible(str(error.filename))
        echo(f"error: {path}: {error.strerror}; make it usable, or name another path", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        sys.exit(130)
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):  # typer has made it an exit
            echo("interrupted", err=True)
        if end.code == NextnError.exit_code and sys.argv[1:2] == ["train"]:
            _explain_settings(sys.argv[2:])
        raise


def _explain_settings(words: list[str]) -> None:
    """Say how a training setting is given that was written as an option."""
    from nextn.train.config import HeadConfig

    names = {field.name for field in fields(HeadConfig)}
    for name in (word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")):
        if name in names:
            echo(f"{name} is a setting: give it as --set {name}=VALUE", err=True)


def _run() -> None:
    known = {name.partition(" ")[0] for commands in COMMANDS.values() for name in commands}
    only = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in known else None
    try:
        build_app(only)(prog_name="nextn")  # for `python -m nextn`, too: completion scripts are named after it
    finally:
        flush_streams()


def root(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        echo(f"nextn {__version__}")
        raise typer.Exit
