"""Trunk and head on CUDA graphs: the plain path's signatures over captured passes of transformers' own forward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from nextn.fast.graph import Recorder, recorder
from nextn.fast.hooks import implemented
from nextn.fast.links import CapturedChain
from nextn.fast.still import Rooms, StillCache, Window
from nextn.fast.tape import Unrecordable
from nextn.fast.verdicts import CapturedJudge, Verdicts
from nextn.fast.windows import Fed, Windows
from nextn.head import Head, Step
from nextn.sampling import Judge, Prediction, Sampling, Told
from nextn.trunk import Hidden, Trunk

_COLUMNS = 1024  # of a room at first; growing means capturing again
# From so many tokens on, experts are read once each rather than once for each token that chose them.
_GROUPED = 17


def _experts(module: nn.Module, tokens: int, weight: Tensor) -> AbstractContextManager[None]:
    """Experts in a form that asks the device for nothing: both of transformers' own."""
    able = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    grouped = able and weight.dtype == torch.bfloat16 and tokens >= _GROUPED
    return implemented(module, experts="grouped_mm" if grouped else "batched_mm")


@dataclass(frozen=True)
class _Hidden(Hidden):
    """told: what is predicted at each column, where the pass computed it."""

    told: Told | None


class CapturedTrunk:
    """`Trunk` as decoding uses it."""

    def __init__(self, trunk: Trunk, *, record: Recorder | None = None, columns: int = _COLUMNS) -> None:
        """record: what captures; None = as the device does. columns: that caches have room for at first."""
        self.plain = trunk
        self.vocab_size, self.max_length, self.hidden_shape = trunk.vocab_size, trunk.max_length, trunk.hidden_shape
        self.dtype, self.device, self.predict = trunk.dtype, trunk.device, trunk.predict
        self.max_window: int | None = None
        self.record, self.columns = record or recorder(trunk.device), columns
        self._verdicts: Verdicts = {}
        self._rooms = Rooms(trunk.kinds, columns=columns, device=trunk.device)
        self._windows = Windows("trunk", self._pass, self.record, device=trunk.device, more=self._more)

    def cache(self, batch_size: int) -> StillCache:
        """Raises Unrecordable."""
        return self._rooms.lend(batch_size)

    def prepare(self, rows: int, windows: Sequence[int], *, exact: bool) -> None:
        """As `Trunk.prepare`, for the caches that are in use."""
        for cache in self._rooms.in_use:
            if len(cache.lengths) == rows:
                self._windows.prepare(cache, windows, exact=exact)

    def judge(self, sampling: Sampling, *, block: bool) -> Judge:
        """What judges the drafts of rounds."""
        if sampling.needs_seen or sampling.greedy:
            return Judge(sampling, block=block)
        return CapturedJudge(sampling, block=block, record=self.record, known=self._verdicts)

    def rounds(self, *_: object, **__: object) -> None:
        """As `Trunk.rounds`: rounds are run from Python here."""

    def alone(self) -> AbstractContextManager[None]:
        """To be open while passes run."""
        return nullcontext()

    def __call__(self, tokens: Tensor, cache: StillCache) -> Hidden:
        """As `Trunk.forward` with a cache; the states are overwritten by the next pass."""
        normed, eaten, *told = self._windows.run(tokens, cache)
        return _Hidden(normed, eaten, Told(*told) if told else None)

    def read(self, hidden: Hidden) -> Prediction:
        """As `Trunk.read`, before the next pass."""
        told = hidden.told if isinstance(hidden, _Hidden) else None
        return self.predict(hidden.normed) if told is None else told

    def _pass(self, fed: Fed, window: Window) -> list[Tensor]:
        with _experts(self.plain.model, fed.tokens.numel(), self.plain.embedding.weight):
            hidden = self.plain(fed.tokens, window)
        return [hidden.normed, hidden.eaten]

    def _more(self, outs: Sequence[Tensor]) -> list[Tensor]:
        logits = self.plain.logits(outs[0])
        return [logits, logits.argmax(-1)]


