"""`nextn serve` answers requests to an OpenAI-compatible API until it is stopped."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from nextn.cli.common import K_NAMES, NumCopyTokens, expanded, open_checkpoint
from nextn.cli.decode import DraftableText, DraftVocabularyOptions
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import say_doing
from nextn.cli.screen import echo, flush_streams, print_note, print_notes
from nextn.errors import ConfigError
from nextn.text_format import install_command

if TYPE_CHECKING:
    from nextn.checkpoint.file_index import FileStamps
    from nextn.model.model import Model
    from nextn.serve.engine import ServingEngine
    from nextn.serve.options import EngineOptions, ServerOptions

_DEFAULT_K = 4


@dataclass(frozen=True)
class ServeOptions:
    """The options of the server itself."""

    host: Annotated[str, Option(help="Address to bind to. 0.0.0.0: reachable from other machines.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port; 0 = a free one.")] = 8000
    served_model_name: Annotated[
        str | None, Option(help="Name of the model in requests. Default: the folder's name, or the hub id.")
    ] = None
    num_speculative_tokens: Annotated[
        int | None, Option(*K_NAMES, help=f"Most draft tokens per round; 0 = plain decoding. Default: {_DEFAULT_K}.")
    ] = None
    num_copy_tokens: NumCopyTokens = 0
    fixed_k: Annotated[bool, Option("--fixed-k", help="Always draft -k tokens, even if fewer are faster.")] = False
    max_num_seqs: Annotated[int, Option(help="Sequences that are decoded at once.")] = 16
    max_model_len: Annotated[
        int | None,
        Option(help="Tokens of a prompt and its completion. Default: the model's context, or what --cache-gb holds."),
    ] = None
    cache_gb: Annotated[float, Option(help="Memory for the caches of sequences and prefixes, in GB.")] = 2.0
    api_key_env: Annotated[
        str | None, Option(help="Environment variable with the key that clients must send. Default: no key.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, Option(help="Origin whose web pages may call the API; repeatable. Default: none.")
    ] = None
    request_timeout: Annotated[float, Option(help="Seconds after which an answer is ended with an error.")] = 600
    grace: Annotated[float, Option(help="Seconds for running answers to end when the server is stopped.")] = 30
    reference: Annotated[
        Path | None, Option(help="Record of `nextn measure --out`: the page compares acceptance with it.")
    ] = None
    per_request_metrics: Annotated[
        bool, Option("--per-request-metrics", help="Add acceptance to every answer, as vLLM can.")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        Option(
            help="How the model writes tool calls: deepseek, glm_xml, hermes, llama3_json, mistral or qwen_xml. "
            "Default: by its chat template."
        ),
    ] = None

    @property
    def k(self) -> int:
        return _DEFAULT_K if self.num_speculative_tokens is None else self.num_speculative_tokens

    def of_engine(self, backend: str) -> "EngineOptions":
        """Return the options of the engine. Raises ConfigError for values out of range."""
        from nextn.serve.options import EngineOptions

        return EngineOptions(
            backend=backend,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            cache_gb=self.cache_gb,
            num_speculative_tokens=self.k,
            num_copy_tokens=self.num_copy_tokens,
            adaptive=not self.fixed_k,
        )

    def of_requests(self, source: str) -> "Callable[..., ServerOptions]":
        """Return how the requests for a model are answered, without what only the loaded model says.

        Raises ConfigError for values out of range, a variable without a key, or a reference that cannot be read.
        """
        from nextn.serve.options import ServerOptions, allowed_hosts, check_seconds, reference_rates
        from nextn.serve.tool_calls import tool_syntax

        tool_syntax(None, self.tool_call_parser)  # refuses an unknown name
        check_seconds(request_timeout=self.request_timeout, grace=self.grace)
        return partial(
            ServerOptions,
            served_name=self.served_model_name or _default_name(source),
            api_key=_key(self.api_key_env),
            allowed_hosts=allowed_hosts(self.host),
            cors_origins=tuple(self.cors_origin or ()),
            request_s=self.request_timeout,
            grace_s=self.grace,
            metrics_in_answers=self.per_request_metrics,
            num_speculative_tokens=self.k,
            reference_rates=reference_rates(self.reference) if self.reference is not None else (),
            tool_call_parser=self.tool_call_parser,
        )


@expanded("device_map")
def serve(
    *,
    context: typer.Context,
    options: ServeOptions,
    print_engine: Annotated[
        str | None,
        Option("--print", help="Print the command that serves this model in vllm, sglang or llama.cpp, and exit."),
    ] = None,
    vocabulary: DraftVocabularyOptions,
    model: ModelOptions,
) -> None:
    """Serve a model with an OpenAI-compatible API and a chat page, until Ctrl-C or SIGTERM."""
    if print_engine is not None:
        _check_printed(context, print_engine)
        _print_command(print_engine, model, options.num_speculative_tokens)
        return
    _check_extra()
    from nextn.serve.options import listen

    of_engine, of_requests = options.of_engine(model.backend), options.of_requests(model.source)
    prepared = model.prepared(need_head=of_engine.num_speculative_tokens > 0)
    draftable = vocabulary.read()
    with listen(options.host, options.port) as sock:
        say_doing(f"loading {model.source}")
        loaded, engine, files = _load(prepared, draftable, of_engine)
        server_options = of_requests(max_model_len=engine.max_model_len, weight_files=files)
        _show(loaded, engine, server_options, options, sock.getsockname()[1])
        _run(loaded, engine, server_options, sock)


def _load(
    model: ModelOptions, draftable: "DraftableText", options: "EngineOptions"
) -> "tuple[Model, ServingEngine, FileStamps]":
    """Load the model into an engine; also return the stamps of its files, as they were before."""
    from nextn.checkpoint.file_index import FileStamps
    from nextn.runtime.native.abi import zero_lost_pages
    from nextn.serve.engine import ServingEngine

    folders = (Path(each) for each in (model.source, model.head) if each and Path(each).is_dir())
    files, k = FileStamps.of_weights(*folders), options.num_speculative_tokens
    loaded = model.load(need_head=k > 0)
    draftable.apply(loaded, num_speculative_tokens=k, backend=model.backend)
    zero_lost_pages(file for file, _ in files.stamps)
    return loaded, ServingEngine(loaded, options), files


def _run(model: "Model", engine: "ServingEngine", options: "ServerOptions", sock: socket) -> None:
    from nextn.serve.api import create_app
    from nextn.serve.http_server import HttpServer

    try:
        HttpServer(create_app(engine, model, options), options).run(sockets=[sock])
    except KeyboardInterrupt:
        # The engine's thread is in the middle of a pass, and an interpreter that ends beside it aborts.
        echo("interrupted", err=True)
        flush_streams()
        os._exit(130)


def _check_extra() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}: {install_command('serve')}")


def _check_printed(context: typer.Context, engine: str) -> None:
    printed = ("source", "print_engine", "num_speculative_tokens", "head")
    names = {each.name: each.opts[0] for each in context.command.params if each.name and each.name not in printed}
    given = [option for name, option in names.items() if "COMMANDLINE" in str(context.get_parameter_source(name))]
    if given:
        raise ConfigError(
            f"--print {engine} takes MODEL and -k alone: leave out {', '.join(given)}, and add the engine's "
            "own options to the printed command"
        )


def _print_command(engine: str, model: ModelOptions, k: int | None) -> None:
    from nextn.serve.engine_commands import as_script, engine_commands

    if model.head is not None:
        from nextn.edit.export import export_command

        command = export_command(model.head, model.source, engine, k)
        raise ConfigError(f"--print with --head: `{command}` writes it for the engine, and prints the command")
    checkpoint = open_checkpoint(model.source)
    echo(as_script(engine_commands(checkpoint, engine, num_speculative_tokens=k)))


def _default_name(source: str) -> str:
    """The folder's name, not its path, which may say more than clients should know; a hub id as it is.

    `nextn train` writes into the folder `model` of a run: the run's name says more.
    """
    path = Path(source)
    if not path.exists():
        return source
    name, parent = path.resolve().name or source, path.resolve().parent.name
    return parent if name == "model" and parent else name


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        message = f"--api-key-env {variable}: that variable holds no key; export one of printable ASCII characters"
        raise ConfigError(message)
    return key


def _show(model: "Model", engine: "ServingEngine", options: "ServerOptions", given: ServeOptions, port: int) -> None:
    if not engine.limits.prefix_bytes:
        print_note("no prefix cache: the state of this model's layers after a part of a prompt cannot be copied")
    print_notes([note for note in (engine.context_note, *model.notes) if note])
    if long := model.length_note(options.max_model_len, what="requests may reach"):
        print_note(long)
    if options.allowed_hosts is None and options.api_key is None:
        print_note(f"every machine that reaches {given.host} can use this server; --api-key-env asks for a key")
    shown_host = f"[{given.host}]" if ":" in given.host else given.host
    mtp = f"K {'=' if given.fixed_k else 'up to'} {given.k}" if given.k else "plain decoding"
    details = f"chat page; API under /v1; {mtp}; context {options.max_model_len} tokens"
    echo(f"{options.served_name} at http://{shown_host}:{port}  ({details})")
