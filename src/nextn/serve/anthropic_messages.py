"""Anthropic's /v1/messages: its requests as chats, and the chats' answers in its form."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from nextn.bounded_json import loads
from nextn.serve.answer_blocks import Block, BlockRouteAnswer
from nextn.serve.api_errors import ApiError
from nextn.serve.options import ServerOptions
from nextn.serve.request import GenerationChunk
from nextn.serve.request_model import ListOf, RequestModel, parse_request
from nextn.serve.responses import Json
from nextn.serve.schemas import ChatRequest, Name, SamplingFields, Thinking

MESSAGES_PATH = "/v1/messages"
_STOP_REASONS = {
    "eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "context": "model_context_window_exceeded",
}  # fmt: skip
_BLOCKS = {  # by role; those of a tool's result are texts
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_EFFORTS = {"max": "xhigh"}  # others have the same name in chats


class ContentBlock(RequestModel):
    """A part of a message; which fields it needs depends on its type."""

    path: ClassVar = "messages.content"
    meaningful: ClassVar = frozenset(("source", "file_id"))

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = Field(default="", max_length=256)
    name: Name | None = None
    input: dict[str, JsonValue] = Field(default_factory=dict)
    tool_use_id: str = Field(default="", max_length=256)
    content: "str | Annotated[ListOf[ContentBlock], Field(max_length=128)]" = ""

    @model_validator(mode="after")
    def _has_valid_fields(self) -> "ContentBlock":
        needed = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
        name = needed.get(self.type)
        if name is not None and name not in self.model_fields_set:
            raise ValueError(f"{name}: Field required")
        _check_types(self.content, ("text",))
        return self


Content = str | ListOf[ContentBlock]


def _check_types(content: Content, types: Sequence[str]) -> None:
    """Raise ValueError for a block that means nothing here."""
    for block in () if isinstance(content, str) else content:
        if block.type not in types:
            raise ValueError(f"content: a block of type {block.type}; expected {' or '.join(types)}")


class InputMessage(RequestModel):
    path: ClassVar = "messages"

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _has_its_blocks(self) -> "InputMessage":
        _check_types(self.content, _BLOCKS[self.role])
        return self


class MessagesTool(RequestModel):
    path: ClassVar = "tools"

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    input_schema: dict[str, JsonValue] = Field(default_factory=dict)


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Thread(RequestModel):
    """A conversation that the server keeps. This one keeps none: see `to_chat`."""

    type: Literal["create", "continue"]
    previous_message_id: str = Field(default="", max_length=256)


class CountRequest(RequestModel):
    """The body of /v1/messages/count_tokens."""

    ignored: ClassVar = frozenset((
        "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id",
        "workspace_id",
    ))  # fmt: skip

    model: Name | None = None
    messages: ListOf[InputMessage] = Field(min_length=1, max_length=2048)
    system: Content = ""
    tools: ListOf[MessagesTool] = Field(default_factory=list, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    thread: Thread | None = None


class MessagesRequest(CountRequest, SamplingFields):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: ListOf[str] = Field(default_factory=list, max_length=16)


def to_chat(body: CountRequest) -> ChatRequest:
    """Return the chat that a request means. Raises ApiError."""
    if body.thread is not None and body.thread.type == "continue":  # then clients send all of it again
        message = "this server keeps no threads; send the whole conversation in messages"
        raise ApiError(404, message, "thread", "thread_not_found")
    chat: dict[str, object] = {"messages": _messages(body), "tools": [_tool(tool) for tool in body.tools]}
    if body.messages[-1].role == "assistant":  # the answer continues it
        chat |= {"continue_final_message": True}
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat["thinking"] = {"type": body.thinking.type}
    if (effort := body.output_config.effort) is not None:
        chat["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if (form := body.output_config.format) is not None:
        chat["structured_outputs"] = {"json": form.schema_}
    if isinstance(body, MessagesRequest):
        chat |= body.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)
        chat |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return parse_request(ChatRequest, chat)


def _messages(body: CountRequest) -> list[Json]:
    messages = [chat for message in body.messages for chat in _chat_messages(message)]
    return [{"role": "system", "content": _text(body.system)}, *messages] if body.system else messages


def _chat_messages(message: InputMessage) -> list[Json]:
    """One message as those of a chat: there, the results of tools are messages of their own."""
    blocks = _blocks(message.content)
    results = [_result(block) for block in blocks if block.type == "tool_result"]
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    thoughts = "\n".join(block.thinking for block in blocks if block.type == "thinking")
    chat: Json = {"role": message.role, "content": _text(message.content)}
    if message.role == "assistant":
        chat |= {"tool_calls": calls} | ({"reasoning_content": thoughts} if thoughts else {})
    has_text = any(block.type == "text" for block in blocks)
    return [*results, chat] if has_text or not results else results


def _blocks(content: Content) -> Sequence[ContentBlock]:
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _text(content: Content) -> str:
    return "\n".join(block.text for block in _blocks(content) if block.type == "text")


def _result(block: ContentBlock) -> Json:
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}


def _call(block: ContentBlock) -> Json:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: MessagesTool) -> Json:
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


class MessagesAnswer(BlockRouteAnswer):
    """The answer of /v1/messages."""

    def __init__(self, options: ServerOptions, body: MessagesRequest, *args: Any) -> None:
        super().__init__(options, body, *args)
        self._max_tokens = body.max_tokens

    def error_event(self, error: ApiError) -> Json:
        return error.document(MESSAGES_PATH)

    def document(self) -> Json:
        self._blocks.build()
        content = [_content(block, is_complete=True) for block in self._blocks.blocks]
        return self._message() | {"content": content, **self._stop(), "usage": self._usage()}

    def first_events(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message()}]

    def events(self, index: int, chunk: GenerationChunk) -> list[Json]:
        return [_event(*event) for event in self._blocks.push(chunk)]

    def last_events(self) -> list[Json]:
        return [{"type": "message_delta", "delta": self._stop(), "usage": self._usage()}, {"type": "message_stop"}]

    def _message(self) -> Json:
        """The message before its content; what came from the cache is known later."""
        return {
            "id": f"msg_{self._blocks.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self) -> Json:
        finish = self._blocks.choice.finish or "eos"
        if finish == "length" and self._request.max_tokens < self._max_tokens:
            finish = "context"
        reason = _STOP_REASONS[finish]
        if reason == "end_turn" and self._blocks.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self._blocks.stop_string}

    def _usage(self) -> Json:
        """Anthropic's count of input tokens is without those from the cache."""
        choice = self._blocks.choice
        return {
            "input_tokens": len(self._request.prompt) - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": len(choice.tokens),
        }


def _content(block: Block, *, is_complete: bool) -> Json:
    """A block of an answer; where a stream starts it, it is empty."""
    text = block.text if is_complete else ""
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
        case "call":
            arguments = loads(text) if is_complete else {}
            return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}


def _event(what: Literal["start", "more", "end"], block: Block, text: str) -> Json:
    if what == "start":
        content = _content(block, is_complete=False)
        return {"type": "content_block_start", "index": block.index, "content_block": content}
    if what == "end":
        return {"type": "content_block_stop", "index": block.index}
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": text},
        "text": {"type": "text_delta", "text": text},
        "call": {"type": "input_json_delta", "partial_json": text},
    }[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": delta}
