"""What the commands share: options with one meaning everywhere, signals, loading the model."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from importlib.util import find_spec
from inspect import Parameter, Signature, get_annotations, signature
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, get_type_hints

from typer import Argument, Option

from nextn.cli.screen import print_lines, print_note
from nextn.errors import ConfigError
from nextn.text_format import install_command

if TYPE_CHECKING:
    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.engines.client import Budget
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.published_curves import MeasuredCurve, PublishedCurve
    from nextn.evaluate.workload import Prompt
    from nextn.model.model import Model
    from nextn.model.text_interface import TextInterface

_QUIET_S = 1.0
_WAITING = b"\nstopping after this step; Ctrl-C again ends at once\n"
FOLLOW_LINKS = "NEXTN_FOLLOW_LINKS"  # environment variable
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def shipped_path(name: str) -> str:
    """Return the path of the checkpoint in the package for its name; commands show it, and look at its files."""
    from nextn.checkpoint import checkpoint

    return str(checkpoint.shipped_path(name))


def shipped_option(name: str | None) -> str | None:
    """Return `shipped_path` of an option's name; None if it is left out."""
    return name and shipped_path(name)


def follows_links() -> bool:
    """Whether edits follow links that lead out of a checkpoint's folder."""
    return os.environ.get(FOLLOW_LINKS) == "1"


def writable(path: Path | None) -> Path | None:
    """Check, before anything is computed, that a file can be written there; return its path. Raises ConfigError."""
    if path and (path.is_dir() or not _can_hold_files(path.absolute().parent)):
        raise ConfigError(f"{path}: expected a file, in a folder that can be written to")
    return path


def appendable(path: Path) -> Path:
    """Check the same for a file that grows in place; one that exists needs no folder that can be written to."""
    return path if path.is_file() and os.access(path, os.W_OK) else writable(path) or path


def writable_folder(path: Path) -> Path:
    """Check the same for a folder, which may be new."""
    if not _can_hold_files(path.absolute()):
        raise ConfigError(f"{path}: expected a folder that can be written to, or a new one in such a folder")
    return path


def _can_hold_files(folder: Path) -> bool:
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


SOURCES = "hub id (ORG/NAME or ORG/NAME@REVISION), tiny (in the package) or smollm2 (which `nextn demo` downloads)."
HEAD_SOURCES = "folder, .safetensors file, hub id or smollm2-head (in the package, for smollm2)."
CheckpointName = Annotated[str, Argument(help=f"Checkpoint folder, {SOURCES}", callback=shipped_path)]
Prompts = Annotated[
    Path | None,
    Option(
        help='File of prompts: .txt (separated by blank lines), or .jsonl or .parquet with "prompt", "text", '
        '"messages" or "turns"; a folder of SPEED-Bench\'s script; FILE:CATEGORY or FOLDER:CATEGORY; '
        "speed-bench[:CATEGORY] or humaneval. Default: a built-in set."
    ),
]
RecordFile = Annotated[Path | None, Option(help="File for the JSON record.", callback=writable)]
Temperatures = Annotated[str, Option(help="Comma-separated temperatures; 0 = greedy.")]
K_NAMES = ("--num-speculative-tokens", "-k")
NumSpeculativeTokens = Annotated[int, Option(*K_NAMES, help="Draft tokens per round; 0 = plain decoding.")]
NumCopyTokens = Annotated[
    int, Option("--copy", help="Most draft tokens per round that are copied from the text so far; 0 = none.")
]
MaxTokens = Annotated[int, Option(help="Maximum number of new tokens per text.")]
Chat = Annotated[
    bool | None,
    Option(
        "--chat/--no-chat",
        help="Apply the chat template to text prompts. Default: if the tokenizer has one.",
        show_default=False,
    ),
]
Thinking = Annotated[
    bool | None,
    Option(
        "--thinking/--no-thinking",
        help="Turn thinking on or off in the chat template. Default: the template's.",
        show_default=False,
    ),
]
Device = Annotated[str, Option(help="auto, cpu, cuda, mps, xpu, or one of several such as cuda:1.")]
ADDRESS = "such as localhost:8000, or localhost:8000#MODEL if it serves several"
_served_option = partial(Option, rich_help_panel="With a served copy of the model")
AsJson = Annotated[bool, Option("--json", help="Print one JSON document instead of text.")]


