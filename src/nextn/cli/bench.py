"""Speed: `nextn bench` and `nextn advise`. Files are written after all measurements, or not at all."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nextn.cli.acceptance import draw_curves, show_lengths
from nextn.cli.accuracy import accuracy_of
from nextn.cli.common import (
    K_NAMES,
    AsJson,
    Chat,
    EngineAccess,
    MaxTokens,
    NumCopyTokens,
    Prompts,
    Temperatures,
    Thinking,
    check_matplotlib,
    expanded,
    first_turns,
    parse_temperatures,
    use_chat,
)
from nextn.cli.decode import DraftVocabularyOptions
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars, say_doing
from nextn.cli.screen import figures_table, plain, print_json, print_lines, print_note, print_notes, print_table
from nextn.errors import ConfigError, NextnError
from nextn.evaluate.workload import BenchmarkPlan, Prompt, by_domain, num_turns, prompts_record, read_prompts
from nextn.text_format import rate_text

if TYPE_CHECKING:
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.advice import Advice, Forecast
    from nextn.evaluate.benchmark import BenchmarkFigures, BenchmarkReport
    from nextn.evaluate.load_advice import LoadAdvice

_PANEL = "K by load of a live engine"
_ADAPTED = "auto"  # in place of a K: as many drafts as pay, up to the largest K
Against = Annotated[
    str | None,
    Option(
        help="With --engine, and without MODEL: the same model served without MTP. Times both at --batches "
        "streams, and prints K for each in the engine's own syntax.",
        rich_help_panel=_PANEL,
    ),
]
ADVICE_FILE = "advice.json"  # in the folder of `nextn advise --out`


def _advice_by_load(
    prompts: Sequence[Prompt],
    loads: Sequence[int],
    plan: BenchmarkPlan,
    engine: "Endpoint",
    plain_engine: "Endpoint",
    *,
    quiet: bool,
) -> "Iterator[LoadAdvice]":
    """Yield the advice for each temperature as soon as it is measured."""
    from nextn.evaluate.load_advice import measure_loads, refuse_drafts, total_requests, wait_until_measured

    texts = [prompt.text for prompt in first_turns(prompts)]
    refuse_drafts(plain_engine, texts[0])
    for url, _ in groupby(wait_until_measured((plain_engine, engine))):
        say_doing(f"{url} measures its own costs first", quiet=quiet)
    total = total_requests(len(texts), loads)
    for temperature in plan.temperatures:
        streams = ", ".join(map(str, sorted(set(loads))))
        say_doing(f"T={temperature:g}: {total} answers of both servers at {streams} streams", quiet=quiet)
        with progress_bars(quiet=quiet) as progress:
            advice = measure_loads(
                engine,
                plain_engine,
                texts,
                loads,
                temperature=temperature,
                max_tokens=plan.max_tokens,
                on_answer=progress(f"T={temperature:g}", total),
            )
        yield advice


def report_by_load(measured: "Iterable[LoadAdvice]", out: Path | None, *, as_json: bool) -> None:
    """Print a table for each temperature when it is measured; at the end write the record, or print it as JSON."""
    found = []
    for each in measured:
        found.append(each)
        if not as_json:
            show_by_load(each)
    record = found[0].as_record() | {"temperatures": [each.as_record() for each in found]}
    _write_advice(record, out)
    if as_json:
        print_json(record)


def show_by_load(advice: "LoadAdvice") -> None:
    """Print a row for each number of streams, the advice, and the engines' settings."""
    expected = (f"K={k}" for k in range(1, len(advice.rates) + 1))
    titles = ("streams", "tokens/s without", "with MTP", "speedup", "AL", "round costs")
    table = figures_table(*titles, *expected, "best K")
    for point in advice.points:
        speeds = ("", "") if point.middle is None else (f"{each:.0f}" for each in point.middle)
        spread = point.speedup
        measured = f"{spread.median:.2f}" + (f" ({spread.low:.2f}-{spread.high:.2f})" if spread.num > 1 else "")
        speedups = [f"{each:.2f}" for each in point.expected(advice.rates)[1:]]
        cells = (measured, f"{point.length:.2f}", f"{point.round_cost:.2f}", *speedups)
        table.add_row(str(point.streams), *speeds, *cells, str(point.best(advice.rates) or "off"))
    print_table(table)
    print_lines(
        f"T={advice.temperature:g}, {advice.engine}: {advice.summary}",
        f"tokens/s: of the repeat with the median speedup. Round costs: a round of {len(advice.rates)} drafts, in "
        "rounds without; MTP is faster where AL is above it. "
        "K=1, ...: expected speedup, each draft of a round costing the same.",
        *(f"note: {note}" for note in advice.notes),
        *(f"  {name}: {value}" for name, value in advice.settings.items()),
    )


