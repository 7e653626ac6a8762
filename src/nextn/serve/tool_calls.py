"""Tool calls and reasoning in generated text: split a stream into content, reasoning and calls.

How a model writes a call depends on the template it was trained with. `tool_syntax` recognizes the syntax by the
template's text. A call is reported when it is complete, because until then it may turn out not to be one: malformed
calls stay content. The result does not depend on how the text was cut into pieces.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nextn.errors import ConfigError

_JSON_PART = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[{}\[\]]', re.DOTALL)
_NAME = re.compile(r'[^\n<>{}\[\]"`]*')
_NUM_ALWAYS_PARSED = 256  # characters of an unfinished call that are parsed at each step; later only where it may end
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # as templates that use Jinja's `string` render them


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object]  # JSON schema of the arguments


@dataclass(frozen=True)
class ToolCall:
    """A complete call."""

    name: str
    arguments: str  # JSON text of an object

    def as_openai(self, index: int, call_id: str) -> dict[str, object]:
        """Return the entry of `tool_calls` in OpenAI's messages and deltas."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": index, "id": call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class MessageDelta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class _IncompleteError(Exception):
    """The text ends before the call does."""


class _MalformedError(Exception):
    """The text is no call, however it goes on."""


class _Cursor:
    """A position in text that is parsed from left to right."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def has(self, literal: str) -> bool:
        """Move past the literal if it comes next."""
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        if literal.startswith(self.text[self.at :]):
            raise _IncompleteError
        return False

    def expect(self, literal: str) -> None:
        if not self.has(literal):
            raise _MalformedError

    def until(self, literal: str) -> str:
        """Move past the next occurrence of the literal and return the text before it."""
        end = self.text.find(literal, self.at)
        if end < 0:
            raise _IncompleteError
        begin, self.at = self.at, end + len(literal)
        return self.text[begin:end]

    def name(self) -> str:
        match = _NAME.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.at == len(self.text):
            raise _IncompleteError
        if not match[0].strip():
            raise _MalformedError
        return match[0].strip()

    def name_before(self, literal: str) -> str:
        """Move past a name and the literal that follows it."""
        name = self.name()
        self.expect(literal)
        return name

    def json_object(self) -> dict[str, object]:
        self.skip_space()
        if self.at == len(self.text):
            raise _IncompleteError
        if self.text[self.at] != "{":
            raise _MalformedError
        begin, self.at = self.at, self._json_end()
        try:
            value: dict[str, object] = json.loads(self.text[begin : self.at], strict=False)
        except (ValueError, RecursionError) as error:
            raise _MalformedError from error
        return value

    def _json_end(self) -> int:
        depth = 0
        for part in _JSON_PART.finditer(self.text, self.at):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
            if depth == 0:
                return part.end()
        raise _IncompleteError


Scan = Callable[[_Cursor, Mapping[str, Tool], bool], list[ToolCall]]


@dataclass(frozen=True)
class ToolSyntax:
    """How a family of models writes calls."""

    name: str
    template_markers: tuple[str, ...]  # the chat template has all of them
    begins: tuple[str, ...]  # a call begins with one of them
    closers: tuple[str, ...]  # a call ends with one of them
    scan: Scan  # moves a cursor at a begin past one or more calls and returns them
    only_first: bool = False  # a call may only begin the message or follow another call


class ToolCallParser:
    """Splits growing text into content and calls."""

    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool]) -> None:
        self._syntax, self._tools = syntax, {tool.name: tool for tool in tools}
        self._buffer = ""
        self._num_searched = 0  # characters of an unfinished call in which no end was found
        self._space = ""  # at the end of the content so far; dropped if a call follows
        self._has_content = self._has_calls = self._is_after_call = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Append text and return what became certain: content, and calls that are complete."""
        self._buffer += text
        return list(self._drain(is_last=False))

    def finish(self) -> list[str | ToolCall]:
        """Return the rest; an unfinished call is content."""
        pieces = list(self._drain(is_last=True))
        if self._space and not self._is_after_call:
            pieces.append(self._space)
        return pieces

    def _drain(self, *, is_last: bool) -> Iterator[str | ToolCall]:
        while self._buffer:
            at, begin = self._next_begin()
            if begin is None:
                at = len(self._buffer) - (0 if is_last else self._num_held())
            yield from self._content(self._cut(at))
            if begin is None or (not is_last and self._must_wait()):
                return
            cursor = _Cursor(self._buffer, 0)
            try:
                calls = self._syntax.scan(cursor, self._tools, self._has_calls)
            except _IncompleteError:
                if not is_last:
                    return
                yield from self._not_a_call(begin)
            except _MalformedError:
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

    def _pieces(self, content: str) -> list[str | ToolCall]:
        return self._calls.push(content) if self._calls else [content]

    def _delta(self, reasoning: str, pieces: list[str | ToolCall]) -> MessageDelta:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
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


