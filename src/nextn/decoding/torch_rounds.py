"""One round in torch: draft, verify the drafts in one pass of the trunk, commit the accepted ones.

`TorchRounds.torch_round` is the body of the decoding loop of the `torch` backend. The native backend uses it, too, for
rounds that it cannot run as a whole. `DecodingBatch` adds prompts, sequences that join and leave, and native rounds.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nextn.cache.kv_cache import KVCache
from nextn.decoding.drafter import Drafter
from nextn.decoding.records import BatchSequence, DraftResult, Event, Observer
from nextn.runtime.protocols import DecodingHead, DecodingTrunk
from nextn.settings import Settings
from nextn.speculative.copy_choice import CopyChoice
from nextn.speculative.draft_policy import DraftLength
from nextn.speculative.sampling import Prediction, Uniforms, ragged
from nextn.speculative.verification import VerifiedRound, Verifier, accept_greedy


class TorchRounds:
    """Trunk, drafter and caches of the sequences that decode together. Row r of every tensor is `sequences[r]`."""

    trunk: DecodingTrunk
    drafter: Drafter | None  # None without a head
    cache: KVCache  # the trunk's
    sequences: list[BatchSequence]
    settings: Settings
    draft_length: DraftLength
    verifier: Verifier
    seen: Tensor | None  # [B, V] bool, the tokens that a repetition penalty applies to
    observer: Observer | None

    def torch_round(self, choice: CopyChoice) -> VerifiedRound:
        """Draft, then verify the drafts in one pass of the trunk."""
        started = time.perf_counter()
        drafted = self._draft(choice)
        draft_end = time.perf_counter()
        block = [[tokens[-1], *draft] for tokens, draft in zip(self._tokens, drafted.drafts, strict=True)]
        self._notify("verify", None, block, self.cache, "")
        hidden = self.trunk(ragged(block, torch.long), self.cache)
        verification = self._verify(self.trunk.read(hidden), drafted)
        num_accepted = [count for count, _ in verification]
        num_committed = [count + 1 for count in num_accepted]
        self.cache.commit(num_committed)
        if self.drafter is not None:
            num_not_refreshed = self.drafter.commit(drafted.num_steps, num_accepted)
            self.drafter.add(hidden.head_input, num_committed, skip=num_not_refreshed)
            if 0 < drafted.num_steps < self.drafter.head.num_modules:  # deeper layers did not run: refresh them now
                self.drafter.refresh(self._tokens)
        seconds = draft_end - started, time.perf_counter() - draft_end
        return VerifiedRound(drafted.drafts, drafted.confidences, verification, *seconds, choice)

    def _draft(self, choice: CopyChoice) -> DraftResult:
        """Draft with the head for the sequences without copied drafts, and add the copied drafts of the others."""
        drafted = DraftResult.empty(len(self.sequences))
        if self.drafter is not None and choice.uses_head:
            uniforms = None if self._is_greedy else self._uniforms
            limits = self._draft_limits(self.settings.num_speculative_tokens)
            limits = [0 if copied else limit for copied, limit in zip(choice.drafts, limits, strict=True)]
            drafted = self.drafter.draft(self.draft_length.plan(), limits, self._tokens, uniforms, self.seen)
        if not choice.num_draft_tokens:
            return drafted
        like = None if self._is_greedy else torch.empty(0, self.trunk.vocab_size, device=self.trunk.device)
        return drafted.with_copies(choice.drafts, like)

    def _verify(self, predicted: Prediction, drafted: DraftResult) -> list[tuple[int, int]]:
        """Return (number of accepted drafts, next token) per sequence, by the trunk's prediction [B, K+1]."""
        if self._is_greedy:
            return [accept_greedy(best, drafts) for best, drafts in zip(predicted.best, drafted.drafts, strict=True)]
        uniforms = [row.take(len(drafts) + 1) for row, drafts in zip(self._uniforms, drafted.drafts, strict=True)]
        return self.verifier(predicted.logits, drafted.distributions, drafted.drafts, uniforms, seen=self.seen)

    def _draft_limits(self, most: int) -> list[int]:
        """Return the most drafts of each sequence: by its remaining tokens, and the context left to the longest one."""
        limit = self._within_block(most)
        if self.trunk.max_length is not None:
            limit = min(limit, self.trunk.max_length - max(map(len, self._tokens)))
        return [max(0, min(limit, sequence.remaining - 1)) for sequence in self.sequences]

    def _within_block(self, num_draft_tokens: int) -> int:
        """Return this number of drafts, or the largest one that fits into a block of the trunk."""
        size = self.trunk.max_block_size
        return num_draft_tokens if size is None else min(num_draft_tokens, size - 1)

    @property
    def _tokens(self) -> list[list[int]]:
        return [sequence.tokens for sequence in self.sequences]

    @property
    def _uniforms(self) -> list[Uniforms]:
        return [sequence.uniforms for sequence in self.sequences]

    @property
    def _is_greedy(self) -> bool:
        return self.settings.sampling.greedy and self.seen is None

    def _seen(self) -> Tensor:
        """Return [B, V] bool: the tokens of each sequence so far, for the repetition penalty."""
        seen = torch.zeros(len(self.sequences), self.trunk.vocab_size, dtype=torch.bool)
        for row, sequence in enumerate(self.sequences):
            seen[row, sequence.tokens] = True
        return seen.to(self.trunk.device)

    def _notify(
        self, phase: str, module: int | None, tokens: Sequence[Sequence[int]], cache: KVCache, hidden: str
    ) -> None:
        if self.observer is not None:
            for row, block in enumerate(tokens):
                if block:
                    event = Event(phase, module, self.sequences[row].row, cache.lengths[row], tuple(block), hidden)
                    self.observer(event)

    def _drafter(self, make_drafter: Callable[..., Drafter], head: DecodingHead) -> Drafter:
        settings, trunk = self.settings, self.trunk
        like = torch.empty(0, *trunk.hidden_shape, dtype=trunk.dtype, device=trunk.device)
        return make_drafter(
            head,
            like,
            len(self.sequences),
            sampling=settings.sampling,
            sampled=settings.sampled_drafts,
            contract=settings.contract,
            on_pass=None if self.observer is None else self._notify,
            trunk_cache=self.cache,
        )
