"""A canary's record, read back, and how it says that an engine's counters should stand. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nextn.engines.counters import Counters
from nextn.errors import ConfigError

FILE = "canary.json"
FORMAT = 2


@dataclass(frozen=True)
class Asked:
    """One prompt. tokens: what must follow. gaps: how far each is ahead of the next best, in nats."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Range:
    """What a counter may say: the last round's drafts beyond the text's end are counted by some engines."""

    low: int = 0
    high: int = 0

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def off(self, value: int) -> int:
        """How far a value is outside."""
        return max(0, self.low - value, value - self.high)

    @property
    def words(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Tally:
    """Counters of one or several prompts: rounds that drafted, drafts kept, and kept by position."""

    rounds: Range
    accepted: Range
    positions: tuple[Range, ...]

    def __add__(self, other: "Tally") -> "Tally":
        positions = tuple(a + b for a, b in zip(self.positions, other.positions, strict=True))
        return Tally(self.rounds + other.rounds, self.accepted + other.accepted, positions)

    def off(self, seen: Counters) -> int:
        """How many kept drafts an engine's counters are away; by position where it counts so, else in all."""
        if seen.per_position:
            told = [*seen.per_position, *[0] * len(self.positions)]
            return sum(each.off(value) for each, value in zip(self.positions, told, strict=False))
        return self.accepted.off(seen.accepted or 0)


def tally(kept: Sequence[int], drafts: int, tokens: int) -> Tally:
    """kept: of each round, the last is the one that reaches the last of `tokens` new tokens."""
    *whole, last = kept
    room = tokens - 2 - sum(whole) - len(whole)  # what can be drafted there and not be too many
    ends = range(min(last, max(0, room)), last + 1)
    positions = []
    for place in range(drafts):
        sure = sum(each > place for each in whole)
        positions.append(Range(sure + (ends[0] > place), sure + (ends[-1] > place)))
    least = len(whole) + (room > 0)
    return Tally(Range(least, len(kept)), Range(sum(whole) + ends[0], sum(whole) + ends[-1]), tuple(positions))


@dataclass(frozen=True)
class Told:
    """One reading of the head in the record. facts: of the family's row that it changes, for an engine's convention.
    rounds: K -> of each prompt how many drafts each round keeps."""

    name: str
    says: str
    issues: tuple[str, ...]
    facts: tuple[str, ...]
    rounds: Mapping[int, tuple[tuple[int, ...], ...]]


Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Rule:
    """A rule of acceptance above temperature 0. fault: its name as a fault; "" for a rule that holds the clause.

    counts: K -> how the last round of a text drafts (`whole` or `cut`) -> (offered, kept), [passes][depths] each.
    """

    name: str
    says: str
    fault: str
    issues: tuple[str, ...]
    counts: Mapping[int, Mapping[str, tuple[Rows, Rows]]]


@dataclass(frozen=True)
class Sampled:
    """What each rule keeps of texts that are drawn at a temperature."""

    temperature: float
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Canary:
    """A record. tie: nats up to which another rounding may choose another token. max_tokens: new ones of each text."""

    folder: str
    family: str
    max_tokens: int
    tie: float
    drafts: tuple[int, ...]
    prompts: tuple[Asked, ...]
    readings: tuple[Told, ...]
    sampled: Sampled

    @classmethod
    def read(cls, folder: Path) -> "Canary":
        """The record of a folder that `canary build` made. Raises ConfigError for any other."""
        path = folder / FILE if folder.is_dir() else folder
        try:
            found = json.loads(path.read_text())
            return cls._of(str(folder), found)
        except OSError as error:
            raise ConfigError(
                f"{path}: no record of a canary ({error.strerror}); `nextn canary build` makes one"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not the record of a canary ({error!r}); build it anew") from error

    @classmethod
    def _of(cls, folder: str, found: dict[str, Any]) -> "Canary":
        if found["format"] != FORMAT:
            raise ConfigError(
                f"{folder}: record of format {found['format']}; this version reads format {FORMAT}: build it anew"
            )
        settings = found["settings"]
        prompts = tuple(
            Asked(each["text"], tuple(each["ids"]), tuple(each["tokens"]), tuple(each["gaps"]))
            for each in found["prompts"]
        )
        readings = tuple(
            Told(each["name"], each["says"], tuple(each["issues"]), tuple(each["facts"]), _rounds(each["rounds"]))
            for each in found["readings"]
        )
        sizes = int(settings["max_tokens"]), float(settings["tie"]), tuple(settings["drafts"])
        return cls(folder, str(found["family"]), *sizes, prompts, readings, _sampled(found["sampled"]))

    @cached_property
    def right(self) -> Told:
        return self.readings[0]

    def tally(self, reading: Told, drafts: int, places: Sequence[int]) -> Tally:
        """What the prompts at these places add up to. Raises ConfigError for a K that was not recorded."""
        if drafts not in reading.rounds:
            raise ConfigError(f"K = {drafts}; the canary holds counts for K = {', '.join(map(str, self.drafts))}")
        parts = [tally(reading.rounds[drafts][place], drafts, self.max_tokens) for place in places]
        return sum(parts[1:], parts[0])

    def length(self, reading: Told, drafts: int) -> float:
        """AL: tokens a round, over all prompts, the last round of each with all its drafts."""
        kept = [each for rounds in reading.rounds[drafts] for each in rounds]
        return 1 + sum(kept) / len(kept)


def _rounds(found: Mapping[str, Sequence[str]]) -> dict[int, tuple[tuple[int, ...], ...]]:
    return {int(k): tuple(tuple(map(int, digits)) for digits in texts) for k, texts in found.items()}


def _sampled(found: Mapping[str, Any]) -> Sampled:
    rules = [
        Rule(
            each["name"],
            each["says"],
            each["fault"],
            tuple(each["issues"]),
            {int(k): {how: _pair(told) for how, told in ends.items()} for k, ends in each["counts"].items()},
        )
        for each in found["rules"]
    ]
    return Sampled(float(found["temperature"]), tuple(rules))


def _pair(told: Mapping[str, Sequence[Sequence[float]]]) -> tuple[Rows, Rows]:
    offered, kept = (tuple(map(tuple, told[side])) for side in ("offered", "kept"))
    return offered, kept
