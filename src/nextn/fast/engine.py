"""Trunk and head on the fast path: the plain path's signatures over replays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nextn.fast.chain import FastChain
from nextn.fast.hooks import RecordingCache, recordable
from nextn.fast.judge import FastJudge
from nextn.fast.native import Runtime
from nextn.fast.passes import SIZES, Inputs, Passes
from nextn.fast.program import Replay
from nextn.fast.readout import Readout, told
from nextn.fast.recurrent import native_rule
from nextn.fast.rounds import FastRounds, Window
from nextn.fast.scratch import Scratch
from nextn.fast.slabs import Slabs
from nextn.fast.weights import Weights
from nextn.head import Head, Step
from nextn.sampling import Judge, Prediction, Sampling, Told
from nextn.trunk import Hidden, Trunk

# Ways to sample, and windows of them by size and number of rows, that are kept for the next text.
_WAYS, _WINDOWS = 8, 512


def _slabs(passes: Sequence[Passes], batch_size: int, *, dtype: torch.dtype, runtime: Runtime) -> Slabs:
    """Room for every layer that any of these passes over one stack meets. Raises Unrecordable."""
    told = zip(*(each.shapes(batch_size) for each in passes), strict=True)
    shapes = [next((shape for shape in layer if shape is not None), (1, 1, 1)) for layer in told]
    return Slabs(shapes, batch_size, dtype=dtype, runtime=runtime)


@dataclass(frozen=True)
class _Hidden(Hidden):
    """source: the replay that left the states, and how many of its columns they are; None: several did."""

    source: tuple[Replay, int] | None


class FastTrunk:
    """`Trunk` as decoding uses it."""

    def __init__(self, trunk: Trunk, runtime: Runtime, weights: Weights) -> None:
        self.recorded = recordable(trunk)
        self.vocab_size, self.max_length, self.hidden_shape = trunk.vocab_size, trunk.max_length, trunk.hidden_shape
        self.dtype, self.device = trunk.dtype, trunk.device
        self.predict = Readout(runtime, weights, trunk.logits, trunk.output.weight)
        self._runtime = runtime
        self._passes = Passes(runtime, weights, trunk.kinds, self._call, dtype=trunk.dtype)
        self.max_window = self._passes.max_window
        self._windows: dict[tuple[object, ...], Window | None] = {}
        self._judges: dict[tuple[Sampling, bool], FastJudge] = {}
        self._judged = Scratch()

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

    def rounds(
        self,
        cache: Slabs,
        sampling: Sampling,
        *,
        block: bool,
        chain: FastChain | None,
        tokens: Sequence[Sequence[int]],
        pending: Sequence[Tensor],
        drafts: int,
        missing: Sequence[int],
        ends: Sequence[int],
    ) -> FastRounds | None:
        """Rounds as native calls, see `FastRounds`; None where they need Python between them."""
        if cache.is_recurrent or sampling.needs_seen or not FastRounds.fits(pending, drafts):
            return None
        judge = None if sampling.greedy else self._judge(sampling, block)
        windows = partial(self._window, len(tokens), judge)
        if windows(1, None) is None or self._readable(len(tokens), drafts + 1) is None:
            return None
        return FastRounds(
            self._runtime,
            windows,
            self._passes,
            cache,
            chain=chain,
            tokens=tokens,
            pending=pending if chain is not None else (),
            drafts=drafts,
            missing=missing,
            context=self.max_length,
            ends=ends,
        )

    def _judge(self, sampling: Sampling, block: bool) -> FastJudge:
        """One for each way to sample: what it makes for windows and laws that stand still is for all texts."""
        if (sampling, block) not in self._judges:
            if len(self._judges) >= _WAYS:
                self._judges.clear()
                self._windows.clear()
            self._judges[sampling, block] = FastJudge(self._runtime, sampling, block=block, scratch=self._judged)
        return self._judges[sampling, block]

    def _readable(self, rows: int, columns: int) -> Replay | None:
        """What reads a window of so many columns, if that is native."""
        _, replay = self._passes.replay(rows, columns)
        readout = self.predict.behind(replay)
        return None if replay.program is None or readout is None or readout.program is None else readout

    def _window(self, rows: int, judge: FastJudge | None, columns: int, laws: Tensor | None) -> Window | None:
        key = (rows, columns, judge, None if laws is None else laws.data_ptr(), self._passes.replay(rows, columns)[1])
        if key not in self._windows:
            if len(self._windows) >= _WINDOWS:
                self._windows.clear()
            self._windows[key] = self._made(rows, judge, columns, laws)
        return self._windows[key]

    def _made(self, rows: int, judge: FastJudge | None, columns: int, laws: Tensor | None) -> Window | None:
        inputs, replay = self._passes.replay(rows, columns)
        if (readout := self._readable(rows, columns)) is None:
            return None
        verdict = None
        if judge is not None:
            q = None if laws is None or columns == 1 else laws[: columns - 1].transpose(0, 1)
            verdict = judge.verdict(self.predict.views(replay, columns)[0], q)
        return Window.of(inputs, replay, readout, verdict)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Give this thread the runtime and all that recorded passes share, such as their inputs and their arena.

        To be open for a whole round, and not across a `yield`. torch's own threads would wait for work on the cores
        that the team runs on, so this thread has one of them meanwhile.
        """
        with self._runtime.lock:
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
        with native_rule(self.recorded):
            hidden = self.recorded(window.tokens, cache)
        return [hidden.normed, hidden.eaten]


