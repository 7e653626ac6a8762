"""Measuring on texts that exist already, with a trunk that is loaded or streamed: options, progress, interruption."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from nextn.cli.common import EngineAccess, open_checkpoint, user_cache
from nextn.cli.model_options import ModelOptions
from nextn.cli.progress import progress_bars
from nextn.cli.screen import print_note
from nextn.errors import ConfigError
from nextn.evaluate.workload import Prompt, ReferencePlan, num_turns
from nextn.settings import Sampling, Settings

if TYPE_CHECKING:
    from nextn.engines.endpoint import Endpoint
    from nextn.evaluate.engine_probe import EngineFolder, EngineProbe
    from nextn.evaluate.engine_run import EngineObservation
    from nextn.evaluate.given_texts import GivenTexts
    from nextn.evaluate.reference_report import ReferenceReport
    from nextn.evaluate.teacher_forced import ReferenceText
    from nextn.model.layer_states import LayerProgress
    from nextn.model.model import Model
    from nextn.model.streamed_trunk import StreamedTrunk
    from nextn.model.trunk import Trunk, TrunkOutput
    from nextn.train.head_task import HeadTask
    from nextn.train.hidden_cache import HiddenStateCache

_option = partial(typer.Option, rich_help_panel="Models that do not fit into memory")


def reason_to_stream(options: ModelOptions, stream: bool | None) -> str | None:
    """Return why the trunk is streamed; None if it is to be loaded."""
    if options.device_map is not None:
        if stream:
            raise ConfigError(
                f"--device-map {options.device_map} and --stream: a map is of layers that stay, a streamed trunk drops "
                "each layer after it ran; leave one out"
            )
        return None
    if stream is not None:
        return "--stream" if stream else None
    from nextn.devices import resolve_device
    from nextn.evaluate import streaming_plan

    checkpoint = open_checkpoint(options.source)
    return streaming_plan.reason_to_stream(checkpoint, options.torch_dtype, resolve_device(options.device))


@dataclass(frozen=True)
class GivenTextOptions:
    """The options of commands that read texts which exist already, with a trunk that may be streamed."""

    texts: Annotated[
        str | None,
        _option(
            help="Measure on these texts: a file of `nextn answer`, or other records or text. --stream, which cannot "
            "generate, needs it or --engine."
        ),
    ] = None
    stream: Annotated[
        bool | None,
        _option(
            "--stream/--no-stream",
            help="Read the trunk layer by layer, each once for all texts. Default: if it does not fit into memory.",
            show_default=False,
        ),
    ] = None
    states: Annotated[
        Path | None,
        _option(
            help="Folder for hidden states after each layer, from which the same command resumes; kept at the end. "
            "Default: the user's cache, removed at the end."
        ),
    ] = None


@dataclass(frozen=True)
class TextOptions:
    """The source of the texts, and how the trunk runs over them."""

    file: str | None
    engine: EngineAccess
    endpoint: "Endpoint | None"  # of that engine, where it is asked for texts
    reason: str | None  # why the trunk is streamed; None: it is loaded
    states: Path | None
    quiet: bool

    @classmethod
    def of(
        cls,
        options: ModelOptions,
        given: GivenTextOptions,
        engine: EngineAccess,
        endpoint: "Endpoint | None" = None,
        *,
        quiet: bool,
    ) -> "TextOptions":
        """Check the options of texts. Raises ConfigError, without texts for a model that is to be streamed, too."""
        from nextn.data.sources import check_sources

        file = given.texts
        if file is not None and engine.url:
            raise ConfigError("--texts and --engine: the texts are of a file or of an engine; leave one out")
        if file is not None:
            check_sources([file])
        source = cls(file, engine, endpoint, reason_to_stream(options, given.stream), given.states, quiet)
        if source.is_streamed and not source.has_texts:
            raise ConfigError(
                f"a streamed trunk ({source.reason}) cannot generate the texts to measure on: name a served copy of "
                "the model with --engine, or give a file of texts with --texts; --no-stream loads the model in any case"
            )
        return source

    @property
    def is_streamed(self) -> bool:
        return self.reason is not None

    @property
    def has_texts(self) -> bool:
        """Whether texts are given, by a file or an engine."""
        return self.file is not None or bool(self.engine.url)

    @property
    def folder(self) -> Path:
        return self.states or user_cache("states")


def measure_acceptance(
    options: ModelOptions,
    source: TextOptions,
    plan: ReferencePlan,
    prompts: Sequence[Prompt],
    check: "Callable[[Model], None] | None" = None,
) -> "tuple[Model, ReferenceReport]":
    """Load the model, and measure its head on given texts, or on the model's own continuations of the prompts.

    check: Called with the model before it decodes.
    """
    from nextn.evaluate.reference import reference_acceptance, with_checkpoint

    if source.has_texts:
        loaded, report = _measure_texts(options, source, plan, prompts)
    else:
        loaded = options.load(need_head=True)
        if check is not None:
            check(loaded)
        with progress_bars(quiet=source.quiet) as progress:
            num_texts = num_turns(prompts) * len(plan.temperatures)
            on_text, on_score = (progress(name, num_texts) for name in ("texts", "scores"))
            report = reference_acceptance(loaded, prompts, plan, on_text=on_text, on_score=on_score)
    report = with_checkpoint(report, loaded, options.source, head=options.head)
    return loaded, replace(report, source=options.given)


def _measure_texts(
    options: ModelOptions, source: TextOptions, plan: ReferencePlan, prompts: Sequence[Prompt]
) -> "tuple[Model, ReferenceReport]":
    """Measure on texts of a file, or on an engine's continuations of the prompts.

    With several temperatures in the plan, a file's own is that of its header.
    """
    from nextn.evaluate.engine_probe import check_engine
    from nextn.evaluate.given_texts import read_texts

    probe = None
    loaded = options.load(need_head=True, stream=source.is_streamed, in_torch=True)
    if source.file is not None:
        temperature = plan.temperatures[0] if len(plan.temperatures) == 1 else None
        reader = partial(read_texts, source.file, loaded.trunk, loaded.tokenizer)
        given = [reader(temperature=temperature, max_tokens=plan.max_tokens)]
    else:
        assert source.endpoint is not None
        given, probe = _ask_engine(loaded, source.endpoint, source, plan, prompts)
    texts = [text for each in given for text in each.texts]
    all_texts = texts + ([] if probe is None else [probe.reference_text])
    outputs, record = _run_trunk(loaded, all_texts, source, num_drafts=plan.num_speculative_tokens)
    check = None if probe is None else check_engine(source.engine.url, probe, loaded.trunk, outputs.pop())
    return loaded, replace(_score(loaded, given, outputs, plan, quiet=source.quiet), stream=record, engine=check)


def _score(
    model: "Model", given: "list[GivenTexts]", outputs: "list[TrunkOutput]", plan: ReferencePlan, *, quiet: bool
) -> "ReferenceReport":
    from nextn.evaluate.reference import acceptance_on_texts

    parts = iter(outputs)
    states = [[next(parts) for _ in each.texts] for each in given]
    with progress_bars(quiet=quiet) as progress:
        return acceptance_on_texts(model, given, states, plan, on_score=progress("scores", len(outputs)))


def _ask_engine(
    model: "Model", endpoint: "Endpoint", source: TextOptions, plan: ReferencePlan, prompts: Sequence[Prompt]
) -> "tuple[list[GivenTexts], EngineProbe | None]":
    """The engine's continuations at each temperature, stored beside the states, and its log-probabilities, if any."""
    from nextn.evaluate.given_texts import read_texts
    from nextn.evaluate.reference_texts import check_thinking, prompt_tokens
    from nextn.model.text_interface import TextInterface
    from nextn.train.self_generated import served_answers

    check_thinking(model, plan)
    given: list[GivenTexts] = []
    eos = TextInterface.of(model.trunk, model.tokenizer).eos
    ids = [prompt_tokens(model, prompt, plan) for prompt in prompts]
    stored = engine_folder(endpoint, source, ids, "answers", [plan.max_tokens, plan.seed])
    for temperature in plan.temperatures:
        settings = Settings(0, sampling=Sampling(temperature), max_tokens=plan.max_tokens, seed=plan.seed, eos=eos)
        file = stored.path / f"{temperature:g}.jsonl"
        answers = served_answers(endpoint, ids, settings, file, model.tokenizer, concurrency=source.engine.concurrency)
        with progress_bars(quiet=source.quiet) as progress:
            step = progress(f"answers of the engine at temperature {temperature:g}", len(ids))
            for _ in answers:
                step()
        texts = read_texts(file, model.trunk, model.tokenizer, max_tokens=plan.max_tokens)
        domains = tuple(prompt.domain for prompt in prompts)
        given.append(replace(texts, source=f"{endpoint.url} ({endpoint.served.name})", domains=domains))
    return given, stored.probe if stored.probe.logprobs else None


