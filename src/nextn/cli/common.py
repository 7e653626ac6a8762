"""What the commands share: options with one meaning everywhere, signals, loading the model."""

import os
import re
import shlex
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
from nextn.errors import CheckpointError, ConfigError
from nextn.settings import BACKENDS, KV_CACHE_DTYPES, WEIGHTS, available_cores
from nextn.text_format import install_command

if TYPE_CHECKING:
    import torch

    from nextn.checkpoint.checkpoint import Checkpoint
    from nextn.engines.client import Budget
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.published_curves import MeasuredCurve, PublishedCurve
    from nextn.evaluate.workload import Prompt
    from nextn.model.model import Model, TextInterface

_QUIET_S = 1.0
_WAITING = b"\nstopping after this step; Ctrl-C again ends at once\n"
_DTYPES = ("auto", "float32", "bfloat16")
_AUTO = "auto"  # of --weights
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


_SOURCES = "hub id (ORG/NAME or ORG/NAME@REVISION), or tiny: the one that comes with the package."
CheckpointName = Annotated[str, Argument(help=f"Checkpoint folder, {_SOURCES}", callback=shipped_path)]
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


def _refuse_without_head(gguf: str) -> None:
    from nextn.checkpoint.gguf_file import GgufFile
    from nextn.edit.gguf_architectures import architecture_of

    _, metadata = architecture_of(GgufFile.open(Path(gguf)))
    if not metadata.num_modules:
        file = shlex.quote(gguf)
        raise CheckpointError(
            f"{gguf}: holds no MTP head. Give a file that has it (llama.cpp's converter leaves it out with --no-mtp), "
            "name one with --head, or decode without (-k 0). To add the base model's: "
            f"`nextn convert {file} OUT`, then `nextn restore OUT --from BASE`; `nextn train` makes a new one."
        )


