"""Write the files of a plan atomically: stage them in a hidden folder, check what they hold, move them.

The check ends every edit, before anything is moved: what a checkpoint held before, it holds after.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from nextn.bounded_json import JsonLimits, parse_json
from nextn.checkpoint.checkpoint import CHUNK, INDEX, SINGLE, Checkpoint
from nextn.checkpoint.remote import ByteSource, LocalFile, folder_files, readable
from nextn.checkpoint.safetensors_file import Header, RawTensor, TensorInfo, read_header, write_json, write_safetensors
from nextn.checkpoint.staging_folder import staged
from nextn.edit.links import all_files, refuse_links
from nextn.edit.plan import EditPlan, Piece, Progress, into_new_folder, new_folder, quiet
from nextn.errors import CheckpointError
from nextn.text_format import some

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_METADATA_LIMITS = JsonLimits(100_000_000, 1_000_000)
_SAMPLE = 4096  # bytes at either end of a copied tensor
_MOST = 2000  # tensors of which these are compared


def carry_out(
    plan: EditPlan,
    out: str | Path | None,
    *,
    follow_links: bool = False,
    dry_run: bool = False,
    seal: Callable[[Path], None] | None = None,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Execute `plan` in its own folder, or in the new folder `out`, unless `dry_run`, and return it as executed."""
    plan = replace(plan, follow_links=follow_links)
    plan = plan if out is None else into_new_folder(plan, out)
    if not dry_run:
        execute(plan, seal=seal, on_bytes=on_bytes)
    return plan


def execute(plan: EditPlan, *, seal: Callable[[Path], None] | None = None, on_bytes: Progress = quiet) -> None:
    """Execute `plan`. `seal` may write more JSON files next to the new weights, in the folder that it is given.

    Raises CheckpointError if something cannot be read or written, another process is changing the folder, or files
    changed after the plan was made; the folder is then unchanged.
    """
    copied = num_copied(plan.origin, plan.folder, without=_gone(plan)) if plan.new_folder else 0
    with staged(plan.folder, inside=not plan.new_folder, needed=plan.num_bytes + copied) as stage:
        _refuse_changed(plan)
        new = stage / "new"
        new.mkdir()
        _fill(plan, new, on_bytes)
        if seal is not None:
            seal(new)
        _check(plan, new)
        if plan.new_folder:
            _add_others(plan, new)
        _refuse_changed(plan)
        if plan.new_folder:
            new.rename(plan.folder)
        else:
            _commit(plan, new, stage)


def _refuse_changed(plan: EditPlan) -> None:
    """Raise CheckpointError for files that changed after their headers were read, or appeared under a planned name.

    Called before anything is written, and again after all bytes were read, before the folder changes.
    """
    if plan.new_folder:
        new_folder(plan.folder)
    origin, read = plan.origin, {(piece.source, piece.info.file) for piece in plan.pieces}
    files = [source.sources[file] for source, file in read]
    is_target = not plan.new_folder and Path(origin.path) == plan.folder
    if plan.new_folder or is_target:
        files += origin.sources.values()
    changed = {str(file) for file in files if isinstance(file, LocalFile) and file.has_changed()}
    now = folder_files(plan.folder).keys()
    if is_target:
        changed |= {str(plan.folder / name) for name in now ^ origin.sources.keys()}
    if changed:
        raise CheckpointError(
            f"{plan.folder}: not written, as files changed after they were read: {some(sorted(changed))}. Another "
            "process is changing them; try again when it has ended."
        )
    if taken := sorted(now & plan.files.weights.keys()):
        raise CheckpointError(f"{plan.folder}: another process wrote {some(taken)} just now. The folder is unchanged.")


def num_copied(checkpoint: Checkpoint, folder: Path, *, without: Collection[str] = ()) -> int:
    """Return the bytes of the checkpoint's files that must be copied to `folder`, as they cannot be linked there."""
    with readable(Path(checkpoint.path)):
        kept = [source for name, source in all_files(checkpoint).items() if name not in without]
        copied = [source for source in kept if not (isinstance(source, LocalFile) and _can_link(source, folder))]
        return sum(_size(checkpoint, source) for source in copied)


