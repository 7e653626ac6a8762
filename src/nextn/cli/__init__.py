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
from typing import Annotated, NamedTuple

import typer
from typer import Option

from nextn import __version__
from nextn.cli.screen import echo, flush_streams, guard_streams, print_error, visible
from nextn.errors import NextnError
from nextn.text_format import docs_page


class Command(NamedTuple):
    """A command. `summary` has at most 64 characters, so that `nextn --help` has a line for each."""

    module: str  # in this folder
    page: str  # of the documentation
    summary: str
    calls: tuple[str, str]


GROUPS = {"canary": "Check an engine's counters with a tiny trained checkpoint"}
# Panel of the help -> command, also of a group.
COMMANDS: dict[str, dict[str, Command]] = {
    "Check": {
        "audit": Command("audit", "reference/checkpoints", "Check a checkpoint's MTP head, without downloading weights",
                         ("MODEL", "TRUNK --head HEAD")),
        "measure": Command("measure", "reference/measure", "Measure the acceptance that the head should reach",
                           ("MODEL --prompts FILE", "TUNED --against BASE --prompts FILE")),
        "accuracy": Command("accuracy", "reference/bench", "Compare a model's distributions with those in float32",
                            ("MODEL", "MODEL --weights int8")),
        "env": Command("lookup", "tutorials/first-hour", "Report versions, processor, memory, GPUs and the backend",
                       ("", "--json")),
        "families": Command("lookup", "reference/families/index", "List the published models whose heads are known",
                            ("", "NAME")),
    },
    "Fix": {
        "restore": Command("edit", "reference/checkpoints", "Restore a lost head, byte for byte",
                           ("TUNED --from BASE", "TUNED --from BASE --dry-run")),
        "convert": Command("edit", "reference/checkpoints", "Convert a head between layouts and files, or a GGUF file",
                           ("MODEL OUT --form single-file", "MODEL --reindex")),
        "extract": Command("edit", "reference/checkpoints", "Write the head alone to one file",
                           ("MODEL head.safetensors", "MODEL head.safetensors --json")),
        "quantize": Command("edit", "how-to/quantize", "Write a model with decoder layers of 4 or 8 bits",
                            ("MODEL OUT --weights int8", "MODEL OUT --weights q4_1 --calibrate")),
    },
    "Train": {
        "train": Command("train", "reference/training", "Train a head for a model, or trunk and head from scratch",
                         ("RUN --from MODEL --freeze-trunk --init-head --data FILE", "RUN --resume")),
        "answer": Command("answer", "reference/training-data", "Generate training data with the trunk or an engine",
                          ("MODEL OUT.jsonl --prompts FILE", "MODEL OUT.jsonl --prompts FILE --engine HOST:PORT")),
    },
    "Decode": {
        "generate": Command("decode", "reference/settings", "Decode one prompt with MTP", 
                            ("MODEL PROMPT", "MODEL PROMPT -k 3 --adaptive")),
        "chat": Command("chat", "tutorials/chat-in-the-browser", "Chat with a model in the terminal",
                        ("MODEL", "MODEL --head HEAD")),
        "serve": Command("serve", "reference/server", "Serve a model: OpenAI's and Anthropic's API, and a page",
                         ("MODEL", "MODEL --print vllm")),
        "bench": Command("bench", "reference/bench", "Measure plain and MTP decoding over K: speed, AL, costs, memory",
                         ("MODEL --prompts FILE", "MODEL --prompts FILE -k 0,2,4")),
        "advise": Command("bench", "reference/bench", "Say whether MTP pays off on this machine, and the best K",
                          ("MODEL --prompts FILE", "--engine HOST:PORT --against HOST:PORT")),
    },
    "Engines": {
        "adopt": Command("edit", "how-to/any-model", "Write a Llama, Mistral or Qwen with a head in GLM's layout",
                         ("MODEL OUT", "MODEL OUT --head HEAD")),
        "export": Command("export", "how-to/any-model", "Write a head that was added to a model for an engine",
                          ("HEAD OUT --model MODEL --for vllm --adopt", "HEAD OUT.gguf --model MODEL --for llama.cpp")),
        "push": Command("export", "how-to/publish", "Upload a checkpoint to a hub, with a model card",
                        ("FOLDER ORG/NAME --dry-run", "FOLDER ORG/NAME --measured measure.json")),
        "verify": Command("engines", "reference/verify", "Check that a server's output is the same with MTP on and off",
                          ("HOST:PORT --against HOST:PORT", "HOST:PORT --check greedy --against HOST:PORT")),
        "diagnose": Command("diagnose", "reference/diagnose", "Name the causes of an engine's low acceptance",
                            ("MODEL --engine HOST:PORT --drive", "--engine engine.log")),
        "canary build": Command("engines", "reference/contract", "Train a tiny checkpoint for an engine's tests",
                                ("OUT --family glm4_moe", "OUT --family qwen3_5")),
        "canary check": Command("engines", "reference/contract", "Check an engine against the contract",
                                ("FOLDER --engine HOST:PORT", "FOLDER --answers FILE --counters FILE")),
    },
    "Learn": {
        "demo": Command("learn", "tutorials/first-hour", "Decode a published model with MTP, and train a head for it",
                        ("", "--minutes 0")),
        "trace": Command("decode", "explanation/alignment", "Show which token and state are at which position",
                         ("MODEL PROMPT", "MODEL PROMPT -k 3")),
        "docs": Command("lookup", "index", "Show a page of the documentation, or list all", ("", "low-acceptance")),
    },
}  # fmt: skip


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
