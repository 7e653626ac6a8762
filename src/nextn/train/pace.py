"""The progress of a training run: by its steps, or by the share of a time budget that its steps have used."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch

from nextn.train.config import TrainConfig
from nextn.train.ranks import ALONE, Ranks

_RECENT = 16  # steps whose median time predicts the next ones; compilation makes single steps much slower


class Pace:
    """Says how far a run is, what its learning rates are multiplied with, and when it ends.

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
        return median(self._recent) if self._recent else 0.0

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
        """Return the number of steps of the run, with a time budget as expected from the speed so far."""
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