def _size(checkpoint: Checkpoint, source: ByteSource) -> int:
    """Return the bytes of a file; for one on a hub, those of its tensors, which are known without a request."""
    if isinstance(source, LocalFile):
        return source.path.stat().st_size
    header = checkpoint.headers.get(source.name)
    return sum(info.nbytes for info in header.tensors.values()) if header else 0


def _fill(plan: EditPlan, new: Path, on_bytes: Progress) -> None:
    done, total = 0, plan.num_bytes

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(done, total)

    for file, pieces in plan.files.weights.items():
        raws = {name: _raw(piece, count) for name, piece in pieces.items()}
        write_safetensors(new / file, raws, metadata=_metadata(plan, pieces.values()))
    for file, value in plan.documents.items():
        write_json(new / file, value)


def _check(plan: EditPlan, new: Path) -> None:
    """Raise CheckpointError if the new files differ from the plan, or the result lacks a tensor that should stay."""
    headers = {file: read_header(new / file).tensors for file in plan.files.weights}
    for file, pieces in plan.files.weights.items():
        forms = {name: info.form for name, info in headers[file].items()}
        wrong = [name for name, piece in pieces.items() if forms.get(name) != piece.info.form]
        wrong += sorted(headers[file].keys() - pieces.keys())
        wrong += _differing(new / file, headers[file], pieces)
        if wrong:
            message = f"{plan.folder}: not written: {file} would not hold {some(wrong)} as planned. It is unchanged."
            raise CheckpointError(message)
    if plan.origin.headers and (plan.new_folder or Path(plan.origin.path) == plan.folder):
        _check_complete(plan, headers)


