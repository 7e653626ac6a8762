"""A training run's folder: its log, and checkpoints in the task's own layout or as shards. This module knows no model.

Each process writes its shards; any number of processes can read them. The files are safetensors, written and resharded
by torch.distributed.checkpoint (`hf_storage`), which stores a shard's offsets in the file's metadata. DCP's default
format is not used, as it stores them in a pickle.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nextn.bounded_json import JsonDict
from nextn.checkpoint.safetensors_file import atomic, read_header, write_json, write_tensors
from nextn.checkpoint.staging_folder import SUFFIX, clear_stages, need_room, owned, writing
from nextn.checkpoint.tensors import bytes_of
from nextn.errors import CheckpointError, ConfigError
from nextn.train.config import TrainConfig
from nextn.train.distributed import Ranks
from nextn.train.joint_task import Task
from nextn.train.metrics import Record
from nextn.train.optimizers import load_state_tensors, state_bytes, state_tensors, zero_state
from nextn.train.run_options import FREE_SETTINGS

_STATE, _MOMENTS = "trainer.json", "optimizer.safetensors"
_NUM_KEPT = 2
MAX_CHECKPOINTS = _NUM_KEPT + 1  # while the newest is written
_INDEX, _SHARDS = "shards.json", "shards"
_SAMPLES = 1024  # elements of each tensor, evenly spread


class RunFolder:
    """The folder of one run. Raises CheckpointError if it cannot be created."""

    def __init__(self, path: Path) -> None:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        self.path, self._is_locked = path, False

    @contextmanager
    def locked(self, *, needed: bool = True) -> Iterator[None]:
        """Lock the folder while a run writes to it (a rank that does not is not `needed`); reentrant.

        Raises CheckpointError if another run has the lock.
        """
        if self._is_locked or not needed:
            yield
            return
        with owned(self.path, inside=True):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first: a checkpoint's state is written last."""
        complete = [folder for folder in self.path.glob("step-*") if (folder / _STATE).exists()]
        return sorted(complete, key=lambda folder: (len(folder.name), folder.name))  # more than seven digits come last

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` steps."""
        return self.path / f"step-{step:07d}"

    @property
    def best(self) -> Path:
        """The path of the weights with the best held-out acceptance."""
        return self.path / "best"

    def prune(self) -> None:
        """Remove all checkpoints but the newest two, and partial files of killed processes.

        If a process was killed while it replaced `best`, the previous one is restored first.
        """
        clear_stages(self.path)
        replaced = sorted(self.path.glob(".best.*old"))
        if replaced and not self.best.exists():
            replaced[-1].rename(self.best)
        partial = [p for pattern in (".step-*", ".best.*", ".head-*", ".start-*") for p in self.path.glob(pattern)]
        for old in [*self.checkpoints()[:-_NUM_KEPT], *partial]:
            if not old.name.endswith(SUFFIX):
                shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def log(self, step: int, *, discard: bool = False) -> Iterator[Callable[[Record], None]]:
        """Yield a function that writes a record as a line of metrics.jsonl, for a run at `step`.

        Lines of steps that a resumed run repeats are dropped. discard: write nothing, for a rank that does not log.
        """
        path = Path(os.devnull) if discard else self.path / "metrics.jsonl"
        old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in old if _step_of(line) <= step]
        if kept != old:
            with atomic(path) as file:
                file.write("".join(line + "\n" for line in kept).encode())

        def write(record: Record) -> None:
            try:
                file.write((json.dumps(record.as_record()) + "\n").encode())
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}.") from error

        # Unbuffered: after a failed write (disk full), closing the file must not try again.
        with path.open("ab", buffering=0) as file:
            yield write


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except ValueError:  # incomplete, as the process was killed
        return math.inf


def read_state(folder: Path, config: TrainConfig) -> JsonDict:
    """Read the plain values. Raises ConfigError if the checkpoint was trained with settings other than `config`."""
    state: JsonDict = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    # Settings that did not exist when the checkpoint was written have their defaults.
    then = {field.name: field.default for field in fields(config)} | state.pop("config")
    now = asdict(config)
    changed = sorted(key for key in now.keys() - {*FREE_SETTINGS} if then.get(key) != now[key])
    if changed:
        differences = ", ".join(f"{key} ({then.get(key)}, now {now[key]})" for key in changed)
        raise ConfigError(f"{folder} was trained with another {differences}; resume with the same settings")
    return state


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, owner: str, finish: Callable[[Path], None]
) -> None:
    """Write `folder` atomically; all processes call it with the same tensor names, and later read by the same `owner`.

    The first process calls `finish` when the tensors are on disk, before the folder gets its name. Raises
    CheckpointError on all processes if it cannot be written.
    """
    staging, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    if ranks.is_first:
        shutil.rmtree(staging, ignore_errors=True)
        (staging / _SHARDS).mkdir(parents=True)
    ranks.wait()
    writer = HuggingFaceStorageWriter(str(staging / _SHARDS), save_distributed=True)
    try:
        save(_sized(tensors), storage_writer=writer, no_dist=ranks.is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be written: {_first(error)}; it was not created") from error
    if ranks.is_first:
        write_json(staging / _INDEX, {"owner": owner, "files": _sizes(staging)})
        finish(staging)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        staging.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    ranks.wait()


def is_sharded(folder: Path) -> bool:
    """Return whether several processes wrote the checkpoint."""
    return (folder / _SHARDS).is_dir()


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted((folder / _SHARDS).iterdir())}


def read_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, owner: str) -> None:
    """Fill `tensors` in place; they may be sharded differently from when they were written.

    Raises CheckpointError, on all processes, for tensors that are missing, damaged, of another shape or owner.
    """
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    # A missing file would leave tensors partly unfilled, which nothing else detects.
    if index["files"] != _sizes(folder):
        raise CheckpointError(
            f"{folder}: its files are not those that were written: expected {index['files']} (bytes), found "
            f"{_sizes(folder)}. Copy them again, or remove the folder to resume from the previous one"
        )
    if index["owner"] != owner:
        raise CheckpointError(f"{folder}: trained on another trunk; give the same --from, or start in another folder")
    reader = HuggingFaceStorageReader(str(folder / _SHARDS))
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # DCP warns if there is only one process
            load(_sized(tensors), storage_reader=reader, no_dist=ranks.is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be read: {_first(error)}") from error


def _sized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Scalars as views [1]: DCP cannot read a slice of a stored scalar.
    return {name: value.detach().reshape(1) if value.ndim == 0 else value.detach() for name, value in tensors.items()}


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"process {rank}: {cause}"


Optimizers = Sequence[torch.optim.Optimizer]


def write(folder: Path, task: Task, optimizers: Optimizers, **state: object) -> None:
    """Write a checkpoint atomically: weights, moments, settings, and `state`, plain values."""
    need_room(folder, num_bytes(task, optimizers))
    moments = state_tensors(optimizers, task.named)

    def add_state(stage: Path) -> None:
        if task.ranks.is_alone:
            write_tensors(stage / _MOMENTS, moments)
        write_json(stage / _STATE, {**state, "config": asdict(task.config)})  # last: it marks a complete checkpoint

    _write(folder, task, moments, add_state)


def num_bytes(task: Task, optimizers: Optimizers = ()) -> int:
    """Return the bytes of a checkpoint: weights and optimizer state; without optimizers, the weights alone."""
    return sum(value.nbytes for value in task.stored().values()) + state_bytes(optimizers)


def read(folder: Path, task: Task, optimizers: Optimizers) -> JsonDict:
    """Load a checkpoint and return its plain values.

    Raises CheckpointError if it is damaged, ConfigError if it was trained with other settings.
    """
    state = read_state(folder, task.config)
    if is_sharded(folder):
        known = {name for file in sorted((folder / _SHARDS).iterdir()) for name in read_header(file).tensors}
        moments = _tensors(task, zero_state(optimizers, task.named))
        # A parameter that never had a gradient has no moments.
        present = {name: value for name, value in moments.items() if name in known}
        read_shards(folder, _tensors(task, {}) | present, task.ranks, owner=task.fingerprint)
        return state
    task.read(folder)
    try:
        load_state_tensors(optimizers, task.named, load_file(folder / _MOMENTS))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return state


def write_best(folder: Path, task: Task, state: Mapping[str, object]) -> None:
    """Write the weights with the best held-out acceptance, and the state of the `BestTracker`."""
    need_room(folder, num_bytes(task))
    _write(folder, task, {}, lambda stage: write_json(stage / _STATE, state))


def newest_best(folder: Path, state: JsonDict) -> JsonDict:
    """Return the state in `folder` if it is newer than a checkpoint's: its session was killed before the next one."""
    path = folder / _STATE
    stored: JsonDict = json.loads(path.read_text(encoding="utf-8")) if path.exists() else state
    return stored if stored["baseline"] == state["baseline"] and stored["best_step"] > state["best_step"] else state


def read_weights(folder: Path, task: Task) -> None:
    """Load the weights that `write_best` wrote. Raises CheckpointError if it is damaged."""
    if is_sharded(folder):
        read_shards(folder, _tensors(task, {}), task.ranks, owner=task.fingerprint)
    else:
        task.read(folder)


def _write(folder: Path, task: Task, moments: Mapping[str, Tensor], finish: Callable[[Path], None]) -> None:
    if task.ranks.is_alone:
        task.write(folder, finish)
    else:
        write_shards(folder, _tensors(task, moments), task.ranks, owner=task.fingerprint, finish=finish)


def _tensors(task: Task, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = {f"model.{name}": value for name, value in task.stored().items()}
    return stored | {f"moments.{name}": value for name, value in moments.items()}


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of name, dtype, shape and samples of every parameter and persistent buffer.

    Any training changes enough elements to be detected; a change of single elements may not be.
    """
    return fingerprint_of(sorted(module.state_dict().items()))


def fingerprint_of(state: Iterable[tuple[str, Tensor]]) -> str:
    """Return the `fingerprint` of a module with this state, given in the order of names."""
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        flat = value.detach().flatten()
        digest.update(bytes_of(flat[:: max(1, len(flat) // _SAMPLES)].cpu()))
    return digest.hexdigest()
