"""Incremental detokenization: the text of a growing sequence of tokens, in time linear in its length."""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # as the ByteFallback decoder of Llama-style tokenizers spells a byte
_BROKEN = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one: broken characters further back stay broken.
_MAX_BYTES = 4
_MAX_WINDOW = 32  # tokens that end in a broken character before `_split` looks for its end


class Detokenizer:
    """Decodes tokens as they arrive; the pieces add up to what decoding all tokens at once gives.

    Each call decodes a window alone: the tokens whose text may still change, and before them those of the piece that
    came last, as context for leading spaces. This is how tokenizers' `DecodeStream` works. Unlike it, this class works
    with any tokenizer, gives the text that is still pending, and holds back a run of byte-fallback tokens up to its
    end: one invalid byte makes the whole run invalid, where `DecodeStream` raises as its earlier pieces were wrong.

    Args:
        tokenizer: Any tokenizer of transformers.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._pieces: dict[int, str | None] = {}
        self._window: list[int] = []
        self._num_context, self._context_chars = 0, 0
        self.pending = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the text that became certain; `pending` is what may still change."""
        self._window += self._known(tokens)
        self.pending = self._new_text(self._window)
        if not self.pending:
            return ""
        num_certain = len(self._window)
        if self.pending.endswith(_BROKEN):
            num_certain = self._split() if num_certain > _MAX_WINDOW else 0
        elif self._is_byte_token(self._window[-1]):
            num_certain = 0
        return self._commit(num_certain) if num_certain else ""

    def peek(self, tokens: Sequence[int]) -> str:
        """Return `pending` as it would be with these tokens appended, without appending them."""
        return self._new_text([*self._window, *self._known(tokens)])

    def _commit(self, num_certain: int) -> str:
        """Make the text of the window's first tokens certain; they become the context of the next ones."""
        certain = self._new_text(self._window[:num_certain])
        self.pending = self.pending[len(certain) :]
        del self._window[: self._num_context]
        self._num_context = num_certain - self._num_context
        self._context_chars = len(self._decode(self._window[: self._num_context]))
        return certain

    def _split(self) -> int:
        """Find how many tokens of a window with broken characters are certain; 0 if that cannot be told."""
        window, end = self._window, len(self._window) - _MAX_BYTES
        if any(self._is_byte_token(token) for token in window[-2 * _MAX_BYTES :]):
            return 0
        text = self._decode(window)
        splits = range(end, end - _MAX_BYTES, -1)
        return next((at for at in splits if self._decode(window[:at]) + self._decode(window[at:]) == text), 0)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in map(int, tokens) if self._piece(token) is not None]

    def _piece(self, token: int) -> str | None:
        """The token as the decoder sees it; None for the ids that pad a vocabulary and for what is skipped."""
        if token not in self._pieces:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            is_skipped = self._skip_special_tokens and self._decode([token], skip=False) != self._decode([token])
            self._pieces[token] = None if piece is None or is_skipped else str(piece)
        return self._pieces[token]

    def _is_byte_token(self, token: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._piece(token) or "") is not None

    def _new_text(self, window: Sequence[int]) -> str:
        return self._decode(window)[self._context_chars :]

    def _decode(self, tokens: Sequence[int], *, skip: bool | None = None) -> str:
        skip = self._skip_special_tokens if skip is None else skip
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
