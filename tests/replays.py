"""Small torch functions as replays: recorded on some inputs, run on others."""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nextn.fast.captured import CapturedHead, CapturedTrunk
from nextn.fast.engine import FastHead, FastTrunk
from nextn.fast.graph import Recorder
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


def captured_of(model: Model, *, columns: int = 64, record: Recorder | None = None) -> SimpleNamespace:
    """trunk and head of the model on captured passes; graphs are taken for what `taped` makes, unless record says."""
    trunk = CapturedTrunk(model.trunk, record=record or taped, columns=columns)
    return SimpleNamespace(trunk=trunk, head=CapturedHead(model.head, trunk))


class _Calls(TorchDispatchMode):
    """Every operation that runs while open, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def taped(run: Callable[[], None], put_back: Callable[[], None]) -> Callable[[], None]:
    """What a CUDA graph does, on any device: the same operations on the same memory, whatever Python says by then."""
    tape = _Calls()
    with torch.inference_mode(False), torch.no_grad(), tape:
        run()
    put_back()

    def replay() -> None:
        for func, args, kwargs, old in tape.calls:
            new = func(*args, **kwargs)
            for place, value in zip(tree_leaves(old), tree_leaves(new), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():  # not a view, nor in place
                    place.copy_(value)

    return replay
