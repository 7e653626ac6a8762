"""The verbs that measure: `nextn bench` and `nextn advise`. Files are written when all is measured, or none."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.benchmarking.plan import Plan
from nextn.cli.common import (
    AsJson,
    Chat,
    Device,
    DraftText,
    DraftVocab,
    Dtype,
    ExactHead,
    MaxTokens,
    ModelName,
    PathName,
    Prompts,
    Temperatures,
    check_model,
    draft_from,
    load_model,
    numbers,
    read_draft_text,
)  # fmt: skip
from nextn.cli.screen import console, plain, print_json, print_table, progress_bars
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.benchmarking.advice import Advice
    from nextn.benchmarking.report import Figures, Report

Out = Annotated[Path | None, typer.Option(help="Folder for the record and the figures.")]


def bench(
    model: ModelName,
    drafts: Annotated[str, typer.Option("--drafts", "-k", help="Every K, comma-separated.")] = "0,1,2,3,4,6,8",
    prompts: Prompts = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    repeats: Annotated[int, typer.Option(help="Times that each prompt is decoded at each K and temperature.")] = 3,
    chat: Chat = False,
    seed: int = 0,
    dtype: Dtype = "auto",
    draft_vocab: DraftVocab = 0,
    draft_text: DraftText = None,
    exact_head: ExactHead = False,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Also as many drafts a round as pay.")] = False,
    path: PathName = "auto",
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure plain and MTP decoding in turn over K: speed, acceptance, costs, memory; loops are told and left out."""
    from nextn.benchmarking.workload import read_prompts

    plan = Plan(
        _whole(drafts, "--drafts"),
        numbers(temperatures),
        max_tokens,
        repeats,
        chat=chat,
        seed=seed,
        adaptive=adaptive,
        path=path,
    )
    check_model(model, dtype, path=path, device=device)
    texts, frequent = read_prompts(prompts), read_draft_text(draft_vocab, draft_text)
    _ready(out)
    from nextn.benchmarking.benchmark import measured

    loaded = load_model(model, dtype, need_head=True, device=device, exact_head=exact_head)
    draft_from(loaded, draft_vocab, frequent)
    with progress_bars(quiet=as_json) as progress:
        step = progress("decode", plan.num_runs(len(texts)))
        report = measured(loaded, texts, plan, source=model, on_run=lambda _: step())
    if out is not None:
        _write(out, "bench.json", report.as_record(), lambda folder: _draw(report, folder))
    if as_json:
        print_json(report.as_record())
    else:
        _show(report)


