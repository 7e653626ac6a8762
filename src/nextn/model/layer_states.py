"""Hidden states between decoder layers: in memory, or in a folder that an interrupted run resumes from."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from nextn.checkpoint.safetensors_file import atomic, write_json
from nextn.checkpoint.staging_folder import owned
from nextn.errors import CheckpointError, ConfigError
from nextn.text_format import changes

_FORMAT, _RECORD, _PREFIX, _INPUT = 1, "states.json", "states-", "input-"


@dataclass(frozen=True)
class LayerProgress:
    """What reading and running one decoder layer took."""

    index: int
    num_bytes: int  # read from the checkpoint
    read_seconds: float
    run_seconds: float
    resumed: bool = False  # by an earlier process
    observed: object = None  # what `observe` of `StreamedTrunk.read_layers` returned, as JSON


class StatesInMemory:
    """The states after the last complete layer, as they are."""

    def start(self, num_batches: int) -> tuple[list[LayerProgress], list[object]]:
        return [], [None] * num_batches

    def keep(self, place: int, states: object) -> object:
        return states

    def finish_layer(self, progress: LayerProgress) -> None:
        pass


class StateFolder:
    """The states after the last complete layer, in mapped files with checksums, and which layers are done.

    A layer's files are complete before its record is, and those of the layer before are removed after it.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        """Open a folder that `locked` holds. Raises ConfigError if it holds the states of another run."""
        self._folder, self._identity = folder, {"format": _FORMAT, **identity}
        self._layers: list[LayerProgress] = []
        self._checksums: dict[str, str] = {}
        if (folder / _RECORD).exists():
            self._read_record()

    @classmethod
    @contextmanager
    def locked(cls, folder: Path, identity: Mapping[str, object]) -> Iterator["StateFolder"]:
        """Hold a folder, which is created. Raises CheckpointError if another process holds it or it is not writable."""
        try:
            with owned(folder, inside=True):
                yield cls(folder, identity)
        except OSError as error:
            message = f"{folder}: cannot be used: {error.strerror or error}; remove it, or choose another folder"
            raise CheckpointError(message) from error

    def start(self, num_batches: int) -> tuple[list[LayerProgress], list[object]]:
        """Return the layers that are done and the states after them. Raises CheckpointError for a damaged file."""
        self._remove_others()
        if not self._layers:
            return [], [None] * num_batches
        for name, checksum in self._checksums.items():
            if not (self._folder / name).exists() or _checksum(self._folder / name) != checksum:
                raise CheckpointError(
                    f"{self._folder / name}: missing or damaged (another checksum). Remove the folder to start again"
                )
        last = self._layers[-1].index
        return self._layers, [_read(self._path(last, place)) for place in range(num_batches)]

    def keep(self, place: int, states: object) -> object:
        """Write the states of a batch after the next layer; return them, mapped."""
        path = self._path(len(self._layers), place)
        leaves, structure = tree_flatten(states)
        tensors = {str(index): leaf.contiguous() for index, leaf in enumerate(leaves) if leaf is not None}
        with atomic(path) as file:
            file.write(save(tensors, metadata={"structure": treespec_dumps(structure)}))
        self._checksums[path.name] = _checksum(path)
        return _read(path)

    def finish_layer(self, progress: LayerProgress) -> None:
        """Record that all batches have passed a layer, and remove the states before it."""
        self._layers.append(progress)
        prefix = self._path(progress.index, 0).name.rpartition("-")[0]
        self._checksums = {name: each for name, each in self._checksums.items() if name.startswith(prefix)}
        record = {"identity": self._identity, "layers": list(map(asdict, self._layers)), "files": self._checksums}
        write_json(self._folder / _RECORD, record)
        self._remove_others()

    def _path(self, layer: int, place: int) -> Path:
        return self._folder / f"{_PREFIX}{layer:04d}-{place:05d}.safetensors"

    def _remove_others(self) -> None:
        for path in [*self._folder.glob(f"{_PREFIX}*"), *self._folder.glob(f".{_PREFIX}*.tmp")]:
            if path.name not in self._checksums:
                path.unlink(missing_ok=True)

    def _read_record(self) -> None:
        path = self._folder / _RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            layers = [LayerProgress(**{**layer, "resumed": True}) for layer in record["layers"]]
            identity, self._checksums = record["identity"], dict(record["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not readable: {error}. Remove the folder to start again") from error
        if identity != self._identity:
            names = ", ".join(key for key in self._identity if identity.get(key) != self._identity[key])
            raise ConfigError(
                f"{self._folder} holds the states of a run with another {names or changes(identity, self._identity)}; "
                "give another folder, or remove this one"
            )
        self._layers = layers


def take_rows(states: object, rows: slice, num_rows: int) -> object:
    """Return some of the `num_rows` sequences of a layer's output. Raises ConfigError if it has another first size."""
    leaves, structure = tree_flatten(states)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(len(leaf) != num_rows for leaf in tensors):
        sizes = ", ".join(str(tuple(leaf.shape)) for leaf in tensors)
        raise ConfigError(f"states of {num_rows} sequences have sizes {sizes}; they cannot be taken apart")
    return tree_unflatten([leaf[rows] if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def join_rows(parts: Sequence[object]) -> object:
    """Return the layer's output over all sequences, from that over a part of them each."""
    if len(parts) == 1:
        return parts[0]
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        torch.cat(column) if isinstance(column[0], Tensor) else column[0]
        for column in zip(*(each for each, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])


def remove_states(folder: Path) -> None:
    """Remove a folder's states and record, and the folder if nothing else is in it."""
    for path in [*folder.glob(f"{_PREFIX}*"), *folder.glob(f"{_INPUT}*"), folder / _RECORD]:
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def input_file(layer: int) -> str:
    """Return the name of a file, beside the states, for a layer's input; it stays until the states are removed."""
    return f"{_INPUT}{layer:04d}.safetensors"


def hash_batches(batches: Sequence[Tensor]) -> str:
    """Return the SHA-256 of the shapes and values of integer tensors."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(str(tuple(batch.shape)).encode() + batch.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> object:
    try:
        with safe_open(path, framework="pt") as file:
            structure = treespec_loads(file.metadata()["structure"])
            names = set(file.keys())
            keys = map(str, range(structure.num_leaves))
            leaves = [file.get_tensor(key) if key in names else None for key in keys]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}. Remove the folder to start again") from error
    return tree_unflatten(leaves, structure)
