"""Reading tool calls from text, left to right: names, JSON, and values that are written as bare text.

A call is complete, incomplete, or malformed; no further text makes a malformed call valid. Of an incomplete call, the
name and the beginning of its arguments are known as soon as no further text can change them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic_core import from_json

from nextn.bounded_json import loads

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
    """A call, or the beginning of one whose text is incomplete."""

    name: str
    arguments: str  # JSON text of an object


class IncompleteCallError(Exception):
    """The text ends before the call does."""


class MalformedCallError(Exception):
    """The text is no call, whatever follows."""


class TextCursor:
    """A position in text that is parsed from left to right, and the calls before it.

    Where the text ends within a call, its beginning is the last of `calls`.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at
        self.calls: list[GeneratedToolCall] = []

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

    def json_call(self, *keys: str, names: Mapping[str, Tool] | None = None) -> None:
        """Move past an object with a name and arguments, by the first of these keys that it has, and add the call.

        Only calls in `names` are known; None: any.
        """
        value, is_complete = self._json_object()
        name, arguments = value.get("name"), value.get(next((key for key in value if key in keys), ""))
        if is_complete and isinstance(arguments, str):  # JSON in JSON, as OpenAI has it
            arguments = _loads(arguments)
        is_known = isinstance(name, str) and (names is None or name in names) and isinstance(arguments, dict)
        if is_complete and not is_known:
            raise MalformedCallError
        if is_complete or (is_known and next(reversed(value)) != "name"):
            assert isinstance(arguments, dict)
            self._add(str(name), arguments, is_complete=is_complete)
        if not is_complete:
            raise IncompleteCallError

    def json_arguments(self, name: str) -> None:
        """Move past an object and add the call of this name with these arguments."""
        arguments, is_complete = self._json_object()
        self._add(name, arguments, is_complete=is_complete)
        if not is_complete:
            raise IncompleteCallError

    @contextmanager
    def call_with(self, name: str, arguments: Mapping[str, object]) -> Iterator[None]:
        """Add the call with the arguments that the mapping has in the end, or when the text ends."""
        try:
            yield
        except IncompleteCallError:
            self._add(name, arguments, is_complete=False)
            raise
        self._add(name, arguments, is_complete=True)

    def bare_value(
        self, end: str, tool: Tool | None, key: str, arguments: dict[str, object], *, frame: str = ""
    ) -> None:
        """Move past the text of a value and put it into the arguments: of a string, as much as is there.

        `frame` may be once before and once after the value, of which it is no part.
        """
        if key in arguments:
            raise MalformedCallError
        try:
            text = self.until(end)
        except IncompleteCallError:
            text = self.text[self.at :]
            if _types_of(tool, key) == {"string"}:
                begun = text[: len(text) - overlap(text, end)]
                arguments[key] = begun.removeprefix(frame).removesuffix(frame)
            raise
        arguments[key] = _typed(text.removeprefix(frame).removesuffix(frame), tool, key)

    def _add(self, name: str, arguments: Mapping[str, object], *, is_complete: bool) -> None:
        if not name:
            raise MalformedCallError
        text = json.dumps(arguments, ensure_ascii=False)
        self.calls.append(GeneratedToolCall(name, text if is_complete else _certain_part(text, arguments)))

    def _json_object(self) -> tuple[dict[str, object], bool]:
        """Move past an object; return what is known of it, and whether that is all."""
        self.skip_space()
        if self.at == len(self.text):
            raise IncompleteCallError
        if self.text[self.at] != "{":
            raise MalformedCallError
        begin = self.at
        try:
            self.at = self._json_end()
        except IncompleteCallError:
            return _begun_object(self.text[begin:]), False
        return _loads(self.text[begin : self.at]), True

    def _json_end(self) -> int:
        depth = 0
        for part in _JSON_PART.finditer(self.text, self.at):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
            if depth == 0:
                return part.end()
        raise IncompleteCallError


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of the text with which the mark may begin, shorter than the mark."""
    return max((size for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)


def _loads(text: str) -> dict[str, object]:
    """Parse an object; with the same key twice, it is malformed."""
    try:
        value = _sendable(loads(text, strict=False, object_pairs_hook=_unique))
    except ValueError as error:
        raise MalformedCallError from error
    if not isinstance(value, dict):
        raise MalformedCallError
    return value


def _sendable(value: object) -> object:
    """Return parsed JSON. Raises ValueError for NaN, infinities and depths that answers could not hold."""
    json.dumps(value, allow_nan=False)
    return value


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError
    return value


def _begun_object(text: str) -> dict[str, object]:
    """Parse the beginning of an object; empty where that is not possible."""
    try:
        value: dict[str, object] = from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value


def _certain_part(text: str, value: object) -> str:
    """The beginning of JSON text that stays as it is when its last value grows and further ones follow."""
    while isinstance(value, Mapping | list) and value:
        value = list(value.values() if isinstance(value, Mapping) else value)[-1]
    text = text.rstrip('"}]')
    return text if isinstance(value, str) else text.rstrip("0123456789.eE+-")


def _typed(text: str, tool: Tool | None, key: str) -> object:
    """Give a value that is written as bare text the type that the tool's schema asks for."""
    types = _types_of(tool, key)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON_CONSTANTS[text.strip()] if text.strip() in _PYTHON_CONSTANTS else _sendable(loads(text))
    except ValueError:
        return text
    if "number" in types:
        types.add("integer")
    return text if "string" in types and _type_of(value) not in types else value


def _types_of(tool: Tool | None, key: str) -> set[str]:
    properties = tool.parameters.get("properties") if tool else None
    return _types(properties.get(key)) if isinstance(properties, Mapping) else set()


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
