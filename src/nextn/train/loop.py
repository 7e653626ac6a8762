"""The training loop for any task: a generator of records that resumes exactly where it stopped.

It uses no global random state, and the clock only for tokens/s and time budgets. Without a time budget, step s is the
same computation in every run.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from nextn.checkpoint.staging_folder import is_full, need_room
from nextn.errors import CheckpointError, TrainingError
from nextn.losses.mtp_loss import LambdaSchedule
from nextn.train import run_state
from nextn.train.heldout_acceptance import BestTracker
from nextn.train.joint_task import BatchLoss, Task, add_losses, sum_over_ranks
from nextn.train.metrics import EvalRecord, HeadRecord, Record, StepRecord
from nextn.train.optimizers import build_optimizers, set_learning_rates
from nextn.train.pace import Pace
from nextn.train.run_folder import MAX_CHECKPOINTS, RunFolder
from nextn.train.sharding import clip_gradients


class Trainer:
    """Trains a task in place. `run` yields records; the consumer shows progress and decides when to stop.

    Args:
        task: What is trained, and its settings.
        out: The run's folder, for checkpoints and the log.
        clock: Returns seconds, for tokens/s and time budgets.
    """

    def __init__(self, task: Task, *, out: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.task, self.config, self.ranks = task, task.config, task.ranks
        self.folder, self.step, self.pace = RunFolder(out), 0, Pace(self.config, self.ranks, clock)
        self.lam = LambdaSchedule.parse(self.config.lam, total=self.config.tokens)
        self.optimizers = build_optimizers(task.named, self.config)
        self.best_tracker = BestTracker(getattr(self.config, "patience", 0))

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train from the current step to the last, and write a checkpoint at the end or when should_stop() is true.

        If the head was better at an earlier evaluation, those weights are restored at the end. If one of several
        processes should stop, all stop after the same step. Raises TrainingError for a loss that is not finite or a
        lost process; earlier checkpoints stay.
        """
        is_first = self.ranks.is_first
        with self.ranks.guarded(), self.explain_full_disk(), self.folder.locked(needed=is_first):
            if is_first:
                need_room(self.folder.path, self.num_bytes_left())
            with self.folder.log(self.step, discard=not is_first) as log:
                for record in self._records(should_stop):
                    log.write(record)
                    yield record

    def num_bytes_left(self) -> int:
        """Return an upper bound of the bytes that the rest of the run adds: checkpoints, best weights, the result."""
        every, remaining = self.config.save_every, self.pace.num_steps(self.step) - self.step
        saves, existing = -(-remaining // every) if every else min(remaining, 1), len(self.folder.checkpoints())
        size, weights = run_state.num_bytes(self.task, self.optimizers), run_state.num_bytes(self.task)
        added = min(existing + saves, MAX_CHECKPOINTS) - existing
        return size * max(0, added) + weights * (2 if self.task.fingerprint else 1)

    @contextmanager
    def explain_full_disk(self) -> Iterator[None]:
        """Add to a disk-full error which checkpoint is complete and how to resume."""
        try:
            yield
        except CheckpointError as error:
            if not is_full(error):
                raise
            complete = self.folder.checkpoints()
            advice = (
                f"{complete[-1]} is complete: with more free space, `nextn train {self.folder.path} --resume` resumes "
                "from it"
                if complete
                else "No checkpoint is complete yet: start again with more free space"
            )
            raise CheckpointError(f"{error} {advice}.") from error

    def _records(self, should_stop: Callable[[], bool]) -> Iterator[Record]:
        if self.step == 0 and self.task.has_baseline:
            yield self.evaluate()
        while not self.is_over and not self.ranks.any(should_stop()):
            yield self._step()
            if _due(self.step, self.config.eval_every) and not self.pace.is_over(self.step):
                yield self.evaluate()
            if _due(self.step, self.config.save_every):
                self.save()
        self.save()
        if self.is_over:
            yield self.evaluate(last=True)
            if self.best_tracker.best_step not in (0, self.step):
                run_state.read_weights(self.folder.best, self.task)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, the time is used, or acceptance has not improved for `patience` evaluations."""
        return self.pace.is_over(self.step) or self.best_tracker.is_done

    def evaluate(self, *, last: bool = False) -> EvalRecord | HeadRecord:
        """Evaluate on held-out text, and store the weights of the best head so far."""
        record = self.task.evaluate(self.step, last=last)
        if isinstance(record, HeadRecord) and self.best_tracker.update(self.step, record.heldout):
            run_state.write_weights(self.folder.best, self.task)
        return record

    def save(self) -> Path:
        """Write the checkpoint `out/step-<n>` and remove older ones."""
        folder = self.folder.checkpoint(self.step)
        if folder not in self.folder.checkpoints():
            best = self.best_tracker.as_state()
            pace = self.pace.as_state()
            run_state.write(folder, self.task, self.optimizers, step=self.step, standing=best, pace=pace)
        if self.ranks.is_first:
            self.folder.prune()
        return folder

    def write_result(self, folder: Path) -> None:
        """Write the trained model in its published layout, with the record of this run."""
        with self.explain_full_disk():
            if self.ranks.is_first:
                need_room(folder, run_state.num_bytes(self.task))
            self.task.write_result(folder, self.folder.path)

    def has_checkpoint(self) -> bool:
        """Return whether `out` has a checkpoint that `resume` can load."""
        return bool(self.folder.checkpoints())

    def resume(self) -> bool:
        """Load the newest complete checkpoint under `out`; return False if there is none.

        Raises CheckpointError if it is damaged, ConfigError if it was trained with other settings.
        """
        if not self.has_checkpoint():
            return False
        state = run_state.read(self.folder.checkpoints()[-1], self.task, self.optimizers)
        self.step = state["step"]
        # Both are missing in checkpoints of older versions.
        if "pace" in state:
            self.pace.load_state(state["pace"])
        if "standing" in state:
            self.best_tracker.load_state(state["standing"])
        return True

    def _step(self) -> StepRecord:
        config, pace = self.config, self.pace
        lam, scale = self.lam.at(pace.tokens(self.step)), pace.schedule(self.step)
        with pace.measured():
            report, norm = self._update(lam, scale)
        self.step += 1
        return StepRecord(
            step=self.step,
            num_steps=pace.num_steps(self.step),
            share=pace.share(self.step),
            remaining_s=pace.remaining_s(self.step),
            tokens=self.step * config.tokens_per_step,
            lr=config.lr * scale,
            lam=lam,
            grad_norm=norm,
            tokens_per_s=config.tokens_per_step / max(pace.latest_s, 1e-9),
            **self.task.figures(report),
        )

    def _update(self, lam: float, scale: float) -> tuple[BatchLoss, float]:
        """Change the weights by one step, and return its loss and the norm of its gradient."""
        set_learning_rates(self.optimizers, scale)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        report = sum_over_ranks(self._backward(lam), self.ranks)
        self._check_finite("loss", report.total.item())
        norm = clip_gradients(self.task.named.values(), self.config.clip)
        self._check_finite("gradient", norm)  # before it corrupts parameters that a checkpoint would store
        for optimizer in self.optimizers:
            optimizer.step()
        return report, norm

    def _backward(self, lam: float) -> BatchLoss:
        """Accumulate the gradients of this process's micro-batches, over the labels of the global batch."""
        ranks, task, parts = self.ranks, self.task, self.config.accumulate
        examples = [
            task.example(self.step, rank=ranks.rank + ranks.world * part, world=ranks.world * parts)
            for part in range(parts)
        ]
        denominator = None
        if ranks.world * parts > 1:
            # Gradients are averaged over the processes, so each divides by the average count.
            denominator = ranks.total(torch.stack([task.counts(each) for each in examples]).sum(0)) / ranks.world
        reports = []
        for part, example in enumerate(examples, start=1):
            report = task.joint_module.loss(partial(task.loss, example, lam, denominator=denominator))
            task.joint_module.sync_gradients(part == parts)
            report.total.backward()
            reports.append(report)
        return add_losses(reports)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            rate = self.config.lr * self.pace.schedule(self.step)
            raise TrainingError(
                f"the {name} of step {self.step} is {value}; the cause is batch {self.step} of seed {self.config.seed} "
                f"or a learning rate of {rate:.2g}. Checkpoints in {self.folder.path} are intact; try a lower lr"
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
