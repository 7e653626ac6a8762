"""The one way to show what checks of an engine found: a line for each, its details, and a line for all."""

from typing import TYPE_CHECKING

from nextn.cli.screen import console, plain, shown

if TYPE_CHECKING:
    from nextn.engines.check_result import CheckReport

_STYLES = {"passed": "bold green", "failed": "bold red", "inconclusive": "yellow"}
_HEADLINES = {"passed": "no findings", "failed": "findings", "inconclusive": "inconclusive"}


def show_report(report: "CheckReport") -> None:
    """Print a row for each check and a line for the report."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    has_titles = any(check.title for check in report.checks)
    for _ in range(3 if has_titles else 2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        evidence = plain(shown(check.evidence))
        width = max((len(label) for label, _ in check.details), default=0)
        for label, line in check.details:
            evidence.append(f"\n{label:<{width}}  {shown(line)}", style="cyan" if label == "to do" else "default")
        title = [plain(check.title)] if has_titles else []
        table.add_row(plain(check.outcome, style=_STYLES[check.outcome]), plain(check.name), *title, evidence)
    screen = console()
    if report.checks:
        screen.print(table)
    headline = plain(_HEADLINES[report.outcome], style=_STYLES[report.outcome])
    screen.print(headline.append(f"  {shown(report.summary)}", style="default"), soft_wrap=True)
