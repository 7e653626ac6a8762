"""The text of single tokens, for log probabilities and rounds; running text comes from the engine."""

import re
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers with byte fallback
_BROKEN = "\ufffd"


class TokenTexts:
    """Decodes tokens one by one, each only once.

    Args:
        tokenizer: Any tokenizer of transformers; None: tokens have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the token's text; U+FFFD stands for bytes that are not a whole character."""
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]

    def texts(self, tokens: Sequence[int]) -> list[str]:
        return [self.text(token) for token in tokens]

    def running_text(self, tokens: Sequence[int]) -> str:
        """Return the text of consecutive tokens, special ones included."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return 0 if self._tokenizer is None else len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spelled(self, token: int) -> str:
        r"""Return a text that is unique per token; incomplete characters are like `bytes:\xe2\x82`, as OpenAI does."""
        text = self.text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.utf8(token)) if _BROKEN in text else text

    def utf8(self, token: int) -> list[int]:
        """Return the token's UTF-8 bytes."""
        text = self.text(token)
        return list(text.encode() if _BROKEN not in text else self._raw(token))

    def _raw(self, token: int) -> bytes:
        """The bytes that a byte-level or byte-fallback tokenizer means by a piece that is no valid text alone."""
        piece = self._piece(token) or ""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        table = _byte_level()
        return bytes(table[char] for char in piece) if all(char in table for char in piece) else piece.encode()

    def _piece(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token)

    def _decode(self, token: int) -> str:
        if self._tokenizer is None or self._piece(token) is None:  # ids that only pad the vocabulary
            return ""
        return self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@cache
def _byte_level() -> dict[str, int]:
    """Character -> byte, as GPT-2's tokenizers spell bytes: printable ones as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
