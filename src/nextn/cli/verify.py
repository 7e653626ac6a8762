"""`nextn verify`: checks of live endpoints as a table with a summary, or JSON; exit 0 passed, 1 findings, 2 usage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, KeyEnv, Prompts
from nextn.cli.screen import console, plain, print_json, shown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from nextn.engines.client import Budget
    from nextn.verify import CheckResult, VerifyReport

_STYLES = {"passed": "bold green", "failed": "bold red", "inconclusive": "yellow"}


def verify(
    url: Annotated[str, typer.Argument(help="OpenAI-compatible endpoint with MTP on, such as localhost:8000.")],
    against: Annotated[str | None, typer.Option(help="The same model served without MTP.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, if an endpoint serves several.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Check to run; repeatable. Default: all.")] = None,
    prompts: Prompts = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--no-chat",
            help="Send prompts as user messages through the engine's chat template. Default: no, because raw "
            "completions can be compared by token ids.",
            show_default=False,
        ),
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens per greedy text.")] = 48,
    tie_gap: Annotated[float, typer.Option(help="Log-probability gap (nats) below which tokens are tied.")] = 0.25,
    samples: Annotated[int, typer.Option(help="Sampled texts per prompt and endpoint.")] = 64,
    context: Annotated[int, typer.Option(help="Maximum number of tokens of the long-context check.")] = 8192,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    max_requests: Annotated[int, typer.Option(help="Maximum number of requests; skipped checks are listed.")] = 2000,
    max_seconds: Annotated[float, typer.Option(help="Maximum seconds for all requests.")] = 900,
    timeout: Annotated[float, typer.Option(help="Seconds per request.")] = 120,
    key_env: KeyEnv = None,
    seed: int = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also if a check is inconclusive (for CI).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a server's output is the same with MTP on and off: greedy, sampled, cached, JSON, tools, stops."""
    from nextn.engines.client import Budget, Limits
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.workload import read_prompts
    from nextn.verify import VerifyReport, VerifySettings
    from nextn.verify import verify as run_checks

    settings = VerifySettings(
        max_tokens=max_tokens, tie_gap=tie_gap, samples=samples, concurrency=concurrency, context=context, seed=seed
    )
    texts = read_prompts(prompts)
    budget = Budget(Limits(requests=max_requests, seconds=max_seconds, answer_s=timeout))
    target = Endpoint.open(url, budget, model=model, key_env=key_env, chat=chat)
    reference = Endpoint.open(against, budget, model=model, key_env=key_env, chat=chat) if against else None
    results: list[CheckResult] = []
    is_complete = False
    with _progress(budget, quiet=as_json) as progress:
        try:
            for result in run_checks(target, reference, texts, settings, names=check or (), on_check=progress):
                results.append(result)
            is_complete = True
        except KeyboardInterrupt:
            pass  # the results so far are reported below
    other = None if reference is None else reference.url
    report = VerifyReport(target.url, target.served.name, other, tuple(results), budget.used, is_complete)
    if as_json:
        print_json(report.as_record())
    else:
        _show(report)
    has_findings = report.failed or (strict and report.has_inconclusive)
    raise typer.Exit(1 if has_findings else 0 if is_complete else 130)


@contextmanager
def _progress(budget: "Budget", *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show which check runs and how many requests were sent."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Requests(TextColumn):
        def render(self, task: object) -> Text:
            return Text(f"{budget.used} requests")

    columns = (SpinnerColumn(), TextColumn("{task.description}"), Requests(""), TimeElapsedColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, disable=quiet or not screen.is_terminal, transient=True) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda name: bar.update(task, description=name)


def _show(report: "VerifyReport") -> None:
    screen = console()
    if report.checks:
        screen.print(_table(report))
    screen.print(_summary(report))


def _table(report: "VerifyReport") -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        table.add_row(plain(check.outcome, style=_STYLES[check.outcome]), plain(check.name), _evidence(check))
    return table


def _evidence(check: "CheckResult") -> "Text":
    text = plain(shown(check.evidence))
    return text.append(f"\nto do  {shown(check.advice)}", style="cyan") if check.advice else text


def _summary(report: "VerifyReport") -> "Text":
    counts = {outcome: sum(check.outcome == outcome for check in report.checks) for outcome in _STYLES}
    total = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
    text = plain("findings" if report.failed else "no findings", style=_STYLES["failed" if report.failed else "passed"])
    against = f" against {shown(report.against)}" if report.against else ""
    where = f"{shown(report.model)} at {shown(report.url)}{against}"
    stopped = "" if report.is_complete else "  interrupted: the remaining checks were not run"
    return text.append(f"  {where}  {total or 'nothing checked'}  {report.requests} requests{stopped}", style="default")
