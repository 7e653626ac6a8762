"""Prometheus text -> series: https://prometheus.io/docs/instrumenting/exposition_formats/."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nextn.errors import EngineError
from nextn.words import some

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Series:
    """One line: a name, its labels, a finite value."""

    name: str
    labels: Mapping[str, str]
    value: float


def series(text: str, *, model: str | None = None) -> list[Series]:
    """All finite series, or those of one served model and those without a model_name.

    Raises EngineError for a model that no series has, though others have one.
    """
    found = [each for line in text.splitlines() if (each := _line(line))]
    names = {each.labels["model_name"] for each in found if "model_name" in each.labels}
    if model is None or not names:
        return found
    if model not in names:
        raise EngineError(f"the metrics have no model_name {model!r}; they have {some(sorted(names), 10)}")
    return [each for each in found if each.labels.get("model_name", model) == model]


def _line(line: str) -> Series | None:
    match = None if line.startswith("#") else _LINE.fullmatch(line)
    if match is None:
        return None
    try:
        value = float(match[3])
    except ValueError:
        return None
    labels = {name: re.sub(r"\\.", _unescaped, text) for name, text in _LABEL.findall(match[2] or "")}
    return Series(match[1], labels, value) if math.isfinite(value) else None


def _unescaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0], match[0])


def total(found: list[Series], *names: str) -> float | None:
    """The sum over the series of the first of these names that is there; None for none. `_total` may end a name."""
    for name in names:
        values = [each.value for each in found if each.name.removesuffix("_total") == name]
        if values:
            return sum(values)
    return None
