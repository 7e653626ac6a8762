"""Self-generated training data: the trunk's answers to prompts, and whether given data is such (on-policy).

Answers are decoded by our own decoder, with the head if there is one, or by an engine that serves the model. An answer
depends only on the prompt's index and the seed, so an interrupted run resumes to the same file.

On on-policy text a draft is accepted with probability min(1, q/p) of the text's own token; on other text, held-out
acceptance uses 1 - TV.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nextn.bounded_json import JsonObject
from nextn.data.batches import sample_prompts
from nextn.data.benchmark_prompts import is_benchmark
from nextn.data.corpus import Corpus
from nextn.data.degeneracy import degeneracy
from nextn.data.records import RecordReader
from nextn.data.sources import HEADER_KEY, Source, answers_header, partition_sources, read_records
from nextn.decoding.generate import eos_tokens
from nextn.decoding.rounds import rounds
from nextn.engines.answers import EngineAnswer, EngineRequest
from nextn.engines.ask import ask
from nextn.engines.endpoint import Endpoint
from nextn.errors import ConfigError, EngineError
from nextn.evaluate.reference_texts import check_thinking, play_turns, prompt_tokens
from nextn.evaluate.workload import ReferencePlan
from nextn.evaluate.workload import read_prompts as read_questions
from nextn.model.model import Model
from nextn.model.streamed_trunk import DeferredTrunk, StreamedTrunk
from nextn.model.text_interface import TextInterface
from nextn.model.trunk import Trunk
from nextn.runtime.backend import backend_for
from nextn.settings import Sampling, Settings
from nextn.text_format import changes
from nextn.train.answers_file import GeneratedAnswer, append_answers, resume_answers
from nextn.train.checkpointing import fingerprint, fingerprint_of


def is_on_policy(
    sources: Sequence[Source], trunk: Trunk, temperature: float, *, declared: bool = False, all_tokens: bool = False
) -> tuple[bool, list[str]]:
    """Return whether all labels in `sources` were sampled from the trunk at the temperature, and notes.

    `declared` treats sources without a header as on-policy. With `all_tokens`, prompts are labels too, and those were
    not sampled. Raises ConfigError if `declared` contradicts a file's header, or `all_tokens`.
    """
    texts, others = partition_sources(sources)
    headers = {str(source): answers_header(source) for source in others}
    known = {name: header for name, header in headers.items() if header is not None}
    is_streamed = isinstance(trunk, StreamedTrunk)  # whose values are not there to compare
    engines = [name for name, header in known.items() if is_streamed or "trunk" not in header]
    trunk_id = None if is_streamed or not known else _fingerprint(trunk)
    mismatches = [
        f"{name}: {reason}" for name, header in known.items() if (reason := _mismatch(header, trunk_id, temperature))
    ]
    if declared and all_tokens:
        message = "--on-policy and --all-tokens: prompts were not sampled from the trunk; leave one of them out"
        raise ConfigError(message)
    if declared and mismatches:
        raise ConfigError(f"--on-policy: {mismatches[0]}. Leave --on-policy out: it is for files without a header")
    notes = [f"{mismatch}; its held-out sampled acceptance uses 1 - TV" for mismatch in mismatches]
    if engines and not declared:
        notes.append(
            f"{engines[0]}: written by an engine, or compared with a trunk that is not loaded: --on-policy says it is "
            "of this trunk"
        )
    has_headers = bool(known) and not texts and not engines and len(known) == len(headers)
    return not mismatches and not all_tokens and (declared or has_headers), notes


def _fingerprint(trunk: Trunk) -> str:
    return fingerprint_of(trunk.state_items()) if isinstance(trunk, DeferredTrunk) else fingerprint(trunk.model)


def _mismatch(header: JsonObject, trunk: str | None, temperature: float) -> str | None:
    """Why answers were not sampled from the trunk at the temperature."""
    if trunk is not None and header.get("trunk", trunk) != trunk:
        return "answers of another trunk, or of this one in another dtype; `nextn answer` generates this trunk's own"
    sampling = header.get("settings", {}).get("sampling", {})
    if sampling.get("temperature") == 0:
        return "greedy answers"
    if difference := changes(sampling, asdict(Sampling(temperature))):
        return f"answers sampled with {difference}; the head is trained for the temperature in the settings"
    return None


@dataclass(frozen=True)
class AnswerProgress:
    """What the file of answers holds so far."""

    total: int  # answers requested
    answers: int = 0
    tokens: int = 0  # of all answers
    repetitive: int = 0  # answers that are degenerate text
    finishes: Counter[str] = field(default_factory=Counter)
    tokens_per_s: float | None = None  # of the last batch; None for answers of an engine or an existing file

    def plus(self, answers: Sequence[GeneratedAnswer], seconds: float = 0.0) -> "AnswerProgress":
        """Return the progress after more answers, which took this many seconds (0 = read from the file)."""
        new = sum(len(answer.tokens) for answer in answers)
        return AnswerProgress(
            self.total,
            self.answers + len(answers),
            self.tokens + new,
            self.repetitive + sum(answer.repetitive for answer in answers),
            self.finishes + Counter(answer.finish for answer in answers),
            new / seconds if seconds else None,
        )

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"finishes": dict(self.finishes)}


def generate_answers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    *,
    batch_size: int = 8,
    backend: str = "auto",
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[AnswerProgress]:
    """Answer prompts into the .jsonl file `out`, and yield its progress: first what it holds, then each batch.

    An existing file is resumed after its last complete batch. `eos = None` takes the checkpoint's; a model without a
    head drafts nothing. `should_stop` is called in every round, and the batch under way is then dropped. Raises
    ConfigError for a file of other settings, prompts or another model, CheckpointError if it is damaged or cannot be
    written.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}; expected a whole number >= 1")
    eos = eos_tokens(model) if settings.eos is None else settings.eos
    settings = replace(
        settings, eos=eos, num_speculative_tokens=settings.num_speculative_tokens if model.head is not None else 0
    )
    header = _header(model, settings, batch_size, backend)
    progress = AnswerProgress(len(prompts)).plus(resume_answers(out, header, prompts, batch_size))
    yield progress
    while progress.answers < len(prompts):
        started, first = time.perf_counter(), progress.answers
        answers = _decode(model, prompts[first : first + batch_size], first, settings, backend, should_stop)
        if answers is None:
            return
        append_answers(out, answers)
        progress = progress.plus(answers, time.perf_counter() - started)
        yield progress


