"""`nextn diagnose`: why an engine's acceptance is lower than the reference.

Exit codes: 0 fine, 1 findings, 2 nothing to compare, 3 too few data to decide.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.check_report import show_report
from nextn.cli.common import (
    K_NAMES,
    AsJson,
    Chat,
    EngineAccess,
    MaxTokens,
    ModelOptions,
    Prompts,
    RecordFile,
    RequestLimits,
    Temperatures,
    expanded,
    first_turns,
    parse_temperatures,
    print_published,
    published_record,
)
from nextn.cli.screen import figures_table, plain, print_json, print_lines, print_table, progress_bars, shown
from nextn.cli.streaming import GivenTextOptions, TextOptions, engine_folder, measure_answers
from nextn.errors import ConfigError
from nextn.evaluate.workload import ReferencePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.diagnose import Diagnosis
    from nextn.evaluate.engine_probe import EngineFolder
    from nextn.evaluate.engine_run import EngineObservation
    from nextn.evaluate.likelihoods import Cause
    from nextn.evaluate.workload import Prompt
    from nextn.model.model import Model

_EXIT_CODES = {"passed": 0, "failed": 1, "inconclusive": 3}
_MAX_FLAGS = 1024 * 1024  # bytes
_MAX_CAUSES = 6  # shown in the table, besides all that are named


@expanded("exact_head", "weights", "threads", "kv_cache_dtype", "device_map", "offload_folder", "texts")
def diagnose(
    *,
    engine: Annotated[
        str, typer.Option(help="Address of a running engine, or a file with its metrics, log or JSON counters.")
    ],
    drive: Annotated[
        bool, typer.Option("--drive", help="Send the reference's own prompts to the engine and read its counters.")
    ] = False,
    prompts: Prompts = None,
    flags: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE",
            help="The engine's command line and environment: K, and settings that force acceptance, are read from it.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(*K_NAMES, help="K. Default: from the engine's counters or --flags, if they show it.")
    ] = None,
    temperatures: Temperatures = "0",
    rule: Annotated[
        str, typer.Option(help="Acceptance rule of the engine above temperature 0: ratio, argmax or block.")
    ] = "ratio",
    max_tokens: MaxTokens = 256,
    chat: Chat = None,
    own_template: Annotated[
        bool, typer.Option("--own-template", help="With --drive: send text through the engine's own chat template.")
    ] = False,
    served: Annotated[str | None, typer.Option(help="Model name, if the engine serves several.")] = None,
    seed: int = 0,
    options: ModelOptions,
    limits: RequestLimits,
    given: GivenTextOptions,
    out: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Name the most likely causes of an engine's low acceptance, from its own counters and the checkpoint."""
    from nextn.checkpoint.safetensors_file import write_json
    from nextn.engines.endpoint import Endpoint
    from nextn.engines.run_settings import with_settings
    from nextn.evaluate.workload import prompts_record, prompts_text, read_prompts

    k = 4 if num_speculative_tokens is None else num_speculative_tokens  # until the engine's counters show it
    plan = ReferencePlan(k, parse_temperatures(temperatures), max_tokens, chat, seed, options.backend, rule)
    options = options.prepared()
    texts, budget = read_prompts(prompts), limits.budget()
    texts = first_turns(texts) if drive else texts
    source = TextOptions.of(options, given, EngineAccess(engine), quiet=as_json)
    _check_texts(plan, source, drive=drive, own_template=own_template)
    from nextn.evaluate.diagnose import observed_plan
    from nextn.evaluate.engine_run import EngineObservation, read_engine_counters

    if drive:
        target = Endpoint.open(engine, budget, model=served, key_env=limits.key_env, chat=own_template)
        loaded, observed, stored = _drive(target, options, source, plan, texts)
    else:
        stored = None
        counters = read_engine_counters(engine, budget, served=served, key_env=limits.key_env)
        loaded = options.load(need_head=True)
        observed = [EngineObservation(plan.temperatures[0], counters)]
    observed = [replace(each, counters=with_settings(each.counters, _flag_texts(flags))) for each in observed]
    plan = observed_plan(observed, plan, num_speculative_tokens)
    diagnosis = _compare(loaded, options, observed, source, plan, texts)
    if stored is not None:  # the next diagnosis is of what the engine does then
        stored.remove()
    published = diagnosis.reference.published(options.source, prompts_text(prompts_record(prompts, texts)))
    record = diagnosis.to_dict() | published_record(published)
    if out is not None:
        write_json(out, record)
    if as_json:
        print_json(record)
    else:
        _show_diagnosis(diagnosis)
        if published is not None:
            print_published(published)
    raise typer.Exit(_EXIT_CODES[diagnosis.outcome])


def _flag_texts(flags: str | None) -> list[str]:
    """The text of --flags, or of the file that it names."""
    if flags is None:
        return []
    path = Path(flags)
    try:
        return [path.read_bytes()[:_MAX_FLAGS].decode(errors="replace") if path.is_file() else flags]
    except (OSError, ValueError):  # longer than a path, or with NUL
        return [flags]


