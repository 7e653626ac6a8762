"""Removal of keys from what servers return."""

import html
import re

MASK = "***"
_SHORTEST = 8  # characters: "EMPTY", "none" and the like are not secrets, and occur in ordinary text


class Redactor:
    """Replaces one secret by ***, also where it is percent-encoded or escaped as in JSON or HTML.

    Args:
        secret: The key or token; None, and one of fewer than 8 characters, changes nothing.
    """

    def __init__(self, secret: str | None) -> None:
        known = secret if secret and len(secret) >= _SHORTEST else ""
        self._secret = known.encode()
        self._pattern = re.compile("".join(map(_any_form, known))) if known else None

    def text(self, text: str) -> str:
        """Return the text without the secret."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def data(self, data: bytes) -> bytes:
        """Mask the literal secret only, keeping the length, for files that are read by range."""
        return data.replace(self._secret, b"*" * len(self._secret)) if self._secret else data

    def __repr__(self) -> str:
        return "Redactor(***)"


def _any_form(char: str) -> str:
    """Return a pattern for one ASCII character. Each branch begins with a literal, so the search is fast."""
    code = ord(char)
    digits = "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in f"{code:02x}")
    forms = [
        re.escape(char),
        r"\\" + re.escape(char),
        rf"\\u00{digits}",
        f"%{digits}",
        f"&#0*{code};",
        f"&#[xX]0*{digits};",
    ]
    forms += [re.escape(name) for name in (html.escape(char),) if name != char]
    return f"(?:{'|'.join(forms)})"
