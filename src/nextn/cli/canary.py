"""`nextn canary build|check`: the conformance kit; exit 0 nothing broken, 1 a clause is, 2 usage."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, Device
from nextn.cli.screen import console, plain, print_json, print_table, progress_bars, shown
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.canary.check import Report
    from nextn.canary.contract import Outcome
    from nextn.canary.drive import Drawn, Seen
    from nextn.canary.kit import Canary

app = typer.Typer(no_args_is_help=True, help="A tiny trained checkpoint with what an engine must count on it.")

_STYLES = {"held": "bold green", "broken": "bold red", "untold": "yellow"}
_WORDS = {"held": "held", "broken": "broken", "untold": "could not tell"}


@app.command()
def build(
    out: Annotated[Path, typer.Argument(help="Folder for the checkpoint and its canary.json; an old one is replaced.")],
    family: Annotated[str, typer.Option(help="Family of the checkpoint, such as glm4_moe.")],
    seed: int = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, as the weights are stored.")] = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a tiny checkpoint in a family's layout, and write down what an engine must do with it (a few minutes)."""
    from nextn.canary.build import build as built
    from nextn.canary.kit import Canary
    from nextn.canary.shapes import shape_of

    with progress_bars(quiet=as_json) as progress:
        step = progress("steps", sum(shape_of(family).steps))
        record = built(out, family, seed=seed, dtype=dtype, device=device, on_record=lambda _: step())
    if as_json:
        print_json(record)
        return
    _tell(Canary.read(out), out)
    if record["looping"]:
        said = f"{record['looping']} of its texts loop, which hides faults: try another --seed"
        console().print(plain(said, style="yellow"), soft_wrap=True)


@app.command()
def check(
    canary: Annotated[Path, typer.Argument(help="Folder that `canary build` made.")],
    engine: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint that serves it, with MTP on.")] = None,
    answers: Annotated[Path | None, typer.Option(help="In place of an endpoint: a JSON line per prompt.")] = None,
    counters: Annotated[
        Path | None, typer.Option(help="What was counted over --answers: metrics, log or JSON.")
    ] = None,
    drafts: Annotated[int | None, typer.Option("--drafts", "-k", help="K; left out: as counted.")] = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Ask above temperature 0, too, to tell C13, the rule of acceptance.")
    ] = False,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the prompts for --sampled, seeds differ.")] = 8,
    model: Annotated[str | None, typer.Option(help="Model name, where the endpoint serves several.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 120,
    max_seconds: Annotated[float, typer.Option(help="Seconds in all.")] = 900,
    key_env: Annotated[str | None, typer.Option(help="Variable that holds the key, if not OPENAI_API_KEY.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold an engine to the contract: its texts and counts on the canary's prompts, clause by clause; greedy ones, and
    with --sampled others."""
    from nextn.canary.check import check as checked
    from nextn.canary.drive import from_files
    from nextn.canary.kit import Canary
    from nextn.checkpoints.tensor_file import write_json

    known = Canary.read(canary)
    if (engine is None) == (answers is None):
        raise ConfigError("give --engine URL, or --answers FILE with --counters FILE")
    if engine is not None and counters is not None:
        raise ConfigError(
            "--counters belongs to --answers: an endpoint's counters are read before and after each prompt"
        )
    if engine is None and sampled:
        raise ConfigError("--sampled belongs to --engine: texts above temperature 0 are asked for")
    drawn = None
    if answers is not None:
        seen = from_files(known, answers, counters)
    else:
        assert engine is not None
        turns = passes if sampled else 0
        seen, drawn = _driven(
            known, engine, model, key_env, passes=turns, timeout=timeout, max_seconds=max_seconds, quiet=as_json
        )
    report = checked(known, seen, drafts=drafts, drawn=drawn)
    if out is not None:
        write_json(out, report.as_record())
    if as_json:
        print_json(report.as_record())
    else:
        _show(report)
    raise typer.Exit(1 if report.failed else 0)


def _driven(
    canary: "Canary",
    url: str,
    model: str | None,
    key_env: str | None,
    *,
    passes: int,
    timeout: float,
    max_seconds: float,
    quiet: bool,
) -> "tuple[Seen, Drawn | None]":
    """passes: over the prompts above temperature 0, 0 for none."""
    from nextn.canary.drive import drawn, driven
    from nextn.engines.client import Budget, Limits
    from nextn.engines.endpoint import Endpoint

    count = len(canary.prompts)
    budget = Budget(Limits(requests=(100 + 10 * passes) * count, seconds=max_seconds, answer_s=timeout))
    endpoint = Endpoint.open(url, budget, model=model, key_env=key_env)
    with progress_bars(quiet=quiet) as progress:
        step = progress("prompts", count * (1 + passes))
        seen = driven(endpoint, canary, on_prompt=step)
        return seen, drawn(endpoint, canary, passes, on_prompt=step) if passes else None


def _tell(canary: "Canary", out: Path) -> None:
    """Acceptance lengths of the right reading, and of every fault at the largest K."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", *(f"AL@{drafts}" for drafts in canary.drafts)):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for reading in canary.readings:
        table.add_row(plain(reading.name), *(f"{canary.length(reading, drafts):.2f}" for drafts in canary.drafts))
    print_table(table)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    console().print(plain(f"{canary.family} in {out}: {len(canary.prompts)} prompts, {size:.1f} MB"), soft_wrap=True)


def _show(report: "Report") -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in report.outcomes:
        said = plain(_WORDS[each.said], style=_STYLES[each.said])
        table.add_row(said, plain(each.clause.id), plain(each.clause.name), plain(_said(each), lines=True))
    screen = console()
    screen.print(table)
    style = _STYLES["broken" if report.failed else "held"]
    text = plain("findings" if report.failed else "no findings", style=style)
    screen.print(text.append(f"  {report.canary.family}, K = {report.drafts}: {shown(report.words)}", style="default"))


def _said(outcome: "Outcome") -> str:
    lines = [outcome.evidence]
    if outcome.expected:
        lines += [f"expected  {outcome.expected}", f"seen      {outcome.seen}"]
    if outcome.issues:
        lines.append(f"met in    {', '.join(outcome.issues)}")
    if outcome.said == "broken":
        lines.append(f"contract  {outcome.clause.must}")
    return "\n".join(map(shown, lines))
