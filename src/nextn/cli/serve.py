"""`nextn serve` answers requests to an OpenAI-compatible API until it is stopped."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from nextn.cli.common import K_NAMES, ModelOptions, NumCopyTokens, expanded, open_checkpoint
from nextn.cli.decode import DraftVocabularyOptions
from nextn.cli.progress import say_doing
from nextn.cli.screen import echo, flush_streams, print_note, print_notes
from nextn.errors import ConfigError
from nextn.text_format import install_command

if TYPE_CHECKING:
    from nextn.model.model import Model
    from nextn.serve.options import ServerOptions

_DEFAULT_K = 4


@expanded("device_map")
def serve(
    *,
    context: typer.Context,
    host: Annotated[str, Option(help="Address to bind to. 0.0.0.0: reachable from other machines.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 = a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, Option(help="Name of the model in requests. Default: the folder's name, or the hub id.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, Option(*K_NAMES, help=f"Most draft tokens per round; 0 = plain decoding. Default: {_DEFAULT_K}.")
    ] = None,
    num_copy_tokens: NumCopyTokens = 0,
    fixed_k: Annotated[bool, Option("--fixed-k", help="Always draft -k tokens, even if fewer are faster.")] = False,
    max_num_seqs: Annotated[int, Option(help="Sequences that are decoded at once.")] = 16,
    max_model_len: Annotated[
        int | None,
        Option(help="Tokens of a prompt and its completion. Default: the model's context, or what --cache-gb holds."),
    ] = None,
    cache_gb: Annotated[float, Option(help="Memory for the caches of sequences and prefixes, in GB.")] = 2.0,
    api_key_env: Annotated[
        str | None, Option(help="Environment variable with the key that clients must send. Default: no key.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, Option(help="Origin whose web pages may call the API; repeatable. Default: none.")
    ] = None,
    request_timeout: Annotated[float, Option(help="Seconds after which an answer is ended with an error.")] = 600,
    grace: Annotated[float, Option(help="Seconds for running answers to end when the server is stopped.")] = 30,
    reference: Annotated[
        Path | None, Option(help="Record of `nextn measure --out`: the page compares acceptance with it.")
    ] = None,
    per_request_metrics: Annotated[
        bool, Option("--per-request-metrics", help="Add acceptance to every answer, as vLLM can.")
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        Option(
            help="How the model writes tool calls: deepseek, glm_xml, hermes, llama3_json, mistral or qwen_xml. "
            "Default: by its chat template."
        ),
    ] = None,
    print_engine: Annotated[
        str | None,
        Option("--print", help="Print the command that serves this model in vllm, sglang or llama.cpp, and exit."),
    ] = None,
    vocabulary: DraftVocabularyOptions,
    source: ModelOptions,
) -> None:
    """Serve a model with an OpenAI-compatible API and a chat page, until Ctrl-C or SIGTERM."""
    if print_engine is not None:
        _check_printed(context, print_engine)
        _print_command(print_engine, source, num_speculative_tokens)
        return
    _check_extra()
    from nextn.checkpoint.file_index import FileStamps
    from nextn.serve.options import (
        EngineOptions,
        ServerOptions,
        allowed_hosts,
        checked_numbers,
        listen,
        reference_rates,
    )
    from nextn.serve.tool_calls import tool_syntax

    tool_syntax(None, tool_call_parser)  # refuses an unknown name
    k = _DEFAULT_K if num_speculative_tokens is None else num_speculative_tokens
    numbers = checked_numbers(request_timeout=request_timeout, grace=grace)
    engine_options = EngineOptions(
        backend=source.backend,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        cache_gb=cache_gb,
        num_speculative_tokens=k,
        num_copy_tokens=num_copy_tokens,
        adaptive=not fixed_k,
    )
    key, rates = _key(api_key_env), reference_rates(reference) if reference is not None else ()
    source, name = source.prepared(), source.source
    draftable = vocabulary.read()
    with listen(host, port) as sock:
        say_doing(f"loading {name}")
        from nextn.runtime.native.abi import zero_lost_pages
        from nextn.serve.api import create_app
        from nextn.serve.engine import ServingEngine
        from nextn.serve.http_server import HttpServer

        folders = (Path(each) for each in (source.source, source.head) if each and Path(each).is_dir())
        files = FileStamps.of_weights(*folders)
        loaded = source.load(need_head=k > 0)
        draftable.apply(loaded, num_speculative_tokens=k, backend=source.backend)
        zero_lost_pages(file for file, _ in files.stamps)
        engine = ServingEngine(loaded, engine_options)
        options = ServerOptions(
            served_name=served_model_name or _default_name(name),
            max_model_len=engine.max_model_len,
            api_key=key,
            allowed_hosts=allowed_hosts(host),
            cors_origins=tuple(cors_origin or ()),
            **numbers,  # type: ignore[arg-type]
            metrics_in_answers=per_request_metrics,
            num_speculative_tokens=k,
            reference_rates=rates,
            tool_call_parser=tool_call_parser,
            weight_files=files,
        )
        server = HttpServer(create_app(engine, loaded, options), options)
        if not engine.limits.prefix_bytes:
            print_note("no prefix cache: the state of this model's layers after a part of a prompt cannot be copied")
        if engine.context_note:
            print_note(engine.context_note)
        mtp = f"K {'=' if fixed_k else 'up to'} {k}" if k else "plain decoding"
        _show(loaded, options, host, sock.getsockname()[1], mtp)
        try:
            server.run(sockets=[sock])
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
    """Raise ConfigError for options that the printed command does not have."""
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


def _show(model: "Model", options: "ServerOptions", host: str, port: int, mtp: str) -> None:
    print_notes(model.notes)
    if long := model.length_note(options.max_model_len):
        print_note(long)
    if options.allowed_hosts is None and options.api_key is None:
        print_note(f"every machine that reaches {host} can use this server; --api-key-env asks for a key")
    shown_host = f"[{host}]" if ":" in host else host
    details = f"chat page; API under /v1; {mtp}; context {options.max_model_len} tokens"
    echo(f"{options.served_name} at http://{shown_host}:{port}  ({details})")
