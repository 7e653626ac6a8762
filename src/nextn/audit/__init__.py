"""`audit`: check a checkpoint's config, tensors, index, quantization and values.

Of a checkpoint on the hub, headers and a few small parts are read; of a local one, also all values of the head. A rule
is a function from an `Inventory` to findings; rules are independent of each other, and none imports torch.
"""

import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

from nextn.audit import (
    engines,
    files,
    precision,
    pruned,
    query_heads,
    separate,
    shapes,
    structure,
    trunk_layers,
    unchecked,
    values,
)
from nextn.audit.findings import SEVERITIES, Finding, Severity
from nextn.audit.tensor_values import WholeValues, is_local
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.foreign_names import with_plain_names
from nextn.checkpoint.head_inventory import Inventory
from nextn.errors import FamilyError
from nextn.families import Family, by_config, generic, rows

__all__ = ["IDS", "RULES", "AuditReport", "Finding", "Severity", "audit"]

Rule = Callable[[Inventory], Iterable[Finding]]
_MODULES = (structure, trunk_layers, pruned, files, shapes, query_heads, engines, precision, separate, values)
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
IDS: tuple[str, ...] = tuple(rule for module in _MODULES for rule in module.IDS)
HEAD_REQUIRED = "head-required"
_MAX_NAMES = 2000  # to match against every family's layout


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit."""

    path: str
    family: str
    declared: int  # number of modules that the config declares
    modules: tuple[int, ...]  # indices of the stored modules
    findings: tuple[Finding, ...] = field(default=())  # worst first
    # How much of the head's values was read: all float tensors of a local head, else samples; none without a head.
    values_read: Literal["all", "samples", "none"] = "none"
    bytes_read: int = 0  # of the values, where all were read
    unchecked: tuple[str, ...] = ()  # what no rule looked at
    title: str = ""  # published models of the family, in words

    @property
    def clean(self) -> bool:
        """Whether there is nothing to fix; notes are allowed."""
        return all(finding.severity == "note" for finding in self.findings)

    def without(self, rules: Collection[str]) -> "AuditReport":
        """Return the report without the findings of these rules."""
        return replace(self, findings=tuple(finding for finding in self.findings if finding.rule not in rules))

    def requiring_head(self) -> "AuditReport":
        """Return the report with an error if the checkpoint neither declares nor stores a head."""
        if self.declared or self.modules or any(finding.rule == HEAD_REQUIRED for finding in self.findings):
            return self
        missing = Finding(
            HEAD_REQUIRED, "error", self.path, "No MTP head is declared, and none is stored.", "A head.",
            f"nextn restore {shlex.quote(self.path)} --from BASE",
        )  # fmt: skip
        return replace(self, findings=(missing, *self.findings))

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"clean": self.clean}


def audit(
    checkpoint: Checkpoint, *, family: Family | None = None, sample: bool = False, trunk: Inventory | None = None
) -> AuditReport:
    """Run every rule on `checkpoint`.

    Args:
        checkpoint: What to check.
        family: Overrides the family of the config's model_type.
        sample: Read samples of the head's values only, as of a checkpoint on the hub, although its files are local.
        trunk: The trunk beside which the head of `checkpoint` is to run.

    Raises:
        FamilyError: No family is known for the model_type; the message names those that the tensor names match.
        CheckpointError: The config does not say where the head begins, or a file cannot be read.
    """
    family = family or _family(checkpoint)
    if family is None:
        return _without_family(checkpoint)
    named = list(structure.names_foreign(Inventory.of(checkpoint, family=family)))
    # What such names stand for is audited under the names that it should have: one cause, one finding.
    inventory = Inventory.of(with_plain_names(checkpoint) if named else checkpoint, family=family)
    whole = WholeValues.of(inventory) if inventory.modules and not sample and is_local(inventory) else None
    alike = pruned.comparable(inventory)
    bound: dict[Rule, Rule] = {
        structure.structure: lambda _: structure.structure(alike),
        shapes.shape: lambda _: shapes.shape(alike),
        values.values: partial(values.values, whole=whole),
        separate.separate: partial(separate.separate, trunk=trunk),
    }
    rules = [bound.get(rule, rule) for rule in RULES]
    findings = named + [finding for rule in rules for finding in rule(inventory)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return AuditReport(
        checkpoint.path,
        inventory.family.name,
        inventory.declared,
        inventory.modules,
        tuple(findings),
        values_read="none" if not inventory.modules else "samples" if whole is None else "all",
        bytes_read=0 if whole is None else whole.num_bytes,
        unchecked=tuple(unchecked.unchecked(inventory)),
        title=inventory.family.title,
    )


def _family(checkpoint: Checkpoint) -> Family | None:
    """Return the checkpoint's family; None for a model that was published without a head, and has none."""
    try:
        return by_config(checkpoint.config)
    except FamilyError as error:
        names = list(checkpoint.tensors)[-_MAX_NAMES:]
        matches = [row.name for row in rows() if any(_is_norm(row.canonical(name, 0)) for name in names)]
        if not matches and isinstance(checkpoint.config.get("model_type"), str):
            return None
        if not matches:
            raise
        raise FamilyError(
            f"{error}. Its tensor names match the layout of {', '.join(matches)}: try --family NAME."
        ) from error


def _without_family(checkpoint: Checkpoint) -> AuditReport:
    """Audit a model whose type nextn knows no head of: its files, and whether anything in them looks like one."""
    inventory = Inventory.of(checkpoint, family=replace(generic(checkpoint.config), default_count=0))
    names = [*inventory.stored.values(), *inventory.unrecognized]
    model_type = str(checkpoint.config["model_type"])[:80]
    found = [*structure.names_foreign(inventory), *files.index(inventory), *structure.draft_model(inventory)]
    if names:
        found.append(structure.foreign_head(model_type, names))
    elif inventory.draft_model is None:
        found.append(structure.withheld_head(inventory) or structure.no_head(model_type, checkpoint.config))
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    left = ("everything but names and files, as there is no head",)
    return AuditReport(checkpoint.path, model_type, 0, (), tuple(found), unchecked=left)


def _is_norm(canonical: str | None) -> bool:
    return canonical is not None and canonical.split(".")[1] in ("token_norm", "hidden_norm")
