"""`nextn measure`: the acceptance that a head should reach, by the weights alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from nextn.checkpoint.checkpoint import TOKENIZER_FILES
from nextn.cli.acceptance import draw_curves, show_comparison, show_probe, show_reference
from nextn.cli.common import (
    K_NAMES,
    AsJson,
    Chat,
    EngineAccess,
    MaxTokens,
    Prompts,
    RecordFile,
    Thinking,
    check_figure,
    expanded,
    first_turns,
    parse_temperatures,
    print_published,
    shipped_path,
)
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars
from nextn.cli.screen import echo, print_json, print_note
from nextn.cli.streaming import GivenTextOptions, TextOptions, measure_acceptance
from nextn.errors import ConfigError, NextnError
from nextn.evaluate.acceptance_drop import (
    OTHER_TOKENS,
    AcceptanceChange,
    baseline_note,
    check_number,
    check_settings,
    read_record,
)
from nextn.evaluate.exchange import check_form, exchange_text, inferencex_note
from nextn.evaluate.published_curves import PublishedCurve, check_shared, read_curves
from nextn.evaluate.workload import Prompt, ReferencePlan, no_tokenizer, prompts_record, read_prompts

if TYPE_CHECKING:
    from nextn.evaluate.probe import ProbeReport
    from nextn.evaluate.reference_report import ReferenceReport
    from nextn.model.model import Model

_EXIT_CODES = {"kept": 0, "fell": 1, "inconclusive": 3}  # of a comparison


@dataclass(frozen=True)
class PlanOptions:
    """The prompts, and how the model continues them."""

    num_speculative_tokens: Annotated[int, Option(*K_NAMES, help="The largest K; smaller ones are reported, too.")] = 4
    prompts: Prompts = None
    temperatures: Annotated[
        str | None, Option(help="Comma-separated temperatures; 0 = greedy. Default: 0,1, or that of --texts.")
    ] = None
    max_tokens: MaxTokens = 256
    chat: Chat = None
    thinking: Thinking = None

    def plan(self, backend: str, *, texts: str | None, rule: str) -> ReferencePlan:
        """Return the plan. Raises ConfigError for values out of range, or with texts that have their own."""
        given = None if self.temperatures is None else parse_temperatures(self.temperatures)
        if texts is not None and (self.prompts is not None or (given is not None and len(given) > 1)):
            message = "--texts replaces --prompts, and its texts are of one temperature; leave out the other options"
            raise ConfigError(message)
        if texts is not None and self.thinking is not None:
            raise ConfigError("--texts has its prompts as they were rendered; leave --thinking and --no-thinking out")
        return ReferencePlan(
            self.num_speculative_tokens, given or (0.0, 1.0), self.max_tokens, self.chat, 0, backend, rule,
            self.thinking,
        )  # fmt: skip


@dataclass(frozen=True)
class ComparisonOptions:
    """What the acceptance is compared with, and when the exit code is not 0."""

    min_acceptance: Annotated[
        float | None,
        Option(
            help="Exit with 1 if a_1 is below this (for CI), at the lowest temperature at which at least half of the "
            "texts do not repeat themselves, by the first rule there; with 3 if there is none."
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        Option(
            help="Record of an earlier `measure --out`, of the same prompts and settings; or acceptance lengths that "
            "others published, to show beside: InferenceX's YAML, or the matrix of `aiperf speed-bench-report`."
        ),
    ] = None
    against: Annotated[
        str | None,
        Option(
            help="Another checkpoint to measure on the same prompts, such as the base model, or --head with its trunk."
        ),
    ] = None
    max_drop: Annotated[
        str | None,
        Option(
            help="With --baseline or --against: exit with 1 if acceptance fell by more, with 3 if "
            "the data cannot decide. Default: 5%."
        ),
    ] = None

    def read(self, *, are_decoded: bool) -> "tuple[Mapping[str, object] | None, Sequence[PublishedCurve]]":
        """Return an earlier measurement's record, if there is one, and published curves.

        are_decoded: Whether the texts are the model's own. Raises ConfigError for values and files that cannot be used.
        """
        if self.min_acceptance is not None and not 0 <= self.min_acceptance <= 1:
            raise ConfigError(f"--min-acceptance {self.min_acceptance}; expected a rate from 0 to 1, such as 0.6")
        if self.against is not None and (self.baseline is not None or not are_decoded):
            message = "--against measures the other checkpoint's own texts: leave --baseline, --texts and --engine out"
            raise ConfigError(message)
        curves = () if self.baseline is None else read_curves(self.baseline)
        if self.max_drop is not None and (curves or (self.baseline is None and self.against is None)):
            raise ConfigError(
                f"--max-drop {self.max_drop}: compared with what? Give --against MODEL, or --baseline FILE of "
                "`measure --out`"
            )
        self.limit()  # refuses a value that is no share, before anything is measured
        return None if self.baseline is None or curves else read_record(self.baseline), curves

    def limit(self) -> float:
        """The share by which acceptance may fall. Raises ConfigError for another value than 5% or 0.05."""
        text = self.max_drop or "5%"
        try:
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            value = -1.0
        if not 0 < value < 1:
            raise ConfigError(f"--max-drop {text}; expected a share between 0 and 1, such as 5% or 0.05")
        return value

    def compare(self, earlier: Mapping[str, object], record: Mapping[str, object]) -> AcceptanceChange:
        return AcceptanceChange.of(earlier, record, source=str(self.against or self.baseline), limit=self.limit())


@dataclass(frozen=True)
class OutputOptions:
    """The forms in which the measurement is printed or written."""

    form: Annotated[
        str | None,
        Option(
            "--format",
            help="Print the measurement as another tool writes it: vllm, aiperf (records of requests), aiperf-report, "
            "speculators (CSV) or inferencex (YAML).",
        ),
    ] = None
    out: RecordFile = None
    figure: Annotated[
        Path | None, Option(help="File for a picture of AL over K, such as curve.png; needs matplotlib.")
    ] = None

    def check(self, plan: ReferencePlan, *, are_decoded: bool, as_json: bool) -> None:
        """Raise ConfigError for a form that the texts do not have, and for a picture that cannot be written."""
        if self.form is not None:
            check_form(self.form, plan.temperatures, decoded=are_decoded)
            if as_json:
                raise ConfigError(f"--format {self.form} excludes --json: one of them is printed")
        if self.figure is not None:
            check_figure(self.figure)

    def write(self, report: "ReferenceReport", record: dict[str, object], *, as_json: bool) -> None:
        """Write the files, and print the measurement unless a JSON document follows."""
        from nextn.checkpoint.safetensors_file import write_json

        if self.out is not None:
            write_json(self.out, record)
        if self.figure is not None:
            draw_curves(report, self.figure)
        if self.form is not None:
            echo(exchange_text(report, self.form, source=report.source, prompts=report.prompts_text).rstrip("\n"))
            category = report.prompts_source.get("category")
            if self.form == "inferencex" and (difference := inferencex_note(report, category)):
                print_note(difference)
        elif not as_json:
            show_reference(report)


@expanded("exact_head", "threads", "kv_cache_dtype")
def measure(
    *,
    planned: PlanOptions,
    options: ModelOptions,
    comparison: ComparisonOptions,
    probe: Annotated[
        bool, Option("--probe", help="Try other conventions; exit with 1 if the weights fit another one better.")
    ] = False,
    output: OutputOptions,
    asked: EngineAccess,
    given_texts: GivenTextOptions,
    as_json: AsJson = False,
) -> None:
    """Measure the acceptance per depth that a checkpoint's head should reach, with intervals and negative controls."""
    texts, is_served = given_texts.texts, asked.engine is not None
    are_decoded, quiet = texts is None and not is_served, as_json or output.form is not None
    earlier, curves = comparison.read(are_decoded=are_decoded)
    rule = "block" if output.form is None else "argmax"  # how engines accept by default
    plan = planned.plan(options.backend, texts=texts, rule=rule)
    output.check(plan, are_decoded=are_decoded, as_json=as_json)
    if earlier is not None and texts is None:  # their temperature is in the file
        check_settings(earlier, asdict(plan), source=str(comparison.baseline))
    options = options.prepared(need_head=True)
    if options.native_only and not are_decoded:
        raise ConfigError(
            f"{' and '.join(options.native_only)} with --texts or --engine: the trunk reads given texts in torch, with "
            "its weights as stored; leave one of them out"
        )
    prompts = first_turns(read_prompts(planned.prompts)) if is_served else read_prompts(planned.prompts)
    if earlier is not None and texts is None:
        check_number(earlier, len(prompts), source=str(comparison.baseline))
    if curves and texts is None:
        check_shared(curves, planned.num_speculative_tokens, [prompt.domain for prompt in prompts])
    for folder in (options.source, shipped_path(comparison.against)) if comparison.against is not None else ():
        _check_tokenizer(Path(folder), prompts)
    endpoint = asked.open() if is_served and texts is None else None  # before anything that imports torch
    source, check = TextOptions.of(options, given_texts, asked, endpoint, quiet=quiet), None
    if comparison.against is not None:  # first, so that one model is in memory at a time
        earlier, check = _measure_other(comparison.against, options, source, plan, prompts)
    loaded, report = measure_acceptance(options, source, plan, prompts, check)
    report = replace(report, prompts_source={} if texts is not None else prompts_record(planned.prompts, prompts))
    probed = _probe(report, loaded, options, quiet=quiet) if probe else None
    if long := loaded.length_note(report.num_positions):
        print_note(long)
    record = report.to_dict() | ({} if probed is None else {"probe": probed.as_record()})
    beside = report.beside(curves)
    if beside is not None:
        record |= {"published": beside[0].as_record(beside[1])}
    elif curves:
        print_note(f"--baseline {comparison.baseline}: no K and no category of it was measured")
    output.write(report, record, as_json=as_json)
    if (published := beside or report.published) is not None and not quiet:
        print_published(published)
    if probed is not None and not quiet:
        show_probe(probed)
    compared = None if earlier is None else comparison.compare(earlier, record)
    if compared is not None:
        show_comparison(compared, quiet=quiet)
    elif output.out is not None and (few := baseline_note(record, comparison.limit())):
        print_note(few)
    if as_json:
        print_json(record | ({} if compared is None else {"comparison": compared.as_record()}))
    if comparison.min_acceptance is not None:
        _require(report, comparison.min_acceptance)
    if probed is not None and probed.is_fault:
        raise typer.Exit(1)
    if compared is not None:
        raise typer.Exit(_EXIT_CODES[compared.outcome])


