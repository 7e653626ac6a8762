"""Report experts that were pruned in the trunk or in the head alone (REAP and others): one cause, one finding."""

import shlex
from collections.abc import Iterator

from nextn.audit.findings import Finding, restore
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


def pruned_apart(inventory: Inventory) -> tuple[int, int] | None:
    """Return the numbers of experts of trunk and head where these differ; None where they agree or are not known."""
    head = uniform(head_experts(inventory))
    if head is None or inventory.family.own_block or len(inventory.layers) < inventory.num_layers:
        return None
    trunk = uniform(trunk_experts(inventory))
    # An incomplete head is another fault: what was pruned has as many rows in its router.
    return None if trunk is None or trunk == head or not _has_router(inventory, head) else (trunk, head)


def comparable(inventory: Inventory, apart: tuple[int, int] | None) -> Inventory:
    """Return the inventory for rules that compare the head's block with the trunk's layers."""
    return inventory if apart is None else with_experts(inventory, min(apart))


def experts_pruned(inventory: Inventory, apart: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Report a head whose block has another number of experts than the trunk's layers.

    apart: The result of `pruned_apart`, if it is known.
    """
    apart = apart or pruned_apart(inventory)
    if apart is None:
        return
    trunk, head = apart
    path = shlex.quote(inventory.checkpoint.path)
    declared = joined(f"{field} = {count}" for field, count in declared_experts(inventory).items())
    again = f"`nextn train RUN --from {path} --freeze-trunk --init-head` trains a head for the trunk as it is"
    keep = f"`nextn convert {path} OUT --keep-experts LIST` keeps {trunk} of the head's experts, and the router's rows"
    yield Finding(
        "experts-pruned", "error", f"{CONFIG}: {next(iter(declared_experts(inventory)), 'num_experts')}",
        f"The trunk's layers have {trunk} experts, the head's block {head}"
        f"{'; config.json has ' * bool(declared)}{declared}: "
        f"{'the trunk' if trunk < head else 'the head'} was pruned without the {'head' if trunk < head else 'trunk'}. "
        "Engines build both with one number, and fail to load or route to experts that are not there.",
        f"{trunk} experts in the head, too.",
        f"{keep}; or {again}." if trunk < head
        else f"`{restore(inventory, force=True)}`, from the model before it was pruned; or {again}.",
    )  # fmt: skip


def _has_router(inventory: Inventory, count: int) -> bool:
    return any(router_axis(canonical, inventory.info(canonical), count) is not None for canonical in inventory.stored)


RULES = (experts_pruned,)
