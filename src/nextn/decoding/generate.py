"""Text in, text out: `rounds` with tokenizer, stop strings and chat templates.

Detokenization is incremental: the text of a growing sequence of tokens, in time linear in its length.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nextn.data.chat_template import apply_chat_template, tokenizer_failures
from nextn.decoding.records import Observer, Round, SequenceRound
from nextn.decoding.rounds import rounds
from nextn.decoding.text_stream import TextStream, tokenizer_of
from nextn.errors import ConfigError, require_type
from nextn.model.model import Model
from nextn.model.text_interface import TextInterface
from nextn.runtime.backend import backend_for
from nextn.settings import Settings, check_prompts, prompt_ids
from nextn.speculative.draft_policy import DraftLength
from nextn.stats.acceptance import Acceptance


@dataclass(frozen=True)
class Chunk:
    """What one round adds to one sequence.

    Attributes:
        row: Index of the prompt.
        text: What became final. An incomplete UTF-8 character, or the beginning of a possible stop string, is held
            back until a later chunk.
        round: The round's drafts and tokens.
        finish: None while the sequence continues, else `eos`, `stop`, `length` or `context`.
    """

    row: int
    text: str
    round: SequenceRound
    finish: str | None


@dataclass(frozen=True)
class Result:
    """The completion of one prompt. `Acceptance.of(results)` pools the acceptance of several.

    Attributes:
        text: The new text, without the prompt; it ends before a stop string.
        tokens: The new token ids.
        finish: Why it ended: `eos`, `stop`, `length` or `context`.
        rounds: Every round of this sequence; the first is the prefill, which gives the first token.
        acceptance: Of the head's drafts in this sequence.
        prefill_s: Wall seconds of the whole batch's prefill.
        draft_s: Wall seconds of drafting, of the whole batch.
        verify_s: Wall seconds of verification, of the whole batch.

    Example:
        >>> model, settings = nextn.load("tiny"), nextn.Settings(num_speculative_tokens=2, max_tokens=8)
        >>> results = nextn.generate(model, ["def add(", "import "], settings, backend="torch")
        >>> [len(result.tokens) for result in results], nextn.Acceptance.of(results).num_rounds > 0
        ([8, 8], True)
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    rounds: tuple[SequenceRound, ...] = field(repr=False)
    acceptance: Acceptance = field(repr=False)
    prefill_s: float
    draft_s: float
    verify_s: float

    @property
    def copy_acceptance(self) -> Acceptance:
        """Acceptance of the drafts that were copied from the text so far."""
        return Acceptance.of(self.rounds, copied=True)

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed of this sequence, without the prefill and its first token."""
        seconds = self.draft_s + self.verify_s
        return (len(self.tokens) - len(self.rounds[0].emitted)) / seconds if seconds else 0.0


def encode(
    model: Model | TextInterface,
    prompt: str | Sequence[int],
    *,
    chat: bool = False,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Return a prompt's token ids; ids pass through.

    chat: Apply the chat template, with the prompt as user message, and these variables.
    """
    if not isinstance(prompt, str):
        return list(prompt_ids(prompt))
    tokenizer = tokenizer_of(model)
    if (surrogate := re.search("[\ud800-\udfff]", prompt)) is not None:
        raise ConfigError(
            f"the prompt is not valid Unicode: character {surrogate.start()} is the lone surrogate {surrogate[0]!r}, "
            "which represents a byte that is not UTF-8; pass text in UTF-8"
        )
    if not chat:
        with tokenizer_failures():
            return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; pass plain text, or use a checkpoint with a template")
    message = {"role": "user", "content": prompt}
    ids, _ = apply_chat_template(tokenizer, [message], add_generation_prompt=True, variables=variables)
    return ids


def eos_tokens(model: Model) -> tuple[int, ...]:
    """Return the token ids that end a text.

    Args:
        model: With the tokenizer and config of its checkpoint.

    Returns:
        Those of the generation config, or of the config if it has none, and the tokenizer's; empty if none has any.

    Example:
        >>> nextn.eos_tokens(nextn.load("tiny"))
        (257,)
    """
    return TextInterface.of(model.trunk, model.tokenizer).eos


