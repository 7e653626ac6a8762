"""Write a checkpoint's index from the files that are there."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nextn.checkpoint.checkpoint import SINGLE, Checkpoint, as_checkpoint
from nextn.checkpoint.file_index import FileIndex, file_index, lost_files, mixed_files, with_sound_index
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_family
from nextn.edit.execute import carry_out
from nextn.edit.links import refuse_links
from nextn.edit.plan import FIRST_SHARD, EditPlan, Files, Progress, free_name, index_document, quiet
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import Family
from nextn.text_format import counted, some


def reindex(
    source: "str | Path | Checkpoint",
    out: str | Path | None = None,
    *,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Write the index that lists every tensor of the model in the file that holds it.

    No tensor is changed. A model.safetensors beside other files is renamed, as loaders open it before they look for an
    index. By default the local folder itself is changed, else `out` is a new folder for the complete result, also of a
    hub id. The options are those of `restore`. A folder of which loaders find every tensor stays as it is, and the plan
    has nothing to write. Raises CheckpointError if it is not a folder, cannot be written, or lacks files of its index
    whose tensors no other file holds; ConfigError for an `out` where there is nothing to write.
    """
    checkpoint = as_checkpoint(source)
    if out is None and not Path(checkpoint.path).is_dir():
        raise CheckpointError(f"{checkpoint.path}: not a folder; give a new folder for the result.")
    if checkpoint.stored_names:
        command = f"nextn restore MODEL --from {shlex.quote(checkpoint.path)}"
        raise CheckpointError(f"{checkpoint.path}: a head alone, of which loaders find no tensor: run `{command}`")
    refuse_links(checkpoint, follow=follow_links)
    index = file_index(checkpoint)
    paths = [problem.file for problem in checkpoint.problems if problem.kind == "path"]
    if not (index.unlisted or index.absent or paths):
        message = f"{checkpoint.path}: loaders find every tensor as it is; nothing to index"
        if out is not None:
            raise ConfigError(f"{message}, and {out} is not written")
        nothing = Files({}, checkpoint.index)
        return EditPlan(checkpoint, Path(checkpoint.path), trunk_family(checkpoint).name, nothing, {}, notes=(message,))
    sound = _with_sound_index(checkpoint, index)
    if lost := lost_files(checkpoint):
        # A new index would not name them, and nothing else says that the model had them.
        raise CheckpointError(
            f"{checkpoint.path}: its index puts tensors in {some(lost)}, absent here, and no file holds them: download "
            f"{some(lost)} again (`hf download`), and then write the index."
        )
    several = len(set(index.weight_map.values())) > 1
    renamed = {SINGLE: free_name(FIRST_SHARD, sound.sources)} if several and SINGLE in sound.headers else {}
    files = Files({}, {name: renamed.get(file, file) for name, file in index.weight_map.items()}, renamed)
    plan = EditPlan(
        checkpoint, Path(checkpoint.path), trunk_family(checkpoint).name, files, index_document(files, sound),
        notes=tuple(notes(index)),
    )  # fmt: skip
    return carry_out(plan, out, follow_links=follow_links, dry_run=dry_run, on_bytes=on_bytes)


def opened(
    source: "str | Path | Checkpoint", family_of: Callable[[Checkpoint], Family], *, follow_links: bool
) -> tuple[Checkpoint, list[str]]:
    """Open what is to be written anew, as `sound` returns it. Raises CheckpointError for links that lead outside."""
    checkpoint = as_checkpoint(source)
    refuse_links(checkpoint, follow=follow_links)
    return sound(checkpoint, without=side_files(Inventory.of(checkpoint, family=family_of(checkpoint))))


def sound(checkpoint: Checkpoint, *, without: frozenset[str] = frozenset()) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint that is to be edited with an index that lists all of its tensors, and notes of what changed.

    Files `without` stay unlisted. A checkpoint whose index leads to every other tensor is returned as it is.
    """
    index = file_index(checkpoint)
    if all(index.weight_map[name] in without for name in index.unlisted):
        return checkpoint, []
    fresh = replace(index, unlisted=tuple(name for name in index.unlisted if index.weight_map[name] not in without))
    return _with_sound_index(checkpoint, index, without=without), notes(fresh)


def _with_sound_index(checkpoint: Checkpoint, index: FileIndex, *, without: frozenset[str] = frozenset()) -> Checkpoint:
    """Return it with the derived index. Raises CheckpointError for files of two uploads, which it would mix."""
    if fix := mixed_files(checkpoint):
        raise CheckpointError(f"{checkpoint.path}: its files are of two uploads, with other values: {fix}.")
    return with_sound_index(checkpoint, index, without=without)


def side_files(inventory: Inventory) -> frozenset[str]:
    """Return the files that loaders do not open and that hold nothing but a head."""
    checkpoint, heads = inventory.checkpoint, inventory.spellings(inventory.stored)
    return frozenset(
        file for file in checkpoint.unindexed if (own := checkpoint.headers[file].tensors.keys()) and own <= heads
    )


def notes(index: FileIndex) -> list[str]:
    """Return what the index that the files imply changes."""
    lines = []
    if index.unlisted:
        files = sorted({index.weight_map[name] for name in index.unlisted})
        lines.append(
            f"{counted(len(index.unlisted), 'tensor')} in {some(files)}, such as {some(index.unlisted[:1])}, that the "
            "index does not list there, are listed"
        )
    if index.absent:
        lines.append(f"no longer listed, as no file holds them: {some(sorted(index.absent))}")
    if index.left_out:
        lines.append(f"not listed, as they hold nothing of the model that other files do not: {some(index.left_out)}")
    return lines
