"""Parse untrusted JSON within limits of time and memory, and check its values.

A parsed value takes up to 250 bytes of memory for 3 bytes of text, so a bound on the text's size alone is not enough.
Files are parsed by `parse_json`, answers of engines by `loads`. Invalid values raise ValueError or TypeError here;
callers turn these into an error that names the source.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import Repr
from typing import Any

# Values of JSON that whoever reads them knows or checks: as read only, and as a dict of their own.
JsonObject = Mapping[str, Any]
JsonDict = dict[str, Any]
MAX_DEPTH = 100  # nesting of arrays and objects; published configs have at most 10
_TOO_DEEP = f"its arrays and objects are nested more than {MAX_DEPTH} deep"

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_COUNT = 2**53  # larger integers have no exact float
_MAX_TEXT = 16 * 1024 * 1024
_MAX_MEMORY = 96 * 1024 * 1024
_MAX_ID = 2**31
_LOGPROB_FLOOR = 9999.0  # what vLLM writes for a probability of 0
# Bytes that Python needs for an object, an array, and any other value with its slot in a list.
_COSTS = {"{": 200, "[": 72, ",": 32}
_ESCAPES = re.compile(
    r"\\(?:[uU][dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.S
)


@dataclass(frozen=True)
class JsonLimits:
    """Bounds on one JSON file."""

    num_bytes: int  # size of the file
    num_values: int  # commas and opening brackets, also those inside strings: an upper bound on the number of values

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


_FILE_LIMITS = JsonLimits(64 * 1024 * 1024, 4_000_000)


def parse_json(data: bytes, limits: JsonLimits) -> object:
    """Parse `data` as JSON.

    Raises ValueError if it is not JSON, holds text that is not Unicode (a lone surrogate), or exceeds a limit.
    """
    limits.check_values(data)
    text = data.decode(json.detect_encoding(data))
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(value)
    check_unicode(value, data)
    return value


def read_json(path: Path) -> object:
    """Parse a file that a user gives. Raises OSError, and ValueError as `parse_json` does."""
    _FILE_LIMITS.check_size(path.stat().st_size)
    return parse_json(path.read_bytes(), _FILE_LIMITS)


def check_unicode(value: object, data: bytes) -> None:
    """Raise ValueError if a value that was parsed from `data` holds text that no file or tokenizer accepts."""
    if _SURROGATE.search(data):  # a pair of escapes is one character
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise ValueError(f"its text has the lone surrogate {lone!r}, half of a character: replace it") from None


def _check_depth(value: object) -> None:
    """Raise ValueError. Where Python itself raises RecursionError depends on its version and on the calls so far."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in chain.from_iterable(inner) if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def loads(text: str, **options: Any) -> object:
    """Parse a JSON document, with options of `json.loads`; lone surrogates, which no file accepts, become U+FFFD.

    Raises ValueError if it is not JSON, too long, nested too deeply, or its values would take too much memory.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError(f"JSON of {len(text):,} characters; at most {_MAX_TEXT:,} are read")
    memory = sum(text.count(char) * cost for char, cost in _COSTS.items())
    if memory > _MAX_MEMORY:
        raise ValueError(f"JSON whose values would take about {memory // 2**20} MiB; at most {_MAX_MEMORY // 2**20}")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        text = _ESCAPES.sub(lambda match: r"\ufffd" if match[1] else match[0], text)
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(value)
    return value


def count(value: object, name: str, *, maximum: int = MAX_COUNT) -> int:
    """Check a whole number from 0 to `maximum`. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{name} = {short_repr(value)}; expected a whole number from 0 to {maximum}")
    return value


# The largest values of config.json that any published model is near to: 128 layers, 4,096 experts, 300,000 tokens.
_MAX_LAYERS, _MAX_EXPERTS, _MAX_SIZE = 10_000, 65_536, 2**31 - 1
_NUMBER_LIMITS = (
    (
        re.compile(r"(?:num_hidden_layers|num_layers|n_layers?|\w*nextn_predict_layers|mtp_num_hidden_layers)"),
        _MAX_LAYERS,
    ),
    (re.compile(r"\w*experts\w*|moe_topk|top_k_experts|n_group|topk_group"), _MAX_EXPERTS),
    (re.compile(r"\w*(?:size|dim|heads|rank)|\w*_heads_\w+"), _MAX_SIZE),
)


def check_numbers(document: object) -> None:
    """Raise ValueError for an integer in a model's configuration that no model has, at any level.

    Counts of layers and experts become loops and sets, sizes become shapes: whoever reads them can rely on the bounds.
    """
    stack = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += [item for item in value if isinstance(item, dict | list)]
            continue
        if not isinstance(value, dict):
            continue
        for name, item in value.items():
            if isinstance(item, dict | list):
                stack.append(item)
            elif type(item) is int:
                limit = next((most for pattern, most in _NUMBER_LIMITS if pattern.fullmatch(str(name)[:200])), None)
                if abs(item) > (MAX_COUNT * 1024 if limit is None else limit):
                    most = "a number of 64 bits" if limit is None else f"at most {limit:,}"
                    raise ValueError(f"{str(name)[:100]} = {short_repr(item)}; expected {most}")


def optional_count(value: object, name: str) -> int | None:
    """Check a count that the engine may leave out."""
    return None if value is None else count(value, name)


def token_id(value: object) -> int:
    """Check a token id. Raises ValueError for anything else."""
    return count(value, "token id", maximum=_MAX_ID)


def logprob(value: object) -> float:
    """Check a log-probability in nats; -inf becomes -9999. Raises ValueError for text, NaN and +inf."""
    if type(value) not in (int, float) or math.isnan(value) or value > _LOGPROB_FLOOR:  # type: ignore[arg-type,operator]
        raise ValueError(f"log-probability {short_repr(value)}; expected a number, at most 0")
    return float(max(value, -_LOGPROB_FLOOR))  # type: ignore[call-overload]


def string(value: object, name: str, *, maximum: int = _MAX_TEXT) -> str:
    """Check a text of at most `maximum` characters. Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{name} = {short_repr(value)}; expected a text")
    if len(value) > maximum:
        raise ValueError(f"{name} has {len(value):,} characters; expected at most {maximum:,}")
    return value


def short_repr(value: object) -> str:
    """Return a value's repr for a message: at most 200 characters, whatever its size and depth."""
    brief = Repr()
    brief.maxstring = brief.maxother = 80
    return brief.repr(value)[:200]