def read_prompts(
    sources: Sequence[Source],
    model: Model | TextInterface,
    *,
    count: int | None = None,
    length: int = 64,
    seed: int = 0,
    chat: bool,
    thinking: bool | None = None,
) -> tuple[list[list[int]], list[str]]:
    """Return prompts and notes: the prompts of the first `count` records, the rest of `count` cut from text files.

    Those cut from a text have `length` tokens, and `seed` chooses their places. The model's tokenizer reads the
    prompts, which must fit its context; `chat` renders text with the chat template, `thinking` sets its thinking mode.
    Raises ConfigError for a source that cannot be read, or has too little text.
    """
    text_interface = model if isinstance(model, TextInterface) else TextInterface.of(model.trunk, model.tokenizer)
    tokenizer, vocab_size = text_interface.tokenizer, text_interface.vocab_size
    if tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer to read prompts with; add tokenizer.json to its folder")
    questions = [str(source) for source in sources if is_benchmark(str(source))]
    texts, others = partition_sources([source for source in sources if str(source) not in questions])
    if not sources or (count is not None and count < 1):
        raise ConfigError(f"{len(sources)} sources of prompts, count = {count}; expected at least one of each")
    plan = ReferencePlan(max_tokens=512, chat=chat, thinking=thinking)
    check_thinking(text_interface, plan)
    reader = RecordReader(tokenizer, variables=plan.template_variables)
    prompts = _questions(model, questions, plan)[:count]
    for location, record in islice(
        (pair for source in others for pair in read_records(source)), None if count is None else count - len(prompts)
    ):
        prompts.append(_check(reader.prompt(record, location, chat=chat), location, vocab_size))
    if texts:
        if count is None:
            raise ConfigError(f"{texts[0]} is text: give the number of prompts to cut from it, such as --count 1000")
        corpus, remaining = Corpus.from_files(texts, tokenizer), count - len(prompts)
        if remaining > 0:
            excerpts = sample_prompts(corpus, count=remaining, length=length, seed=seed)
            prompts += [excerpt.tolist() for excerpt in excerpts]
    return _drop_long(prompts, text_interface.max_length)


def _questions(model: Model | TextInterface, sources: Sequence[str], plan: ReferencePlan) -> list[list[int]]:
    """The questions of benchmarks, one prompt per turn; without the model's weights, of first turns alone."""
    prompts = [prompt for source in sources for prompt in read_questions(source)]
    if isinstance(model, Model):
        prompts = play_turns(model, prompts, plan)
    return [list(prompt_tokens(model, prompt, plan)) for prompt in prompts]


def _check(ids: list[int], location: str, vocab_size: int) -> list[int]:
    if not ids:
        raise ConfigError(f"{location}: the prompt is empty; expected at least one token")
    if max(ids) >= vocab_size:
        raise ConfigError(f"{location}: token {max(ids)} is not in the model's vocabulary of {vocab_size}")
    return ids


def _drop_long(prompts: list[list[int]], context: int | None) -> tuple[list[list[int]], list[str]]:
    fitting = [prompt for prompt in prompts if context is None or len(prompt) < context]
    note = f"{len(prompts) - len(fitting)} of {len(prompts)} prompts fill the model's context of {context} tokens"
    if not fitting:
        raise ConfigError(f"no prompt is left: {note}" if prompts else "no prompt was found in the given files")
    return fitting, [f"{note}: left out"] if len(fitting) < len(prompts) else []