def advise(
    model: ModelName,
    drafts: Annotated[int, typer.Option("--drafts", "-k", help="The largest K to think about.")] = 8,
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option(help="Contexts, comma-separated; left out: as long as the texts.")] = "",
    prompts: Prompts = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    chat: Chat = False,
    seed: int = 0,
    exact_head: ExactHead = False,
    dtype: Dtype = "auto",
    path: PathName = "auto",
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Say whether MTP pays here, from measured acceptance and costs: the best K, the break-even, or "leave it off"."""
    from nextn.benchmarking.workload import read_prompts

    sizes = _whole(batches, "--batches", least=1)
    columns = _whole(contexts, "--contexts", least=1) if contexts else ()
    plan = Plan((drafts,), numbers(temperatures), max_tokens, repeats=1, chat=chat, seed=seed, path=path)
    check_model(model, dtype, path=path, device=device)
    texts = read_prompts(prompts)
    _ready(out)
    from nextn.benchmarking.advice import advised

    loaded = load_model(model, dtype, need_head=True, device=device, exact_head=exact_head)
    with progress_bars(quiet=as_json) as progress:
        decoded = progress("decode", plan.num_runs(len(texts)))
        costed = progress("costs", len(sizes) * max(1, len(columns)))
        advice = advised(
            loaded,
            texts,
            plan,
            batches=sizes,
            contexts=columns,
            source=model,
            on_run=lambda _: decoded(),
            on_costs=lambda _: costed(),
        )
    if out is not None:
        _write(out, "advice.json", advice.as_record(), lambda folder: _draw_costs(advice, folder))
    if as_json:
        print_json(advice.as_record())
    else:
        _tell(advice)


VERBS = (bench, advise)


def _whole(text: str, name: str, *, least: int = 0) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < least:
        raise ConfigError(f"{name} {text!r}; expected whole numbers from {least} on with commas between, such as 1,2,4")
    return values


def _ready(out: Path | None) -> None:
    """What would fail after the measuring fails before it."""
    if out is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--out draws figures, and they need matplotlib: pip install 'nextn[plot]'")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: not a folder that can be made ({error.strerror}); name another") from error


def _write(out: Path, name: str, record: Mapping[str, object], draw: Callable[[Path], None]) -> None:
    from nextn.checkpoints.tensor_file import write_json

    with TemporaryDirectory(dir=out, prefix=".") as staging:
        write_json(Path(staging) / name, record)
        draw(Path(staging))
        for path in Path(staging).iterdir():
            path.replace(out / path.name)


def _draw(report: "Report", folder: Path) -> None:
    from nextn.figures import plot

    plan = report.plan
    tables = {_at(t): {k: report.figures(t, k) for k in plan.drafts if k} for t in plan.temperatures}
    measured = {label: {k: each.speedup for k, each in row.items()} for label, row in tables.items()}
    plot.speedups(folder / "speedup.png", measured, {_at(t): report.theory(t) for t in plan.temperatures})
    plot.acceptance(
        folder / "acceptance.png", {label: row[plan.drafts[-1]].acceptance for label, row in tables.items()}
    )
    plot.costs(folder / "costs.png", [report.costs])


def _draw_costs(advice: "Advice", folder: Path) -> None:
    from nextn.figures import plot

    plot.costs(folder / "costs.png", advice.costs)


def _show(report: "Report") -> None:
    from rich.table import Table

    from nextn.benchmarking.workload import by_domain

    table, machine, costs = Table(box=None, header_style="bold", pad_edge=False), report.machine, report.costs
    for title in ("", "K", "AL", "tokens/s", "speed-up", "expected", "draft/verify/host", "a_1 ... a_K"):
        table.add_column(title, justify="left" if title in ("", "a_1 ... a_K") else "right", no_wrap=True)
    largest = report.plan.drafts[-1]
    for temperature in report.plan.temperatures:
        rows = [("", report.figures(temperature, drafts)) for drafts in report.plan.choices]
        rows += [(f", {each}", report.figures(temperature, largest, each)) for each in by_domain(report.prompts)]
        for label, figures in rows:
            marked = " (loops)" if figures.only_loops else ""
            table.add_row(plain(f"{_at(temperature)}{label}{marked}"), *_cells(figures))
        table.add_section()
    screen = console()
    print_table(table)
    lines = [
        f"v(m) {'  '.join(f'{value:.2f}' for value in costs.v)}   c {costs.c:.2f}   in plain steps of "
        f"{costs.steps[0].median * 1e3:.2f} ms, at context {costs.context}",
        f"{machine.name}: {machine.threads} threads of {machine.cores} cores, {machine.dtype}, torch "
        f"{machine.versions['torch']}; a copy moves {machine.bandwidth / 1e9:.1f} GB/s; peak memory "
        f"{machine.peak_memory / 2**20:.0f} MiB",
        *_warnings(report),
    ]
    for line in lines:
        screen.print(plain(line), soft_wrap=True)


def _cells(figures: "Figures") -> list[str]:
    kept, speed, share = figures.acceptance, figures.tokens_per_s, figures.share
    return [
        "auto" if figures.drafts < 0 else str(figures.drafts),
        f"{kept.length:.2f}" if kept.num_rounds else "",
        f"{speed.median:.0f} ({speed.low:.0f}-{speed.high:.0f})",
        f"{figures.speedup.median:.2f}",
        f"{figures.expected:.2f}",
        "/".join(f"{value:.0%}" for value in share.values()),
        " ".join(f"{rate:.2f}" for rate in kept.rates),
    ]


def _tell(advice: "Advice") -> None:
    from rich.table import Table

    screen, table = console(), Table(box=None, header_style="bold", pad_edge=False)
    choices = range(1, max(len(each.choices) for each in advice.forecasts) + 1)
    for title in (
        "",
        "batch",
        "context",
        *(f"K={drafts}" for drafts in choices),
        "best K",
        "speed-up",
        "95 %",
        "MTP",
        "break-even",
    ):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for each in advice.forecasts:
        expected = [f"{choice.speedup:.2f}" for choice in each.choices]
        even = "none" if each.best.break_even is None else f"{each.best.break_even:.2f}"
        expected += [""] * (len(choices) - len(expected))
        sizes = (str(each.costs.batch), str(each.costs.context))
        low, high = each.best.interval
        best = (str(each.best.drafts), f"{each.best.speedup:.2f}", f"{low:.2f}-{high:.2f}")
        table.add_row(f"T={each.temperature:g}", *sizes, *expected, *best, "on" if each.pays else "off", even)
    print_table(table)
    for each in advice.headlines:
        found = advice.report.figures(each.temperature, advice.report.plan.drafts[-1])
        told = f"measured in this run at K = {found.drafts}: {found.speedup.median:.2f} x"
        screen.print(plain(f"{_at(each.temperature)}: {each.words}; {told}"), soft_wrap=True)
    for line in _warnings(advice.report):
        screen.print(plain(line), soft_wrap=True)


def _warnings(report: "Report") -> list[str]:
    return [f"note: {warning}" for warning in report.warnings]


def _at(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"
