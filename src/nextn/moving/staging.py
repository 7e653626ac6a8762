"""New files for a checkpoint's folder, all or nothing: planned as data, staged in a hidden folder, then moved in place.

Knows files and tensors, not heads.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from reprlib import repr as brief

from nextn.checkpoints.checkpoint import CHUNK, CONFIG, INDEX, SINGLE, Checkpoint, index_json
from nextn.checkpoints.remote import LocalFile, Source, folder_files, readable
from nextn.checkpoints.stages import staged
from nextn.checkpoints.tensor_file import RawTensor, TensorInfo, write_json, write_safetensors
from nextn.errors import CheckpointError
from nextn.moving.links import all_files, left_out, refuse_links
from nextn.words import some

HEAD_FILE = "model-mtp.safetensors"  # llama.cpp's converter reads model*.safetensors alone
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# transformers reads a model.safetensors before it looks for an index, so beside an index the name must not exist.
_FIRST_SHARD = "model-00001-of-00002.safetensors"

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


def quiet(done: int, total: int) -> None:
    """A `Progress` that tells nobody."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to be written: the bytes of `name` in `source`, changed by `edit` where there is one."""

    source: Checkpoint
    name: str
    edit: Callable[[bytes], bytes] | None = None

    @property
    def info(self) -> TensorInfo:
        return self.source.info(self.name)

    def chunks(self, count: Callable[[int], None]) -> Iterator[bytes]:
        for chunk in self.source.chunks(self.name):
            yield chunk if self.edit is None else self.edit(chunk)
            count(len(chunk))