def stream(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    chat: bool = False,
    backend: str = "auto",
    length: DraftLength | None = None,
    observer: Observer | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Iterator[Chunk]:
    """Decode prompts as one batch and yield a Chunk per sequence and round, as soon as the round is over.

    Args:
        model: With a head, unless settings.num_speculative_tokens is 0.
        prompts: Texts or token ids.
        settings: How to decode; eos=None uses `eos_tokens` of the checkpoint.
        stop: Strings that end a sequence; the text ends before them.
        chat: Apply the chat template to text prompts.
        backend: `auto`, `native` or `torch`, see `backend_for`.
        length: Policy for the number of drafts per round, see `rounds`.
        observer: Called for each pass, see `rounds`.
        on_round: Called with each Round before its chunks are yielded.

    Yields:
        Chunks; those of one sequence add up to its text.

    Raises:
        ConfigError: A prompt or the settings cannot be used with this model.

    Example:
        >>> model, settings = nextn.load("tiny"), nextn.Settings(num_speculative_tokens=2, max_tokens=8)
        >>> chunks = list(nextn.stream(model, ["def add("], settings, backend="torch"))
        >>> chunks[-1].finish, "".join(chunk.text for chunk in chunks) != ""
        ('length', True)
    """
    require_type("model", model, Model, "what nextn.load returns")
    require_type("settings", settings, Settings, "nextn.Settings(...)")
    check_prompts(prompts)
    eos = eos_tokens(model) if settings.eos is None else settings.eos
    settings = replace(settings, eos=eos)
    if any(not text for text in stop):
        raise ConfigError("a stop string is empty; expected at least one character")
    texts = [TextStream(model.tokenizer, stop) for _ in prompts]
    ids = [encode(model, prompt, chat=chat) for prompt in prompts]
    callback = (lambda row, new: texts[row].stop_after(new)) if stop else None
    if stop:
        tokenizer_of(model)
    runner = backend_for(model, backend)
    for result in rounds(runner.trunk, runner.head, ids, settings, length=length, stop=callback, observer=observer):
        if on_round is not None:
            on_round(result)
        for sequence in result.rows:
            text = texts[sequence.row].push(sequence.emitted, eos, last=sequence.finish is not None)
            yield Chunk(sequence.row, text, sequence, sequence.finish)


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    chat: bool = False,
    backend: str = "auto",
    length: DraftLength | None = None,
    observer: Observer | None = None,
    on_round: Callable[[Round], None] = lambda result: None,
) -> list[Result]:
    """Decode prompts as one batch to the end.

    Args:
        model: With a head, unless settings.num_speculative_tokens is 0.
        prompts: Texts or token ids.
        settings: How to decode; eos=None uses `eos_tokens` of the checkpoint.
        stop: Strings that end a sequence; the text ends before them.
        chat: Apply the chat template to text prompts.
        backend: `auto`, `native` or `torch`.
        length: Policy for the number of drafts per round, see `rounds`.
        observer: Called for each pass, see `rounds`.
        on_round: Called with each Round.

    Returns:
        A result for each prompt, in order.

    Raises:
        ConfigError: A prompt or the settings cannot be used with this model.

    Example:
        >>> model, settings = nextn.load("tiny"), nextn.Settings(num_speculative_tokens=2, max_tokens=8)
        >>> result = nextn.generate(model, ["def add("], settings, backend="torch")[0]
        >>> len(result.tokens), result.finish
        (8, 'length')
    """
    check_prompts(prompts)
    log: list[Round] = []

    def logged(result: Round) -> None:
        log.append(result)
        on_round(result)

    texts, finishes = [""] * len(prompts), [""] * len(prompts)
    sequence_rounds: list[list[SequenceRound]] = [[] for _ in prompts]
    chunks = stream(
        model,
        prompts,
        settings,
        stop=stop,
        chat=chat,
        backend=backend,
        length=length,
        observer=observer,
        on_round=logged,
    )
    for chunk in chunks:
        texts[chunk.row] += chunk.text
        sequence_rounds[chunk.row].append(chunk.round)
        finishes[chunk.row] = chunk.finish or ""
    draft_s, verify_s = sum(one.draft_s for one in log[1:]), sum(one.verify_s for one in log[1:])
    return [
        Result(
            text=text,
            tokens=tuple(token for one in own for token in one.emitted),
            finish=finish,
            rounds=tuple(own),
            acceptance=Acceptance.of(own),
            prefill_s=log[0].verify_s,
            draft_s=draft_s,
            verify_s=verify_s,
        )
        for text, own, finish in zip(texts, sequence_rounds, finishes, strict=True)
    ]
