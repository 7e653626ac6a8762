"""Checkpoints of a run's state: in the task's own layout, or as shards written by several processes.

Each process writes its shards; any number of processes can read them. The files are safetensors, written and resharded
by torch.distributed.checkpoint (`hf_storage`), which stores a shard's offsets in the file's metadata. DCP's default
format is not used, as it stores them in a pickle.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nextn.checkpoint.safetensors_file import read_header, write_json
from nextn.checkpoint.staging_folder import need_room
from nextn.errors import CheckpointError
from nextn.train.joint_task import Task
from nextn.train.optimizers import load_state_tensors, state_bytes, state_tensors, zero_state
from nextn.train.ranks import Ranks
from nextn.train.run_folder import read_moments, read_state, write_moments, write_state

_INDEX, _SHARDS = "shards.json", "shards"


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, owner: str, finish: Callable[[Path], None]
) -> None:
    """Write `folder` atomically; all processes call it with the same tensor names.

    Args:
        folder: The checkpoint.
        tensors: Sharded or replicated tensors.
        ranks: The processes.
        owner: An id that `read_shards` must be given too.
        finish: Called by the first process when the tensors are on disk, before the folder gets its name.

    Raises:
        CheckpointError: On all processes, if it cannot be written.
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


def stored_names(folder: Path) -> set[str]:
    """Return the names of the tensors in the folder. Raises CheckpointError for a damaged file."""
    return {name for file in sorted((folder / _SHARDS).iterdir()) for name in read_header(file).tensors}


def read_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, owner: str) -> None:
    """Fill `tensors` in place; they may be sharded differently from when they were written.

    Raises CheckpointError, on all processes, for tensors that are missing, damaged, of another shape or owner.
    """
    index = json.loads((folder / _INDEX).read_text())
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
        write_moments(stage, moments)
        write_state(stage, task.config, **state)

    if task.ranks.is_alone:
        task.write(folder, add_state)
    else:
        _write_shards(folder, task, moments, lambda stage: write_state(stage, task.config, **state))


def num_bytes(task: Task, optimizers: Optimizers = ()) -> int:
    """Return the bytes of a checkpoint: weights and optimizer state; without optimizers, the weights alone."""
    return sum(value.nbytes for value in task.stored().values()) + state_bytes(optimizers)


def read(folder: Path, task: Task, optimizers: Optimizers) -> dict[str, Any]:
    """Load a checkpoint and return its plain values.

    Raises CheckpointError if it is damaged, ConfigError if it was trained with other settings.
    """
    state = read_state(folder, task.config)
    if is_sharded(folder):
        known, moments = stored_names(folder), _tensors(task, zero_state(optimizers, task.named))
        # A parameter that never had a gradient has no moments.
        present = {name: value for name, value in moments.items() if name in known}
        read_shards(folder, _tensors(task, {}) | present, task.ranks, owner=task.fingerprint)
        return state
    task.read(folder)
    try:
        load_state_tensors(optimizers, task.named, read_moments(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return state


def write_weights(folder: Path, task: Task) -> None:
    """Write the weights alone."""
    need_room(folder, num_bytes(task))
    if task.ranks.is_alone:
        task.write(folder, lambda _: None)
    else:
        _write_shards(folder, task, {}, lambda _: None)


def read_weights(folder: Path, task: Task) -> None:
    """Load what `write_weights` wrote. Raises CheckpointError if it is damaged."""
    if is_sharded(folder):
        read_shards(folder, _tensors(task, {}), task.ranks, owner=task.fingerprint)
    else:
        task.read(folder)


def _write_shards(folder: Path, task: Task, moments: Mapping[str, Tensor], finish: Callable[[Path], None]) -> None:
    write_shards(folder, _tensors(task, moments), task.ranks, owner=task.fingerprint, finish=finish)


def _tensors(task: Task, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = {f"model.{name}": value for name, value in task.stored().items()}
    return stored | {f"moments.{name}": value for name, value in moments.items()}
