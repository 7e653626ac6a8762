"""Write new files into a checkpoint's folder atomically: plan them as data, stage them in a hidden folder, move them.

This module knows files and tensors, not heads.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from reprlib import repr as brief

from nextn.bounded_json import JsonLimits, parse_json
from nextn.checkpoint.checkpoint import CHUNK, CONFIG, INDEX, SINGLE, Checkpoint, index_json
from nextn.checkpoint.remote import ByteSource, LocalFile, folder_files, readable
from nextn.checkpoint.safetensors_file import RawTensor, TensorInfo, write_json, write_safetensors
from nextn.checkpoint.staging_folder import staged
from nextn.edit.completeness import check_complete, check_written
from nextn.edit.links import all_files, left_out, refuse_links
from nextn.errors import CheckpointError
from nextn.text_format import some

HEAD_FILE = "model-mtp.safetensors"  # llama.cpp's converter reads model*.safetensors only
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# transformers reads a model.safetensors before it looks for an index, so next to an index the name must not exist.
FIRST_SHARD = "model-00001-of-00002.safetensors"

_METADATA_LIMITS = JsonLimits(100_000_000, 1_000_000)

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


def quiet(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to write: the bytes of `name` in `source`, changed by `edit` if given."""

    source: Checkpoint
    name: str
    edit: Callable[[bytes], bytes] | None = None

    @property
    def info(self) -> TensorInfo:
        return self.source.info(self.name)

    def chunks(self) -> Iterator[bytes]:
        chunks = self.source.chunks(self.name)
        return chunks if self.edit is None else map(self.edit, chunks)


@dataclass(frozen=True)
class Files:
    """The changes to a checkpoint's files; those not named here stay."""

    weights: Mapping[str, Mapping[str, Piece]] = field(repr=False)  # new file -> tensor name -> piece
    index: Mapping[str, str] | None = field(repr=False)  # tensor name -> file; None for no index
    renamed: Mapping[str, str] = field(default_factory=dict)  # old name -> new name
    dropped: tuple[str, ...] = ()  # files to delete
    gone: frozenset[str] = frozenset()  # tensors of the checkpoint that are left out, renamed or replaced


@dataclass(frozen=True, eq=False)
class EditPlan:
    """What `restore`, `convert`, `extract`, `quantize` or `adopt` will write."""

    origin: Checkpoint = field(repr=False)  # the checkpoint to change or to read from
    folder: Path  # where the files go
    family: str
    files: Files
    documents: Mapping[str, Mapping[str, object]] = field(repr=False)  # JSON file -> new content, index included
    new_folder: bool = False  # `folder` is new and also gets all other files of `origin`
    changes: tuple[str, ...] = ()  # description of what changes in `documents`
    notes: tuple[str, ...] = ()  # for the user
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})  # of the new weight files
    follow_links: bool = False  # whether to follow links that lead out of the checkpoint's folder

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.files.weights.values() for piece in pieces.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors to read and to write."""
        return sum(piece.info.nbytes for piece in self.pieces)

    def as_record(self) -> dict[str, object]:
        moves = [
            {"file": file, "tensor": name, "from": f"{piece.source.path}: {piece.name}", "dtype": piece.info.dtype,
             "shape": list(piece.info.shape)}
            for file, pieces in self.files.weights.items() for name, piece in pieces.items()
        ]  # fmt: skip
        return {
            "folder": str(self.folder), "family": self.family, "moves": moves, "changes": list(self.changes),
            "renamed": dict(self.files.renamed), "dropped": list(self.files.dropped), "notes": list(self.notes),
            "bytes": self.num_bytes,
        }  # fmt: skip


def changes(checkpoint: Checkpoint, documents: Mapping[str, Mapping[str, object]]) -> tuple[str, ...]:
    """Describe the changes of each JSON file but the index: `file: key: old -> new`, of lists `file: key: + new`."""
    return tuple(
        f"{file}: {line}"
        for file, new in documents.items()
        if file != INDEX
        for line in _differences(checkpoint.read_json(file) or {}, new)
    )


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from (f"{key}.{line}" for line in _differences(before, after))
        else:
            yield f"{key}: {_listed(before, after) or f'{brief(before)} -> {brief(after)}'}"


def _listed(before: object, after: object) -> str:
    """Describe removed and added entries of a list of names; "" for other values, and for another order alone."""
    lists = [each for each in (before or [], after) if isinstance(each, list) and all(type(x) is str for x in each)]
    if len(lists) < 2:
        return ""
    old, new = map(dict.fromkeys, lists)
    removed, added = [name for name in old if name not in new], [name for name in new if name not in old]
    return "; ".join(f"{sign} {some(names)}" for sign, names in (("-", removed), ("+", added)) if names)


def visible(checkpoint: Checkpoint, also: Collection[str] = ()) -> Checkpoint:
    """Return the checkpoint as loaders see it: with the tensors in indexed files, and in the files `also`."""
    files = [file for file in checkpoint.files if file not in checkpoint.unindexed or file in also]
    tensors: dict[str, TensorInfo] = {}
    for name, info in ((name, info) for file in files for name, info in checkpoint.headers[file].tensors.items()):
        first = checkpoint.tensors[name]
        tensors.setdefault(name, first if first.file in files else info)
    return replace(checkpoint, tensors=tensors)


def divide(
    checkpoint: Checkpoint,
    gone: Collection[str],
    fresh: Mapping[str, Piece],
    *,
    beside: Mapping[str, Piece] = {},
    new_file: str = HEAD_FILE,
) -> Files:
    """Plan a new indexed file with the `fresh` tensors, and rewrite the files that hold `gone` tensors without them.

    The tensors `beside` are written into the rewritten file of the tensor that they are made from. Engines read all
    tensors of an indexed file, so it is not enough to remove tensors from the index.
    """
    kept = {name: info for name, info in checkpoint.tensors.items() if name not in gone and name not in fresh}
    used = {info.file for info in checkpoint.tensors.values()}
    stale = {file for file in used if checkpoint.headers[file].tensors.keys() & {*gone, *fresh}}
    taken = set(checkpoint.sources)
    head = free_name(new_file, taken)
    weights = {head: fresh} if fresh else {}
    renamed = {SINGLE: free_name(FIRST_SHARD, taken)} if SINGLE in checkpoint.headers and SINGLE not in stale else {}
    for file in sorted(stale):
        rest = {name: Piece(checkpoint, name) for name, info in kept.items() if info.file == file}
        rest |= {name: piece for name, piece in beside.items() if piece.info.file == file}
        if rest:
            name = FIRST_SHARD if file == SINGLE else f"{Path(file).stem}-trunk.safetensors"
            renamed[file] = free_name(name, taken)
            weights[renamed[file]] = rest
    index = (
        {name: renamed[piece.info.file] for name, piece in beside.items()}
        | {name: renamed.get(info.file, info.file) for name, info in kept.items()}
        | dict.fromkeys(fresh, head)
    )
    linked = {old: new for old, new in renamed.items() if new not in weights}
    replaced = frozenset(name for name in (*gone, *fresh) if name in checkpoint.tensors)
    return Files(weights, index, linked, tuple(sorted(stale)), replaced)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, or the first of `<stem>-2`, `<stem>-3`, ... that is not taken."""
    path, number = Path(name), 1
    while name in taken:
        number += 1
        name = f"{path.stem}-{number}{path.suffix}"
    return name


