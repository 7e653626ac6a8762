"""Where the figures of a run go beside its metrics.jsonl: tensorboard. A writer is given each record, and knows of it
only what `as_record` says.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from nextn.errors import ConfigError


class Recorded(Protocol):
    def as_record(self) -> dict[str, object]:
        """Plain values, `step` among them."""


class TensorBoard:
    """Event files in `folder`, for `tensorboard --logdir`; what they hold of steps after `step` is not shown any more.

    Raises ConfigError where tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"event files for tensorboard need a package: {error}; pip install 'nextn[tensorboard]'"
            ) from error
        self._events = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Recorded) -> None:
        """One scalar a number, at the record's step; those of a list are told apart by their place in it."""
        values = record.as_record()
        step = values.pop("step")
        for tag, value in scalars(values):
            self._events.add_scalar(tag, value, step)
        self._events.flush()

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()


@contextmanager
def event_log(folder: Path | None, *, step: int = 0) -> Iterator[Callable[[Recorded], None]]:
    """Where to give each record, while it is open: a `TensorBoard` in folder; None: nowhere."""
    if folder is None:
        yield lambda record: None
        return
    with TensorBoard(folder, step=step) as writer:
        yield writer.write


def scalars(values: object, tag: str = "") -> Iterator[tuple[str, float]]:
    """`loss/0`, `forced/match/1`, ...: every number in nested mappings and sequences; text and truth values are not."""
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
