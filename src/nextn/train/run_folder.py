"""A training run's folder: its log and its checkpoints. This module knows no model."""

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

from nextn.checkpoint.safetensors_file import atomic, write_json
from nextn.checkpoint.staging_folder import SUFFIX, clear_stages, owned
from nextn.errors import CheckpointError, ConfigError
from nextn.train.config import FREE_SETTINGS, TrainConfig
from nextn.train.metrics import Record

_STATE, _MOMENTS = "trainer.json", "optimizer.safetensors"
_NUM_KEPT = 2
MAX_CHECKPOINTS = _NUM_KEPT + 1  # while the newest is written


class RunFolder:
    """The folder of one run. Raises CheckpointError if it cannot be created."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error}; choose another folder") from error
        self.path, self._is_locked = path, False

    @contextmanager
    def locked(self, *, needed: bool = True) -> Iterator[None]:
        """Lock the folder while a run writes to it; reentrant. Raises CheckpointError if another run has the lock.

        needed: False for a rank that does not write.
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
        return sorted(folder for folder in self.path.glob("step-*") if (folder / _STATE).exists())

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

    def log(self, step: int, *, discard: bool = False) -> "MetricsLog":
        """Open metrics.jsonl for a run at `step`; discard: write nothing, for a rank that does not log."""
        return MetricsLog(Path(os.devnull) if discard else self.path / "metrics.jsonl", step)


class MetricsLog:
    """metrics.jsonl, one record per line; lines of steps that a resumed run repeats are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        old = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in old if _step_of(line) <= step]
        if kept != old:
            with atomic(path) as file:
                file.write("".join(line + "\n" for line in kept).encode())
        # Unbuffered: after a failed write (disk full), closing the file must not try again.
        self.path, self.file = path, path.open("ab", buffering=0)

    def __enter__(self) -> "MetricsLog":
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
    except ValueError:  # incomplete, as the process was killed
        return math.inf


def write_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Write the optimizers' tensors."""
    save_file(dict(moments), folder / _MOMENTS)


def write_state(folder: Path, config: TrainConfig, **state: object) -> None:
    """Write the settings and `state`, plain values. Call it last: it marks the checkpoint as complete."""
    write_json(folder / _STATE, {**state, "config": asdict(config)})


def read_state(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """Read the plain values. Raises ConfigError if the checkpoint was trained with settings other than `config`."""
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    # Settings that did not exist when the checkpoint was written have their defaults.
    then = {field.name: field.default for field in fields(config)} | state.pop("config")
    now = asdict(config)
    changed = sorted(key for key in now.keys() - {*FREE_SETTINGS} if then.get(key) != now[key])
    if changed:
        differences = ", ".join(f"{key} ({then.get(key)}, now {now[key]})" for key in changed)
        raise ConfigError(f"{folder} was trained with another {differences}; resume with the same settings")
    return state


def read_moments(folder: Path) -> dict[str, Tensor]:
    """Read the optimizers' tensors."""
    return load_file(folder / _MOMENTS)
