"""Split generated text into content, reasoning and tool calls, as it grows or whole.

A call is reported piece by piece, as soon as its name and the beginning of its arguments are known. If it turns out to
be malformed after that, its text is content, as if nothing had been reported: only a call whose last piece is there
counts. The whole message does not depend on how the text was cut into pieces.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nextn.data.chat_template import THINK_TAGS
from nextn.serve.call_text import GeneratedToolCall, IncompleteCallError, MalformedCallError, TextCursor, Tool, overlap
from nextn.serve.tool_calls import ToolSyntax

_OPEN, _CLOSE = THINK_TAGS
_NUM_ALWAYS_PARSED = 256  # characters of an unfinished call that are parsed at each step
_GROWTH = 64  # after that, only where it may end, or has grown by this part


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call."""

    index: int  # of the call in the message
    name: str | None  # None: a later piece
    arguments: str
    is_last: bool  # the call is complete and well-formed


MessagePiece = str | ToolCallDelta


@dataclass(frozen=True)
class MessageDelta:
    """What a piece of text adds to a message."""

    pieces: tuple[MessagePiece, ...] = ()  # content, and at most one piece of each call, in their order
    reasoning: str = ""  # before all of them

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, ToolCallDelta))

    @property
    def complete_calls(self) -> list[GeneratedToolCall]:
        """The calls that begin and end in this piece; those of the message, if it is all of one."""
        return [
            GeneratedToolCall(call.name, call.arguments)
            for call in self.tool_calls
            if call.is_last and call.name is not None
        ]


