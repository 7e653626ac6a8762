"""Commands that bring a head to others: `nextn export` writes it for an engine, `nextn push` to a hub."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from nextn.cli.common import HEAD_SOURCES, K_NAMES, AsJson, open_checkpoint, shipped_option, shipped_path
from nextn.cli.screen import echo, print_json, print_result
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.edit.export import Export


def export(
    *,
    head: Annotated[
        str,
        Argument(
            help=f"The head alone, of `nextn train`, or a model with it: {HEAD_SOURCES}",
            callback=shipped_path,
        ),
    ],
    out: Annotated[Path, Argument(help="New folder for the result; for llama.cpp a new .gguf file.")],
    engine: Annotated[str, Option("--for", help="vllm, sglang, transformers, or llama.cpp.")],
    model: Annotated[
        str | None,
        Option(
            help="Trunk: folder, hub id or smollm2. Default: the one that the head was trained on.",
            callback=shipped_option,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, Option(help="For llama.cpp: a GGUF with the trunk's tokenizer, if nextn cannot write it.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, Option(*K_NAMES, min=1, help="Draft tokens per round of the command. Default: 3.")
    ] = None,
    as_adopted: Annotated[
        bool, Option("--adopt", help="Write trunk and head in GLM-4.5's layout, as `nextn adopt` does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a head that was added to a model for an engine, and print the command that serves it with the trunk."""
    from nextn.edit.export import as_text
    from nextn.edit.export import export as export_head

    write = partial(export_head, tokenizer=tokenizer, num_speculative_tokens=num_speculative_tokens)
    if as_adopted and engine != "llama.cpp":
        if tokenizer is not None:
            raise ConfigError("--adopt writes a folder with the trunk's own tokenizer: leave out --tokenizer")
        _export_adopted(head, out, engine, model, num_speculative_tokens, as_json=as_json)
        return
    made = _adopted_gguf(head, out, model, write) if as_adopted else write(head, out, engine, trunk=model)
    print_result(asdict(made) | {"path": str(made.path)}, as_text(made), as_json=as_json)


def _export_adopted(head: str, out: Path, engine: str, model: str | None, k: int | None, *, as_json: bool) -> None:
    """Write the model with the head in the layout of a family that the engine runs, and print the commands."""
    from nextn.serve.engine_commands import ENGINES, as_script, engine_commands

    if engine not in ENGINES:
        raise ConfigError(f"--for {engine} --adopt; expected one of {', '.join(ENGINES)}")
    folder = _adopted(head, out, model)
    made = engine_commands(open_checkpoint(folder), engine, num_speculative_tokens=k)
    record = {"path": str(folder), "engine": engine, "commands": made.commands, "notes": made.notes}
    print_result(record, as_script(made), as_json=as_json)


def _adopted_gguf(head: str, out: Path, model: str | None, write: "Callable[..., Export]") -> "Export":
    """Write the same into one file, by way of a folder beside it."""
    from nextn.edit.gguf_export import refuse_file

    refuse_file(out)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as folder:
        return write(_adopted(head, Path(folder) / out.stem, model), out, "llama.cpp")


def _adopted(head: str, out: Path, model: str | None) -> Path:
    from nextn.edit.adopt import adopt as adopt_model
    from nextn.edit.export import trunk_path

    opened = open_checkpoint(head)
    trunk = trunk_path(opened, model)
    alone = head if str(trunk) != opened.path else None
    source = open_checkpoint(trunk) if alone else opened
    return adopt_model(source, out, head=alone).folder


def push(
    folder: Annotated[Path, Argument(help="Folder of a checkpoint with a head, or of a head alone.")],
    repo: Annotated[str, Argument(help="Hub id of the repository, org/name. It is created if it is new.")],
    measured: Annotated[
        Path | None, Option(help="JSON of `nextn measure --out`. Default: the one in the folder.")
    ] = None,
    base_model: Annotated[
        str | None, Option(help="Hub id of the trunk. Default: that of the folder's README.md or nextn.json.")
    ] = None,
    license: Annotated[
        str | None, Option(help="License of the base model, as the hub names it. Default: of README.md.")
    ] = None,
    private: Annotated[bool, Option("--private", help="Create the repository as a private one.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the card and the files; upload nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a checkpoint to a hub, with a model card: measured acceptance, its conditions, license, serve commands."""
    from nextn.serve.publish import prepare, upload

    made = prepare(folder, repo, measured=measured, base_model=base_model, license=license)
    address = None if dry_run else upload(made, private=private)
    if as_json:
        print_json({"repo": repo, "card": made.card, "files": dict(made.files), "dry_run": dry_run, "commit": address})
    elif dry_run:
        echo("\n".join([made.card, *(f"{size:>16,}  {name}" for name, size in made.files.items())]))
    else:
        echo(f"uploaded {sum(made.files.values()):,} bytes and README.md: {address}")
