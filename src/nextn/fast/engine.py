"""Trunk and head on the fast path: the plain path's signatures over replays, one for each size of window.

A window is padded to the next size that has a replay; padded columns are overwritten by the next window.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nextn.fast.chain import FastChain
from nextn.fast.hooks import RecordingCache, note, replaced
from nextn.fast.judge import FastJudge
from nextn.fast.native import Runtime
from nextn.fast.pages import Pages
from nextn.fast.program import Replay
from nextn.fast.recurrent import ROOM, StateShape
from nextn.fast.slabs import Shape, Slabs
from nextn.fast.tape import RecordingTape
from nextn.head import Head, Step
from nextn.kinds import Kind
from nextn.sampling import Judge, Prediction, Sampling, Told
from nextn.trunk import Hidden, Trunk

# Columns of a window: the last token and usual numbers of drafts, then what prompts go through in.
_SIZES = (1, 2, 3, 5, 7, 9, 11, 13, 17, 24, 32, 64, 128)
_PADDED = 17  # a window runs on any replay up to this size that there is, rather than have one made for it

Array = NDArray[np.int64]


class Weights:
    """Packed weights by the tensor that they were made from, shared by all replays."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._pages = runtime, Pages()
        self._packed: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def pack(self, weight: Tensor) -> Tensor:
        """weight [N, K], or [E, N, K] of experts."""
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if key not in self._packed:
            self._packed[key] = self._runtime.pack(weight, self._pages.take), weight
        return self._packed[key][0]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a replay reads. tokens [B, m]; starts [B]; widths [B]: how many columns are a row's own, where a replay
    asks; states [B, m, ...] of a head. positions [B, m]: its own, from the starts."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    widths: Tensor
    states: Tensor | None

    @classmethod
    def of(cls, rows: int, size: int, states: Tensor | None) -> "Inputs":
        tokens, positions = (torch.zeros(rows, size, dtype=torch.int64) for _ in range(2))
        starts, widths = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
        return cls(tokens, positions, starts, widths, states)

    @property
    def all(self) -> list[Tensor]:
        return [self.tokens, self.positions, self.starts, self.widths, *([] if self.states is None else [self.states])]

    def place(self) -> None:
        """Positions from starts, as the first thing of a recording."""
        self.positions.copy_(self.starts[:, None] + torch.arange(self.positions.shape[1]))

    @cached_property
    def host(self) -> tuple[Array, Array, Array]:
        """tokens, starts and widths, to be written from Python: a tensor takes ten times as long."""
        return self.tokens.numpy(), self.starts.numpy(), self.widths.numpy()


Call = Callable[[Inputs, RecordingCache], Iterable[Tensor]]
Feeds = Callable[[int], Sequence[Tensor]]


