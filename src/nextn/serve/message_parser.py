"""Split generated text into content, reasoning and tool calls, as it grows or whole.

A call is reported when it is complete, because until then it may turn out not to be one: malformed calls stay content.
The result does not depend on how the text was cut into pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nextn.serve.tool_calls import (
    GeneratedToolCall,
    IncompleteCallError,
    MalformedCallError,
    TextCursor,
    Tool,
    ToolSyntax,
)

_NUM_ALWAYS_PARSED = 256  # characters of an unfinished call that are parsed at each step; later only where it may end


@dataclass(frozen=True)
class MessageDelta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[GeneratedToolCall, ...] = ()


class ToolCallParser:
    """Splits growing text into content and calls."""

    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool]) -> None:
        self._syntax, self._tools = syntax, {tool.name: tool for tool in tools}
        self._buffer = ""
        self._num_searched = 0  # characters of an unfinished call in which no end was found
        self._space = ""  # at the end of the content so far; dropped if a call follows
        self._has_content = self._has_calls = self._is_after_call = False

    def push(self, text: str) -> list[str | GeneratedToolCall]:
        """Append text and return what became certain: content, and calls that are complete."""
        self._buffer += text
        return list(self._drain(is_last=False))

    def finish(self) -> list[str | GeneratedToolCall]:
        """Return the rest; an unfinished call is content."""
        pieces = list(self._drain(is_last=True))
        if self._space and not self._is_after_call:
            pieces.append(self._space)
        return pieces

    def _drain(self, *, is_last: bool) -> Iterator[str | GeneratedToolCall]:
        while self._buffer:
            at, begin = self._next_begin()
            if begin is None:
                at = len(self._buffer) - (0 if is_last else self._num_held())
            yield from self._content(self._cut(at))
            if begin is None or (not is_last and self._must_wait()):
                return
            cursor = TextCursor(self._buffer, 0)
            try:
                calls = self._syntax.scan(cursor, self._tools, self._has_calls)
            except IncompleteCallError:
                if not is_last:
                    return
                yield from self._not_a_call(begin)
            except MalformedCallError:
                yield from self._not_a_call(begin)
            else:
                self._cut(cursor.at)
                self._space, self._is_after_call, self._has_calls = "", True, True
                yield from calls

    def _not_a_call(self, begin: str) -> Iterator[str]:
        yield from self._content(self._cut(len(begin)))

    def _cut(self, size: int) -> str:
        """Take characters off the beginning of the buffer."""
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._num_searched = 0 if size else self._num_searched
        return text

    def _next_begin(self) -> tuple[int, str | None]:
        """Where the next call may begin, and with what."""
        found = [(self._buffer.find(begin), begin) for begin in self._syntax.begins]
        at, begin = min(((at, begin) for at, begin in found if at >= 0), default=(0, None))
        if self._syntax.only_first and (self._has_content or self._buffer[:at].strip()):
            return 0, None
        return at, begin

    def _num_held(self) -> int:
        """Length of the tail that may be the start of a `begin`."""
        if self._syntax.only_first and (self._has_content or self._buffer.strip()[:1] not in _firsts(self._syntax)):
            return 0
        text = self._buffer
        sizes = (size for begin in self._syntax.begins for size in range(1, len(begin)) if text.endswith(begin[:size]))
        return max(sizes, default=0)

    def _must_wait(self) -> bool:
        """Whether parsing again is of no use: a long call to which nothing was added that could end it."""
        closers = self._syntax.closers
        is_ended = any(self._buffer.find(each, max(0, self._num_searched + 1 - len(each))) >= 0 for each in closers)
        self._num_searched = len(self._buffer)
        return self._num_searched > _NUM_ALWAYS_PARSED and not is_ended

    def _content(self, text: str) -> Iterator[str]:
        text = text.lstrip() if self._is_after_call else self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._has_content, self._is_after_call = True, False
            yield kept


class ReasoningSplitter:
    """Splits growing text at `<think>` and `</think>`; space around the tags belongs to neither part.

    Args:
        is_open: The prompt ends inside reasoning, see `reasoning_is_open`.
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
            if begun.startswith("<think>"):
                self._buffer = begun.removeprefix("<think>")
                self._part, self._must_strip = "reasoning", True
            elif is_last or not "<think>".startswith(begun):
                self._part = "content"
        if self._part == "reasoning":
            reasoning = self._take(self._end_of_reasoning(is_last=is_last)).rstrip()
            if self._buffer.lstrip().startswith("</think>"):
                self._buffer = self._buffer.lstrip().removeprefix("</think>")
                self._part, self._must_strip = "content", True
        content = self._take(len(self._buffer)) if self._part == "content" else ""
        return reasoning, content

    def _end_of_reasoning(self, *, is_last: bool) -> int:
        """How many characters of the buffer are reasoning for certain; trailing space is not."""
        end = self._buffer.find("</think>")
        if end < 0:
            sizes = (size for size in range(1, len("</think>")) if self._buffer.endswith("</think>"[:size]))
            end = len(self._buffer) - (0 if is_last else max(sizes, default=0))
        return len(self._buffer[:end].rstrip())

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._must_strip:
            text = text.lstrip()
            self._must_strip = not text
        return text


class MessageParser:
    """Splits the text of an answer into reasoning, content and tool calls.

    Args:
        syntax: How calls are written; None if the request has no tools.
        tools: The request's tools.
        reasoning: Split off `<think>` ... `</think>`.
        is_open: The prompt ends inside reasoning.
    """

    def __init__(
        self, syntax: ToolSyntax | None, tools: Sequence[Tool] = (), *, reasoning: bool = False, is_open: bool = False
    ) -> None:
        self._reasoning = ReasoningSplitter(is_open=is_open) if reasoning or is_open else None
        self._calls = ToolCallParser(syntax, tools) if syntax else None

    def push(self, text: str) -> MessageDelta:
        """Append text and return what it adds to the message."""
        reasoning, content = self._reasoning.push(text) if self._reasoning else ("", text)
        return self._delta(reasoning, self._pieces(content))

    def finish(self) -> MessageDelta:
        """Return what was held back."""
        reasoning, content = self._reasoning.finish() if self._reasoning else ("", "")
        pieces = self._pieces(content)
        return self._delta(reasoning, pieces + (self._calls.finish() if self._calls else []))

    def _pieces(self, content: str) -> list[str | GeneratedToolCall]:
        return self._calls.push(content) if self._calls else [content]

    def _delta(self, reasoning: str, pieces: list[str | GeneratedToolCall]) -> MessageDelta:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        calls = tuple(piece for piece in pieces if isinstance(piece, GeneratedToolCall))
        return MessageDelta("".join(texts), reasoning, calls)


def joined_deltas(deltas: Sequence[MessageDelta]) -> MessageDelta:
    """Return what consecutive deltas add together."""
    return MessageDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(call for delta in deltas for call in delta.tool_calls),
    )


def parse_message(parser: MessageParser, text: str) -> MessageDelta:
    """Parse a whole answer with a new parser."""
    return joined_deltas([parser.push(text), parser.finish()])


def reasoning_is_open(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside reasoning, as with templates that open it for the model."""
    return prompt.rstrip().endswith("<think>")


def _firsts(syntax: ToolSyntax) -> tuple[str, ...]:
    """The characters with which a message may begin that is a call."""
    return ("", *(begin[0] for begin in syntax.begins))
