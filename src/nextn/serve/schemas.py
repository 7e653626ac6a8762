"""The requests of the API: which fields exist, their types and bounds. Values are checked here and nowhere else."""

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from nextn.serve.options import MAX_CHOICES
from nextn.serve.request_model import ListOf, RequestModel, T

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
Prompts = Annotated[list[T], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
_MAX_BIASES = 1024
_NO_LIMIT = 2**31 - 1


class StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: bool = False  # of OpenAI's streams: padding, which is never sent here
    include_rounds: bool = False  # an extension: the rounds of each chunk, and the request's metrics
    continuous_usage_stats: bool = False  # with include_usage: in every event, the usage so far


class SchemaFormat(RequestModel):
    name: Name = "answer"
    description: str = ""
    schema_: dict[str, JsonValue] = Field(default_factory=dict, alias="schema")
    strict: bool = True


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs the field json_schema")
        return self


class StructuredOutputs(RequestModel):
    """What vLLM calls so: exactly one field."""

    json_: str | dict[str, JsonValue] | None = Field(None, alias="json")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[ListOf[str], Field(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1 or self.json_object is False:
            raise ValueError("expected exactly one of json, regex, choice, grammar and json_object (true)")
        return self


class SamplingFields(RequestModel):
    """How the next token is chosen: what all routes have in common."""

    model: Name | None = None
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    stop_token_ids: ListOf[TokenId] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    skip_special_tokens: bool = False  # leave special tokens out of the text
    # 0: plain decoding. The server's own K is the upper bound, see RequestBuilder.
    num_speculative_tokens: int | None = Field(None, ge=0, lt=2**31)
    cache_salt: str = Field("", max_length=256)  # prefixes are shared only among requests with the same salt

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _not_too_many(cls, biases: object) -> object:
        """Count before the values are checked, as dictionaries do not stop at their first error."""
        if isinstance(biases, dict) and len(biases) > _MAX_BIASES:
            raise ValueError(f"{len(biases):,} tokens; expected at most {_MAX_BIASES:,}")
        return biases


class GenerationFields(SamplingFields):
    """What chat and plain completions have in common."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: str | ListOf[str] = Field(default_factory=list)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # tokens in log probabilities are spelled `token_id:<id>`
    return_metrics: bool = False
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, JsonValue] | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[ListOf[str], Field(min_length=1, max_length=1000)] | None = None
    guided_grammar: str | None = None

    @property
    def structures(self) -> dict[str, tuple[str, object]]:
        """What the text must be: for each field that says so, a field of `StructuredOutputs` and its value."""
        asked: dict[str, tuple[str, object]] = {}
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.type != "text":
            schema = form.json_schema
            asked["response_format"] = ("json_object", True) if schema is None else ("json", schema.schema_)
        if outputs is not None:
            (name,) = outputs.model_fields_set
            asked["structured_outputs"] = name.rstrip("_"), getattr(outputs, name)
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                asked[f"guided_{kind}"] = kind, value
        return asked

    @field_validator("max_tokens", "max_completion_tokens", mode="before")
    @classmethod
    def _without_limit(cls, count: object) -> object:
        """-1 is llama.cpp's value for as many as fit."""
        return _NO_LIMIT if count == -1 and type(count) is int else count

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def _stops_fit(self) -> "GenerationFields":
        if len(self.stops) > 16 or not all(0 < len(text) <= 256 for text in self.stops):
            raise ValueError("stop: expected at most 16 strings of 1 to 256 characters")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options: only valid with stream = true")
        if len(self.structures) > 1:
            first, second, *_ = self.structures
            raise ValueError(f"{second}: not valid together with {first}; leave one out")
        return self


def _prompt_form(value: object) -> str:
    """Which form a prompt has, so that errors are about that form. No field of a request has such a name."""
    if not isinstance(value, list):
        return "(text)"
    first = value[0] if value else None
    return "(ids)" if type(first) is int else "(lists of ids)" if isinstance(first, list) else "(texts)"


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[TokenIds, Tag("(ids)")]
        | Annotated[Prompts[str], Tag("(texts)")]
        | Annotated[Prompts[TokenIds], Tag("(lists of ids)")],
        Discriminator(_prompt_form),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    max_tokens: int | None = Field(None, ge=0, lt=2**31)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @model_validator(mode="after")
    def _prompts_fit(self) -> "CompletionRequest":
        if not self.prompt:
            raise ValueError("prompt: it is empty; expected a text, token ids, or a list of these")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ValueError(
                f"prompt: {len(self.prompts)} prompts times n = {self.n}; expected at most {MAX_CHOICES} sequences"
            )
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens: 0; expected at least 1, as only with echo = true there is something to answer"
            raise ValueError(message)
        return self


class TextPart(RequestModel):
    path: ClassVar = "messages.content"

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal_is_text(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("type") != "refusal" or "refusal" not in data:
            return data
        return {"type": "refusal", "text": data["refusal"]}


class FunctionCall(RequestModel):
    path: ClassVar = "messages.tool_calls.function"  # OpenAI's client adds `parsed_arguments` to calls that it read

    name: Name
    arguments: str = ""


class CalledTool(RequestModel):
    path: ClassVar = "messages.tool_calls"

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    path: ClassVar = "messages"
    meaningful: ClassVar = frozenset(("audio", "function_call", "images", "partial", "prefix"))

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: Name | None = None
    tool_calls: ListOf[CalledTool] = Field(default_factory=list, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM calls it
    refusal: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal is not None)):
            raise ValueError("content: Field required")
        return self

    @property
    def text(self) -> str | None:
        """The content as one text; parts are joined by line breaks."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class FunctionTool(RequestModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    strict: bool = False


class OfferedTool(RequestModel):
    path: ClassVar = "tools"

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(RequestModel):
    name: Name


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedFunctions(RequestModel):
    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool] = Field(min_length=1, max_length=128)


class AllowedTools(RequestModel):
    """A choice among some of the tools: the others are not offered."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class Thinking(RequestModel):
    """Whether to think, as clients of Anthropic, GLM, DeepSeek and Kimi ask for it."""

    path: ClassVar = "thinking"  # a budget is not kept

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class ChatRequest(GenerationFields):
    """The body of /v1/chat/completions."""

    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=2048)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: ListOf[OfferedTool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def template_variables(self) -> dict[str, object]:
        """What the chat template gets; explicit variables come first. Effort `none` turns thinking off."""
        asked = self.enable_thinking
        if asked is None and self.thinking is not None:
            asked = self.thinking.type != "disabled"
        fields: dict[str, object] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if fields or asked is not None:
            fields["enable_thinking"] = self.reasoning_effort != "none" if asked is None else asked
        more = {"continue_final_message": True} if self.continue_final_message else {}
        return {**fields, **self.chat_template_kwargs, **more}

    @model_validator(mode="after")
    def _only_allowed_tools(self) -> "ChatRequest":
        choice = self.tool_choice
        if not isinstance(choice, AllowedTools):
            return self
        offered = {tool.function.name: tool for tool in self.tools}
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        if absent := next((name for name in names if name not in offered), None):
            raise ValueError(f"tool_choice: no tool {absent!r} in tools")
        allowed = [tool for name, tool in offered.items() if name in names]
        return self.model_copy(update={"tools": allowed, "tool_choice": choice.allowed_tools.mode})

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.continue_final_message and (self.messages[-1].role != "assistant" or not self.messages[-1].text):
            raise ValueError("continue_final_message: the last message is no text of the assistant")
        opens = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and opens:
            raise ValueError("continue_final_message: not valid with add_generation_prompt = true")
        if "continue_final_message" in self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs: continue_final_message is a field of the request")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only valid with logprobs = true")
        names = {tool.function.name for tool in self.tools}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool {self.tool_choice.function.name!r} in tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required, but there are no tools")
        return self


class TokenizeRequest(RequestModel):
    """The body of /tokenize: that of vLLM, with a prompt or messages, or that of llama.cpp, with content."""

    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    messages: ListOf[ChatMessage] | None = Field(None, min_length=1, max_length=2048)
    tools: ListOf[OfferedTool] = Field(default_factory=list, max_length=128)
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_text(self) -> "TokenizeRequest":
        if self.prompt is None and self.content is None and self.messages is None:
            raise ValueError("prompt: Field required (or messages)")
        return self


class DetokenizeRequest(RequestModel):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: ListOf[TokenId]
