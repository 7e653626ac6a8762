"""Text in, text out: `rounds` with tokenizer, stop strings and chat templates.

Detokenization is incremental: the text of a growing sequence of tokens, in time linear in its length.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from nextn.data.chat_template import apply_chat_template, tokenizer_failures
from nextn.decoding.records import Observer, Round, SequenceRound
from nextn.decoding.rounds import rounds
from nextn.errors import ConfigError, require_type
from nextn.model.model import Model
from nextn.model.text_interface import TextInterface
from nextn.runtime.backend import backend_for
from nextn.settings import Settings, check_prompts, prompt_ids
from nextn.speculative.draft_policy import DraftLength
from nextn.stats.acceptance import Acceptance

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # as the ByteFallback decoder of Llama-style tokenizers spells a byte
_BROKEN = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one: broken characters further back stay broken.
_MAX_BYTES = 4
_MAX_BUFFER = 32  # new tokens that end in a broken character before `_split` looks for where it begins


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
    tokenizer = _tokenizer(model)
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
        _tokenizer(model)
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


class TextStream:
    """The growing text of one sequence; only final text is returned, and stop strings end it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str], *, skip_special_tokens: bool = False
    ) -> None:
        skip = skip_special_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=skip)
        self._stops = tuple(stop)
        self._num_tokens = 0
        self._is_over = False
        # Final text that was not returned, because a stop string may begin in it.
        self._held = ""

    def push(self, tokens: Sequence[int], eos: Sequence[int], *, last: bool) -> str:
        """Append the tokens of a round and return the text that can be shown; with `last`, all that remains."""
        if self._detokenizer is None or self._is_over:
            return ""
        self._num_tokens += len(tokens)
        text = self._held + self._detokenizer.push([token for token in tokens if token not in eos])
        if last:
            text += self._detokenizer.pending
        ends = [text.find(stop) for stop in self._stops if stop in text]
        self._is_over = last or bool(ends)
        num_shown = min(ends) if ends else len(text) if last else len(text) - self._partial_stop(text)
        self._held = text[num_shown:]
        return text[:num_shown]

    def stop_after(self, tokens: Sequence[int]) -> int | None:
        """Return how many tokens, the latest of them not pushed yet, complete the first stop string, or None."""
        assert self._detokenizer is not None
        fresh = tokens[self._num_tokens :]
        if any(map(self._detokenizer.is_byte_token, fresh)):  # an invalid byte also changes the text before it
            counts = range(1, len(fresh) + 1)
            return next((self._num_tokens + count for count in counts if self._stops_in(fresh[:count])), None)
        if not self._stops_in(fresh):
            return None
        # Text grows with the tokens, so the first count that holds a stop string can be found by bisection.
        low, high = 1, len(fresh)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._stops_in(fresh[:middle]) else (middle + 1, high)
        return self._num_tokens + low

    def _stops_in(self, fresh: Sequence[int]) -> bool:
        assert self._detokenizer is not None
        text = self._held + self._detokenizer.peek(fresh)
        return any(stop in text for stop in self._stops)

    def _partial_stop(self, text: str) -> int:
        """Length of the tail that may be the beginning of a stop string."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )


def _tokenizer(model: Model | TextInterface) -> PreTrainedTokenizerBase:
    if model.tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer for text prompts; save the base model's in its folder")
    return model.tokenizer


class Detokenizer:
    """Decodes tokens as they arrive; the pieces add up to what decoding all tokens at once gives.

    Each call decodes only a buffer: the tokens whose text may still change, after those of the last piece as context
    for leading spaces. This is how tokenizers' `DecodeStream` works. Unlike it, this class works with any tokenizer,
    exposes the text that is still pending, and holds back a run of byte-fallback tokens up to its end: one invalid byte
    makes the whole run invalid, where `DecodeStream` raises because its earlier pieces were wrong.

    Args:
        tokenizer: Any tokenizer of transformers.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._pieces: dict[int, str | None] = {}
        self._buffer: list[int] = []
        self._num_context, self._context_chars = 0, 0
        self.pending = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the text that became final; `pending` is what may still change."""
        self._buffer += self._decodable(tokens)
        self.pending = self._new_text(self._buffer)
        if not self.pending:
            return ""
        num_final = len(self._buffer)
        if self.pending.endswith(_BROKEN):
            num_final = self._split() if num_final - self._num_context > _MAX_BUFFER else 0
        elif self.is_byte_token(self._buffer[-1]):
            num_final = 0
        return self._commit(num_final) if num_final else ""

    def peek(self, tokens: Sequence[int]) -> str:
        """Return `pending` as it would be with these tokens appended, without appending them."""
        return self._new_text([*self._buffer, *self._decodable(tokens)])

    def _commit(self, num_final: int) -> str:
        """Make the text of the buffer's first tokens final; they become the context of the next ones."""
        final = self._new_text(self._buffer[:num_final])
        self.pending = self.pending[len(final) :]
        del self._buffer[: self._num_context]
        self._num_context = num_final - self._num_context
        self._context_chars = len(self._decode(self._buffer[: self._num_context]))
        return final

    def _split(self) -> int:
        """Find how many tokens of a buffer with broken characters are final; 0 if that cannot be determined."""
        tokens, end = self._buffer, len(self._buffer) - _MAX_BYTES
        if any(self.is_byte_token(token) for token in tokens[-2 * _MAX_BYTES :]):
            return 0
        text = self._decode(tokens)
        splits = range(end, end - _MAX_BYTES, -1)
        return next((at for at in splits if self._decode(tokens[:at]) + self._decode(tokens[at:]) == text), 0)

    def _decodable(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in map(int, tokens) if self._piece(token) is not None]

    def _piece(self, token: int) -> str | None:
        """The token as the decoder sees it; None for the ids that pad a vocabulary and for what is skipped."""
        if token not in self._pieces:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            is_skipped = self._skip_special_tokens and self._decode([token], skip=False) != self._decode([token])
            self._pieces[token] = None if piece is None or is_skipped else str(piece)
        return self._pieces[token]

    def is_byte_token(self, token: int) -> bool:
        """Return whether a token is a single byte, whose text depends on the bytes around it."""
        return _BYTE_TOKEN.fullmatch(self._piece(token) or "") is not None

    def _new_text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens)[self._context_chars :]

    def _decode(self, tokens: Sequence[int], *, skip: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip is None else skip
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))
