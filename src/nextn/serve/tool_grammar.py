"""Grammars of tool calls, in the syntax of the template: for `tool_choice` `required` or a named function, answers of
calls alone; for templates without a syntax, text in which each call is well-formed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nextn.errors import ConfigError
from nextn.serve.call_text import Tool
from nextn.serve.grammar import JSON_WHITESPACE, GrammarLimits, Lark, check_schema
from nextn.serve.tool_calls import ToolSyntax

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CALLS = 32  # in one answer
_IDENTIFIER = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


def tool_call_grammar(
    tokenizer: "PreTrainedTokenizerBase",
    syntax: ToolSyntax,
    tools: Sequence[Tool],
    *,
    parallel: bool = True,
    forced: bool = True,
) -> Lark:
    """Make the grammar of an answer with calls of these tools.

    Args:
        tokenizer: Decides which marks of the syntax are special tokens.
        syntax: How the calls are written.
        tools: At least one; their arguments follow their schemas.
        parallel: Allow up to `MAX_CALLS` calls instead of one.
        forced: The answer consists of calls; else of text and calls, which only Hermes' syntax can.

    Raises:
        ConfigError: A tool's name or schema cannot be written in this syntax.
    """
    if not tools:
        raise ConfigError("tool_choice requires a call, but the request has no tools")
    for tool in tools:
        if not tool.name or not set(tool.name) <= _IDENTIFIER:
            raise ConfigError(f"tool name {tool.name!r}; expected letters, digits and _-.:/")
    if not forced:
        assert syntax.name == "hermes"
        return _free_hermes(_Rules(tokenizer), tools, parallel)
    return _GRAMMARS[syntax.name](_Rules(tokenizer), tools, parallel)


class _Rules:
    """Collects the rules of a Lark grammar."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = dict(sorted(special.items(), key=lambda item: -len(item[0])))
        self._rules: list[str] = []

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}\n")
        return name

    def grammar(self, start: str) -> Lark:
        return Lark(f"%llguidance {{}}\nstart: {start}\n" + "".join(self._rules))

    def literal(self, text: str) -> str:
        """Text as it is, in which special tokens are tokens: their characters one by one would not be the mark."""
        for token, id in self._special.items():
            before, mark, after = text.partition(token)
            if mark:
                return " ".join(each for each in (self.literal(before), f"<[{id}]>", self.literal(after)) if each)
        return json.dumps(text, ensure_ascii=False) if text else ""

    def value(self, schema: Mapping[str, object]) -> str:
        """A JSON value of a schema."""
        check_schema(schema, GrammarLimits())
        options = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
        return self.add(f"%json {json.dumps({**options, **schema}, ensure_ascii=False)}")

    def text_before(self, end: str) -> str:
        """Any text up to the first occurrence of a mark, and the mark."""
        mark = self.literal(end)
        if "<[" not in mark:
            return self.add("/(?s:.*)/", f"[suffix={mark}]")
        # A suffix cannot be a special token. The token ends the text by itself; its characters must not occur before.
        return f"{self.text_without(end)} {mark[mark.index('<[') :]}"

    def text_without(self, mark: str) -> str:
        """Any text in which the characters of a mark do not occur."""
        name = f"TEXT{len(self._rules)}"
        excluded = re.escape(mark.strip()).replace("/", r"\/")
        self._rules.append(f"{name}: /(?s:.*)/ & ~/(?s:.*){excluded}(?s:.*)/\n")
        return name


def _arguments(tool: Tool) -> Mapping[str, object]:
    """The schema of the arguments, which are an object; no schema means no arguments."""
    return {"type": "object", **(tool.parameters or {"additionalProperties": False})}


