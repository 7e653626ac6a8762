"""The protocols that a decoding backend implements; the implementations are `torch_backend` and `native/session`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nextn.model.head import HeadStep
from nextn.model.trunk import TrunkOutput
from nextn.settings import Sampling
from nextn.speculative.copy_choice import NO_COPIES, CopyChoice
from nextn.speculative.draft_policy import RoundPlan
from nextn.speculative.sampling import Prediction, Uniforms
from nextn.speculative.verification import VerifiedRound, Verifier

# A cache belongs to the backend that made it: KVCache for torch, KVBuffers for native.
AnyCache = Any


class DraftChain(Protocol):
    """All drafts of a round as a single call."""

    distributions: Tensor | None  # [K, B, V], q of the last call's drafts; None in greedy decoding

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        plan: RoundPlan,
        *,
        limits: Sequence[int],
        uniforms: Sequence[Sequence[float]] | None,
    ) -> tuple[list[list[int]], list[list[float]], int]:
        """Refresh the head with pending tokens and states, and draft: drafts, confidences, number of head steps."""


class WholeRounds(Protocol):
    """Runs whole rounds as single calls, and keeps the states that the head has not processed."""

    @property
    def can_draft(self) -> bool:
        """Whether the head drafts in these rounds; if not, the states for it are only collected."""

    def has_room(self, num_positions: int) -> bool:
        """Whether the states of one more round of this many positions without drafts of the head fit."""

    def run(
        self,
        plan: RoundPlan,
        max_speculative_tokens: int,
        uniforms: Sequence[Uniforms] | None,
        *,
        max_rounds: int = 1,
        choice: CopyChoice = NO_COPIES,
    ) -> list[VerifiedRound]:
        """Run rounds by this plan, stopping after the first in which a sequence ends."""

    def pending(self) -> list[Tensor]:
        """Return copies of each sequence's states that the head has not processed."""


@dataclass(frozen=True, eq=False)
class RoundsStart:
    """The state of a batch at which whole rounds take over from Python."""

    chain: Any  # a `DraftChain` of the same backend; None for rounds without drafts of the head
    tokens: Sequence[Sequence[int]]  # all tokens of each sequence
    # The states of each sequence that the head has not processed; empty without a head. Without a chain they are only
    # collected.
    pending: Sequence[Tensor]
    max_speculative_tokens: int  # largest number of the head's drafts per round
    max_copy_tokens: int  # largest number of copied tokens of a sequence per round
    remaining: Sequence[int]  # the number of tokens that each sequence may still get
    eos: Sequence[int]  # tokens that end a sequence


class DecodingTrunk(Protocol):
    """The passes of the trunk."""

    vocab_size: int
    max_length: int | None  # tokens of a sequence; None: no limit
    max_block_size: int | None  # positions of one pass over a cache; None: no limit
    records_passes: bool  # whether the first pass of each batch size takes longer
    hidden_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def cache(self, batch_size: int) -> AnyCache:
        """Make an empty cache for this many sequences."""

    def __call__(self, tokens: Tensor, cache: AnyCache) -> TrunkOutput:
        """Run tokens [B, T] over the cache, for the caller to commit; the next pass may overwrite the states."""

    def read(self, hidden: TrunkOutput) -> Prediction:
        """Return the prediction at each position of the last pass."""

    def predict(self, final_hidden: Tensor) -> Prediction:
        """Return the prediction of the next token from final_hidden [..., H]."""

    def prepare(self, batch_size: int, block_sizes: Sequence[int], *, exact: bool) -> None:
        """Prepare passes of these sizes, so that no round waits for it. exact: Exactly these sizes will be frequent."""

    def verifier(self, sampling: Sampling, *, block_verification: bool) -> Verifier:
        """Return the verifier for a round's drafts."""

    def rounds(
        self, cache: AnyCache, sampling: Sampling, start: RoundsStart, *, block_verification: bool
    ) -> WholeRounds | None:
        """Return an object that runs whole rounds over the trunk's cache; None if rounds must run in Python."""

    def pass_context(self) -> AbstractContextManager[None]:
        """Return the context in which passes run; it is not held across a `yield`."""


class DecodingRecursion(Protocol):
    """Runs the last MTP layer step by step, from its own hidden states."""

    def step(self, tokens: Sequence[int]) -> Prediction:
        """Predict the next depth from one token per sequence; its position is committed until the caller rolls back."""


class DecodingHead(Protocol):
    """The passes of the head."""

    num_modules: int

    def layer_index(self, depth: int) -> int:
        """Return the index of the MTP layer that computes a depth."""

    def uses_next_hidden(self, depth: int) -> bool:
        """Whether a depth takes the next_hidden of the depth before, not the trunk's state."""

    def cache(self, batch_size: int, trunk_cache: AnyCache = None) -> AnyCache:
        """Make an empty cache for one MTP layer. trunk_cache: The trunk's, for a head that reads it."""

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: AnyCache) -> HeadStep:
        """Run an MTP layer over a block of tokens [B, T] and states [B, T, ...]; the caller commits it."""

    def refresh(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: AnyCache) -> None:
        """Run an MTP layer as `step` does, only to update the cache."""

    def predict(self, index: int, final_hidden: Tensor) -> Prediction:
        """Return an MTP layer's prediction from its final_hidden [B, H]."""

    def prepare(self, batch_size: int, block_sizes: Sequence[int]) -> None:
        """Prepare refreshes of these sizes."""

    def chain(self, cache: AnyCache, sampling: Sampling, *, sampled: bool) -> DraftChain | None:
        """Return an object that makes all drafts of a round in one call; None if Python must run between them."""

    def recursion(self, cache: AnyCache, state: Tensor) -> DecodingRecursion:
        """Continue with the last MTP layer alone, from the next_hidden [B, ...] of the depth before."""
