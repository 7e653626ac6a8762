"""The index that a checkpoint's files imply, and how its own differs from it. Imports no torch.

Loaders that follow an index open the files that it names and nothing else; without one, model.safetensors alone.

Weights that are mapped change with the file below them: one that is truncated ends the process at its next access
(SIGBUS), one that is overwritten gives a model of mixed weights. Both show in its size or times, see `FileStamps`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nextn.checkpoint.checkpoint import SAMPLE, SINGLE, Checkpoint
from nextn.checkpoint.draft_models import standalone
from nextn.checkpoint.foreign_names import foreign, of_adapter
from nextn.checkpoint.quantization import split_name
from nextn.checkpoint.safetensors_file import Header, TensorInfo
from nextn.family_table import Family, find, generic
from nextn.text_format import some

_SHARD = re.compile(r"model[-.\w]*\.safetensors")
_TOWER = re.compile(r"visual|vision|image|audio|speech|multi_?modal|mm_")  # first component of a tower's or projector's
# Names of parameters, whatever other tensors a model has: codes, scales and the like among them.
_PARAMETER = re.compile(r".*(?:\bexperts\.\w+|(?:weight|bias|scale|zero|absmax|quant|SCB|shape)[^.]*)")
_MOST_COMPARED = 4  # tensors that two files hold
_Stamp = tuple[int, int, int, int]  # device, inode, size, time of the last change in ns


@dataclass(frozen=True)
class FileIndex:
    """Tensor name -> file for every tensor of the model that a file of the folder holds."""

    weight_map: Mapping[str, str] = field(repr=False)
    unlisted: tuple[str, ...]  # tensors that loaders which follow the checkpoint's own index miss
    absent: tuple[str, ...]  # tensors of the own index that no file holds
    left_out: tuple[str, ...]  # files that are not the model's: adapters, other layouts, second copies


def file_index(checkpoint: Checkpoint, family: Family | None = None) -> FileIndex:
    """Derive the index from the files. Where several hold a tensor, the own index decides, then the file's name."""
    family = family or find(checkpoint.config) or generic(checkpoint.config)
    own = checkpoint.index if checkpoint.index is not None else {}
    named = set(own.values()) | ({SINGLE} if checkpoint.index is None else set())
    order = sorted(checkpoint.headers, key=lambda file: (file not in named, not _SHARD.fullmatch(file), file))
    weight_map: dict[str, str] = {}
    leaves, left_out = set[str](), list[str]()
    for file in order:
        fresh = [name for name in _current(checkpoint.headers[file], file, own) if name not in weight_map]
        if file in named or (not _is_beside(fresh, leaves) and any(
            name in own or _is_of_model(name, family) for name in fresh if not foreign([name])
        )):  # fmt: skip
            weight_map |= dict.fromkeys(fresh, file)
            leaves |= _leaves(fresh)
        else:
            left_out.append(file)
    for file in _with_other_parts(checkpoint, left_out, weight_map):
        weight_map |= {name: file for name in checkpoint.headers[file].tensors if name not in weight_map}
        left_out.remove(file)
    weight_map |= {name: file for name, file in own.items()
                   if file in checkpoint.headers and name in checkpoint.headers[file].tensors}  # fmt: skip
    unlisted = tuple(_unlisted(checkpoint, weight_map, family))
    return FileIndex(weight_map, unlisted, tuple(own.keys() - weight_map.keys()), tuple(left_out))


def _current(header: Header, file: str, own: Mapping[str, str]) -> Iterator[str]:
    """Yield a file's tensors without what else it has of modules that the index places in another file.

    Shards that are used for a part of their tensors, by an index that replaces the others, hold scales of those.
    """
    replaced = {split_name(name, header.tensors)[0] for name in header.tensors if own.get(name, file) != file}
    yield from (name for name in header.tensors
                if name in own or not replaced or split_name(name, header.tensors)[0] not in replaced)  # fmt: skip


def lost_files(checkpoint: Checkpoint) -> list[str]:
    """Return the files that the index names and that are absent, with tensors that no other file holds."""
    stored = {name for header in checkpoint.headers.values() for name in header.tensors}  # under names as they are
    own = (checkpoint.index or {}).items()
    return sorted({file for name, file in own if file not in checkpoint.headers and name not in stored})


def mixed_files(checkpoint: Checkpoint) -> str:
    """Return what to do where the files are of two uploads, which one index would mix; "" where they are of one.

    Then the index names files that are absent, and files that it does not name have its tensors with other values.
    """
    tensors, named = checkpoint.tensors, set((checkpoint.index or {}).values())
    unnamed = (header for file, header in checkpoint.headers.items() if file not in named)
    others = (info for header in unnamed for info in header.tensors.values())
    used = ((info, tensors.get(info.name)) for info in others)
    twice = [(info, other) for info, other in used if other is not None and other.file in named][:_MOST_COMPARED]
    absent = sorted(named - checkpoint.headers.keys())
    if not absent or all(a.form == b.form and _sample(checkpoint, a) == _sample(checkpoint, b) for a, b in twice):
        return ""
    return f"download {some(absent)} again (`hf download`), and remove the files that the index does not name"


