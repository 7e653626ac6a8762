"""What an engine must get right, as clauses, and what its counters should be by a canary's record. Imports no torch.

The ids of the clauses are those in docs/reference/contract.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nextn.bounded_json import JsonDict, JsonObject, read_json
from nextn.engines.check_result import CheckResult, Outcome
from nextn.engines.counters import Counters
from nextn.errors import ConfigError

FILE = "canary.json"
FORMAT = 2


@dataclass(frozen=True)
class Clause:
    """One requirement; id and name as in docs/reference/contract.md."""

    id: str
    name: str
    must: str  # the requirement in a sentence
    faults: tuple[str, ...] = ()  # names of `evaluate.faults.FAULTS` that break it, and what `check` itself detects

    def result(self, outcome: Outcome, evidence: str, **more: object) -> CheckResult:
        """Return the result for this clause, with the requirement if it failed; more: see `CheckResult`."""
        requirement = self.must if outcome == "failed" else ""
        return CheckResult(self.id, outcome, evidence, title=self.name, requirement=requirement, **JsonDict(more))


# fmt: off
CLAUSES: tuple[Clause, ...] = (
    Clause("C1", "pairs", "at position i the head takes the embedding of token i + 1 and the trunk's state of i",
           ("pairs-off-by-one",)),
    Clause("C2", "projection", "norms with the family's weights (w or 1 + w), then eh_proj with its inputs in order",
           ("norm-offset-missing", "norm-offset-added", "inputs-swapped")),
    Clause("C3", "hidden state", "the head takes the trunk's hidden state after or before its final norm, as the "
           "family does", ("wrong-hidden",)),
    Clause("C4", "positions", "positions increase by one; the first token's embedding is kept or zeroed, as the family "
           "does", ("position0",)),
    Clause("C5", "prefill", "the head runs over all positions of the prompt before the first draft", ("no-prefill",)),
    Clause("C6", "refresh", "at accepted positions the head's cache is refreshed with the trunk's true hidden states",
           ("stale-head-cache",)),
    Clause("C7", "next hidden", "depth k + 1 takes the hidden state of depth k: after or before the head's norm",
           ("wrong-next-hidden",)),
    Clause("C8", "rollback", "greedy text equals that of plain decoding: rejected positions leave nothing behind",
           ("other-text",)),
    Clause("C9", "shared tensors", "embedding and lm_head are the trunk's, or the head's own, as the family does",
           ("own-lm-head-lost",)),
    Clause("C10", "missing tensors", "a head tensor that is missing or unexpected is an error, never ignored",
           ("head-unset",)),
    Clause("C11", "several layers", "MTP layer k at depth k, each with its own cache",
           ("one-mtp-layer", "mtp-layers-permuted", "repeated-keys")),
    Clause("C12", "precision", "the head is computed in no lower precision than it is stored in",
           ("head-quantized", "head-2-bit")),
    Clause("C13", "sampling rule", "above temperature 0 a draft is accepted with probability min(1, p / q), or by a "
           "rule that accepts more", ("exact-match", "argmax-drafts")),
    Clause("C14", "metrics", "rounds, draft tokens and accepted ones by position are counted, and add up to the tokens",
           ("no-counts", "counts-off")),
    Clause("C15", "trunk's keys", "a head without keys of its own reads those of the trunk's last layer of each type "
           "that stores any, in its window", ("wrong-keys", "window-lost", "window-everywhere", "query-shifted")),
)
# fmt: on


def clause_of(fault: str) -> Clause | None:
    """Return the clause that a fault breaks; None for one that breaks none."""
    return next((clause for clause in CLAUSES if fault in clause.faults), None)


@dataclass(frozen=True)
class CanaryPrompt:
    """One prompt and its greedy text."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[int, ...]  # of the greedy text
    gaps: tuple[float, ...]  # nats between each token and the second likeliest


