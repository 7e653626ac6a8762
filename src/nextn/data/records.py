"""Convert one record of a data set to token ids and a label mask: texts, conversations, prompts with answers.

This module knows the tokenizer and its chat template; where records come from is the concern of `sources`.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from nextn.bounded_json import loads
from nextn.data.chat_template import apply_chat_template
from nextn.data.corpus import Document, Encode, Ids, encoder, eos_id
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMATS = '"text", "messages", "prompt" with "completion" (texts), or "prompt" with "tokens" (ids)'
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern that transformers searches for
_MAX_SHOWN = 80

Record = Mapping[str, object]


@dataclass(eq=False)
class RecordReader:
    """Reads records with one tokenizer, and counts conversations that a user should know of."""

    tokenizer: "PreTrainedTokenizerBase"  # encodes texts, and renders conversations with its chat template
    all_tokens: bool = False  # every token is a label, prompts and user turns included
    context: int | None = None  # positions that the model was made for
    variables: Mapping[str, object] | None = None  # of the chat template
    conversations: int = field(default=0, init=False)  # conversations read
    unanswered: int = field(default=0, init=False)  # conversations without a label
    long: int = field(default=0, init=False)  # conversations longer than the context

    def document(self, record: Record, location: str) -> Document:
        """Convert a record to a document; in a record with several formats, conversations and answers win over text.

        Raises ConfigError, with the location, for unknown columns, values of the wrong type, a conversation that the
        chat template rejects, or text without a tokenizer.
        """
        if self.tokenizer is None and not {"prompt", "tokens"} <= record.keys():
            raise ConfigError(
                f'{location}: the checkpoint has no tokenizer, so only records with "prompt" and "tokens" of token ids '
                "can be read; add tokenizer.json to its folder"
            )
        for columns, read in (
            (("messages",), self._conversation),
            (("prompt", "tokens"), self._answer),
            (("prompt", "completion"), self._completion),
            (("text",), self._text),
        ):
            if all(record.get(name) is not None for name in columns):
                return read(record, location)
        raise ConfigError(f"{location}: its columns are {_columns(record)}; expected {_FORMATS}")

    def prompt(self, record: Record, location: str, *, chat: bool = False) -> list[int]:
        """Return the ids to be answered: a conversation up to the assistant's last turn, a prompt, or a whole text.

        With `chat`, text is rendered by the chat template, as a user message. Raises ConfigError like `document`.
        """
        if record.get("messages") is not None:
            messages = _messages(record, location)
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
            return self._render(messages, record, location, add_generation_prompt=True)[0]
        value = prompt_column(record)
        if isinstance(value, str):
            if chat:
                message: dict[str, object] = {"role": "user", "content": value}
                return self._render([message], record, location, add_generation_prompt=True)[0]
            return list(self.tokenizer(value)["input_ids"])
        if value is None:
            raise ConfigError(
                f'{location}: its columns are {_columns(record)}; expected "prompt" (text or ids), "messages" or "text"'
            )
        ids: list[int] = _ids(value, location, "prompt").tolist()
        return ids

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the conversations read so far, for the user."""
        notes = []
        if self.long:
            notes.append(
                f"{self.long} of {self.conversations} conversations are longer than the model's context of "
                f"{self.context} tokens; they are cut into rows, so that some rows begin inside one"
            )
        if self.unanswered:
            notes.append(
                f"{self.unanswered} of {self.conversations} conversations have no assistant turn: none of their tokens "
                "are labels"
            )
        return tuple(notes)

    def _text(self, record: Record, location: str) -> Document:
        return Document(location, self._encode_field(record["text"], location, "text"))

    def _completion(self, record: Record, location: str) -> Document:
        prompt, completion = (self._encode_field(record[name], location, name) for name in ("prompt", "completion"))
        return self._with_answer(prompt, np.append(completion, eos_id(self.tokenizer)), location)

    def _answer(self, record: Record, location: str) -> Document:
        prompt, tokens = (_ids(record[name], location, name) for name in ("prompt", "tokens"))
        return self._with_answer(prompt, tokens, location)

    def _with_answer(self, prompt: Ids, answer: Ids, location: str) -> Document:
        mask = np.repeat([False, True], [len(prompt), len(answer)])
        return Document(location, np.concatenate([prompt, answer]), None if self.all_tokens else mask)

    def _conversation(self, record: Record, location: str) -> Document:
        messages = _messages(record, location)
        if not self.all_tokens and not self._marks_answers:
            raise ConfigError(
                f"{location}: the tokenizer's chat template does not mark which tokens are the assistant's. Put "
                "{% generation %} and {% endgeneration %} around the assistant's text in the template, or use "
                "--all-tokens to train on every token"
            )
        tokens, assistant = self._render(messages, record, location, assistant_mask=not self.all_tokens)
        ids, mask = np.asarray(tokens), None if self.all_tokens else np.asarray(assistant, bool)
        self.conversations += 1
        self.unanswered += mask is not None and not mask.any()
        self.long += self.context is not None and len(ids) > self.context
        return Document(location, ids, mask)

    def _render(
        self,
        messages: list[dict[str, object]],
        record: Record,
        location: str,
        *,
        add_generation_prompt: bool = False,
        assistant_mask: bool = False,
    ) -> tuple[list[int], list[bool]]:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"{location}: the tokenizer has no chat template to render messages with; set one, or use text"
            )
        render = partial(
            apply_chat_template,
            self.tokenizer,
            tools=_tools(record, location),
            add_generation_prompt=add_generation_prompt,
            assistant_mask=assistant_mask,
            variables=self.variables,
        )
        parsed = [_with_parsed_calls(message) for message in messages]
        try:
            if parsed != messages:  # templates that write the arguments as text refuse objects
                with suppress(ConfigError):
                    return render(parsed)
            return render(messages)
        except ConfigError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"{location}: {error} (its roles: {roles or 'none'}); correct it or leave it out"
            ) from error

    @cached_property
    def _marks_answers(self) -> bool:
        template = self.tokenizer.chat_template
        return not template or bool(_GENERATION.search(self.tokenizer.get_chat_template()))

    @cached_property
    def _encode(self) -> Encode:
        return encoder(self.tokenizer)

    def _encode_field(self, value: object, location: str, name: str) -> Ids:
        if not isinstance(value, str):
            raise ConfigError(f'{location}: "{name}" is {_shown(value)}; expected text')
        return np.asarray(self._encode([value])[0], np.int64)


