"""Drafting: refresh the head with the positions that the trunk has processed, then continue from its own states.

In the native backend, one native call makes all drafts of a round if Python need not run between them.
`Drafter._draft_in_torch` defines what that call computes, and handles all other cases.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nextn.cache.kv_cache import KVCache
from nextn.decoding.records import DraftResult
from nextn.model.head import HeadStep
from nextn.runtime.protocols import DecodingHead, DecodingRecursion, DraftChain
from nextn.settings import Contract, Sampling
from nextn.speculative.draft_policy import DraftProgress, RoundPlan
from nextn.speculative.sampling import Prediction, Uniforms, ragged, sample

# Called before each pass: (phase, module, input tokens of each sequence, cache, hidden input), see `records.Event`.
PassCallback = Callable[[str, int | None, Sequence[Sequence[int]], KVCache, str], None]


class Drafter:
    """The head's part of decoding. Subclasses may draft in other ways, see `rounds(make_drafter=)`.

    `pending[r]` holds the trunk's states at the last positions of sequence r, which the head's next refresh processes.
    """

    # Whether one native call may make the drafts of a round; if not, each draft passes through `sample_drafts`.
    uses_native_chain = True

    def __init__(
        self,
        head: DecodingHead,
        like: Tensor,
        batch_size: int,
        *,
        sampling: Sampling,
        sampled: bool,
        contract: Contract,
        on_pass: PassCallback | None,
        trunk_cache: KVCache | None = None,
    ) -> None:
        """Create a drafter whose caches are empty, for states of dtype and device of `like` [0, *hidden_shape].

        Drafts that are not `sampled` are the argmax of q. Other values of the contract than the defaults inject faults.
        `on_pass` is called before each pass; None lets the drafts of a round be one native call. A head without keys of
        its own reads `trunk_cache`.
        """
        self.head, self.sampling, self.sampled, self.contract = head, sampling, sampled, contract
        self._on_pass = on_pass
        self.caches = [head.cache(batch_size, trunk_cache) for _ in range(head.num_modules)]
        self.pending, self.previous = ([like for _ in range(batch_size)] for _ in range(2))
        self.ends = [0] * batch_size  # number of positions that the trunk has processed
        self.bases: list[int] = []
        self._bind_chain()

    @property
    def chain(self) -> DraftChain | None:
        """The native draft chain for whole native rounds; None if the contract injects a fault."""
        return self._chain if self.contract == Contract() else None

    @property
    def num_pending(self) -> int:
        """The most positions of a sequence that are pending."""
        return max(map(len, self.pending))

    def draft(
        self,
        plan: RoundPlan,
        limits: Sequence[int],
        tokens: Sequence[Sequence[int]],
        uniforms: Sequence[Uniforms] | None,
        seen: Tensor | None = None,
    ) -> DraftResult:
        """Draft at most `limits` tokens for each sequence, until the plan stops it; `tokens` are all that are known.

        `uniforms` are None in greedy decoding. `seen` [B, V] bool are the tokens that a repetition penalty applies to.
        """
        limits = [min(plan.max_speculative_tokens, limit) for limit in limits]
        if not any(limits):
            return DraftResult.empty(len(limits))
        self.bases = list(self.caches[0].lengths)
        numbers = None if uniforms is None else [row.take(limit) for row, limit in zip(uniforms, limits, strict=True)]
        num_pending = list(map(len, self.pending))
        if self._chain is None:
            return self._draft_in_torch(plan, limits, tokens, numbers, seen)
        inputs = [row[end - width + 1 :] for row, end, width in zip(tokens, self.ends, num_pending, strict=True)]
        drafts, confidences, num_steps = self._chain.run(inputs, self.pending, plan, limits=limits, uniforms=numbers)
        distributions, longest = self._chain.distributions, max(map(len, drafts))
        q = None if distributions is None or not longest else distributions[:longest].transpose(0, 1)
        return DraftResult(drafts, confidences, q, num_steps)

    def commit(self, num_steps: int, num_accepted: Sequence[int]) -> list[int]:
        """Roll the head's caches back to the positions that were computed from true states, after verification.

        Return per sequence how many accepted positions are not refreshed: 0, unless the contract injects this fault.
        """
        if not num_steps:
            return [0] * len(num_accepted)
        num_modules, refresh = self.head.num_modules, self.contract.refresh
        num_final = list(map(len, self.pending))
        num_not_refreshed = [0 if refresh or num_modules > 1 else min(count, num_steps - 1) for count in num_accepted]
        if refresh or num_steps < num_modules:
            # Position i is final in layer k once token i + k is known; layers that did not run have nothing to keep.
            num_final = [max(0, final - num_modules + 1) if num_steps >= num_modules else 0 for final in num_final]
        lengths = [sum(counts) for counts in zip(self.bases, num_final, num_not_refreshed, strict=True)]
        for cache in self.caches:
            cache.rollback_to(lengths)
        self.pending = [pending[final:] for pending, final in zip(self.pending, num_final, strict=True)]
        return num_not_refreshed

    def add(self, head_input: Tensor, counts: Sequence[int], *, skip: Sequence[int] | None = None) -> None:
        """Queue the states skip[row] to counts[row] - 1 of head_input [B, T, H] for the next refresh."""
        for row, count in enumerate(counts):
            states = head_input[row, :count]
            self.ends[row] += count
            if self.contract.offset and count:
                previous = self.previous[row] if len(self.previous[row]) else torch.zeros_like(states[:1])
                self.previous[row], states = states[-1:].clone(), torch.cat([previous, states[:-1]])
            # Always a copy: the next pass of the trunk may overwrite these states.
            self.pending[row] = torch.cat([self.pending[row], states[0 if skip is None else skip[row] :]])

    def prefill(self, tokens: Sequence[Sequence[int]]) -> None:
        """Run every MTP layer over the pending positions of the prompt; drop them if the contract has no prefill."""
        self.refresh(tokens, run=self.contract.prefill)

    def catch_up(self, tokens: Sequence[Sequence[int]], num_pending: int) -> None:
        """Run every MTP layer over pending positions until each sequence has at most this many, and at least one."""
        while self.num_pending > num_pending:
            self.refresh([row[:-1] for row in tokens], limit=num_pending)  # equal sizes: the backend records each

    def refresh(self, tokens: Sequence[Sequence[int]], *, run: bool = True, limit: int | None = None) -> None:
        """Run every MTP layer over the pending positions whose tokens are known up to the deepest one, or drop them.

        At most `limit` positions of a sequence; None: all.
        """
        last = self.head.num_modules
        num_known = [len(row) - last - self._start(index) for index, row in enumerate(tokens)]
        num_pending = [len(pending) if limit is None else min(len(pending), limit) for pending in self.pending]
        counts = [max(0, min(pair)) for pair in zip(num_pending, num_known, strict=True)]
        states = _padded([pending[:count] for pending, count in zip(self.pending, counts, strict=True)])
        if max(counts) and run:
            for depth in range(1, last):
                step = self._step("prefill", depth, counts, states, tokens)
                states = step.next_hidden if self.head.uses_next_hidden(depth + 1) else states
            index, block = self._block("prefill", last, counts, tokens)
            self.head.refresh(index, block, states, cache=self.caches[index])
            self.caches[index].commit(counts)
        self.pending = [pending[count:] for pending, count in zip(self.pending, counts, strict=True)]

    def resume(self, pending: Sequence[Tensor], ends: Sequence[int]) -> None:
        """Continue after native rounds, with their pending states and the positions that the trunk has processed."""
        self.pending, self.ends = list(pending), list(ends)

    def append(self, other: "Drafter") -> None:
        """Take over the sequences of another drafter of the same kind, after this one's."""
        self.pending = self.pending + other.pending
        self.previous = self.previous + other.previous
        self.ends = self.ends + other.ends
        self.caches = [mine.joined(others) for mine, others in zip(self.caches, other.caches, strict=True)]
        self._bind_chain()

    def select(self, indices: Sequence[int]) -> None:
        """Keep only these sequences of the batch."""
        self.pending, self.previous = ([states[row] for row in indices] for states in (self.pending, self.previous))
        self.ends = [self.ends[row] for row in indices]
        for cache in self.caches:
            cache.select(indices)
        self._bind_chain()

    def sample_drafts(
        self, prediction: Prediction, seen: Tensor | None, uniforms: Tensor | None
    ) -> tuple[Tensor | None, list[int]]:
        """Return q [B, V], None in greedy decoding, and one draft per sequence."""
        if uniforms is None:
            return None, prediction.best
        q, tokens = sample(prediction.logits, self.sampling, uniforms, sampled=self.sampled, seen=seen)
        return q, tokens.tolist()

    def _bind_chain(self) -> None:
        """Bind the native draft chain, if there is one, to the caches as they are now."""
        self._chain = None
        if self._on_pass is None and self.uses_native_chain:
            self._chain = self.head.chain(self.caches[-1], self.sampling, sampled=self.sampled)

    def _draft_in_torch(
        self,
        plan: RoundPlan,
        limits: Sequence[int],
        known: Sequence[Sequence[int]],
        numbers: Sequence[Sequence[float]] | None,
        seen: Tensor | None,
    ) -> DraftResult:
        """Draft depth by depth. The plan decides by the confidence of each distribution whether to sample a draft; a
        sequence that has stopped drafting runs on with the others, and its tokens are ignored."""
        progress = [plan.begin(limit) for limit in limits]
        drafts: list[list[int]] = [[] for _ in limits]
        distributions: list[Tensor] = []
        uniforms = None if numbers is None else ragged(numbers, torch.float32)
        counts, tokens, depth = list(map(len, self.pending)), [0] * len(limits), 0
        states, recursion = _padded(self.pending), None
        while any(each.can_extend for each in progress):
            depth += 1
            if depth <= self.head.num_modules:
                rows = [[*row, *draft] for row, draft in zip(known, drafts, strict=True)]
                step = self._step("draft", depth, counts, states, rows)
                states = step.next_hidden if self.head.uses_next_hidden(depth + 1) else states
                prediction = self.head.predict(self.head.layer_index(depth), _last(step.final_hidden, counts))
            else:
                recursion = recursion or self.head.recursion(self.caches[-1], _last(step.next_hidden, counts))
                prediction = self._recurse(recursion, depth, tokens)
            if not _extend(progress, [1.0] * len(limits) if plan.ignores_confidence else prediction.confidence):
                break
            u = None if uniforms is None else uniforms[:, depth - 1].to(states.device)
            q, tokens = self.sample_drafts(prediction, seen, u)
            for each, draft, token in zip(progress, drafts, tokens, strict=True):
                if each.num_draft_tokens == depth:
                    draft.append(token)
            distributions += [] if q is None else [q]
            seen = None if seen is None else seen.scatter(1, torch.tensor(tokens, device=seen.device)[:, None], True)
        confidences = [each.confidences for each in progress]
        return DraftResult(drafts, confidences, torch.stack(distributions, 1) if distributions else None, depth)

    def _step(
        self, phase: str, depth: int, counts: Sequence[int], states: Tensor, tokens: Sequence[Sequence[int]]
    ) -> HeadStep:
        """Run the MTP layer of `depth` over each sequence's first counts[row] pending positions."""
        index, block = self._block(phase, depth, counts, tokens)
        step = self.head.step(index, block, states, cache=self.caches[index])
        self.caches[index].commit(counts)
        return step

    def _block(
        self, phase: str, depth: int, counts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> tuple[int, Tensor]:
        """Return the index of the MTP layer of `depth`, and its tokens [B, T]: position i takes token i + depth."""
        index = self.head.layer_index(depth)
        inputs = []
        for row, count in enumerate(counts):
            start = self._start(row) + depth
            known = list(tokens[row][start : start + count])
            # Padded where a sequence drafts no further: that position is rolled back.
            inputs.append(known + [0] * (count - len(known)))
        self._notify(phase, index, inputs, depth)
        return index, ragged(inputs, torch.long)

    def _recurse(self, recursion: DecodingRecursion, depth: int, tokens: Sequence[int]) -> Prediction:
        self._notify("draft", self.head.num_modules - 1, [[token] for token in tokens], depth)
        return recursion.step(tokens)

    def _notify(self, phase: str, index: int, tokens: Sequence[Sequence[int]], depth: int) -> None:
        if self._on_pass is not None:
            next_hidden = depth > self.head.num_modules or self.head.uses_next_hidden(depth)
            self._on_pass(phase, index, tokens, self.caches[index], f"g{depth - 1}" if next_hidden else "h")

    def _start(self, row: int) -> int:
        """Return the first position that is not final in the head's cache."""
        return self.ends[row] - len(self.pending[row])


def _extend(progress: Sequence[DraftProgress], confidences: Sequence[float]) -> bool:
    """Extend each sequence that can be; return whether any sequence drafts from these distributions."""
    extended = [each.can_extend and each.extend(value) for each, value in zip(progress, confidences, strict=True)]
    return any(extended)  # no short circuit: each sequence must see its confidence


def _padded(states: Sequence[Tensor]) -> Tensor:
    return states[0][None] if len(states) == 1 else torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)


def _last(states: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the last position [B, H] of each sequence's states [B, T, H]."""
    if len(counts) == 1:
        return states[:, counts[0] - 1]
    return states[torch.arange(len(counts), device=states.device), torch.tensor(counts, device=states.device) - 1]