@dataclass(frozen=True)
class Range:
    """Valid values of a counter: some engines count the last round's drafts beyond the end of the text."""

    low: int = 0
    high: int = 0

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def distance(self, value: int) -> int:
        """Return how far a value is outside the range."""
        return max(0, self.low - value, value - self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class PromptCounts:
    """Expected counters of one or several prompts."""

    rounds: Range  # that drafted
    accepted: Range
    positions: tuple[Range, ...]  # accepted by position

    def __add__(self, other: "PromptCounts") -> "PromptCounts":
        positions = tuple(a + b for a, b in zip(self.positions, other.positions, strict=True))
        return PromptCounts(self.rounds + other.rounds, self.accepted + other.accepted, positions)

    def distance(self, counters: Counters) -> int:
        """Return by how many accepted drafts an engine's counters differ: by position if counted, else in total."""
        if counters.per_position:
            accepted = [*counters.per_position, *[0] * len(self.positions)]
            return sum(valid.distance(value) for valid, value in zip(self.positions, accepted, strict=False))
        return self.accepted.distance(counters.accepted or 0)


def prompt_counts(accepted: Sequence[int], k: int, tokens: int) -> PromptCounts:
    """Return the expected counts of one prompt with `tokens` new tokens.

    accepted: drafts accepted in each round, up to the one that reaches the last token. k: draft tokens per round.
    """
    *full, last = accepted
    remaining = tokens - 2 - sum(full) - len(full)  # drafts of the last round within the text
    ends = range(min(last, max(0, remaining)), last + 1)
    positions = []
    for index in range(k):
        base = sum(num > index for num in full)
        positions.append(Range(base + (ends[0] > index), base + (ends[-1] > index)))
    rounds = Range(len(full) + (remaining > 0), len(accepted))
    return PromptCounts(rounds, Range(sum(full) + ends[0], sum(full) + ends[-1]), tuple(positions))


@dataclass(frozen=True)
class RecordedReading:
    """One way to run the head, and the drafts accepted by it."""

    name: str  # a fault's, `right`, `rounded` or `engine:NAME`
    description: str
    rounds: Mapping[int, Sequence[Sequence[int]]]  # K -> [prompts][rounds], accepted drafts
    issues: tuple[str, ...] = ()  # public threads
    facts: tuple[str, ...] = ()  # of the family that it changes, for an engine's convention

    def as_record(self) -> dict[str, object]:
        """Return the JSON form."""
        digits = {str(k): ["".join(map(str, accepted)) for accepted in texts] for k, texts in self.rounds.items()}
        lists = {"issues": list(self.issues), "facts": list(self.facts)}
        return {"name": self.name, "says": self.description, **lists, "rounds": digits}


CountsByPass = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule of acceptance above temperature 0."""

    name: str
    description: str
    fault: str  # its name as a fault; "" for a rule that conforms to the clause
    issues: tuple[str, ...]
    # K -> how the last round of a text drafts (`whole` or `cut`) -> (offered, accepted), [passes][depths] each.
    counts: Mapping[int, Mapping[str, tuple[CountsByPass, CountsByPass]]]


@dataclass(frozen=True)
class SampledRecord:
    """What each rule accepts in texts sampled at a temperature."""

    temperature: float
    rules: tuple[AcceptanceRule, ...]


@dataclass(frozen=True)
class Canary:
    """A canary's record."""

    folder: str
    family: str
    max_tokens: int  # new tokens of each text
    tie: float  # nats between two tokens up to which rounding may choose either
    k_values: tuple[int, ...]  # the recorded K
    prompts: tuple[CanaryPrompt, ...]
    readings: tuple[RecordedReading, ...]
    sampled: SampledRecord

    @classmethod
    def read(cls, folder: Path) -> "Canary":
        """Read the record of a folder that `canary build` wrote. Raises ConfigError for any other."""
        path = folder / FILE if folder.is_dir() else folder
        try:
            return cls._from_json(str(folder), read_json(path))
        except OSError as error:
            message = f"{path}: no record of a canary ({error.strerror}); create one by `nextn canary build`"
            raise ConfigError(message) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not the record of a canary ({error!r}); build it again") from error

    @classmethod
    def _from_json(cls, folder: str, record: Any) -> "Canary":
        if record["format"] != FORMAT:
            raise ConfigError(
                f"{folder}: record of format {record['format']}; this version reads format {FORMAT}: build it again"
            )
        settings = record["settings"]
        prompts = tuple(
            CanaryPrompt(prompt["text"], tuple(prompt["ids"]), tuple(prompt["tokens"]), tuple(prompt["gaps"]))
            for prompt in record["prompts"]
        )
        readings = tuple(
            RecordedReading(
                entry["name"], entry["says"], _rounds(entry["rounds"]), tuple(entry["issues"]), tuple(entry["facts"])
            )
            for entry in record["readings"]
        )
        sizes = int(settings["max_tokens"]), float(settings["tie"]), tuple(settings["drafts"])
        return cls(folder, str(record["family"]), *sizes, prompts, readings, _sampled(record["sampled"]))

    @cached_property
    def right(self) -> RecordedReading:
        return self.readings[0]

    def counts(self, reading: RecordedReading, k: int, prompts: Sequence[int]) -> PromptCounts:
        """Return the expected counts over prompts, given by index. Raises ConfigError for a K that was not recorded."""
        if k not in reading.rounds:
            raise ConfigError(f"K = {k}; the canary holds counts for K = {', '.join(map(str, self.k_values))}")
        parts = [prompt_counts(reading.rounds[k][index], k, self.max_tokens) for index in prompts]
        return sum(parts[1:], parts[0])

    def length(self, reading: RecordedReading, k: int) -> float:
        """Return the AL over all prompts, with all drafts of their last rounds."""
        accepted = [num for rounds in reading.rounds[k] for num in rounds]
        return 1 + sum(accepted) / len(accepted)


def _rounds(record: Mapping[str, Sequence[str]]) -> dict[int, tuple[tuple[int, ...], ...]]:
    return {int(k): tuple(tuple(map(int, digits)) for digits in texts) for k, texts in record.items()}


def _sampled(record: JsonObject) -> SampledRecord:
    rules = [
        AcceptanceRule(
            rule["name"],
            rule["says"],
            rule["fault"],
            tuple(rule["issues"]),
            {int(k): {name: _pair(counts) for name, counts in ends.items()} for k, ends in rule["counts"].items()},
        )
        for rule in record["rules"]
    ]
    return SampledRecord(float(record["temperature"]), tuple(rules))


def _pair(counts: Mapping[str, Sequence[Sequence[float]]]) -> tuple[CountsByPass, CountsByPass]:
    offered, accepted = (tuple(map(tuple, counts[name])) for name in ("offered", "kept"))
    return offered, accepted
