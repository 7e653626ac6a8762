"""Text from tokens as they are decoded: up to a stop string, and never in the middle of a character."""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.model.text_interface import TextInterface

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # as the ByteFallback decoder of Llama-style tokenizers spells a byte
BROKEN = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one: broken characters further back stay broken.
_MAX_BYTES = 4
_MAX_BUFFER = 32  # new tokens that end in a broken character before `_split` looks for where it begins


class TextStream:
    """The growing text of one sequence; only final text is returned, and stop strings end it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str], *, skip_special_tokens: bool = False
    ) -> None:
        skip = skip_special_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=skip)
        self._stops = tuple(stop)
        self._num_tokens = 0
        self._is_over = False
        # Final text that was not returned, because a stop string may begin in it.
        self._held = ""

    def push(self, tokens: Sequence[int], eos: Sequence[int], *, last: bool) -> str:
        """Append the tokens of a round and return the text that can be shown; with `last`, all that remains."""
        if self._detokenizer is None or self._is_over:
            return ""
        self._num_tokens += len(tokens)
        text = self._held + self._detokenizer.push([token for token in tokens if token not in eos])
        if last:
            text += self._detokenizer.pending
        ends = [text.find(stop) for stop in self._stops if stop in text]
        self._is_over = last or bool(ends)
        num_shown = min(ends) if ends else len(text) if last else len(text) - self._partial_stop(text)
        self._held = text[num_shown:]
        return text[:num_shown]

    def stop_after(self, tokens: Sequence[int]) -> int | None:
        """Return how many tokens, the latest of them not pushed yet, complete the first stop string, or None."""
        assert self._detokenizer is not None
        fresh = tokens[self._num_tokens :]
        if any(map(self._detokenizer.is_byte_token, fresh)):  # an invalid byte also changes the text before it
            counts = range(1, len(fresh) + 1)
            return next((self._num_tokens + count for count in counts if self._stops_in(fresh[:count])), None)
        if not self._stops_in(fresh):
            return None
        # Text grows with the tokens, so the first count that holds a stop string can be found by bisection.
        low, high = 1, len(fresh)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._stops_in(fresh[:middle]) else (middle + 1, high)
        return self._num_tokens + low

    def _stops_in(self, fresh: Sequence[int]) -> bool:
        assert self._detokenizer is not None
        text = self._held + self._detokenizer.peek(fresh)
        return any(stop in text for stop in self._stops)

    def _partial_stop(self, text: str) -> int:
        """Length of the tail that may be the beginning of a stop string."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )


def tokenizer_of(model: Model | TextInterface) -> PreTrainedTokenizerBase:
    if model.tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer for text prompts; save the base model's in its folder")
    return model.tokenizer


class Detokenizer:
    """Decodes tokens as they arrive; the pieces add up to what decoding all tokens at once gives.

    Each call decodes only a buffer: the tokens whose text may still change, after those of the last piece as context
    for leading spaces. This is how tokenizers' `DecodeStream` works. Unlike it, this class works with any tokenizer,
    exposes the text that is still pending, and holds back a run of byte-fallback tokens up to its end: one invalid byte
    makes the whole run invalid, where `DecodeStream` raises because its earlier pieces were wrong.

    Args:
        tokenizer: Any tokenizer of transformers.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._pieces: dict[int, str | None] = {}
        self._buffer: list[int] = []
        self._num_context, self._context_chars = 0, 0
        self.pending = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the text that became final; `pending` is what may still change."""
        self._buffer += self._decodable(tokens)
        self.pending = self._new_text(self._buffer)
        if not self.pending:
            return ""
        num_final = len(self._buffer)
        if self.pending.endswith(BROKEN):
            num_final = self._split() if num_final - self._num_context > _MAX_BUFFER else 0
        elif self.is_byte_token(self._buffer[-1]):
            num_final = 0
        return self._commit(num_final) if num_final else ""

    def peek(self, tokens: Sequence[int]) -> str:
        """Return `pending` as it would be with these tokens appended, without appending them."""
        return self._new_text([*self._buffer, *self._decodable(tokens)])

    def _commit(self, num_final: int) -> str:
        """Make the text of the buffer's first tokens final; they become the context of the next ones."""
        final = self._new_text(self._buffer[:num_final])
        self.pending = self.pending[len(final) :]
        del self._buffer[: self._num_context]
        self._num_context = num_final - self._num_context
        self._context_chars = len(self._decode(self._buffer[: self._num_context]))
        return final

    def _split(self) -> int:
        """Find how many tokens of a buffer with broken characters are final; 0 if that cannot be determined."""
        tokens, end = self._buffer, len(self._buffer) - _MAX_BYTES
        if any(self.is_byte_token(token) for token in tokens[-2 * _MAX_BYTES :]):
            return 0
        text = self._decode(tokens)
        splits = range(end, end - _MAX_BYTES, -1)
        return next((at for at in splits if self._decode(tokens[:at]) + self._decode(tokens[at:]) == text), 0)

    def _decodable(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in map(int, tokens) if self._piece(token) is not None]

    def _piece(self, token: int) -> str | None:
        """The token as the decoder sees it; None for the ids that pad a vocabulary and for what is skipped."""
        if token not in self._pieces:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            is_skipped = self._skip_special_tokens and self._decode([token], skip=False) != self._decode([token])
            self._pieces[token] = None if piece is None or is_skipped else str(piece)
        return self._pieces[token]

    def is_byte_token(self, token: int) -> bool:
        """Return whether a token is a single byte, whose text depends on the bytes around it."""
        return BYTE_TOKEN.fullmatch(self._piece(token) or "") is not None

    def _new_text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens)[self._context_chars :]

    def _decode(self, tokens: Sequence[int], *, skip: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip is None else skip
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))
