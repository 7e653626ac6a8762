"""Checkpoints without their head: lost, published without one, or with a draft model of another kind instead."""

import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from nextn.audit_rules.findings import Finding, restore
from nextn.audit_rules.head_structure import HeadStructure, count_field, own_names
from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.draft_models import stored as stored_draft_model
from nextn.checkpoint.head_inventory import HEADLIKE, Inventory
from nextn.checkpoint.trained_heads import SIDE_HEAD, side_head
from nextn.errors import CheckpointError
from nextn.family_table import beside, declared_fields, withheld
from nextn.text_format import counted, joined, some

IDS = ("head-absent", "head-none", "draft-model-stored", "draft-model-absent", "head-withheld")
_MAX_FILES = 100  # of subfolders to look at


def draft_model(inventory: Inventory) -> Iterator[Finding]:
    """Report a draft model of another kind inside the checkpoint, or one that config.json alone declares."""
    other = inventory.draft_model
    if other is None:
        return
    if other.names:
        yield Finding(
            "draft-model-stored", "note", min(other.names), f"{other.found}, and no MTP head. {other.kind.run_by}.",
            "As it is: not every tensor under mtp. is of an MTP head.",
            "Nothing needs to be done: nextn keeps it in every edit, and neither reads, trains nor replaces it.",
        )  # fmt: skip
    else:
        yield Finding(
            "draft-model-absent", "warning", f"{CONFIG}: {other.fields}", f"{other.found[0].upper()}{other.found[1:]}.",
            f"Its tensors, as the published model stores them: {other.kind.run_by}.",
            "Take the files that hold them from the published model, and list them with `nextn convert --reindex`.",
        )  # fmt: skip


def no_head(model_type: str, config: Mapping[str, object] = {}) -> Finding:
    """Return the note on a model that was published without a head in its own files."""
    make = "name a head with --head, or make one: `nextn train RUN --from MODEL --freeze-trunk --init-head`"
    own = beside(config)
    return Finding(
        "head-none", "note", f"{CONFIG}: model_type", f"{model_type} has no head, and no tensor looks like one.",
        "As it is: it decodes without drafts.",
        f"To draft, {make if own is None else f'give its own with --head: {joined(own.models)}'}.",
    )  # fmt: skip


def withheld_head(inventory: Inventory) -> Finding | None:
    """Return the note on a model whose config may declare a head, and whose vendor published none."""
    models, config = withheld(inventory.checkpoint.config), inventory.checkpoint.config
    fields = declared_fields(config)
    if models is None and not fields:
        return None
    declares = f"has {joined(fields)}" if fields else "declares no head"
    unknown = "no tensor of a head is stored, and nextn knows none that was published with this model_type"
    return Finding(
        "head-withheld", "note", f"{CONFIG}: model_type",
        f"{CONFIG} {declares}, and {models.sentence if models else unknown}.",
        "As it is: it decodes without drafts, and every engine must be started without MTP.",
        "To draft, make a head: `nextn train RUN --from MODEL --freeze-trunk --init-head`; or serve a draft model that "
        "others trained for it, such as an EAGLE-3 one.",
    )  # fmt: skip


def foreign_head(model_type: str, names: list[str]) -> Finding:
    """Return the finding on tensors like a head's in a model whose type nextn knows no head of."""
    return Finding(
        "names-unknown", "warning", names[0],
        f"{counted(len(names), 'tensor')} like a head's, such as {some(names)}, and nextn knows no head of "
        f"{model_type}: they were not checked.",
        "A model_type whose head nextn knows.", "If it is stored as a known family's, give that with --family.",
    )  # fmt: skip


