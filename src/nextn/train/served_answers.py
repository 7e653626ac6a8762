"""Training data through an engine: the answers of a served copy of a model that is too large to decode here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.data.degeneracy import degeneracy
from nextn.data.sources import HEADER_KEY
from nextn.engines.answers import EngineAnswer, EngineRequest
from nextn.engines.ask import ask
from nextn.engines.endpoint import Endpoint
from nextn.errors import EngineError
from nextn.settings import Settings
from nextn.train.self_generated import AnswerProgress, GeneratedAnswer, append_answers, resume_answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def served_answers(
    endpoint: Endpoint,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    concurrency: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[AnswerProgress]:
    """Let an engine answer prompts into the file `out`; yield its progress, first for what it already holds.

    Args:
        endpoint: The served copy of the model.
        prompts: Token ids of each prompt, which are sent as they are.
        settings: Temperature, max_tokens, seed and eos; an engine decides itself how it decodes.
        out: The .jsonl file; an existing one is resumed after its last answer.
        tokenizer: The model's own; texts of engines that return no token ids are encoded with it.
        concurrency: Requests at a time.
        should_stop: Asked several times a second.

    Raises:
        ConfigError: The file was made with other settings, prompts or another model.
        CheckpointError: The file is damaged or cannot be written.
        EngineError: The engine fails, or its tokens are not those of the tokenizer.
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
    tokenizer: "PreTrainedTokenizerBase | None",
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


def _spells(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], text: str) -> bool:
    """Whether the ids are the text, with or without special tokens; its last character may be incomplete."""
    wanted = text.strip().rstrip("\ufffd")
    decoded = (tokenizer.decode(list(ids), skip_special_tokens=skip).strip() for skip in (True, False))
    return any(each.rstrip("\ufffd").startswith(wanted) and len(each) <= len(wanted) + 1 for each in decoded)