@dataclass(frozen=True)
class Files:
    """What becomes of a checkpoint's files; those that are not named here stay.

    weights: new file -> tensor name -> piece. index: tensor name -> file, None for no index. renamed: old name -> new
    name. dropped: files that go.
    """

    weights: Mapping[str, Mapping[str, Piece]] = field(repr=False)
    index: Mapping[str, str] | None = field(repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """What a verb will write. origin: the checkpoint that is changed or taken from. folder: where the files go.

    whole: `folder` is new and gets all other files of `origin`, too. documents: JSON files and what they will say, the
    index included; changes: what of that is new, in words. metadata: of the new weight files. notes: for the user.
    follow_links: links that leave the checkpoint's folder are followed.
    """

    origin: Checkpoint = field(repr=False)
    folder: Path
    family: str
    files: Files
    documents: Mapping[str, Mapping[str, object]] = field(repr=False)
    whole: bool = False
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    follow_links: bool = False

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.files.weights.values() for piece in pieces.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors, to be read and to be written."""
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
    """`file: key: old -> new`, of a list `file: key: + new`, for each JSON file but the index."""
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
    """What a list of names lost and gained; "" for anything else, and for the same names in another order."""
    lists = [each for each in (before or [], after) if isinstance(each, list) and all(type(x) is str for x in each)]
    if len(lists) < 2:
        return ""
    old, new = map(dict.fromkeys, lists)
    lost, gained = [name for name in old if name not in new], [name for name in new if name not in old]
    return "; ".join(f"{sign} {some(names)}" for sign, names in (("-", lost), ("+", gained)) if names)


def visible(checkpoint: Checkpoint, also: Collection[str] = ()) -> Checkpoint:
    """The tensors that loaders find, which open the files that the index names alone; and those in the files `also`."""
    files = [file for file in checkpoint.files if file not in checkpoint.unindexed or file in also]
    found: dict[str, TensorInfo] = {}
    for name, info in ((name, info) for file in files for name, info in checkpoint.headers[file].tensors.items()):
        first = checkpoint.tensors[name]
        found.setdefault(name, first if first.file in files else info)
    return replace(checkpoint, tensors=found)


def divide(checkpoint: Checkpoint, gone: Collection[str], fresh: Mapping[str, Piece]) -> Files:
    """The `fresh` tensors in a new indexed file, and files that hold `gone` ones written again without them.

    Engines read all tensors of a file that the index names, so leaving them out of the index would not do.
    """
    kept = {name: info for name, info in checkpoint.tensors.items() if name not in gone and name not in fresh}
    used = {info.file for info in checkpoint.tensors.values()}
    stale = {file for file in used if checkpoint.headers[file].tensors.keys() & {*gone, *fresh}}
    taken = set(checkpoint.sources)
    head = free_name(HEAD_FILE, taken)
    weights = {head: fresh} if fresh else {}
    renamed = {SINGLE: free_name(_FIRST_SHARD, taken)} if SINGLE in checkpoint.headers and SINGLE not in stale else {}
    for file in sorted(stale):
        rest = {name: Piece(checkpoint, name) for name, info in kept.items() if info.file == file}
        if rest:
            renamed[file] = free_name(_trunk_name(file), taken)
            weights[renamed[file]] = rest
    index = {name: renamed.get(info.file, info.file) for name, info in kept.items()} | dict.fromkeys(fresh, head)
    linked = {old: new for old, new in renamed.items() if new not in weights}
    return Files(weights, index, linked, tuple(sorted(stale)))


def _trunk_name(file: str) -> str:
    return _FIRST_SHARD if file == SINGLE else f"{Path(file).stem}-trunk.safetensors"


def free_name(name: str, taken: Collection[str]) -> str:
    """`name`, or the first of `<stem>-2`, `<stem>-3`, ... that is not taken."""
    path, number = Path(name), 1
    while name in taken:
        number += 1
        name = f"{path.stem}-{number}{path.suffix}"
    return name


def index_document(files: Files, checkpoint: Checkpoint) -> dict[str, dict[str, object]]:
    """The index as a document of a plan; empty where there is none."""
    if files.index is None:
        return {}
    new = {name: piece.info.nbytes for pieces in files.weights.values() for name, piece in pieces.items()}
    total = sum(new[name] if name in new else checkpoint.tensors[name].nbytes for name in files.index)
    return {INDEX: index_json(files.index, total)}


def execute(plan: Plan, *, seal: Callable[[Path], None] | None = None, on_bytes: Progress = quiet) -> None:
    """Do what `plan` says. `seal` may write more JSON beside the new weights, in the folder that it is given.

    Raises CheckpointError where something cannot be read or written, another process is changing the folder, or files
    changed after the plan was made; the folder is then as it was.
    """
    with staged(plan.folder, inside=not plan.whole, needed=_num_written(plan)) as stage:
        _refuse_changed(plan)
        new = stage / "new"
        new.mkdir()
        _fill(plan, new, on_bytes)
        if seal is not None:
            seal(new)
        if plan.whole:
            _add_others(plan, new)
        _refuse_changed(plan)
        if plan.whole:
            new.rename(plan.folder)
        else:
            _commit(plan, new, stage)


def _refuse_changed(plan: Plan) -> None:
    """Names and places of bytes are those of the time when the headers were read; a file that is new may be in the way.

    Called before anything is written and again before the folder changes, as all bytes were read by then.
    """
    if plan.whole:
        new_folder(plan.folder)
    origin, read = plan.origin, {(piece.source, piece.info.file) for piece in plan.pieces}
    files = [source.sources[file] for source, file in read]
    is_target = not plan.whole and Path(origin.path) == plan.folder
    if plan.whole or is_target:
        files += origin.sources.values()
    changed = {str(file) for file in files if isinstance(file, LocalFile) and file.has_changed()}
    now = folder_files(plan.folder).keys()
    if is_target:
        changed |= {str(plan.folder / name) for name in now ^ origin.sources.keys()}
    if changed:
        raise CheckpointError(
            f"{plan.folder}: not written, as files changed after they were read: {some(sorted(changed))}. Another "
            "process is at work there; start again when it has ended."
        )
    if taken := sorted(now & plan.files.weights.keys()):
        raise CheckpointError(f"{plan.folder}: another process wrote {some(taken)} just now. It is as it was.")


def _num_written(plan: Plan) -> int:
    """Bytes of the new tensors, and of the weight files that a new folder gets as copies."""
    return plan.num_bytes + (num_copied(plan.origin, plan.folder, without=_gone(plan)) if plan.whole else 0)


def num_copied(checkpoint: Checkpoint, folder: Path, *, without: Collection[str] = ()) -> int:
    """Bytes of the checkpoint's files that `folder` can only get as copies, as they cannot be linked there."""
    with readable(Path(checkpoint.path)):
        kept = [source for name, source in all_files(checkpoint).items() if name not in without]
        copied = [source for source in kept if not (isinstance(source, LocalFile) and _can_link(source, folder))]
        return sum(_size(checkpoint, source) for source in copied)


def _size(checkpoint: Checkpoint, source: Source) -> int:
    """Bytes of a file; of one on a hub its tensors alone, which are known without a request."""
    if isinstance(source, LocalFile):
        return source.path.stat().st_size
    header = checkpoint.headers.get(source.name)
    return sum(info.nbytes for info in header.tensors.values()) if header else 0


def _fill(plan: Plan, new: Path, on_bytes: Progress) -> None:
    done, total = 0, plan.num_bytes

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(done, total)

    for file, pieces in plan.files.weights.items():
        raws = {name: _raw(piece, count) for name, piece in pieces.items()}
        write_safetensors(new / file, raws, metadata=plan.metadata)
    for file, value in plan.documents.items():
        write_json(new / file, value)


def _raw(piece: Piece, count: Callable[[int], None]) -> RawTensor:
    def data() -> Iterable[bytes]:
        return piece.chunks(count)

    return RawTensor(piece.info.dtype, piece.info.shape, data)


def _commit(plan: Plan, new: Path, stage: Path) -> None:
    """Move the new files in, each by one rename, in an order that leaves a usable folder at every step.

    First the configs: a config that promises a head which is not there is what a target that lost its head has
    already, while a head without the promise makes engines take it for a layer of the trunk. Then weights, which no
    index names yet. Then the index, which makes the head exist; only then old files go. An exception on the way undoes
    in reverse the steps that were done; an undo that fails ends this, as the folder is usable as it is then.
    """
    folder, old, gone = plan.folder, stage / "old", stage / "gone"
    for before, after in plan.files.renamed.items():
        os.link(folder / before, new / after)
    names = sorted((path.name for path in new.iterdir()), key=_turn)
    for path in (old, gone):
        path.mkdir()
    for name in names:
        if os.path.lexists(folder / name):
            shutil.copy2(folder / name, old / name, follow_symlinks=False)
    undo: list[Callable[[], None]] = []
    try:
        for name in names:
            undo.append(partial(_take_back, new / name, folder / name, old / name))
            (new / name).replace(folder / name)
        for number, name in enumerate((*plan.files.renamed, *plan.files.dropped)):
            undo.append(partial(_put_back, gone / str(number), folder / name))
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
            f"{folder}: changed in part, and this could not be undone ({error.strerror or error}). It can be loaded; "
            "`nextn audit` says what it holds."
        ) from error


