"""One record of a data set -> token ids, and which of them count as labels: texts, conversations, prompts with answers.

Knows the tokenizer and its chat template; where records come from is `corpus_files`' matter.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nextn.corpus.chat_template import apply_chat_template
from nextn.corpus.data import Document, Encode, Ids, encoder, eos_of
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = '"text", "messages", "prompt" with "completion" (texts), or "prompt" with "tokens" (ids)'
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what transformers looks for
_SHOWN = 80

Record = Mapping[str, object]


@dataclass(eq=False)
class Reader:
    """Reads records through one tokenizer. all_tokens: every token counts, prompts and users' turns, too.

    context: columns that the model was made for. conversations, unanswered, long: how many were read, how many of them
    have no token that counts, and how many are longer than the context.
    """

    tokenizer: "PreTrainedTokenizerBase"
    all_tokens: bool = False
    context: int | None = None
    conversations: int = field(default=0, init=False)
    unanswered: int = field(default=0, init=False)
    long: int = field(default=0, init=False)

    def document(self, record: Record, place: str) -> Document:
        """The record as a document; of several forms that it has, conversations and answers come before plain texts.

        Raises ConfigError, with the place, for unknown columns, values of another type, or a template that refuses.
        """
        for columns, read in (
            (("messages",), self._conversation),
            (("prompt", "tokens"), self._answer),
            (("prompt", "completion"), self._completion),
            (("text",), self._text),
        ):
            if all(record.get(column) is not None for column in columns):
                return read(record, place)
        raise ConfigError(f"{place}: its columns are {_columns(record)}; expected {FORMS}")

    def prompt(self, record: Record, place: str, *, chat: bool = False) -> list[int]:
        """What the trunk is to answer: a conversation up to the assistant's last turn, a prompt, or a whole text.

        chat: text goes through the chat template, as a user's message. Raises ConfigError like `document`.
        """
        if record.get("messages") is not None:
            messages = _messages(record, place)
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
            return self._rendered(messages, record, place, add_generation_prompt=True)[0]
        value = record.get("prompt", record.get("text"))
        if isinstance(value, str):
            if chat:
                message: dict[str, object] = {"role": "user", "content": value}
                return self._rendered([message], record, place, add_generation_prompt=True)[0]
            return list(self.tokenizer(value)["input_ids"])
        if value is None:
            raise ConfigError(
                f'{place}: its columns are {_columns(record)}; expected "prompt" (text or ids), "messages" or "text"'
            )
        return _ids(value, place, "prompt").tolist()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the conversations that were read."""
        told = []
        if self.long:
            told.append(
                f"{self.long} of {self.conversations} conversations are longer than the model's context of "
                f"{self.context} tokens; they are cut into rows, so that some rows begin inside one"
            )
        if self.unanswered:
            told.append(
                f"{self.unanswered} of {self.conversations} conversations have no assistant's turn: nothing of them "
                "counts as a label"
            )
        return tuple(told)

    def _text(self, record: Record, place: str) -> Document:
        return Document(place, self._encoded(record["text"], place, "text"))

    def _completion(self, record: Record, place: str) -> Document:
        prompt, completion = (self._encoded(record[name], place, name) for name in ("prompt", "completion"))
        return self._answered(prompt, np.append(completion, eos_of(self.tokenizer)), place)

    def _answer(self, record: Record, place: str) -> Document:
        prompt, tokens = (_ids(record[name], place, name) for name in ("prompt", "tokens"))
        return self._answered(prompt, tokens, place)

    def _answered(self, prompt: Ids, answer: Ids, place: str) -> Document:
        mask = np.repeat([False, True], [len(prompt), len(answer)])
        return Document(place, np.concatenate([prompt, answer]), None if self.all_tokens else mask)

    def _conversation(self, record: Record, place: str) -> Document:
        messages = _messages(record, place)
        if not self.all_tokens and not self._marks_answers:
            raise ConfigError(
                f"{place}: the tokenizer's chat template does not say which tokens are the assistant's. Put "
                "{% generation %} and {% endgeneration %} around what the assistant says in the template, or use "
                "--all-tokens to train on every token"
            )
        tokens, assistant = self._rendered(messages, record, place, assistant_mask=not self.all_tokens)
        ids, mask = np.asarray(tokens), None if self.all_tokens else np.asarray(assistant, bool)
        self.conversations += 1
        self.unanswered += mask is not None and not mask.any()
        self.long += self.context is not None and len(ids) > self.context
        return Document(place, ids, mask)

    def _rendered(
        self, messages: list[dict[str, object]], record: Record, place: str, **how: bool
    ) -> tuple[list[int], list[bool]]:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"{place}: the tokenizer has no chat template to render messages with; set one, or use text"
            )
        tools = record.get("tools")
        try:
            return apply_chat_template(
                self.tokenizer, messages, tools=tools if isinstance(tools, list) else None, **how
            )
        except ConfigError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"{place}: {error} (its roles: {roles or 'none'}); correct it or leave it out") from error

    @cached_property
    def _marks_answers(self) -> bool:
        template = self.tokenizer.chat_template
        return not template or bool(_GENERATION.search(self.tokenizer.get_chat_template()))

    @cached_property
    def _encode(self) -> Encode:
        return encoder(self.tokenizer)

    def _encoded(self, value: object, place: str, column: str) -> Ids:
        if not isinstance(value, str):
            raise ConfigError(f'{place}: "{column}" is {_shown(value)}; expected text')
        return np.asarray(self._encode([value])[0], np.int64)


def _columns(record: Record) -> str:
    return ", ".join(f"{name}{' (null)' if value is None else ''}" for name, value in record.items()) or "none"


def _messages(record: Record, place: str) -> list[dict[str, object]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ConfigError(f'{place}: "messages" is {_shown(messages)}; expected [{{"role": ..., "content": ...}}, ...]')
    return [*messages]


def _ids(value: object, place: str, column: str) -> Ids:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ConfigError(f'{place}: "{column}" is {_shown(value)}; expected token ids, [3, 14, 15]')
    return np.asarray(value, np.int64)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
