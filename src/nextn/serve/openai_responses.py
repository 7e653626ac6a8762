"""OpenAI's /v1/responses: its requests as chats, and the chats' answers in its form."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from nextn.bounded_json import JsonDict
from nextn.serve.answer_blocks import Block, BlockRouteAnswer
from nextn.serve.api_errors import ApiError
from nextn.serve.conversations import merge_leading
from nextn.serve.message_parser import MessageParser
from nextn.serve.options import ServerOptions
from nextn.serve.request import GenerationChunk, GenerationRequest
from nextn.serve.request_model import ListOf, RequestModel, parse_request
from nextn.serve.responses import Json
from nextn.serve.schemas import ChatRequest, FunctionTool, Name, SamplingFields, SchemaFormat, TextPart
from nextn.serve.token_sampler import TokenTexts

_MAX_STORED, _MAX_STORED_CHARS = 1_000, 16_000_000  # answers that later requests can continue
_INCOMPLETE = {"length": "max_output_tokens", "context": "max_output_tokens"}
History = tuple[Json, ...]  # messages of a chat
# Tools that OpenAI's service runs, or whose calls are no JSON. They are never called here, as if the model never wanted
# one: agents offer them beside their own functions, whatever the model.
_OTHER_TOOLS = frozenset((
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_preview",
))  # fmt: skip


class ReasoningPart(RequestModel):
    path: ClassVar = "input.content"

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputItem(RequestModel):
    """An item of a conversation; which fields it needs depends on its type."""

    path: ClassVar = "input"
    meaningful: ClassVar = frozenset(("namespace", "tools"))

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | ListOf[TextPart] | ListOf[ReasoningPart] | None = None
    summary: ListOf[ReasoningPart] = Field(default_factory=list)
    call_id: str = Field(default="", max_length=256)
    name: Name | None = None
    arguments: str = ""
    output: str | ListOf[TextPart] = ""

    @model_validator(mode="after")
    def _has_valid_fields(self) -> "InputItem":
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.type]:
            if name not in self.model_fields_set:
                raise ValueError(f"{name}: Field required")
        return self


class ResponsesTool(FunctionTool):
    path: ClassVar = "tools"

    type: Literal["function"]


class NamedChoice(RequestModel):
    type: Literal["function"]
    name: Name


class AllowedChoice(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[NamedChoice] = Field(min_length=1, max_length=128)


class TextFormat(SchemaFormat):
    type: Literal["text", "json_object", "json_schema"] = "text"


class ResponseText(RequestModel):
    path: ClassVar = "text"

    format: TextFormat = TextFormat()


class ReasoningOptions(RequestModel):
    path: ClassVar = "reasoning"

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesRequest(SamplingFields):
    """The body of /v1/responses."""

    ignored: ClassVar = frozenset(("client_metadata", "include", "prompt_cache_options", "stream_options"))

    input: str | ListOf[InputItem]
    instructions: str = ""
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool = True
    tools: ListOf[ResponsesTool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    text: ResponseText = ResponseText()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled", "auto"] = "disabled"  # auto: what does not fit is refused all the same
    background: Literal[False] = False
    metadata: dict[str, JsonValue] = Field(default_factory=dict, max_length=16)
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, tools: object, info: ValidationInfo) -> object:
        """Leave out, and note as ignored, tools that are no functions."""
        if not isinstance(tools, list):
            return tools
        types = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
        others = [isinstance(type, str) and type in _OTHER_TOOLS for type in types]
        if info.context is not None:
            info.context.update(f"tools.{type}" for type, is_other in zip(types, others, strict=True) if is_other)
        return [tool for tool, is_other in zip(tools, others, strict=True) if not is_other]

    @model_validator(mode="after")
    def _has_input(self) -> "ResponsesRequest":
        if not self.input or (len(self.input) > 2048 and not isinstance(self.input, str)):
            raise ValueError("input: expected a text, or 1 to 2,048 items")
        return self


class ResponseStore:
    """The conversations of recent answers, so that a request can continue one."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, tuple[History, int]] = OrderedDict()
        self._num_chars = 0

    def get(self, id: str) -> History:
        """Return the conversation up to an answer. Raises ApiError if it is not stored."""
        if id not in self._histories:
            message = (
                f"no response {id[:100]!r} is stored; this server keeps the last {_MAX_STORED:,} in memory: send the "
                "whole conversation as input"
            )
            raise ApiError(404, message, "previous_response_id", "not_found")
        self._histories.move_to_end(id)
        return self._histories[id][0]

    def put(self, id: str, history: History) -> None:
        size = sum(len(str(message)) for message in history)
        self._histories[id] = history, size
        self._num_chars += size
        while len(self._histories) > _MAX_STORED or self._num_chars > _MAX_STORED_CHARS:
            _, (_, dropped) = self._histories.popitem(last=False)
            self._num_chars -= dropped


def to_chat(body: ResponsesRequest, before: History = ()) -> tuple[ChatRequest, History]:
    """Return the chat that a request means, and its conversation without the instructions. Raises ApiError."""
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    history = (*before, *_messages(items))
    chat: dict[str, object] = {
        "messages": merge_leading([{"role": "system", "content": body.instructions}, *history]),
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
            for tool in body.tools
        ],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        **body.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True),
    }
    form = body.text.format
    if form.type != "text":
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        chat["response_format"] = {"type": form.type, "json_schema": schema if form.type == "json_schema" else None}
    return parse_request(ChatRequest, chat), history


