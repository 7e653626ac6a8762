"""Report experts that were pruned in the trunk or in the head alone (REAP and others): one cause, one finding."""

import shlex
from collections.abc import Iterator

from nextn.audit_rules.findings import Finding, restore
from nextn.checkpoint.checkpoint import CONFIG
from nextn.checkpoint.expert_counts import (
    declared_experts,
    head_experts,
    router_axis,
    trunk_experts,
    uniform,
    with_experts,
)
from nextn.checkpoint.head_inventory import Inventory
from nextn.text_format import joined

IDS = ("experts-pruned",)


def comparable(inventory: Inventory) -> Inventory:
    """Return the inventory for rules that compare the head's block with the trunk's layers: with as many experts."""
    counts = _pruned_apart(inventory)
    return inventory if counts is None else with_experts(inventory, min(counts))


def experts_pruned(inventory: Inventory) -> Iterator[Finding]:
    """Report a head whose block has another number of experts than the trunk's layers."""
    counts = _pruned_apart(inventory)
    if counts is None:
        return
    trunk, head = counts
    one, other = ("trunk", "head") if trunk < head else ("head", "trunk")
    path = shlex.quote(inventory.checkpoint.path)
    fields = declared_experts(inventory.checkpoint.config)
    declared = f"; config.json has {joined(f'{field} = {count}' for field, count in fields.items())}" if fields else ""
    again = f"`nextn train RUN --from {path} --freeze-trunk --init-head` trains a head for the trunk as it is"
    keep = f"`nextn convert {path} OUT --keep-experts LIST` keeps {trunk} of the head's experts, and the router's rows"
    yield Finding(
        "experts-pruned", "error", f"{CONFIG}: {next(iter(fields), 'num_experts')}",
        f"The trunk's layers have {trunk} experts, the head's block {head}{declared}: the {one} was pruned without the "
        f"{other}. Engines build both with one number, and fail to load or route to experts that are not there.",
        f"{trunk} experts in the head, too.",
        f"{keep}; or {again}." if one == "trunk"
        else f"`{restore(inventory, force=True)}`, from the model before it was pruned; or {again}.",
    )  # fmt: skip


def _pruned_apart(inventory: Inventory) -> tuple[int, int] | None:
    """Return the numbers of experts of trunk and head where these differ; None where they agree or are not known."""
    head = uniform(head_experts(inventory))
    if head is None or inventory.family.own_block or len(inventory.layers) < inventory.num_layers:
        return None
    trunk = uniform(trunk_experts(inventory))
    # An incomplete head is another fault: what was pruned has as many rows in its router.
    routers = [router_axis(each, inventory.info(each), head) for each in inventory.stored]
    return None if trunk in (None, head) or set(routers) == {None} else (trunk, head)


RULES = (experts_pruned,)
