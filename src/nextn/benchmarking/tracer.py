"""Which (token, hidden) pair sits at which position in prefill, draft, verify and re-run: the table of `nextn trace`.

The rows come from the decoder's own events, not from a second description of what it should do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nextn.decode import Event, RowRound, Settings, rounds
from nextn.model import Model
from nextn.text import encode


@dataclass(frozen=True)
class TraceRow:
    """One column of one pass. position: column in the cache and rotary position, which are the same number.

    hidden: `h<i>` the trunk's true state of column i, `g<k>` the state that depth k handed on, `-` none. gives: what
    comes out and is used.
    """

    round: int
    phase: str
    by: str
    position: int
    token: str
    hidden: str
    gives: str


def trace(model: Model, prompt: str | list[int], settings: Settings) -> Iterator[TraceRow]:
    """Decode one prompt and yield the rows of each round as soon as it is over."""
    events: list[Event] = []
    ids = encode(model, prompt)
    for number, each in enumerate(rounds(model.trunk, model.head, [ids], settings, observer=events.append)):
        for event in events:
            yield from _rows(model, number, event, each.rows[0], fresh=number == 1)
        events.clear()


def _rows(model: Model, number: int, event: Event, part: RowRound, *, fresh: bool) -> Iterator[TraceRow]:
    last = len(event.tokens) - 1
    for index, token in enumerate(event.tokens):
        position = event.start + index
        phase, gives = event.phase, ""
        if event.module is None:
            gives = f"h{position}" + _verdict(model, event, part, index, last)
        elif phase == "draft":
            if index < last:
                phase = "prefill" if fresh else "re-run"
            else:
                gives = _draft(model, event, part)
        hidden = "-" if event.module is None else f"h{position}" if event.hidden == "h" else event.hidden
        by = "trunk" if event.module is None else f"head[{event.module}]"
        yield TraceRow(number, phase, by, position, show(model, token), hidden, gives)


def _verdict(model: Model, event: Event, part: RowRound, index: int, last: int) -> str:
    if event.phase == "prefill":
        return f" -> {show(model, part.emitted[0])}" if index == last and not part.drafts else ""
    if index < part.kept:
        return f" -> {show(model, part.emitted[index])} keeps draft {index + 1}"
    if index == part.kept and part.kept < len(part.emitted):
        what = "replaces" if part.kept < len(part.drafts) else "follows"
        return f" -> {show(model, part.emitted[index])} {what} draft {index + 1 if what == 'replaces' else index}"
    return " (rolled back)"


def _draft(model: Model, event: Event, part: RowRound) -> str:
    depth = 1 if event.hidden == "h" else int(event.hidden[1:]) + 1
    return f"draft {depth} = {show(model, part.drafts[depth - 1])}" if depth <= len(part.drafts) else ""


def show(model: Model, token: int) -> str:
    """A token as text in quotes, or its number without a tokenizer."""
    if model.tokenizer is None:
        return str(token)
    text = model.tokenizer.decode([token])
    return repr(text) if "\ufffd" not in text else f"<{token}>"
