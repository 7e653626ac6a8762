"""Where a head is, and in which layout: under the names of the model's own family, or of another one."""

import re
from dataclasses import replace
from functools import partial

from nextn.checkpoint.head_inventory import Inventory
from nextn.edit.compatibility import absent
from nextn.errors import CheckpointError, FamilyError
from nextn.family_table import Family, rows
from nextn.text_format import some

# Facts that determine what a head computes; layouts that agree on these hold the same values under other names.
_FACTS = ("concat", "hidden", "next_hidden", "norm_weight", "position0", "order", "own")


def find_head(inventory: Inventory, layout: Family, current: Family | None = None) -> Inventory:
    """Return the head in the layout of its names: `current`, else the model's own, else the one closest to `layout`.

    A head behind the place that the config implies, as where layers were removed from the trunk, is found there.
    Raises CheckpointError for a head that is partial in every layout, or absent.
    """
    families = (current,) if current else (inventory.family, *rows(), *elsewhere(inventory))
    first_layer = inventory.num_layers + min(inventory.modules, default=0)
    heads = [_read_as(family, inventory, first_layer) for family in families]
    complete = [head for head in heads if head and head.stored and not absent(head)]
    if complete:
        return min(complete, key=partial(_distance, inventory=inventory, layout=layout))
    if inventory.stored:
        raise CheckpointError(
            f"{inventory.checkpoint.path}: its head is partial, without {some(absent(inventory), 5)}. "
            f"`{inventory.restore_command()}` completes it."
        )
    inventory.refuse_draft_model()
    command = inventory.restore_command()
    raise CheckpointError(f"{inventory.checkpoint.path}: holds no head in any known layout. `{command}` adds one.")


def elsewhere(inventory: Inventory) -> list[Family]:
    """Return the family with the head's layers under another path and numbered from 0, if its names are there."""
    family, names = inventory.family, [*inventory.unrecognized, *inventory.stored.values()]
    block, heads = family.names["block"], {role for role in family.names if role not in ("block", *family.copies)}
    own = [path.removeprefix(block) for role, path in family.names.items() if role in heads and path.startswith(block)]
    found = [{match[1] for name in names if (match := re.fullmatch(rf"(.+)\.\d+{re.escape(path)}\.weight", name))}
             for path in own]  # fmt: skip
    roots = set.intersection(*found) if found and "{layer}" in block else set()
    return [replace(family, wrappers={}, names={role: path.replace(block, f"{root}.{{module}}")
                                                for role, path in family.names.items()}) for root in roots]  # fmt: skip


def _distance(head: Inventory, inventory: Inventory, layout: Family) -> tuple[int, bool, int, int]:
    """Rank layouts: by block tensors named as in the trunk's layers; then the model's own layout, fewest differences
    from `layout`, and most known names inside the block.
    """
    paths = {path for layer in inventory.layers.values() for path in layer}
    stem = inventory.family.names["block"].format(module=0, layer=inventory.num_layers)
    matches, known = 0, 0
    for canonical, name in head.stored.items():
        if rest := canonical.partition(".block.")[2]:
            path = inventory.family.published(f"0.block.{rest}", inventory.num_layers).removeprefix(f"{stem}.")
            matches += path in paths
            known += not name.endswith(rest)
    return (
        -matches,
        head.family.name != inventory.family.name,
        len(layout_differences(head.family, layout, len(head.modules))),
        -known,
    )


def _read_as(family: Family, inventory: Inventory, first_layer: int) -> Inventory | None:
    """Read the tensors that are not the trunk's as those of `family`; None if it cannot have this many modules.

    first_layer: Of the head, in layouts that count its layers after the trunk's.
    """
    of_layers = (info.name for layer in inventory.layers.values() for info in layer.values())
    others = {*of_layers, *inventory.shared.values()}
    others |= set() if inventory.draft_model is None else inventory.draft_model.names
    rest = {name: info for name, info in inventory.checkpoint.tensors.items() if name not in others}
    try:
        config = family.with_count({"num_hidden_layers": first_layer}, inventory.declared)
        head = Inventory.of(replace(inventory.checkpoint, tensors=rest, config=config), family=family)
    except FamilyError:
        return None
    return replace(head, checkpoint=inventory.checkpoint, shared=inventory.shared, layers=inventory.layers)


def layout_differences(old: Family, new: Family, count: int) -> list[str]:
    facts = ((fact, getattr(old, fact), getattr(new, fact)) for fact in _FACTS)
    differences = [f"{fact} is {a!r} against {b!r}" for fact, a, b in facts if a != b]
    old_roles, new_roles = ({*family.names} - {*family.copies} for family in (old, new))
    if old_roles != new_roles:
        differences.append(f"only one of them has {', '.join(sorted(old_roles ^ new_roles))}")
    if new.max_modules is not None and count > new.max_modules:
        differences.append(f"{count} modules, at most {new.max_modules} in {new.name}")
    return differences
