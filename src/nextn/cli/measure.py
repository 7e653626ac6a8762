"""The verb `nextn measure`: the acceptance that a head should have, and which conventions its weights want."""

import shlex
import sys
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
from nextn.cli.screen import console, echo, plain, print_json, print_table, progress_bars
from nextn.errors import ConfigError
from nextn.measuring.plan import Plan

if TYPE_CHECKING:
    from nextn.figures.estimate import Estimate
    from nextn.measuring.measured import Measured
    from nextn.measuring.probe import Probed
    from nextn.model import Model


def measure(
    model: ModelName,
    drafts: Annotated[int, typer.Option("--drafts", "-k", help="The largest K; every smaller one is told, too.")] = 4,
    prompts: Prompts = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Chat template or not; left out: where there is one.")
    ] = None,
    seed: int = 0,
    dtype: Dtype = "auto",
    path: PathName = "auto",
    device: Device = "auto",
    min_acceptance: Annotated[
        float | None, typer.Option(help="Exit with 1 if a_1 of the lowest temperature is below, for CI.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Try other conventions; exit with 1 if the weights want another.")
    ] = False,
    model_card: Annotated[bool, typer.Option("--model-card", help="Print Markdown for a model card.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for the JSON record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the acceptance per depth that a checkpoint's head should reach, with intervals and negative controls."""
    from dataclasses import replace

    from nextn.benchmarking.workload import read_prompts
    from nextn.checkpoints.tensor_file import write_json

    if min_acceptance is not None and not 0 <= min_acceptance <= 1:
        raise ConfigError(f"--min-acceptance {min_acceptance}; expected a share from 0 to 1, such as 0.6")
    plan = Plan(drafts, numbers(temperatures), max_tokens, chat, seed, path)
    check_model(model, dtype, path=path, device=device)
    texts = read_prompts(prompts)
    from nextn.benchmarking.cost import Machine
    from nextn.measuring.card import card
    from nextn.measuring.measure import reference
    from nextn.measuring.record import hashes

    loaded = load_model(model, dtype, need_head=True, device=device)
    with progress_bars(quiet=as_json or model_card) as progress:
        step = progress("texts", len(texts) * len(plan.temperatures))
        found = reference(loaded, texts, plan, on_text=step)
    found = replace(found, source=model, hashes=hashes(model), machine=Machine.of(loaded))
    probed = _probed(found, loaded, quiet=as_json or model_card) if probe else None
    record = found.as_record() | ({} if probed is None else {"probe": probed.as_record()})
    if out is not None:
        write_json(out, record)
    if as_json:
        print_json(record)
    elif model_card:
        echo(card(found, command=shlex.join(["nextn", *sys.argv[1:]])))
    else:
        _show(found)
        if probed is not None:
            _tell(probed)
    if min_acceptance is not None:
        _judge(found, min_acceptance)
    if probed is not None and not (probed.agrees and probed.works):
        raise typer.Exit(1)


VERBS = (measure,)


def _show(found: "Measured") -> None:
    from rich.table import Table

    screen, depths = console(), range(1, found.plan.drafts + 1)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "texts", *(f"a_{k}" for k in depths), *(f"AL@{k}" for k in depths)):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for temperature in found.plan.temperatures:
        for place, rule in enumerate(found.rules(temperature)):
            of = [found.figures(temperature, rule=rule, drafts=k) for k in depths]
            label = rule if rule == "greedy" else f"T={temperature:g} {rule}"
            lengths = [f"{each.length.value:.2f}" for each in of]
            table.add_row(plain(label), str(of[-1].num_texts), *map(_cell, of[-1].rates), *lengths)
            for domain in found.domains[1:] if not place else ():
                one = found.figures(temperature, domain=domain)
                lengths = [*[""] * (len(depths) - 1), f"{one.length.value:.2f}"]
                table.add_row(plain(f"  {domain}"), str(one.num_texts), *map(_cell, one.rates), *lengths, style="dim")
        table.add_section()
    print_table(table)
    if (seen := found.controls) is not None:
        screen.print(
            plain(
                f"controls, greedy where measured: a_1 over all columns {seen.columns:.2f}; shifted targets "
                f"{seen.shifted:.2f}, shuffled hidden states {seen.shuffled:.2f}, by accident {seen.chance:.2f}; "
                f"median rank of the text's token {seen.median_rank:.0f} of {seen.vocab_size}"
            ),
            soft_wrap=True,
        )
    screen.print(
        plain(f"{found.how} pass, {found.family}; rules and intervals (95 %, by text): docs/measure.md"), soft_wrap=True
    )
    for warning in found.warnings:
        screen.print(plain(f"note: {warning}"), soft_wrap=True)


def _cell(rate: "Estimate") -> str:
    return "" if rate.value != rate.value else f"{rate.value:.3f} ({rate.low:.2f}-{rate.high:.2f})"


def _probed(found: "Measured", model: "Model", *, quiet: bool) -> "Probed":
    from nextn.measuring.probe import probe, readable
    from nextn.measuring.texts import continued
    from nextn.measuring.variants import stored_copies

    sampled = [drawn for temperature, drawn in found.drawn.items() if temperature]
    prompts = [text.prompt for drawn in found.drawn.values() for text in drawn.texts][: len(found.prompts)]
    drawn = sampled[0] if sampled else continued(model, prompts, found.plan, 1.0)
    with progress_bars(quiet=quiet) as progress:
        step = progress("readings", None)
        copies = stored_copies(found.source, model)
        return probe(model, readable(drawn.texts), found.plan.drafts, copies=copies, on_tried=step)


def _tell(probed: "Probed") -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("reading", *(f"a_{k}" for k in range(1, len(probed.base.rates) + 1)), "drafts a column", "more"):
        table.add_column(title, justify="left" if title == "reading" else "right", no_wrap=True)
    shown = [each for each in probed.tried if len(each.keys) == 1 or each == probed.wanted]
    for each in sorted([probed.base, *shown], key=lambda each: -each.per_column):
        gain = probed.over(each, probed.base)
        rates = ["" if rate != rate else f"{rate:.2f}" for rate in each.rates]
        more = f"{gain.value:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})" if each.keys else ""
        style = "bold" if each == probed.wanted else None
        table.add_row(plain(each.says), *rates, f"{each.per_column:.2f}", more, style=style)
    print_table(table)
    console().print(plain(f"probe: {probed.words}"), soft_wrap=True)
    if probed.ties:
        told = "; ".join(each.says for each in probed.ties)
        console().print(plain(f"cannot be told from it on these texts: {told}"), soft_wrap=True)


def _judge(found: "Measured", least: float) -> None:
    """Exit code 1 where a_1 is below; so for one that could not be measured."""
    rate = found.figures(found.plan.temperatures[0]).rates[0].value
    if not rate >= least:
        echo(f"a_1 = {rate:.3f} is below --min-acceptance {least:g}", err=True)
        raise typer.Exit(1)
