"""`nextn measure`: the acceptance that a head should reach, by the weights alone."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Option

from nextn.cli.common import (
    K_NAMES,
    AsJson,
    Chat,
    EngineAccess,
    MaxTokens,
    ModelOptions,
    Prompts,
    RecordFile,
    check_figure,
    expanded,
    first_turns,
    parse_temperatures,
    print_published,
    shipped_path,
)
from nextn.cli.progress import progress_bars
from nextn.cli.screen import echo, figures_table, plain, print_json, print_lines, print_note, print_table
from nextn.cli.streaming import GivenTextOptions, TextOptions, measure_acceptance
from nextn.errors import ConfigError, NextnError
from nextn.evaluate.acceptance_drop import OTHER_TOKENS, AcceptanceChange, check_settings, read_record
from nextn.evaluate.exchange import check_form, exchange_text, inferencex_note
from nextn.evaluate.published_curves import check_shared, read_curves
from nextn.evaluate.workload import ReferencePlan
from nextn.text_format import docs_page, rate_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nextn.evaluate.probe import ProbeReport
    from nextn.evaluate.reference_report import AcceptanceFigures, ReferenceReport
    from nextn.evaluate.workload import Prompt
    from nextn.model.model import Model
    from nextn.stats.intervals import Estimate

_EXIT_CODES = {"kept": 0, "fell": 1, "inconclusive": 3}  # of a comparison


@expanded("exact_head", "threads", "kv_cache_dtype")
def measure(
    *,
    num_speculative_tokens: Annotated[int, Option(*K_NAMES, help="The largest K; smaller ones are reported, too.")] = 4,
    prompts: Prompts = None,
    temperatures: Annotated[
        str | None, Option(help="Comma-separated temperatures; 0 = greedy. Default: 0,1, or that of --texts.")
    ] = None,
    max_tokens: MaxTokens = 256,
    chat: Chat = None,
    thinking: Annotated[
        bool | None,
        Option(
            "--thinking/--no-thinking",
            help="Turn thinking on or off in the chat template. Default: the template's.",
            show_default=False,
        ),
    ] = None,
    options: ModelOptions,
    min_acceptance: Annotated[
        float | None,
        Option(
            help="Exit with 1 if a_1 is below this (for CI), by the first rule of the lowest temperature; without "
            "temperatures where most texts repeat themselves."
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        Option(
            help="Record of an earlier `measure --out`, of the same prompts and settings; or acceptance lengths that "
            "others published, to show beside: InferenceX's YAML, or the matrix of `aiperf speed-bench-report`."
        ),
    ] = None,
    against: Annotated[
        str | None, Option(help="Another checkpoint to measure on the same prompts, such as the base model.")
    ] = None,
    max_drop: Annotated[
        str | None,
        Option(
            help="With --baseline or --against: exit with 1 if acceptance fell by more, with 3 if "
            "the data cannot decide. Default: 5%."
        ),
    ] = None,
    probe: Annotated[
        bool, Option("--probe", help="Try other conventions; exit with 1 if the weights fit another one better.")
    ] = False,
    form: Annotated[
        str | None,
        Option(
            "--format",
            help="Print the measurement as another tool writes it: vllm, aiperf (records of requests), aiperf-report, "
            "speculators (CSV) or inferencex (YAML).",
        ),
    ] = None,
    out: RecordFile = None,
    figure: Annotated[
        Path | None, Option(help="File for a picture of AL over K, such as curve.png; needs matplotlib.")
    ] = None,
    asked: EngineAccess,
    given_texts: GivenTextOptions,
    as_json: AsJson = False,
) -> None:
    """Measure the acceptance per depth that a checkpoint's head should reach, with intervals and negative controls."""
    from nextn.checkpoint.safetensors_file import write_json
    from nextn.evaluate.workload import prompts_record, read_prompts

    texts, engine = given_texts.texts, asked.engine
    if min_acceptance is not None and not 0 <= min_acceptance <= 1:
        raise ConfigError(f"--min-acceptance {min_acceptance}; expected a rate from 0 to 1, such as 0.6")
    if against is not None and (baseline is not None or texts is not None or engine is not None):
        message = "--against measures the other checkpoint's own texts: leave --baseline, --texts and --engine out"
        raise ConfigError(message)
    curves = () if baseline is None else read_curves(baseline)
    if max_drop is not None and (curves or (baseline is None and against is None)):
        raise ConfigError(
            f"--max-drop {max_drop}: compared with what? Give --against MODEL, or --baseline FILE of `measure --out`"
        )
    limit, earlier = _share(max_drop or "5%"), None if baseline is None or curves else read_record(baseline)
    check: Callable[[Model], None] | None = None
    given = None if temperatures is None else parse_temperatures(temperatures)
    if texts is not None and (prompts is not None or (given is not None and len(given) > 1)):
        message = "--texts replaces --prompts, and its texts are of one temperature; leave out the other options"
        raise ConfigError(message)
    if texts is not None and thinking is not None:
        raise ConfigError("--texts has its prompts as they were rendered; leave --thinking and --no-thinking out")
    rule = "block" if form is None else "argmax"  # how engines accept by default
    temperatures_or_default = given or (0.0, 1.0)
    if form is not None:
        check_form(form, temperatures_or_default, decoded=texts is None and engine is None)
        if as_json:
            raise ConfigError(f"--format {form} excludes --json: one of them is printed")
    plan = ReferencePlan(
        num_speculative_tokens, temperatures_or_default, max_tokens, chat, 0, options.backend, rule, thinking
    )
    if earlier is not None and texts is None:  # their temperature is in the file
        check_settings(earlier, asdict(plan), source=str(baseline))
    options = options.prepared()
    if options.native_only and (texts is not None or engine is not None):
        raise ConfigError(
            f"{' and '.join(options.native_only)} with --texts or --engine: the trunk reads given texts in torch, with "
            "its weights as stored; leave one of them out"
        )
    to_answer = read_prompts(prompts) if engine is None else first_turns(read_prompts(prompts))
    if curves and texts is None:
        check_shared(curves, num_speculative_tokens, [prompt.domain for prompt in to_answer])
    if figure is not None:
        check_figure(figure)
    quiet = as_json or form is not None
    endpoint = None if engine is None or texts is not None else asked.open()  # before anything that imports torch
    source = TextOptions.of(options, given_texts, asked, endpoint, quiet=quiet)
    if against is not None:  # first, so that one model is in memory at a time
        earlier, tokens = _measure_other(against, options, source, plan, to_answer)
        check = partial(_check_tokens, tokens, plan, to_answer)
    loaded, report = _measure(options, source, plan, to_answer, check)
    report = replace(report, prompts_source={} if texts is not None else prompts_record(prompts, to_answer))
    probed = _probe(report, loaded, options, quiet=quiet) if probe else None
    if long := loaded.length_note(report.num_positions):
        print_note(long)
    record = report.to_dict() | ({} if probed is None else {"probe": probed.as_record()})
    beside = report.beside(curves)
    if beside is not None:
        record |= {"published": beside[0].as_record(beside[1])}
    elif curves:
        print_note(f"--baseline {baseline}: no K and no category of it was measured")
    if out is not None:
        write_json(out, record)
    if figure is not None:
        draw_curves(report, figure)
    if form is not None:
        echo(exchange_text(report, form, source=report.source, prompts=report.prompts_text).rstrip("\n"))
        if form == "inferencex" and (difference := inferencex_note(report, report.prompts_source.get("category"))):
            print_note(difference)
    elif not as_json:
        show_reference(report)
    if (published := beside or report.published) is not None and not quiet:
        print_published(published)
    if probed is not None and not quiet:
        show_probe(probed)
    compared = None
    if earlier is not None:
        compared = AcceptanceChange.of(earlier, record, source=str(against or baseline), limit=limit)
        _show_comparison(compared, quiet=quiet)
    if as_json:
        print_json(record | ({} if compared is None else {"comparison": compared.as_record()}))
    if min_acceptance is not None:
        _require(report, min_acceptance)
    if probed is not None and probed.is_fault:
        raise typer.Exit(1)
    if compared is not None:
        raise typer.Exit(_EXIT_CODES[compared.outcome])