def _differing(path: Path, tensors: Mapping[str, TensorInfo], pieces: Mapping[str, Piece]) -> Iterator[str]:
    """Yield tensors whose ends are not those of the stored ones that they are copies of."""
    names = sorted(name for name, piece in pieces.items() if type(piece) is Piece and not piece.edit)
    file = LocalFile.at(path, path.name)
    for name in names[:: max(1, len(names) // _MOST)]:
        info, stored = tensors[name], pieces[name].info
        source = pieces[name].source.sources[stored.file]
        for begin in {0, max(0, info.nbytes - _SAMPLE)}:
            end = min(begin + _SAMPLE, info.nbytes)
            written = file.read(info.begin + begin, info.begin + end)
            if written != source.read(stored.begin + begin, stored.begin + end):
                yield name
                break


def _check_complete(plan: EditPlan, headers: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Check that every tensor of the origin but those that go is in the result, and that the index finds those it had.

    Raises CheckpointError, before the folder is changed.
    """
    origin, index, gone = plan.origin, plan.files.index, plan.files.gone
    after: dict[str, Mapping[str, TensorInfo]] = {
        plan.files.renamed.get(file, file): header.tensors
        for file, header in origin.headers.items()
        if file not in plan.files.dropped
    }
    after |= headers
    forms: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for tensors in after.values():
        for name, info in tensors.items():
            forms.setdefault(name, []).append(info.form)
    lost = [name for name, info in origin.tensors.items() if name not in gone and info.form not in forms.get(name, ())]
    if index is not None:
        lost += [name for name, file in index.items() if name not in after.get(file, {})]
        found = origin.index if origin.index is not None else origin.headers.get(SINGLE, Header({}, {})).tensors
        lost += [name for name in found if name in origin.tensors and name not in gone and name not in index]
    if lost:
        raise CheckpointError(
            f"{plan.folder}: unchanged, as the result would lose {len(set(lost))} tensors: {some(sorted(set(lost)))}. "
            "Please report this."
        )


def _metadata(plan: EditPlan, pieces: Iterable[Piece]) -> dict[str, str]:
    """Return the metadata of a new file: that of the files its tensors come from, updated by the plan's.

    Some formats describe tensors in it. Lists in several files are joined; of other entries, the first is kept.
    """
    sources = dict.fromkeys(piece.info.file for piece in pieces if piece.source.path == plan.origin.path)
    merged: dict[str, str] = {}
    for file in sources:
        header = plan.origin.headers.get(file)
        for key, value in (header.metadata if header else {}).items():
            merged[key] = _joined_lists(merged[key], value) if key in merged else value
    return {**merged, **plan.metadata}


def _joined_lists(one: str, other: str) -> str:
    try:
        lists = [parse_json(each.encode(), _METADATA_LIMITS) for each in (one, other)]
    except ValueError:
        return one
    if not all(isinstance(each, list) for each in lists):
        return one
    return json.dumps(list(dict.fromkeys([*lists[0], *lists[1]])))  # type: ignore[misc]  # both are lists of names


def _raw(piece: Piece, count: Callable[[int], None]) -> RawTensor:
    def data() -> Iterable[bytes]:
        for chunk in piece.chunks():
            yield chunk
            count(len(chunk))

    return RawTensor(piece.info.dtype, piece.info.shape, data)


def _commit(plan: EditPlan, new: Path, stage: Path) -> None:
    """Move the new files in, each by one rename, in an order that leaves a usable folder at every step.

    First the configs: a target that lost its head already has a config that declares a missing head, while engines
    take an undeclared head for a layer of the trunk. Then weights, which no index lists yet. Then the index, which
    makes the head visible, and last the old files are removed. An exception undoes the completed steps in reverse; if
    an undo fails, the rest is not undone, because the folder is usable as it is.
    """
    folder, old, gone = plan.folder, stage / "old", stage / "gone"
    for before, after in plan.files.renamed.items():
        os.link(folder / before, new / after)
    names = sorted((path.name for path in new.iterdir()), key=_move_order)
    for path in (old, gone):
        path.mkdir()
    for name in names:
        if os.path.lexists(folder / name):
            shutil.copy2(folder / name, old / name, follow_symlinks=False)
    undo: list[Callable[[], None]] = []
    try:
        for name in names:
            undo.append(partial(_undo_move, new / name, folder / name, old / name))
            (new / name).replace(folder / name)
        for number, name in enumerate((*plan.files.renamed, *plan.files.dropped)):
            undo.append(partial(_undo_removal, gone / str(number), folder / name))
            (folder / name).replace(gone / str(number))
    except BaseException:
        _undo(undo, folder)
        raise


def _undo(steps: Sequence[Callable[[], None]], folder: Path) -> None:
    try:
        for step in reversed(steps):
            step()
    except OSError as error:
        raise CheckpointError(
            f"{folder}: partly changed, and this could not be undone ({error.strerror or error}). It can be loaded; "
            "`nextn audit` shows what it holds."
        ) from error


def _move_order(name: str) -> int:
    return 2 if name == INDEX else 1 if name.endswith(".safetensors") else 0


def _undo_move(new: Path, path: Path, backup: Path) -> None:
    """Undo the move of `new` to `path`. If `new` still exists, it was not moved, and `path` is left alone."""
    if os.path.lexists(new):
        return
    if os.path.lexists(backup):
        backup.replace(path)
    else:
        path.unlink(missing_ok=True)


def _undo_removal(removed: Path, path: Path) -> None:
    """Undo the move of `path` to `removed`, if it happened."""
    if os.path.lexists(removed):
        removed.replace(path)


def _gone(plan: EditPlan) -> set[str]:
    """Return the files of the checkpoint that are not copied to a new folder."""
    written = plan.documents.keys() | plan.files.weights.keys()
    return {*plan.files.dropped} | ({INDEX} if plan.files.index is None else set()) | written


def _add_others(plan: EditPlan, new: Path) -> None:
    refuse_links(plan.origin, follow=plan.follow_links)  # again: these files are copied now
    gone = _gone(plan)
    for name, source in all_files(plan.origin).items():
        to = new / plan.files.renamed.get(name, name)
        if name not in gone and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source, to)


def _can_link(source: LocalFile, folder: Path) -> bool:
    """Whether a hard link is possible and safe: for weights, but not for JSON files, which may be edited later."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return source.path.suffix in _WEIGHTS and source.path.stat().st_dev == there.stat().st_dev


def _link_or_copy(source: ByteSource, to: Path) -> None:
    if isinstance(source, LocalFile):
        try:
            if not _can_link(source, to.parent):
                raise OSError
            os.link(source.path.resolve(), to)  # the file itself, as the hub's cache holds links to it
        except OSError:
            shutil.copyfile(source.path, to)
        return
    _, size = source.start(1)
    with to.open("xb") as file:
        for begin in range(0, size, CHUNK):
            file.write(source.read(begin, min(begin + CHUNK, size)))
