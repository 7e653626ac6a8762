"""One training loop over any task: a generator of records that resumes exactly where it stopped.

It draws nothing from a global random state and reads no clock but for tokens/s: step s is the same work in every run.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from nextn.errors import CheckpointError, TrainingError
from nextn.loss import LambdaSchedule
from nextn.metrics import EvalRecord, Record, StepRecord
from nextn.optimisers import load_state_tensors, optimisers, set_rates, state_tensors
from nextn.run_folder import RunFolder, read_moments, read_state, write_state
from nextn.tasks import Task


class Trainer:
    """Trains what `task` names, in place. `run` yields records; whoever consumes them draws progress and decides when
    to stop. out: the run's folder, for checkpoints and the log."""

    def __init__(self, task: Task, *, out: Path) -> None:
        self.task, self.config, self.folder, self.step = task, task.config, RunFolder(out), 0
        self.lam = LambdaSchedule.parse(self.config.lam, total=self.config.tokens)
        self.optimisers = optimisers(task.named, self.config)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train from the current step to the last; on should_stop() or the end, a checkpoint is written.

        Raises TrainingError for a loss that is not finite; checkpoints written before stay.
        """
        with self.folder.log(self.step) as log:
            while self.step < self.config.steps and not should_stop():
                record: Record = self._step()
                log.write(record)
                yield record
                if _due(self.step, self.config.eval_every) and self.step < self.config.steps:
                    record = self.evaluate()
                    log.write(record)
                    yield record
                if _due(self.step, self.config.save_every):
                    self.save()
            if self.step == self.config.steps:
                record = self.evaluate(last=True)
                log.write(record)
                yield record
            self.save()

    def evaluate(self, *, last: bool = False) -> EvalRecord:
        """Held-out figures now."""
        return self.task.evaluate(self.step, last=last)

    def save(self) -> Path:
        """Write `out/step-<n>`: the task's weights and the optimisers' state. Older ones are removed."""
        folder = self.folder.checkpoint(self.step)
        if folder not in self.folder.checkpoints():
            self.task.write(folder, self._write_state)
        self.folder.prune()
        return folder

    def write_result(self, folder: Path) -> None:
        """Write what was trained, in its published layout, with the record of the run that made it."""
        self.task.write_result(folder, self.folder.path)

    def has_checkpoint(self) -> bool:
        """Whether `out` holds a checkpoint that `resume` could go on from."""
        return bool(self.folder.checkpoints())

    def resume(self) -> bool:
        """Go back to the newest whole checkpoint under `out`; False if there is none.

        Raises CheckpointError for one that is damaged, ConfigError for one that was trained with other settings.
        """
        if not self.has_checkpoint():
            return False
        folder = self.folder.checkpoints()[-1]
        state = read_state(folder, self.config)
        self.task.read(folder)
        try:
            load_state_tensors(self.optimisers, self.task.named, read_moments(folder))
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        self.step = int(str(state["step"]))
        return True

    def _step(self) -> StepRecord:
        started, config = time.perf_counter(), self.config
        lam, scale = self.lam.at(self.step * config.tokens_per_step), config.schedule(self.step)
        set_rates(self.optimisers, scale)
        report = self.task.loss(self.task.example(self.step), lam)
        if not bool(torch.isfinite(report.total)):
            raise TrainingError(
                f"the loss of step {self.step} is {report.total.item()}; batch {self.step} of seed {config.seed} or a "
                f"learning rate of {config.lr * scale:.2g} broke it. Checkpoints in {self.folder.path} stand; try a "
                "lower lr"
            )
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        report.total.backward()
        norm = nn.utils.clip_grad_norm_(self.task.named.values(), config.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        return StepRecord(
            step=self.step,
            num_steps=config.steps,
            tokens=self.step * config.tokens_per_step,
            loss=tuple((report.sums / report.counts.clamp_min(1)).tolist()),
            lr=config.lr * scale,
            lam=lam,
            grad_norm=float(norm),
            tokens_per_s=config.tokens_per_step / (time.perf_counter() - started),
        )

    def _write_state(self, folder: Path) -> None:
        write_state(folder, state_tensors(self.optimisers, self.task.named), self.config, step=self.step)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