def _tool_choice(choice: "str | NamedChoice | AllowedChoice") -> object:
    """Return the choice in the form of a chat."""
    if isinstance(choice, NamedChoice):
        return _named(choice)
    if isinstance(choice, AllowedChoice):
        tools = [_named(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _named(choice: NamedChoice) -> Json:
    return {"type": "function", "function": {"name": choice.name}}


def _messages(items: Iterable[InputItem]) -> Iterator[Json]:
    """The messages of a chat, in which reasoning, text and calls of one turn are one message."""
    turn: JsonDict = {}
    for part in map(_part, items):
        # Text behind calls stays with them: many templates refuse two messages of the assistant in a row.
        is_more = "tool_calls" in part or ("content" in part and "tool_calls" in turn)
        if turn and (part["role"] != "assistant" or (turn.keys() & {"content", "tool_calls"} and not is_more)):
            yield {"content": "", **turn}
            turn = {}
        if part["role"] != "assistant":
            yield part
            continue
        for name in turn.keys() & part.keys() & {"content", "tool_calls"}:
            part[name] = turn[name] + part[name]
        turn |= part
    if turn:
        yield {"content": "", **turn}


def _part(item: InputItem) -> JsonDict:
    match item.type:
        case "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        case "reasoning":
            return {"role": "assistant", "reasoning_content": _text(item.content or item.summary)}
        case "message":
            return {"role": item.role, "content": _text(item.content or "")}


def _text(content: str | Sequence[TextPart] | Sequence[ReasoningPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ResponsesAnswer(BlockRouteAnswer):
    """The answer of /v1/responses."""

    def __init__(
        self,
        options: ServerOptions,
        body: ResponsesRequest,
        request: GenerationRequest,
        token_texts: TokenTexts,
        parser: MessageParser | None,
        *,
        history: History,
        store: ResponseStore,
    ) -> None:
        super().__init__(options, body, request, token_texts, parser)
        self._body, self._token_texts, self._created = body, token_texts, int(time.time())
        self._history, self._store = history, store
        self._id, self._num_events = f"resp_{self._blocks.id}", 0

    def error_event(self, error: ApiError) -> Json:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def document(self) -> Json:
        self._blocks.build()
        return self._finished()

    def first_events(self) -> list[Json]:
        return [
            self._event(f"response.{status}", response=self._response("in_progress"))
            for status in ("created", "in_progress")
        ]

    def events(self, index: int, chunk: GenerationChunk) -> list[Json]:
        return [event for step in self._blocks.push(chunk) for event in self._block_events(*step)]

    def last_events(self) -> list[Json]:
        response = self._finished()
        return [self._event(f"response.{response['status']}", response=response)]

    def _event(self, type: str, **fields: object) -> Json:
        self._num_events += 1
        return {"type": type, "sequence_number": self._num_events - 1, **fields}

    def _block_events(self, what: Literal["start", "more", "end"], block: Block, text: str) -> Iterator[Json]:
        name, part = _NAMES[block.kind], _part_of(block)
        at: Json = {"item_id": _item_id(block), "output_index": block.index}
        inner = at if part is None else at | {"content_index": 0}
        more: Json = {"logprobs": []} if block.kind == "text" else {}
        if what == "start":
            empty: Json = {"arguments": ""} if part is None else {"content": []}
            begun = _item(block, "in_progress") | empty
            yield self._event("response.output_item.added", output_index=block.index, item=begun)
            if part is not None:
                yield self._event("response.content_part.added", **inner, part=part)
        elif what == "more":
            yield self._event(f"response.{name}.delta", **inner, delta=text, **more)
        else:
            field = "arguments" if part is None else "text"
            yield self._event(f"response.{name}.done", **inner, **{field: block.text}, **more)
            if part is not None:
                yield self._event("response.content_part.done", **inner, part=part)
            yield self._event("response.output_item.done", output_index=block.index, item=_item(block))

    def _finished(self) -> Json:
        """The whole answer, which later requests may continue."""
        reason = _INCOMPLETE.get(self._blocks.choice.finish or "")
        if self._body.store:
            items = [InputItem.model_validate(_item(block)) for block in self._blocks.blocks if block.is_complete]
            self._store.put(self._id, (*self._history, *_messages(items)))
        more = {"incomplete_details": {"reason": reason}} if reason else {}
        return self._response("incomplete" if reason else "completed") | more

    def _response(self, status: str) -> Json:
        body, is_over = self._body, status != "in_progress"
        asked = body.model_dump(by_alias=True, mode="json")
        names = (
            "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning",
            "store", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "background",
        )  # fmt: skip
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            **{name: asked[name] for name in names},
            "instructions": body.instructions or None,
            "output": [_item(block) for block in self._blocks.blocks] if is_over else [],
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> Json:
        choice, num_input = self._blocks.choice, len(self._request.prompt)
        thoughts = [block.text for block in self._blocks.blocks if block.kind == "reasoning"]
        num_reasoning = sum(self._token_texts.count(text) for text in thoughts)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(choice.tokens),
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + len(choice.tokens),
        }


_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_IDS = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _item_id(block: Block) -> str:
    return f"{_IDS[block.kind]}_{block.id}"


def _part_of(block: Block) -> JsonDict | None:
    """The content of an item; None for a call."""
    match block.kind:
        case "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        case "text":
            return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
        case "call":
            return None


def _item(block: Block, status: str | None = None) -> Json:
    """An item of the output; status: default whether it is complete."""
    known = {"id": _item_id(block), "status": status or ("completed" if block.is_complete else "incomplete")}
    match block.kind:
        case "reasoning":
            return {**known, "type": "reasoning", "summary": [], "content": [_part_of(block)]}
        case "text":
            return {**known, "type": "message", "role": "assistant", "content": [_part_of(block)]}
        case "call":
            call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
            return {**known, "type": "function_call", **call}
