"""New files for a checkpoint's folder, all or nothing: planned as data, staged in a hidden folder, then moved in place.

Knows files and tensors, not heads.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as brief

from nextn.checkpoints.checkpoint import CHUNK, CONFIG, INDEX, SINGLE, Checkpoint, index_json
from nextn.checkpoints.remote import LocalFile, Source
from nextn.checkpoints.tensor_file import RawTensor, TensorInfo, write_json, write_safetensors
from nextn.errors import CheckpointError
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

    Raises CheckpointError where something cannot be read or written; the folder is then as it was.
    """
    with _staged(plan) as stage:
        _fill(plan, stage, on_bytes)
        if seal is not None:
            seal(stage)
        if plan.whole:
            _add_others(plan, stage)
            stage.rename(plan.folder)
        else:
            _commit(plan, stage)


@contextmanager
def _staged(plan: Plan) -> Iterator[Path]:
    """A hidden folder on the same file system, gone at the end."""
    token = secrets.token_hex(4)
    stage = plan.folder.with_name(f".{plan.folder.name}.{token}") if plan.whole else plan.folder / f".nextn-{token}"
    try:
        stage.mkdir(parents=True)
        yield stage
    except OSError as error:
        raise CheckpointError(
            f"{plan.folder}: cannot be written: {error.strerror or error}. It is as it was."
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _fill(plan: Plan, stage: Path, on_bytes: Progress) -> None:
    done, total = 0, plan.num_bytes

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(done, total)

    for file, pieces in plan.files.weights.items():
        raws = {name: _raw(piece, count) for name, piece in pieces.items()}
        write_safetensors(stage / file, raws, metadata=plan.metadata)
    for file, value in plan.documents.items():
        write_json(stage / file, value)


def _raw(piece: Piece, count: Callable[[int], None]) -> RawTensor:
    def data() -> Iterable[bytes]:
        return piece.chunks(count)

    return RawTensor(piece.info.dtype, piece.info.shape, data)


def _commit(plan: Plan, stage: Path) -> None:
    """Move the staged files in, each by one rename, in an order that leaves a usable folder at every step.

    First the configs: a config that promises a head which is not there is what a target that lost its head has
    already, while a head without the promise makes engines take it for a layer of the trunk. Then weights, which no
    index names yet. Then the index, which makes the head exist; only then old files go. An exception on the way undoes
    the steps in reverse.
    """
    folder, old = plan.folder, stage / "old"
    old.mkdir()
    new = sorted((path.name for path in stage.iterdir() if path.is_file()), key=_turn)
    for name in new:
        if os.path.lexists(folder / name):
            shutil.copy2(folder / name, old / name, follow_symlinks=False)
    with ExitStack() as undo:
        for name in new:
            if name == INDEX:
                _link_renamed(plan, undo)
            undo.callback(_put_back, old / name, folder / name)
            (stage / name).replace(folder / name)
        for name in [*plan.files.renamed, *plan.files.dropped]:
            aside = old / name.replace("/", "_")
            undo.callback(_put_back, aside, folder / name, keep=True)
            (folder / name).replace(aside)
        undo.pop_all()


def _turn(name: str) -> int:
    return 2 if name == INDEX else 1 if name.endswith(".safetensors") else 0


def _link_renamed(plan: Plan, undo: ExitStack) -> None:
    for before, after in plan.files.renamed.items():
        undo.callback((plan.folder / after).unlink, missing_ok=True)
        os.link(plan.folder / before, plan.folder / after)


def _put_back(backup: Path, path: Path, *, keep: bool = False) -> None:
    """Give `path` what it held; without a backup it was not there, or, with `keep`, has not moved yet."""
    if os.path.lexists(backup):
        backup.replace(path)
    elif not keep:
        path.unlink(missing_ok=True)


def _add_others(plan: Plan, stage: Path) -> None:
    gone = {*plan.files.dropped, *plan.files.renamed} | ({INDEX} if plan.files.index is None else set())
    for name, source in _all_files(plan.origin).items():
        to = stage / plan.files.renamed.get(name, name)
        if (name in plan.files.renamed or name not in gone) and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            _give(source, to)


def _all_files(checkpoint: Checkpoint) -> dict[str, Source]:
    """Also what lies in subfolders, hidden ones aside."""
    root = Path(checkpoint.path)
    if not root.is_dir():
        return dict(checkpoint.sources)
    found = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: LocalFile(path, name) for name, path in found.items() if not f"/{name}".count("/.")}


def _give(source: Source, to: Path) -> None:
    """Weights share their bytes by a hard link where they can; a JSON file that is edited later must not be shared."""
    if isinstance(source, LocalFile):
        try:
            if to.suffix not in _WEIGHTS:
                raise OSError
            os.link(source.path.resolve(), to)  # the file itself, as the hub's cache holds links to it
        except OSError:
            shutil.copyfile(source.path, to)
        return
    _, size = source.start(1)
    with to.open("xb") as file:
        for begin in range(0, size, CHUNK):
            file.write(source.read(begin, min(begin + CHUNK, size)))


def new_folder(out: str | Path) -> Path:
    """`out` as a folder that can be made. Raises CheckpointError for one that has something in it."""
    path = Path(out).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: is there already and not empty. Give a new folder.")
    return path


def with_config(checkpoint: Checkpoint, config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """config.json as a document of a plan; empty where it says that already."""
    return {} if config == checkpoint.config and CONFIG in checkpoint.sources else {CONFIG: config}