def _turn(name: str) -> int:
    return 2 if name == INDEX else 1 if name.endswith(".safetensors") else 0


def _take_back(new: Path, path: Path, backup: Path) -> None:
    """Undo the move of `new` to `path`. Where `new` is still there it was not moved, and `path` is not ours."""
    if os.path.lexists(new):
        return
    if os.path.lexists(backup):
        backup.replace(path)
    else:
        path.unlink(missing_ok=True)


def _put_back(aside: Path, path: Path) -> None:
    """Undo the move of `path` to `aside`, if it was made."""
    if os.path.lexists(aside):
        aside.replace(path)


def _gone(plan: Plan) -> set[str]:
    """Old files that a new folder does not get."""
    return {*plan.files.dropped} | ({INDEX} if plan.files.index is None else set()) | plan.documents.keys()


def _add_others(plan: Plan, new: Path) -> None:
    refuse_links(plan.origin, follow=plan.follow_links)  # again: they are what is published
    gone = _gone(plan)
    for name, source in all_files(plan.origin).items():
        to = new / plan.files.renamed.get(name, name)
        if name not in gone and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            _give(source, to)


def _can_link(source: LocalFile, folder: Path) -> bool:
    """Weights share their bytes by a hard link; a JSON file that is edited later must not be shared."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return source.path.suffix in _WEIGHTS and source.path.stat().st_dev == there.stat().st_dev


def _give(source: Source, to: Path) -> None:
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


def into_new_folder(plan: Plan, out: str | Path) -> Plan:
    """The same plan for the new folder `out`, that gets all other files of the checkpoint, too."""
    return replace(plan, folder=new_folder(out), whole=True, notes=(*plan.notes, *left_out(plan.origin)))


def new_folder(out: str | Path) -> Path:
    """`out` as a folder that can be made. Raises CheckpointError for one that has something in it."""
    path = Path(out).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: is there already and not empty. Give a new folder.")
    return path


def with_config(checkpoint: Checkpoint, config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """config.json as a document of a plan; empty where it says that already."""
    return {} if config == checkpoint.config and CONFIG in checkpoint.sources else {CONFIG: config}
