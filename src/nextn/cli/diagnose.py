"""`nextn diagnose`: why an engine's acceptance is lower than the reference.

Exit codes: 0 no fault, 1 findings, 2 nothing to compare, 3 too few data to decide.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from nextn.cli.common import (
    K_NAMES,
    AsJson,
    Chat,
    EngineTest,
    MaxTokens,
    Prompts,
    RecordFile,
    Temperatures,
    Thinking,
    expanded,
    first_turns,
    parse_temperatures,
    print_published,
)
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars
from nextn.cli.screen import figures_table, plain, print_json, print_lines, print_table, show_report, shown
from nextn.cli.streaming import GivenTextOptions, TextOptions, engine_folder, measure_answers
from nextn.errors import ConfigError
from nextn.evaluate.workload import Prompt, ReferencePlan, num_turns, prompts_record, read_prompts

if TYPE_CHECKING:
    from nextn.engines.counters import Counters
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.diagnose import Diagnosis
    from nextn.evaluate.engine_run import EngineObservation
    from nextn.evaluate.likelihoods import Cause

_EXIT_CODES = {"passed": 0, "failed": 1, "inconclusive": 3}
_MAX_CAUSES = 6  # shown in the table, besides all that are named


@expanded(
    "exact_head", "weights", "threads", "kv_cache_dtype", "device_map", "texts", "engine", "concurrency", source="",
)  # fmt: skip
def diagnose(
    *,
    context: typer.Context,
    engine: Annotated[
        str | None,
        Option(
            help="Address of a running engine, or a file with its metrics, log or JSON counters (- is standard input); "
            "with #MODEL at its end if the engine serves several.",
            show_default=False,
        ),
    ] = None,
    drive: Annotated[
        bool, Option("--drive", help="Send the reference's own prompts to the engine and read its counters.")
    ] = False,
    prompts: Prompts = None,
    flags: Annotated[
        str | None,
        Option(
            metavar="TEXT|FILE",
            help="The engine's command line and environment: K, and settings that force acceptance, are read from it.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, Option(*K_NAMES, help="K. Default: from the engine's counters or --flags, if they show it.")
    ] = None,
    temperatures: Temperatures = "0",
    rule: Annotated[
        str, Option(help="Acceptance rule of the engine above temperature 0: ratio, argmax or block.")
    ] = "ratio",
    max_tokens: MaxTokens = 256,
    chat: Chat = None,
    thinking: Thinking = None,
    own_template: Annotated[
        bool, Option("--own-template", help="With --drive: send text through the engine's own chat template.")
    ] = False,
    options: ModelOptions,
    asked: EngineTest,
    given: GivenTextOptions,
    out: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Name the most likely causes of an engine's low acceptance, from its own counters and the checkpoint.

    Without MODEL, it shows what the counters alone say.
    """
    from nextn.checkpoint.base_model import base_model
    from nextn.checkpoint.checkpoint import as_checkpoint
    from nextn.cli.counted import refuse_options_of_a_model, show_counts

    if engine is None:
        raise ConfigError(_without_engine(options.source))
    if not options.source:
        refuse_options_of_a_model(context)
        budget = replace(asked, engine=engine).budget()
        code = show_counts(engine, budget, flags, num_speculative_tokens, out=out, as_json=as_json)
        raise typer.Exit(code)
    k = 4 if num_speculative_tokens is None else num_speculative_tokens  # until the engine's counters show it
    plan = ReferencePlan(k, parse_temperatures(temperatures), max_tokens, chat, 0, options.backend, rule, thinking)
    options = options.prepared(need_head=True)
    texts, asked = read_prompts(prompts), replace(asked, engine=engine)
    texts = first_turns(texts) if drive else texts
    # Before anything that imports torch.
    target = asked.open(chat=own_template) if drive else _counted(asked, plan, num_speculative_tokens, flags)
    source = TextOptions.of(options, given, asked, quiet=as_json)
    if source.is_streamed and (not drive or own_template):
        raise ConfigError(
            f"a streamed trunk ({source.reason}) cannot generate, so the texts are the engine's answers to prompts of "
            "token ids: add --drive, and leave --own-template out; --no-stream loads the model in any case"
        )
    diagnosis = _diagnose(target, options, source, plan, texts, num_speculative_tokens, flags)
    base = base_model(as_checkpoint(options.source))
    reference = replace(diagnosis.reference, prompts_source=prompts_record(prompts, texts), base_model=base)
    diagnosis = replace(diagnosis, reference=reference)
    _report(diagnosis, out, as_json=as_json)
    raise typer.Exit(130 if diagnosis.untested else _EXIT_CODES[diagnosis.outcome])


def _without_engine(source: str) -> str:
    """Return what to do where no engine was named, but a model, its log or nothing."""
    name = shlex.quote(source or "MODEL")
    is_log = Path(source).is_file() and Path(source).suffix not in (".safetensors", ".gguf")
    if is_log or ":" in source:
        return (
            f"{source}: for what this engine counted, `nextn diagnose --engine {name}`, with MODEL first to compare it"
        )
    return (
        f"--engine is missing: an engine's HOST:PORT, or a file with its log, metrics or counters. Without an engine, "
        f"`nextn measure {name}` shows the acceptance of the head, `nextn audit {name}` its files"
    )


def _counted(
    asked: EngineTest, plan: ReferencePlan, num_speculative_tokens: int | None, flags: str | None
) -> "Counters":
    """Return what the engine has counted so far."""
    from nextn.evaluate.engine_counters import check_temperatures, counted_so_far

    check_temperatures(plan)
    return counted_so_far(asked.url, asked.budget(), num_speculative_tokens, flags)