def _measure(
    options: ModelOptions,
    source: TextOptions,
    plan: ReferencePlan,
    prompts: "Sequence[Prompt]",
    check: "Callable[[Model], None] | None" = None,
) -> "tuple[Model, ReferenceReport]":
    from nextn.evaluate.reference import with_checkpoint

    loaded, report = measure_acceptance(options, source, plan, prompts, check)
    report = with_checkpoint(report, loaded, options.source, head=options.head)
    return loaded, replace(report, source=options.given)


def _measure_other(
    against: str, options: ModelOptions, source: TextOptions, plan: ReferencePlan, prompts: "Sequence[Prompt]"
) -> "tuple[dict[str, object], list[tuple[int, ...]]]":
    """Measure the other checkpoint; return the record, and the prompts' tokens. Its errors name it."""
    from nextn.evaluate.reference_texts import prompt_tokens

    try:
        other = replace(options, source=shipped_path(against), head=None).prepared()
        loaded, report = _measure(other, source, plan, prompts)
    except NextnError as error:
        raise type(error)(f"--against {against}: {error}") from error
    return report.to_dict(), [prompt_tokens(loaded, prompt, plan) for prompt in prompts]


def _check_tokens(
    expected: "Sequence[tuple[int, ...]]", plan: ReferencePlan, prompts: "Sequence[Prompt]", model: "Model"
) -> None:
    """Refuse a checkpoint to which the prompts are other tokens than to the one that it is compared with."""
    from nextn.evaluate.reference_texts import prompt_tokens

    pairs = zip(prompts, expected, strict=True)
    others = [prompt for prompt, ids in pairs if prompt_tokens(model, prompt, plan) != ids]
    if others:
        share = f"{len(others)} of {len(prompts)} prompts"
        raise ConfigError(f"--against: {share} are other tokens to the other checkpoint: {OTHER_TOKENS}")


