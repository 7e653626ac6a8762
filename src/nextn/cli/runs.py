"""What verbs that train share: the progress bar, settings from files and options."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nextn.cli.screen import console, echo
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.training.metrics import EvalRecord, HeadRecord, Record, StepRecord
    from nextn.training.telemetry import Foreseen


def merged(config: Path | None, pairs: list[str]) -> dict[str, object]:
    """Settings of a JSON file, then KEY=VALUE pairs over them; values are JSON, else text. A key of two words, such as
    refine.steps, is that setting in a group of settings."""
    values: dict[str, object] = {}
    if config is not None:
        try:
            values = json.loads(config.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{config}: not a readable JSON file: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{config}: a JSON {type(values).__name__}; expected an object of settings")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}; expected KEY=VALUE, such as steps=1000")
        *groups, key = key.split(".")
        into: Any = values
        for group in groups:
            into = into.setdefault(group, {})
            if not isinstance(into, dict):
                raise ConfigError(f"--set {pair!r}: {group} is {into!r}, no group of settings")
        try:
            into[key] = json.loads(value)
        except ValueError:
            into[key] = value
    return values


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[["Record"], None]]:
    """A progress bar with the loss per depth; evaluations are printed above it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from nextn.training.metrics import StepRecord

    columns = (
        TextColumn("train"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Progress(*columns, console=console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("train", total=None, told="compiling")

        def show(record: "Record") -> None:
            if isinstance(record, StepRecord):
                bar.update(task, completed=record.step, total=record.num_steps, told=_told(record))
            elif not quiet:
                bar.console.print(f"step {record.step}: held-out {_held_out(record)}", highlight=False)

        yield show


def say_stopped(run: Path, command: str, *, quiet: bool = False) -> None:
    if not quiet:
        echo(f"stopped; the state is in {run}. Go on with: {command}", err=True)
    raise typer.Exit(130)


def show_curve(points: Sequence["Foreseen"]) -> None:
    """A table of acceptance lengths: of 1, 2, ... drafts a round, and what each draft more brings."""
    from rich.table import Table

    table = Table(
        "drafts", "greedy AL", "more", f"AL at T = {points[0].temperature:g}", "more", box=None, pad_edge=False
    )
    before = (1.0, 1.0)
    for count, point in enumerate(points, start=1):
        now = (point.greedy.length, point.sampled.length)
        cells = [text for new, old in zip(now, before, strict=True) for text in (f"{new:.3f}", f"{new - old:+.3f}")]
        table.add_row(str(count), *cells)
        before = now
    console(stderr=True).print(table)


def _told(record: "StepRecord") -> str:
    from nextn.training.metrics import bits

    if not record.match:
        return f"bits {' '.join(f'{bits(loss):.2f}' for loss in record.loss)}  {record.tokens_per_s:,.0f} tok/s"
    losses, overlap = (_listed(each) for each in (record.loss, record.overlap))
    return f"loss {losses}  1-TV {overlap}  {record.tokens_per_s:,.0f} tok/s"


def _held_out(record: "EvalRecord | HeadRecord") -> str:
    from nextn.training.metrics import EvalRecord, bits

    if isinstance(record, EvalRecord):
        forced = record.forced
        losses = " ".join(f"{bits(loss):.3f}" for loss in forced.loss)
        match, overlap = _listed(forced.match), _listed(forced.overlap)
        lengths = forced.greedy_length, forced.sampled_length
        return f"bits {losses}  match {match} (AL {lengths[0]:.2f})  1-TV {overlap} (AL {lengths[1]:.2f})"
    told = record.foreseen
    greedy, sampled = (f"{_listed(each.rates)} (AL {each.length:.3f})" for each in (told.greedy, told.sampled))
    return f"greedy {greedy}  T = {told.temperature:g} {sampled}  +-{2 * told.noise():.3f}"


def _listed(rates: tuple[float, ...]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
