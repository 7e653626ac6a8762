"""Compare the biases with which routers choose experts, of trunk and head: tools that do not know them write zeros."""

from collections.abc import Iterator

from nextn.audit_rules.findings import Finding, restore
from nextn.audit_rules.tensor_values import is_local
from nextn.checkpoint.head_inventory import Inventory
from nextn.text_format import counted

IDS = ()  # `values-zero`, of `values`
_BIAS = "e_score_correction_bias"


def router_bias(inventory: Inventory) -> Iterator[Finding]:
    """Report biases that are 0 in all layers of the trunk and not in the head, or the reverse."""
    head = [name for canonical, name in inventory.stored.items() if canonical.endswith(_BIAS)]
    trunk = [info.name for layer in inventory.layers.values() for path, info in layer.items()
             if inventory.running_paths[path].endswith(_BIAS)]  # fmt: skip
    if not head or not trunk or not is_local(inventory):
        return
    zero = {name for name in (*head, *trunk) if not any(inventory.checkpoint.read_bytes(name))}
    if zero == {*trunk} or zero == {*head}:
        side, other = ("trunk", "head") if zero == {*trunk} else ("head", "trunk")
        yield Finding(
            "values-zero", "warning", min(zero),
            f"The biases of {counted(len(zero), 'router')} of the {side}, such as {min(zero)}, are zeros, unlike the "
            f"{other}'s: they choose the experts, and some tools write 0 for them.",
            "The biases of the model's release.",
            "Save the trunk again with a tool that keeps them." if side == "trunk" else
            f"Measure the acceptance; if it is low, run `{restore(inventory, force=True)}`.",
        )  # fmt: skip


RULES = (router_bias,)