def _check_texts(plan: ReferencePlan, source: TextOptions, *, drive: bool, own_template: bool) -> None:
    """Raise ConfigError for texts that engine and reference cannot have in common."""
    if not drive and len(plan.temperatures) > 1:
        given = ",".join(f"{temperature:g}" for temperature in plan.temperatures)
        raise ConfigError(
            f"--temperatures {given}: the engine's counters are of one temperature; name it, or use --drive"
        )
    if source.is_streamed and (not drive or own_template):
        raise ConfigError(
            f"a streamed trunk ({source.reason}) cannot generate, so the texts are the engine's answers to prompts of "
            "token ids: add --drive, and leave --own-template out; --no-stream loads the model in any case"
        )


def _drive(
    target: "Endpoint", options: ModelOptions, source: TextOptions, plan: ReferencePlan, prompts: "Sequence[Prompt]"
) -> "tuple[Model, list[EngineObservation], EngineFolder | None]":
    """Load the model, send the prompts to the engine and read its counters.

    Returns also the folder of what it answered, where the trunk is streamed: that may take long, and be interrupted.
    """
    from nextn.evaluate.engine_run import drive_engine
    from nextn.evaluate.reference_texts import prompt_tokens

    loaded = options.load(need_head=True, stream=source.is_streamed, shards=source.shards)
    stored = None
    if source.is_streamed:
        ids = [prompt_tokens(loaded, prompt, plan) for prompt in prompts]
        settings = [*map(str, plan.temperatures), plan.max_tokens, plan.seed]
        stored = engine_folder(target, source, ids, "diagnose", settings)
    with progress_bars(quiet=source.quiet) as progress:
        step = progress("requests", len(prompts) * len(plan.temperatures))
        folder = None if stored is None else stored.path
        return loaded, drive_engine(target, loaded, prompts, plan, on_answer=step, folder=folder), stored


def _compare(
    model: "Model",
    options: ModelOptions,
    observed: "Sequence[EngineObservation]",
    source: TextOptions,
    plan: ReferencePlan,
    prompts: "Sequence[Prompt]",
) -> "Diagnosis":
    """Measure the reference, on the engine's answers where the trunk is streamed, and compare the engine with it."""
    from nextn.evaluate.diagnose import audit_lines, diagnose
    from nextn.evaluate.faults import FAULTS

    reference = measure_answers(model, observed, source, plan, prompts) if source.is_streamed else None
    with progress_bars(quiet=source.quiet) as progress:
        return diagnose(
            model,
            prompts,
            observed,
            plan,
            source=options.source,
            reference=reference,
            audit_notes=audit_lines(options.source),
            on_text=progress("reference", 0 if source.is_streamed else len(prompts) * len(plan.temperatures)),
            on_fault=progress("faults", len(FAULTS)),
        )


def _show_diagnosis(diagnosis: "Diagnosis") -> None:
    depths = range(1, diagnosis.reference.plan.num_speculative_tokens + 1)
    table = figures_table("", *(f"a_{k}" for k in depths), "AL", "likelihood", "fit")
    several = len(diagnosis.cases) > 1
    for case in diagnosis.cases:
        seen = case.observation
        label = f"{_engine_name(diagnosis)}, {_where(seen.temperature, seen.prompt_indices, several=several)}"
        rates = [f"{rate:.3f}" if rate == rate else "" for rate in case.counts.rates]
        rates += [""] * (len(depths) - len(rates))  # an engine may have counted fewer depths in this case
        table.add_row(plain(label), *rates, f"{1 + case.num_accepted:.2f}", "", "", style="bold")
    table.add_section()
    always = ("fine", *diagnosis.named)
    others = [cause for cause in diagnosis.causes[_MAX_CAUSES:] if cause.name in always]
    for cause in [*diagnosis.causes[:_MAX_CAUSES], *others]:
        style = "bold" if cause.name in diagnosis.named else None
        rates = [f"{rate:.3f}" for rate in cause.rates]
        table.add_row(plain(cause.name), *rates, f"{cause.length:.2f}", _odds(cause), _fit(cause), style=style)
    print_table(table)
    show_report(diagnosis)
    if diagnosis.indistinguishable:
        print_lines(f"these counts do not tell it from: {', '.join(diagnosis.indistinguishable)}")
    for number, check in enumerate(diagnosis.next_checks, 1):
        print_lines(f"{'check next, cheapest first' if number == 1 else ''}  {number}. {check}")
    print_lines(*(f"note: {shown(note)}" for note in diagnosis.notes))


def _where(temperature: float, prompts: "tuple[int, ...] | None", *, several: bool) -> str:
    at = "greedy" if not temperature else f"T={temperature:g}"
    return at if not several or prompts is None else f"{at}, {len(prompts)} prompts"


def _engine_name(diagnosis: "Diagnosis") -> str:
    version = diagnosis.cases[0].observation.counters.version
    return f"{diagnosis.engine} {version}" if version else diagnosis.engine


def _odds(cause: "Cause") -> str:
    """The likelihood relative to the most likely cause."""
    return "1" if cause.ratio == 1 else f"1/{1 / cause.ratio:.3g}" if cause.ratio >= 1e-6 else "<1e-6"


def _fit(cause: "Cause") -> str:
    return f"{cause.p_value:.2f}" if cause.p_value >= 0.01 else "<0.01"
