"""A head in a checkpoint of its own: opening it beside a trunk, and whether it was trained on that trunk. No torch."""

from dataclasses import replace
from pathlib import Path

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trained_with, trunk_fingerprint
from nextn.checkpoint.snapshot import on_disk
from nextn.errors import CheckpointError, FamilyError
from nextn.families import Family, by_name, find, generic

GENERIC = by_name("generic").name


def open_head(
    source: str | Path, trunk: Inventory, *, cache_dir: str | Path | None = None, offline: bool = False
) -> Inventory:
    """Return the inventory of a head's checkpoint, with local files, in the layout that it has beside this trunk.

    Args:
        source: A folder, a .safetensors file or a hub id. Without a config.json it is read as the trunk's own family.
        trunk: Of the trunk's checkpoint.
        cache_dir: Of a hub id.
        offline: Of a hub id: use the cache only.

    Raises:
        CheckpointError: It holds no head, or one for another number of trunk layers.
        FamilyError: It is the head of another family than the trunk.
    """
    checkpoint = Checkpoint.open(source, cache_dir=cache_dir, offline=offline)
    checkpoint = checkpoint if checkpoint.config else replace(checkpoint, config=trunk.checkpoint.config)
    head = Inventory.of(checkpoint, family=_family(checkpoint, trunk))
    if not head.own:
        raise CheckpointError(f"{checkpoint.path}: holds no head of family {head.family.name}; `nextn train` makes one")
    if head.num_layers != trunk.num_layers:
        raise CheckpointError(
            f"{checkpoint.path}: its head is for a trunk of {head.num_layers} layers, {trunk.checkpoint.path} has "
            f"{trunk.num_layers}; give the trunk that the head was trained on"
        )
    head = on_disk(head, cache_dir=cache_dir, offline=offline)
    return replace(head, declared=head.declared or len(head.modules))


def is_foreign(head: Inventory, trunk: Inventory) -> bool:
    """Whether the head's record names another trunk than this one."""
    return trained_with(head) not in ("", trunk_fingerprint(trunk))


def trunk_family(checkpoint: Checkpoint) -> Family:
    """Return the family of a trunk's checkpoint; for a model without one, the generic layout."""
    return find(checkpoint.config) or generic(checkpoint.config)


def _family(checkpoint: Checkpoint, trunk: Inventory) -> Family:
    family = find(checkpoint.config) or trunk.family
    if family.layer_model:
        return family
    if family.name == GENERIC:  # its block depends on the trunk's config
        return generic(trunk.checkpoint.config)
    if family.name != trunk.family.name:
        raise FamilyError(
            f"{checkpoint.path}: a head of family {family.name}, {trunk.checkpoint.path} is of {trunk.family.name}; "
            "give a head that was trained on this trunk"
        )
    return family
