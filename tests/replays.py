"""Small torch functions as replays: recorded on some inputs, run on others."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from nextn.fast.engine import FastHead, FastTrunk
from nextn.fast.native import load
from nextn.fast.program import Replay
from nextn.fast.tape import Tape
from nextn.fast.weights import Weights
from nextn.model import Model

Function = Callable[..., Tensor | Iterable[Tensor]]


def listed(outs: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [outs] if isinstance(outs, Tensor) else list(outs)


class Replayed:
    """function(*inputs) as a replay; a call fills the inputs, runs, and returns the outputs where they stand."""

    def __init__(self, function: Function, examples: Sequence[Tensor]) -> None:
        self.inputs = [each.clone() for each in examples]
        self.tape = Tape(self.inputs)
        run = lambda: listed(function(*self.inputs))  # noqa: E731
        self.replay = Replay.of(load(), self.tape, run, Weights(load()).pack)

    def __call__(self, *given: Tensor) -> list[Tensor]:
        for place, value in zip(self.inputs, given, strict=True):
            place.copy_(value)
        self.replay.run()
        return self.replay.outputs


def tape_of(function: Function, *inputs: Tensor) -> Tape:
    """The tape of function(*inputs), which stay the inputs."""
    tape = Tape(inputs)
    with torch.no_grad(), tape:
        listed(function(*inputs))
    return tape


def fast_of(model: Model) -> SimpleNamespace:
    """trunk and head of the model on the fast path."""
    weights = Weights(load())
    trunk = FastTrunk(model.trunk, load(), weights)
    return SimpleNamespace(trunk=trunk, head=FastHead(model.head, trunk, load(), weights))
