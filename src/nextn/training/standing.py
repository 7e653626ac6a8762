"""Where a head stands on held-out text: against the one that it started from, and against its own best."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nextn.training.telemetry import Foreseen


@dataclass
class Standing:
    """patience: evaluations in turn without a better one, after which training ends; 0 = never.

    baseline: of the head that training started from, None for a fresh one. best: of what was trained, after `best_step`
    steps; since: evaluations behind it.
    """

    patience: int = 0
    baseline: Foreseen | None = None
    best: Foreseen | None = None
    best_step: int = 0
    since: int = 0

    def see(self, step: int, figures: Foreseen) -> bool:
        """Take in an evaluation -> whether it is the best so far."""
        if step == 0:
            self.baseline = figures
            return False
        if self.best is None or figures.score > self.best.score:
            self.best, self.best_step, self.since = figures, step, 0
            return True
        self.since += step > self.best_step
        return False

    @property
    def is_done(self) -> bool:
        return 0 < self.patience <= self.since

    @property
    def is_worse(self) -> bool:
        """Whether the best trained head is worse than the one it started from, beyond noise."""
        return self.baseline is not None and self.best is not None and self.best.is_worse(self.baseline)

    def __str__(self) -> str:
        """For a message: both scores, and how sure their difference is."""
        if self.baseline is None or self.best is None:
            return "no head to compare with"
        noise = 2 * self.best.noise(self.baseline)
        return f"acceptance length {self.best.score:.3f}, was {self.baseline.score:.3f}, +-{noise:.3f} on held-out text"

    def as_record(self) -> dict[str, object]:
        """What goes into JSON documents."""
        told = {"baseline": self.baseline, "best": self.best}
        return {name: each and each.as_record() for name, each in told.items()} | {"best_step": self.best_step}

    def as_state(self) -> dict[str, object]:
        """Plain values, for `load_state`."""
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in ("baseline", "best"):
            setattr(self, name, state[name] and Foreseen.from_state(state[name]))
        self.best_step, self.since = state["best_step"], state["since"]
