"""The one place where the HTTP layer meets the grammar library and the parser of tool calls.

Both are optional: a request that needs them is refused where they cannot be imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from transformers import PreTrainedTokenizerBase

from nextn.serve.api_errors import ApiError
from nextn.serve.request import GrammarState
from nextn.serve.schemas import ChatRequest, GenerationFields, NamedTool


@dataclass(frozen=True)
class ToolCallResult:
    """What the text of an answer is apart from its tool calls, and these as OpenAI's API has them."""

    content: str
    calls: tuple[Mapping[str, object], ...]


def grammar_of(
    request: GenerationFields, tokenizer: PreTrainedTokenizerBase | None
) -> Callable[[], GrammarState] | None:
    """Compile the grammar that a request asks for; None if it asks for none. Raises ApiError where it cannot.

    The specification handed to `compile_grammar` is the request's own: a `response_format`, or its tools and choice.
    """
    spec = _specification(request)
    if spec is None:
        return None
    if tokenizer is None:
        raise ApiError(400, "structured output needs a tokenizer, which this checkpoint has not", "response_format")
    compile_grammar = _optional("grammar", _field(spec)).compile_grammar
    return compile_grammar(tokenizer, spec)


def parses_tool_calls(request: GenerationFields) -> bool:
    """Whether the answer may hold tool calls, so that its text has to be read as a whole."""
    return isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"


def tool_calls_in(text: str, request: ChatRequest) -> ToolCallResult:
    """Split an answer's text into content and tool calls."""
    tools = [tool.model_dump(by_alias=True) for tool in request.tools]
    content, calls = _optional("tool_calls", "tools").parse_tool_calls(text, tools)
    return ToolCallResult(content, tuple(calls))


def check_tools(request: ChatRequest) -> None:
    """Refuse tools before anything is generated, where their calls cannot be parsed."""
    if parses_tool_calls(request):
        _optional("tool_calls", "tools")


def _specification(request: GenerationFields) -> Mapping[str, object] | None:
    if isinstance(request, ChatRequest) and request.tools and request.tool_choice not in ("none", "auto"):
        chosen = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
        tools: Sequence[object] = [tool.model_dump(by_alias=True) for tool in request.tools]
        return {"type": "tools", "tools": tools, "name": chosen}
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    return wanted.model_dump(by_alias=True, exclude_none=True)


def _field(spec: Mapping[str, object]) -> str:
    return "tools" if spec["type"] == "tools" else "response_format"


def _optional(module: str, field: str) -> ModuleType:
    try:
        return import_module(f"nextn.serve.{module}")
    except ImportError as error:
        message = f"{field} is not supported by this installation: {error}"
        raise ApiError(400, message, field, "unsupported_parameter") from error
