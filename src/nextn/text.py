"""Text in, text out: folds of `decode.rounds` that know the tokenizer, stop strings and chat templates."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from nextn.corpus.chat_template import apply_chat_template
from nextn.decode import Observer, Round, RowRound, Settings, rounds
from nextn.detokenizer import Detokenizer
from nextn.errors import ConfigError
from nextn.figures.acceptance import Acceptance
from nextn.model import Model
from nextn.policy import DraftLength


@dataclass(frozen=True)
class Chunk:
    """One row's news from one round. text: what became certain; an unfinished character or stop string is held back.

    finish: None, `eos`, `stop`, `length` or `context`.
    """

    row: int
    text: str
    part: RowRound
    finish: str | None


@dataclass(frozen=True)
class Result:
    """What one prompt got. rounds: the row's share of each round, the prefill's first token included.

    Times are wall seconds of the whole batch. acceptance: see `Acceptance`, over this row.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    rounds: tuple[RowRound, ...] = field(repr=False)
    acceptance: Acceptance = field(repr=False)
    prefill_s: float
    draft_s: float
    verify_s: float

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed of this row, the prefill and its first token left out."""
        seconds = self.draft_s + self.verify_s
        return (len(self.tokens) - len(self.rounds[0].emitted)) / seconds if seconds else 0.0


def encode(model: Model, prompt: str | Sequence[int], *, chat: bool = False) -> list[int]:
    """Token ids of a prompt; ids pass through. chat: through the tokenizer's chat template, as a user message."""
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = _tokenizer(model)
    if (surrogate := re.search("[\ud800-\udfff]", prompt)) is not None:
        raise ConfigError(
            f"the prompt is not valid Unicode: character {surrogate.start()} is the lone surrogate {surrogate[0]!r}, "
            "which stands for a byte that is not UTF-8; pass text in UTF-8"
        )
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; pass plain text, or use a checkpoint with a template")
    ids, _ = apply_chat_template(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    return ids


def eos_tokens(model: Model) -> tuple[int, ...]:
    """Token ids that end a text, from the generation config, the config or the tokenizer, in this order."""
    generation = getattr(model.trunk.model, "generation_config", None)
    for source in (generation, model.trunk.config, model.tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def stream(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    chat: bool = False,
    path: str = "auto",
    length: DraftLength | None = None,
    observer: Observer | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Iterator[Chunk]:
    """Decode prompts as one batch and yield a Chunk per row and round, as soon as the round is over.

    stop: strings that end a row; the text stops before them. settings.eos = None: `eos_tokens` of the checkpoint.
    path: `auto`, `fast` or `plain`, see `Model.engine`. length: how many tokens each round drafts, see `rounds`.
    """
    eos = eos_tokens(model) if settings.eos is None else settings.eos
    settings = replace(settings, eos=eos)
    if any(not text for text in stop):
        raise ConfigError("a stop string is empty; expected at least one character")
    texts = [_Text(model.tokenizer, stop) for _ in prompts]
    ids = [encode(model, prompt, chat=chat) for prompt in prompts]
    callback = (lambda row, new: texts[row].stop_after(new)) if stop else None
    if stop:
        _tokenizer(model)
    made = model.engine(path)
    for each in rounds(made.trunk, made.head, ids, settings, length=length, stop=callback, observer=observer):
        if on_round is not None:
            on_round(each)
        for part in each.rows:
            text = texts[part.row].push(part.emitted, eos, last=part.finish is not None)
            yield Chunk(part.row, text, part, part.finish)


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    chat: bool = False,
    path: str = "auto",
    length: DraftLength | None = None,
    observer: Observer | None = None,
) -> list[Result]:
    """Decode prompts as one batch to the end. Raises ConfigError for prompts or settings that cannot be used."""
    log: list[Round] = []
    texts, finishes = [""] * len(prompts), [""] * len(prompts)
    parts: list[list[RowRound]] = [[] for _ in prompts]
    chunks = stream(
        model,
        prompts,
        settings,
        stop=stop,
        chat=chat,
        path=path,
        length=length,
        observer=observer,
        on_round=log.append,
    )
    for chunk in chunks:
        texts[chunk.row] += chunk.text
        parts[chunk.row].append(chunk.part)
        finishes[chunk.row] = chunk.finish or ""
    draft_s, verify_s = sum(each.draft_s for each in log[1:]), sum(each.verify_s for each in log[1:])
    return [
        Result(
            text=text,
            tokens=tuple(token for part in row for token in part.emitted),
            finish=finish,
            rounds=tuple(row),
            acceptance=Acceptance.of(Round((part,), 0.0, 0.0) for part in row),
            prefill_s=log[0].verify_s,
            draft_s=draft_s,
            verify_s=verify_s,
        )
        for text, row, finish in zip(texts, parts, finishes, strict=True)
    ]


class _Text:
    """The text of one row as it grows: what is certain can be shown, and stop strings end it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str]) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = tuple(stop)
        self._num_tokens = 0
        self._is_over = False
        # Certain text that was not returned, because a stop string may begin in it; so none begins before it.
        self._held = ""

    def push(self, tokens: Sequence[int], eos: Sequence[int], *, last: bool) -> str:
        """Append the tokens of a round and return the text that can be shown; with `last`, all of the rest."""
        if self._detokenizer is None or self._is_over:
            return ""
        self._num_tokens += len(tokens)
        text = self._held + self._detokenizer.push([token for token in tokens if token not in eos])
        if last:
            text += self._detokenizer.pending
        ends = [text.find(stop) for stop in self._stops if stop in text]
        self._is_over = last or bool(ends)
        shown = min(ends) if ends else len(text) if last else len(text) - self._unsure(text)
        self._held = text[shown:]
        return text[:shown]

    def stop_after(self, tokens: Sequence[int]) -> int | None:
        """Find the first stop string.

        Args:
            tokens: All new tokens of the row; those beyond the ones that were pushed are of this round.

        Returns:
            How many of the tokens it takes to complete the stop string; None without one.
        """
        fresh = tokens[self._num_tokens :]
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

    def _unsure(self, text: str) -> int:
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


def _tokenizer(model: Model) -> PreTrainedTokenizerBase:
    if model.tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer; pass token ids, or add tokenizer.json to its folder")
    return model.tokenizer
