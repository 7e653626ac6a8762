"""Parse untrusted JSON within bounds on its bytes, values and nesting.

A parsed value takes up to 250 bytes of memory for 3 bytes of text, so a bound on the file's size alone is not enough.
"""

import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

MAX_DEPTH = 100  # nesting of arrays and objects; published configs have at most 10

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class JsonLimits:
    """Bounds on one JSON file.

    Args:
        num_bytes: Size of the file.
        num_values: Commas and opening brackets, also those inside strings: an upper bound on the number of values.
    """

    num_bytes: int
    num_values: int

    def check_size(self, size: int) -> None:
        """Raise ValueError for a file of `size` bytes that is too large."""
        if size > self.num_bytes:
            raise ValueError(f"it has {size:,} bytes, at most {self.num_bytes:,} are read")

    def check_values(self, data: bytes) -> None:
        """Raise ValueError for a text that may hold too many values."""
        self.check_size(len(data))
        count = sum(map(data.count, (b",", b"[", b"{")))
        if count > self.num_values:
            raise ValueError(f"it holds up to {count:,} JSON values, at most {self.num_values:,} are read")

    def check_file(self, path: Path) -> None:
        """The same for a file that another library will parse."""
        self.check_size(path.stat().st_size)
        self.check_values(path.read_bytes())


def parse_json(data: bytes, limits: JsonLimits) -> object:
    """Parse `data` as JSON.

    Raises:
        ValueError: It is not JSON, holds text that is not Unicode (a lone surrogate), or exceeds a limit.
    """
    limits.check_values(data)
    text = data.decode(json.detect_encoding(data))
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(value)
    if _SURROGATE.search(data):  # a pair of escapes is one character; a lone one could not be written again
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(value: object) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in chain.from_iterable(inner) if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(_too_deep())


def _too_deep() -> str:
    return f"its arrays and objects are nested more than {MAX_DEPTH} deep"
