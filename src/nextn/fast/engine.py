"""Trunk and head on the fast path: the plain path's signatures over replays, one for each size of window.

A window is padded to the next size that has a replay; padded columns are overwritten by the next window.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.fast.hooks import RecordingCache, RecordingLayer, RecordingTape, replaced
from nextn.fast.native import Runtime
from nextn.fast.program import Replay
from nextn.fast.slabs import Shape, Slabs
from nextn.fast.tape import Tape
from nextn.head import Head, Module, Step
from nextn.trunk import Hidden, Kind, Trunk

_SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64, 128)
Call = Callable[[Tensor, Tensor | None, RecordingCache], Iterable[Tensor]]


class Weights:
    """Packed weights by the tensor that they were made from, shared by all replays."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._packed = runtime, dict[tuple[object, ...], tuple[Tensor, Tensor]]()

    def pack(self, weight: Tensor) -> Tensor:
        """weight [N, K], or [E, N, K] of experts."""
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if key not in self._packed:
            parts = weight if weight.ndim == 3 else [weight]
            packed = [self._runtime.pack(part) for part in parts]
            self._packed[key] = (packed[0] if weight.ndim == 2 else torch.cat(packed), weight)
        return self._packed[key][0]


@dataclass(frozen=True, eq=False)
class _Window:
    """A replay and the tensors it reads. tokens, positions [B, m]; starts [B]; states [B, m, ...] of a head."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    states: Tensor | None
    replay: Replay


class Passes:
    """Windows of any size through one stack of layers. call(tokens, states, cache) -> the outputs of a pass."""

    def __init__(
        self,
        runtime: Runtime,
        weights: Weights,
        kinds: Sequence[Kind],
        call: Call,
        *,
        dtype: torch.dtype,
        state_shape: tuple[int, ...] | None = None,
    ) -> None:
        self._runtime, self._weights, self._kinds, self._call = runtime, weights, list(kinds), call
        self._dtype, self._state_shape = dtype, state_shape
        self._headers = torch.zeros(len(kinds), 3, dtype=torch.int64)
        self._windows: dict[tuple[int, int], _Window] = {}
        self._shapes: list[Shape] = []

    def cache(self, batch_size: int) -> Slabs:
        """Raises Unrecordable."""
        if not self._shapes:
            self._window(batch_size, 1)  # a recording tells the layers' sizes
        return Slabs(self._shapes, batch_size, dtype=self._dtype)

    def run(self, tokens: Tensor, cache: Slabs, *, states: Tensor | None = None) -> list[Tensor]:
        """tokens [B, m], states [B, m, ...] -> the outputs, [B, m, ...]; overwritten by the next pass of this size."""
        cache.begin(tokens.shape[1])
        if tokens.shape[1] <= _SIZES[-1]:
            return self._piece(tokens, states, cache, 0)
        pieces = [
            [
                out.clone()
                for out in self._piece(part, None if states is None else states[:, at : at + _SIZES[-1]], cache, at)
            ]
            for at, part in zip(range(0, tokens.shape[1], _SIZES[-1]), tokens.split(_SIZES[-1], dim=1), strict=True)
        ]
        return [torch.cat(outs, dim=1) for outs in zip(*pieces, strict=True)]

    def _piece(self, tokens: Tensor, states: Tensor | None, cache: Slabs, offset: int) -> list[Tensor]:
        rows, columns = tokens.shape
        window = self._window(rows, columns)
        cache.reserve(max(cache.lengths) + offset + window.tokens.shape[1])
        window.tokens[:, :columns] = tokens
        if window.states is not None:
            window.states[:, :columns] = states
        self._bind(window, cache, offset)
        window.replay.run()
        return [out[:, :columns] for out in window.replay.outputs]

    def _bind(self, window: _Window, cache: Slabs, offset: int) -> None:
        self._headers.copy_(cache.headers)
        starts = window.starts
        starts.copy_(torch.tensor(cache.lengths))
        if offset:
            starts += offset
        torch.add(starts[:, None], torch.arange(window.tokens.shape[1]), out=window.positions)

    def _window(self, rows: int, columns: int) -> _Window:
        size = next(size for size in _SIZES if size >= columns)
        if (rows, size) not in self._windows:
            self._windows[rows, size] = self._recorded(rows, size)
        return self._windows[rows, size]

    @torch.inference_mode(False)
    def _recorded(self, rows: int, size: int) -> _Window:
        tokens = torch.zeros(rows, size, dtype=torch.int64)
        starts, positions = torch.zeros(rows, dtype=torch.int64), torch.arange(size).repeat(rows, 1)
        states = None if self._state_shape is None else torch.zeros(rows, size, *self._state_shape, dtype=self._dtype)
        cache = RecordingCache(self._kinds, self._headers, starts, positions)
        tape = RecordingTape([tokens, positions, *([] if states is None else [states])], cache)
        replay = Replay.of(self._runtime, tape, lambda: self._call(tokens, states, cache), self._weights.pack)
        layers = [layer for layer in cache.layers if isinstance(layer, RecordingLayer)]
        self._shapes = [layer.shape or (1, 1, 1) for layer in layers]
        return _Window(tokens, positions, starts, states, replay)


class _Readout:
    """Normed states through an output head: logits, their argmax and its probability."""

    def __init__(self, runtime: Runtime, weights: Weights, logits: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self._runtime, self._weights, self._logits, self._like = runtime, weights, logits, like
        self._replays: dict[int, tuple[Tensor, Replay]] = {}

    def __call__(self, normed: Tensor) -> Tensor:
        """normed [..., H] -> [..., V], overwritten by the next call of this size."""
        flat = normed.reshape(-1, normed.shape[-1])
        if len(flat) > _SIZES[-1]:
            return self._logits(normed)
        size = next(size for size in _SIZES if size >= len(flat))
        if size not in self._replays:
            given = torch.zeros(size, normed.shape[-1], dtype=normed.dtype)
            self._replays[size] = (
                given,
                Replay.of(self._runtime, Tape([given]), lambda: [self._logits(given)], self._weights.pack),
            )
        given, replay = self._replays[size]
        given[: len(flat)] = flat
        replay.run()
        return replay.outputs[0][: len(flat)].unflatten(0, normed.shape[:-1])


class FastTrunk:
    """`Trunk` as decoding uses it."""

    def __init__(self, trunk: Trunk, runtime: Runtime, weights: Weights) -> None:
        self.plain = trunk
        self.vocab_size, self.max_length, self.hidden_shape = trunk.vocab_size, trunk.max_length, trunk.hidden_shape
        self.dtype, self.device = trunk.dtype, trunk.device
        self._passes = Passes(runtime, weights, trunk.kinds, self._call, dtype=trunk.dtype)
        self._readout = _Readout(runtime, weights, trunk.logits, trunk.embedding.weight)

    def cache(self, batch_size: int) -> Slabs:
        return self._passes.cache(batch_size)

    def __call__(self, tokens: Tensor, cache: Slabs) -> Hidden:
        """As `Trunk.forward` with a cache; the states are overwritten by the next pass."""
        return Hidden(*self._passes.run(tokens, cache))

    def logits(self, normed: Tensor) -> Tensor:
        return self._readout(normed)

    def _call(self, tokens: Tensor, states: Tensor | None, cache: RecordingCache) -> list[Tensor]:
        with replaced(self.plain.model):
            hidden = self.plain(tokens, cache)
        return [hidden.normed, hidden.eaten]


class FastHead:
    """`Head` as decoding uses it."""

    def __init__(self, head: Head, trunk: FastTrunk, runtime: Runtime, weights: Weights) -> None:
        self.plain, self.stack, self.num_modules = head, head.stack, head.num_modules
        self.module, self.eats_recycled, self.family = head.module, head.eats_recycled, head.family
        self._passes = [self._of_module(index, trunk, runtime, weights) for index in range(head.num_modules)]
        own = "output" in head.family.own
        self._readouts = [
            _Readout(
                runtime, weights, lambda normed, index=index: head.logits(index, normed), head.trunk.embedding.weight
            )
            if own
            else trunk._readout
            for index in range(head.num_modules)
        ]

    def cache(self, batch_size: int) -> Slabs:
        return self._passes[0].cache(batch_size)

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: Slabs) -> Step:
        """As `Head.step` with a cache; the states are overwritten by the next pass."""
        return Step(*self._passes[index].run(tokens, cache, states=hidden))

    def logits(self, index: int, normed: Tensor) -> Tensor:
        return self._readouts[index](normed)

    def _of_module(self, index: int, trunk: FastTrunk, runtime: Runtime, weights: Weights) -> Passes:
        head = self.plain

        def call(tokens: Tensor, states: Tensor | None, cache: RecordingCache) -> list[Tensor]:
            assert states is not None
            with replaced(head, head.trunk.model):
                step = head.step(index, tokens, states, cache=cache)
            return [step.normed, step.recycled]

        module = head.stack[index]
        assert isinstance(module, Module)
        kinds = [kind for each in head.stack for kind in each.kinds]
        return Passes(runtime, weights, kinds, call, dtype=trunk.dtype, state_shape=trunk.hidden_shape)