class Passes:
    """Windows of any size through one stack of layers. call(inputs, cache) -> the outputs of a pass.

    feeds(rows): tensors that a pass writes for others to read.
    """

    def __init__(
        self,
        runtime: Runtime,
        weights: Weights,
        kinds: Sequence[Kind],
        call: Call,
        *,
        dtype: torch.dtype,
        state_shape: tuple[int, ...] | None = None,
        feeds: Feeds = lambda rows: (),
    ) -> None:
        self._runtime, self._weights, self._kinds, self._call = runtime, weights, list(kinds), call
        self._dtype, self._state_shape, self._feeds = dtype, state_shape, feeds
        self._attached: object = None
        self.last: tuple[Replay, int] | None = None  # what ran last, and how many of its columns were asked for
        self._headers = torch.zeros(len(kinds), 3, dtype=torch.int64)
        self._replays: dict[tuple[int, int], tuple[Inputs, Replay]] = {}
        self._chosen: dict[tuple[int, int], tuple[Inputs, Replay]] = {}  # by columns of the window
        self._shapes: list[Shape | StateShape | None] = []
        # What has no limit goes in several pieces; recurrent state would have to be put back into one before the last.
        self.max_window = ROOM if any(kind.is_recurrent for kind in kinds) else None
        self._sizes = [size for size in _SIZES if size <= (self.max_window or size)]

    def shapes(self, batch_size: int) -> list[Shape | StateShape | None]:
        """What each layer of the stack keeps of a column; None: the pass leaves it out. Raises Unrecordable."""
        if not self._shapes:
            self.replay(batch_size, 1)  # a recording tells the layers' sizes
        return self._shapes

    def run(self, tokens: Tensor, cache: Slabs, *, states: Tensor | None = None) -> list[Tensor]:
        """tokens [B, m], states [B, m, ...] -> the outputs, [B, m, ...]; overwritten by the next pass of this size."""
        cache.begin(tokens.shape[1])
        if tokens.shape[1] <= self._sizes[-1]:
            return self._piece(tokens, states, cache, 0)
        pieces = []
        for start in range(0, tokens.shape[1], self._sizes[-1]):
            part = slice(start, start + self._sizes[-1])
            outs = self._piece(tokens[:, part], None if states is None else states[:, part], cache, start)
            pieces.append([out.clone() for out in outs])
        self.last = None
        return [torch.cat(outs, dim=1) for outs in zip(*pieces, strict=True)]

    def bound(self, cache: Slabs, *, columns: int = 1, offset: int = 0, room: int = 0) -> tuple[Inputs, Replay]:
        """The replay for such a window, made ready for this cache, `offset` columns behind what stands in it.

        room: columns behind the window that will be written, too.
        """
        inputs, replay = self.replay(len(cache.lengths), columns)
        cache.reserve(max(cache.lengths) + offset + inputs.tokens.shape[1] + room)
        self.attach(cache)
        _, starts, _ = inputs.host
        starts[:] = [length + offset for length in cache.lengths] if offset else cache.lengths
        return inputs, replay

    def attach(self, cache: Slabs) -> None:
        """Replays read and write this cache from now on, where its slabs are now."""
        if self._attached is not cache.placement:
            self._headers.copy_(cache.headers)
            self._attached = cache.placement

    def _piece(self, tokens: Tensor, states: Tensor | None, cache: Slabs, offset: int) -> list[Tensor]:
        columns = tokens.shape[1]
        inputs, replay = self.bound(cache, columns=columns, offset=offset)
        size = inputs.tokens.shape[1]
        inputs.host[0][:, :columns] = tokens.numpy()
        if inputs.states is not None and states is not None:
            inputs.states[:, :columns] = states
        replay.run()
        self.last = replay, columns
        return replay.outputs if columns == size else [out[:, :columns] for out in replay.outputs]

    def replay(self, rows: int, columns: int) -> tuple[Inputs, Replay]:
        """A replay for a window of so many columns, and what it reads. Raises Unrecordable."""
        if (rows, columns) not in self._chosen:
            usual = self._size(columns)
            known = min((size for batch, size in self._replays if batch == rows and size >= columns), default=usual)
            self._chosen[rows, columns] = self._made(rows, known if known <= max(usual, _PADDED) else usual)
        return self._chosen[rows, columns]

    def prepare(self, rows: int, windows: Iterable[int], *, exact: bool) -> list[Replay]:
        """The replays for windows of so many columns, made now rather than in the middle of a text.

        exact: of just these sizes, not of the next usual ones.
        """
        windows = [columns for columns in windows if columns <= self._sizes[-1]]
        for columns in windows:
            self._made(rows, columns if exact else self._size(columns))
        return [self.replay(rows, columns)[1] for columns in windows]

    def _made(self, rows: int, size: int) -> tuple[Inputs, Replay]:
        if (rows, size) not in self._replays:
            self._replays[rows, size] = self._recorded(rows, size)
            self._chosen.clear()
        return self._replays[rows, size]

    def _size(self, columns: int) -> int:
        return next(size for size in self._sizes if size >= columns)

    @torch.inference_mode(False)
    def _recorded(self, rows: int, size: int) -> tuple[Inputs, Replay]:
        states = None if self._state_shape is None else torch.zeros(rows, size, *self._state_shape, dtype=self._dtype)
        inputs = Inputs.of(rows, size, states)
        cache = RecordingCache(self._kinds, self._headers, inputs.starts, inputs.positions)
        tape = RecordingTape([*inputs.all, *self._feeds(rows)], cache.layers)
        replay = Replay.of(self._runtime, tape, partial(self._pass, inputs, cache), self._weights.pack)
        self._shapes = [layer.shape for layer in cache.layers]
        return inputs, replay

    def _pass(self, inputs: Inputs, cache: RecordingCache) -> Iterable[Tensor]:
        inputs.place()
        return self._call(inputs, cache)


def _slabs(passes: Sequence[Passes], batch_size: int, *, dtype: torch.dtype, runtime: Runtime) -> Slabs:
    """Room for every layer that any of these passes over one stack meets. Raises Unrecordable."""
    told = zip(*(each.shapes(batch_size) for each in passes), strict=True)
    shapes = [next((shape for shape in layer if shape is not None), (1, 1, 1)) for layer in told]
    return Slabs(shapes, batch_size, dtype=dtype, runtime=runtime)


def _told(logits: Tensor) -> list[Tensor]:
    """logits [n, V] -> themselves, their argmax [n] and its probability [n]; to be called while recording."""
    best, confidence = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    note("confidence", [best, confidence, logits], outs=2)
    return [logits, best, confidence]


