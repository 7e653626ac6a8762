"""What commands that train share: the progress bar, settings from files and options."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nextn.cli.screen import console, echo
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.train.heldout_acceptance import HeldOutAcceptance
    from nextn.train.metrics import EvalRecord, HeadRecord, Record, StepRecord


def merge_settings(config: Path | None, pairs: list[str]) -> dict[str, object]:
    """Return the settings of a JSON file, updated with KEY=VALUE pairs.

    Values are JSON, else text. A dotted key such as refine.steps is a setting in a group. Raises ConfigError.
    """
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
                raise ConfigError(f"--set {pair!r}: {group} is {into!r}, not a group of settings")
        try:
            into[key] = json.loads(value)
        except ValueError:
            into[key] = value
    return values


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[["Record"], None]]:
    """Show a progress bar with the loss per depth; evaluations are printed above it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from nextn.train.metrics import StepRecord

    columns = (
        TextColumn("train"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("train", total=None, status="compiling")

        def show(record: "Record") -> None:
            if isinstance(record, StepRecord):
                bar.update(task, completed=record.step, total=record.num_steps, status=_status(record))
            elif not quiet:
                bar.console.print(f"step {record.step}: held-out {_held_out(record)}", highlight=False)

        yield show


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
    for drafts, point in enumerate(points, start=1):
        after = (point.greedy.length, point.sampled.length)
        cells = [text for new, old in zip(after, before, strict=True) for text in (f"{new:.3f}", f"{new - old:+.3f}")]
        table.add_row(str(drafts), *cells)
        before = after
    console(stderr=True).print(table)


def _status(record: "StepRecord") -> str:
    from nextn.train.metrics import bits

    if not record.match:
        return f"bits {' '.join(f'{bits(loss):.2f}' for loss in record.loss)}  {record.tokens_per_s:,.0f} tok/s"
    return f"loss {_listed(record.loss)}  1-TV {_listed(record.overlap)}  {record.tokens_per_s:,.0f} tok/s"


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
    return " ".join(f"{rate:.2f}" for rate in rates)
