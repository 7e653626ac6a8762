"""What a request says about the form of its answer: the grammar of its tokens, and the parser of its text."""

import secrets
from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from nextn.errors import ConfigError
from nextn.serve.api_errors import ApiError
from nextn.serve.grammar import JSON_OBJECT, GrammarCompiler, GrammarSpec, json_schema
from nextn.serve.request import GrammarState
from nextn.serve.schemas import ChatRequest, GenerationFields, NamedTool
from nextn.serve.tool_calls import (
    SYNTAXES,
    MessageDelta,
    MessageParser,
    Tool,
    reasoning_is_open,
    tool_syntax,
)
from nextn.serve.tool_grammar import tool_call_grammar

_NUM_LAST_TOKENS = 8  # of a prompt: enough for `<think>` and a line break as single bytes


class StructuredOutput:
    """Makes grammars and parsers for the requests to one model.

    Args:
        tokenizer: None for a checkpoint without one, which can have neither.
        vocab_size: V of the model.
        eos_ids: Tokens that end its answers.
        syntax: Name of the tool-call syntax; None: the chat template's, and Hermes' if it shows none.

    Raises:
        ConfigError: There is no such syntax.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        syntax: str | None = None,
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        template = _template_text(tokenizer)
        self._syntax = tool_syntax(template, syntax) or SYNTAXES["hermes"]
        self._has_reasoning = "</think>" in template
        self._compiler: GrammarCompiler | None = None

    def grammar_of(self, request: GenerationFields) -> Callable[[], GrammarState] | None:
        """Compile the grammar that a request asks for; None if it asks for none. Raises ApiError where it cannot.

        The first call reads the tokenizer, which takes 1.5 s for a vocabulary of 152,000. Not for several threads.
        """
        field = "tools" if _forces_call(request) else "response_format"
        try:
            spec = self._specification(request)
            if spec is None:
                return None
            if self._tokenizer is None:
                raise ConfigError("structured output needs a tokenizer, which this checkpoint has not")
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, eos_ids=self._eos_ids or None)
            return self._compiler.compile(spec)
        except ConfigError as error:
            raise ApiError(400, f"{field}: {error}", field, "invalid_value") from error

    def parser_of(self, request: ChatRequest, prompt: Sequence[int]) -> MessageParser:
        """Make the parser of one answer. With a grammar, the text has no reasoning."""
        syntax = self._syntax if request.tools and request.tool_choice != "none" else None
        is_free = not _forces_call(request) and not _forces_json(request)
        is_open = is_free and self._has_reasoning and reasoning_is_open(self._decoded(prompt[-_NUM_LAST_TOKENS:]))
        return MessageParser(
            syntax if is_free or _forces_call(request) else None,
            _tools(request),
            reasoning=is_free and self._has_reasoning,
            is_open=is_open,
        )

    def _specification(self, request: GenerationFields) -> GrammarSpec | None:
        if isinstance(request, ChatRequest) and _forces_call(request):
            chosen = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
            tools = [tool for tool in _tools(request) if chosen in (None, tool.name)]
            assert self._tokenizer is not None, "a chat request was tokenized"
            parallel = chosen is None and request.parallel_tool_calls
            return tool_call_grammar(self._tokenizer, self._syntax, tools, parallel=parallel)
        wanted = request.response_format
        if wanted is None or wanted.type == "text":
            return None
        return JSON_OBJECT if wanted.json_schema is None else json_schema(wanted.json_schema.schema_ or {})

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens))) if self._tokenizer is not None else ""


def openai_message(delta: MessageDelta, first_call: int = 0, *, is_delta: bool) -> dict[str, object]:
    """Return the fields of a message, or of a streamed delta, in OpenAI's form.

    Args:
        delta: The whole message, or what a chunk adds to it.
        first_call: How many calls the message had before.
        is_delta: Leave out what is empty, and number the calls.
    """
    calls: list[dict[str, object]] = [
        call.as_openai(index, f"call_{secrets.token_hex(12)}")
        for index, call in enumerate(delta.tool_calls, start=first_call)
    ]
    if not is_delta:
        calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    message: dict[str, object] = {}
    if delta.content or not is_delta:
        message["content"] = delta.content if delta.content or not calls else None
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(request: ChatRequest) -> tuple[Tool, ...]:
    return tuple(Tool(tool.function.name, _parameters(tool.function.parameters)) for tool in request.tools)


def _parameters(schema: Mapping[str, object]) -> Mapping[str, object]:
    """A function without parameters takes an empty object."""
    return schema or {"type": "object", "properties": {}, "additionalProperties": False}


def _forces_call(request: GenerationFields) -> bool:
    return isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice not in ("none", "auto")


def _forces_json(request: GenerationFields) -> bool:
    return request.response_format is not None and request.response_format.type != "text"


def _template_text(tokenizer: PreTrainedTokenizerBase | None) -> str:
    template = tokenizer.chat_template if tokenizer is not None else None
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""
