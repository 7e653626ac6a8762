"""Convert a head between layouts of the same computation, and between files; extract it into one file.

Bytes, dtypes and scales stay as they are, unless norm weights are to be shifted by one.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from nextn.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint, as_checkpoint
from nextn.checkpoint.expert_forms import expert_path
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, staged_head, trained_length, trained_with, trunk_fingerprint
from nextn.checkpoint.quantization import is_mlx
from nextn.edit.compatibility import ABOUT_HEAD, SIZES, quantized_without
from nextn.edit.execute import carry_out
from nextn.edit.expert_pieces import in_form, prune, superseded, trunk_in_form, with_num_experts
from nextn.edit.find_head import find_head, layout_differences
from nextn.edit.links import refuse_links
from nextn.edit.norm_shift import NormWeightShift, shifted, stores_less_one
from nextn.edit.plan import (
    EditPlan,
    Files,
    Piece,
    Progress,
    changes,
    divide,
    index_document,
    quiet,
    visible,
    with_config,
)
from nextn.edit.reindex import opened
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import REPEATED_FIELD, ExpertForm, Family, by_config, by_name
from nextn.family_table.config_fields import text_config
from nextn.text_format import counted, some

Form = Literal["shards", "side-file", "single-file"]
SIDE_FILE = "mtp.safetensors"
_KEPT = ("model_type", "quantization_config", "tie_word_embeddings", "torch_dtype", "dtype")  # besides SIZES

_SHIFTS = {("1+w", "w"): "add-1", ("w", "1+w"): "subtract-1"}


def convert(
    source: "str | Path | Checkpoint",
    out: str | Path,
    *,
    to: str | None = None,
    now: str | None = None,
    form: Form | None = None,
    norm_weight: str | None = None,
    experts: ExpertForm | None = None,
    trunk_experts: ExpertForm | None = None,
    keep_experts: Sequence[int] | None = None,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Write `source` into the new folder `out`, with its head under the names of the family `to`.

    Weight files without tensors of the head are hard-linked.

    Args:
        source: A folder, .safetensors file, hub id or opened checkpoint.
        out: A new folder.
        to: The target family. By default the model's own: a head under another layout's names gets its own back.
        now: The layout that the head has now, where its names are ambiguous.
        form: The head in an indexed file of its own (shards, the default), in an mtp.safetensors that the index does
            not list, or everything in one file.
        norm_weight: Shift the head's norm weights, in fp32, rounded to their dtype: add-1, subtract-1, add-2 or
            subtract-2; after a colon the names of those to shift, joined by commas. To subtract must not lose bits.
        experts: The form of the head's experts: split, fused or stacked. By default as they are, or as the family `to`
            stores them. Experts that are stored in several forms need it: those in the others are left out.
        trunk_experts: The form of the trunk's experts; by default as they are.
        keep_experts: Numbers of the head's experts to keep, in the new order, with the router's rows: as many as the
            layers of a pruned trunk have.
        follow_links: See `restore`.
        dry_run: Write nothing.
        on_bytes: Called with the bytes written so far and in all.

    Returns:
        What was, or with `dry_run` would be, written.

    Raises:
        CheckpointError: Norm weights less one lose bits, or the head is partial.
        FamilyError: The two layouts do not compute the same; the message names the differences.

    Example:
        >>> plan = nextn.convert("tiny", "one-file", form="single-file")
        >>> sorted(plan.files.weights)
        ['model.safetensors']
    """
    checkpoint, repairs = opened(source, lambda each: by_config(each.config), follow_links=follow_links)
    inventory = Inventory.of(checkpoint)
    layout = by_name(to) if to else inventory.family
    head = find_head(inventory, layout, by_name(now) if now else None)
    if layout.name == inventory.family.name != head.family.name:  # renamed, by a tool that may have shifted them or not
        stored = replace(head.family, norm_weight="1+w" if stores_less_one(head) else "w")
        head = replace(head, family=stored)
        norm_weight = norm_weight or _SHIFTS.get((stored.norm_weight, layout.norm_weight))
    _refuse_different(head.family, layout, norm_weight, len(head.modules))
    head, left = _one_form(head, experts)
    target = experts or (head.family.experts if layout.name == head.family.name else layout.experts)
    fresh, notes = _renamed(inventory, head, replace(layout, experts=target), keep_experts)
    trunk, replaced, twice = trunk_in_form(inventory, trunk_experts)
    if norm_weight is not None:
        fresh, note = shifted(fresh, head, NormWeightShift.parse(norm_weight))
        notes.append(note)
    elif not (left or form or replaced or keep_experts or checkpoint.stored_names) and all(
        name == piece.name for name, piece in fresh.items()
    ):
        raise ConfigError(f"{checkpoint.path}: its head already has the names of {layout.name}; nothing to convert")
    for names, one in ((left, experts), (twice, trunk_experts)):
        if names:
            notes.append(f"left out: {counted(len(names), 'tensor')} in another form than {one}: {some(names)}")
    plan = _plan(inventory, head, layout, fresh, form, trunk, {*left, *replaced}, num_experts=len(keep_experts or ()))
    plan = replace(plan, notes=(*repairs, *notes, *_differing_duplicates(head)))
    seal = partial(_seal, inventory=inventory, head=head, layout=layout)
    return carry_out(plan, out, follow_links=follow_links, dry_run=dry_run, seal=seal, on_bytes=on_bytes)


