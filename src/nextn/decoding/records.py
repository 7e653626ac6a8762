"""The records of decoding: sequences, drafts, rounds, and events for observers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nextn.speculative.copy_drafts import CopyDrafts
from nextn.speculative.sampling import Uniforms


@dataclass(frozen=True)
class SequenceRound:
    """One sequence's share of a round.

    Attributes:
        row: Index of its prompt.
        drafts: The draft tokens.
        num_accepted: How many of them were accepted.
        emitted: The new tokens: `emitted[:num_accepted]` are the accepted drafts, then comes the bonus token; cut
            where the sequence ended.
        finish: None while the sequence continues, else `eos`, `stop`, `length` or `context`.
        copied: Whether the drafts were copied from the text so far; else the head's.
    """

    row: int
    drafts: tuple[int, ...]
    num_accepted: int
    emitted: tuple[int, ...]
    finish: str | None = None
    copied: bool = False


@dataclass(frozen=True)
class Round:
    """One round of the batch.

    Attributes:
        rows: The rounds of the sequences that took part.
        draft_s: Wall seconds of drafting, for all sequences together.
        verify_s: Wall seconds of verification, for all sequences together.
    """

    rows: tuple[SequenceRound, ...]
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Event:
    """One forward pass over a block of positions of one sequence, for `trace`."""

    phase: str  # prefill, draft or verify
    module: int | None  # index in the head; None: the trunk
    row: int  # index of the prompt
    start: int  # position of the first token
    tokens: tuple[int, ...]
    hidden: str  # the head's hidden input: `h` the trunk's true states, `g<k>` the next_hidden of depth k


Observer = Callable[[Event], None]


@dataclass(eq=False)
class BatchSequence:
    """One sequence of a batch."""

    row: int  # the label of its rounds: the index of its prompt
    tokens: list[int]  # all known; the trunk has seen all but the last
    max_tokens: int  # new tokens
    eos: tuple[int, ...]  # tokens that end it
    uniforms: Uniforms  # its own random numbers, so that they do not depend on what else is in the batch
    stop: Callable[[Sequence[int]], int | None] | None = None  # new tokens -> how many to keep, None to continue
    new: list[int] = field(default_factory=list)
    copies: CopyDrafts | None = None

    @property
    def remaining(self) -> int:
        """Number of tokens that it may still get."""
        return self.max_tokens - len(self.new)


@dataclass(frozen=True, eq=False)
class DraftResult:
    """The drafts of one round."""

    drafts: list[list[int]]  # per sequence
    confidences: list[list[float]]  # per sequence, of each distribution that the plan decided on
    distributions: Tensor | None = None  # q [B, K, V]; None in greedy decoding or without drafts
    num_steps: int = 0  # head steps that ran, including a last one from which nothing was drafted

    @classmethod
    def empty(cls, batch_size: int) -> "DraftResult":
        return cls([[] for _ in range(batch_size)], [[] for _ in range(batch_size)])

    def with_copies(self, copies: Sequence[Sequence[int]], like: Tensor | None) -> "DraftResult":
        """Return the drafts, replaced by copied tokens for sequences that have any; the q of a copied token is one-hot.

        like: [.., V], a tensor on q's device; None in greedy decoding.
        """
        drafts, own = [list(copied) or own for copied, own in zip(copies, self.drafts, strict=True)], self.distributions
        if like is None:
            return replace(self, drafts=drafts)
        q = (like if own is None else own).new_zeros(len(drafts), max(map(len, drafts)), like.shape[-1])
        if own is not None:
            q[:, : own.shape[1]] = own[:, : q.shape[1]]
        for row, copied in enumerate(copies):
            if copied:
                q[row] = 0
                q[row, torch.arange(len(copied)), list(copied)] = 1
        return replace(self, drafts=drafts, distributions=q)
