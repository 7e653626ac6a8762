"""The training loop for any task: a generator of records that resumes exactly where it stopped.

It uses no global random state, and the clock only for tokens/s and time budgets. Without a time budget, step s is the
same computation in every run.
"""

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median_low

import torch

from nextn.checkpoint.staging_folder import explain_full_disk, need_room
from nextn.devices import torch_threads
from nextn.errors import TrainingError
from nextn.train import checkpointing
from nextn.train.checkpointing import MAX_CHECKPOINTS, RunFolder
from nextn.train.config import LambdaSchedule, TrainConfig
from nextn.train.distributed import ALONE, Ranks, clip_gradients
from nextn.train.evaluation import BestTracker
from nextn.train.joint_task import BatchLoss, Task, add_losses, sum_over_ranks
from nextn.train.metrics import EvalRecord, HeadRecord, OnEvaluation, Record, StepRecord, unseen
from nextn.train.optimizers import build_optimizers, set_learning_rates

_RECENT = 16  # steps whose median time predicts the next ones; compilation makes single steps much slower
_SLOW = 0.5  # of the speed of the fastest step; below it, other work may have begun


class Trainer:
    """Trains a task in place. `run` yields records; the consumer shows progress and decides when to stop.

    Args:
        task: What is trained, and its settings.
        out: The run's folder, for checkpoints and the log.
        clock: Returns seconds, for tokens/s and time budgets.

    Example:
        >>> from pathlib import Path
        >>> model, text = nextn.load("tiny"), Path("text.py")
        >>> _ = text.write_text("def add(a, b):\\n    return a + b\\n" * 20)
        >>> corpus = nextn.Corpus.from_files([text], model.tokenizer)
        >>> config = nextn.TrainConfig(steps=1, batch_size=2, length=16, depths=2, dtype="float32")
        >>> trainer = nextn.Trainer(nextn.JointTask(model, corpus, config), out=Path("run"))
        >>> records = list(trainer.run())
        >>> trainer.step
        1
    """

    def __init__(self, task: Task, *, out: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.task, self.config, self.ranks = task, task.config, task.ranks
        self.folder, self.step, self.pace = RunFolder(out), 0, Pace(self.config, self.ranks, clock)
        self.lam = LambdaSchedule.parse(self.config.lam, total=self.config.tokens)
        self.optimizers = build_optimizers(task.named, self.config)
        self.best_tracker = BestTracker(getattr(self.config, "patience", 0))

    def run(
        self, should_stop: Callable[[], bool] = lambda: False, *, on_evaluation: OnEvaluation = unseen
    ) -> Iterator[Record]:
        """Train from the current step to the last, and write a checkpoint at the end or when should_stop() is true.

        on_evaluation is called before each batch of an evaluation. If the head was better at an earlier evaluation,
        those weights are restored at the end. If one of several processes should stop, all stop after the same step.
        Raises TrainingError for a loss that is not finite or a lost process; earlier checkpoints stay.
        """
        is_first = self.ranks.is_first
        with self.ranks.guarded(), explain_full_disk(self.full_disk_advice), self.folder.locked(needed=is_first):
            if is_first:
                need_room(self.folder.path, self.num_bytes_left())
            with self.folder.log(self.step, discard=not is_first) as log, self._threads() as choose:
                for record in self._records(should_stop, on_evaluation):
                    if isinstance(record, StepRecord):
                        choose(record.tokens_per_s)
                    log(record)
                    yield record

    def _threads(self) -> AbstractContextManager[Callable[[float], None]]:
        # A run of given steps has the same bits on a busy machine; one with a time budget follows the clock anyway.
        is_timed = self.config.minutes > 0 and self.ranks.is_alone
        return chosen_threads(enabled=is_timed and all(not value.is_cuda for value in self.task.named.values()))

    def num_bytes_left(self) -> int:
        """Return an upper bound of the bytes that the rest of the run adds: checkpoints, best weights, the result."""
        every, remaining = self.config.save_every, self.pace.num_steps(self.step) - self.step
        saves, existing = -(-remaining // every) if every else min(remaining, 1), len(self.folder.checkpoints())
        size, weights = checkpointing.num_bytes(self.task, self.optimizers), checkpointing.num_bytes(self.task)
        added = min(existing + saves, MAX_CHECKPOINTS) - existing
        return size * max(0, added) + weights * (2 if self.task.fingerprint else 1)

    def full_disk_advice(self) -> str:
        """Return which checkpoint is complete and how to resume."""
        complete = self.folder.checkpoints()
        if not complete:
            return "No checkpoint is complete yet: start again with more free space."
        command = f"nextn train {shlex.quote(str(self.folder.path))} --resume"
        return f"{complete[-1]} is complete: with more free space, `{command}` resumes from it."

    def _records(self, should_stop: Callable[[], bool], on_evaluation: OnEvaluation) -> Iterator[Record]:
        if self.step == 0 and self.task.has_baseline:
            yield self.evaluate(on_evaluation=on_evaluation)
        while not self.is_over and not self.ranks.any(should_stop()):
            yield self._step()
            if _due(self.step, self.config.eval_every) and not self.pace.is_over(self.step):
                yield self.evaluate(on_evaluation=on_evaluation)
            if _due(self.step, self.config.save_every):
                self.save()
        self.save()
        if self.is_over:
            yield self.evaluate(last=True, on_evaluation=on_evaluation)
            if self.best_tracker.best_step not in (0, self.step):
                checkpointing.read_weights(self.folder.best, self.task)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, the time is used, or acceptance has not improved for `patience` evaluations."""
        return self.pace.is_over(self.step) or self.best_tracker.is_done

    def evaluate(self, *, last: bool = False, on_evaluation: OnEvaluation = unseen) -> EvalRecord | HeadRecord:
        """Evaluate on held-out text, and store the weights of the best head so far."""
        record = self.task.evaluate(self.step, last=last, on_evaluation=on_evaluation)
        if isinstance(record, HeadRecord) and self.best_tracker.update(self.step, record.heldout):
            checkpointing.write_best(self.folder.best, self.task, self.best_tracker.as_state())
        return record

    def save(self) -> Path:
        """Write the checkpoint `out/step-<n>` and remove older ones."""
        folder = self.folder.checkpoint(self.step)
        if folder not in self.folder.checkpoints():
            best = self.best_tracker.as_state()
            pace = self.pace.as_state()
            checkpointing.write(folder, self.task, self.optimizers, step=self.step, best=best, pace=pace)
        if self.ranks.is_first:
            self.folder.prune()
        return folder

    def write_result(self, folder: Path) -> None:
        """Write the trained model in its published layout, with the record of this run."""
        with explain_full_disk(self.full_disk_advice):
            if self.ranks.is_first:
                need_room(folder, checkpointing.num_bytes(self.task))
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
        state = checkpointing.read(self.folder.checkpoints()[-1], self.task, self.optimizers)
        self.step = state["step"]
        self.pace.load_state(state["pace"])
        self.best_tracker.load_state(checkpointing.newest_best(self.folder.best, state["best"]))
        return True

    def _step(self) -> StepRecord:
        config, pace = self.config, self.pace
        lam, scale = self.lam.at(pace.tokens(self.step)), pace.schedule(self.step)
        with pace.measured(), explain_compilation():
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


class Pace:
    """Tracks the progress of a run: its share that is done, the factor of the learning rates, and when it ends.

    Without `minutes` in the settings, everything follows the number of steps. With it, the learning rates follow the
    share of the budget that is used, and the run ends when half of a further step would not fit. Only steps count:
    evaluations, checkpoints and the time between two sessions do not.

    clock: seconds; processes of one run average their measurements, so all see the same schedule.
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks = ALONE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.config, self.budget_s, self.used_s = config, 60 * config.minutes, 0.0
        self._ranks, self._clock = ranks, clock
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a step."""
        started = self._clock()
        yield
        seconds = self._clock() - started
        if not self._ranks.is_alone and self.budget_s:
            measured = torch.tensor(seconds, dtype=torch.float64, device=self._ranks.device)
            seconds = float(self._ranks.total(measured)) / self._ranks.world
        self.used_s += seconds
        self._recent.append(seconds)

    @property
    def latest_s(self) -> float:
        """Seconds of the latest step of this session."""
        return self._recent[-1]

    @property
    def step_s(self) -> float:
        """The expected seconds of the next step; 0 before the first one."""
        return median_low(self._recent) if self._recent else 0.0

    def is_over(self, step: int) -> bool:
        """Return whether the run ends after `step` steps; a run with a time budget has at least one."""
        if not self.budget_s:
            return step >= self.config.steps
        return step > 0 and self.used_s + self.step_s / 2 >= self.budget_s

    def share(self, step: int) -> float:
        """Return the share of the run that is done after `step` steps."""
        if self.budget_s:
            return 1.0 if self.is_over(step) else self.used_s / self.budget_s
        return step / self.config.steps

    def schedule(self, step: int) -> float:
        """Return the factor of the learning rates at a step (0-based)."""
        return self.config.schedule(step, share=self.share(step) if self.budget_s else None)

    def tokens(self, step: int) -> int:
        """Return the position of a step in schedules by tokens; with a time budget, its share of `config.tokens`."""
        return int(self.share(step) * self.config.tokens) if self.budget_s else step * self.config.tokens_per_step

    def remaining_s(self, step: int) -> float:
        """Return the expected seconds until the end of the run."""
        if self.budget_s:
            return 0.0 if self.is_over(step) else self.budget_s - self.used_s
        return (self.config.steps - step) * self.step_s

    def num_steps(self, step: int) -> int:
        """Return the number of steps of the run; with a time budget, an estimate from the speed so far."""
        if not self.budget_s or not self.step_s:
            return self.config.steps
        return step if self.is_over(step) else step + max(1, round(self.remaining_s(step) / self.step_s))

    def as_state(self) -> dict[str, float]:
        """Return what a resumed run needs to know."""
        return {"used_s": self.used_s, "step_s": self.step_s}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from the state of an interrupted run."""
        self.used_s = state["used_s"]
        self._recent = deque([state["step_s"]] if state["step_s"] else [], maxlen=_RECENT)


@contextmanager
def explain_compilation() -> Iterator[None]:
    """Turn a failure of torch.compile into a TrainingError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__module__ not in ("torch._dynamo.exc", "torch._inductor.exc"):
            raise
        reason = " ".join(str(error).strip().split("\n\n")[0].split())
        raise TrainingError(
            f"torch.compile failed: {reason}. If it names a file of torch's cache (torchinductor_...), remove that "
            "folder: a process that was killed while it compiled leaves damaged files. Without torch.compile, training "
            "is slower: --set compile=false"
        ) from error


class ThreadChoice:
    """Chooses between all torch threads and one, by the time of a small piece of work.

    Beside other work, a step with several threads waits for the one that is not scheduled, and may take ten times as
    long as with one. Steps themselves are not tried with both: for another number of threads, torch.compile makes
    other code, which takes a minute.
    """

    def __init__(self) -> None:
        self._all, self._num_steps, self._best = torch.get_num_threads(), 0, 0.0
        self._choose()

    def update(self, speed: float) -> None:
        """Take the speed of a step, and choose again if it is slow. The first step is ignored, because it compiles."""
        self._num_steps += 1
        if self._num_steps == 1 or torch.get_num_threads() == 1:
            return
        self._best = max(self._best, speed)
        if speed < _SLOW * self._best:
            self._choose()

    def _choose(self) -> None:
        with_all, alone = time_of_work((self._all, 1))
        torch.set_num_threads(self._all if with_all < alone else 1)


def time_of_work(choices: Sequence[int], *, rounds: int = 20) -> list[float]:
    """Return the seconds that the same small piece of work takes with each number of threads, in turn."""
    seconds, left, right = [0.0] * len(choices), torch.ones(256, 512), torch.ones(512, 512)
    for number in range(rounds + 1):
        for index, threads in enumerate(choices):
            torch.set_num_threads(threads)
            started = time.perf_counter()
            for _ in range(4):
                (left @ right).tanh().sum()
            seconds[index] += time.perf_counter() - started if number else 0.0  # the first round wakes the threads
    return seconds


@contextmanager
def chosen_threads(*, enabled: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function that takes the speed of each step and chooses the threads of the next; restore them at the end.

    enabled: If not, the function does nothing. The number of threads may change the last bits of a step.
    """
    before = torch.get_num_threads()
    with torch_threads(before):
        yield ThreadChoice().update if enabled and before > 1 else lambda speed: None