def tool_syntax(chat_template: str | None, name: str | None = None) -> ToolSyntax | None:
    """Find the syntax of a chat template.

    Args:
        chat_template: The template's text.
        name: Use this syntax instead, one of `SYNTAXES`.

    Returns:
        None if the template has the markers of none.

    Raises:
        ConfigError: There is no syntax of this name.
    """
    if name is not None:
        if name not in SYNTAXES:
            raise ConfigError(f"tool-call syntax {name!r}; expected one of {', '.join(SYNTAXES)}")
        return SYNTAXES[name]
    template = chat_template or ""
    matches = (syntax for syntax in SYNTAXES.values() if all(each in template for each in syntax.template_markers))
    return next(matches, None)


def _scan_hermes(cursor: _Cursor, tools: Mapping[str, Tool], has_calls: bool) -> list[ToolCall]:
    cursor.expect("<tool_call>")
    call = _json_call(cursor.json_object(), "arguments")
    cursor.skip_space()
    cursor.expect("</tool_call>")
    return [call]


def _scan_qwen_xml(cursor: _Cursor, tools: Mapping[str, Tool], has_calls: bool) -> list[ToolCall]:
    cursor.expect("<tool_call>")
    cursor.skip_space()
    cursor.expect("<function=")
    name = cursor.name_before(">")
    arguments: dict[str, object] = {}
    cursor.skip_space()
    while cursor.has("<parameter="):
        key = cursor.name_before(">")
        value = cursor.until("</parameter>").removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, tools.get(name), key)
        cursor.skip_space()
    cursor.expect("</function>")
    cursor.skip_space()
    cursor.expect("</tool_call>")
    return [_call(name, arguments)]


def _scan_glm_xml(cursor: _Cursor, tools: Mapping[str, Tool], has_calls: bool) -> list[ToolCall]:
    cursor.expect("<tool_call>")
    name = cursor.name()
    cursor.skip_space()
    arguments: dict[str, object] = {}
    while cursor.has("<arg_key>"):
        key = cursor.name_before("</arg_key>")
        cursor.skip_space()
        cursor.expect("<arg_value>")
        arguments[key] = _typed(cursor.until("</arg_value>"), tools.get(name), key)
        cursor.skip_space()
    cursor.expect("</tool_call>")
    return [_call(name, arguments)]


def _scan_deepseek(cursor: _Cursor, tools: Mapping[str, Tool], has_calls: bool) -> list[ToolCall]:
    """V3 and R1 write a type, the name and a fenced block; V3.1 the name and JSON."""
    if has_calls and cursor.has("<｜tool▁calls▁end｜>"):
        return []
    if cursor.has("<｜tool▁calls▁begin｜>"):
        cursor.skip_space()
    cursor.expect("<｜tool▁call▁begin｜>")
    name = cursor.name_before("<｜tool▁sep｜>")
    cursor.skip_space()
    if cursor.has("{"):
        cursor.at -= 1
        arguments = cursor.json_object()
    else:
        name = cursor.name_before("\n")
        cursor.skip_space()
        cursor.expect("```json")
        arguments = cursor.json_object()
        cursor.skip_space()
        cursor.expect("```")
    cursor.skip_space()
    cursor.expect("<｜tool▁call▁end｜>")
    return [_call(name, arguments)]