def open_checkpoint(source: str | Path) -> "Checkpoint":
    """Open a checkpoint. Raises CheckpointError."""
    from nextn.checkpoint.checkpoint import Checkpoint

    return Checkpoint.open(source)


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that loads a model.

    `source` is a checkpoint folder or hub id; a .gguf file until `prepared`.
    """

    source: Annotated[
        str,
        Argument(
            metavar="model",
            help=f"Checkpoint folder, .gguf file, {_SOURCES}",
            callback=shipped_path,
            show_default=False,
        ),
    ]
    dtype: Annotated[str, Option(help="float32, bfloat16, or auto: as stored.")] = "auto"
    exact_head: Annotated[
        bool,
        Option(
            "--exact-head",
            help="Draft with the stored weights. Default: 4 bits for the lm_head of a large vocabulary, and 7 bits for "
            "a bf16 head if the CPU has AVX512-BF16 but no AMX.",
        ),
    ] = False
    backend: Annotated[
        str, Option(help="torch, native (C++ runtime, CPU only), or auto: native if it supports the model and device.")
    ] = "auto"
    weights: Annotated[
        str,
        Option(
            help="stored, or int8 or int4: decode with quantized weights (native backend only); auto: the fastest of "
            "them whose divergence from float32, which is measured, is small."
        ),
    ] = "stored"
    threads: Annotated[
        int | None,
        Option(help="Threads that decode on the CPU, natively or in torch. Default: torch's, as `nextn env` shows."),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Option(help="auto: as the model; int8: a byte per value, a scale per position and head (native backend only)."),
    ] = "auto"
    device: Device = "auto"
    device_map: Annotated[
        str | None,
        Option(
            help="Spread the decoder layers: auto (GPUs, then host memory, then disk), equal shares on places such as "
            "cuda:0,cuda:1,cpu,disk, or a .json file of names and places."
        ),
    ] = None
    head: Annotated[
        str | None,
        Option(
            help="Use the head of this checkpoint instead: folder, .safetensors file or hub id.",
            callback=shipped_option,
        ),
    ] = None
    _gguf: str | None = None  # the file that `source` was converted from, see `prepared`

    def check(self) -> None:
        """Refuse options that no model can be loaded with, before torch is imported.

        Hub ids are not looked up here; a local checkpoint is opened. A GGUF file is refused: see `prepared`. Raises
        ConfigError if the dtype, backend, device type, or type of weights or of the KV cache is unknown, or they
        exclude each other, or there are more threads than cores; CheckpointError if there is no such checkpoint.
        """
        self._check_values()
        self._check_sources()

    def prepared(self) -> "ModelOptions":
        """Check the options, and return them with the checkpoint folder of a GGUF file, converted in the user's cache.

        Raises as `check` and `converted_gguf`.
        """
        self._check_values()
        is_gguf = self.source.endswith(".gguf") and Path(self.source).is_file()
        options = self._converted() if is_gguf else replace(self, _gguf=None)
        options._check_sources()
        return options

    @property
    def given(self) -> str:
        """The model as the user named it: of a prepared GGUF file, not the folder that it was converted to."""
        return self._gguf or self.source

    def _converted(self) -> "ModelOptions":
        from nextn import __version__
        from nextn.edit.gguf_cache import converted_gguf
        from nextn.edit.gguf_layout import HEAD_FOLDER

        cache = user_cache("gguf")
        folder = converted_gguf(Path(self.source), cache, version=__version__, note=print_note)
        head = folder / HEAD_FOLDER
        apart = str(head) if self.head is None and head.is_dir() else self.head
        return replace(self, source=str(folder), head=apart, _gguf=self.source)

    def _check_values(self) -> None:
        choices = {
            "dtype": _DTYPES,
            "backend": BACKENDS,
            "weights": (*WEIGHTS, _AUTO),
            "kv_cache_dtype": KV_CACHE_DTYPES,
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r}; expected one of {', '.join(known)}")
        check_device(self.device)
        if self.threads is not None and not 1 <= self.threads <= available_cores():
            raise ConfigError(
                f"--threads {self.threads}; expected 1 to {available_cores()}, the cores that this process may use"
            )
        if self.native_only and (self.backend == "torch" or self.device not in ("auto", "cpu")):
            raise ConfigError(
                f"{' and '.join(self.native_only)} excludes --backend torch and devices other than cpu: only the "
                "native backend has it, and it runs on CPUs"
            )
        self._check_device_map()

    def _check_sources(self) -> None:
        from nextn.checkpoint.remote import split_hub_id

        if split_hub_id(self.source) is None or Path(self.source).exists():
            open_checkpoint(self.source)
        if self.head is not None and Path(self.head).exists():
            open_checkpoint(self.head)

    def _check_device_map(self) -> None:
        if self.device_map is not None and (self.backend == "native" or self.native_only):
            raise ConfigError(
                f"--device-map {self.device_map} excludes {' and '.join(self.native_only) or '--backend native'}: the "
                "native backend has all layers in memory"
            )

    @property
    def native_only(self) -> list[str]:
        """The options that only the native backend has."""
        options = {"--weights": (self.weights, WEIGHTS), "--kv-cache-dtype": (self.kv_cache_dtype, KV_CACHE_DTYPES)}
        return [f"{name} {value}" for name, (value, known) in options.items() if value != known[0]]

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """The dtype for `Model.load`."""
        import torch

        return None if self.dtype == "auto" else getattr(torch, self.dtype)

    def load(self, *, need_head: bool, stream: bool = False, in_torch: bool = False) -> "Model":
        """Load the model, streamed as by `Model.load`; call `prepared` first.

        `in_torch`: the trunk will run in torch whatever the backend is, so quantized weights are dequantized.
        """
        import torch

        from nextn.model.device_map import check_accelerate, spread_layers
        from nextn.model.model import Model
        from nextn.runtime.backend import unused_codes

        if need_head and self.head is None and self._gguf is not None:
            _refuse_without_head(self._gguf)
        if self.threads is not None:
            torch.set_num_threads(self.threads)  # before the native runtime is loaded, whose team has as many
        if self.device_map is not None:
            check_accelerate()
        loaded = Model.load(
            self.source,
            dtype=self.torch_dtype,
            need_head=need_head,
            device="cpu" if self.native_only else self.device,
            stream=stream,
            defer=self.device_map is not None,
            head=self.head if need_head else None,
        )
        loaded.trunk.kv_cache_dtype = self.kv_cache_dtype
        if self.weights == _AUTO:
            self._choose_weights(loaded)
        else:
            loaded.trunk.weights = self.weights
        if loaded.head is not None:
            loaded.head.exact = self.exact_head
        if in_torch or self.backend == "torch" or self.device_map is not None:
            loaded.dequantize()
        if self.device_map is not None:
            print_note(f"decoder layers: {spread_layers(loaded.trunk, self.device_map, user_cache('offload'))}")
        loaded.notes += tuple(unused_codes(loaded))
        return loaded

    def _choose_weights(self, loaded: "Model") -> None:
        """Measure weights of few bits on built-in text, and note what was found."""
        import torch

        from nextn.evaluate.accuracy import CONTEXT, MAX_KL, Reference, choose_weights, compared_texts
        from nextn.model.model import Model

        context = min(CONTEXT, loaded.trunk.max_length or CONTEXT)
        texts = compared_texts(loaded.tokenizer, num_tokens=CONTEXT, context=context).tokens
        exact = Model.load(self.source, dtype=torch.float32, need_head=False, skip_head=True, stream=True)
        found = choose_weights(loaded, Reference.of(exact.trunk, texts), source=self.source)
        figures = ", ".join(f"{each.weights} {each.accuracy.kl_mean:.2g}" for each in found)
        print_note(
            f"--weights {loaded.trunk.weights}: mean KL from float32 {figures} nats, on {found[0].accuracy.positions} "
            f"tokens; at most {MAX_KL} is taken"
        )


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