def engine_folder(
    endpoint: "Endpoint", source: TextOptions, ids: Sequence[tuple[int, ...]], name: str, settings: object
) -> "EngineFolder":
    """Return the folder, beside the states, of the engine's answers to these prompts at these settings."""
    from nextn.evaluate.engine_probe import EngineFolder, EngineProbe

    identity = json.dumps([endpoint.url, endpoint.served.name, ids, settings])
    path = source.folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    stored = EngineFolder(path, EngineProbe.ask(endpoint, ids[0]))
    if stored.was_cleared:
        print_note(f"{endpoint.url} serves other weights than in an earlier run, by its log-probabilities: asked again")
    return stored


def measure_answers(
    model: "Model",
    observed: "Sequence[EngineObservation]",
    source: TextOptions,
    plan: ReferencePlan,
    prompts: Sequence[Prompt],
) -> "ReferenceReport":
    """Measure the head on the answers of an engine that was asked the prompts, as `observed_plan` says.

    Raises EngineError for answers whose tokens are not the checkpoint's.
    """
    from nextn.evaluate.given_texts import GivenTexts
    from nextn.evaluate.reference_texts import prompt_tokens
    from nextn.evaluate.teacher_forced import ReferenceText
    from nextn.model.text_interface import TextInterface
    from nextn.train.self_generated import to_generated

    eos, given = TextInterface.of(model.trunk, model.tokenizer).eos, []
    domains = tuple(prompt.domain for prompt in prompts)
    for temperature in plan.temperatures:
        texts: dict[int, ReferenceText] = {}
        for each in (each for each in observed if each.temperature == temperature):
            for index, answer in zip(each.prompt_indices or (), each.answers, strict=True):
                where, ids = f"{source.engine.url}: prompt {index}", prompt_tokens(model, prompts[index], plan)
                made = to_generated(answer, ids, model.tokenizer, eos, where=where)
                texts[index] = ReferenceText(made.prompt, made.tokens, temperature, made.finish == "eos")
        given.append(GivenTexts(tuple(texts[index] for index in range(len(prompts))), domains, source.engine.url))
    all_texts = [text for each in given for text in each.texts]
    outputs, record = _run_trunk(model, all_texts, source, num_drafts=plan.num_speculative_tokens)
    return replace(_score(model, given, outputs, plan, quiet=source.quiet), stream=record)


