"""`nextn audit`: findings as a table with a summary, or as JSON; exit 0 clean, 1 findings, 2 nothing to audit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from nextn.cli.common import SOURCES, AsJson, expanded, shipped_option, shipped_path
from nextn.cli.screen import console, plain, print_json, shortened, shown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from nextn.audit_rules import AuditReport, Finding

_GB = 1_000_000_000
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@expanded()
def audit(
    *,
    model: Annotated[
        str,
        Argument(
            help=f"Checkpoint folder, .safetensors or .gguf file, {SOURCES}",
            callback=shipped_path,
        ),
    ],
    head: Annotated[
        str | None,
        Option(help="Audit the head of this checkpoint, beside MODEL as its trunk.", callback=shipped_option),
    ] = None,
    family: Annotated[str | None, Option(help="Family to audit by, instead of the config's model_type.")] = None,
    ignore: Annotated[list[str] | None, Option(help="Rule to skip; repeatable.")] = None,
    sample: Annotated[
        bool, Option("--sample", help="Read only samples of a local head's values, as for a hub id. Default: all.")
    ] = False,
    require_head: Annotated[
        bool, Option("--require-head", help="A checkpoint that declares and stores no head is an error (for CI).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint's MTP head against its config and what engines expect, without downloading the weights."""
    from nextn.audit_rules import audit as run_audit

    report = run_audit(model, head=head, family=family, ignore=ignore or (), sample=sample, require_head=require_head)
    if as_json:
        print_json(report.to_dict())
    else:
        screen = console()
        if report.findings:
            rows, more = shortened(report.findings)
            screen.print(_table(rows))
            if more:
                screen.print(plain(f"{more}\n"))
        screen.print(_summary(report))
        for line in report.unchecked:
            screen.print(plain(f"not checked: {shown(line)}", style="dim"))
    raise typer.Exit(0 if report.clean else 1)


def _table(findings: "Sequence[Finding]") -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.severity]
        table.add_row(plain(f"{finding.severity}\n{finding.rule}", style=style, lines=True), _description(finding))
    return table


def _description(finding: "Finding") -> "Text":
    text = plain(shown(finding.place), style="bold")
    text.append(f"\n{shown(finding.found)}\n")
    text.append("valid  ", style="dim").append(f"{shown(finding.valid)}\n")
    return text.append("fix    ", style="dim").append(shown(finding.fix), style="cyan")


def _summary(report: "AuditReport") -> "Text":
    counts = {severity: sum(finding.severity == severity for finding in report.findings) for severity in _STYLES}
    total = ", ".join(f"{number} {severity}{'s' * (number != 1)}" for severity, number in counts.items() if number)
    name = f"{report.family} ({report.title})" if report.title else report.family
    stored = f"{name}: {report.declared} MTP layer{'s' * (report.declared != 1)} "
    stored += "by default, " if report.is_default else "declared, "
    stored += f"{len(report.modules)} stored"
    text = plain("clean" if report.clean else "not clean", style="bold green" if report.clean else "bold red")
    if report.values_read != "none":
        stored += f", {'all values read' if report.values_read == 'all' else 'values sampled'}"
        stored += f" ({report.bytes_read / _GB:.1f} GB)" * (report.bytes_read >= _GB / 10)
    return text.append(
        f"  {shown(report.path)}  {stored}  {total + '  ' if total else ''}{report.seconds:.1f} s", style="default"
    )