class FastHead:
    """`Head` as decoding uses it."""

    def __init__(
        self, head: Head, trunk: FastTrunk, runtime: Runtime, weights: Weights, *, own_output: bool = False
    ) -> None:
        """own_output: it reads its states by these weights also where the output head is the trunk's."""
        self._recorded = recordable(head, [(head.trunk, trunk.recorded)])
        self.stack, self.num_modules = head.stack, head.num_modules
        self._runtime, self._dtype = runtime, trunk.dtype
        self.module, self.eats_recycled, self.family = head.module, head.eats_recycled, head.family
        kinds = [kind for index in range(head.num_modules) for kind in head.kinds(index)]
        make = partial(Passes, runtime, weights, kinds, dtype=trunk.dtype, state_shape=trunk.hidden_shape)
        self._passes = [make(partial(self._call, index)) for index in range(head.num_modules)]
        self._chained, self._fed = make(self._chain), make(self._fill)
        self._laws = Scratch()
        own = own_output or "output" in head.family.own
        self._readouts = [
            Readout(runtime, weights, partial(head.logits, index), head.output(index).weight) if own else trunk.predict
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
        largest = self._passes[0].max_window or SIZES[-1]
        several = range(1, min(largest, max(windows) + self.num_modules - 1) + 1)
        # Both ways to draft: which one it will be is not known here, and a head's recordings are short.
        for passes in [*self._passes, *([self._fed] if self.num_modules == 1 else [])]:
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
        passes = self._fed, self._chained
        if any(each.replay(len(cache.lengths), 1)[1].program is None for each in passes):
            return None
        return FastChain(self._runtime, *passes, cache, sampling, sampled=sampled, scratch=self._laws)

    def _call(self, index: int, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        assert window.states is not None
        head = self._recorded
        with native_rule(head, head.trunk):
            step = head.step(index, window.tokens, window.states, cache=cache)
        return [step.normed, step.recycled]

    def _chain(self, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        """A step of the last module that leaves its inputs as the next step of a greedy chain wants them."""
        assert window.states is not None
        index = self.num_modules - 1
        normed, recycled = self._call(index, window, cache)
        outs = told(self._recorded.logits(index, normed[:, 0]))
        window.tokens.copy_(outs[1][:, None])
        window.states.copy_(recycled)
        window.starts.add_(1)
        return outs

    def _fill(self, window: Inputs, cache: RecordingCache) -> list[Tensor]:
        """The only module over a window of which nothing is read: what of it stands in the cache."""
        self._call(0, window, cache)
        return []


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
