"""`nextn measure`: the acceptance that a head should reach, by the weights alone."""

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import (  # fmt: skip
    K_NAMES,
    AsJson,
    BackendName,
    CacheDir,
    Chat,
    Concurrency,
    Device,
    DeviceMap,
    Dtype,
    Engine,
    EngineAccess,
    KeyEnv,
    KVCacheDtype,
    MaxTokens,
    ModelName,
    ModelOptions,
    Offline,
    OffloadFolder,
    Prompts,
    RecordFile,
    Revision,
    SeparateHead,
    Served,
    Threads,
    Timeout,
    WeightType,
    check_figure,
    first_turns,
    parse_temperatures,
    print_published,
    published_record,
    shipped_path,
)
from nextn.cli.measure_tables import draw_curves, show_probe, show_reference
from nextn.cli.screen import echo, plain, print_json, print_note, print_table, progress_bars
from nextn.cli.streaming import (
    KeepShards,
    States,
    Stream,
    TextOptions,
    Texts,
    measure_acceptance,
    opened,
)
from nextn.errors import ConfigError
from nextn.evaluate.acceptance_drop import AcceptanceChange, check_settings, read_record
from nextn.evaluate.exchange import check_form, exchange_text, inferencex_note
from nextn.evaluate.workload import ReferencePlan
from nextn.settings import WEIGHT_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nextn.evaluate.probe import ProbeReport
    from nextn.evaluate.reference_report import ReferenceReport
    from nextn.evaluate.workload import Prompt
    from nextn.model.model import Model


def measure(
    model: ModelName,
    num_speculative_tokens: Annotated[
        int, typer.Option(*K_NAMES, help="The largest K; smaller ones are reported, too.")
    ] = 4,
    prompts: Prompts = None,
    temperatures: Annotated[
        str | None,
        typer.Option(help="Comma-separated temperatures; 0 = greedy. Default: 0,1, or that of --texts."),
    ] = None,
    max_tokens: MaxTokens = 256,
    chat: Chat = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Turn thinking on or off in the chat template. Default: the template's.",
            show_default=False,
        ),
    ] = None,
    seed: int = 0,
    dtype: Dtype = "auto",
    backend: BackendName = "auto",
    weights: WeightType = "stored",
    threads: Threads = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_folder: OffloadFolder = None,
    head: SeparateHead = None,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    offline: Offline = False,
    min_acceptance: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if a_1 is below this (for CI), by the first rule of the lowest temperature; without "
            "temperatures where most texts repeat themselves."
        ),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Record of an earlier `measure --out`, of the same prompts and settings.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Another checkpoint to measure on the same prompts, such as the base model."),
    ] = None,
    max_drop: Annotated[
        str | None,
        typer.Option(help="With --baseline or --against: exit with 1 if acceptance fell by more. Default: 5%."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Try other conventions; exit with 1 if the weights fit another one better.")
    ] = False,
    model_card: Annotated[bool, typer.Option("--model-card", help="Print Markdown for a model card.")] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Print the measurement as another tool writes it: vllm, aiperf (records of requests), aiperf-report, "
            "speculators (CSV) or inferencex (YAML).",
        ),
    ] = None,
    out: RecordFile = None,
    figure: Annotated[
        Path | None, typer.Option(help="File for a picture of AL over K, such as curve.png; needs matplotlib.")
    ] = None,
    engine: Engine = None,
    served: Served = None,
    concurrency: Concurrency = 8,
    timeout: Timeout = 600,
    key_env: KeyEnv = None,
    texts: Texts = None,
    stream: Stream = None,
    states: States = None,
    keep_shards: KeepShards = None,
    as_json: AsJson = False,
) -> None:
    """Measure the acceptance per depth that a checkpoint's head should reach, with intervals and negative controls."""
    from nextn.checkpoint.safetensors_file import write_json
    from nextn.evaluate.workload import prompts_record, prompts_text, read_prompts

    if min_acceptance is not None and not 0 <= min_acceptance <= 1:
        raise ConfigError(f"--min-acceptance {min_acceptance}; expected a rate from 0 to 1, such as 0.6")
    if against is not None and (baseline is not None or texts is not None or engine is not None):
        raise ConfigError(
            "--against measures the other checkpoint's own texts: leave --baseline, --texts and --engine out"
        )
    if max_drop is not None and baseline is None and against is None:
        raise ConfigError(f"--max-drop {max_drop}: compared with what? Give --baseline FILE or --against MODEL")
    limit, earlier = _share(max_drop or "5%"), None if baseline is None else read_record(baseline)
    given = None if temperatures is None else parse_temperatures(temperatures)
    if texts is not None and (prompts is not None or (given is not None and len(given) > 1)):
        raise ConfigError(
            "--texts replaces --prompts, and its texts are of one temperature; leave out the other options"
        )
    if texts is not None and thinking is not None:
        raise ConfigError("--texts has its prompts as they were rendered; leave --thinking and --no-thinking out")
    rule = "block" if form is None else "argmax"  # how engines accept by default
    temperatures_or_default = given or (0.0, 1.0)
    if form is not None:
        check_form(form, temperatures_or_default, decoded=texts is None and engine is None)
        if as_json or model_card:
            raise ConfigError(f"--format {form} excludes --json and --model-card: one of them is printed")
    plan = ReferencePlan(
        num_speculative_tokens, temperatures_or_default, max_tokens, chat, seed, backend, rule, thinking
    )
    if earlier is not None and texts is None:  # their temperature is in the file
        check_settings(earlier, asdict(plan), source=str(baseline))
    options = ModelOptions.of(locals()).prepared()
    if options.native_only and (texts is not None or engine is not None):
        raise ConfigError(
            f"{' and '.join(options.native_only)} with --texts or --engine: the trunk reads given texts in torch, with "
            "its weights as stored and no quantized cache; leave one of them out"
        )
    to_answer = read_prompts(prompts) if engine is None else first_turns(read_prompts(prompts))
    if figure is not None:
        check_figure(figure)
    asked, quiet = (
        EngineAccess(engine or "", served, concurrency, timeout, key_env),
        as_json or model_card or form is not None,
    )
    source = TextOptions.of(options, texts, asked, stream=stream, states=states, quiet=quiet, shards=keep_shards)
    if against is not None:  # first, so that one model is in memory at a time
        other = replace(options, source=shipped_path(against), head=None, revision=None).prepared()
        earlier = _measure(other, source, plan, to_answer)[1].as_record()
    loaded, report = _measure(options, source, plan, to_answer)
    probed = _probe(report, loaded, options, quiet=quiet) if probe else None
    if long := loaded.length_note(report.num_positions):
        print_note(long)
    origin = {} if texts is not None else prompts_record(prompts, to_answer)
    prompts_words = prompts_text(origin) if origin else str(texts)
    published = report.published(options.source, prompts_words)
    record = (
        report.as_record()
        | ({"prompts": origin} if origin else {})
        | published_record(published)
        | ({} if probed is None else {"probe": probed.as_record()})
    )
    if out is not None:
        write_json(out, record)
    if figure is not None:
        draw_curves(report, figure)
    if form is not None:
        echo(exchange_text(report, form, source=options.source, prompts=prompts_words).rstrip("\n"))
        if form == "inferencex" and (difference := inferencex_note(report, origin.get("category"))) is not None:
            print_note(difference)
    elif not as_json:
        (_show_model_card if model_card else show_reference)(report)
    if published is not None and not quiet:
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
    if (compared and compared.fallen) or (probed is not None and probed.is_fault):
        raise typer.Exit(1)


