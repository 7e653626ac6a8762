"""Commands that check other engines: `nextn verify` tests live endpoints, `nextn canary build|check` conformance.

Exit codes: 0 nothing failed, 1 findings, 2 usage error.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from nextn.cli.common import (
    ADDRESS,
    K_NAMES,
    AsJson,
    EngineAccess,
    EngineTest,
    Prompts,
    expanded,
    first_turns,
    writable_folder,
)
from nextn.cli.progress import Step, progress_bars
from nextn.cli.screen import (
    figures_table,
    plain,
    print_json,
    print_lines,
    print_table,
    show_checks,
    show_headline,
    show_report,
)
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.conformance.engine_run import ConformanceRun, SampledRun
    from nextn.conformance.record import Canary


@expanded("engine")
def verify(
    *,
    url: Annotated[str, Argument(help=f"OpenAI-compatible endpoint with MTP on, {ADDRESS}.")],
    against: Annotated[str | None, Option(help="The same model served without MTP.")] = None,
    check: Annotated[list[str] | None, Option(help="Check to run; repeatable. Default: all.")] = None,
    prompts: Prompts = None,
    chat: Annotated[
        bool,
        Option(
            "--chat/--no-chat",
            help="Send prompts as user messages through the engine's chat template. Default: no, because raw "
            "completions can be compared by token ids.",
            show_default=False,
        ),
    ] = False,
    samples: Annotated[int, Option(help="Sampled texts per prompt and endpoint.")] = 64,
    context: Annotated[int, Option(help="Maximum number of tokens of the long-context check.")] = 8192,
    asked: EngineTest,
    strict: Annotated[bool, Option("--strict", help="Exit with 1 also if a check is inconclusive (for CI).")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a server's output is the same with MTP on and off: greedy, sampled, cached, JSON, tools, stops."""
    from nextn.evaluate.workload import read_prompts
    from nextn.verify_checks import CHECKS, VerifySettings, verify_reports

    settings = VerifySettings(samples=samples, concurrency=asked.concurrency, context=context)
    texts, budget, steps = first_turns(read_prompts(prompts)), asked.budget(), list[Step]()
    reports = verify_reports(
        url, against, prompts=texts, checks=check or (), settings=settings, chat=chat, budget=budget,
        on_check=lambda name: steps[-1](0, status=f"{name}, {budget.used} requests"),
    )  # fmt: skip
    report = next(reports)
    with suppress(KeyboardInterrupt):  # the results so far are reported
        while not report.is_complete:
            with progress_bars(quiet=as_json) as progress:  # of one check, so that nothing is printed beside a bar
                steps.append(progress("verify", None))
                known, report = len(report.checks), next(reports)
            if not as_json:
                show_checks(report.checks[known:], names=check or CHECKS)
    if as_json:
        print_json(report.to_dict())
    else:
        show_headline(report)
    has_findings = report.failed or (strict and report.has_inconclusive)
    raise typer.Exit(1 if has_findings else 0 if report.is_complete else 130)


def build(
    out: Annotated[
        Path,
        Argument(help="Folder for the checkpoint and canary.json; an old one is replaced.", callback=writable_folder),
    ],
    family: Annotated[str, Option(help="Family of the checkpoint, such as glm4_moe.")],
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """Train a tiny checkpoint in a family's layout and record what an engine must do with it (a few minutes)."""
    from nextn.conformance.build import build as build_canary
    from nextn.conformance.canary_model import shape_of
    from nextn.conformance.record import Canary

    with progress_bars(quiet=as_json) as progress:
        step = progress("steps", sum(shape_of(family).steps))
        record = build_canary(out, family, seed=seed, on_record=lambda _: step())
    if as_json:
        print_json(record)
        return
    _show_canary(Canary.read(out), out)
    if record["looping"]:
        print_lines(f"{record['looping']} of its texts are repetitive, which hides faults: try another --seed")


@expanded("concurrency")
def check(
    *,
    canary: Annotated[Path, Argument(help="Folder written by `canary build`.")],
    answers: Annotated[Path | None, Option(help="Instead of an endpoint: a JSON line per prompt.")] = None,
    counters: Annotated[Path | None, Option(help="Counters over --answers: metrics, log or JSON.")] = None,
    num_speculative_tokens: Annotated[int | None, Option(*K_NAMES, help="K. Default: from the counters.")] = None,
    sampled: Annotated[
        int, Option(min=0, help="Passes over the prompts above temperature 0, such as 8: they show C13.")
    ] = 0,
    asked: EngineAccess,
    as_json: AsJson = False,
) -> None:
    """Check an engine against the contract, clause by clause, by its texts and counters on the canary's prompts."""
    from nextn.conformance.check import check as check_run
    from nextn.conformance.engine_run import from_files
    from nextn.conformance.record import Canary

    known = Canary.read(canary)
    if (asked.engine is None) == (answers is None):
        raise ConfigError("give --engine URL, or --answers FILE with --counters FILE")
    if asked.engine is not None and counters is not None:
        message = "--counters belongs to --answers: an endpoint's counters are read before and after each prompt"
        raise ConfigError(message)
    if asked.engine is None and sampled:
        raise ConfigError("--sampled needs --engine: it requests texts above temperature 0")
    sampled_run = None
    if answers is not None:
        run = from_files(known, answers, counters)
    else:
        run, sampled_run = _drive(known, asked, passes=sampled, quiet=as_json)
    report = check_run(known, run, num_speculative_tokens=num_speculative_tokens, sampled_run=sampled_run)
    if as_json:
        print_json(report.to_dict())
    else:
        show_report(report)
    raise typer.Exit(1 if report.failed else 0)


def _drive(
    canary: "Canary", asked: EngineAccess, *, passes: int, quiet: bool
) -> "tuple[ConformanceRun, SampledRun | None]":
    from nextn.conformance.engine_run import run_greedy, run_sampled

    endpoint = asked.open()
    with progress_bars(quiet=quiet) as progress:
        step = progress("prompts", len(canary.prompts) * (1 + passes))
        run = run_greedy(endpoint, canary, on_prompt=step)
        return run, run_sampled(endpoint, canary, passes, on_prompt=step) if passes else None


def _show_canary(canary: "Canary", out: Path) -> None:
    table = figures_table("", *(f"AL@{k}" for k in canary.k_values))
    for reading in canary.readings:
        table.add_row(plain(reading.name), *(f"{canary.length(reading, k):.2f}" for k in canary.k_values))
    print_table(table)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print_lines(f"{canary.family} in {out}: {len(canary.prompts)} prompts, {size:.1f} MB")
