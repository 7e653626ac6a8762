"""The files that an edit writes into a checkpoint's folder, as data; `execute` writes them.

This module knows files and tensors, not heads.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as brief

from nextn.checkpoint.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, index_json
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.edit.links import left_out
from nextn.errors import CheckpointError
from nextn.text_format import some

HEAD_FILE = "model-mtp.safetensors"  # llama.cpp's converter reads model*.safetensors only
# transformers reads a model.safetensors before it looks for an index, so next to an index the name must not exist.
FIRST_SHARD = "model-00001-of-00002.safetensors"

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
