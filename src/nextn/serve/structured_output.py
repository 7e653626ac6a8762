"""Where requests meet grammars and the parsers of tool calls and reasoning."""

from collections.abc import Callable, Sequence
from functools import cached_property

from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.serve.api_errors import ApiError
from nextn.serve.call_text import Tool
from nextn.serve.grammar import GrammarCompiler, GrammarSpec, structure
from nextn.serve.message_parser import MessageParser, reasoning_is_open
from nextn.serve.request import GrammarState
from nextn.serve.schemas import ChatRequest, GenerationFields, NamedTool
from nextn.serve.tool_calls import SYNTAXES, ToolSyntax, tool_syntax
from nextn.serve.tool_grammar import tool_call_grammar

_TAIL = 16  # tokens at the end of a prompt in which `<think>` is looked for


class StructuredOutput:
    """Makes the grammars of requests and the parsers of their answers.

    Args:
        model: Its tokenizer and chat template decide how calls are written.
        eos: Tokens that end a sequence.
        syntax: Name of the syntax of tool calls; None: the chat template's.

    Raises:
        ConfigError: There is no such syntax.
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
        may_reason = not (request.structures or _forces_call(request))
        reasoning = may_reason and "</think>" in self._template
        is_open = reasoning and self._ends_in_reasoning(prompt)
        if syntax is None and not reasoning:
            return None
        return MessageParser(syntax, _tools(request), reasoning=reasoning, is_open=is_open)

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
    """The tools that may be called."""
    chosen = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
    functions = [tool.function for tool in request.tools]
    return [Tool(function.name, function.parameters) for function in functions if chosen in (None, function.name)]
