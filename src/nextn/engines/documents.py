"""JSON from engines, within bounds of time and memory; values of it, checked one by one.

What cannot be read is a ValueError or TypeError here; who asked turns it into an EngineError that names the place.
"""

import json
import math
import re
from reprlib import Repr

MAX_COUNT = 2**53  # beyond it a float is no exact whole number
_MAX_TEXT = 16 * 1024 * 1024
_MAX_MEMORY = 96 * 1024 * 1024
_MAX_ID = 2**31
_LOGPROB_FLOOR = 9999.0  # what vLLM writes for a probability of 0
# Bytes that Python takes for an object, an array, and any other value with its place in a list.
_COSTS = {"{": 200, "[": 72, ",": 32}
_ESCAPES = re.compile(
    r"\\(?:[uU][dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.S
)


def loads(text: str) -> object:
    """Parse a JSON document; lone surrogates, which no file or terminal can take, become U+FFFD.

    Raises:
        ValueError: It is no JSON, too long, nested too deeply, or its values would take too much memory.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError(f"JSON of {len(text):,} characters; at most {_MAX_TEXT:,} are read")
    memory = sum(text.count(char) * cost for char, cost in _COSTS.items())
    if memory > _MAX_MEMORY:
        raise ValueError(f"JSON whose values would take about {memory // 2**20} MiB; at most {_MAX_MEMORY // 2**20}")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        text = _ESCAPES.sub(lambda match: r"\ufffd" if match[1] else match[0], text)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def count(value: object, name: str, *, most: int = MAX_COUNT) -> int:
    """A whole number from 0 to `most`. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} = {shown(value)}; expected a whole number from 0 to {most}")
    return value


def optional_count(value: object, name: str) -> int | None:
    """The same, or None where the engine does not say."""
    return None if value is None else count(value, name)


def token_id(value: object) -> int:
    """A token id. Raises ValueError for what cannot be one."""
    return count(value, "token id", most=_MAX_ID)


def logprob(value: object) -> float:
    """A log-probability in nats; minus infinity as -9999. Raises ValueError for text, NaN and plus infinity."""
    if type(value) not in (int, float) or math.isnan(value) or value > _LOGPROB_FLOOR:  # type: ignore[arg-type,operator]
        raise ValueError(f"log-probability {shown(value)}; expected a number, at most 0")
    return float(max(value, -_LOGPROB_FLOOR))  # type: ignore[call-overload]


def string(value: object, name: str, *, most: int = _MAX_TEXT) -> str:
    """A text of at most so many characters. Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{name} = {shown(value)}; expected a text")
    if len(value) > most:
        raise ValueError(f"{name} has {len(value):,} characters; expected at most {most:,}")
    return value


def shown(value: object) -> str:
    """A value for a message: short, whatever its size and depth."""
    brief = Repr()
    brief.maxstring = brief.maxother = 80
    return brief.repr(value)[:200]
