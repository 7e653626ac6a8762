"""`nextn answer`: generate training data for a head with the trunk itself."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from nextn.cli.common import AsJson, Chat, EngineAccess, Thinking, appendable, expanded, stop_flag, use_chat
from nextn.cli.decode import DecodingOptions
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars
from nextn.cli.screen import echo, print_notes, print_result
from nextn.errors import ConfigError
from nextn.settings import Sampling

if TYPE_CHECKING:
    from nextn.train.self_generated import AnswerProgress


@expanded(
    "num_copy_tokens", "exact_head", "threads", "kv_cache_dtype", "head", "concurrency",
    temperature=1.0, max_tokens=512,
)  # fmt: skip
def answer(
    *,
    out: Annotated[Path, Argument(help="Output .jsonl; an existing file is resumed.", callback=appendable)],
    prompts: Annotated[
        list[str],
        Option(
            help="Text files or folders, .jsonl, .parquet, a data set, speed-bench[:CATEGORY] or humaneval; repeatable."
        ),
    ],
    count: Annotated[
        int | None,
        Option(min=1, max=2**31 - 1, help="Number of prompts: records first, then cut from text files. Default: all."),
    ] = None,
    decoding: DecodingOptions,
    batch: Annotated[
        int, Option(min=1, help="Prompts that are answered at a time: a batch, or requests to the engine.")
    ] = 8,
    chat: Chat = None,
    thinking: Thinking = None,
    options: ModelOptions,
    asked: EngineAccess,
    as_json: AsJson = False,
) -> None:
    """Generate training data with the trunk, locally or through an engine; the same command resumes."""
    settings = decoding.settings
    if asked.engine is not None:
        _check_engine(settings.sampling, options)
    options = options.prepared()
    from nextn.data.benchmark_prompts import is_benchmark
    from nextn.data.sources import check_sources

    check_sources([source for source in prompts if not is_benchmark(source)])
    endpoint = None if asked.engine is None else asked.open()  # before anything that imports torch
    from nextn.model.text_interface import TextInterface
    from nextn.train.self_generated import generate_answers, read_prompts, served_answers

    model_of_text = options.load(need_head=False) if endpoint is None else TextInterface.read(options.source)
    chat = use_chat(model_of_text, chat)
    prompt_ids, notes = read_prompts(
        prompts, model_of_text, count=count, seed=settings.seed, chat=chat, thinking=thinking
    )
    print_notes(notes)
    with stop_flag() as stopped, progress_bars(quiet=as_json) as added:
        if isinstance(model_of_text, TextInterface):
            assert endpoint is not None
            settings = replace(settings, num_speculative_tokens=0, eos=model_of_text.eos)
            tokenizer = model_of_text.tokenizer
            progress = served_answers(
                endpoint, prompt_ids, settings, out, tokenizer, concurrency=batch, should_stop=stopped
            )
        else:
            progress = generate_answers(
                model_of_text, prompt_ids, settings, out, batch_size=batch, backend=options.backend, should_stop=stopped
            )
        state, step = None, added("answers", None)
        for state in progress:
            step(done=state.answers, total=max(state.total, state.answers), status=_status(state))
    assert state is not None
    _end(state, out, as_json=as_json)


def _check_engine(sampling: Sampling, options: ModelOptions) -> None:
    if sampling.top_k or sampling.top_p < 1:
        raise ConfigError("--top-k and --top-p: an engine samples from the whole distribution here; leave them out")
    given = options.native_only + ([] if options.device_map is None else [f"--device-map {options.device_map}"])
    if given:
        raise ConfigError(f"{' and '.join(given)} with --engine: the engine generates, and no layer is loaded here")


def _status(state: "AnswerProgress") -> str:
    return f"{state.tokens_per_s:,.0f} tok/s, {state.repetitive} repetitive" if state.tokens_per_s else ""


def _end(state: "AnswerProgress", out: Path, *, as_json: bool) -> None:
    """Print what was written; exit with code 130 if answers are missing."""
    print_result(state.as_record() | {"file": str(out)}, _summary(state, out), as_json=as_json)
    if state.answers < state.total:
        echo("stopped; the same command resumes", err=True)
        raise typer.Exit(130)


def _summary(state: "AnswerProgress", out: Path) -> str:
    finishes = ", ".join(f"{count} {reason}" for reason, count in state.finishes.most_common())
    lines = [f"{out}: {state.answers} of {state.total} answers, {state.tokens:,} tokens ({finishes or 'none yet'})"]
    if state.repetitive:
        lines.append(
            f"note: {state.repetitive} answers ({state.repetitive / state.answers:.0%}) are repetitive; a head trained "
            "on many of them learns to draft repetitions: try a higher temperature or other prompts"
        )
    return "\n".join(lines)
