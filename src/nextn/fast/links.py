"""The drafts of a round on CUDA graphs: one pass that catches up, then one a draft, each fed by the one before.

The host sends one thing before and reads one thing behind them. `drafting.py` has the same as a loop, its twin.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nextn.fast.graph import Captured
from nextn.fast.still import Room, StillCache, Window
from nextn.fast.windows import SIZES, Fed, Windows
from nextn.policy import RoundPlan
from nextn.sampling import Sampling, draw, ragged

if TYPE_CHECKING:
    from nextn.fast.captured import CapturedHead

_DEPTHS = 8  # drafts that there is room for at first
_KEPT = 4  # ways to sample that a room remembers


class CapturedChain:
    """Drafts of the rows of one cache, from one way to sample. laws [K, B, V] is overwritten by the next round."""

    def __init__(self, head: "CapturedHead", cache: StillCache, sampling: Sampling, *, sampled: bool) -> None:
        """Raises Unrecordable."""
        self._head, self._cache, self._sampling, self._sampled = head, cache, sampling, sampled
        self._depths = _DEPTHS
        self.laws: Tensor | None = None
        self._links()
        cache.chain = weakref.proxy(self)

    def follows(self, plan: RoundPlan, columns: int) -> bool:
        """Whether `run` can do what the plan says behind so many columns: not where it asks how sure the head is."""
        return plan.is_blind and columns <= SIZES[-1]

    def prepare(self, windows: Sequence[int]) -> None:
        """Capture what catching up on so many columns takes."""
        self._links().start.prepare(self._cache, windows, exact=False)

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        plan: RoundPlan,
        *,
        limits: Sequence[int],
        uniforms: Sequence[Sequence[float]] | None,
    ) -> tuple[list[list[int]], list[list[float]], int]:
        """As `FastChain.run`."""
        widths, ran, batch = list(map(len, tokens)), max(limits), len(tokens)
        self._depths = max(self._depths, ran)
        self._cache.room.reserve(max(self._cache.lengths) + SIZES[-1] + ran)
        links = self._links()
        fed, first = links.start.bound(self._cache, max(widths), behind=ran)
        assert fed.states is not None
        fed.tell(ragged(tokens, torch.int64), self._cache.lengths, widths)
        fed.states[:batch, : max(widths)] = pad_sequence(list(states), batch_first=True)
        if uniforms is not None:
            links.uniforms[:batch, :ran].copy_(ragged(uniforms, torch.float32)[:, :ran], non_blocking=True)
        first.run()
        for _ in range(1, ran):
            links.chained.run()
        self.laws = None if links.laws is None else links.laws[:, :batch]
        self._cache.advance([width + ran - 1 for width in widths])
        drafts = links.drafts[:batch, :ran].tolist()
        drafts = [row[:limit] for row, limit in zip(drafts, limits, strict=True)]
        return drafts, [[1.0] * len(row) for row in drafts], ran

    def _links(self) -> "_Links":
        """Of this room as it is now: they stay behind for the next cache, and go when its slabs move."""
        room, rows = self._cache.room, self._cache.rows
        room.reserve(max(self._cache.lengths) + 1)
        name = ("chain", self._sampling, self._sampled, self._depths)
        if (name, rows) not in room.captured:
            room.forget("chain", _KEPT - 1)
            room.captured[name, rows] = _Links(self._head, name, self._cache, self._sampling, sampled=self._sampled)
        found: _Links = room.captured[name, rows]
        return found


class _Links:
    """What passes of a chain hand on. drafts [R, K]; laws [K, R, V] unless greedy; uniforms [R, K]; depth [1]: how many
    drafts there are. fed: what the next step reads. It holds no cache, or that would never give its room back."""

    @torch.inference_mode(False)  # what is made here outlives the caller's mode
    def __init__(
        self,
        head: "CapturedHead",
        name: tuple[str, Sampling, bool, int],
        cache: StillCache,
        sampling: Sampling,
        *,
        sampled: bool,
    ) -> None:
        self._head, self._sampling, self._sampled = head, sampling, sampled
        depths, device, rows = name[-1], head.device, cache.rows
        self.fed = Fed.of(rows, 1, device, head.like)
        self.fed.tell(torch.zeros(len(cache.lengths), 1), cache.lengths)  # capturing runs it, behind what stands
        self.drafts = torch.zeros(rows, depths, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(rows, depths, device=device)
        self.depth = torch.zeros(1, dtype=torch.int64, device=device)
        vocab = head.plain.trunk.vocab_size
        self.laws = None if sampling.greedy else torch.zeros(depths, rows, vocab, device=device)
        self.start = Windows(name, self._first, head.record, device=device, like=head.like, changed=self._changed)
        self.chained = Captured(partial(self._next, cache.room), head.record, fed=self._changed)

    @property
    def _changed(self) -> list[Tensor]:
        return [*self.fed.all, self.depth]

    def _first(self, fed: Fed, window: Window) -> list[Tensor]:
        normed, recycled = self._head.run(0, fed, window)
        rows, last = torch.arange(len(normed), device=normed.device), (fed.widths - 1).clamp_min(0)
        self.depth.zero_()
        self._hand_on(normed[rows, last], recycled[rows, last], fed.starts + fed.widths)
        return []

    def _next(self, room: Room) -> list[Tensor]:
        normed, recycled = self._head.run(0, self.fed, Window(room, self.fed.positions))
        self._hand_on(normed[:, 0], recycled[:, 0], self.fed.starts + 1)
        return []

    def _hand_on(self, normed: Tensor, recycled: Tensor, starts: Tensor) -> None:
        logits = self._head.logits(0, normed)
        if self.laws is None:
            tokens = logits.argmax(-1)
        else:
            u = self.uniforms.index_select(1, self.depth)[:, 0]
            law, tokens = draw(logits, self._sampling, u, sampled=self._sampled)
            self.laws.index_copy_(0, self.depth, law[None])
        self.drafts.index_copy_(1, self.depth, tokens[:, None])
        self.fed.follow(tokens, starts, recycled)
        self.depth.add_(1)