def _header(model: Model, settings: Settings, batch_size: int, backend: str) -> dict[str, object]:
    head = fingerprint(model.head) if model.head is not None and settings.num_speculative_tokens else None
    made_by = {"trunk": _fingerprint(model.trunk), "head": head, "batch_size": batch_size, "backend": backend}
    return {HEADER_KEY: "answers"} | made_by | {"settings": asdict(settings)}


def _decode(
    model: Model,
    prompts: Sequence[Sequence[int]],
    first: int,
    settings: Settings,
    backend: str,
    should_stop: Callable[[], bool],
) -> list[GeneratedAnswer] | None:
    """Decode one batch; None if it was stopped."""
    runner, numbers = backend_for(model, backend), range(first, first + len(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    finishes = ["" for _ in prompts]
    for step in rounds(runner.trunk, runner.head, prompts, settings, seed_offsets=numbers):
        for part in step.rows:
            tokens[part.row] += part.emitted
            finishes[part.row] = part.finish or ""
        if should_stop():
            return None
    rows = zip(prompts, tokens, finishes, strict=True)
    return [GeneratedAnswer(tuple(p), tuple(t), f, degeneracy(t).is_degenerate, _text(model, t)) for p, t, f in rows]


def _text(model: Model, tokens: list[int]) -> str | None:
    return None if model.tokenizer is None else model.tokenizer.decode(tokens, skip_special_tokens=True)


def served_answers(
    endpoint: Endpoint,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    concurrency: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[AnswerProgress]:
    """Let an engine answer prompts into the .jsonl file `out`; yield its progress, first for what it already holds.

    An existing file is resumed after its last answer. Of the settings, temperature, max_tokens, seed and eos count; an
    engine decides itself how it decodes. Texts of engines that return no token ids are encoded with the tokenizer.
    Raises ConfigError and CheckpointError as `generate_answers`, EngineError if the engine fails, or its tokens are not
    those of the tokenizer.
    """
    header = {HEADER_KEY: "answers", "engine": endpoint.served.name, "settings": asdict(settings)}
    progress = AnswerProgress(len(prompts)).plus(resume_answers(out, header, prompts, 1))
    yield progress
    first, eos = progress.answers, settings.eos or ()
    requests = [
        EngineRequest(tuple(prompt), settings.max_tokens, settings.sampling.temperature, seed=settings.seed + index)
        for index, prompt in enumerate(prompts)
    ]
    answers = ask(endpoint, requests[first:], concurrency=concurrency, should_stop=should_stop)
    for index, answer in enumerate(answers, start=first):
        generated = to_generated(answer, prompts[index], tokenizer, eos, where=f"{endpoint.url}: prompt {index}")
        append_answers(out, [generated])
        progress = progress.plus([generated])
        yield progress


def to_generated(
    answer: EngineAnswer,
    prompt: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    eos: Sequence[int],
    *,
    where: str,
) -> GeneratedAnswer:
    """Convert an engine's answer, after comparing its prompt and its token ids with the tokenizer.

    Raises EngineError if they differ; `where` names the answer in the message.
    """
    length = len(answer.prompt_ids) if answer.prompt_ids is not None else answer.prompt_tokens
    if answer.prompt_ids not in (None, tuple(prompt)) or length not in (None, len(prompt)):
        raise EngineError(
            f"{where}: {len(prompt)} token ids were sent, and the engine read {length}, or others: it adds tokens, or "
            "uses a chat template; let it take prompts as they are"
        )
    ids = answer.ids
    if tokenizer is None and ids is None:
        raise EngineError(f"{where}: the engine returns no token ids, and the checkpoint has no tokenizer to make them")
    if tokenizer is not None:
        own = tuple(tokenizer(answer.text, add_special_tokens=False)["input_ids"]) if ids is None else ids
        if max(own, default=0) >= len(tokenizer) or not _spells(tokenizer, own, answer.text):
            raise EngineError(
                f"{where}: the token ids are not those of this checkpoint's tokenizer for the engine's text: it serves "
                "another model, or its text is cut at a special token"
            )
        ids = own
    assert ids is not None
    if answer.finish_reason == "stop" and len(eos) == 1 and ids[-1:] != tuple(eos):
        ids = (*ids, *eos)  # engines that leave out what ended the text
    finish = "eos" if ids[-1:] and ids[-1] in eos else "length"
    return GeneratedAnswer(tuple(prompt), ids, finish, degeneracy(ids).is_degenerate, answer.text)


def _spells(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> bool:
    """Whether the ids are the text, with or without special tokens; its last character may be incomplete."""
    expected = text.strip().rstrip("\ufffd")
    decoded = (tokenizer.decode(list(ids), skip_special_tokens=skip).strip() for skip in (True, False))
    return any(each.rstrip("\ufffd").startswith(expected) and len(each) <= len(expected) + 1 for each in decoded)
