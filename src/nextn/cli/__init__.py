"""The command line: a lazy table of verbs over library functions, and the only folder that prints.

Heavy imports stay inside the verbs, so `nextn --help` answers at once. Exit codes: 0 done, 1 findings, 2 usage, 130
Ctrl-C.
"""

import os
import sys
from typing import Annotated

import typer

from nextn import __version__
from nextn.cli import bench, canary, measure, move
from nextn.cli.answer import answer
from nextn.cli.audit import audit
from nextn.cli.demo import demo
from nextn.cli.diagnose import diagnose
from nextn.cli.generate import generate
from nextn.cli.trace import trace
from nextn.cli.train import train
from nextn.cli.verify import verify
from nextn.errors import NextnError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Multi-Token Prediction: train heads, decode with them losslessly, see what they do.",
)
for verb in (audit, verify, diagnose, demo, train, generate, trace, answer, *move.VERBS, *bench.VERBS, *measure.VERBS):
    app.command()(verb)
app.add_typer(canary.app, name="canary")


def main() -> None:
    """Entry point of `nextn`: errors of the user's become one line and an exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except NextnError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"nextn {__version__}")
        raise typer.Exit
