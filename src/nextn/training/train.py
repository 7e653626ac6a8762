"""One training loop over any task: a generator of records that resumes exactly where it stopped.

It draws nothing from a global random state and reads no clock but for tokens/s: step s is the same work in every run.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from nextn.checkpoints.stages import is_full, need_room
from nextn.distributed.sharding import clip
from nextn.errors import CheckpointError, TrainingError
from nextn.losses.loss import LambdaSchedule
from nextn.training import run_state
from nextn.training.metrics import EvalRecord, HeadRecord, Record, StepRecord
from nextn.training.optimisers import optimisers, set_rates
from nextn.training.run_folder import MOST_CHECKPOINTS, RunFolder
from nextn.training.standing import Standing
from nextn.training.tasks import Report, Task, added, summed


class Trainer:
    """Trains what `task` names, in place. `run` yields records; whoever consumes them draws progress and decides when
    to stop. out: the run's folder, for checkpoints and the log."""

    def __init__(self, task: Task, *, out: Path) -> None:
        self.task, self.config, self.ranks = task, task.config, task.ranks
        self.folder, self.step = RunFolder(out), 0
        self.lam = LambdaSchedule.parse(self.config.lam, total=self.config.tokens)
        self.optimisers = optimisers(task.named, self.config)
        self.standing = Standing(getattr(self.config, "patience", 0))

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train from the current step to the last; on should_stop() or the end, a checkpoint is written.

        A head that was better at an earlier evaluation is taken back at the end. Of several processes, all stop after
        the same step when one should. Raises TrainingError for a loss that is not finite or a process that is lost;
        checkpoints written before stay.
        """
        is_first = self.ranks.is_first
        with self.ranks.guarded(), self.whole_named(), self.folder.locked(needed=is_first):
            if is_first:
                need_room(self.folder.path, self.num_bytes_left())
            with self.folder.log(self.step, discard=not is_first) as log:
                for record in self._records(should_stop):
                    log.write(record)
                    yield record

    def num_bytes_left(self) -> int:
        """Bytes that the rest of the run adds to its folder at most: checkpoints, the best weights, the result."""
        every, left = self.config.save_every, self.config.steps - self.step
        saves, there = -(-left // every) if every else min(left, 1), len(self.folder.checkpoints())
        size, weights = run_state.num_bytes(self.task, self.optimisers), run_state.num_bytes(self.task)
        kept = min(there + saves, MOST_CHECKPOINTS) - there
        return size * max(0, kept) + weights * (2 if self.task.fingerprint else 1)

    @contextmanager
    def whole_named(self) -> Iterator[None]:
        """Where something cannot be written, say what is whole and how to go on."""
        try:
            yield
        except CheckpointError as error:
            if not is_full(error):
                raise
            whole = self.folder.checkpoints()
            advice = (
                f"{whole[-1]} is whole: with room for it, `nextn train {self.folder.path} --resume` goes on from there"
                if whole
                else "No checkpoint is whole yet: start again with room for them"
            )
            raise CheckpointError(f"{error} {advice}.") from error

    def _records(self, should_stop: Callable[[], bool]) -> Iterator[Record]:
        if self.step == 0 and self.task.has_baseline:
            yield self.evaluate()
        while not self.is_over and not self.ranks.any(should_stop()):
            yield self._step()
            if _due(self.step, self.config.eval_every) and self.step < self.config.steps:
                yield self.evaluate()
            if _due(self.step, self.config.save_every):
                self.save()
        self.save()
        if self.is_over:
            yield self.evaluate(last=True)
            if self.standing.best_step not in (0, self.step):
                run_state.read_weights(self.folder.best, self.task)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or held-out figures have not risen for long enough."""
        return self.step == self.config.steps or self.standing.is_done

    def evaluate(self, *, last: bool = False) -> EvalRecord | HeadRecord:
        """Held-out figures now; the best head so far is kept."""
        record = self.task.evaluate(self.step, last=last)
        if isinstance(record, HeadRecord) and self.standing.see(self.step, record.foreseen):
            run_state.write_weights(self.folder.best, self.task)
        return record

    def save(self) -> Path:
        """Write `out/step-<n>`: the task's weights and the optimisers' state. Older ones are removed."""
        folder = self.folder.checkpoint(self.step)
        if folder not in self.folder.checkpoints():
            standing = self.standing.as_state()
            run_state.write(folder, self.task, self.optimisers, step=self.step, standing=standing)
        if self.ranks.is_first:
            self.folder.prune()
        return folder

    def write_result(self, folder: Path) -> None:
        """Write what was trained, in its published layout, with the record of the run that made it."""
        with self.whole_named():
            if self.ranks.is_first:
                need_room(folder, run_state.num_bytes(self.task))
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
        state = run_state.read(self.folder.checkpoints()[-1], self.task, self.optimisers)
        self.step = state["step"]
        if "standing" in state:  # a checkpoint older than it has none
            self.standing.load_state(state["standing"])
        return True

    def _step(self) -> StepRecord:
        started, config = time.perf_counter(), self.config
        lam, scale = self.lam.at(self.step * config.tokens_per_step), config.schedule(self.step)
        set_rates(self.optimisers, scale)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        whole = summed(self._differentiated(lam), self.ranks)
        self._check_finite("loss", whole.total.item())
        norm = clip(self.task.named.values(), config.clip)
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
            grad_norm=norm,
            tokens_per_s=config.tokens_per_step / (time.perf_counter() - started),
            **self.task.figures(whole),
        )

    def _differentiated(self, lam: float) -> Report:
        """Make the gradients of this process's rows, part by part, over the labels of all -> what the parts told."""
        ranks, task, parts = self.ranks, self.task, self.config.accumulate
        examples = [
            task.example(self.step, rank=ranks.rank + ranks.world * part, world=ranks.world * parts)
            for part in range(parts)
        ]
        over = None
        if ranks.world * parts > 1:
            # Gradients are averaged over the processes, so each divides by the average count.
            over = ranks.total(torch.stack([task.counts(each) for each in examples]).sum(0)) / ranks.world
        reports = []
        for part, example in enumerate(examples, start=1):
            report = task.joined.loss(partial(task.loss, example, lam, denominator=over))
            task.joined.exchange(part == parts)
            report.total.backward()
            reports.append(report)
        return added(reports)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            rate = self.config.lr * self.config.schedule(self.step)
            raise TrainingError(
                f"the {name} of step {self.step} is {value}; batch {self.step} of seed {self.config.seed} or a "
                f"learning rate of {rate:.2g} broke it. Checkpoints in {self.folder.path} stand; try a lower lr"
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
