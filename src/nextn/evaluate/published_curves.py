"""Published AL over K of well-known models, shown beside a measured curve with the conditions that differ. No torch.

A published curve is no target: prompts, sampling, precision and engine move AL, and two runs of one model differ by 0.1
to 0.3 at K >= 7. What is shown says which of them differ, and nothing is concluded from it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("published_curves.jsonl")


@dataclass(frozen=True)
class PublishedCurve:
    """AL at K = 1, 2, ... of one model in one mode, with the conditions and the source."""

    model: str
    family: str | None  # of `nextn.families`; None for a model whose drafts are of no MTP head
    draft: str  # MTP, or another kind of drafter
    precision: str | None  # of the checkpoint, where the source says so
    thinking: bool
    temperature: float
    top_p: float
    top_k: int
    prompts: str
    max_tokens: int
    engine: str
    lengths: tuple[float, ...]
    source: str
    run: str
    retrieved: str

    def is_of(self, name: str) -> bool:
        """Return whether a checkpoint's name or path is this model's, in any precision."""
        return _letters(self.model) in _letters(name)

    def text(self, measured: "MeasuredConditions", lengths: Sequence[float]) -> str:
        """Return one line: the published curve beside measured AL at K = 1, 2, ..., and what differs."""
        ks = range(min(len(lengths), len(self.lengths)))
        pairs = ", ".join(f"{lengths[k]:.2f} at K = {k + 1} (published {self.lengths[k]:.2f})" for k in ks)
        differences = "; ".join(self.differences(measured))
        return f"{measured.name}: AL {pairs}; {self.model}, {self.source}; differs: {differences}"

    def differences(self, measured: "MeasuredConditions") -> list[str]:
        """Return the conditions that are not alike, or not known to be, published against measured."""
        mode = {True: "on", False: "off", None: "the template's default"}
        pairs = [
            ("model", self.model, self.model if self.is_of(measured.source) else measured.source),
            ("draft", self.draft, "MTP"),
            ("precision", self.precision or "not stated", measured.precision),
            ("thinking", mode[self.thinking], mode[measured.thinking]),
            ("temperature", f"{self.temperature:g}", f"{measured.temperature:g}"),
            ("top_p, top_k", f"{self.top_p:g}, {self.top_k}", "1, 0"),
            ("prompts", self.prompts, measured.prompts),
            ("max_tokens", str(self.max_tokens), str(measured.max_tokens)),
            ("engine", self.engine, measured.engine),
        ]
        return [f"{name} {ours} (here {theirs})" for name, ours, theirs in pairs if ours != theirs]

    def as_record(self, measured: "MeasuredConditions") -> dict[str, object]:
        """Return the curve and the differences for JSON reports."""
        return asdict(self) | {"measured_as": measured.name, "differences": self.differences(measured)}


@dataclass(frozen=True)
class MeasuredConditions:
    """The conditions of a measured curve."""

    name: str  # rule and temperature, as tables show them
    source: str  # the checkpoint
    precision: str
    thinking: bool | None
    temperature: float
    prompts: str
    max_tokens: int
    engine: str = "nextn, teacher-forced"


@cache
def published_curves() -> tuple[PublishedCurve, ...]:
    """Return all curves of the data file."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    records = map(json.loads, lines)
    return tuple(PublishedCurve(**record | {"lengths": tuple(record["lengths"])}) for record in records)


def fitting_curve(source: str, family: str, *, thinking: bool | None, temperature: float) -> PublishedCurve | None:
    """Return the published curve that fits best: of this model, else of its family; of an MTP head, mode, temperature.

    None if there is none of either.
    """
    known = [curve for curve in published_curves() if curve.is_of(source) or curve.family == family]

    def fit(curve: PublishedCurve) -> tuple[object, ...]:
        is_exact = curve.is_of(source)
        return (
            is_exact,
            len(curve.model) if is_exact else 0,  # the longest name: a later version's contains the earlier one's
            curve.draft == "MTP",
            curve.thinking == (thinking is not False),  # published templates think by default
            -abs(curve.temperature - temperature),
        )

    return max(known, key=fit, default=None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
