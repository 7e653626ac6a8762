"""What decoding needs of a backend. There are two: `torch` (torch_backend.py) and `native` (native/session.py)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from nextn.model.head import HeadStep
from nextn.model.trunk import TrunkOutput
from nextn.runtime.native.draft_chain import NativeDraftChain
from nextn.runtime.native.rounds import NativeRounds
from nextn.settings import Sampling
from nextn.speculative.sampling import Prediction, Verifier

# A cache belongs to the backend that made it: KVCache for torch, KVBuffers for native.
AnyCache = Any


class DecodingTrunk(Protocol):
    """The passes of the trunk."""

    vocab_size: int
    max_length: int | None  # tokens of a sequence; None: no limit
    max_block_size: int | None  # positions of one pass over a cache; None: no limit
    hidden_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def cache(self, batch_size: int) -> AnyCache:
        """Make an empty cache for this many sequences."""

    def __call__(self, tokens: Tensor, cache: AnyCache) -> TrunkOutput:
        """Run a block of tokens [B, T] over the cache: a prefill, a baseline step or a verification.

        The caller commits it. The next pass may overwrite the states.
        """

    def read(self, hidden: TrunkOutput) -> Prediction:
        """Return the prediction at each position of the last pass."""

    def predict(self, final_hidden: Tensor) -> Prediction:
        """Return the prediction of the next token from final_hidden [..., H]."""

    def prepare(self, batch_size: int, block_sizes: Sequence[int], *, exact: bool) -> None:
        """Make what passes of these sizes need, so that no round waits for it. exact: these very sizes are frequent."""

    def verifier(self, sampling: Sampling, *, block_verification: bool) -> Verifier:
        """Return the verifier for a round's drafts."""

    def rounds(
        self,
        cache: AnyCache,
        sampling: Sampling,
        *,
        block_verification: bool,
        chain: NativeDraftChain | None,
        tokens: Sequence[Sequence[int]],
        pending: Sequence[Tensor],
        max_speculative_tokens: int,
        remaining: Sequence[int],
        eos: Sequence[int],
    ) -> NativeRounds | None:
        """Return whole rounds as single calls, see `NativeTrunk.rounds`; None: rounds run in Python."""

    def pass_context(self) -> AbstractContextManager[None]:
        """Return the context in which passes run; it is not held across a `yield`."""


class DecodingRecursion(Protocol):
    """The last MTP layer step by step, from its own hidden states."""

    def step(self, tokens: Sequence[int]) -> Prediction:
        """Predict the next depth from one token per sequence; its position is committed until the caller rolls back."""


class DecodingHead(Protocol):
    """The passes of the head."""

    num_modules: int

    def layer_index(self, depth: int) -> int:
        """Return the index of the MTP layer that computes a depth."""

    def uses_next_hidden(self, depth: int) -> bool:
        """Whether a depth takes the next_hidden of the depth before, not the trunk's state."""

    def cache(self, batch_size: int) -> AnyCache:
        """Make an empty cache for one MTP layer."""

    def step(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: AnyCache) -> HeadStep:
        """Run an MTP layer over a block of tokens [B, T] and states [B, T, ...]; the caller commits it."""

    def refresh(self, index: int, tokens: Tensor, hidden: Tensor, *, cache: AnyCache) -> None:
        """Run an MTP layer as `step` does, but only for what that leaves in the cache."""

    def predict(self, index: int, final_hidden: Tensor) -> Prediction:
        """Return an MTP layer's prediction from its final_hidden [B, H]."""

    def prepare(self, batch_size: int, block_sizes: Sequence[int]) -> None:
        """Make what refreshes of these sizes need."""

    def chain(self, cache: AnyCache, sampling: Sampling, *, sampled: bool) -> NativeDraftChain | None:
        """Return all drafts of a round as a single call; None if Python must run between them."""

    def recursion(self, cache: AnyCache, state: Tensor) -> DecodingRecursion:
        """Continue with the last MTP layer alone, from the next_hidden [B, ...] of the depth before."""


class DecodingBackend(Protocol):
    """Trunk and head as decoding runs them."""

    @property
    def name(self) -> str:
        """`torch` or `native`."""

    @property
    def trunk(self) -> DecodingTrunk: ...

    @property
    def head(self) -> DecodingHead | None: ...