def _measure(
    options: ModelOptions, source: TextOptions, plan: ReferencePlan, prompts: "Sequence[Prompt]"
) -> "tuple[Model, ReferenceReport]":
    from nextn.evaluate.decoding_costs import Machine
    from nextn.evaluate.reference_report import checkpoint_hashes

    loaded, report = measure_acceptance(options, source, plan, prompts)
    hashes = checkpoint_hashes(opened(loaded, options.source), head=options.head, **options.hub)
    machine = Machine.of(loaded, weight_bits=WEIGHT_BITS[loaded.trunk.weights])
    return loaded, replace(report, source=options.source, hashes=hashes, machine=machine)


def _show_model_card(report: "ReferenceReport") -> None:
    from nextn.evaluate.model_card import model_card

    echo(model_card(report, command=shlex.join(["nextn", *sys.argv[1:]])))


def _probe(report: "ReferenceReport", model: "Model", options: ModelOptions, *, quiet: bool) -> "ProbeReport":
    from nextn.evaluate.conventions import stored_copies
    from nextn.evaluate.probe import probe, truncate_texts
    from nextn.evaluate.reference_texts import generate_texts

    sampled = [generated for temperature, generated in report.generated.items() if temperature]
    if report.stream is not None and not sampled:
        raise ConfigError("--probe: conventions are compared on sampled texts; give --texts of a temperature above 0")
    prompts = [text.prompt for generated in report.generated.values() for text in generated.texts][
        : len(report.prompts)
    ]
    generated = sampled[0] if sampled else generate_texts(model, prompts, report.plan, 1.0)
    with progress_bars(quiet=quiet) as progress:
        step = progress("conventions", None)
        copies = {} if options.head is not None else stored_copies(opened(model, report.source), model, **options.hub)
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
    from rich.table import Table

    if not quiet:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in (f"against {compared.source}", "before", "now", "change", "perfect head", ""):
            table.add_column(plain(title), justify="left" if title in ("", f"against {compared.source}") else "right")
        for drop in compared.drops:
            changed = 0.0 - drop.value  # not -0.0
            low, high = changed - drop.half_width, changed + drop.half_width
            change = f"{changed:+.1%} ({low:+.1%} to {high:+.1%})"
            values = (f"{drop.before:.3f}", f"{drop.now:.3f}", change, f"{drop.ceiling:.3f}")
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
    """Exit with code 1 if a_1 is below the minimum or could not be measured."""
    temperature = report.main_temperature
    rate = report.figures(temperature).rates[0].value
    if not rate >= minimum:
        echo(f"a_1 = {rate:.3f} at temperature {temperature:g} is below --min-acceptance {minimum:g}", err=True)
        raise typer.Exit(1)
