"""The requests of the API: which fields exist, their types and bounds. Values are checked here and nowhere else.

A field that is not known is refused, because ignoring it could change the answer. Fields that never change an answer
are dropped, and fields that this server does not support are accepted with the value that turns them off.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from nextn.bounded_json import short_repr
from nextn.serve.api_errors import ApiError
from nextn.serve.options import MAX_CHOICES

# Fields of OpenAI's API and of vLLM's and llama.cpp's additions that do not change what is generated.
IGNORED = frozenset(
    (
        "cache_prompt", "metadata", "prediction", "priority", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "spaces_between_special_tokens",
        "store", "user",
    )
)  # fmt: skip
# Fields that are not supported, with the value that turns them off.
OFF: Mapping[str, object] = {
    "allowed_token_ids": [], "bad_words": [], "best_of": 1, "echo": False, "include_stop_str_in_output": False,
    "length_penalty": 1, "modalities": ["text"], "prompt_logprobs": 0, "reasoning_effort": "none",
    "suffix": "", "truncate_prompt_tokens": 0, "use_beam_search": False,
}  # fmt: skip

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
M = TypeVar("M", bound="RequestModel")
T = TypeVar("T")
# Lists stop at their first error: a body can hold a million, and to describe each of them takes seconds.
ListOf = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Annotated[ListOf[TokenId], Field(min_length=1)]
Ignored = Annotated[list[JsonValue] | None, Field(max_length=1024)]  # accepted, and not used
Prompts = Annotated[list[T], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
_MAX_BIASES = 1024
_NO_LIMIT = 2**31 - 1


class RequestModel(BaseModel):
    """A JSON object of a request. `null` means that the field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        """Drop null, and all but the first unknown field, which is one error enough."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in data if name not in known), None)
        return {name: value for name, value in data.items() if value is not None and (name in known or name == unknown)}


class StreamOptions(RequestModel):
    include_usage: bool = False
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


class GenerationFields(RequestModel):
    """What chat and plain completions have in common."""

    model: Name | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    stop: str | ListOf[str] = Field(default_factory=list)
    stop_token_ids: ListOf[TokenId] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    skip_special_tokens: bool = False  # leave special tokens out of the text
    # 0: plain decoding. The server's own K is the upper bound, see RequestBuilder.
    num_speculative_tokens: int | None = Field(None, ge=0, lt=2**31)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # tokens in log probabilities are spelled `token_id:<id>`
    return_metrics: bool = False
    cache_salt: str = Field("", max_length=256)  # prefixes are shared only among requests with the same salt
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None

    @field_validator("max_tokens", "max_completion_tokens", mode="before")
    @classmethod
    def _without_limit(cls, count: Any) -> Any:
        """-1 is llama.cpp's value for as many as fit."""
        return _NO_LIMIT if count == -1 and type(count) is int else count

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _not_too_many(cls, biases: Any) -> Any:
        """Count before the values are checked, as dictionaries do not stop at their first error."""
        if isinstance(biases, dict) and len(biases) > _MAX_BIASES:
            raise ValueError(f"{len(biases):,} tokens; expected at most {_MAX_BIASES:,}")
        return biases

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def _stops_fit(self) -> "GenerationFields":
        if len(self.stops) > 16 or not all(0 < len(text) <= 256 for text in self.stops):
            raise ValueError("stop: expected at most 16 strings of 1 to 256 characters")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options: only valid with stream = true")
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
            raise ValueError(
                "max_tokens: 0; expected at least 1, as only with echo = true there is something to answer"
            )
        return self


class TextPart(RequestModel):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str
    # Of recorded conversations; they change nothing here.
    cache_control: dict[str, JsonValue] | None = None
    annotations: Ignored = None
    logprobs: Ignored = None


class FunctionCall(RequestModel):
    name: Name
    arguments: str


class CalledTool(RequestModel):
    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of streams, whose pieces clients join and send back


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: Name | None = None
    tool_calls: ListOf[CalledTool] = Field(default_factory=list, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Ignored = None  # of OpenAI's answers, which clients send back
    cache_control: dict[str, JsonValue] | None = None

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
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(RequestModel):
    name: Name


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(GenerationFields):
    """The body of /v1/chat/completions."""

    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=2048)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: ListOf[OfferedTool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def template_variables(self) -> dict[str, object]:
        """What the chat template gets; explicit variables come first. Effort `none` turns thinking off."""
        thinks = self.reasoning_effort != "none" if self.enable_thinking is None else self.enable_thinking
        fields: dict[str, object] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if fields or self.enable_thinking is not None:
            fields["enable_thinking"] = thinks
        more = {"continue_final_message": True} if self.continue_final_message else {}
        return {**fields, **self.chat_template_kwargs, **more}

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.continue_final_message and (self.messages[-1].role != "assistant" or not self.messages[-1].text):
            raise ValueError("continue_final_message: the last message is no text of the assistant")
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise ValueError("continue_final_message: not valid with add_generation_prompt = true")
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


def parse_request(model: type[M], document: object) -> M:
    """Check a JSON document. Raises ApiError for the first value that is not valid."""
    if not isinstance(document, dict):
        raise ApiError(400, f"the body is {short_repr(document)}; expected a JSON object", code="invalid_type")
    fields: dict[str, object] = {}
    for name, value in document.items():
        if value is None or name in IGNORED:
            continue
        if name in OFF and name not in model.model_fields:
            if value != OFF[name]:
                raise _unsupported(name)
            continue
        fields[name] = value
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _from_validation(error, fields) from error


def _unsupported(name: str) -> ApiError:
    message = f"{name} is not supported; leave it out, or send {short_repr(OFF[name])}"
    return ApiError(400, message, name, "unsupported_parameter")


_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


def _from_validation(error: ValidationError, document: Mapping[str, object]) -> ApiError:
    # Of a union, the deepest error is that of the alternative that fits best.
    errors = error.errors(include_url=False, include_context=False)
    worst = max(errors, key=lambda one: len(one["loc"]))
    kind, message = worst["type"], worst["msg"].removeprefix("Value error, ")
    path = _path(document, worst["loc"], missing=kind == "missing")
    if kind == "value_error" and ": " in message:
        field, _, message = message.partition(": ")
        path = f"{path}.{field}" if path else field
    code = _CODES.get(kind, "invalid_value" if kind == "value_error" else "invalid_type")
    if kind == "extra_forbidden":
        message = "unknown field; remove it, as it may change the answer"
    shown = "" if kind in ("missing", "extra_forbidden", "value_error") else f"; got {short_repr(worst['input'])}"
    return ApiError(400, f"{path or 'body'}: {message}{shown}", path or None, code)


def _path(document: object, loc: tuple[int | str, ...], *, missing: bool) -> str:
    """Return a location as `messages[0].content`, without the names that pydantic gives to alternatives of a union."""
    path = ""
    for index, step in enumerate(loc):
        if isinstance(step, int) and isinstance(document, list) and step < len(document):
            path, document = f"{path}[{step}]", document[step]
        elif isinstance(document, Mapping) and (step in document or (missing and index == len(loc) - 1)):
            path, document = f"{path}.{step}" if path else str(step)[:100], document.get(step)
    return path
