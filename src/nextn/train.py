"""One training loop over any task: a generator of records that resumes exactly where it stopped.

It draws nothing from a global random state and reads no clock but for tokens/s: step s is the same work in every run.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from nextn.errors import CheckpointError, TrainingError
from nextn.loss import LambdaSchedule
from nextn.metrics import EvalRecord, HeadRecord, Record, StepRecord
from nextn.optimisers import load_state_tensors, optimisers, set_rates, state_tensors
from nextn.run_folder import RunFolder, read_moments, read_state, write_state
from nextn.standing import Standing
from nextn.tasks import Task


class Trainer:
    """Trains what `task` names, in place. `run` yields records; whoever consumes them draws progress and decides when
    to stop. out: the run's folder, for checkpoints and the log."""

    def __init__(self, task: Task, *, out: Path) -> None:
        self.task, self.config, self.folder, self.step = task, task.config, RunFolder(out), 0
        self.lam = LambdaSchedule.parse(self.config.lam, total=self.config.tokens)
        self.optimisers = optimisers(task.named, self.config)
        self.standing = Standing(getattr(self.config, "patience", 0))

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train from the current step to the last; on should_stop() or the end, a checkpoint is written.

        A head that was better at an earlier evaluation is taken back at the end. Raises TrainingError for a loss that
        is not finite; checkpoints written before stay.
        """
        with self.folder.log(self.step) as log:
            for record in self._records(should_stop):
                log.write(record)
                yield record

    def _records(self, should_stop: Callable[[], bool]) -> Iterator[Record]:
        if self.step == 0 and self.task.has_baseline:
            yield self.evaluate()
        while not self.is_over and not should_stop():
            yield self._step()
            if _due(self.step, self.config.eval_every) and self.step < self.config.steps:
                yield self.evaluate()
            if _due(self.step, self.config.save_every):
                self.save()
        self.save()
        if self.is_over:
            yield self.evaluate(last=True)
            if self.standing.best_step not in (0, self.step):
                self.task.read(self.folder.best)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or held-out figures have not risen for long enough."""
        return self.step == self.config.steps or self.standing.is_done

    def evaluate(self, *, last: bool = False) -> EvalRecord | HeadRecord:
        """Held-out figures now; the best head so far is kept."""
        record = self.task.evaluate(self.step, last=last)
        if isinstance(record, HeadRecord) and self.standing.see(self.step, record.foreseen):
            self.task.write(self.folder.best, lambda _: None)
        return record

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
        self.step = state["step"]
        self.standing.load_state(state["standing"])
        return True

    def _step(self) -> StepRecord:
        started, config = time.perf_counter(), self.config
        lam, scale = self.lam.at(self.step * config.tokens_per_step), config.schedule(self.step)
        set_rates(self.optimisers, scale)
        report = self.task.loss(self.task.example(self.step), lam)
        self._check_finite("loss", report.total)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        report.total.backward()
        norm = nn.utils.clip_grad_norm_(self.task.named.values(), config.clip)
        self._check_finite("gradient", norm)  # before it spoils parameters that a checkpoint would hold
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        return StepRecord(
            step=self.step,
            num_steps=config.steps,
            tokens=self.step * config.tokens_per_step,
            lr=config.lr * scale,
            lam=lam,
            grad_norm=float(norm),
            tokens_per_s=config.tokens_per_step / (time.perf_counter() - started),
            **self.task.figures(report),
        )

    def _check_finite(self, name: str, value: Tensor) -> None:
        if not bool(torch.isfinite(value)):
            rate = self.config.lr * self.config.schedule(self.step)
            raise TrainingError(
                f"the {name} of step {self.step} is {value.item()}; batch {self.step} of seed {self.config.seed} or a "
                f"learning rate of {rate:.2g} broke it. Checkpoints in {self.folder.path} stand; try a lower lr"
            )

    def _write_state(self, folder: Path) -> None:
        write_state(
            folder,
            state_tensors(self.optimisers, self.task.named),
            self.config,
            step=self.step,
            standing=self.standing.as_state(),
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
