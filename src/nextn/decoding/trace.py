"""Which (token, hidden) pair is at which position in prefill, draft, verify and refresh: the table of `nextn trace`.

The rows come from the decoder's own events, not from a separate description of what it should do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nextn.decoding.generate import encode
from nextn.decoding.records import Event, SequenceRound
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.settings import Settings


@dataclass(frozen=True)
class TraceRow:
    """One position of one pass."""

    round: int
    phase: str
    by: str  # `trunk` or `head[<index>]`
    position: int  # cache slot and rotary position, which are the same number
    token: str
    hidden: str  # `h<i>`: the trunk's true state at position i; `g<k>`: the next_hidden of depth k; `-`: none
    gives: str  # the output that is used


def trace(model: Model, prompt: str | list[int], settings: Settings) -> Iterator[TraceRow]:
    """Decode one prompt in torch and yield the rows of each round as soon as it is over.

    Args:
        model: With a head, unless settings.num_speculative_tokens is 0.
        prompt: Text or token ids.
        settings: How to decode.

    Yields:
        A row for each position of each pass of trunk and head: cache slot, token, hidden state, result.

    Raises:
        ConfigError: The prompt or the settings cannot be used with this model.

    Example:
        >>> model, settings = nextn.load("tiny"), nextn.Settings(num_speculative_tokens=2, max_tokens=4)
        >>> next(nextn.trace(model, "def add(", settings)).phase
        'prefill'
    """
    events: list[Event] = []
    ids = encode(model, prompt)
    for number, result in enumerate(rounds(model.trunk, model.head, [ids], settings, observer=events.append)):
        for event in events:
            yield from _rows(model, number, event, result.rows[0], len(ids))
        events.clear()


def _rows(model: Model, number: int, event: Event, result: SequenceRound, prompt_length: int) -> Iterator[TraceRow]:
    last = len(event.tokens) - 1
    for index, token in enumerate(event.tokens):
        position = event.start + index
        phase, gives = event.phase, ""
        if event.module is None:
            is_prompt_end = position == prompt_length - 1
            gives = f"h{position}" + _verification(model, event, result, index, is_prompt_end=is_prompt_end)
        elif phase == "draft":
            if index < last:
                phase = "prefill" if number == 1 else "refresh"
            else:
                gives = _draft(model, event, result)
        hidden = "-" if event.module is None else f"h{position}" if event.hidden == "h" else event.hidden
        by = "trunk" if event.module is None else f"head[{event.module}]"
        yield TraceRow(number, phase, by, position, token_text(model, token), hidden, gives)


def _verification(model: Model, event: Event, result: SequenceRound, index: int, *, is_prompt_end: bool) -> str:
    if event.phase == "prefill":
        return f" -> {token_text(model, result.emitted[0])}" if is_prompt_end else ""
    if index < result.num_accepted:
        return f" -> {token_text(model, result.emitted[index])} accepts draft {index + 1}"
    if index == result.num_accepted and result.num_accepted < len(result.emitted):
        gives = f" -> {token_text(model, result.emitted[index])}"
        if index < len(result.drafts):
            return f"{gives} replaces draft {index + 1}"
        return f"{gives} follows draft {index}" if result.drafts else gives
    return " (rolled back)"


def _draft(model: Model, event: Event, result: SequenceRound) -> str:
    depth = 1 if event.hidden == "h" else int(event.hidden[1:]) + 1
    return f"draft {depth} = {token_text(model, result.drafts[depth - 1])}" if depth <= len(result.drafts) else ""


def token_text(model: Model, token: int) -> str:
    """Return a token as quoted text, or its id without a tokenizer."""
    if model.tokenizer is None:
        return str(token)
    text = model.tokenizer.decode([token])
    return repr(text) if "\ufffd" not in text else f"<{token}>"
