"""`nextn verify`: checks of live endpoints as a table with a verdict, or JSON; exit 0 passed, 1 findings, 2 usage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, Chat
from nextn.cli.screen import console, plain, print_json, shown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from nextn.engines.client import Budget
    from nextn.verify import Check, Report

_STYLES = {"passed": "bold green", "failed": "bold red", "unclear": "yellow"}
_WORDS = {"passed": "passed", "failed": "failed", "unclear": "could not tell"}


def verify(
    url: Annotated[str, typer.Argument(help="OpenAI-compatible endpoint with MTP on, such as localhost:8000.")],
    against: Annotated[str | None, typer.Option(help="The same model served without MTP.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, where an endpoint serves several.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Check to run; may be repeated. Left out: all.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts of your own: .txt or .jsonl.")] = None,
    chat: Chat = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a greedy text.")] = 48,
    tie_gap: Annotated[float, typer.Option(help="Nats between two tokens up to which a difference is a tie.")] = 0.25,
    samples: Annotated[int, typer.Option(help="Sampled texts per prompt and endpoint.")] = 64,
    context: Annotated[int, typer.Option(help="Tokens of the long-context check, at most.")] = 8192,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    max_requests: Annotated[int, typer.Option(help="Requests in all; what is left out is told.")] = 2000,
    max_seconds: Annotated[float, typer.Option(help="Seconds in all.")] = 900,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 120,
    key_env: Annotated[str | None, typer.Option(help="Variable that holds the key, if not OPENAI_API_KEY.")] = None,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """Check that a served model says the same with MTP on and off: greedy, sampled, cached, JSON, tools, stops."""
    from nextn.benchmarking.workload import read_prompts
    from nextn.engines.client import Budget, Limits
    from nextn.engines.endpoint import Endpoint
    from nextn.verify import Report, Settings
    from nextn.verify import verify as checks

    settings = Settings(
        max_tokens=max_tokens, tie_gap=tie_gap, samples=samples, concurrency=concurrency, context=context, seed=seed
    )
    texts = read_prompts(prompts)
    budget = Budget(Limits(requests=max_requests, seconds=max_seconds, answer_s=timeout))
    target = Endpoint.open(url, budget, model=model, key_env=key_env, chat=chat)
    reference = Endpoint.open(against, budget, model=model, key_env=key_env, chat=chat) if against else None
    found: list[Check] = []
    whole = False
    with _progress(budget, quiet=as_json) as progress:
        try:
            for each in checks(target, reference, texts, settings, names=check or (), on_check=progress):
                found.append(each)
            whole = True
        except KeyboardInterrupt:
            pass  # what was found so far is told below
    other = None if reference is None else reference.url
    report = Report(target.url, target.served.name, other, tuple(found), budget.used, whole)
    if as_json:
        print_json(report.as_record())
    else:
        _show(report)
    raise typer.Exit(1 if report.failed else 0 if whole else 130)


@contextmanager
def _progress(budget: "Budget", *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Which check runs, and how many requests were sent."""
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


def _show(report: "Report") -> None:
    screen = console()
    if report.checks:
        screen.print(_table(report))
    screen.print(_verdict(report))


def _table(report: "Report") -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        table.add_row(plain(_WORDS[check.outcome], style=_STYLES[check.outcome]), plain(check.name), _said(check))
    return table


def _said(check: "Check") -> "Text":
    text = plain(shown(check.evidence))
    return text.append(f"\nto do  {shown(check.advice)}", style="cyan") if check.advice else text


def _verdict(report: "Report") -> "Text":
    counts = {each: sum(check.outcome == each for check in report.checks) for each in _STYLES}
    said = ", ".join(f"{number} {_WORDS[each]}" for each, number in counts.items() if number) or "nothing checked"
    text = plain("findings" if report.failed else "no findings", style=_STYLES["failed" if report.failed else "passed"])
    against = f" against {shown(report.against)}" if report.against else ""
    where = f"{shown(report.model)} at {shown(report.url)}{against}"
    stopped = "" if report.whole else "  interrupted: the rest was not run"
    return text.append(f"  {where}  {said}  {report.requests} requests{stopped}", style="default")