def prompt_column(record: Record) -> object:
    """Return the record's `prompt`, or without one its `text`; columns of parquet files may be null."""
    prompt = record.get("prompt")
    return record.get("text") if prompt is None else prompt


def _columns(record: Record) -> str:
    return ", ".join(f"{name}{' (null)' if value is None else ''}" for name, value in record.items()) or "none"


def _messages(record: Record, location: str) -> list[dict[str, object]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        message = f'{location}: "messages" is {_shown(messages)}; expected [{{"role": ..., "content": ...}}, ...]'
        raise ConfigError(message)
    return [*messages]


def _tools(record: Record, location: str) -> list[object] | None:
    """Return the record's tools, which may be their JSON: columns of tables cannot have objects of different keys."""
    tools = record.get("tools")
    try:
        value = loads(tools) if isinstance(tools, str) and tools.strip() else tools or None
    except ValueError:
        value = tools
    if not isinstance(value, list | None):
        raise ConfigError(f'{location}: "tools" is {_shown(tools)}; expected a list of tools, or the JSON of one')
    return value


def _with_parsed_calls(message: dict[str, object]) -> dict[str, object]:
    """Return the message with the arguments of its tool calls as objects, which OpenAI's API has as JSON text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_parsed_call, calls)]} if isinstance(calls, list) else message


def _parsed_call(call: object) -> object:
    match call:
        case {"function": {"arguments": str(text), **function}, **rest}:
            with suppress(ValueError):
                return {**rest, "function": {**function, "arguments": loads(text or "{}")}}
    return call


def _ids(value: object, location: str, name: str) -> Ids:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ConfigError(f'{location}: "{name}" is {_shown(value)}; expected token ids, [3, 14, 15]')
    return np.asarray(value, np.int64)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