class CapturedHead:
    """`Head` as decoding uses it."""

    def __init__(self, head: Head, trunk: CapturedTrunk) -> None:
        self.plain, self.stack, self.num_modules = head, head.stack, head.num_modules
        self.module, self.eats_recycled, self.family = head.module, head.eats_recycled, head.family
        self.record, self.device = trunk.record, trunk.device
        kinds = [kind for index in range(head.num_modules) for kind in head.kinds(index)]
        self._rooms = Rooms(kinds, columns=trunk.columns, device=trunk.device)
        with torch.inference_mode(False):
            self.like = torch.zeros(0, *trunk.hidden_shape, dtype=trunk.dtype, device=trunk.device)
        make = partial(Windows, record=self.record, device=trunk.device, like=self.like)
        self._windows = [make(f"module {index}", partial(self.run, index)) for index in range(head.num_modules)]
        self._chained = make("chained", self._chain)
        self._rows: dict[int, Tensor] = {}
        if head.shortlist is not None:
            self._ids = head.shortlist.ids.to(trunk.device)
            rows = [head.shortlist.rows(head.output(index).weight.detach()) for index in range(head.num_modules)]
            self._rows = dict(enumerate(rows))

    def cache(self, batch_size: int) -> StillCache:
        """For any of the modules. Raises Unrecordable."""
        return self._rooms.lend(batch_size)

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: StillCache) -> Step:
        """As `Head.step` with a cache; the states are overwritten by the next pass."""
        return Step(*self._windows[index].run(tokens, cache, states=hidden))

    def predict(self, index: int, normed: Tensor) -> Prediction:
        return Prediction(self.logits(index, normed))

    def logits(self, index: int, normed: Tensor) -> Tensor:
        """As `Head.logits`, with what a shortlist reads at hand on the device."""
        if index not in self._rows:
            return self.plain.logits(index, normed)
        listed = functional.linear(normed.to(self._rows[index].dtype), self._rows[index])
        full = listed.new_full((*listed.shape[:-1], self.plain.trunk.vocab_size), -torch.inf)
        full[..., self._ids] = listed
        return full

    def prepare(self, rows: int, windows: Sequence[int]) -> None:
        """As `Head.prepare`, for chains over caches that are in use; other passes are captured when they first run."""
        for cache in self._rooms.in_use:
            if cache.chain is not None and len(cache.lengths) == rows:
                cache.chain.prepare(windows)

    def recursion(self, cache: StillCache, state: Tensor) -> "CapturedRecursion":
        return CapturedRecursion(self._chained, cache, state)

    def chain(self, cache: StillCache, sampling: Sampling, *, sampled: bool) -> CapturedChain | None:
        """All drafts of a round without a word to the host; None where they need Python between them."""
        if self.num_modules > 1 or sampling.needs_seen:
            return None
        try:
            return CapturedChain(self, cache, sampling, sampled=sampled)
        except Unrecordable:
            return None

    def run(self, index: int, fed: Fed, window: Window) -> list[Tensor]:
        """One pass of a module -> normed, recycled [R, m, H]."""
        assert fed.states is not None
        with _experts(self.plain, fed.tokens.numel(), self.plain.trunk.embedding.weight):
            step = self.plain.step(index, fed.tokens, fed.states, cache=window)
        return [step.normed, step.recycled]

    def _chain(self, fed: Fed, window: Window) -> list[Tensor]:
        """A step of the last module that leaves its inputs as the next step of a greedy chain wants them."""
        index = self.num_modules - 1
        normed, recycled = self.run(index, fed, window)
        logits = self.logits(index, normed[:, 0])
        best = logits.argmax(-1)
        fed.follow(best, fed.starts + 1, recycled[:, 0])
        return [logits, best, logits.float().softmax(-1).amax(-1)]


class CapturedRecursion:
    """`Recursion` as one captured pass a step, which feeds itself."""

    def __init__(self, windows: Windows, cache: StillCache, state: Tensor) -> None:
        self._windows, self._cache, self._state = windows, cache, state
        self._fed: Fed | None = None
        self._best: list[int] | None = None

    def step(self, tokens: Sequence[int]) -> Prediction:
        """As `Recursion.step`; overwritten by the next."""
        fed, captured = self._windows.bound(self._cache, 1)
        batch = len(tokens)
        assert fed.states is not None
        if fed is not self._fed:  # also where the cache grew
            old = None if self._fed is None else self._fed.states
            fed.states[:batch, 0] = self._state if old is None else old[:batch, 0]
            self._fed, self._best = fed, None
        if tokens != self._best:
            fed.tell(torch.tensor(tokens)[:, None], self._cache.lengths)
        self._cache.begin(1)
        prediction = Told(*(out[:batch] for out in captured.run()))
        self._cache.keep([1] * batch)
        self._best = prediction.best
        return prediction
