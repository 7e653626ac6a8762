"""`audit`: config against tensors, index, quantisation and values of a checkpoint, from headers and a few small reads.

A rule is a function from an `Inventory` to findings; the rules know nothing of each other, and none imports torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from nextn.audit import values
from nextn.audit.finding import SEVERITIES, Finding, Severity
from nextn.checkpoint import Checkpoint
from nextn.inventory import Inventory

__all__ = ["RULES", "Finding", "Report", "Severity", "audit"]

Rule = Callable[[Inventory], Iterable[Finding]]
RULES: tuple[Rule, ...] = (*values.RULES,)


@dataclass(frozen=True)
class Report:
    """path, family, how many modules the config promises, indices of those stored, and what was found, worst first."""

    path: str
    family: str
    promised: int
    modules: tuple[int, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Whether there is nothing to mend: notes are allowed."""
        return all(finding.severity == "note" for finding in self.findings)

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"clean": self.clean}


def audit(checkpoint: Checkpoint) -> Report:
    """Run every rule over `checkpoint`. Raises FamilyError or CheckpointError where there is nothing to judge."""
    inventory = Inventory.of(checkpoint)
    found = [finding for rule in RULES for finding in rule(inventory)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(checkpoint.path, inventory.family.name, inventory.promised, inventory.modules, tuple(found))