def _check_tokenizer(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts of text for a folder without a tokenizer, before the other checkpoint is measured for long."""
    has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    if folder.is_dir() and not has_tokenizer and any(isinstance(prompt.text, str) for prompt in prompts):
        raise no_tokenizer(str(folder))


def _measure_other(
    against: str, options: ModelOptions, source: TextOptions, plan: ReferencePlan, prompts: Sequence[Prompt]
) -> "tuple[dict[str, object], Callable[[Model], None]]":
    """Measure the other checkpoint; return the record, and a check of the prompts' tokens. Its errors name it."""
    from nextn.evaluate.reference_texts import prompt_tokens

    try:
        other = replace(options, source=shipped_path(against), head=_head_beside(against, options)).prepared(
            need_head=True
        )
        loaded, report = measure_acceptance(other, source, plan, prompts)
    except NextnError as error:
        raise type(error)(f"--against {against}: {error}") from error
    tokens = [prompt_tokens(loaded, prompt, plan) for prompt in prompts]
    return report.to_dict(), partial(_check_tokens, tokens, plan, prompts)


def _head_beside(against: str, options: ModelOptions) -> str | None:
    """Return the head that the other checkpoint is measured with: None for its own, or --head where it has none."""
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.checkpoint.head_inventory import Inventory
    from nextn.checkpoint.provenance import trunk_family

    if options.head is None or against.endswith(".gguf"):
        return None
    checkpoint = Checkpoint.open(shipped_path(against))
    return None if Inventory.of(checkpoint, family=trunk_family(checkpoint)).modules else options.head


def _check_tokens(
    expected: Sequence[tuple[int, ...]], plan: ReferencePlan, prompts: Sequence[Prompt], model: "Model"
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


def _require(report: "ReferenceReport", minimum: float) -> None:
    temperature = report.main_temperature
    if report.is_degenerate(temperature):
        echo(
            f"--min-acceptance {minimum:g}: most texts are degenerate (repetitive), so a_1 cannot decide: use other "
            "--prompts, or --temperatures 1",
            err=True,
        )
        raise typer.Exit(_EXIT_CODES["inconclusive"])
    rate = report.figures(temperature).rates[0].value
    if not rate >= minimum:
        echo(f"a_1 = {rate:.3f} at temperature {temperature:g} is below --min-acceptance {minimum:g}", err=True)
        raise typer.Exit(1)
