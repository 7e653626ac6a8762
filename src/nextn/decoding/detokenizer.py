"""Incremental detokenization: the text of a growing sequence of tokens, in time linear in its length."""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # as the ByteFallback decoder of Llama-style tokenizers spells a byte
_BROKEN = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one: broken characters further back stay broken.
_MAX_BYTES = 4
_MAX_BUFFER = 32  # buffered tokens that end in a broken character before `_split` looks for where it begins


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
        if self.pending.endswith(_BROKEN):
            num_final = self._split() if num_final > _MAX_BUFFER else 0
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
        return _BYTE_TOKEN.fullmatch(self._piece(token) or "") is not None

    def _new_text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens)[self._context_chars :]

    def _decode(self, tokens: Sequence[int], *, skip: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip is None else skip
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