def index_document(files: Files, checkpoint: Checkpoint) -> dict[str, dict[str, object]]:
    """Return the index as a document of a plan; empty without an index."""
    if files.index is None:
        return {}
    new = {name: piece.info.nbytes for pieces in files.weights.values() for name, piece in pieces.items()}
    total = sum(new[name] if name in new else checkpoint.tensors[name].nbytes for name in files.index)
    document, old = index_json(files.index, total), (checkpoint.read_json(INDEX) or {}).get("metadata")
    # Keep the old metadata except sizes, which the edit changes.
    kept = {key: value for key, value in old.items() if not key.startswith("total_")} if isinstance(old, dict) else {}
    return {INDEX: document | {"metadata": {"total_size": total, **kept}}}


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
    weights, origin = plan.files.weights, plan.origin
    expected = {file: {name: piece.info for name, piece in pieces.items()} for file, pieces in weights.items()}
    copied = {
        file: {name: partial(_read, piece) for name, piece in pieces.items() if type(piece) is Piece and not piece.edit}
        for file, pieces in weights.items()
    }
    headers = check_written(plan.folder, new, expected, copied)
    if origin.headers and (plan.new_folder or Path(origin.path) == plan.folder):
        files = plan.files
        check_complete(
            plan.folder, origin, headers, index=files.index, renamed=files.renamed, dropped=files.dropped,
            gone=files.gone,
        )  # fmt: skip


def _read(piece: Piece, begin: int, end: int) -> bytes:
    info = piece.info
    return piece.source.sources[info.file].read(info.begin + begin, info.begin + end)


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


def into_new_folder(plan: EditPlan, out: str | Path) -> EditPlan:
    """Return the plan for the new folder `out`, which also gets all other files of the checkpoint."""
    return replace(plan, folder=new_folder(out), new_folder=True, notes=(*plan.notes, *left_out(plan.origin)))


def new_folder(out: str | Path) -> Path:
    """Return `out` as an absolute path; CheckpointError if it exists and is not an empty folder."""
    path = Path(out).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: already exists and is not empty. Give a new folder.")
    return path


def with_config(checkpoint: Checkpoint, config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Return config.json as a document of a plan; empty if it is unchanged."""
    return {} if config == checkpoint.config and CONFIG in checkpoint.sources else {CONFIG: config}
