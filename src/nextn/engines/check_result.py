"""What a check of an engine showed: one check of `nextn verify`, or one clause of the contract in `nextn canary check`.

Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: Of the check, or the id of a clause of the contract.
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

    def as_record(self) -> dict[str, object]:
        """Return the JSON form of a check of `nextn verify`."""
        return {name: getattr(self, name) for name in ("name", "outcome", "evidence", "advice", "figures")}


class CheckReport(Protocol):
    """The results of a run of checks."""

    @property
    def checks(self) -> Sequence[CheckResult]: ...

    @property
    def failed(self) -> bool: ...

    @property
    def headline(self) -> str:
        """What was checked and how it went, in one line."""
