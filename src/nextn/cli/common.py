"""What the verbs share: options of one meaning, the console, text that is never taken for markup."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nextn.model import Model

    Step = Callable[[], None]

ModelName = Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")]
Prompts = Annotated[
    Path | None, typer.Option(help="Prompts of your own: .txt (blank lines between) or .jsonl; see docs/benchmarks.md.")
]
Temperatures = Annotated[str, typer.Option(help="Comma-separated; 0 = greedy.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
CacheDir = Annotated[Path | None, typer.Option(help="The hub's cache; left out: the usual place.")]
Offline = Annotated[bool, typer.Option("--offline", help="Read a hub id from the cache alone.")]
Drafts = Annotated[int, typer.Option("--drafts", "-k", help="Tokens drafted per round; 0 is plain decoding.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens per text at most.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, or auto for as stored.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompts through the chat template.")]
PathName = Annotated[
    str, typer.Option("--path", help="auto; fast: native runtime (CPU), CUDA graphs, or an error; plain: torch.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]
DraftVocab = Annotated[
    int, typer.Option(help="Draft from that many tokens only, the most frequent of --draft-text; 0 = from all.")
]
DraftText = Annotated[Path | None, typer.Option(help="A text like those that will be decoded.")]
ExactHead = Annotated[
    bool, typer.Option("--exact-head", help="Draft by all bits of the head's weights where seven would be faster.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def console(*, stderr: bool = False, width: int | None = None) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, width=width)


def plain(text: str, style: str | None = None) -> "Text":
    from rich.text import Text

    return Text(text, style=style or "")


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM set a flag that the loop looks at between steps; a second SIGINT interrupts at once."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def load_model(model: str, dtype: str, *, need_head: bool, device: str = "cpu", exact_head: bool = False) -> "Model":
    """dtype: `float32`, `bfloat16`, or `auto` for as stored. exact_head: see `Head.exact`."""
    import torch

    from nextn.model import Model

    dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise ConfigError(f"dtype {dtype!r}; expected one of {', '.join(dtypes)}")
    loaded = Model.load(model, dtype=dtypes[dtype], need_head=need_head, device=device)
    if loaded.head is not None:
        loaded.head.exact = exact_head
    return loaded


def draft_from(model: "Model", size: int, text: Path | None) -> None:
    """Have the head draft from the `size` most frequent tokens of the text. Raises ConfigError."""
    if not size and text is None:
        return
    if not size or text is None:
        raise ConfigError("--draft-vocab N and --draft-text FILE belong together: the N most frequent tokens of FILE")
    from nextn.shortlist import Shortlist
    from nextn.text import encode, eos_tokens

    if model.head is None:
        raise ConfigError("--draft-vocab: the model has no head to draft with")
    try:
        ids = encode(model, text.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--draft-text {text}: not a readable text: {error}") from error
    vocab_size = model.trunk.vocab_size
    model.head.shortlist = Shortlist.of([ids], size, vocab_size=vocab_size, always=eos_tokens(model))


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {text!r}; expected numbers with commas between, such as 0,1") from error


@contextmanager
def progress_bars(*, quiet: bool) -> "Iterator[Callable[[str, int | None], Step]]":
    """progress(what, total) adds a bar and returns what moves it by one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as bar:

        def added(what: str, total: int | None) -> "Step":
            task = bar.add_task(what, total=total)
            return lambda: bar.advance(task)

        yield added


def print_whole(table: "Table") -> None:
    """Figures cut short are none: a narrow terminal folds the lines itself."""
    console(width=max(console().width, 120)).print(table, crop=False)