def _sample(checkpoint: Checkpoint, info: TensorInfo) -> list[bytes]:
    return checkpoint.read_blocks([(info, info.nbytes // 2 // 16 * 16)], SAMPLE)


def with_sound_index(checkpoint: Checkpoint, index: FileIndex, *, without: frozenset[str] = frozenset()) -> Checkpoint:
    """Return the checkpoint with the derived index in place of its own; files `without` stay unlisted."""
    weight_map = {name: file for name, file in index.weight_map.items() if file not in without}
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in index.weight_map.items()}
    return replace(checkpoint, index=weight_map, tensors=checkpoint.tensors | tensors, problems=())


def _unlisted(checkpoint: Checkpoint, weight_map: Mapping[str, str], family: Family) -> Iterator[str]:
    """Yield the tensors that a loader does not find where the checkpoint's own index, or its absence, leads it."""
    if checkpoint.index is None:
        # Without an index, transformers opens model.safetensors alone; a single file may be a head, or given as one.
        single = len(checkpoint.headers) < 2
        part = checkpoint.path.endswith(".safetensors") or not any(map(family.trunk_layer, weight_map))
        alone = SINGLE in checkpoint.headers or (single and part)
        yield from (
            name for name, file in weight_map.items() if not alone or (file != SINGLE and SINGLE in checkpoint.headers)
        )
        return
    files = set(checkpoint.index.values())
    for name, file in weight_map.items():
        if checkpoint.index.get(name) != file or file not in files:
            yield name


def _with_other_parts(checkpoint: Checkpoint, files: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """Return those of these files that hold other parts of the model: a final norm, towers of other modalities.

    known: The names of the model's layers, embedding and head, whose first components other parts have, too. Where
        they include a tower, towers under other first components are of another layout, such as Mistral's or mmproj.
    """
    roots = {name.partition(".")[0] for name in known}
    towers = any(key.endswith("_config") and _TOWER.match(key) for key in checkpoint.config)
    towers = towers and not any(_TOWER.match(part) for name in known for part in name.split(".", 3)[:3])
    leaves, found = _leaves(known), []
    for file in files:
        fresh = [name for name in checkpoint.headers[file].tensors if name not in known and not foreign([name])]
        if not fresh or _is_beside(fresh, leaves):
            continue
        others = {name.partition(".")[0] for name in fresh} - roots
        if all(towers and _TOWER.match(first) for first in others) and standalone({}, fresh) is None:
            found.append(file)
    return found


def _leaves(names: Iterable[str]) -> set[str]:
    """Return the last components of these names, without those of fused experts, which are modules in other layers."""
    return {name.rpartition(".")[2] for name in names if ".experts." not in name}


def _is_beside(names: Iterable[str], leaves: Collection[str]) -> bool:
    """Whether a file with these tensors is used beside a model with these last components of names, and not for it.

    Steering vectors and statistics of activations are named by the model's layers, and have no parameter's name.
    """
    return bool(leaves) and not any(_PARAMETER.fullmatch(name) or name.rpartition(".")[2] in leaves for name in names)


def of_model(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """Return the checkpoint without the tensors of unlisted files that are used beside a model, such as adapters."""
    beside = set(adapters(checkpoint))
    if checkpoint.unindexed:
        index = file_index(checkpoint, family)
        known, leaves = index.weight_map.keys(), _leaves(index.weight_map)
        fresh = {file: checkpoint.headers[file].tensors.keys() - known for file in index.left_out}
        beside |= {file for file, names in fresh.items() if names and _is_beside(names, leaves)}
    return checkpoint if not beside else replace(
        checkpoint, tensors={name: info for name, info in checkpoint.tensors.items() if info.file not in beside}
    )  # fmt: skip


def adapters(checkpoint: Checkpoint) -> list[str]:
    """Return the unlisted files that are adapters, by their tensors: files of a head have any name."""
    return [file for file in checkpoint.unindexed if of_adapter(checkpoint.headers[file].tensors)]


def _is_of_model(name: str, family: Family) -> bool:
    return bool(family.trunk_layer(name) or family.shared_role(name) or (family.names and family.canonical(name, 0)))


@dataclass(frozen=True)
class FileStamps:
    """What the file system says of some files."""

    stamps: tuple[tuple[Path, _Stamp | None], ...]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "FileStamps":
        """Look at the files now."""
        return cls(tuple((path, _stamp(path)) for path in paths))

    @classmethod
    def of_weights(cls, *folders: Path) -> "FileStamps":
        """Look at the weights in these folders, links followed."""
        files = {file.resolve() for folder in folders for file in folder.rglob("*.safetensors")}
        return cls.of(sorted(files))

    def changed(self) -> Path | None:
        """Return the first file that is not as it was and would show in a mapping; None if there is none.

        A file that was replaced or removed keeps its content for those who have it open.
        """
        return self._first(lambda before, now: now is not None and now[:2] == before[:2] and now != before)

    def replaced(self) -> Path | None:
        """Return the first file whose path now names another file, or none; None if there is none."""
        return self._first(lambda before, now: now is None or now[:2] != before[:2])

    def _first(self, is_one: Callable[[_Stamp, _Stamp | None], bool]) -> Path | None:
        stamps = ((path, before, _stamp(path)) for path, before in self.stamps)
        return next((path for path, before, now in stamps if before is not None and is_one(before, now)), None)


def _stamp(path: Path) -> _Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
