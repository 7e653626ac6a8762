"""Small torch functions as replays: recorded on some inputs, run on others."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from nextn.model.model import Model
from nextn.runtime.native.abi import load
from nextn.runtime.native.program import Replay
from nextn.runtime.native.session import NativeHead, NativeTrunk
from nextn.runtime.native.trace import Trace
from nextn.runtime.native.weight_packing import PackedWeights

Function = Callable[..., Tensor | Iterable[Tensor]]


def listed(outs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [outs] if isinstance(outs, Tensor) else list(outs)


class Replayed:
    """function(*inputs) as a replay; a call fills the inputs, runs, and returns the output buffers."""

    def __init__(self, function: Function, examples: Sequence[Tensor]) -> None:
        self.inputs = [each.clone() for each in examples]
        self.trace = Trace(self.inputs)
        run = lambda: listed(function(*self.inputs))  # noqa: E731
        self.replay = Replay.of(load(), self.trace, run, PackedWeights(load()))

    def __call__(self, *given: Tensor) -> list[Tensor]:
        for place, value in zip(self.inputs, given, strict=True):
            place.copy_(value)
        self.replay.run()
        return self.replay.outputs


def trace_of(function: Function, *inputs: Tensor) -> Trace:
    """The trace of function(*inputs)."""
    trace = Trace(inputs)
    with torch.no_grad(), trace:
        listed(function(*inputs))
    return trace


def fast_of(model: Model) -> SimpleNamespace:
    """Trunk and head of the model on the native backend."""
    weights = PackedWeights(load())
    trunk = NativeTrunk(model.trunk, load(), weights)
    return SimpleNamespace(trunk=trunk, head=NativeHead(model.head, trunk, load(), weights))


class PlanPerRound:
    """A draft length policy that is asked for a plan in each round, and learns nothing."""

    reason = ""

    def rounds_unchanged(self, rows):
        return 1

    def observe(self, num_tokens, seconds):
        pass

    def learn(self, confidences, *, num_draft_tokens, num_accepted):
        pass
