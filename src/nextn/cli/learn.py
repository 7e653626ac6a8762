"""`nextn demo` decodes and trains small models; `nextn env` describes the machine for bug reports."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.common import AsJson, NumSpeculativeTokens, stop_flag
from nextn.cli.screen import Marks, console, echo, plain, print_json
from nextn.cli.train_common import progress, say_stopped
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from nextn.decoding.batch import Round, SequenceRound
    from nextn.demo import DecodedModel, DecodedPair, DemoReport

_INTRODUCTION = """\
A byte-level model of Python code (5 MB) continues held-out code. In each round its MTP head drafts \
{k} tokens, and the trunk checks them in one pass. The drafts up to the first wrong one are accepted ({marked}); \
the trunk adds one token of its own, the bonus token. So the text is the trunk's; only the number of passes differs."""
_LEGEND = """\
AL: mean acceptance length, tokens per round with the bonus token. a_k: share of depth-k drafts that were accepted, \
where all before them were."""


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for the models, reports and figures.")] = Path("demo"),
    minutes: Annotated[
        float,
        typer.Option(
            min=0, help="Time budget of the training; 0 = only decode the checkpoint that comes with the package."
        ),
    ] = 4.0,
    num_speculative_tokens: NumSpeculativeTokens = 4,
    as_json: AsJson = False,
) -> None:
    """Decode a small byte-level code model without and with its MTP head, then train another one and decode that.

    The first part takes less than a minute. Ctrl-C stops the training; the same command resumes it.
    """
    if num_speculative_tokens < 1:
        raise ConfigError(f"--num-speculative-tokens {num_speculative_tokens}; expected at least 1 draft per round")
    if not as_json:
        _introduce(num_speculative_tokens)
    from nextn.demo import decode_trained, train_demo

    record: dict[str, object] = {"shipped": _decode_shipped(folder / "shipped", num_speculative_tokens, quiet=as_json)}
    if minutes:
        if not as_json:
            _announce_training(folder, minutes)
        with stop_flag() as stopped, progress(quiet=as_json) as on_record:
            trained = train_demo(folder, minutes=minutes, on_record=on_record, should_stop=stopped)
        if trained is None:
            options = ("" if folder == Path("demo") else f" --folder {folder}") + f" --minutes {minutes:g}"
            say_stopped(folder / "run", f"nextn demo{options}")
            return
        report = decode_trained(trained, num_speculative_tokens=num_speculative_tokens)
        record |= report.as_record()
        if not as_json:
            _show_report(report)
    if as_json:
        print_json(record)


def _introduce(k: int) -> None:
    screen = console()
    screen.rule("[bold]1. A trained model, decoded without and with its MTP head")
    screen.print(_INTRODUCTION.format(k=k, marked=Marks.of(screen).words))


def _decode_shipped(folder: Path, k: int, *, quiet: bool) -> dict[str, object]:
    """Decode the shipped checkpoint and show it; return the results of each backend."""
    from nextn.demo import decode_shipped, plot_decoded

    started, records, screen = time.monotonic(), dict[str, object](), console()

    def announce_build() -> None:
        if not quiet:
            screen.print("\nNow with the native runtime, which is compiled once: 20 to 60 s.")

    for decoded in decode_shipped(folder, num_speculative_tokens=k, on_build=announce_build):
        records[decoded.backend] = decoded.as_record()
        if quiet:
            continue
        if len(records) == 1:
            _show_texts(decoded)
            screen.rule("[bold]results")
            screen.print(_LEGEND)
        _show_figures(decoded)
    if not quiet:
        names = ["model (its card: README.md)", "report.json", *_plots(lambda: plot_decoded(folder, decoded))]
        screen.print(plain(f"{time.monotonic() - started:.0f} s; in {folder}: {', '.join(names)}"))
        screen.print(plain(f'To try it: nextn generate {folder / "model"} "def add("'))
    return records


def _announce_training(folder: Path, minutes: float) -> None:
    screen, duration = console(), "one minute" if minutes == 1 else f"{minutes:g} minutes"
    screen.rule("[bold]2. Training such a model here")
    text = (
        f"Trunk and head are trained together on Python's standard library for {duration} (--minutes); the "
        f"speed of this machine decides how many steps that are. Ctrl-C stops, the same command resumes."
    )
    screen.print(plain(text))


def _show_report(report: "DemoReport") -> None:
    from nextn.demo import plot_decoded, plot_losses

    screen, folder = console(), report.trained.folder
    _show_texts(report.decoded)
    screen.rule("[bold]results")
    _show_figures(report.decoded)
    for disagreement in report.disagreements:
        screen.print(plain(f"finding: {disagreement}"))
    if report.decoded.greedy.figures().speedup < 1:
        screen.print(
            f"note: {report.trained.evaluation.step} steps are too few for this model: its drafts cost more than they "
            "save. --minutes 30 trains it longer; the shipped model above learned for 1,200 steps of twice the size",
            style="dim",
        )
    names = ["model", "report.json", *_plots(lambda: [plot_losses(folder), *plot_decoded(folder, report.decoded)])]
    seconds = f"trained {report.trained.seconds:.0f} s, {report.total_s:.0f} s in all"
    screen.print(plain(f"{seconds}; in {folder}: {', '.join(names)}"))


def _plots(draw: Callable[[], Sequence[Path]]) -> list[str]:
    """Draw figures and return their names; without matplotlib, return a note."""
    try:
        return [path.name for path in draw()]
    except ConfigError as error:
        return [f"no figures ({error})"]


def _pairs(decoded: "DecodedModel") -> "tuple[tuple[str, DecodedPair], ...]":
    return (("greedy", decoded.greedy), ("temperature 1", decoded.sampled))


def _show_texts(decoded: "DecodedModel") -> None:
    """Print one continuation per temperature, of a prompt that does not end in repetition."""
    screen = console()
    marks = Marks.of(screen)
    for label, pair in _pairs(decoded):
        index = (pair.non_degenerate or [0])[0]
        screen.rule(f"[bold]held-out prompt {index + 1}, continued, {label} ({marks.words}: accepted drafts)")
        screen.print(_continuation(decoded.prompts[index], pair.mtp.rounds[index], marks))


def _show_figures(decoded: "DecodedModel") -> None:
    screen = console()
    reason = f" ({decoded.reason})" if decoded.reason else ""
    screen.print(plain(f"{decoded.backend} backend{reason}, {len(decoded.prompts)} prompts"))
    for label, pair in _pairs(decoded):
        same = "" if label != "greedy" else "  output identical" if decoded.identical else "  output DIFFERENT"
        screen.print(plain(f"{_figures(label, pair, decoded.num_speculative_tokens)}{same}", lines=True))


def _figures(label: str, pair: "DecodedPair", k: int) -> str:
    """Acceptance and speed, a line each."""
    figures = pair.figures()
    acceptance, speed = figures.mtp.acceptance, figures.mtp.tokens_per_s
    rates = "  ".join(f"a_{depth} {rate:.2f}" for depth, rate in enumerate(acceptance.rates, 1))
    left_out = f"{len(pair.checks) - len(pair.non_degenerate)} of {len(pair.checks)} texts repetitive, left out"
    if not pair.non_degenerate:
        left_out = "all texts are repetitive, which is easy to draft"
    return (
        f"{label:14} AL {acceptance.length:.2f} at K = {k}  {rates}  ({left_out})\n"
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