@expanded("device_map")
def bench(
    *,
    num_speculative_tokens: Annotated[
        str, Option(*K_NAMES, help="Values of K, comma-separated; 0 = plain decoding, auto = adapted in each round.")
    ] = "0,1,2,3,4,6,8",
    prompts: Prompts = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    repeats: Annotated[int, Option(help="Runs of each prompt at each K and temperature.")] = 3,
    chat: Chat = None,
    thinking: Thinking = None,
    options: ModelOptions,
    vocabulary: DraftVocabularyOptions,
    num_copy_tokens: NumCopyTokens = 0,
    out: Annotated[Path | None, Option(help="Folder for the record and the figures.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure plain and MTP decoding over K: speed, acceptance, costs, memory. Repetitive texts are left out."""
    values = [each.strip() for each in num_speculative_tokens.split(",")]
    numbers = ",".join(each for each in values if each != _ADAPTED)
    if not numbers:
        raise ConfigError(f"-k {num_speculative_tokens}: give the largest K beside it, such as -k 4,{_ADAPTED}")
    plan = BenchmarkPlan(
        _integers(numbers, "--num-speculative-tokens"),
        parse_temperatures(temperatures),
        max_tokens,
        repeats,
        adaptive=_ADAPTED in values,
        backend=options.backend,
        num_copy_tokens=num_copy_tokens,
        thinking=thinking,
    )
    options, source = options.prepared(need_head=True), options.source
    texts, draftable = read_prompts(prompts), vocabulary.read()
    _check_out(out, has_figures=True)
    from nextn.evaluate.benchmark import run_benchmark, with_one_pass

    loaded = options.load(need_head=True)
    print_notes(loaded.notes)
    plan = replace(plan, chat=use_chat(loaded, chat))
    draftable.apply(loaded, num_speculative_tokens=plan.k_values[-1], backend=options.backend)
    with progress_bars(quiet=as_json) as progress:
        step = progress("decode", plan.num_runs(num_turns(texts)))
        report = run_benchmark(loaded, texts, plan, source=source, on_run=lambda _: step())
        report = with_one_pass(report, loaded, on_score=progress("scores", num_turns(texts) * len(plan.temperatures)))
    if long := loaded.length_note(report.num_positions(loaded)):
        print_note(long)
    record = report.as_record() | {"prompts": prompts_record(prompts, texts)}
    rounded = accuracy_of(loaded, options, quiet=as_json)
    if rounded is not None:
        record["accuracy"] = rounded[0].as_record() | {"texts": rounded[1]}
    if out is not None:
        _write(report, record, out)
    if as_json:
        print_json(record)
        return
    _show_benchmark(report)
    if rounded is not None:
        print_lines(f"beside float32: {rounded[0].accuracy} of {rounded[1]}")


@expanded("exact_head", "threads", "kv_cache_dtype", "device_map", "concurrency", source="")
def advise(
    *,
    num_speculative_tokens: Annotated[int, Option(*K_NAMES, help="The largest K to consider.")] = 8,
    batches: Annotated[str, Option(help="Batch sizes, comma-separated.")] = "1,2,4,8",
    contexts: Annotated[str, Option(help="Context lengths, comma-separated. Default: that of the texts.")] = "",
    prompts: Prompts = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    chat: Chat = None,
    options: ModelOptions,
    asked: EngineAccess,
    against: Against = None,
    out: Annotated[Path | None, Option(help="Folder for the record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether MTP pays off on this machine: the best K and the break-even, from measured acceptance and costs."""
    sizes = _integers(batches, "--batches", minimum=1)
    lengths = _integers(contexts, "--contexts", minimum=1) if contexts else ()
    plan = BenchmarkPlan(
        (num_speculative_tokens,), parse_temperatures(temperatures), max_tokens, repeats=1, backend=options.backend
    )
    to_decode = read_prompts(prompts)
    _check_out(out, has_figures=False)
    if against is not None:
        if options.source:
            raise ConfigError("--against gives advice for an engine and takes no MODEL; leave it out")
        if not asked.url:
            raise ConfigError("--against takes --engine ADDRESS, the server with MTP")
        engines = (each.open(chat=chat is not False) for each in (asked, replace(asked, engine=against)))
        found = _advice_by_load(to_decode, sizes, plan, *engines, quiet=as_json)
        report_by_load(found, out, as_json=as_json)
        return
    if not options.source:
        raise ConfigError(
            "no MODEL: give a checkpoint folder, .gguf file or hub id, or for a live engine --engine and --against"
        )
    given, options = options, options.prepared(need_head=True)
    if asked.engine:
        raise ConfigError(
            f"--engine {asked.engine}: only with --against; with MODEL, decoding is timed on this machine"
        )
    loaded = options.load(need_head=True)
    plan = replace(plan, chat=use_chat(loaded, chat))
    from nextn.evaluate.advice import advise as measured_advice

    with progress_bars(quiet=as_json) as progress:
        on_run = progress("decode", plan.num_runs(len(to_decode)))
        on_costs = progress("costs", len(sizes) * max(1, len(lengths)))
        advice = measured_advice(
            loaded, to_decode, plan, batches=sizes, contexts=lengths, source=given.source,
            on_run=lambda _: on_run(), on_costs=lambda _: on_costs(),
        )  # fmt: skip
    _report_advice(advice, given, out, as_json=as_json)


def _report_advice(advice: "Advice", given: ModelOptions, out: Path | None, *, as_json: bool) -> None:
    record = advice.as_record()
    _write_advice(record, out)
    if as_json:
        print_json(record)
        return
    _show_advice(advice)
    print_lines(*serving(given.source, given.head, advice.headlines))


def _integers(text: str, name: str, *, minimum: int = 0) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < minimum:
        raise ConfigError(f"{name} {text!r}; expected comma-separated whole numbers >= {minimum}, such as 1,2,4")
    return values


def _check_out(out: Path | None, *, has_figures: bool) -> None:
    """Fail before measuring, not after it, if the results cannot be written. Raises ConfigError."""
    if out is None:
        return
    if has_figures:
        check_matplotlib("--out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot create this folder ({error.strerror}); name another") from error


def _write_advice(record: Mapping[str, object], out: Path | None) -> None:
    from nextn.checkpoint.safetensors_file import write_json

    if out is not None:
        write_json(out / ADVICE_FILE, record)


def _write(report: "BenchmarkReport", record: Mapping[str, object], out: Path) -> None:
    from nextn.checkpoint.safetensors_file import write_json

    with TemporaryDirectory(dir=out, prefix=".") as staging:
        write_json(Path(staging) / "bench.json", record)
        _draw(report, Path(staging))
        for path in Path(staging).iterdir():
            path.replace(out / path.name)


def _draw(report: "BenchmarkReport", folder: Path) -> None:
    from nextn.stats import plots

    plan = report.plan
    tables = {_at(t): {k: report.figures(t, k) for k in plan.k_values if k} for t in plan.temperatures}
    measured = {label: {k: each.speedup for k, each in row.items()} for label, row in tables.items()}
    plots.speedups(folder / "speedup.png", measured, {_at(t): report.theory(t) for t in plan.temperatures})
    if report.one_pass is not None:
        draw_curves(report.one_pass, folder / "curve.png", rule="block")


def _show_benchmark(report: "BenchmarkReport") -> None:
    titles = ["", "K", "AL", "tokens/s", "speedup", "expected", "draft/verify/host", "a_1 ... a_K"]
    copies = report.plan.num_copy_tokens > 0
    if copies:  # a round that verifies copies is not in the cost curve
        titles[5:6] = ["tokens/round", "copied"]
    table, machine, costs = figures_table(*titles, left=("", titles[-1])), report.machine, report.costs
    largest, domains = report.plan.k_values[-1], [*by_domain(report.prompts)]
    for temperature in report.plan.temperatures:
        rows = [("", report.figures(temperature, k)) for k in report.plan.choices]
        if len(domains) > 1:  # one would repeat the row above
            rows += [(f", {each}", report.figures(temperature, largest, each)) for each in domains]
        for label, figures in rows:
            marked = " (repetitive)" if figures.all_repetitive else ""
            table.add_row(plain(f"{_at(temperature)}{label}{marked}"), *_cells(figures, copies=copies))
        table.add_section()
    print_table(table)
    print_lines(
        "tokens/s (quartiles) and speedup over plain decoding of the same text: medians over texts, each on its own; "
        + (
            "copied: accepted tokens of the text so far; AL and a_k are of the rounds that the head drafted"
            if copies
            else "expected: from AL, v(m) and c"
        ),
        f"v(m) {'  '.join(f'{value:.2f}' for value in costs.v)}   c {costs.c:.2f}   in steps of plain decoding ("
        f"{costs.steps[0].median * 1e3:.2f} ms each; {rate_text(report.plain_step_s * 1e3)} ms in the texts), at "
        f"context {costs.context}",
        f"{machine.name}: {machine.threads} threads of {machine.cores} cores, {machine.dtype}, torch "
        f"{machine.versions['torch']}; a copy moves {machine.bandwidth / 1e9:.1f} GB/s; peak memory "
        f"{machine.peak_memory / 2**20:.0f} MiB",
    )
    if report.one_pass is not None:
        print_lines("", "in one pass over the texts of plain decoding, without the rounds that their ends cut short:")
        show_lengths(report.one_pass, rule="block")
    print_lines(*(f"note: {warning}" for warning in report.warnings))


def _cells(figures: "BenchmarkFigures", *, copies: bool) -> list[str]:
    num = figures.copied.num_rounds
    copied = f"{sum(figures.copied.num_accepted)} in {num} rounds" if num else ""
    acceptance, speed, share = figures.acceptance, figures.tokens_per_s, figures.share
    return [
        _ADAPTED if figures.num_speculative_tokens < 0 else str(figures.num_speculative_tokens),
        f"{acceptance.length:.2f}" if acceptance.num_rounds else "",
        f"{speed.median:.0f} ({speed.low:.0f}-{speed.high:.0f})" if speed.num else "",
        rate_text(figures.speedup.median),
        *([f"{figures.tokens_per_round:.2f}", copied] if copies else [rate_text(figures.expected_speedup)]),
        "/".join(f"{value:.0%}" for value in share.values()),
        " ".join(map(rate_text, acceptance.rates)),
    ]


def _show_advice(advice: "Advice") -> None:
    _show_forecasts(advice.forecasts)
    for each in advice.headlines:
        figures = advice.report.figures(each.temperature, advice.report.plan.k_values[-1])
        k, expected = figures.num_speculative_tokens, each.choices[-1].speedup
        measured = f"; as a check, K = {k} was run: {figures.speedup.median:.2f} x measured, {expected:.2f} x expected"
        print_lines(f"{_at(each.temperature)}: {each.summary}{measured}")
        print_lines(*(f"  {more}" for more in (advice.by_batch(each), advice.other_summary(each)) if more is not None))
    print_lines(*(f"note: {warning}" for warning in advice.report.warnings))


def serving(source: str, head: str | None, forecasts: "Sequence[Forecast]") -> list[str]:
    """Return the line that says how to serve the model; none where no forecast advises MTP."""
    lengths = [each.best.num_speculative_tokens for each in forecasts if each.pays]
    if not lengths:
        return []
    command = f"nextn serve {shlex.quote(source)}"
    other = f"`{command} --print vllm -k {lengths[0]}`: the command of vLLM (or sglang, llama.cpp)"
    if head is not None:
        from nextn.edit.export import export_command

        command += f" --head {shlex.quote(head)}"
        try:
            made = export_command(head, source, "vllm", lengths[0])
            other = f"`{made}`: for vLLM (or --for sglang; with OUT.gguf, --for llama.cpp)"
        except NextnError as error:
            other = str(error)
    return [
        f"serve it: `{command}` chooses K by the load; {other}",
        f"K = {lengths[0]} is best at nextn's own costs of a round here; those of another engine differ: `nextn advise "
        "--engine URL --against URL` measures them",
    ]


def _show_forecasts(forecasts: "Sequence[Forecast]") -> None:
    choices = range(1, max(len(each.choices) for each in forecasts) + 1)
    found = ("best K", "speedup", "95 %", "MTP", "AL", "acceptance", "break-even")
    table = figures_table("", "batch", "context", *(f"K={k}" for k in choices), *found)
    for each in forecasts:
        expected = [f"{choice.speedup:.2f}" for choice in each.choices]
        even = "none" if each.best.break_even is None else f"{each.best.break_even:.2f}"
        expected += [""] * (len(choices) - len(expected))
        sizes = (str(each.costs.batch), str(each.costs.context))
        low, high = each.best.interval
        best = (str(each.best.num_speculative_tokens), f"{each.best.speedup:.2f}", f"{low:.2f}-{high:.2f}")
        accepted = (f"{each.best_length:.2f}", f"{each.best_rate:.2f}")
        row = (*sizes, *expected, *best, "on" if each.pays else "off", *accepted, even)
        table.add_row(f"T={each.temperature:g}", *row)
    print_table(table)


def _at(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"