def absent(head: HeadStructure) -> Iterator[Finding]:
    """Report a config that declares MTP layers while no tensor of them is stored."""
    inventory, family = head.inventory, head.inventory.family
    # A decoder layer that the config does not count is the head's only where those follow the trunk's.
    appended = "{layer}" in family.names["block"]
    unknown = [name for name in inventory.unrecognized if appended or family.trunk_layer(name) is None]
    if not inventory.declared or head.roles or head.misplaced or unknown:
        return
    if withheld(inventory.checkpoint.config) and (note := withheld_head(inventory)):
        yield note
        return
    named = bool(family.counted_in(inventory.checkpoint.config))
    claim = f"{CONFIG} declares {counted(inventory.declared, 'MTP layer')}"
    if not named:
        claim = f"{CONFIG} has no {family.count_fields[0]}; its default in {family.title} is {inventory.declared}"
    found, fix = _in_index(inventory) or _beside_the_model(inventory) or _in_subfolder(inventory) or (
        ", and no tensor of it is stored.", restore(inventory)
    )  # fmt: skip
    yield Finding(
        "head-absent", "error" if named or _listed(inventory) else "warning", count_field(inventory), claim + found,
        f"Tensors such as {some(own_names(inventory))}, or {family.count_fields[0]} = 0.", fix,
    )  # fmt: skip


def _listed(inventory: Inventory) -> dict[str, str]:
    """Return the head's tensors in the index, with their files."""
    index = inventory.checkpoint.index or {}
    return {name: file for name, file in index.items() if inventory.family.canonical(name, inventory.num_layers)}


def _in_index(inventory: Inventory) -> tuple[str, str] | None:
    """What is found, and the fix, for a head of which the index has the names."""
    if not (listed := _listed(inventory)):
        return None
    files, checkpoint = sorted({*listed.values()}), inventory.checkpoint
    absent = "is absent" if len(files) == 1 else "are absent"
    lack = "does not hold them" if {*files} & {*checkpoint.files} else absent
    lost = {*(checkpoint.index or ())} - {*checkpoint.tensors, *listed}
    return (
        f", and the index puts {counted(len(listed), 'tensor')} of it in {some(files)}, which {lack}.",
        f"Download {some(files)} again{'.' if lost else f', or run `{restore(inventory)}`.'}",
    )


def _beside_the_model(inventory: Inventory) -> tuple[str, str] | None:
    """The same for a head that Unsloth trained."""
    checkpoint = inventory.checkpoint
    if SIDE_HEAD not in checkpoint.sources:
        return None
    file, before = side_head(checkpoint.sources[SIDE_HEAD], checkpoint.path, checkpoint.ref)
    command = inventory.restore_command(base=file)
    return (
        f", and no tensor of it is stored; {SIDE_HEAD} beside the model, as of Unsloth, holds one.",
        f"If it was trained with this trunk, {before}`{command}`; else `{restore(inventory)}`.",
    )


def _in_subfolder(inventory: Inventory) -> tuple[str, str] | None:
    """The same for a folder in the checkpoint with tensors like a head's."""
    if (folder := _subfolder_with_head(inventory)) is None:
        return None
    path, name = folder
    command = f"{inventory.restore_command(base=shlex.quote(str(path)))} --family {inventory.family.name}"
    known = inventory.family.canonical(name, inventory.num_layers)
    renamed = "" if known else f"rename them there to names such as {own_names(inventory)[0]}, then "
    return (
        f", and no tensor of it is stored; its subfolder {path.name} has tensors like a head's ({name}).",
        f"If they are the head trained with this trunk, {renamed}`{command}`; else `{restore(inventory)}`.",
    )


def _subfolder_with_head(inventory: Inventory) -> tuple[Path, str] | None:
    """Return a folder in a local checkpoint with tensors like a head's, as trainers write one apart, and one of them.

    Those under the names of this family come first.
    """
    path = Path(inventory.checkpoint.path)
    others: list[tuple[Path, str]] = []
    for folder in sorted({file.parent for file in islice(path.glob("*/*.safetensors"), _MAX_FILES)}):
        try:
            checkpoint = Checkpoint.open(folder)
        except CheckpointError:
            continue
        if stored_draft_model(checkpoint.tensors, checkpoint.config) is not None:  # a draft model of another kind
            continue
        names = sorted(checkpoint.tensors)
        if own := [name for name in names if inventory.family.canonical(name, inventory.num_layers)]:
            return folder, own[0]
        others += [(folder, name) for name in names if HEADLIKE.search(name)][:1]
    return next(iter(others), None)


RULES = (draft_model,)
