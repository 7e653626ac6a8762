"""Measuring on texts that exist already, with a trunk that is loaded or streamed: options, progress, interruption."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import ModelOptions
from nextn.cli.screen import console, print_note
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.evaluate.given_texts import GivenTexts
    from nextn.evaluate.reference_plan import ReferencePlan
    from nextn.evaluate.reference_report import ReferenceReport
    from nextn.model.layer_states import LayerProgress
    from nextn.model.model import Model
    from nextn.model.streamed_trunk import StreamedTrunk
    from nextn.model.trunk import TrunkOutput

_PANEL = "Models that do not fit into memory"
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Read the trunk layer by layer, each once for all texts. Default: if it does not fit into memory.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Texts = Annotated[
    str | None,
    typer.Option(
        help="Measure on these texts: a file of `nextn answer`, or other records or text. Needed with --stream, which "
        "cannot generate.",
        rich_help_panel=_PANEL,
    ),
]
States = Annotated[
    Path | None,
    typer.Option(
        help="Folder for hidden states after each layer, from which the same command resumes; kept at the end. "
        "Default: the user's cache, removed at the end.",
        rich_help_panel=_PANEL,
    ),
]


def reason_to_stream(options: ModelOptions, stream: bool | None) -> str | None:
    """Return why the trunk is streamed; None if it is to be loaded."""
    if stream is not None:
        return "--stream" if stream else None
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.devices import resolve_device
    from nextn.evaluate import stream_plan

    checkpoint = Checkpoint.open(options.source, **options.hub)
    return stream_plan.reason_to_stream(checkpoint, options.torch_dtype, resolve_device(options.device))


def need_texts(reason: str) -> ConfigError:
    """Return the error for a trunk that is streamed without texts."""
    return ConfigError(
        f"a streamed trunk ({reason}) cannot generate the texts to measure on: give a file with --texts, for example "
        "of `nextn answer`; --no-stream loads the model in any case"
    )


def measure_texts(
    options: ModelOptions, source: str, plan: "ReferencePlan", *, reason: str | None, states: Path | None, quiet: bool
) -> "tuple[Model, ReferenceReport]":
    """Load the model, and measure its head on the texts of `source`; reason: why it is streamed, None if it is not.

    A plan with several temperatures leaves the texts' own to the file.
    """
    from nextn.evaluate.given_texts import read_texts
    from nextn.evaluate.reference import acceptance_on_texts

    loaded = options.load(need_head=True, stream=reason is not None)
    temperature = plan.temperatures[0] if len(plan.temperatures) == 1 else None
    given = [read_texts(source, loaded.trunk, loaded.tokenizer, temperature=temperature, max_tokens=plan.max_tokens)]
    outputs, record = _run_trunk(loaded, given, reason=reason, states=states, quiet=quiet)
    report = acceptance_on_texts(loaded, given, outputs, plan)
    return loaded, replace(report, stream=record)


def _run_trunk(
    model: "Model",
    given: "Sequence[GivenTexts]",
    *,
    reason: str | None,
    states: Path | None,
    quiet: bool,
) -> "tuple[list[list[TrunkOutput]], dict[str, object] | None]":
    """The states of all texts, in one pass of the trunk, and what streaming took."""
    from nextn.checkpoint.mapped_memory import return_freed_memory
    from nextn.evaluate.given_texts import run_name, whole_text_outputs
    from nextn.evaluate.stream_plan import StreamEstimate, stream_record
    from nextn.model.layer_states import remove_states
    from nextn.model.streamed_trunk import StreamedTrunk

    texts, record = [text for each in given for text in each.texts], None
    if isinstance(model.trunk, StreamedTrunk):
        estimate = StreamEstimate.of(model.trunk, sum(each.num_tokens for each in given))
        print_note(f"the trunk is streamed ({reason}): {estimate}")
        return_freed_memory()  # of checking the head
        layers: list[LayerProgress] = []
        folder = (states or _cache_folder()) / run_name(model.trunk, texts)
        with _layer_bar(model.trunk, layers, quiet=quiet) as show, _resumable(folder):
            outputs = whole_text_outputs(model.trunk, texts, folder=folder, on_layer=show)
        if states is None:
            remove_states(folder)
        record = stream_record(layers, estimate)
    else:
        outputs = whole_text_outputs(model.trunk, texts)
    parts = iter(outputs)
    return [[next(parts) for _ in each.texts] for each in given], record


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nextn" / "states"


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print_note(f"the hidden states after the last complete layer are in {folder}; the same command resumes")
        raise


@contextmanager
def _layer_bar(
    trunk: "StreamedTrunk", layers: "list[LayerProgress]", *, quiet: bool
) -> "Iterator[Callable[[LayerProgress], None]]":
    """Show layers, bytes and the time left; append each layer's progress to `layers`."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("layer {task.fields[layer]}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    screen, count = console(stderr=True), len(trunk.decoder.layers)
    # A layer may take minutes: the speed is that of the last hour.
    with Progress(*columns, console=screen, disable=quiet, transient=True, speed_estimate_period=3600) as bar:
        total = trunk.num_bytes
        task = bar.add_task("", total=total, layer=f"0/{count}")

        def show(progress: "LayerProgress") -> None:
            nonlocal total
            layers.append(progress)
            total -= progress.num_bytes if progress.resumed else 0  # or its speed would count
            advance = 0 if progress.resumed else progress.num_bytes
            bar.update(task, total=total, advance=advance, layer=f"{progress.index + 1}/{count}")

        yield show
