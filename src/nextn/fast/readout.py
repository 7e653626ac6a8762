"""Normed states through an output head: logits, and of each law its best token and how sure it is."""

from collections.abc import Callable

import torch
from torch import Tensor

from nextn.fast.hooks import note
from nextn.fast.native import Runtime
from nextn.fast.passes import SIZES
from nextn.fast.program import Replay
from nextn.fast.scratch import Scratch
from nextn.fast.tape import RecordingTape
from nextn.fast.weights import Weights
from nextn.sampling import Prediction, Told


def told(logits: Tensor) -> list[Tensor]:
    """logits [n, V] -> themselves, their argmax [n] and its probability [n]; to be called while recording."""
    best, confidence = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    note("confidence", [best, confidence, logits], outs=2)
    return [logits, best, confidence]


class Readout:
    """Normed states through an output head."""

    def __init__(self, runtime: Runtime, weights: Weights, logits: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        """logits(states) -> what is read from them by the weight [V, H]."""
        self._runtime, self._weights, self._logits = runtime, weights, logits
        self._width, self._dtype = weight.shape[1], weight.dtype
        self._scratch = Scratch()
        self._replays: dict[int, tuple[Tensor, Replay]] = {}
        self._behind: dict[Replay, Replay | None] = {}
        self._views: dict[tuple[Replay, int], list[Tensor]] = {}

    def over(self, source: Replay, columns: int) -> Prediction:
        """What is predicted at the first columns of the states [B, m, H] that a pass has left as its first output."""
        replay = self.behind(source)
        if replay is None:
            return self(source.outputs[0][:, :columns])
        replay.run()
        return Told(*self.views(source, columns))

    def behind(self, source: Replay) -> Replay | None:
        """The replay for the states that a pass leaves, where there is one."""
        self.prepare(source)
        return self._behind[source]

    def views(self, source: Replay, columns: int) -> list[Tensor]:
        """Logits [B, m, V], argmax and its probability [B, m] of the first columns, where `behind` leaves them."""
        if (source, columns) not in self._views:
            replay, shape = self._behind[source], source.outputs[0].shape[:2]
            assert replay is not None
            self._views[source, columns] = [out.unflatten(0, shape)[:, :columns] for out in replay.outputs]
        return self._views[source, columns]

    def prepare(self, source: Replay) -> None:
        """Make the replay for the states [B, m, H] that a pass leaves; none for more than a readout takes at once."""
        if source not in self._behind:
            flat = source.outputs[0].flatten(0, 1)
            self._behind[source] = self._recorded(flat) if len(flat) <= SIZES[-1] else None

    def __call__(self, normed: Tensor) -> Prediction:
        """normed [..., H] -> what is predicted, overwritten by the next prediction."""
        shape, flat = normed.shape[:-1], normed.reshape(-1, normed.shape[-1])
        if len(flat) > SIZES[-1]:
            return Prediction(self._logits(normed))
        given, replay = self.ready(len(flat))
        given[: len(flat)] = flat
        replay.run()
        return Told(*(out[: len(flat)].unflatten(0, shape) for out in replay.outputs))

    def ready(self, rows: int) -> tuple[Tensor, Replay]:
        """The replay for so many states, and where it reads them."""
        size = next(size for size in SIZES if size >= rows)
        if size not in self._replays:
            given = torch.zeros(size, self._width, dtype=self._dtype)
            self._replays[size] = given, self._recorded(given)
        return self._replays[size]

    @torch.inference_mode(False)
    def _recorded(self, given: Tensor) -> Replay:
        run = lambda: told(self._logits(given))  # noqa: E731
        return Replay.of(self._runtime, RecordingTape([given]), run, self._weights.pack, self._scratch)
