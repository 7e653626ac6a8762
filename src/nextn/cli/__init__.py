"""The command line: a lazy table of verbs over library functions, and the only folder that prints.

Heavy imports stay inside the verbs, so `nextn --help` answers at once. Exit codes: 0 done, 1 findings, 2 usage, 130
Ctrl-C.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nextn import __version__
from nextn.cli import bench, measure, move
from nextn.cli.answer import answer
from nextn.cli.audit import audit
from nextn.cli.common import (
    AsJson,
    Chat,
    DraftText,
    DraftVocab,
    Dtype,
    MaxTokens,
    PathName,
    console,
    draft_from,
    load_model,
    plain,
    stop_flag,
)  # fmt: skip
from nextn.cli.diagnose import diagnose
from nextn.cli.runs import progress, say_stopped
from nextn.cli.train import train
from nextn.cli.verify import verify
from nextn.errors import NextnError

if TYPE_CHECKING:
    from rich.text import Text

    from nextn.decode import Round, RowRound, Settings
    from nextn.demo import Report
    from nextn.model import Model
    from nextn.policy import DraftLength

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Multi-Token Prediction: train heads, decode with them losslessly, see what they do.",
)

app.command()(audit)
app.command()(verify)
app.command()(diagnose)

Drafts = Annotated[int, typer.Option("--drafts", "-k", help="Tokens drafted per round; 0 is plain decoding.")]


def main() -> None:
    """Entry point of `nextn`: errors of the user's become one line and an exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except NextnError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"nextn {__version__}")
        raise typer.Exit


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the model, report.json and the figures go.")] = Path("demo"),
    drafts: Drafts = 4,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level code model with an MTP head, then decode with it off and on (6 to 10 minutes on 2 cores)."""
    from nextn.demo import draw, run_demo

    with stop_flag() as stopped, progress(quiet=as_json) as on_record:
        report = run_demo(folder, drafts=drafts, on_record=on_record, should_stop=stopped)
    if report is None:
        say_stopped(folder / "run", "nextn demo")
        return
    paths = draw(report)
    if as_json:
        typer.echo(json.dumps(report.as_record()))
    else:
        _show_report(report, paths)


app.command()(train)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to go on with; - reads standard input.")],
    drafts: Drafts = 4,
    max_tokens: MaxTokens = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 = off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    argmax_drafts: Annotated[bool, typer.Option(help="Draft the head's best token instead of a sample.")] = False,
    p_min: Annotated[float, typer.Option(help="Stop a round's drafts where the head is less sure.")] = 0.0,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="As many drafts a round as pay, up to --drafts.")
    ] = False,
    draft_vocab: DraftVocab = 0,
    draft_text: DraftText = None,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")] = None,
    chat: Chat = False,
    dtype: Dtype = "auto",
    path: PathName = "auto",
    as_json: AsJson = False,
) -> None:
    """Decode one prompt with MTP; kept drafts are coloured, and the acceptance is printed below."""
    from nextn.decode import Settings
    from nextn.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    settings = Settings(
        drafts=drafts,
        p_min=p_min,
        sampling=sampling,
        sampled_drafts=not argmax_drafts,
        max_tokens=max_tokens,
        seed=seed,
    )
    loaded = load_model(model, dtype, need_head=drafts > 0)
    draft_from(loaded, draft_vocab, draft_text)
    text = sys.stdin.read() if prompt == "-" else prompt
    length = _adaptive(loaded, drafts, path) if adaptive else None
    how = {"stop": stop or [], "chat": chat, "path": path, "length": length}
    _generate(loaded, text, settings, how, as_json=as_json)


@app.command()
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


for verb in (answer, *move.VERBS, *bench.VERBS, *measure.VERBS):
    app.command()(verb)


def _adaptive(model: "Model", drafts: int, path: str) -> "DraftLength":
    from nextn.benchmarking.cost import adaptive

    return adaptive(model, limit=drafts, path=path)


def _generate(model: "Model", text: str, settings: "Settings", how: dict[str, Any], *, as_json: bool) -> None:
    from nextn.text import generate as whole
    from nextn.text import stream

    if as_json:
        result = whole(model, [text], settings, **how)[0]
        record = {"text": result.text, "tokens": list(result.tokens), "finish": result.finish}
        times = {"prefill_s": result.prefill_s, "draft_s": result.draft_s, "verify_s": result.verify_s}
        said = {"tokens_per_s": result.tokens_per_s, "path": model.engine(how["path"]).path}
        typer.echo(json.dumps(record | times | said | result.acceptance.as_record()))
        return
    from nextn.figures.acceptance import Acceptance

    screen = console()
    log: list[Round] = []
    for note in model.notes:
        typer.echo(f"note: {note}", err=True)
    for chunk in stream(model, [text], settings, **how, on_round=log.append):
        kept = bool(chunk.part.kept)
        screen.print(plain(chunk.text, style="green" if kept else None), end="", soft_wrap=True, highlight=False)
    figures = Acceptance.of(log)
    seconds = sum(each.draft_s + each.verify_s for each in log[1:])
    tokens = sum(len(each.rows[0].emitted) for each in log[1:])
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(figures.rates, 1))
    speed = f"{tokens / seconds:.0f} tokens/s" if seconds else "one token"
    made = model.engine(how["path"])
    speed += f" on the {made.path} path"
    if made.reason and how["path"] == "auto":
        typer.echo(f"\nnote: plain path: {made.reason}", err=True)
    if how["length"] is not None:
        speed += f"  {how['length'].reason} "
    screen.print(
        f"\n[dim]{speed}  " + (f"AL {figures.length:.2f}  {rates}" if figures.num_rounds else "plain") + "[/dim]"
    )


def _show_report(report: "Report", paths: list[Path]) -> None:
    screen = console()
    for label, pair in (("greedy", report.greedy), ("temperature 1", report.sampled)):
        place = (pair.sound or [0])[0]
        shown = bytes(token for token in report.prompts[place][-120:] if token < 256).decode(errors="replace")
        screen.rule(f"[bold]held-out prompt {place + 1}, continued, {label} (green: drafted and kept)")
        text = plain(shown, style="dim")
        for each in pair.mtp.rounds[place]:
            text.append_text(_coloured(each.rows[0]))
        screen.print(text)
    screen.rule("[bold]what the head did")
    for label, pair in (("greedy", report.greedy), ("temperature 1", report.sampled)):
        told = pair.figures()
        rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(told.mtp.acceptance.rates, 1))
        same = "" if label != "greedy" else "  output identical" if report.identical else "  output DIFFERENT"
        loops = f"{len(pair.checks) - len(pair.sound)} of {len(pair.checks)} texts loop, left out"
        lines = (
            f"{label:14} AL {told.mtp.acceptance.length:.2f} at K = {report.drafts}  {rates}  ({loops})",
            f"{'':14} plain {told.plain.tokens_per_s:.0f} tokens/s, MTP {told.mtp.tokens_per_s:.0f} tokens/s = "
            f"{told.speedup:.2f} x{same}",
        )
        screen.print("\n".join(lines), highlight=False)
    names = ", ".join(["model", "report.json", *(path.name for path in paths)])
    screen.print(
        f"trained {report.train_s:.0f} s, {report.total_s:.0f} s in all; in {report.folder}: {names}", highlight=False
    )


def _coloured(part: "RowRound") -> "Text":
    kept = bytes(token for token in part.emitted[: part.kept] if token < 256).decode(errors="replace")
    own = bytes(token for token in part.emitted[part.kept :] if token < 256).decode(errors="replace")
    text = plain(kept, style="green")
    text.append(own)
    return text
