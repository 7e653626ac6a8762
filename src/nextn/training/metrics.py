"""What a training run tells: one record a step and one an evaluation, each a line of metrics.jsonl."""

import math
from dataclasses import asdict, dataclass

from nextn.training.evaluate import Decoded, Forced
from nextn.training.telemetry import Foreseen


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step. loss: mean by depth over the batch: of joint training [D+1], cross-entropy in nats, the
    trunk's first; of a head [D], its objective. match, overlap [D]: of a head, shares of equal argmax, and 1 - TV.
    """

    step: int
    num_steps: int
    tokens: int
    loss: tuple[float, ...]
    lr: float
    lam: float
    grad_norm: float
    tokens_per_s: float
    match: tuple[float, ...] = ()
    overlap: tuple[float, ...] = ()

    def as_record(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class EvalRecord:
    """Held-out figures after `step` steps."""

    step: int
    forced: Forced
    decoded: Decoded | None = None

    def as_record(self) -> dict[str, object]:
        values = asdict(self)
        values["forced"] |= {"greedy_AL": self.forced.greedy_length, "sampled_AL": self.forced.sampled_length}
        if self.decoded is not None:
            values["decoded"] = self.decoded.acceptance.as_record() | {"looping": self.decoded.looping}
        return values


@dataclass(frozen=True)
class HeadRecord:
    """Held-out figures of a head after `step` steps; 0: of the one that training started from."""

    step: int
    foreseen: Foreseen

    def as_record(self) -> dict[str, object]:
        return {"step": self.step, "foreseen": self.foreseen.as_record()}


Record = StepRecord | EvalRecord | HeadRecord


def bits(nats: float) -> float:
    """Nats per token -> bits per token (bits per byte for a byte-level model)."""
    return nats / math.log(2)
