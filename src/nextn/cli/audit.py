"""`nextn audit`: findings as a table with a summary, or as JSON; exit 0 clean, 1 findings, 2 nothing to audit."""

import difflib
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, expanded, open_checkpoint, shipped_option, shipped_path
from nextn.cli.screen import console, plain, print_json, print_unwrapped, shortened, shown
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from nextn.audit import AuditReport, Finding

_GB = 1_000_000_000
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@expanded()
def audit(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint folder, .safetensors or .gguf file, hub id, or tiny: the one that comes with the package.",
            callback=shipped_path,
        ),
    ],
    head: Annotated[
        str | None,
        typer.Option(help="Audit the head of this checkpoint, beside MODEL as its trunk.", callback=shipped_option),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Family to audit by, instead of the config's model_type.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Rule to skip; repeatable.")] = None,
    sample: Annotated[
        bool,
        typer.Option("--sample", help="Read only samples of a local head's values, as for a hub id. Default: all."),
    ] = False,
    require_head: Annotated[
        bool, typer.Option("--require-head", help="A checkpoint that declares and stores no head is an error (for CI).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint's MTP head against its config and what engines expect, without downloading the weights."""
    started = time.perf_counter()
    ignored = _check_rules(ignore or [])
    with _no_garbage_collection():
        if model.endswith(".gguf"):
            if head is not None:
                raise ConfigError(f"--head beside {model}: a trunk in GGUF; give its safetensors checkpoint")
            report = _gguf(Path(model))
        else:
            report = _safetensors(model, head=head, family=family, sample=sample)
    report = (report.requiring_head() if require_head else report).without(ignored)
    seconds = time.perf_counter() - started
    if as_json:
        print_json(report.as_record() | {"seconds": round(seconds, 3)})
    else:
        screen = console()
        if report.findings:
            rows, more = shortened(report.findings)
            print_unwrapped(_table(rows))
            if more:
                screen.print(plain(f"{more}\n"))
        print_unwrapped(_summary(report, seconds))
        for line in report.unchecked:
            print_unwrapped(plain(f"not checked: {shown(line)}", style="dim"))
    raise typer.Exit(0 if report.clean else 1)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collecting garbage among a checkpoint's hundreds of thousands of live entries takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _safetensors(model: str, *, head: str | None, family: str | None, sample: bool) -> "AuditReport":
    from nextn.audit import audit as run_audit
    from nextn.checkpoint.head_inventory import Inventory
    from nextn.checkpoint.provenance import open_head, trunk_family
    from nextn.families import by_name

    row = by_name(family) if family else None
    checkpoint = open_checkpoint(model)
    if head is None:
        return run_audit(checkpoint, family=row, sample=sample)
    trunk = Inventory.of(checkpoint, family=row or trunk_family(checkpoint))
    beside = open_head(head, trunk)
    return run_audit(beside.checkpoint, family=beside.family, sample=sample, trunk=trunk)


def _gguf(path: Path) -> "AuditReport":
    from nextn.audit.gguf import audit_gguf

    return audit_gguf(path)


def _check_rules(rules: list[str]) -> list[str]:
    from nextn.audit import IDS

    for rule in rules:
        if rule not in IDS:
            near = difflib.get_close_matches(rule, IDS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known: {', '.join(IDS)}"
            raise ConfigError(f"--ignore {rule}: no such rule; {meant}")
    return rules


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


def _summary(report: "AuditReport", seconds: float) -> "Text":
    counts = {severity: sum(finding.severity == severity for finding in report.findings) for severity in _STYLES}
    total = ", ".join(f"{number} {severity}{'s' * (number != 1)}" for severity, number in counts.items() if number)
    name = f"{report.family} ({report.title})" if report.title else report.family
    stored = f"{name}: {report.declared} MTP layer{'s' * (report.declared != 1)} declared, "
    stored += f"{len(report.modules)} stored"
    text = plain("clean" if report.clean else "not clean", style="bold green" if report.clean else "bold red")
    if report.values_read != "none":
        stored += f", {'all values read' if report.values_read == 'all' else 'values sampled'}"
        stored += f" ({report.bytes_read / _GB:.1f} GB)" * (report.bytes_read >= _GB / 10)
    return text.append(
        f"  {shown(report.path)}  {stored}  {total + '  ' if total else ''}{seconds:.1f} s", style="default"
    )
