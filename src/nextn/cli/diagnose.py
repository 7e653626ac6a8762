"""`nextn diagnose`: why an engine keeps fewer drafts than it should; exit 0 fine, 1 findings, 2 nothing to compare."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import (
    AsJson,
    Device,
    Dtype,
    MaxTokens,
    ModelName,
    PathName,
    Prompts,
    Temperatures,
    check_model,
    load_model,
    numbers,
)  # fmt: skip
from nextn.cli.screen import console, plain, print_json, print_table, progress_bars, shown
from nextn.errors import ConfigError
from nextn.measuring.plan import Plan

if TYPE_CHECKING:
    from nextn.measuring.causes import Cause
    from nextn.measuring.diagnose import Diagnosis

_SHOWN = 6  # causes in the table, and all that are named


def diagnose(
    model: ModelName,
    engine: Annotated[str, typer.Option(help="Address of a running engine, or a file: its metrics, log or JSON.")],
    drive: Annotated[bool, typer.Option("--drive", help="Ask the engine the reference's own prompts.")] = False,
    prompts: Prompts = None,
    drafts: Annotated[int | None, typer.Option("--drafts", "-k", help="K, where the engine does not tell it.")] = None,
    temperatures: Temperatures = "0",
    rule: Annotated[str, typer.Option(help="How the engine should accept at a temperature: ratio, argmax, block.")] = (
        "ratio"
    ),
    max_tokens: MaxTokens = 256,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Chat template or not; left out: where there is one.")
    ] = None,
    own_template: Annotated[
        bool, typer.Option("--own-template", help="Drive through the engine's own chat template, with text.")
    ] = False,
    served: Annotated[str | None, typer.Option(help="Model name, where the engine serves several.")] = None,
    seed: int = 0,
    dtype: Dtype = "auto",
    path: PathName = "auto",
    device: Device = "auto",
    max_requests: Annotated[int, typer.Option(help="Requests in all.")] = 2000,
    max_seconds: Annotated[float, typer.Option(help="Seconds of asking in all.")] = 900,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 120,
    key_env: Annotated[str | None, typer.Option(help="Variable that holds the key, if not OPENAI_API_KEY.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Name the likeliest causes of an engine's low acceptance, from its own counters and the checkpoint."""
    from nextn.benchmarking.workload import read_prompts
    from nextn.checkpoints.tensor_file import write_json
    from nextn.engines.client import Budget, Limits
    from nextn.engines.endpoint import Endpoint

    plan = Plan(drafts or 4, numbers(temperatures), max_tokens, chat, seed, path, rule)
    if not drive and len(plan.temperatures) > 1:
        raise ConfigError(f"--temperatures {temperatures}: counters are of one temperature; give it, or use --drive")
    check_model(model, dtype, path=path, device=device)
    texts, budget = read_prompts(prompts), Budget(Limits(requests=max_requests, seconds=max_seconds, answer_s=timeout))
    from nextn.measuring.cases import check_drafts
    from nextn.measuring.diagnose import audited
    from nextn.measuring.diagnose import diagnose as judged
    from nextn.measuring.drive import Seen, counters_of, driven
    from nextn.measuring.faults import FAULTS

    with progress_bars(quiet=as_json) as progress:
        if drive:
            target = Endpoint.open(engine, budget, model=served, key_env=key_env, chat=own_template)
            loaded = load_model(model, dtype, need_head=True, device=device)
            step = progress("asking", len(texts) * len(plan.temperatures))
            seen = driven(target, loaded, texts, plan, on_answer=step)
        else:
            counters = counters_of(engine, budget, served=served, key_env=key_env)
            loaded = load_model(model, dtype, need_head=True, device=device)
            seen = [Seen(plan.temperatures[0], counters)]
        check_drafts(seen, drafts)
        steps = {
            "on_text": progress("reference", len(texts) * len(plan.temperatures)),
            "on_fault": progress("faults", len(FAULTS)),
        }
        found = judged(loaded, texts, seen, plan, source=model, audited=audited(model), **steps)
    record = found.as_record()
    if out is not None:
        write_json(out, record)
    if as_json:
        print_json(record)
    else:
        _show(found)
    raise typer.Exit(0 if found.is_fine else 1)


def _show(found: "Diagnosis") -> None:
    from rich.table import Table

    screen = console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    depths = range(1, found.measured.plan.drafts + 1)
    for title in ("", *(f"a_{k}" for k in depths), "AL", "likelihood", "fits"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    several = len(found.cases) > 1
    for case in found.cases:
        label = f"{found.engine}, {_where(case.seen.temperature, case.seen.places, several=several)}"
        pairs = zip(case.observed.offered, case.observed.kept, strict=True)
        rates = [f"{kept / offered:.3f}" if offered else "" for offered, kept in pairs] or [""] * len(depths)
        table.add_row(plain(label), *rates, f"{1 + case.kept:.2f}", "", "", style="bold")
    table.add_section()
    rows = [*found.causes[:_SHOWN], *(each for each in found.causes[_SHOWN:] if each.name in ("fine", *found.named))]
    for cause in rows:
        style = "bold" if cause.name in found.named else None
        table.add_row(plain(cause.name), *_rates(cause), f"{cause.length:.2f}", _odds(cause), _fit(cause), style=style)
    print_table(table)
    screen.print(plain(f"{'fine' if found.is_fine else 'finding'}: {found.words}", style="bold"), soft_wrap=True)
    for each in found.suspects:
        screen.print(plain(f"{each.name}: {each.does}"), soft_wrap=True)
        if each.issues:
            screen.print(plain(f"  seen in  {', '.join(each.issues)}"), soft_wrap=True)
        screen.print(plain(f"  to do  {each.advice}", style="cyan"), soft_wrap=True)
    if found.alike:
        screen.print(plain(f"cannot be told from it here: {', '.join(found.alike)}"), soft_wrap=True)
    for note in found.notes:
        screen.print(plain(f"note: {shown(note)}"), soft_wrap=True)


def _where(temperature: float, places: "tuple[int, ...] | None", *, several: bool) -> str:
    at = "greedy" if not temperature else f"T={temperature:g}"
    return at if not several or places is None else f"{at}, {len(places)} prompts"


def _rates(cause: "Cause") -> list[str]:
    return [f"{rate:.3f}" for rate in cause.rates]


def _odds(cause: "Cause") -> str:
    """To that of the likeliest cause."""
    return "1" if cause.ratio == 1 else f"1/{1 / cause.ratio:.3g}" if cause.ratio > 1e-30 else "0"


def _fit(cause: "Cause") -> str:
    return f"{cause.misfit:.2f}" if cause.misfit >= 0.01 else "<0.01"
