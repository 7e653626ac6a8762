"""What commands that train share: the progress bar, settings from files and options, `--export`."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nextn.bounded_json import JsonDict, read_json
from nextn.cli.progress import minutes, status_lines
from nextn.cli.screen import console, echo
from nextn.errors import ConfigError
from nextn.text_format import rate_text

if TYPE_CHECKING:
    from nextn.train.evaluation import HeldOutAcceptance
    from nextn.train.head_run import HeadRun
    from nextn.train.metrics import EvalRecord, Evaluation, HeadRecord, Record, StepRecord
    from nextn.train.run_options import RunOptions
FOLDER = "export"
_FIRST_STEP = "preparing the first step"


def merge_settings(config: Path | None, pairs: list[str]) -> dict[str, object]:
    """Return the settings of a JSON file, updated with KEY=VALUE pairs.

    Values are JSON, else text. A dotted key such as refine.steps is a setting in a group. Raises ConfigError.
    """
    try:
        values = read_json(config) if config is not None else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: not a readable JSON file: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{config}: a JSON {type(values).__name__}; expected an object of settings")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}; expected KEY=VALUE, such as steps=1000")
        *groups, key = key.split(".")
        into: JsonDict = values
        for group in groups:
            into = into.setdefault(group, {})
            if not isinstance(into, dict):
                raise ConfigError(f"--set {pair!r}: {group} is {into!r}, not a group of settings")
        try:
            into[key] = json.loads(value)
        except (ValueError, RecursionError):
            into[key] = value
    return values


@contextmanager
def progress(
    *, quiet: bool, every_s: float = 10.0, held_out: str = "held-out"
) -> Iterator[Callable[["Record | Evaluation"], None]]:
    """Yield a function that shows a record: a progress bar with the loss per depth, and a line per evaluation.

    Where standard error is no terminal, a line every `every_s` seconds replaces the bar, also during long steps.
    `held_out` names the text of evaluations.
    """
    if quiet:
        yield lambda record: None
        return
    with _bar(held_out) if console(stderr=True).is_terminal else _lines(every_s, held_out) as show:
        yield show


@contextmanager
def _bar(held_out: str) -> Iterator[Callable[["Record | Evaluation"], None]]:
    from rich.progress import BarColumn, Progress, TextColumn

    from nextn.train.metrics import Evaluation, StepRecord

    columns = (TextColumn("train"), BarColumn(bar_width=20), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("train", total=None, status=_FIRST_STEP)

        def show(record: "Record | Evaluation") -> None:
            if isinstance(record, StepRecord):
                bar.update(task, completed=record.share, total=1.0, status=_status(record))
            elif isinstance(record, Evaluation):
                bar.update(task, status=_evaluating(record))
            else:
                bar.console.print(f"step {record.step}: {held_out} {_held_out(record)}", highlight=False)

        yield show


@contextmanager
def _lines(every_s: float, held_out: str) -> Iterator[Callable[["Record | Evaluation"], None]]:
    from nextn.train.metrics import Evaluation, StepRecord

    status = stepped = _FIRST_STEP
    started = time.monotonic()

    def clock() -> str:
        return f"train  {minutes(time.monotonic() - started)}  "

    def show(record: "Record | Evaluation") -> None:
        nonlocal status, stepped
        if isinstance(record, StepRecord):
            status = stepped = _status(record)
        elif isinstance(record, Evaluation):
            status = _evaluating(record)
        else:
            status = stepped
            echo(f"step {record.step}: {held_out} {_held_out(record)}", err=True)

    try:
        with status_lines(lambda: status, every_s, clock=clock):
            yield show
    finally:
        echo(f"{clock()}{status}", err=True)


def say_stopped(run: Path, command: str, *, quiet: bool = False) -> None:
    if not quiet:
        echo(f"stopped; the state is in {run}. Resume with: {command}", err=True)
    raise typer.Exit(130)


def show_curve(points: Sequence["HeldOutAcceptance"]) -> None:
    """Print mean acceptance lengths for K = 1, 2, ..., and the difference that each further draft makes."""
    from rich.table import Table

    table = Table(
        "K", "greedy AL", "difference", f"AL at T = {points[0].temperature:g}", "difference", box=None, pad_edge=False
    )
    before = (1.0, 1.0)
    for k, point in enumerate(points, start=1):
        after = (point.greedy.length, point.sampled.length)
        cells = [text for new, old in zip(after, before, strict=True) for text in (f"{new:.3f}", f"{new - old:+.3f}")]
        table.add_row(str(k), *cells)
        before = after
    console(stderr=True).print(table)


def _status(record: "StepRecord") -> str:
    from nextn.train.metrics import bits

    progress = f"step {record.step}/{record.num_steps}  {record.share:.0%}"
    if record.step > 1:  # the first one compiles
        progress += f"  {minutes(record.remaining_s)} left"
    speed = f"{record.tokens_per_s:,.0f} tok/s"
    if not any(record.loss):
        return f"{progress}  no token with a label  {speed}"
    if not record.match:
        return f"{progress}  bits {' '.join(f'{bits(loss):.2f}' for loss in record.loss)}  {speed}"
    return f"{progress}  loss {_listed(record.loss)}  1-TV {_listed(record.overlap)}  {speed}"


def _evaluating(progress: "Evaluation") -> str:
    return f"step {progress.step}  evaluation on held-out text, batch {progress.batch}/{progress.num_batches}"


def _held_out(record: "EvalRecord | HeadRecord") -> str:
    from nextn.train.metrics import EvalRecord, bits

    if isinstance(record, EvalRecord):
        forced = record.forced
        losses = " ".join(f"{bits(loss):.3f}" for loss in forced.loss)
        match, overlap = _listed(forced.match), _listed(forced.overlap)
        lengths = forced.greedy_length, forced.sampled_length
        return f"bits {losses}  match {match} (AL {lengths[0]:.2f})  1-TV {overlap} (AL {lengths[1]:.2f})"
    heldout = record.heldout
    greedy, sampled = (f"{_listed(each.rates)} (AL {each.length:.3f})" for each in (heldout.greedy, heldout.sampled))
    return f"greedy {greedy}  T = {heldout.temperature:g} {sampled}  +-{2 * heldout.noise():.3f}"


def _listed(rates: tuple[float, ...]) -> str:
    return " ".join(map(rate_text, rates))


def check_options(options: "RunOptions") -> None:
    """Raise ConfigError for options that leave nothing to export, or the trunk's revision unknown."""
    from nextn.edit.export import ENGINES

    if options.export not in ENGINES:
        raise ConfigError(f"--export {options.export}; expected {', '.join(ENGINES)}")
    trunk = options.trunk or ""
    if not Path(trunk).exists() and ("@" in trunk or options.stream):
        given = "--stream" if options.stream else f"--from {trunk}"
        raise ConfigError(f"--export with {given}: download {options.trunk}, and give its folder with --from")


