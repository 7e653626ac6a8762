"""Parse Prometheus text: https://prometheus.io/docs/instrumenting/exposition_formats/."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nextn.engines.json_values import short_repr
from nextn.errors import EngineError
from nextn.text_format import some

MAX_BYTES = 16 * 1024 * 1024
MAX_LINES = 50_000
MAX_LABELS = 200_000  # in all lines together
_MAX_LABELS_A_LINE = 64
MAX_LINE = 16 * 1024  # characters
MAX_LABEL = 1024  # characters of its value
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}+")
# Possessive quantifiers never backtrack: linear in the length of a line, whatever the text.
_LABEL = re.compile(r'\s*+([a-zA-Z_][a-zA-Z0-9_]*+)="((?:[^"\\]++|\\.)*+)"\s*+,?+')
_VALUE = re.compile(r"\s++([0-9A-Za-z.+-]{1,400})(?:\s++-?[0-9]++)?+\s*+")


@dataclass(frozen=True, slots=True)
class Series:
    """One sample line: a name, its labels, a finite value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_series(text: str, *, model: str | None = None) -> list[Series]:
    """Parse all finite series; with `model`, those of that served model and those without a model_name.

    Raises EngineError for a model that no series has, though some have a model_name, and for text beyond the limits.
    """
    parsed: list[Series] = []
    num_labels = 0
    for line in filter(None, map(_line, _lines(text))):
        num_labels += len(line.labels)
        if num_labels > MAX_LABELS:
            raise EngineError(f"the metrics have more than {MAX_LABELS:,} labels; not those of an engine")
        parsed.append(line)
    names = {sample.labels["model_name"] for sample in parsed if "model_name" in sample.labels}
    if model is None or not names:
        return parsed
    if model not in names:
        raise EngineError(f"the metrics have no model_name {model!r}; they have {some(sorted(names), 10)}")
    return [sample for sample in parsed if sample.labels.get("model_name", model) == model]


def _lines(text: str) -> Iterator[str]:
    """The lines without comments."""
    if len(text) > MAX_BYTES:
        raise EngineError(f"the metrics have {len(text):,} characters; at most {MAX_BYTES:,} are read")
    if text.count("\n") > MAX_LINES:
        raise EngineError(f"the metrics have more than {MAX_LINES:,} lines; not those of an engine")
    for match in re.finditer(r"[^\n]++", text):
        if match.end() - match.start() > MAX_LINE:
            start = short_repr(text[match.start() : match.start() + 60])
            raise EngineError(f"the metrics have a line of more than {MAX_LINE:,} characters, which begins {start}")
        if text[match.start()] != "#":
            yield match[0]


def _line(line: str) -> Series | None:
    """One series; None for another line, or a value that is not finite."""
    name = _NAME.match(line)
    if name is None:
        return None
    labels, end = _labels(line, name.end())
    value = _VALUE.fullmatch(line, end)
    try:
        number = math.nan if value is None else float(value[1])
    except ValueError:
        return None
    return Series(name[0], labels, number) if math.isfinite(number) else None


def _labels(line: str, end: int) -> tuple[dict[str, str], int]:
    """The labels that begin at `end`, and the index after them; other text is left to the value, which then fails."""
    labels: dict[str, str] = {}
    if line[end : end + 1] != "{":
        return labels, end
    end += 1
    for _ in range(_MAX_LABELS_A_LINE + 1):
        label = _LABEL.match(line, end)
        if label is None:
            return labels, end + (line[end : end + 1] == "}")
        if len(label[2]) > MAX_LABEL:
            raise EngineError(f"the metrics have a label {label[1][:100]} of more than {MAX_LABEL} characters")
        labels[label[1]] = _unescaped(label[2])
        end = label.end()
    raise EngineError(f"the metrics have a series of more than {_MAX_LABELS_A_LINE} labels; not those of an engine")


def _unescaped(text: str) -> str:
    """Backslash, quote and line break are the three escapes of the format."""
    parts = text.split(r"\\")
    return "\\".join(part.replace(r"\"", '"').replace(r"\n", "\n") for part in parts)


def sum_series(parsed: list[Series], *names: str) -> float | None:
    """Sum the series of the first of these names that exists; None without any. A name may have the suffix `_total`."""
    for name in names:
        values = [sample.value for sample in parsed if sample.name.removesuffix("_total") == name]
        if values:
            return sum(values)
    return None
