"""`nextn trace`: which token meets which state, where, as a table."""

import json
from typing import Annotated

import typer

from nextn.cli.common import AsJson, Drafts, MaxTokens, console, load_model, plain


def trace(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Keep it short: every column becomes a line.")],
    drafts: Drafts = 3,
    max_tokens: MaxTokens = 12,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto for as stored.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Show, round by round, which (token, hidden) pair sits at which position in prefill, draft, verify and re-run."""
    from dataclasses import asdict

    from nextn.benchmarking.tracer import trace as rows_of
    from nextn.decode import Settings

    loaded = load_model(model, dtype, need_head=drafts > 0)
    rows = list(rows_of(loaded, prompt, Settings(drafts=drafts, max_tokens=max_tokens)))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
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
    console().print(table)
