"""`nextn demo`: the story of five minutes, told."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, Drafts, stop_flag
from nextn.cli.runs import progress, say_stopped
from nextn.cli.screen import Marks, console, plain, print_json

if TYPE_CHECKING:
    from rich.text import Text

    from nextn.decode import Round, RowRound
    from nextn.demo import Pair, Report


def demo(
    folder: Annotated[Path, typer.Option(help="Where the model, report.json and the figures go.")] = Path("demo"),
    drafts: Drafts = 4,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level code model with an MTP head, then decode with it off and on (6 to 10 minutes on 2 cores, 25 on
    ones that do not multiply bfloat16)."""
    from nextn.demo import draw, run_demo

    with stop_flag() as stopped, progress(quiet=as_json) as on_record:
        report = run_demo(folder, drafts=drafts, on_record=on_record, should_stop=stopped)
    if report is None:
        say_stopped(folder / "run", "nextn demo" if folder == Path("demo") else f"nextn demo --folder {folder}")
        return
    paths = draw(report)
    if as_json:
        print_json(report.as_record())
    else:
        _show_report(report, paths)


def _show_report(report: "Report", paths: list[Path]) -> None:
    screen = console()
    marks = Marks.of(screen)
    pairs = (("greedy", report.greedy), ("temperature 1", report.sampled))
    for label, pair in pairs:
        place = (pair.sound or [0])[0]
        screen.rule(f"[bold]held-out prompt {place + 1}, continued, {label} ({marks.words}: drafted and kept)")
        screen.print(_continued(report.prompts[place], pair.mtp.rounds[place], marks))
    screen.rule("[bold]what the head did")
    for label, pair in pairs:
        same = "" if label != "greedy" else "  output identical" if report.identical else "  output DIFFERENT"
        screen.print(plain(f"{_figures(label, pair, report.drafts)}{same}", lines=True))
    names = ", ".join(["model", "report.json", *(path.name for path in paths)])
    screen.print(plain(f"trained {report.train_s:.0f} s, {report.total_s:.0f} s in all; in {report.folder}: {names}"))


def _figures(label: str, pair: "Pair", drafts: int) -> str:
    """Acceptance and speed, a line each."""
    told = pair.figures()
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(told.mtp.acceptance.rates, 1))
    loops = f"{len(pair.checks) - len(pair.sound)} of {len(pair.checks)} texts loop, left out"
    return (
        f"{label:14} AL {told.mtp.acceptance.length:.2f} at K = {drafts}  {rates}  ({loops})\n"
        f"{'':14} plain {told.plain.tokens_per_s:.0f} tokens/s, MTP {told.mtp.tokens_per_s:.0f} tokens/s = "
        f"{told.speedup:.2f} x"
    )


def _continued(prompt: "Sequence[int]", rounds: "Sequence[Round]", marks: Marks) -> "Text":
    """The end of a prompt of bytes, then what each round added."""
    text = plain(
        bytes(token for token in prompt[-120:] if token < 256).decode(errors="replace"), style="dim", lines=True
    )
    for each in rounds:
        text.append_text(_marked(each.rows[0], marks))
    return text


def _marked(part: "RowRound", marks: Marks) -> "Text":
    kept = bytes(token for token in part.emitted[: part.kept] if token < 256).decode(errors="replace")
    own = bytes(token for token in part.emitted[part.kept :] if token < 256).decode(errors="replace")
    text = marks.text(kept, accepted=bool(part.kept))
    return text.append_text(marks.text(own, accepted=False))