def _report(diagnosis: "Diagnosis", out: Path | None, *, as_json: bool) -> None:
    """Write the record, and print it or the table."""
    from nextn.checkpoint.safetensors_file import write_json

    record = diagnosis.to_dict()
    if out is not None:
        write_json(out, record)
    if as_json:
        print_json(record)
        return
    _show_diagnosis(diagnosis)
    if diagnosis.reference.published is not None:
        print_published(diagnosis.reference.published)


def _diagnose(
    target: "Endpoint | Counters",
    options: ModelOptions,
    source: TextOptions,
    plan: ReferencePlan,
    prompts: Sequence[Prompt],
    num_speculative_tokens: int | None,
    flags: str | None,
) -> "Diagnosis":
    """Load the model, observe the engine, and compare it with the reference.

    Where the trunk is streamed, the reference is measured on the engine's answers. These are stored until the end, as
    it may take long, and be interrupted.
    """
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.diagnose_engine import audit_lines, compare, observe
    from nextn.evaluate.faults import FAULTS
    from nextn.evaluate.reference_texts import prompt_tokens

    loaded = options.load(need_head=True, stream=source.is_streamed)
    stored, num_texts = None, num_turns(prompts) * len(plan.temperatures)
    if source.is_streamed and isinstance(target, Endpoint):
        ids = [prompt_tokens(loaded, prompt, plan) for prompt in prompts]
        settings = [*map(str, plan.temperatures), plan.max_tokens, plan.seed]
        stored = engine_folder(target, source, ids, "diagnose", settings)
    folder = None if stored is None else stored.path
    with progress_bars(quiet=source.quiet) as progress:
        step = progress("requests", num_texts)
        observed = observe(loaded, target, prompts, plan, on_answer=step, folder=folder)
    of_answers = None
    if source.is_streamed:
        of_answers = lambda observed, plan: measure_answers(loaded, observed, source, plan, prompts)  # noqa: E731
    try:
        with progress_bars(quiet=source.quiet) as progress:
            found = compare(
                loaded, observed, prompts, plan, num_speculative_tokens, flags=flags, source=options.given,
                notes=audit_lines(options.source, options.head), measure_answers=of_answers,
                on_text=progress("reference", 0 if source.is_streamed else 2 * num_texts),
                on_fault=progress("faults", len(FAULTS)), keep_interrupted=True,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not source.quiet:
            _show_counts(observed)
        raise
    if stored is not None and not found.untested:  # the next diagnosis is of what the engine does then
        stored.remove()
    return found


def _show_counts(observed: "Sequence[EngineObservation]") -> None:
    """Print what is known before the head is measured: what the engine counted."""
    from nextn.cli.counted import counts_line

    for each in observed:
        print_lines(counts_line(each.counters, each.counters.k))
    print_lines("no cause was named: interrupted before the head was measured; the same command starts again")


def _show_diagnosis(diagnosis: "Diagnosis") -> None:
    depths = range(1, diagnosis.reference.plan.num_speculative_tokens + 1)
    table = figures_table("", *(f"a_{k}" for k in depths), "AL", "likelihood", "fit", "", left=("",))
    several, version = len(diagnosis.cases) > 1, diagnosis.cases[0].observation.counters.version
    engine = f"{diagnosis.engine} {version}" if version else diagnosis.engine
    for case in diagnosis.cases:
        seen = case.observation
        label = f"{engine}, {_where(seen.temperature, seen.prompt_indices, several=several)}"
        rates = [f"{rate:.3f}" if rate == rate else "" for rate in case.counts.rates]
        rates += [""] * (len(depths) - len(rates))  # an engine may have counted fewer depths in this case
        table.add_row(plain(label), *rates, f"{1 + case.num_accepted:.2f}", "", "", "", style="bold")
    table.add_section()
    always = ("no-fault", *diagnosis.named, *diagnosis.indistinguishable)
    others = [cause for cause in diagnosis.causes[_MAX_CAUSES:] if cause.name in always]
    for cause in [*diagnosis.causes[:_MAX_CAUSES], *others]:
        style = "bold" if cause.name in diagnosis.named else None
        rates = [f"{rate:.3f}" for rate in cause.rates]
        fit = f"{cause.p_value:.2f}" if cause.p_value >= 0.01 else "<0.01"
        marks = [f"prior x{diagnosis.priors[cause.name]:g}"] if cause.name in diagnosis.priors else []
        marks += ["not distinguished"] if cause.name in diagnosis.indistinguishable else []
        table.add_row(
            plain(cause.name), *rates, f"{cause.length:.2f}", _odds(cause), fit, ", ".join(marks), style=style
        )
    print_table(table)
    show_report(diagnosis)
    if diagnosis.indistinguishable:
        them = "it" if len(diagnosis.named) == 1 else "them"
        print_lines(f"these counts do not distinguish {them} from: {', '.join(diagnosis.indistinguishable)}")
    for number, check in enumerate(diagnosis.next_checks, 1):
        print_lines(f"{'check next, cheapest first' if number == 1 else ''}  {number}. {check}")
    print_lines(*(f"note: {shown(note)}" for note in diagnosis.notes))


def _where(temperature: float, prompts: "tuple[int, ...] | None", *, several: bool) -> str:
    at = "greedy" if not temperature else f"T={temperature:g}"
    return at if not several or prompts is None else f"{at}, {len(prompts)} prompts"


def _odds(cause: "Cause") -> str:
    """The likelihood relative to the most likely cause."""
    if cause.ratio < 1e-6:
        return "<1e-6"
    return "1" if cause.ratio == 1 else f"1/{1 / cause.ratio:,.{0 if cause.ratio < 0.1 else 1}f}"
