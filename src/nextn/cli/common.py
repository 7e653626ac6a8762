"""What the verbs share: options of one meaning, signals, the model."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.errors import ConfigError
from nextn.settings import PATHS

if TYPE_CHECKING:
    from nextn.model import Model

_DTYPES = ("auto", "float32", "bfloat16")
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
    str, typer.Option("--path", help="auto; fast: the native runtime (CPUs) or an error; plain: torch.")
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


def check_device(device: str) -> None:
    """Refuse, without torch, what is no device. Raises ConfigError."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", device):
        raise ConfigError(f"device = {device!r}; expected auto, cpu, cuda, mps or one of several, such as cuda:1")


def check_model(model: str, dtype: str, *, path: str = "auto", device: str = "auto") -> None:
    """Refuse, without torch, the options of `load_model` that no model can be loaded by.

    Args:
        model: A hub id is not looked up here; what is on this machine is opened.
        dtype: `float32`, `bfloat16`, or `auto` for as stored.
        path: What it decodes on, see `Model.engine`.
        device: `auto`, or as torch names it.

    Raises:
        ConfigError: An unknown dtype, path or kind of device.
        CheckpointError: No checkpoint lies there.
    """
    for name, value, known in (("dtype", dtype, _DTYPES), ("path", path, PATHS)):
        if value not in known:
            raise ConfigError(f"{name} {value!r}; expected one of {', '.join(known)}")
    check_device(device)
    from nextn.checkpoints.checkpoint import Checkpoint

    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", model, re.ASCII) or Path(model).exists():
        Checkpoint.open(model)


def load_model(model: str, dtype: str, *, need_head: bool, device: str, exact_head: bool = False) -> "Model":
    """Load what `check_model` has let pass. exact_head: see `Head.exact`."""
    import torch

    from nextn.model import Model

    stored = None if dtype == "auto" else getattr(torch, dtype)
    loaded = Model.load(model, dtype=stored, need_head=need_head, device=device)
    if loaded.head is not None:
        loaded.head.exact = exact_head
    return loaded


def read_draft_text(size: int, text: Path | None) -> str | None:
    """Read --draft-text; None where --draft-vocab is off. Raises ConfigError."""
    if not size and text is None:
        return None
    if not size or text is None:
        raise ConfigError("--draft-vocab N and --draft-text FILE belong together: the N most frequent tokens of FILE")
    try:
        return text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--draft-text {text}: not a readable text: {error}") from error


def draft_from(model: "Model", size: int, text: str | None) -> None:
    """Have the head draft from the `size` most frequent tokens of the text, if there is one. Raises ConfigError."""
    if text is None:
        return
    from nextn.shortlist import Shortlist
    from nextn.text import encode, eos_tokens

    if model.head is None:
        raise ConfigError("--draft-vocab: the model has no head to draft with")
    vocab_size = model.trunk.vocab_size
    model.head.shortlist = Shortlist.of([encode(model, text)], size, vocab_size=vocab_size, always=eos_tokens(model))


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {text!r}; expected numbers with commas between, such as 0,1") from error
