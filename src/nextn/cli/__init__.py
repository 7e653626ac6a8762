"""The command line: a table of commands over library functions, and the only folder that prints.

Heavy imports are inside the commands, so `nextn --help` answers at once. Exit codes: 0 done, 1 findings, 2 usage error,
130 Ctrl-C, 141 when the reader of a pipe has closed it.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from nextn import __version__
from nextn.cli.answer import answer
from nextn.cli.audit import audit
from nextn.cli.bench import advise, bench
from nextn.cli.chat import chat
from nextn.cli.common import Command
from nextn.cli.decode import generate, trace
from nextn.cli.diagnose import diagnose
from nextn.cli.edit import adopt, convert, export, extract, push, quantize, restore
from nextn.cli.engines import canary_app, verify
from nextn.cli.learn import demo, env
from nextn.cli.measure import measure
from nextn.cli.screen import echo, flush_streams, guard_streams, print_error, visible
from nextn.cli.serve import serve
from nextn.cli.train import train
from nextn.errors import NextnError
from nextn.text_format import docs_page

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Multi-Token Prediction: train heads, decode with them losslessly, and find out why drafts are rejected.",
    epilog=f"Documentation: {docs_page('index')}",
)
# Command -> its page of the documentation, by panel of the help.
_PANELS: dict[str, dict[Callable[..., None], str]] = {
    "Check": {audit: "reference/checkpoints", measure: "reference/measure", env: "tutorials/first-hour"},
    "Fix": {
        restore: "reference/checkpoints",
        convert: "reference/checkpoints",
        extract: "reference/checkpoints",
        quantize: "how-to/quantized",
    },
    "Train": {train: "reference/training", answer: "reference/training"},
    "Decode": {
        generate: "reference/settings",
        chat: "tutorials/chat-in-the-browser",
        serve: "reference/server",
        bench: "reference/bench",
        advise: "reference/bench",
    },
    "Engines": {
        adopt: "how-to/any-model",
        export: "how-to/any-model",
        push: "how-to/publish",
        verify: "reference/verify",
        diagnose: "reference/diagnose",
    },
    "Learn": {demo: "tutorials/first-hour", trace: "explanation/alignment"},
}
for panel, commands in _PANELS.items():
    for command, page in commands.items():
        app.command(cls=Command, rich_help_panel=panel, epilog=f"Documentation: {docs_page(page)}")(command)
app.add_typer(canary_app, name="canary", rich_help_panel="Engines")


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


def _run() -> None:
    try:
        app(prog_name="nextn")  # for `python -m nextn`, too: completion scripts are named after it
    finally:
        flush_streams()


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        echo(f"nextn {__version__}")
        raise typer.Exit
