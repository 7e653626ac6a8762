"""Where requests meet grammars, also that of tool calls, and the parsers of tool calls and reasoning."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from transformers import PreTrainedTokenizerBase

from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.serve.api_errors import ApiError
from nextn.serve.call_text import Tool
from nextn.serve.grammar import JSON_WHITESPACE, GrammarCompiler, GrammarSpec, Lark, check_schema, structure
from nextn.serve.message_parser import MessageParser, reasoning_is_open
from nextn.serve.request import GrammarState
from nextn.serve.schemas import ChatRequest, GenerationFields, NamedTool
from nextn.serve.tool_calls import SYNTAXES, ToolSyntax, tool_syntax

_TAIL = 16  # tokens at the end of a prompt in which `<think>` is looked for


class StructuredOutput:
    """Makes grammars of requests and parsers of answers, for calls in a syntax; None: the chat template's.

    Raises ConfigError if there is no such syntax.
    """

    def __init__(self, model: Model, eos: Sequence[int], syntax: str | None = None) -> None:
        self._model, self._eos = model, eos
        template = model.tokenizer.chat_template if model.tokenizer is not None else None
        self._template = template if isinstance(template, str) else "\n".join((template or {}).values())
        self._syntax = tool_syntax(self._template, syntax)

    def is_generic(self, *, has_tools: bool) -> bool:
        """Return whether tools are described without the chat template, which knows no syntax for them."""
        return self._syntax is None and (has_tools or "tool" not in self._template)

    def grammar(self, request: GenerationFields) -> Callable[[], GrammarState] | None:
        """Compile the grammar that a request asks for; None if it asks for none. Raises ApiError."""
        is_call = isinstance(request, ChatRequest) and _forces_call(request)
        field = "tools" if is_call else next(iter(request.structures), None)
        try:
            spec = self._specification(request)
            return None if spec is None else self._compiler.compile(spec)
        except ConfigError as error:
            raise ApiError(400, f"{field}: {error}", field, "invalid_value") from error

    def parser(self, request: ChatRequest, prompt: Sequence[int]) -> MessageParser | None:
        """Return what splits an answer into reasoning, content and tool calls; None if it is all content."""
        syntax = self._call_syntax() if _offers_tools(request) else None
        # Text that a grammar forces has no reasoning, whatever the prompt opened.
        only_calls = _forces_call(request)
        may_reason = not (request.structures or only_calls)
        reasoning = may_reason and "</think>" in self._template
        is_open = reasoning and self._ends_in_reasoning(prompt)
        if syntax is None and not reasoning:
            return None
        return MessageParser(syntax, _tools(request), reasoning=reasoning, is_open=is_open, only_calls=only_calls)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        if self._model.tokenizer is None:
            raise ConfigError("structured output needs a tokenizer, which this checkpoint has not")
        return GrammarCompiler(self._model.tokenizer, self._model.trunk.vocab_size, eos_ids=self._eos)

    def _specification(self, request: GenerationFields) -> GrammarSpec | None:
        if isinstance(request, ChatRequest) and _forces_call(request):
            return self._call_grammar(request, forced=True)
        if request.structures:
            return next(structure(*asked) for asked in request.structures.values())
        # A model that was not trained to write calls gets them right where a grammar helps.
        if isinstance(request, ChatRequest) and _offers_tools(request) and self.is_generic(has_tools=True):
            return self._call_grammar(request, forced=False)
        return None

    def _call_grammar(self, request: ChatRequest, *, forced: bool) -> GrammarSpec:
        assert self._model.tokenizer is not None  # there is none without: a chat needs a template
        syntax, tools = self._call_syntax(), _tools(request)
        is_parallel = request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool)
        return tool_call_grammar(self._model.tokenizer, syntax, tools, parallel=is_parallel, forced=forced)

    def _call_syntax(self) -> ToolSyntax:
        """The template's, or one that any model can be made to write."""
        return self._syntax or SYNTAXES["hermes"]

    def _ends_in_reasoning(self, prompt: Sequence[int]) -> bool:
        assert self._model.tokenizer is not None
        return reasoning_is_open(self._model.tokenizer.decode(list(prompt[-_TAIL:])))


def _offers_tools(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def _forces_call(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice not in ("none", "auto")


def _tools(request: ChatRequest) -> list[Tool]:
    chosen = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
    functions = [tool.function for tool in request.tools]
    return [Tool(function.name, function.parameters) for function in functions if chosen in (None, function.name)]


MAX_CALLS = 32  # in one answer
_IDENTIFIER = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


def tool_call_grammar(
    tokenizer: PreTrainedTokenizerBase,
    syntax: ToolSyntax,
    tools: Sequence[Tool],
    *,
    parallel: bool = True,
    forced: bool = True,
) -> Lark:
    """Make the grammar of an answer with calls of these tools, whose arguments follow their schemas.

    The tokenizer decides which marks of the syntax are special tokens. `parallel` allows up to `MAX_CALLS` calls
    instead of one. Without `forced`, the answer consists of text and calls, which only Hermes' syntax can. Raises
    ConfigError if a tool's name or schema cannot be written in this syntax.
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
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
        check_schema(schema)
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


def _xml(
    rules: _Rules, tools: Sequence[Tool], parallel: bool, *, head: str, key: str, value_end: str, end: str
) -> Lark:
    """head: Of a call, with the tool's name in place of {}. key: Before a value, with its name in place of {}."""
    calls = [
        f"{rules.literal(head.format(tool.name))} {_pairs(rules, tool, key, value_end)} {rules.literal(end)}"
        for tool in tools
    ]
    return rules.grammar(_calls(rules, calls, rules.literal("\n"), parallel))


def _pairs(rules: _Rules, tool: Tool, begin: str, end: str) -> str:
    """The arguments one by one, in the schema's order: strings as they are, other values as JSON."""
    properties, required = tool.parameters.get("properties") or {}, tool.parameters.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise ConfigError(f"tool {tool.name!r}: expected `properties` to be an object and `required` a list")
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    pairs, newline = [], rules.literal("\n")
    for key, schema in properties.items():
        if not set(key) <= _IDENTIFIER:
            raise ConfigError(f"tool {tool.name!r}: parameter {key!r}; expected letters, digits and _-.:/")
        inner = schema if isinstance(schema, Mapping) else {}
        value = _bare_value(rules, inner, shared, end)
        pair = f"{rules.literal(begin.format(key))} {value} {newline}"
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
    "qwen_xml": partial(
        _xml, head="<tool_call>\n<function={}>\n", key="<parameter={}>\n", value_end="\n</parameter>",
        end="</function>\n</tool_call>",
    ),
    "glm_xml": partial(
        _xml, head="<tool_call>{}\n", key="<arg_key>{}</arg_key>\n<arg_value>", value_end="</arg_value>",
        end="</tool_call>",
    ),
    "deepseek": _deepseek,
    "mistral": _mistral,
    "llama3_json": _llama,
}  # fmt: skip
