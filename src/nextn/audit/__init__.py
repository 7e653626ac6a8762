"""`audit`: config against tensors, index, quantisation and values of a checkpoint, from headers and a few small reads.

A rule is a function from an `Inventory` to findings; the rules know nothing of each other, and none imports torch.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace

from nextn.audit import engines, files, precision, shapes, structure, values
from nextn.audit.finding import SEVERITIES, Finding, Severity
from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.errors import FamilyError
from nextn.families import Family, by_config, rows

__all__ = ["IDS", "RULES", "Finding", "Report", "Severity", "audit"]

Rule = Callable[[Inventory], Iterable[Finding]]
_MODULES = (structure, files, shapes, engines, precision, values)
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
IDS: tuple[str, ...] = tuple(rule for module in _MODULES for rule in module.IDS)
_ENOUGH = 2000  # names that are tried against every family


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

    def without(self, rules: Collection[str]) -> "Report":
        """The report less what these rules found."""
        return replace(self, findings=tuple(each for each in self.findings if each.rule not in rules))

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"clean": self.clean}


def audit(checkpoint: Checkpoint, *, family: Family | None = None) -> Report:
    """Run every rule over `checkpoint`; `family` stands in for the config's.

    Raises FamilyError or CheckpointError where there is nothing to judge, with the families that the names fit.
    """
    inventory = Inventory.of(checkpoint, family=family or _family(checkpoint))
    found = [finding for rule in RULES for finding in rule(inventory)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(checkpoint.path, inventory.family.name, inventory.promised, inventory.modules, tuple(found))


def _family(checkpoint: Checkpoint) -> Family:
    try:
        return by_config(checkpoint.config)
    except FamilyError as error:
        names = list(checkpoint.tensors)[-_ENOUGH:]
        fit = [row.name for row in rows() if any(_is_norm(row.canonical(name, 0)) for name in names)]
        if not fit:
            raise
        raise FamilyError(f"{error}. Its tensors fit the layout of {', '.join(fit)}: try --family NAME.") from error


def _is_norm(canonical: str | None) -> bool:
    return canonical is not None and canonical.split(".")[1] in ("token_norm", "hidden_norm")