def with_layout(options: "RunOptions") -> "RunOptions":
    """Return the options with the layout that a new head needs for its engine, where none was given."""
    if options.export is None or not options.init_head or options.layout is not None or options.trunk is None:
        return options
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.edit.export import layout_for

    trunk = Checkpoint.open(options.trunk)
    return replace(options, layout=layout_for(options.export, trunk.config))


def check_run(run: "HeadRun", out: Path, engine: str) -> None:
    """Raise the error that the export of a run's head would end with, and for a folder that is there already."""
    from nextn.edit.export import check_export

    head = run.task.head
    check_export(engine, head.family, run.task.origin, num_modules=len(head.stack))
    if (out / FOLDER).exists():
        raise ConfigError(f"{out / FOLDER} exists; remove it, or start the run in another folder")


def export_head(out: Path, head: Path, options: "RunOptions") -> tuple[dict[str, object], str]:
    """Export a run's head; return what to record and what to print."""
    from nextn.edit.export import as_text, export

    assert options.export is not None  # the caller made sure
    target = out / FOLDER
    if options.export == "llama.cpp":
        target.mkdir(exist_ok=True)
        target = target / "model.gguf"
    made = export(head, target, options.export, trunk=options.trunk)
    return asdict(made) | {"path": str(made.path)}, f"wrote {made.path}\n{as_text(made)}"
