"""`nextn demo` trains a small model and shows what its head does; `nextn env` describes the machine for bug reports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, NumSpeculativeTokens, stop_flag
from nextn.cli.screen import Marks, console, echo, plain, print_json
from nextn.cli.train_common import progress, say_stopped

if TYPE_CHECKING:
    from rich.text import Text

    from nextn.decoding.rounds import Round, SequenceRound
    from nextn.demo import DecodedPair, DemoReport


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for the model, report.json and the figures.")] = Path("demo"),
    num_speculative_tokens: NumSpeculativeTokens = 4,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level code model with an MTP head, then decode with and without it (6 to 10 minutes on 2 cores).

    On cores without bfloat16 instructions it takes 25 minutes.
    """
    from nextn.demo import plot_report, run_demo

    with stop_flag() as stopped, progress(quiet=as_json) as on_record:
        report = run_demo(folder, drafts=num_speculative_tokens, on_record=on_record, should_stop=stopped)
    if report is None:
        say_stopped(folder / "run", "nextn demo" if folder == Path("demo") else f"nextn demo --folder {folder}")
        return
    paths = plot_report(report)
    if as_json:
        print_json(report.as_record())
    else:
        _show_report(report, paths)


def _show_report(report: "DemoReport", paths: list[Path]) -> None:
    screen = console()
    marks = Marks.of(screen)
    pairs = (("greedy", report.greedy), ("temperature 1", report.sampled))
    for label, pair in pairs:
        index = (pair.non_degenerate or [0])[0]
        screen.rule(f"[bold]held-out prompt {index + 1}, continued, {label} ({marks.words}: accepted drafts)")
        screen.print(_continuation(report.prompts[index], pair.mtp.rounds[index], marks))
    screen.rule("[bold]results")
    for label, pair in pairs:
        same = "" if label != "greedy" else "  output identical" if report.identical else "  output DIFFERENT"
        screen.print(plain(f"{_figures(label, pair, report.drafts)}{same}", lines=True))
    names = ", ".join(["model", "report.json", *(path.name for path in paths)])
    screen.print(plain(f"trained {report.train_s:.0f} s, {report.total_s:.0f} s in all; in {report.folder}: {names}"))


def _figures(label: str, pair: "DecodedPair", drafts: int) -> str:
    """Acceptance and speed, a line each."""
    figures = pair.figures()
    acceptance, speed = figures.mtp.acceptance, figures.mtp.tokens_per_s
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(acceptance.rates, 1))
    left_out = f"{len(pair.checks) - len(pair.non_degenerate)} of {len(pair.checks)} texts repetitive, left out"
    return (
        f"{label:14} AL {acceptance.length:.2f} at K = {drafts}  {rates}  ({left_out})\n"
        f"{'':14} plain {figures.plain.tokens_per_s:.0f} tokens/s, MTP {speed:.0f} tokens/s = {figures.speedup:.2f} x"
    )


def _continuation(prompt: "Sequence[int]", rounds: "Sequence[Round]", marks: Marks) -> "Text":
    """The end of a prompt of bytes, then the tokens of each round."""
    text = plain(
        bytes(token for token in prompt[-120:] if token < 256).decode(errors="replace"), style="dim", lines=True
    )
    for each in rounds:
        text.append_text(_marked(each.rows[0], marks))
    return text


def _marked(part: "SequenceRound", marks: Marks) -> "Text":
    drafts = bytes(token for token in part.emitted[: part.num_accepted] if token < 256).decode(errors="replace")
    bonus = bytes(token for token in part.emitted[part.num_accepted :] if token < 256).decode(errors="replace")
    text = marks.text(drafts, accepted=bool(part.num_accepted))
    return text.append_text(marks.text(bonus, accepted=False))


def env(as_json: AsJson = False) -> None:
    """Report versions, processor, memory, GPUs and the decoding backend, for a bug report."""
    from nextn.environment import report

    sections = report()
    if as_json:
        echo(json.dumps(sections))
        return
    for name, value in sections.items():
        for key, cell in _rows(name, value):
            echo(f"{key:<28} {cell}")


def _rows(name: str, value: object) -> list[tuple[str, str]]:
    """One line per leaf of a section, under its dotted name."""
    if isinstance(value, dict):
        return [row for key, inner in value.items() for row in _rows(f"{name}.{key}", inner)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [row for index, item in enumerate(value) for row in _rows(f"{name}.{index}", item)]
    if isinstance(value, list):
        return [(name, ", ".join(map(str, value)) or "none")]
    if value is None:
        return [(name, "not found")]
    if name.endswith("_bytes") and isinstance(value, int):
        return [(name.removesuffix("_bytes"), f"{value / 2**30:.1f} GiB")]
    return [(name, str(value))]
