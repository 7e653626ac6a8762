"""The command line: a lazy table of verbs over library functions, and the only folder that prints.

Heavy imports stay inside the verbs, so `nextn --help` answers at once. Exit codes: 0 done, 1 findings, 2 usage, 130
Ctrl-C, 141 where the reader of a pipe has left.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from nextn import __version__
from nextn.cli import bench, canary, measure, move
from nextn.cli.answer import answer
from nextn.cli.audit import audit
from nextn.cli.demo import demo
from nextn.cli.diagnose import diagnose
from nextn.cli.env import env
from nextn.cli.generate import generate
from nextn.cli.screen import echo, flush_streams, guard_streams, print_error, visible
from nextn.cli.trace import trace
from nextn.cli.train import train
from nextn.cli.verify import verify
from nextn.errors import NextnError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Multi-Token Prediction: train heads, decode with them losslessly, see what they do.",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Check": (audit, *measure.VERBS, env),
    "Fix": move.VERBS,
    "Train": (train, answer),
    "Decode": (generate, *bench.VERBS),
    "Engines": (verify, diagnose),
    "Learn": (demo, trace),
}
for panel, verbs in _PANELS.items():
    for verb in verbs:
        app.command(rich_help_panel=panel)(verb)
app.add_typer(canary.app, name="canary", rich_help_panel="Engines")


def main() -> None:
    """Entry point of `nextn`: errors of the user's become one line and an exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    guard_streams()
    try:
        _run()
    except NextnError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:  # a cache or a configuration folder of a library that cannot be used
        if error.filename is None:
            raise
        echo(
            f"error: {visible(str(error.filename))}: {error.strerror}; make it usable, or name another place", err=True
        )
        sys.exit(2)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        sys.exit(130)


def _run() -> None:
    try:
        app(prog_name="nextn")  # also as `python -m nextn`: completion scripts are named after it
    finally:
        flush_streams()


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        echo(f"nextn {__version__}")
        raise typer.Exit
