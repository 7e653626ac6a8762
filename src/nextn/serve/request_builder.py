"""From the body of a request to generation requests: prompts become token ids, fields become sampling settings."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from nextn.bounded_json import loads
from nextn.data.chat_template import apply_chat_template, tokenizer_failures
from nextn.decoding.generate import encode, eos_tokens
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.serve.api_errors import ApiError
from nextn.serve.conversations import has_later, in_call_order, without_later
from nextn.serve.options import ServerOptions
from nextn.serve.request import GenerationRequest
from nextn.serve.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    OfferedTool,
    TokenizeRequest,
)
from nextn.serve.structured_output import StructuredOutput
from nextn.serve.tool_calls import with_tools
from nextn.settings import Sampling

T = TypeVar("T")
_DEFAULT_COMPLETION = 16  # tokens; OpenAI's own default of /v1/completions
_TEMPLATE_S = 5.0  # for rendering one conversation
_SEEDS = 2**43  # the engine's seeds are below this


class RequestBuilder:
    """Tokenizes by model and template in a thread of its own, so that long prompts do not hold up streams."""

    def __init__(self, model: Model, options: ServerOptions) -> None:
        self._model, self._options = model, options
        self._eos = eos_tokens(model)
        self.structured = StructuredOutput(model, self._eos, options.tool_call_parser)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nextn-tokenizer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._model.tokenizer is None:
            raise ApiError(
                400, "this checkpoint has no tokenizer; send token ids as the prompt", "prompt", "no_tokenizer"
            )
        return self._model.tokenizer

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def completion(self, body: CompletionRequest) -> list[GenerationRequest]:
        """Return the sequences to generate: `n` for each prompt, those of one prompt together."""
        special = body.add_special_tokens is not False
        prompts = await self.run(lambda: [self._prompt_ids(prompt, special) for prompt in body.prompts])
        limits = body.max_completion_tokens, body.max_tokens, _DEFAULT_COMPLETION
        max_tokens = next(limit for limit in limits if limit is not None)
        return await self._requests(body, prompts, max_tokens, body.logprobs, field="prompt")

    async def chat(self, body: ChatRequest) -> list[GenerationRequest]:
        """Return the `n` sequences to generate."""
        prompt = await self.chat_prompt(body)
        max_tokens = body.max_completion_tokens or body.max_tokens or self._options.max_model_len
        logprobs = body.top_logprobs if body.logprobs else None
        return await self._requests(body, [prompt], max_tokens, logprobs, field="messages")

    async def chat_prompt(self, body: ChatRequest) -> list[int]:
        """Return the token ids of a conversation as it is answered."""
        tools = () if body.tool_choice == "none" and self.structured.is_generic(has_tools=True) else body.tools
        variables, opens = body.template_variables, body.add_generation_prompt and not body.continue_final_message
        messages = body.messages
        return await self.run(lambda: self._conversation_ids(messages, tools, variables, add_generation_prompt=opens))

    async def tokens_of(self, body: TokenizeRequest) -> list[int]:
        """Return the token ids of a text or of a conversation, of any length."""
        text = body.prompt if body.prompt is not None else body.content
        if text is not None:
            special = body.add_special_tokens is not False and body.add_special is not False
            return await self.run(lambda: self._text_ids(text, special))
        messages, extra = body.messages or [], body.chat_template_kwargs
        opens = body.add_generation_prompt
        return await self.run(lambda: self._conversation_ids(messages, body.tools, extra, add_generation_prompt=opens))

    async def text_of(self, body: DetokenizeRequest) -> str:
        """Return the text of token ids."""
        if body.tokens:
            self._check_token(max(body.tokens), self._model.trunk.vocab_size, "tokens")
        known = self.tokenizer
        return await self.run(lambda: known.decode(body.tokens, clean_up_tokenization_spaces=False))

    async def _requests(
        self, body: GenerationFields, prompts: Sequence[list[int]], max_tokens: int, logprobs: int | None, *, field: str
    ) -> list[GenerationRequest]:
        for prompt in prompts:
            self._check_prompt(prompt, field)
        grammar = None
        if body.structures or isinstance(body, ChatRequest):
            grammar = await self.run(lambda: self.structured.grammar(body))
        self._check_min_tokens(body, max_tokens, is_free=grammar is None and not body.stops)
        # Without a seed, each request has random numbers of its own.
        seed, parent = secrets.randbelow(_SEEDS) if body.seed is None else body.seed, object()
        sampling = Sampling(body.temperature, max(0, body.top_k), body.top_p, body.min_p, body.repetition_penalty)
        return [
            GenerationRequest(
                tuple(prompt),
                sampling=sampling,
                max_tokens=min(max_tokens, self._options.max_model_len - len(prompt)),
                min_tokens=body.min_tokens,
                num_speculative_tokens=self._num_speculative_tokens(body),
                stop_token_ids=(() if body.ignore_eos else self._eos) + tuple(body.stop_token_ids),
                # Some syntaxes of tool calls are special tokens.
                skip_special_tokens=body.skip_special_tokens and not (isinstance(body, ChatRequest) and body.tools),
                stop=self._stops(body),
                seed=(seed + choice) % _SEEDS,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=self._logit_bias(body),
                logprobs=logprobs,
                prompt_logprobs=logprobs is not None and isinstance(body, CompletionRequest) and body.echo,
                grammar=grammar,
                cache_salt=body.cache_salt,
                parent=parent,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]

    def _prompt_ids(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        return self._text_ids(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)

    def _text_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self.tokenizer
        if add_special_tokens:
            return encode(self._model, text)
        with tokenizer_failures():
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _conversation_ids(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[OfferedTool],
        extra: Mapping[str, object],
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        if not self.tokenizer.chat_template:
            message = "this model has no chat template; use /v1/completions, or add a chat template to its tokenizer"
            raise ApiError(400, message, "messages", "no_chat_template")
        shown = in_call_order([_template_message(message) for message in messages])
        offered = [tool.model_dump(by_alias=True, exclude_defaults=True) | {"type": tool.type} for tool in tools]
        refusals = []
        for conversation, own_tools in self._renderings(shown, offered):
            try:
                ids, _ = apply_chat_template(
                    self.tokenizer, conversation, tools=own_tools or None, variables=extra,
                    add_generation_prompt=add_generation_prompt, seconds=_TEMPLATE_S,
                )  # fmt: skip
                return ids
            except ConfigError as error:
                refusals.append(error)
        raise ApiError(400, str(refusals[0]), "messages", "invalid_value") from refusals[0]

    def _renderings(
        self, messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]
    ) -> Iterator[tuple[Sequence[dict[str, object]], Sequence[dict[str, object]]]]:
        """Yield messages and tools for the template: as they are, then in ways for templates that refuse them."""
        for each in [messages, *([without_later(messages)] if has_later(messages) else [])]:
            if not self.structured.is_generic(has_tools=bool(tools)):
                yield each, tools
                continue
            yield with_tools(each, tools), ()
            if tools:  # some templates know no system message
                yield with_tools(each, tools, has_system=False), ()

    def _check_prompt(self, prompt: Sequence[int], field: str) -> None:
        limit, vocab_size = self._options.max_model_len, self._model.trunk.vocab_size
        if not prompt:
            raise ApiError(400, f"{field}: it has no tokens; expected at least one", field, "invalid_value")
        if len(prompt) >= limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, your {field} resulted in "
                f"{len(prompt)} tokens, which leaves no room for a completion. Please reduce the length."
            )
            raise ApiError(400, message, field, "context_length_exceeded")
        self._check_token(max(prompt), vocab_size, field)

    def _check_min_tokens(self, body: GenerationFields, max_tokens: int, *, is_free: bool) -> None:
        """A grammar or a stop string may leave a text no way to go on."""
        if body.min_tokens > max_tokens:
            message = f"min_tokens: {body.min_tokens}; expected at most max_tokens, {max_tokens}"
            raise ApiError(400, message, "min_tokens", "invalid_value")
        if body.min_tokens and not is_free:
            message = "min_tokens is not supported with stop, structured output or forced tool calls; leave it out"
            raise ApiError(400, message, "min_tokens", "unsupported_parameter")

    def _check_token(self, token: int, vocab_size: int, field: str) -> None:
        if not 0 <= token < vocab_size:
            message = f"{field}: token id {token}; the vocabulary has the ids 0 to {vocab_size - 1}"
            raise ApiError(400, message, field, "invalid_value")

    def _num_speculative_tokens(self, body: GenerationFields) -> int | None:
        requested = body.num_speculative_tokens
        limit = self._options.num_speculative_tokens
        if requested is not None and requested > limit:
            valid = f"0 to {limit}, the K of this server (-k)" if limit else "0, as this server decodes without MTP"
            message = f"num_speculative_tokens: {requested}; expected {valid}, or leave it out"
            raise ApiError(400, message, "num_speculative_tokens", "invalid_value")
        return requested

    def _stops(self, body: GenerationFields) -> tuple[str, ...]:
        if body.stops:
            _ = self.tokenizer  # stop strings are found in text
        return body.stops

    def _logit_bias(self, body: GenerationFields) -> dict[int, float]:
        biases: dict[int, float] = {}
        for name, bias in body.logit_bias.items():
            if not name.isdecimal() or len(name) > 10:
                message = f"logit_bias: the key {name[:40]!r} is no token id"
                raise ApiError(400, message, "logit_bias", "invalid_value")
            self._check_token(int(name), self._model.trunk.vocab_size, "logit_bias")
            biases[int(name)] = bias
        return biases


def _template_message(message: ChatMessage) -> dict[str, object]:
    """The message as chat templates read it: `system` for `developer`, arguments of tool calls as objects."""
    shown: dict[str, object] = {"role": "system" if message.role == "developer" else message.role}
    content = message.text if message.text is not None else message.refusal
    shown["content"] = content if content is not None else ""
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    shown |= {name: value for name, value in more.items() if value is not None}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": _template_call(call.function.name, call.function.arguments)}
            for call in message.tool_calls
        ]
    return shown


def _template_call(name: str, arguments: str) -> dict[str, object]:
    """A call with its arguments as an object: for a tool without parameters clients send an empty text, or null."""
    parsed: object
    try:
        parsed = loads(arguments) if arguments else None
    except ValueError:
        parsed = arguments
    return {"name": name, "arguments": {} if parsed is None else parsed}