def _differing_duplicates(head: Inventory) -> list[str]:
    """Return a note of tensors that are left out for others of the same meaning, and have other values."""
    different = [
        name for canonical, names in head.duplicates.items() if (kept := head.stored.get(canonical)) for name in names
        if not head.checkpoint.same(*map(head.checkpoint.info, (name, kept)))
    ]  # fmt: skip
    return [f"left out: {some(different)}, with other values than what is kept"] if different else []


def _refuse_different(old: Family, new: Family, norm_weight: str | None, count: int) -> None:
    """Raise FamilyError for layouts that compute differently; the right shift makes up for the norm convention."""
    shift = _SHIFTS.get((old.norm_weight, new.norm_weight))
    shifted = replace(old, norm_weight=new.norm_weight) if shift is not None and norm_weight == shift else old
    if differences := layout_differences(shifted, new, count):
        advice = f" Use --norm-weights {shift}." if shift is not None and norm_weight is None else ""
        raise FamilyError(f"{old.name} and {new.name} do not compute the same: {'; '.join(differences)}.{advice}")


def _one_form(head: Inventory, form: ExpertForm | None) -> tuple[Inventory, list[str]]:
    """Return the head with each expert of a module in one form, and the names of those stored in others, too.

    Raises CheckpointError for a module with experts in several forms, of which `form` names none.
    """
    found = {canonical: path.form for canonical in head.stored if (path := expert_path(canonical)) is not None}
    left: set[str] = set()
    for module in head.modules:
        own = {canonical: head.info(canonical) for canonical in head.of_module(module) if canonical in found}
        forms = sorted({found[canonical] for canonical in own})
        if len(forms) > 1 and form not in forms:
            raise CheckpointError(
                f"{head.checkpoint.path}: the experts of MTP layer {module} are stored {' and '.join(forms)}. Say "
                f"which to keep: {' or '.join(f'--experts {each}' for each in forms)}."
            )
        left |= superseded(own, form, head.checkpoint.path) if form else set()
    stored = {canonical: name for canonical, name in head.stored.items() if canonical not in left}
    return replace(head, stored=stored), sorted(head.spellings(left))


def _renamed(
    inventory: Inventory, head: Inventory, layout: Family, keep_experts: Sequence[int] | None = None
) -> tuple[dict[str, Piece], list[str]]:
    """Return name in `layout` -> piece, experts in its form, and notes of the copies that it does not have."""
    wrapper = inventory.wrapper if inventory.wrapper in layout.wrappers else ""
    routers = dict[str, Piece]()
    if keep_experts is not None:
        inventory, head, routers = prune(inventory, head, keep_experts)
    placed = {canonical: inventory.checkpoint.info(name)
              for canonical, name in head.stored.items() if head.role(canonical) in layout.names}  # fmt: skip
    left = sorted(head.stored.keys() - placed.keys())
    pieces = in_form(placed, layout.experts, inventory.checkpoint) | routers
    prefix = _own_prefix(head) if layout.name == head.family.name and is_mlx(inventory.checkpoint) else ""
    named = {prefix + layout.published(canonical, inventory.num_layers, wrapper=wrapper): piece
             for canonical, piece in pieces.items()}  # fmt: skip
    return named, [f"left out: {some([head.stored[each]])}, a copy that {layout.name} does not store" for each in left]


def _own_prefix(head: Inventory) -> str:
    """Return what all names of the head have before the published ones; MLX's engines look for them there."""
    prefixes = {name.removesuffix(head.published(canonical)) for canonical, name in head.stored.items()}
    return next(iter(prefixes)) if len(prefixes) == 1 else ""


def _plan(
    inventory: Inventory,
    head: Inventory,
    layout: Family,
    fresh: dict[str, Piece],
    form: Form | None,
    trunk: Mapping[str, Piece],
    replaced: Collection[str],
    *,
    num_experts: int = 0,
) -> EditPlan:
    gone = {*head.spellings(head.own), *head.copies.values(), *replaced}
    checkpoint = visible(inventory.checkpoint, {inventory.checkpoint.tensors[name].file for name in gone})
    files = divide(checkpoint, gone, fresh, beside=trunk)
    if form == "single-file":
        kept = {name: Piece(checkpoint, name) for name in checkpoint.tensors if name not in gone}
        files = Files(
            {SINGLE: {**kept, **trunk, **fresh}},
            None,
            dropped=tuple({info.file for info in checkpoint.tensors.values()}),
            gone=files.gone,
        )
    elif form == "side-file":
        files = _side_file(files, fresh)
    documents = _configs(replace(inventory, checkpoint=checkpoint), head, layout, fresh, num_experts=num_experts)
    documents |= index_document(files, checkpoint)
    note = changes(checkpoint, documents)
    return EditPlan(checkpoint, Path(), layout.name, files, documents, changes=note)


