"""What a check of an engine showed: one of `nextn verify`, a clause of `canary check`, a cause that `diagnose` names.

Imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; the field names are keys of `--json`.

    Attributes:
        name: Of the check, the id of a clause of the contract, or a cause that was found.
        outcome: `passed`, `failed` or `inconclusive`.
        evidence: What was observed.
        advice: What to do; empty for nothing.
        figures: Numbers by name, for JSON.
        title: Of a clause.
        expected: Counts or texts, where they differ from those seen.
        seen: Counts or texts of the engine.
        fault: The fault that explains what was seen.
        issues: Public threads where the fault occurred.
        requirement: What the contract demands, where it is broken.

    Example:
        >>> nextn.CheckResult("greedy", "failed", "text 3 differs at token 12").outcome
        'failed'
    """

    name: str
    outcome: Outcome
    evidence: str
    advice: str = ""
    figures: dict[str, object] = field(default_factory=dict)
    title: str = ""
    expected: str = ""
    seen: str = ""
    fault: str = ""
    issues: tuple[str, ...] = ()
    requirement: str = ""

    @property
    def details(self) -> list[tuple[str, str]]:
        """(label, text) of the lines to show below the evidence."""
        seen = [("expected", self.expected), ("seen", self.seen)] if self.expected else []
        others = [("known in", ", ".join(self.issues)), ("contract", self.requirement), ("to do", self.advice)]
        return seen + [(label, text) for label, text in others if text]


class CheckReport(ABC):
    """The results of a run of checks."""

    @property
    @abstractmethod
    def checks(self) -> Sequence[CheckResult]: ...

    @property
    @abstractmethod
    def summary(self) -> str:
        """How it went, in one line."""

    @property
    def outcome(self) -> Outcome:
        """`failed` if a check failed; `inconclusive` if none passed either."""
        found = {check.outcome for check in self.checks}
        return "failed" if "failed" in found else "passed" if "passed" in found else "inconclusive"

    @property
    def failed(self) -> bool:
        """Whether there are findings."""
        return self.outcome == "failed"

    def to_dict(self) -> dict[str, object]:
        """Return what the JSON of all commands that check engines has."""
        checks = [vars(check) | {"issues": list(check.issues)} for check in self.checks]
        return {"outcome": self.outcome, "summary": self.summary, "checks": checks}