def _run_trunk(
    model: "Model", texts: "Sequence[ReferenceText]", source: TextOptions, *, num_drafts: int
) -> "tuple[list[TrunkOutput], dict[str, object] | None]":
    """The states of all texts, in one pass of the trunk, and what streaming took."""
    from nextn.checkpoint.mapped_memory import return_freed_memory
    from nextn.evaluate.given_texts import full_text_outputs, run_name
    from nextn.evaluate.streaming_plan import StreamEstimate, stream_record
    from nextn.model.layer_states import remove_states
    from nextn.model.streamed_trunk import StreamedTrunk

    trunk = model.trunk
    if not isinstance(trunk, StreamedTrunk):
        return full_text_outputs(trunk, texts), None
    num_tokens, num_passes = sum(len(text.tokens) for text in texts), num_drafts + 1  # with the control's
    estimate = StreamEstimate.of(trunk, num_tokens, head=model.head, num_passes=num_passes)
    print_note(f"the trunk is streamed ({source.reason}): {estimate}")
    return_freed_memory()  # of checking the head
    layers: list[LayerProgress] = []
    folder = source.folder / run_name(trunk, texts)
    with _layer_bar(trunk, folder, layers, quiet=source.quiet) as show:
        outputs = full_text_outputs(trunk, texts, folder=folder, on_layer=show)
    if source.states is None:
        remove_states(folder)
    return outputs, stream_record(layers, estimate)


def stream_for_training(task: "HeadTask", cache: "HiddenStateCache", folder: Path, *, quiet: bool) -> None:
    """Run the trunk of a task over all texts of a training run."""
    from nextn.evaluate.streaming_plan import StreamEstimate

    trunk = cast("StreamedTrunk", task.model.trunk)
    if task.ranks.is_first:
        num_tokens = cache.num_batches * task.config.batch_size * task.config.length
        print_note(f"the trunk is streamed (--stream): {StreamEstimate.of(trunk, num_tokens)}")
    with _layer_bar(trunk, folder, [], quiet=quiet or not task.ranks.is_first) as show:
        task.stream_trunk(folder, cache, show)


def show_init_layers(
    trunk: "Trunk", folder: Path, *, quiet: bool
) -> "AbstractContextManager[Callable[[LayerProgress], None]]":
    """Show the trunk's layers that run to make a new head."""
    from nextn.model.streamed_trunk import StreamedTrunk

    if not isinstance(trunk, StreamedTrunk):
        return _count_bar(len(trunk.decoder.layers), quiet=quiet)
    print_note("the trunk is streamed twice (--stream): to make the new head, then over the texts")
    return _layer_bar(trunk, folder, [], quiet=quiet)


@contextmanager
def _count_bar(count: int, *, quiet: bool) -> "Iterator[Callable[[LayerProgress], None]]":
    with progress_bars(quiet=quiet) as added:
        step = added("the trunk's layers, for the new head", count)
        yield lambda progress: step(1)


@contextmanager
def _layer_bar(
    trunk: "StreamedTrunk", folder: Path, layers: "list[LayerProgress]", *, quiet: bool
) -> "Iterator[Callable[[LayerProgress], None]]":
    """Show layers, bytes and the time left; append each layer's progress to `layers`."""
    total, count = trunk.num_bytes, len(trunk.decoder.layers)
    with progress_bars(quiet=quiet) as added:
        step = added("layers", total, in_gb=True)

        def show(progress: "LayerProgress") -> None:
            nonlocal total
            layers.append(progress)
            total -= progress.num_bytes if progress.resumed else 0  # or its speed would count
            step(
                0 if progress.resumed else progress.num_bytes, total=total, status=f"layer {progress.index + 1}/{count}"
            )

        try:
            yield show
        except KeyboardInterrupt:
            print_note(f"the hidden states after the last complete layer are in {folder}; the same command resumes")
            raise
