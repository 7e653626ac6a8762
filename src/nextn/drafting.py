"""Drafts of a round: the head catches up on the columns that the trunk has seen since, then chains on from its own.

`Drafter` is the head's half of a decode; decode.py has the trunk's. On the fast path all of a round's drafts are one
native call where nothing must happen between them; the loop here says what they are, and is what other cases run on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextn.fast.chain import FastChain
from nextn.fast.choose import AnyHead, AnyRecursion
from nextn.head import Step
from nextn.policy import Chain, RoundPlan
from nextn.rollback import Cache
from nextn.sampling import Prediction, Sampling, Uniforms, draw, ragged
from nextn.settings import Contract as Contract

# (phase, module, of each row the tokens that a pass eats, its cache, which states) before each pass, see decode.Event
Watch = Callable[[str, int | None, Sequence[Sequence[int]], Cache, str], None]


@dataclass(frozen=True, eq=False)
class Drafted:
    """drafts, confidences: per row, the latter of all laws that the plan was asked about. laws: q [B, K, V] of the
    drafts, None in greedy decoding or without any. ran: depths that ran, also one from whose laws nothing was drawn."""

    drafts: list[list[int]]
    confidences: list[list[float]]
    laws: Tensor | None = None
    ran: int = 0

    @classmethod
    def nothing(cls, num_rows: int) -> "Drafted":
        return cls([[] for _ in range(num_rows)], [[] for _ in range(num_rows)])


class Drafter:
    """The head's half of a decode. pending[r]: the true states of the last columns of row r that the trunk has seen and
    that are not yet final in the head's caches."""

    def __init__(
        self,
        head: AnyHead,
        like: Tensor,
        num_rows: int,
        *,
        sampling: Sampling,
        sampled: bool,
        contract: Contract,
        watch: Watch | None,
    ) -> None:
        """like [0, *hidden_shape]: of the states' dtype and device. sampled: drafts are drawn, not the laws' argmax."""
        self.head, self.sampling, self.sampled, self.contract = head, sampling, sampled, contract
        self._watch = watch
        self.caches = [head.cache(num_rows) for _ in head.stack]
        self.pending, self.before = ([like for _ in range(num_rows)] for _ in range(2))
        self.ends = [0] * num_rows  # columns that the trunk has seen
        self.bases: list[int] = []
        self._join()

    @property
    def chain(self) -> FastChain | None:
        """The native chain, for whoever runs whole rounds with it: not where a fault is planted between them."""
        return self._chain if self.contract == Contract() else None

    def draft(
        self,
        plan: RoundPlan,
        rooms: Sequence[int],
        tokens: Sequence[Sequence[int]],
        uniforms: Sequence[Uniforms] | None,
        seen: Tensor | None = None,
    ) -> Drafted:
        """Drafts of each row by the plan, rooms[row] at most. tokens: all that are known of each row. uniforms: None in
        greedy decoding. seen [B, V]: for a penalty."""
        limits = [min(plan.max_drafts, room) for room in rooms]
        if not any(limits):
            return Drafted.nothing(len(limits))
        self.bases = list(self.caches[0].lengths)
        numbers = None if uniforms is None else [row.take(limit) for row, limit in zip(uniforms, limits, strict=True)]
        widths = list(map(len, self.pending))
        if self._chain is None:
            return self._looped(plan, limits, tokens, numbers, seen)
        eaten = [row[end - width + 1 :] for row, end, width in zip(tokens, self.ends, widths, strict=True)]
        drafts, confidences, ran = self._chain.run(eaten, self.pending, plan, limits=limits, uniforms=numbers)
        laws = self._chain.laws
        longest = max(map(len, drafts))
        return Drafted(
            drafts, confidences, None if laws is None or not longest else laws[:longest].transpose(0, 1), ran
        )

    def settle(self, ran: int, kept: Sequence[int]) -> list[int]:
        """After verification: the head's caches go back to the columns that saw true states and true tokens only.

        -> per row, how many of the kept columns need no re-run: none, unless that fault is planted.
        """
        if not ran:
            return [0] * len(kept)
        num_modules, rerun = self.head.num_modules, self.contract.rerun
        finals = list(map(len, self.pending))
        stale = [0 if rerun or num_modules > 1 else min(count, ran - 1) for count in kept]
        if rerun or ran < num_modules:
            # Column i is final in module k once token i + k is known; modules that did not run have nothing to keep.
            finals = [max(0, final - num_modules + 1) if ran >= num_modules else 0 for final in finals]
        for cache in self.caches:
            cache.truncate([base + final + more for base, final, more in zip(self.bases, finals, stale, strict=True)])
        self.pending = [pending[final:] for pending, final in zip(self.pending, finals, strict=True)]
        return stale

    def add(self, eaten: Tensor, counts: Sequence[int], *, skip: Sequence[int] | None = None) -> None:
        """eaten [B, T, H]: the first counts[row] columns are true; all but the first skip[row] wait for the head."""
        for row, count in enumerate(counts):
            states = eaten[row, :count]
            self.ends[row] += count
            if self.contract.offset and count:
                before = self.before[row] if len(self.before[row]) else torch.zeros_like(states[:1])
                self.before[row], states = states[-1:].clone(), torch.cat([before, states[:-1]])
            # A copy in any case: the next pass of the trunk may write there.
            self.pending[row] = torch.cat([self.pending[row], states[0 if skip is None else skip[row] :]])

    def prefill(self, tokens: Sequence[Sequence[int]]) -> None:
        """Run every module over what the trunk has seen of the prompt; a contract without prefill drops it instead."""
        self.feed(tokens, run=self.contract.prefill)

    def feed(self, tokens: Sequence[Sequence[int]], *, run: bool = True) -> None:
        """Run every module over the pending columns whose tokens are known up to the deepest module, or drop those."""
        depths = range(1, self.head.num_modules + 1)
        known = [len(row) - self.head.num_modules - self._start(place) for place, row in enumerate(tokens)]
        widths = [max(0, min(len(pending), num)) for pending, num in zip(self.pending, known, strict=True)]
        states = _stacked([pending[:width] for pending, width in zip(self.pending, widths, strict=True)])
        for depth in depths if max(widths) and run else ():
            step = self._window("prefill", depth, widths, states, tokens)
            states = step.recycled if self.head.eats_recycled(depth + 1) else states
        self.pending = [pending[width:] for pending, width in zip(self.pending, widths, strict=True)]

    def follow(self, pending: Sequence[Tensor], ends: Sequence[int]) -> None:
        """Others ran rounds: what waits for the head now, and how many columns the trunk has seen."""
        self.pending, self.ends = list(pending), list(ends)

    def select(self, stay: Sequence[int]) -> None:
        """Only the rows at these places stay."""
        self.pending, self.before = ([states[row] for row in stay] for states in (self.pending, self.before))
        self.ends = [self.ends[row] for row in stay]
        for cache in self.caches:
            cache.select(stay)
        self._join()

    def pick(self, guess: Prediction, seen: Tensor | None, uniforms: Tensor | None) -> tuple[Tensor | None, list[int]]:
        """-> q [B, V] and one token a row from it; greedily, no law is needed."""
        if uniforms is None:
            return None, guess.best
        q, tokens = draw(guess.logits, self.sampling, uniforms, sampled=self.sampled, seen=seen)
        return q, tokens.tolist()

    def _join(self) -> None:
        """The native chain over the caches as they are now, if there is one."""
        self._chain = None
        if self._watch is None:
            self._chain = self.head.chain(self.caches[-1], self.sampling, sampled=self.sampled)

    def _looped(
        self,
        plan: RoundPlan,
        limits: Sequence[int],
        known: Sequence[Sequence[int]],
        numbers: Sequence[Sequence[float]] | None,
        seen: Tensor | None,
    ) -> Drafted:
        """Asked before a draft is drawn, of how sure its law is. A row whose chain has ended goes on with the others,
        but its tokens are no drafts."""
        chains = [plan.begin(limit) for limit in limits]
        drafts: list[list[int]] = [[] for _ in limits]
        laws: list[Tensor] = []
        uniforms = None if numbers is None else ragged(numbers, torch.float32)
        widths, tokens, ran = list(map(len, self.pending)), [0] * len(limits), 0
        states, recursion = _stacked(self.pending), None
        while any(chain.further for chain in chains):
            ran += 1
            if ran <= self.head.num_modules:
                rows = [[*row, *draft] for row, draft in zip(known, drafts, strict=True)]
                step = self._window("draft", ran, widths, states, rows)
                states = step.recycled if self.head.eats_recycled(ran + 1) else states
                guess = self.head.predict(self.head.module(ran), _last(step.normed, widths))
            else:
                recursion = recursion or self.head.recursion(self.caches[-1], _last(step.recycled, widths))
                guess = self._recurse(recursion, ran, tokens)
            if not _taken(chains, [1.0] * len(limits) if plan.is_blind else guess.confidence):
                break
            q, tokens = self.pick(guess, seen, None if uniforms is None else uniforms[:, ran - 1].to(states.device))
            for chain, draft, token in zip(chains, drafts, tokens, strict=True):
                if chain.drafts == ran:
                    draft.append(token)
            laws += [] if q is None else [q]
            seen = None if seen is None else seen.scatter(1, torch.tensor(tokens, device=seen.device)[:, None], True)
        return Drafted(drafts, [each.confidences for each in chains], torch.stack(laws, 1) if laws else None, ran)

    def _window(
        self, phase: str, depth: int, widths: Sequence[int], states: Tensor, tokens: Sequence[Sequence[int]]
    ) -> Step:
        """The module of `depth` over each row's first widths[row] pending columns: column i eats token i + depth."""
        index = self.head.module(depth)
        eaten = []
        for row, width in enumerate(widths):
            start = self._start(row) + depth
            known = list(tokens[row][start : start + width])
            eaten.append(known + [0] * (width - len(known)))  # a row that drafts no further; its column is dropped
        self._tell(phase, index, eaten, depth)
        step = self.head.step(index, ragged(eaten, torch.long), states, cache=self.caches[index])
        self.caches[index].keep(widths)
        return step

    def _recurse(self, recursion: AnyRecursion, depth: int, tokens: Sequence[int]) -> Prediction:
        self._tell("draft", self.head.num_modules - 1, [[token] for token in tokens], depth)
        return recursion.step(tokens)

    def _tell(self, phase: str, index: int, tokens: Sequence[Sequence[int]], depth: int) -> None:
        if self._watch is not None:
            recycled = depth > self.head.num_modules or self.head.eats_recycled(depth)
            self._watch(phase, index, tokens, self.caches[index], f"g{depth - 1}" if recycled else "h")

    def _start(self, row: int) -> int:
        """The first column that is not final in the head."""
        return self.ends[row] - len(self.pending[row])


def _taken(chains: Sequence[Chain], confidences: Sequence[float]) -> bool:
    """Whether any row drafts from the laws of these confidences."""
    taken = [chain.further and chain.more(each) for chain, each in zip(chains, confidences, strict=True)]
    return any(taken)  # all are asked


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _last(states: Tensor, widths: Sequence[int]) -> Tensor:
    """states [B, T, H] -> [B, H]: each row's last column."""
    if len(widths) == 1:
        return states[:, widths[0] - 1]
    return states[torch.arange(len(widths), device=states.device), torch.tensor(widths, device=states.device) - 1]
