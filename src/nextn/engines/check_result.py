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
    """The result of one check; the field names are keys of `--json`."""

    name: str  # of the check, the id of a clause, or a cause that was found
    outcome: Outcome
    evidence: str  # what was observed
    advice: str = ""  # what to do; "" for nothing
    figures: dict[str, object] = field(default_factory=dict)
    title: str = ""  # of a clause
    expected: str = ""  # counts or texts, where they differ from those seen
    seen: str = ""
    fault: str = ""  # the fault that explains what was seen
    issues: tuple[str, ...] = ()  # public threads where the fault occurred
    requirement: str = ""  # what the contract demands, where it is broken

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
        return "failed" if any(check.outcome == "failed" for check in self.checks) else "passed"

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"

    def as_record(self) -> dict[str, object]:
        """Return what the JSON documents of all commands have."""
        checks = [vars(check) | {"issues": list(check.issues)} for check in self.checks]
        return {"outcome": self.outcome, "summary": self.summary, "checks": checks}
