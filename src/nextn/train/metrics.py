"""Metrics of a training run: a record per step and per evaluation, each a line of metrics.jsonl, and tensorboard.

The tensorboard writer uses only a record's `as_record`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nextn.errors import ConfigError
from nextn.text_format import install_command
from nextn.train.evaluation import DecodedFigures, HeldOutAcceptance, TeacherForcedFigures


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    num_steps: int  # of the run; with a time budget, as expected from the speed so far
    share: float  # of the steps or of the time budget, 0..1
    remaining_s: float  # until the end of training, as expected
    tokens: int
    # Mean over the batch per depth. Joint: cross-entropy in nats [D+1], trunk first; head: objective [D].
    loss: tuple[float, ...]
    lr: float
    lam: float
    grad_norm: float
    tokens_per_s: float
    match: tuple[float, ...] = ()  # [D], of a head: share of positions with the trunk's argmax
    overlap: tuple[float, ...] = ()  # [D], of a head: mean 1 - TV

    def as_record(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class EvalRecord:
    """Held-out figures after `step` steps."""

    step: int
    forced: TeacherForcedFigures
    decoded: DecodedFigures | None = None

    def as_record(self) -> dict[str, object]:
        values = asdict(self)
        values["forced"] |= {"greedy_AL": self.forced.greedy_length, "sampled_AL": self.forced.sampled_length}
        if self.decoded is not None:
            values["decoded"] = self.decoded.acceptance.as_record() | {"repetitive": self.decoded.repetitive}
        return values


@dataclass(frozen=True)
class HeadRecord:
    """Held-out acceptance of a head after `step` steps; step 0 is the initial head."""

    step: int
    heldout: HeldOutAcceptance

    def as_record(self) -> dict[str, object]:
        return {"step": self.step, "heldout": self.heldout.as_record()}


Record = StepRecord | EvalRecord | HeadRecord


@dataclass(frozen=True)
class Evaluation:
    """How far an evaluation is, which may take minutes; it is shown, not recorded."""

    step: int
    batch: int  # of `num_batches`, from 1
    num_batches: int


OnEvaluation = Callable[[Evaluation], None]


def unseen(progress: Evaluation) -> None:
    """Show nothing."""


def bits(nats: float) -> float:
    """Convert nats per token to bits per token (bits per byte for a byte-level model)."""
    return nats / math.log(2)


@contextmanager
def event_log(folder: Path | None, *, step: int = 0) -> Iterator[Callable[[Record], None]]:
    """Yield a function that writes each number of a record into event files for `tensorboard --logdir`.

    Existing events of steps after `step` are purged. folder: None = discard records. Raises ConfigError if tensorboard
    is not installed.
    """
    if folder is None:
        yield lambda record: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        message = f"event files for tensorboard need a package: {error}; {install_command('tensorboard')}"
        raise ConfigError(message) from error
    events = SummaryWriter(str(folder), purge_step=step + 1)

    def write(record: Record) -> None:
        values = record.as_record()
        for tag, value in scalars(values):
            if tag != "step":
                events.add_scalar(tag, value, values["step"])
        events.flush()

    with closing(events):
        yield write


def scalars(values: object, tag: str = "") -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for all numbers in nested mappings and sequences, such as `loss/0`; no text or booleans."""
    if isinstance(values, Mapping):
        parts = list(values.items())
    elif isinstance(values, (list, tuple)):
        parts = list(enumerate(values))
    else:
        if isinstance(values, (int, float)) and not isinstance(values, bool):
            yield tag, float(values)
        return
    for key, part in parts:
        yield from scalars(part, f"{tag}/{key}" if tag else str(key))
