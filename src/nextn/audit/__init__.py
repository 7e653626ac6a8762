"""`audit`: check a checkpoint's config, tensors, index, quantization and values from headers and a few small reads.

A rule is a function from an `Inventory` to findings; rules are independent of each other, and none imports torch.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace

from nextn.audit import engines, files, precision, shapes, structure, values
from nextn.audit.findings import SEVERITIES, Finding, Severity
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.errors import FamilyError
from nextn.families import Family, by_config, rows

__all__ = ["IDS", "RULES", "AuditReport", "Finding", "Severity", "audit"]

Rule = Callable[[Inventory], Iterable[Finding]]
_MODULES = (structure, files, shapes, engines, precision, values)
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
IDS: tuple[str, ...] = tuple(rule for module in _MODULES for rule in module.IDS)
_MAX_NAMES = 2000  # to match against every family's layout


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit."""

    path: str
    family: str
    declared: int  # number of modules that the config declares
    modules: tuple[int, ...]  # indices of the stored modules
    findings: tuple[Finding, ...] = field(default=())  # worst first

    @property
    def clean(self) -> bool:
        """Whether there is nothing to fix; notes are allowed."""
        return all(finding.severity == "note" for finding in self.findings)

    def without(self, rules: Collection[str]) -> "AuditReport":
        """Return the report without the findings of these rules."""
        return replace(self, findings=tuple(finding for finding in self.findings if finding.rule not in rules))

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"clean": self.clean}


def audit(checkpoint: Checkpoint, *, family: Family | None = None) -> AuditReport:
    """Run every rule on `checkpoint`.

    Args:
        checkpoint: What to check.
        family: Overrides the family of the config's model_type.

    Raises:
        FamilyError: No family is known for the model_type; the message names those that the tensor names match.
        CheckpointError: The config does not say where the head begins.
    """
    inventory = Inventory.of(checkpoint, family=family or _family(checkpoint))
    findings = [finding for rule in RULES for finding in rule(inventory)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return AuditReport(checkpoint.path, inventory.family.name, inventory.declared, inventory.modules, tuple(findings))


def _family(checkpoint: Checkpoint) -> Family:
    try:
        return by_config(checkpoint.config)
    except FamilyError as error:
        names = list(checkpoint.tensors)[-_MAX_NAMES:]
        matches = [row.name for row in rows() if any(_is_norm(row.canonical(name, 0)) for name in names)]
        if not matches:
            raise
        raise FamilyError(
            f"{error}. Its tensor names match the layout of {', '.join(matches)}: try --family NAME."
        ) from error


def _is_norm(canonical: str | None) -> bool:
    return canonical is not None and canonical.split(".")[1] in ("token_norm", "hidden_norm")