def _probe(report: "ReferenceReport", model: "Model", options: ModelOptions, *, quiet: bool) -> "ProbeReport":
    from nextn.evaluate.conventions import stored_copies
    from nextn.evaluate.probe import probe, truncate_texts
    from nextn.evaluate.reference import stored_in
    from nextn.evaluate.reference_texts import generate_texts

    sampled = [generated for temperature, generated in report.generated.items() if temperature]
    if report.stream is not None and not sampled:
        raise ConfigError("--probe: conventions are compared on sampled texts; give --texts of a temperature above 0")
    prompts = [text.prompt for each in report.generated.values() for text in each.texts][: len(report.prompts)]
    generated = sampled[0] if sampled else generate_texts(model, prompts, report.plan, 1.0)
    with progress_bars(quiet=quiet) as progress:
        step = progress("conventions", None)
        copies = {} if options.head is not None else stored_copies(stored_in(model, report.source), model)
        return probe(
            model, truncate_texts(generated.texts), report.plan.num_speculative_tokens, copies=copies, on_score=step
        )


def _share(text: str) -> float:
    """Parse a share, such as 5% or 0.05."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ConfigError(f"--max-drop {text}; expected a share between 0 and 1, such as 5% or 0.05")
    return value


def _show_comparison(compared: AcceptanceChange, *, quiet: bool) -> None:
    """Show every figure beside the earlier one, and the conclusion; if quiet, only that, on standard error."""
    if not quiet:
        title = f"against {compared.source}"
        table = figures_table(title, "before", "now", "change", "perfect head", "", left=("", title), no_wrap=False)
        for drop in compared.drops:
            changed = 0.0 - drop.value  # not -0.0
            low, high = max(-1.0, changed - drop.half_width), changed + drop.half_width
            change = f"{changed:+.1%} ({low:+.1%} to {high:+.1%})"
            # Of later drafts it is on other positions: those where the head's own earlier drafts were accepted.
            ceiling = f"{drop.ceiling:.3f}" if drop.figure in ("a_1", "AL") else ""
            values = (f"{drop.before:.3f}", f"{drop.now:.3f}", change, ceiling)
            table.add_row(plain(drop.label), *values, "fell" if drop in compared.fallen else "")
        print_table(table)
        for temperature in set(compared.degenerate) - {drop.temperature for drop in compared.drops}:
            print_note(f"temperature {temperature:g} is not compared: most of its texts are degenerate (repetitive)")
        echo(
            f"threshold {compared.limit:.1%} (--max-drop): speed falls by no more than AL does; perfect head: one "
            "that has the trunk's own distribution"
        )
    echo(compared.conclusion, err=quiet)


def _require(report: "ReferenceReport", minimum: float) -> None:
    temperature = report.main_temperature
    rate = report.figures(temperature).rates[0].value
    if not rate >= minimum:
        echo(f"a_1 = {rate:.3f} at temperature {temperature:g} is below --min-acceptance {minimum:g}", err=True)
        raise typer.Exit(1)


def show_reference(report: "ReferenceReport") -> None:
    """Print acceptance per depth, AL over K, the controls and the notes."""
    depths = range(1, report.plan.num_speculative_tokens + 1)
    rates = figures_table("rule", "texts", *(f"a_{k}" for k in depths), left=("rule",))
    for temperature in report.plan.temperatures:
        for label, by_k, style in _rows(report, temperature):
            num_texts = str(by_k[-1].num_texts)
            rates.add_row(plain(label), num_texts, *(each.as_text() for each in by_k[-1].rates), style=style)
        rates.add_section()
    print_table(rates)
    show_lengths(report)
    if (controls := report.controls) is not None:
        print_lines(
            f"controls, greedy where measured: a_1 over all positions {controls.all_positions:.2f}; shifted targets "
            f"{controls.shifted:.2f}, shuffled hidden states {controls.shuffled:.2f}, by chance {controls.chance:.2f}; "
            f"median rank of the actual token {controls.median_rank:.0f} of {controls.vocab_size}"
        )
    largest = report.plan.num_speculative_tokens
    where = f"rules and intervals (95 %, by text): {docs_page('reference/measure')}"
    print_lines(
        f"a_k at K = {largest}; AL@k of rounds of k drafts, on the same texts",
        *([f"texts of {report.text_source}{_streamed(report)}"] if report.text_source else []),
        f"{report.scoring_pass} pass, {report.family}; {where}",
        *(f"note: {warning}" for warning in report.warnings),
    )


def show_lengths(report: "ReferenceReport", *, rule: str | None = None) -> None:
    """Print AL over K, and what the curves say; with a rule, by it alone where there are several."""
    largest, title = report.plan.num_speculative_tokens, "mean acceptance length"
    table, curves = figures_table(title, *(f"AL@{k}" for k in range(1, largest + 1)), left=(title,)), []
    for temperature in report.plan.temperatures:
        rules = report.rules(temperature)
        chosen = rule if rule in rules else rules[0]
        for label, by_k, style in _rows(report, temperature, rule=rule):
            table.add_row(plain(label), *[""] * (largest - len(by_k)), *map(_length, by_k), style=style)
        table.add_section()
        if (curve := report.curve(temperature, rule=chosen)) is not None:
            curves.append(f"{_label(temperature, chosen)}: {curve.summary}")
    print_table(table)
    print_lines(*curves)


def _rows(
    report: "ReferenceReport", temperature: float, *, rule: str | None = None
) -> "Iterator[tuple[str, Sequence[AcceptanceFigures], str | None]]":
    """Yield label, figures by K (or of the largest alone) and style: by rule, and of the first by domain and part.

    rule: The only one where there are several; None for all.
    """
    from nextn.evaluate.teacher_forced import PERFECT

    largest, all_rules = report.plan.num_speculative_tokens, report.rules(temperature)
    choices = range(1, largest + 1) if temperature in report.scored else [largest]
    rules = [rule] if rule in all_rules else all_rules
    for each in rules:
        yield _label(temperature, each), [report.figures(temperature, rule=each, k=k) for k in choices], None
        if each == "argmax" and temperature in report.perfect:
            yield "  perfect head", [report.figures(temperature, rule=PERFECT, k=k) for k in choices], "dim"
        if each != rules[0]:
            continue
        for domain in report.domains_at(temperature):
            yield f"  {domain}", [report.figures(temperature, rule=each, k=k, domain=domain) for k in choices], "dim"
        if each != all_rules[0]:
            continue
        for part in zip(*(report.parts(temperature, k) for k in choices), strict=True):
            yield f"  {part[0].domain}", part, "dim"


def _label(temperature: float, rule: str) -> str:
    return rule if rule == "greedy" else f"T={temperature:g} {rule}"


def _length(figures: "AcceptanceFigures") -> str:
    length = figures.bounded_length
    return rate_text(length.value) + ("" if length.low != length.low else f" ({length.low:.2f}-{length.high:.2f})")


def draw_curves(report: "ReferenceReport", path: Path, *, rule: str | None = None) -> None:
    """Draw AL over K of every rule, or one of several, domain and part."""
    from nextn.stats import plots

    curves: dict[str, list[Estimate]] = {}
    name = ""
    for temperature in report.plan.temperatures:
        for label, by_k, _ in _rows(report, temperature, rule=rule):
            part = label.strip() if label.startswith(" ") else ""  # of every temperature one has this name
            name = name if part else label
            curves[f"{name}, {part}" if part else name] = [each.bounded_length for each in by_k]
    plots.curves(path, curves)


def _streamed(report: "ReferenceReport") -> str:
    if report.stream is None or report.machine is None:
        return ""
    read, peak = cast(int, report.stream["num_bytes"]) / 1e9, report.machine.peak_memory / 1e9
    return f"; trunk streamed: {read:.1f} GB read in {report.stream['seconds']:.0f} s, peak memory {peak:.1f} GB"


def show_probe(probed: "ProbeReport") -> None:
    """Print the conventions that were tried, best first, and the conclusion."""
    depths = range(1, len(probed.base.rates) + 1)
    table = figures_table(
        "convention", *(f"a_{k}" for k in depths), "accepted per position", "difference", left=("convention",)
    )
    shown_pairs = (probed.best(), probed.preferred)
    scores = [score for score in probed.alternatives if len(score.keys) == 1 or score in shown_pairs]
    for score in sorted([probed.base, *scores], key=lambda score: -score.accepted_per_position()):
        more = probed.gain(score, probed.base)
        rates = ["" if rate != rate else f"{rate:.2f}" for rate in score.rates]
        difference = f"{more.value:+.2f} ({more.low:+.2f} to {more.high:+.2f})" if score.keys else ""
        style = "bold" if score == probed.preferred else None
        accepted = f"{score.accepted_per_position():.2f}"
        table.add_row(plain(score.description), *rates, accepted, difference, style=style)
    print_table(table)
    print_lines(f"probe: {probed.summary}")
    if probed.ties:
        ties = "; ".join(score.description for score in probed.ties)
        print_lines(f"these accept as many drafts as that convention on these texts: {ties}")
