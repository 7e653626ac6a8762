"""`nextn trace`: which token meets which state, where, as a table."""

from typing import Annotated

import typer

from nextn.cli.common import AsJson, Device, Drafts, MaxTokens, check_model, load_model
from nextn.cli.screen import plain, print_json, print_table
from nextn.settings import Settings


def trace(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Keep it short: every column becomes a line.")],
    drafts: Drafts = 3,
    max_tokens: MaxTokens = 12,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto for as stored.")] = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show, round by round, which (token, hidden) pair sits at which position in prefill, draft, verify and re-run."""
    from dataclasses import asdict

    settings = Settings(drafts=drafts, max_tokens=max_tokens)
    check_model(model, dtype, device=device)
    from nextn.benchmarking.tracer import trace as rows_of

    loaded = load_model(model, dtype, need_head=drafts > 0, device=device)
    rows = list(rows_of(loaded, prompt, settings))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("round", "phase", "by", "position", "eats token", "and hidden", "gives"):
        table.add_column(title, justify="right" if title in ("round", "position") else "left", no_wrap=True)
    styles = {"draft": "yellow", "verify": "cyan", "re-run": "magenta"}
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.round != row.round:
            table.add_section()
        cells = (str(row.round), row.phase, row.by, str(row.position), row.token, row.hidden, row.gives)
        table.add_row(*map(plain, cells), style=styles.get(row.phase))
    print_table(table)
