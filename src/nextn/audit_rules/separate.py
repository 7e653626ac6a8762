"""Report what is wrong with a head in a checkpoint of its own: in itself, and beside its trunk."""

from collections.abc import Iterator

from nextn.audit_rules.findings import Finding
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import misfits

IDS = ("draft-biases", "draft-trunk", "draft-sizes", "draft-quantized")


def separate(inventory: Inventory, *, trunk: Inventory | None = None) -> Iterator[Finding]:
    """Report each misfit; one that only some of the engines have is a warning."""
    if inventory.layers:
        return  # not a head alone
    for each in misfits(inventory, trunk):
        severity = "error" if "sglang" in each.engines else "warning"
        yield Finding(each.rule, severity, each.place, each.found, each.valid, each.fix)  # type: ignore[arg-type]


RULES = (separate,)