class _Readout:
    """Normed states through an output head."""

    def __init__(self, runtime: Runtime, weights: Weights, logits: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        """logits(states) -> what is read from them by the weight [V, H]."""
        self._runtime, self._weights, self._logits = runtime, weights, logits
        self._width, self._dtype = weight.shape[1], weight.dtype
        self._replays: dict[int, tuple[Tensor, Replay]] = {}
        self._behind: dict[Replay, Replay | None] = {}
        self._views: dict[tuple[Replay, int], list[Tensor]] = {}

    def over(self, source: Replay, columns: int) -> Prediction:
        """What is predicted at the first columns of the states [B, m, H] that a pass has left as its first output."""
        self.prepare(source)
        normed, replay = source.outputs[0], self._behind[source]
        if replay is None:
            return self(normed[:, :columns])
        if (source, columns) not in self._views:
            views = [out.unflatten(0, normed.shape[:2])[:, :columns] for out in replay.outputs]
            self._views[source, columns] = views
        replay.run()
        return Told(*self._views[source, columns])

    def prepare(self, source: Replay) -> None:
        """Make the replay for the states [B, m, H] that a pass leaves; none for more than a readout takes at once."""
        if source not in self._behind:
            flat = source.outputs[0].flatten(0, 1)
            self._behind[source] = self._recorded(flat) if len(flat) <= _SIZES[-1] else None

    def __call__(self, normed: Tensor) -> Prediction:
        """normed [..., H] -> what is predicted, overwritten by the next call of this size."""
        shape, flat = normed.shape[:-1], normed.reshape(-1, normed.shape[-1])
        if len(flat) > _SIZES[-1]:
            return Prediction(self._logits(normed))
        given, replay = self.ready(len(flat))
        given[: len(flat)] = flat
        replay.run()
        return Told(*(out[: len(flat)].unflatten(0, shape) for out in replay.outputs))

    def ready(self, rows: int) -> tuple[Tensor, Replay]:
        """The replay for so many states, and where it reads them."""
        size = next(size for size in _SIZES if size >= rows)
        if size not in self._replays:
            given = torch.zeros(size, self._width, dtype=self._dtype)
            self._replays[size] = given, self._recorded(given)
        return self._replays[size]

    @torch.inference_mode(False)
    def _recorded(self, given: Tensor) -> Replay:
        run = lambda: _told(self._logits(given))  # noqa: E731
        return Replay.of(self._runtime, RecordingTape([given]), run, self._weights.pack)


@dataclass(frozen=True)
class _Hidden(Hidden):
    """source: the replay that left the states, and how many of its columns they are; None: several did."""

    source: tuple[Replay, int] | None


class FastTrunk:
    """`Trunk` as decoding uses it."""

    def __init__(self, trunk: Trunk, runtime: Runtime, weights: Weights) -> None:
        self.plain = trunk
        self.vocab_size, self.max_length, self.hidden_shape = trunk.vocab_size, trunk.max_length, trunk.hidden_shape
        self.dtype, self.device = trunk.dtype, trunk.device
        self.predict = _Readout(runtime, weights, trunk.logits, trunk.output.weight)
        self._runtime = runtime
        self._passes = Passes(runtime, weights, trunk.kinds, self._call, dtype=trunk.dtype)
        self.max_window = self._passes.max_window

    def cache(self, batch_size: int) -> Slabs:
        return _slabs([self._passes], batch_size, dtype=self.dtype, runtime=self._runtime)

    def prepare(self, rows: int, windows: Sequence[int], *, exact: bool) -> None:
        """As `Trunk.prepare`."""
        for replay in self._passes.prepare(rows, windows, exact=exact):
            self.predict.prepare(replay)

    def judge(self, sampling: Sampling, *, block: bool) -> Judge:
        """What judges the drafts of rounds."""
        if sampling.needs_seen or sampling.greedy:
            return Judge(sampling, block=block)
        return FastJudge(self._runtime, sampling, block=block)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """To be open while passes run: torch's own threads would wait for work on the cores that the team runs on."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def __call__(self, tokens: Tensor, cache: Slabs) -> Hidden:
        """As `Trunk.forward` with a cache; the states are overwritten by the next pass."""
        normed, eaten = self._passes.run(tokens, cache)
        return _Hidden(normed, eaten, self._passes.last)

    def read(self, hidden: Hidden) -> Prediction:
        """As `Trunk.read`: where the states lie, before the next pass."""
        source = hidden.source if isinstance(hidden, _Hidden) else None
        return self.predict(hidden.normed) if source is None else self.predict.over(*source)

    def _call(self, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        with replaced(self.plain.model):
            hidden = self.plain(window.tokens, cache)
        return [hidden.normed, hidden.eaten]


class FastHead:
    """`Head` as decoding uses it."""

    def __init__(self, head: Head, trunk: FastTrunk, runtime: Runtime, weights: Weights) -> None:
        self.plain, self.stack, self.num_modules = head, head.stack, head.num_modules
        self._runtime, self._dtype = runtime, trunk.dtype
        self.module, self.eats_recycled, self.family = head.module, head.eats_recycled, head.family
        kinds = [kind for index in range(head.num_modules) for kind in head.kinds(index)]
        make = partial(Passes, runtime, weights, kinds, dtype=trunk.dtype, state_shape=trunk.hidden_shape)
        self._passes = [make(partial(self._call, index)) for index in range(head.num_modules)]
        self._chained, self._start = make(self._chain), make(self._first, feeds=self._eaten)
        own = "output" in head.family.own
        self._readouts = [
            _Readout(runtime, weights, partial(head.logits, index), head.output(index).weight) if own else trunk.predict
            for index in range(head.num_modules)
        ]

    def cache(self, batch_size: int) -> Slabs:
        """For any of the modules."""
        return _slabs(self._passes, batch_size, dtype=self._dtype, runtime=self._runtime)

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: Slabs) -> Step:
        """As `Head.step` with a cache; the states are overwritten by the next pass."""
        return Step(*self._passes[index].run(tokens, cache, states=hidden))

    def predict(self, index: int, normed: Tensor) -> Prediction:
        return self._readouts[index](normed)

    def prepare(self, rows: int, windows: Sequence[int]) -> None:
        """As `Head.prepare`."""
        largest = self._passes[0].max_window or _SIZES[-1]
        several = range(1, min(largest, max(windows) + self.num_modules - 1) + 1)
        # Both ways to draft: which one it will be is not known here, and a head's recordings are short.
        for passes in [*self._passes, *([self._start] if self.num_modules == 1 else [])]:
            passes.prepare(rows, several, exact=False)
        self._chained.prepare(rows, [1], exact=False)
        for readout in self._readouts:
            readout.ready(rows)

    def recursion(self, cache: Slabs, state: Tensor) -> "FastRecursion":
        return FastRecursion(self._chained, cache, state)

    def chain(self, cache: Slabs, sampling: Sampling, *, sampled: bool) -> FastChain | None:
        """All drafts of a round as one native call; None where they need Python between them."""
        if self.num_modules > 1 or cache.is_recurrent or sampling.needs_seen:
            return None
        if any(passes.replay(len(cache.lengths), 1)[1].program is None for passes in (self._start, self._chained)):
            return None
        return FastChain(self._runtime, self._start, self._chained, cache, sampling, sampled=sampled)

    def _call(self, index: int, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        assert window.states is not None
        with replaced(self.plain, self.plain.trunk.model):
            step = self.plain.step(index, window.tokens, window.states, cache=cache)
        return [step.normed, step.recycled]

    def _chain(self, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        """A step of the last module that leaves its inputs as the next step of a greedy chain wants them."""
        assert window.states is not None
        index = self.num_modules - 1
        normed, recycled = self._call(index, window, cache)
        outs = _told(self.plain.logits(index, normed[:, 0]))
        window.tokens.copy_(outs[1][:, None])
        window.states.copy_(recycled)
        window.starts.add_(1)
        return outs

    def _first(self, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        """The only module over its window, and the first draft of each row, which the chain finds in its inputs."""
        normed, recycled = self._call(0, window, cache)
        rows, size = window.tokens.shape
        last = window.widths + torch.arange(-1, rows * size - 1, size)
        outs = _told(self.plain.logits(0, normed.flatten(0, 1)[last]))
        tokens, starts, states = self._eaten(rows)
        tokens.copy_(outs[1][:, None])
        starts.copy_(window.starts + window.widths)
        states.copy_(recycled.flatten(0, 1)[last][:, None])
        return outs

    def _eaten(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the chain reads: tokens, starts, states."""
        inputs, _ = self._chained.replay(rows, 1)
        assert inputs.states is not None
        return inputs.tokens, inputs.starts, inputs.states


class FastRecursion:
    """`Recursion` as one program a step, which feeds itself."""

    def __init__(self, passes: Passes, cache: Slabs, state: Tensor) -> None:
        self._passes, self._cache = passes, cache
        self._inputs, self._replay = passes.bound(cache)
        assert self._inputs.states is not None
        self._inputs.states[:, 0] = state
        self._fed: list[int] | None = None

    def step(self, tokens: Sequence[int]) -> Prediction:
        if tokens != self._fed:
            self._inputs.tokens[:, 0] = torch.tensor(tokens)
        self._cache.begin(1)
        self._passes.attach(self._cache)  # the slabs may have grown
        self._replay.run()
        self._cache.keep([1] * len(tokens))
        prediction = Told(*self._replay.outputs)
        self._fed = prediction.best
        return prediction