def _scan_mistral(cursor: _Cursor, tools: Mapping[str, Tool], has_calls: bool) -> list[ToolCall]:
    """Tokenizers before v11 have one list of calls; later ones a name and arguments per call."""
    cursor.expect("[TOOL_CALLS]")
    cursor.skip_space()
    if not cursor.has("["):
        name = cursor.name()
        if cursor.has("[CALL_ID]"):
            cursor.name()
        cursor.expect("[ARGS]")
        return [_call(name, cursor.json_object())]
    calls = [_json_call(cursor.json_object(), "arguments")]
    cursor.skip_space()
    while cursor.has(","):
        calls.append(_json_call(cursor.json_object(), "arguments"))
        cursor.skip_space()
    cursor.expect("]")
    return calls


def _scan_llama(cursor: _Cursor, tools: Mapping[str, Tool], has_calls: bool) -> list[ToolCall]:
    """Without a mark around the call, only JSON with the name of a tool is one."""
    if has_calls:
        cursor.has(";")
    cursor.skip_space()
    cursor.has("<|python_tag|>")
    value = cursor.json_object()
    call = _json_call(value, "parameters" if "parameters" in value else "arguments")
    if call.name not in tools:
        raise _MalformedError
    return [call]


# In the order in which a template is tried: more specific markers first.
SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax("qwen_xml", ("<tool_call>", "<function="), ("<tool_call>",), ("</tool_call>",), _scan_qwen_xml),
        ToolSyntax("glm_xml", ("<tool_call>", "<arg_key>"), ("<tool_call>",), ("</tool_call>",), _scan_glm_xml),
        ToolSyntax("hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",), _scan_hermes),
        ToolSyntax(
            "deepseek", ("<｜tool▁call▁begin｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
            ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), _scan_deepseek,
        ),
        ToolSyntax("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), ("}", "]"), _scan_mistral),
        ToolSyntax(
            "llama3_json", ("<|start_header_id|>", '"parameters"'), ("<|python_tag|>", "{", ";"), ("}",), _scan_llama,
            only_first=True,
        ),
    )
}  # fmt: skip


def _firsts(syntax: ToolSyntax) -> tuple[str, ...]:
    """The characters with which a message may begin that is a call."""
    return ("", *(begin[0] for begin in syntax.begins))


def _json_call(value: Mapping[str, object], arguments_key: str) -> ToolCall:
    name, arguments = value.get("name"), value.get(arguments_key)
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _MalformedError from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _MalformedError
    return _call(name, arguments)


def _call(name: str, arguments: Mapping[str, object]) -> ToolCall:
    if not name:
        raise _MalformedError
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _typed(text: str, tool: Tool | None, key: str) -> object:
    """Give a value that is written as bare text the type that the tool's schema asks for."""
    properties = tool.parameters.get("properties") if tool else None
    types = _types(properties.get(key)) if isinstance(properties, Mapping) else set()
    if types == {"string"}:
        return text
    try:
        value = _PYTHON_CONSTANTS[text.strip()] if text.strip() in _PYTHON_CONSTANTS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if "number" in types:
        types.add("integer")
    return text if "string" in types and _type_of(value) not in types else value


def _types(schema: object) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {_type_of(value) for value in values} if isinstance(values, list) else set()
    if isinstance(named := schema.get("type"), str | list):
        return {named} if isinstance(named, str) else {str(each) for each in named}
    return {each for inner in (schema.get("anyOf") or schema.get("oneOf") or ()) for each in _types(inner)}


def _type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