class ToolCallParser:
    """Splits growing text into content and calls."""

    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool]) -> None:
        self._syntax, self._tools = syntax, {tool.name: tool for tool in tools}
        self._buffer = ""
        self._num_searched = self._num_parsed = 0  # characters of an unfinished call: without an end, and looked at
        self._num_begun = 0  # calls before those that the buffer begins with
        self._sent: list[str] = []  # of each of these, the arguments that were reported
        self._space = ""  # at the end of the content so far; dropped if a call follows
        self._has_content = self.has_calls = self._is_after_call = False

    def push(self, text: str) -> list[MessagePiece]:
        """Append text and return what became certain: content, and pieces of calls."""
        self._buffer += text
        return list(self._drain(is_last=False))

    def finish(self) -> list[MessagePiece]:
        """Return the rest; an unfinished call is content."""
        pieces = list(self._drain(is_last=True))
        if self._space and not self._is_after_call:
            pieces.append(self._space)
        return pieces

    def _drain(self, *, is_last: bool) -> Iterator[MessagePiece]:
        while self._buffer:
            at, begin = self._next_begin()
            if begin is None:
                at = len(self._buffer) - (0 if is_last else self._num_held())
            yield from self._content(self._cut(at))
            if begin is None or (not is_last and self._must_wait()):
                return
            cursor = TextCursor(self._buffer, 0)
            try:
                self._syntax.scan(cursor, self._tools, self.has_calls)
            except IncompleteCallError:
                if not is_last:
                    yield from self._deltas(cursor.calls, is_last=False)
                    return
                yield from self._not_a_call(begin)
            except MalformedCallError:
                yield from self._not_a_call(begin)
            else:
                yield from self._deltas(cursor.calls, is_last=True)
                self._cut(cursor.at)
                self._space, self._is_after_call, self.has_calls = "", True, True

    def _deltas(self, calls: Sequence[GeneratedToolCall], *, is_last: bool) -> Iterator[ToolCallDelta]:
        """What is new in the calls that the buffer begins with."""
        for index, call in enumerate(calls):
            is_new = index == len(self._sent)
            if is_new:
                self._sent.append("")
            sent = self._sent[index]
            is_longer = call.arguments.startswith(sent)
            assert is_longer or not is_last
            more = call.arguments[len(sent) :] if is_longer else ""  # an incomplete last value may be left out again
            if is_new or is_last or more:
                self._sent[index] += more
                yield ToolCallDelta(self._num_begun + index, call.name if is_new else None, more, is_last)

    def _not_a_call(self, begin: str) -> Iterator[str]:
        yield from self._content(self._cut(len(begin)))

    def _cut(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if size:
            self._num_searched = self._num_parsed = 0
            self._num_begun, self._sent = self._num_begun + len(self._sent), []
        return text

    def _next_begin(self) -> tuple[int, str | None]:
        """Find where the next call may begin, and with what."""
        found = [(self._buffer.find(begin), begin) for begin in self._syntax.begins]
        at, begin = min(((at, begin) for at, begin in found if at >= 0), default=(0, None))
        if self._syntax.only_first and (self._has_content or self._buffer[:at].strip()):
            return 0, None
        return at, begin

    def _num_held(self) -> int:
        """Length of the tail that may be the start of a `begin`."""
        if self._syntax.only_first and (self._has_content or self._buffer.strip()[:1] not in _firsts(self._syntax)):
            return 0
        return max(overlap(self._buffer, begin) for begin in self._syntax.begins)

    def _must_wait(self) -> bool:
        """Whether parsing again is of little use: a long call that has hardly grown, by nothing that could end it."""
        closers, size = self._syntax.closers, len(self._buffer)
        is_ended = any(self._buffer.find(each, max(0, self._num_searched + 1 - len(each))) >= 0 for each in closers)
        self._num_searched = size
        if size > _NUM_ALWAYS_PARSED and not is_ended and size - self._num_parsed < size // _GROWTH:
            return True
        self._num_parsed = size
        return False

    def _content(self, text: str) -> Iterator[str]:
        text = text.lstrip() if self._is_after_call else self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._has_content, self._is_after_call = True, False
            yield kept


class ReasoningSplitter:
    """Splits growing text at `<think>` and `</think>`; space around the tags belongs to neither part.

    `is_open`: the prompt ends inside reasoning, see `reasoning_is_open`.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._buffer = ""
        self._part = "reasoning" if is_open else "start"
        self._must_strip = is_open  # space at the beginning of the part

    def push(self, text: str) -> tuple[str, str]:
        """Append text and return what became certain of the reasoning and of the content."""
        self._buffer += text
        return self._drain(is_last=False)

    def finish(self) -> tuple[str, str]:
        """Return the rest."""
        return self._drain(is_last=True)

    def _drain(self, *, is_last: bool) -> tuple[str, str]:
        reasoning = ""
        if self._part == "start":
            begun = self._buffer.lstrip()
            if begun.startswith(_OPEN):
                self._buffer = begun.removeprefix(_OPEN)
                self._part, self._must_strip = "reasoning", True
            elif is_last or not _OPEN.startswith(begun):
                self._part = "content"
        if self._part == "reasoning":
            reasoning = self._take(self._end_of_reasoning(is_last=is_last)).rstrip()
            if self._buffer.lstrip().startswith(_CLOSE):
                self._buffer = self._buffer.lstrip().removeprefix(_CLOSE)
                self._part, self._must_strip = "content", True
        content = self._take(len(self._buffer)) if self._part == "content" else ""
        return reasoning, content

    def _end_of_reasoning(self, *, is_last: bool) -> int:
        """How many characters of the buffer are reasoning for certain; trailing space is not."""
        end = self._buffer.find(_CLOSE)
        if end < 0:
            end = len(self._buffer) - (0 if is_last else overlap(self._buffer, _CLOSE))
        return len(self._buffer[:end].rstrip())

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._must_strip:
            text = text.lstrip()
            self._must_strip = not text
        return text


class MessageParser:
    """Splits the text of an answer into reasoning, content and calls in a syntax; None if the request has no tools.

    With `reasoning`, `<think>` ... `</think>` is split off; `is_open`: the prompt ends inside it. With `only_calls`, as
    where a grammar forces calls, no content follows a call: the start of another one that a limit cut off is dropped.
    """

    def __init__(
        self,
        syntax: ToolSyntax | None,
        tools: Sequence[Tool] = (),
        *,
        reasoning: bool = False,
        is_open: bool = False,
        only_calls: bool = False,
    ) -> None:
        self._only_calls = only_calls
        self._reasoning = ReasoningSplitter(is_open=is_open) if reasoning or is_open else None
        self._calls = ToolCallParser(syntax, tools) if syntax else None

    def push(self, text: str) -> MessageDelta:
        """Append text and return what it adds to the message."""
        reasoning, content = self._reasoning.push(text) if self._reasoning else ("", text)
        return MessageDelta(_joined(self._pieces(content)), reasoning)

    def finish(self) -> MessageDelta:
        """Return what was held back."""
        reasoning, content = self._reasoning.finish() if self._reasoning else ("", "")
        pieces = self._pieces(content)
        return MessageDelta(_joined(pieces + self._kept(self._calls.finish() if self._calls else [])), reasoning)

    def _pieces(self, content: str) -> list[MessagePiece]:
        return self._kept(self._calls.push(content)) if self._calls else [content]

    def _kept(self, pieces: list[MessagePiece]) -> list[MessagePiece]:
        is_over = self._only_calls and self._calls is not None and self._calls.has_calls
        return [piece for piece in pieces if not (is_over and isinstance(piece, str))]


def joined_deltas(deltas: Sequence[MessageDelta]) -> MessageDelta:
    """Return what consecutive deltas add together."""
    pieces = _joined(piece for delta in deltas for piece in delta.pieces)
    return MessageDelta(pieces, "".join(delta.reasoning for delta in deltas))


def _joined(pieces: Iterable[MessagePiece]) -> tuple[MessagePiece, ...]:
    joined: dict[int, MessagePiece] = {}  # calls by their index, contents by numbers below 0
    for piece in pieces:
        key = -1 - len(joined) if isinstance(piece, str) else piece.index
        begun = joined.get(key)
        if isinstance(begun, ToolCallDelta) and isinstance(piece, ToolCallDelta):
            piece = replace(begun, arguments=begun.arguments + piece.arguments, is_last=piece.is_last)
        joined[key] = piece
    return tuple(joined.values())


def parse_message(parser: MessageParser | None, text: str, *, is_last: bool = True) -> MessageDelta:
    """Parse a whole answer with a new parser, or its next piece; without a parser, all of it is content."""
    if parser is None:
        return MessageDelta((text,))
    return joined_deltas([parser.push(text), parser.finish()]) if is_last else parser.push(text)


def reasoning_is_open(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside reasoning, as with templates that open it for the model."""
    return prompt.rstrip().endswith(_OPEN)


def _firsts(syntax: ToolSyntax) -> tuple[str, ...]:
    """The characters with which a message may begin that is a call."""
    return ("", *(begin[0] for begin in syntax.begins))