def expanded(*without: str, **defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose parameters may be dataclasses of options.

    Typer sees the fields of these in their place, an argument first, but for internal ones (`_x`) and those in
    `without`; `defaults` override theirs.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[Parameter] = []
        groups: dict[str, tuple[type, list[str]]] = {}
        for parameter in signature(command, eval_str=True).parameters.values():
            group = parameter.annotation
            if not is_dataclass(group):
                parameters.append(parameter)
                continue
            assert isinstance(group, type)
            types = get_type_hints(group, include_extras=True)
            shared = [field for field in fields(group) if field.name not in without and field.name[0] != "_"]
            inherited = {field.name for field in shared} - get_annotations(group).keys()
            shared.sort(key=lambda field: field.name in inherited)
            groups[parameter.name] = group, [field.name for field in shared]
            for field in shared:
                is_argument = field.default is MISSING
                default = defaults.get(field.name, Parameter.empty if is_argument else field.default)
                option = parameter.replace(name=field.name, annotation=types[field.name], default=default)
                parameters.insert(0 if is_argument else len(parameters), option)

        @wraps(command)
        def run(**given: object) -> None:
            made = {name: group(**{field: given.pop(field) for field in own}) for name, (group, own) in groups.items()}
            command(**given, **made)

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def open_checkpoint(source: str | Path) -> "Checkpoint":
    """Open a checkpoint. Raises CheckpointError."""
    from nextn.checkpoint.checkpoint import Checkpoint

    return Checkpoint.open(source)


@dataclass(frozen=True)
class EngineAccess:
    """The options of commands whose texts an engine writes."""

    max_seconds, timeout = 10.0**9, 600.0  # a run may take days, and is resumable

    engine: Annotated[str | None, _served_option(help=f"Address of an engine that serves this model, {ADDRESS}.")] = (
        None
    )
    concurrency: Annotated[int, _served_option(min=1, help="Requests to the engine at a time.")] = 8

    @property
    def url(self) -> str:
        """The engine's address; empty without an engine."""
        return self.engine or ""

    def open(self, *, chat: bool = False) -> "Endpoint":
        """Connect to the engine. chat: through its chat template. Raises EngineError if it does not answer."""
        if self.url.partition("#")[0] == "-":
            raise ConfigError("--engine -: standard input cannot be asked; give a running engine's address")
        from nextn.engines.endpoint import Endpoint

        return Endpoint.open(self.url, self.budget(), chat=chat)

    def budget(self) -> "Budget":
        """The budget that all endpoints of a run share."""
        from nextn.engines.client import Budget, Limits

        return Budget(Limits(seconds=self.max_seconds, answer_s=self.timeout))


@dataclass(frozen=True)
class EngineTest(EngineAccess):
    """The options of commands that send requests to an engine to test it."""

    max_seconds: Annotated[float, Option(help="Maximum seconds for all requests.")] = 900
    timeout: Annotated[float, Option(help="Seconds per request.")] = 120


def user_cache(name: str) -> Path:
    """Return a folder in the user's cache. Raises ConfigError if there is none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nextn" / name
    except RuntimeError as error:
        raise ConfigError(f"no cache folder: {error}; set XDG_CACHE_HOME to one") from error


@contextmanager
def stop_flag(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Signals (SIGINT and SIGTERM) set a flag that the loop checks between steps; a second SIGINT interrupts at once.

    If the loop does not look at it soon, a line says what is waited for.
    """
    caught: list[int] = []
    # Not printed: the signal may have interrupted a print.
    waiting = Timer(_QUIET_S, os.write, (2, _WAITING))
    waiting.daemon = True

    def note(number: int, _: object) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not caught:
            waiting.start()
        caught.append(number)

    old = {number: signal.signal(number, note) for number in numbers or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        waiting.cancel()
        for number, handler in old.items():
            signal.signal(number, handler)


def first_turns(prompts: "Sequence[Prompt]") -> "list[Prompt]":
    """Return prompts without later turns, which an engine is not asked, and note how many conversations are cut."""
    if (count := sum(bool(prompt.later) for prompt in prompts)) > 0:
        print_note(f"{count} of {len(prompts)} prompts are conversations: the engine is asked the first turn of each")
    return [replace(prompt, later=()) for prompt in prompts]


def print_published(published: "tuple[PublishedCurve, MeasuredCurve]") -> None:
    """Show a published curve beside the measured one, and which conditions differ."""
    curve, measured = published
    print_lines(f"published, for comparison only: {curve.text(measured)}")


def check_matplotlib(option: str) -> None:
    """Refuse an option that draws where matplotlib is missing, before anything is measured. Raises ConfigError."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} draws figures, which needs matplotlib: {install_command('plot')}")


def check_figure(path: Path) -> None:
    """Refuse a picture that cannot be written. Raises ConfigError."""
    check_matplotlib("--figure")
    if path.suffix not in FIGURE_SUFFIXES or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"--figure {path}: expected a file in {', '.join(FIGURE_SUFFIXES)}, in a folder that can be written to"
        )


def check_device(device: str) -> None:
    """Refuse an unknown device type without importing torch. Raises ConfigError."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", device):
        raise ConfigError(f"device = {device!r}; expected auto, cpu, cuda, mps, xpu, or one of several such as cuda:1")


def use_chat(model: "Model | TextInterface", chat: bool | None) -> bool:
    """Resolve --chat/--no-chat; None: whether the tokenizer has a chat template."""
    return bool(model.tokenizer is not None and model.tokenizer.chat_template) if chat is None else chat


def parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {text!r}; expected comma-separated numbers, such as 0,1") from error
