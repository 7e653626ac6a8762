"""How models write tool calls: the syntaxes of chat templates, and what recognizes a call at its beginning.

`tool_syntax` recognizes a template's syntax by the template's text; `ToolSyntax.scan` reads calls from text that begins
with one. A call is complete, incomplete, or malformed; no further text makes a malformed call valid.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nextn.errors import ConfigError

_JSON_PART = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[{}\[\]]', re.DOTALL)
_NAME = re.compile(r'[^\n<>{}\[\]"`]*')
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # as templates that use Jinja's `string` render them


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object]  # JSON schema of the arguments


@dataclass(frozen=True)
class GeneratedToolCall:
    """A complete call."""

    name: str
    arguments: str  # JSON text of an object

    def as_openai(self, index: int, call_id: str) -> dict[str, object]:
        """Return the entry of `tool_calls` in OpenAI's messages and deltas."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": index, "id": call_id, "type": "function", "function": function}


class IncompleteCallError(Exception):
    """The text ends before the call does."""


class MalformedCallError(Exception):
    """The text is no call, whatever follows."""


class TextCursor:
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
            raise IncompleteCallError
        return False

    def expect(self, literal: str) -> None:
        if not self.has(literal):
            raise MalformedCallError

    def until(self, literal: str) -> str:
        """Move past the next occurrence of the literal and return the text before it."""
        end = self.text.find(literal, self.at)
        if end < 0:
            raise IncompleteCallError
        begin, self.at = self.at, end + len(literal)
        return self.text[begin:end]

    def name(self) -> str:
        match = _NAME.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.at == len(self.text):
            raise IncompleteCallError
        if not match[0].strip():
            raise MalformedCallError
        return match[0].strip()

    def name_before(self, literal: str) -> str:
        """Move past a name and the literal that follows it."""
        name = self.name()
        self.expect(literal)
        return name

    def json_object(self) -> dict[str, object]:
        self.skip_space()
        if self.at == len(self.text):
            raise IncompleteCallError
        if self.text[self.at] != "{":
            raise MalformedCallError
        begin, self.at = self.at, self._json_end()
        try:
            value: dict[str, object] = json.loads(self.text[begin : self.at], strict=False)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError from error
        return value

    def _json_end(self) -> int:
        depth = 0
        for part in _JSON_PART.finditer(self.text, self.at):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
            if depth == 0:
                return part.end()
        raise IncompleteCallError


Scan = Callable[[TextCursor, Mapping[str, Tool], bool], list[GeneratedToolCall]]


@dataclass(frozen=True)
class ToolSyntax:
    """How a family of models writes calls."""

    name: str
    template_markers: tuple[str, ...]  # the chat template has all of them
    begins: tuple[str, ...]  # a call begins with one of them
    closers: tuple[str, ...]  # a call ends with one of them
    scan: Scan  # moves a cursor at a begin past one or more calls and returns them
    only_first: bool = False  # a call may only begin the message or follow another call


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
            raise ConfigError(f"tool-call parser {name!r}; expected one of {', '.join(SYNTAXES)}")
        return SYNTAXES[name]
    template = chat_template or ""
    matches = (syntax for syntax in SYNTAXES.values() if all(each in template for each in syntax.template_markers))
    return next(matches, None)


def _scan_hermes(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> list[GeneratedToolCall]:
    cursor.expect("<tool_call>")
    call = _json_call(cursor.json_object(), "arguments")
    cursor.skip_space()
    cursor.expect("</tool_call>")
    return [call]


def _scan_qwen_xml(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> list[GeneratedToolCall]:
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


def _scan_glm_xml(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> list[GeneratedToolCall]:
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


def _scan_deepseek(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> list[GeneratedToolCall]:
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


def _scan_mistral(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> list[GeneratedToolCall]:
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


def _scan_llama(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> list[GeneratedToolCall]:
    """Without a mark around the call, only JSON with the name of a tool is one."""
    if has_calls:
        cursor.has(";")
    cursor.skip_space()
    cursor.has("<|python_tag|>")
    value = cursor.json_object()
    call = _json_call(value, "parameters" if "parameters" in value else "arguments")
    if call.name not in tools:
        raise MalformedCallError
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


def _json_call(value: Mapping[str, object], arguments_key: str) -> GeneratedToolCall:
    name, arguments = value.get("name"), value.get(arguments_key)
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedCallError
    return _call(name, arguments)


def _call(name: str, arguments: Mapping[str, object]) -> GeneratedToolCall:
    if not name:
        raise MalformedCallError
    return GeneratedToolCall(name, json.dumps(arguments, ensure_ascii=False))


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
