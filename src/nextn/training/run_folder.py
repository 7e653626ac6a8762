"""A training run's folder: its log, and its checkpoints found, kept, removed and read. Knows no model."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from nextn.checkpoints.stages import SUFFIX, clear_stages, owned
from nextn.checkpoints.tensor_file import atomic, write_json
from nextn.errors import CheckpointError, ConfigError
from nextn.training.metrics import Record
from nextn.training.train_config import INDIFFERENT, TrainConfig

_STATE, _MOMENTS = "trainer.json", "optimizer.safetensors"
_KEPT = 2
MOST_CHECKPOINTS = _KEPT + 1  # while the newest is written


class RunFolder:
    """Raises CheckpointError where the folder cannot be made."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error}; choose another folder") from error
        self.path, self._is_locked = path, False

    @contextmanager
    def locked(self, *, needed: bool = True) -> Iterator[None]:
        """Held while a run writes here: another process that trains into the folder is refused with CheckpointError.

        May be held again inside. needed: False for a process that is not the one that writes.
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
        """The whole ones, oldest first: the state is written last, before a checkpoint gets its name."""
        return sorted(folder for folder in self.path.glob("step-*") if (folder / _STATE).exists())

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` steps belongs."""
        return self.path / f"step-{step:07d}"

    @property
    def best(self) -> Path:
        """Where the head with the best held-out figures is kept."""
        return self.path / "best"

    def prune(self) -> None:
        """Remove all checkpoints but the newest two, and what a killed process left half-written.

        A best head that was moved aside, and its successor not yet in its place, is put back first.
        """
        clear_stages(self.path)
        aside = sorted(self.path.glob(".best.*old"))
        if aside and not self.best.exists():
            aside[-1].rename(self.best)
        left = [path for pattern in (".step-*", ".best.*", ".head-*", ".start-*") for path in self.path.glob(pattern)]
        for old in [*self.checkpoints()[:-_KEPT], *left]:
            if not old.name.endswith(SUFFIX):
                shutil.rmtree(old, ignore_errors=True)

    def log(self, step: int, *, discard: bool = False) -> "Log":
        """discard: for a process that is not the one that logs."""
        return Log(Path(os.devnull) if discard else self.path / "metrics.jsonl", step)


class Log:
    """metrics.jsonl: one record a line. Lines of steps that a resumed run does again are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        old = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in old if _step_of(line) <= step]
        if kept != old:
            with atomic(path) as file:
                file.write("".join(line + "\n" for line in kept).encode())
        # Unbuffered: what a full disk refuses must not be tried again when the file is closed.
        self.path, self.file = path, path.open("ab", buffering=0)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, record: Record) -> None:
        try:
            self.file.write((json.dumps(record.as_record()) + "\n").encode())
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror or error}.") from error


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except ValueError:  # cut by a kill
        return math.inf


def write_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """The optimisers' tensors."""
    save_file(dict(moments), folder / _MOMENTS)


def write_state(folder: Path, config: TrainConfig, **state: object) -> None:
    """The settings and `state`, plain values; last of all, as it makes a checkpoint of the folder."""
    write_json(folder / _STATE, {**state, "config": asdict(config)})


def read_state(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """The plain values. Raises ConfigError for a checkpoint that was trained with other settings than `config`."""
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    # A setting that is younger than the checkpoint had its default's effect.
    then = {each.name: each.default for each in fields(config)} | state.pop("config")
    now = asdict(config)
    changed = sorted(key for key in now.keys() - {*INDIFFERENT} if then.get(key) != now[key])
    if changed:
        told = ", ".join(f"{key} ({then.get(key)}, now {now[key]})" for key in changed)
        raise ConfigError(f"{folder} was trained with another {told}; resume with the same settings")
    return state


def read_moments(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / _MOMENTS)