def _side_file(files: Files, fresh: Mapping[str, Piece]) -> Files:
    """Move the head to a file that the index does not list."""
    weights = {file: pieces for file, pieces in files.weights.items() if pieces is not fresh}
    index = {name: file for name, file in (files.index or {}).items() if name not in fresh}
    return replace(files, weights={**weights, SIDE_FILE: fresh}, index=index)


def _configs(
    inventory: Inventory, head: Inventory, layout: Family, fresh: Mapping[str, Piece], *, num_experts: int = 0
) -> dict[str, Mapping[str, object]]:
    """Edit config.json; where names change, list the head's unquantized modules in the quantization config."""
    renamed = any(name != piece.name for name, piece in fresh.items())
    edited = quantized_without(inventory, head, fresh) if renamed else {}
    config: Mapping[str, object] = edited.pop(CONFIG, inventory.checkpoint.config)
    count = len(head.modules)
    if not inventory.layers and layout.name != inventory.family.name:  # a head alone: only the config identifies it
        config = layout.with_count({**config, "model_type": layout.model_types[0]}, count)
    elif inventory.family.num_modules(config) != count:
        config = inventory.family.with_count(config, count)
    if num_experts:
        config = with_num_experts(config, num_experts)
    return {**edited, **with_config(inventory.checkpoint, config)}


def _seal(stage: Path, inventory: Inventory, head: Inventory, layout: Family) -> None:
    config = layout.with_count({"num_hidden_layers": inventory.num_layers}, len(head.modules))
    Provenance(
        staged_head(stage, config, layout), trained_with(inventory), trunk_fingerprint(inventory),
        inventory.checkpoint.path, inventory.checkpoint.revision, "convert", trained_length=trained_length(inventory),
    ).write(stage)  # fmt: skip


def extract(
    source: "str | Path | Checkpoint",
    out: str | Path,
    *,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Write the head of `source` into the file `out`, with a small config.json next to it.

    It can be a base for `restore`. Copies of the trunk's embedding and lm_head are left out; the header records where
    the head came from.

    Args:
        source: A folder, .safetensors file, hub id or opened checkpoint.
        out: A new .safetensors file.
        follow_links: See `restore`.
        dry_run: Write nothing.
        on_bytes: Called with the bytes written so far and in all.

    Returns:
        What was, or with `dry_run` would be, written.

    Raises:
        CheckpointError: There is no complete head, or `out` exists or is no .safetensors file.

    Example:
        >>> plan = nextn.extract("tiny", "head.safetensors")
        >>> nextn.audit("tiny", head="head.safetensors").modules
        (0,)
    """
    path = Path(out).expanduser().absolute()
    if path.suffix != ".safetensors" or os.path.lexists(path):
        raise ConfigError(f"{out}: must be the name of a .safetensors file that does not exist yet")
    inventory = Inventory.of(as_checkpoint(source))
    if inventory.family.trunk_kv:
        raise CheckpointError(f"{inventory.checkpoint.path}: a head alone already; copy its folder")
    refuse_links(inventory.checkpoint, follow=follow_links)
    head = find_head(inventory, inventory.family)
    _refuse_different(head.family, inventory.family, None, len(head.modules))
    fresh, _ = _renamed(inventory, head, inventory.family)
    fresh = {name: piece for name, piece in fresh.items() if piece.name not in head.copies.values()}
    config = small_config(inventory, len(head.modules))
    refuse_config = partial(_refuse_foreign_config, path.with_name(CONFIG), config)
    refuse_config()
    checkpoint = inventory.checkpoint
    metadata = {"format": "pt", "family": inventory.family.name, "source": checkpoint.path,
                "revision": checkpoint.revision or "", "trained_with": trained_with(inventory),
                "trained_length": str(trained_length(inventory) or ""),
                REPEATED_FIELD: inventory.family.repeated_kv}  # fmt: skip
    files, documents = Files({path.name: fresh}, None), {CONFIG: config}
    plan = EditPlan(checkpoint, path.parent, inventory.family.name, files, documents, metadata=metadata)
    return carry_out(plan, None, dry_run=dry_run, seal=lambda _: refuse_config(), on_bytes=on_bytes)


def small_config(inventory: Inventory, count: int) -> dict[str, object]:
    """Return a flat config with what identifies the head's family, names and sizes."""
    config = inventory.checkpoint.config
    fields = {**text_config(config), **config}
    kept = {key: value for key, value in fields.items() if key in _KEPT or key in SIZES or ABOUT_HEAD.search(key)}
    return inventory.family.with_count({**kept, "num_hidden_layers": inventory.num_layers}, count)


def _refuse_foreign_config(path: Path, config: Mapping[str, object]) -> None:
    try:
        is_same = not os.path.lexists(path) or (path.is_file() and json.loads(path.read_bytes()) == config)
    except (OSError, ValueError, RecursionError):
        is_same = False
    if not is_same:
        raise CheckpointError(f"{path}: belongs to another model. Give the head a folder of its own.")
