"""A run's state as a checkpoint: in the task's own layout, or in the shards of several processes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextn.checkpoints.stages import need_room
from nextn.distributed.sharded_state import is_sharded, read_shards, stored_names, write_shards
from nextn.errors import CheckpointError
from nextn.training.optimisers import empty_state, load_state_tensors, state_bytes, state_tensors
from nextn.training.run_folder import read_moments, read_state, write_moments, write_state
from nextn.training.tasks import Task

Optimisers = Sequence[torch.optim.Optimizer]


def write(folder: Path, task: Task, optimisers: Optimisers, **state: object) -> None:
    """Weights, moments, settings, and `state`, plain values; whole or not at all."""
    need_room(folder, num_bytes(task, optimisers))
    moments = state_tensors(optimisers, task.named)

    def beside(stage: Path) -> None:
        write_moments(stage, moments)
        write_state(stage, task.config, **state)

    if task.ranks.is_alone:
        task.write(folder, beside)
    else:
        _write_shards(folder, task, moments, lambda stage: write_state(stage, task.config, **state))


def num_bytes(task: Task, optimisers: Optimisers = ()) -> int:
    """Bytes of a checkpoint: the weights and what the optimisers remember; without optimisers, the weights alone."""
    return sum(value.nbytes for value in task.stored().values()) + state_bytes(optimisers)


def read(folder: Path, task: Task, optimisers: Optimisers) -> dict[str, Any]:
    """Take what `write` wrote -> the plain values.

    Raises CheckpointError for a checkpoint that is damaged, ConfigError for one that was trained with other settings.
    """
    state = read_state(folder, task.config)
    if is_sharded(folder):
        known, moments = stored_names(folder), _tensors(task, empty_state(optimisers, task.named))
        # A parameter that never had a gradient has no moments.
        held = {name: value for name, value in moments.items() if name in known}
        read_shards(folder, _tensors(task, {}) | held, task.ranks, owner=task.fingerprint)
        return state
    task.read(folder)
    try:
        load_state_tensors(optimisers, task.named, read_moments(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return state


def write_weights(folder: Path, task: Task) -> None:
    """The weights alone."""
    need_room(folder, num_bytes(task))
    if task.ranks.is_alone:
        task.write(folder, lambda _: None)
    else:
        _write_shards(folder, task, {}, lambda _: None)


def read_weights(folder: Path, task: Task) -> None:
    """Take what `write_weights` wrote. Raises CheckpointError for one that is damaged."""
    if is_sharded(folder):
        read_shards(folder, _tensors(task, {}), task.ranks, owner=task.fingerprint)
    else:
        task.read(folder)


def _write_shards(folder: Path, task: Task, moments: Mapping[str, Tensor], finish: Callable[[Path], None]) -> None:
    write_shards(folder, _tensors(task, moments), task.ranks, owner=task.fingerprint, finish=finish)


def _tensors(task: Task, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = {f"model.{name}": value for name, value in task.stored().items()}
    return stored | {f"moments.{name}": value for name, value in moments.items()}
