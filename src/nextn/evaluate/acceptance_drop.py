"""Compare a measurement of acceptance with an earlier one of the same prompts and settings. Imports no torch.

A drop counts once it is larger than the limit and larger than the noise of both measurements: an interval of 24 texts
is often as wide as a limit of 5 %.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nextn.errors import ConfigError

RULES_OF_SERVERS = ("greedy", "ratio", "argmax")  # of the rules that are measured
RECORD = "measure.json"  # looked for in a folder
_MAX_RECORD = 64 * 1024 * 1024  # bytes
_IGNORED = ("backend",)  # settings that do not change what is measured


@dataclass(frozen=True)
class Drop:
    """One figure in both measurements."""

    temperature: float
    rule: str
    figure: str  # a_1, ..., or AL
    before: float
    now: float
    half_width: float  # of the 95 % interval of the relative drop
    num_texts: int

    @property
    def value(self) -> float:
        """The relative drop; negative for a gain."""
        return (self.before - self.now) / self.before

    def exceeds(self, limit: float) -> bool:
        """Whether the drop is above the limit and not noise."""
        return self.value > limit and self.value > self.half_width

    def texts_needed(self, limit: float) -> int:
        """The number of texts with which the interval would be as narrow as the limit, about."""
        return math.ceil(self.num_texts * max(1.0, self.half_width / limit) ** 2)

    @property
    def label(self) -> str:
        return self.rule if self.rule == "greedy" else f"T={self.temperature:g} {self.rule}"


def read_record(path: Path) -> Mapping[str, object]:
    """Read what `nextn measure --out` wrote: the file, or a folder with measure.json. Raises ConfigError otherwise."""
    file = path / RECORD if path.is_dir() else path
    try:
        if file.stat().st_size > _MAX_RECORD:
            raise ConfigError(f"{file}: larger than any record of `nextn measure --out`")
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); give what `nextn measure --out FILE` wrote") from error
    if not isinstance(record, dict) or not {"figures", "hashes", "settings"} <= record.keys():
        raise ConfigError(f"{file}: not a record of `nextn measure --out`: figures, hashes or settings are missing")
    return record


def drops(baseline: Mapping[str, object], now: Mapping[str, object], *, source: str) -> list[Drop]:
    """Return every figure of the largest K by rule, of all texts, in both records.

    Raises ConfigError if they are of other prompts or settings, or the baseline is not a valid record.
    """
    now = json.loads(json.dumps(now))
    try:
        _check_same(baseline, now, source)
        pairs = {_key(each): each for each in _figures(baseline)}
        found = [drop for each in _figures(now) if (old := pairs.get(_key(each))) for drop in _of_pair(old, each)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{source}: not a record of this version's `nextn measure --out` ({error!r})") from error
    if not found:
        raise ConfigError(
            f"{source}: no figure has an interval in both measurements: measure both with more prompts, so that more "
            "than one text is left"
        )
    return found


def _check_same(baseline: Mapping[str, object], now: Mapping[str, object], source: str) -> None:
    hashes = [_mapping(record["hashes"]) for record in (baseline, now)]
    if hashes[0]["prompts"] != hashes[1]["prompts"]:
        raise ConfigError(
            f"{source}: measured on other prompts (their hashes differ): rates on different prompts are not "
            "comparable. Pass the same --prompts, or measure the baseline again"
        )
    settings = [_mapping(record["settings"]) for record in (baseline, now)]
    other = [name for name, value in settings[1].items() if name not in _IGNORED and settings[0].get(name) != value]
    if other:
        stated = "; ".join(f"{name} {settings[0].get(name)} against {settings[1][name]}" for name in other)
        raise ConfigError(f"{source}: measured with other settings: {stated}. Pass the same, or measure it again")


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is not an object")
    return value


def _figures(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    figures = record["figures"]
    k = _mapping(record["settings"])["num_speculative_tokens"]
    assert isinstance(figures, list)
    return [
        each for each in map(_mapping, figures)
        if each["domain"] == "all" and each["rule"] in RULES_OF_SERVERS and each["num_speculative_tokens"] == k
    ]  # fmt: skip


def _key(figures: Mapping[str, object]) -> tuple[object, object]:
    return figures["temperature"], figures["rule"]


def _of_pair(old: Mapping[str, object], new: Mapping[str, object]) -> list[Drop]:
    names = [f"a_{depth + 1}" for depth in range(len(_list(new["acceptance"])))] + ["AL"]
    values = [_with_length(each) for each in (old, new)]
    texts = min(int(str(old["num_texts"])), int(str(new["num_texts"])))
    found = []
    for name, before, now in zip(names, *values, strict=True):
        if None in (*before, *now) or not before[0]:  # a single text has no interval
            continue
        # The ends of an interval are about as far from the value on both sides; errors of a ratio add in squares.
        relative = [(high - low) / 2 / value if value else 0.0 for value, low, high in (before, now)]
        half = math.hypot(relative[0], relative[1]) * now[0] / before[0]
        found.append(Drop(float(str(new["temperature"])), str(new["rule"]), name, before[0], now[0], half, texts))
    return found


def _with_length(figures: Mapping[str, object]) -> list[tuple[float, float, float]]:
    rates = zip(_list(figures["acceptance"]), map(_list, _list(figures["interval_95"])), strict=True)
    length = _mapping(figures["mean_acceptance_length"])
    rows = [(value, *bounds) for value, bounds in rates]
    return [*rows, (length["value"], length["low"], length["high"])]  # type: ignore[list-item]  # numbers or None


def _list(value: object) -> Sequence[float]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is not a list")
    return value
