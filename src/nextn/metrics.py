"""What a training run tells: one record a step and one an evaluation, each a line of metrics.jsonl."""

import math
from dataclasses import asdict, dataclass

from nextn.evaluate import Decoded, Forced


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step. loss [D+1]: mean cross-entropy in nats, the trunk's first."""

    step: int
    num_steps: int
    tokens: int
    loss: tuple[float, ...]
    lr: float
    lam: float
    grad_norm: float
    tokens_per_s: float

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


Record = StepRecord | EvalRecord


def bits(nats: float) -> float:
    """Nats per token -> bits per token (bits per byte for a byte-level model)."""
    return nats / math.log(2)