def _calls(rules: _Rules, calls: Sequence[str], separator: str, parallel: bool) -> str:
    """One call, or several with a separator."""
    call = rules.add(" | ".join(calls))
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def _json_call(rules: _Rules, tool: Tool, key: str = "arguments") -> str:
    head = rules.literal(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
    return rules.add(f'{head} {rules.value(_arguments(tool))} "}}"')


def _hermes(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    begin, end = rules.literal("<tool_call>\n"), rules.literal("\n</tool_call>")
    calls = [f"{begin} {_json_call(rules, tool)} {end}" for tool in tools]
    return rules.grammar(_calls(rules, calls, rules.literal("\n"), parallel))


def _free_hermes(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    """Text that may have calls; after the mark of one, a call must follow."""
    mark, end = "<tool_call>", rules.literal("\n</tool_call>")
    calls = rules.add(" | ".join(f"{_json_call(rules, tool)} {end}" for tool in tools))
    call = f"({rules.text_before(mark)} {rules.literal(chr(10))} {calls})"
    return rules.grammar(f"{call}{{0,{MAX_CALLS if parallel else 1}}} {rules.text_without(mark)}")


def _llama(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    return rules.grammar(_calls(rules, [_json_call(rules, tool, "parameters") for tool in tools], '"; "', parallel))


def _mistral(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    """The syntax of tokenizers from v11 on if there is a token `[ARGS]`, else a list."""
    begin = rules.literal("[TOOL_CALLS]")
    if rules.literal("[ARGS]") != '"[ARGS]"':
        heads = [rules.literal(f"[TOOL_CALLS]{tool.name}[ARGS]") for tool in tools]
        calls = [f"{head} {rules.value(_arguments(tool))}" for head, tool in zip(heads, tools, strict=True)]
        return rules.grammar(_calls(rules, calls, "", parallel))
    calls = [_json_call(rules, tool) for tool in tools]
    return rules.grammar(f'{begin} " [" {_calls(rules, calls, rules.literal(", "), parallel)} "]"')


def _deepseek(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    """The syntax of V3.1."""
    end = rules.literal("<｜tool▁call▁end｜>")
    heads = [rules.literal(f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>") for tool in tools]
    calls = [f"{head} {rules.value(_arguments(tool))} {end}" for head, tool in zip(heads, tools, strict=True)]
    begin, last = rules.literal("<｜tool▁calls▁begin｜>"), rules.literal("<｜tool▁calls▁end｜>")
    return rules.grammar(f"{begin} {_calls(rules, calls, '', parallel)} {last}")


def _qwen_xml(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    end = rules.literal("</function>\n</tool_call>")

    def call(tool: Tool) -> str:
        head = rules.literal(f"<tool_call>\n<function={tool.name}>\n")
        pairs = _pairs(rules, tool, lambda key: f"<parameter={key}>\n", "\n</parameter>", "\n")
        return f"{head} {pairs} {end}"

    return rules.grammar(_calls(rules, [call(tool) for tool in tools], rules.literal("\n"), parallel))


def _glm_xml(rules: _Rules, tools: Sequence[Tool], parallel: bool) -> Lark:
    def call(tool: Tool) -> str:
        head = rules.literal(f"<tool_call>{tool.name}\n")
        pairs = _pairs(rules, tool, lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>", "\n")
        return f"{head} {pairs} {rules.literal('</tool_call>')}"

    return rules.grammar(_calls(rules, [call(tool) for tool in tools], rules.literal("\n"), parallel))


def _pairs(rules: _Rules, tool: Tool, begin: Callable[[str], str], end: str, after: str) -> str:
    """The arguments one by one, in the schema's order: strings as they are, other values as JSON."""
    properties, required = tool.parameters.get("properties") or {}, tool.parameters.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise ConfigError(f"tool {tool.name!r}: expected `properties` to be an object and `required` a list")
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    pairs = []
    for key, schema in properties.items():
        if not set(key) <= _IDENTIFIER:
            raise ConfigError(f"tool {tool.name!r}: parameter {key!r}; expected letters, digits and _-.:/")
        inner = schema if isinstance(schema, Mapping) else {}
        pair = f"{rules.literal(begin(key))} {_bare_value(rules, inner, shared, end)} {rules.literal(after)}"
        pairs.append(rules.add(pair) if key in required else f"({pair})?")
    return " ".join(pairs)


def _bare_value(rules: _Rules, schema: Mapping[str, object], shared: Mapping[str, object], end: str) -> str:
    values = schema.get("enum")
    if schema.get("type") == "string" and isinstance(values, list) and values:
        return rules.add(" | ".join(f"{rules.literal(str(value))} {rules.literal(end)}" for value in values))
    if schema.get("type") == "string":
        return rules.text_before(end)
    return rules.add(f"{rules.value({**shared, **schema})} {rules.literal(end)}")


_GRAMMARS: Mapping[str, Callable[[_Rules, Sequence[Tool], bool], Lark]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "glm_xml": _glm_xml,
    "deepseek": _deepseek,
    "mistral": _mistral,
    "llama3_json": _llama,
}
