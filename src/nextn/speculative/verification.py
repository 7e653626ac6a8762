"""The acceptance rules of speculative sampling.

Pure functions over batches; every random number is passed in as a uniform in [0, 1). p is the trunk's distribution, q
the head's, as in the papers. Knows no model, cache or tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.settings import Sampling
from nextn.speculative.copy_choice import NO_COPIES, CopyChoice
from nextn.speculative.sampling import ragged, sample_at, seen_prefixes, to_probs


@dataclass(frozen=True, eq=False)
class Verification:
    """The result of verifying the drafts of each sequence."""

    num_accepted: Tensor  # [B] int64
    next_probs: Tensor  # [B, V], the distribution of the token after the accepted drafts


def accept(p: Tensor, q: Tensor, drafts: Tensor, *, u: Tensor, limit: Tensor | None = None) -> Verification:
    """Verify drafts by speculative sampling (arXiv 2211.17192, algorithm 1): emitted tokens are distributed as p.

    Args:
        p: [B, K+1, V], the trunk's probabilities.
        q: [B, K, V], the head's; draft k was sampled from q[:, k]. K may be 0.
        drafts: [B, K] int64.
        u: [B, K] in [0, 1).
        limit: [B], the number of drafts of each sequence to verify; None: all. It must not depend on the values of the
            drafts beyond it. If all drafts up to the limit are accepted, next_probs is p[row, limit].
    """
    index = drafts[..., None]
    is_accepted = u * q.gather(-1, index)[..., 0] < p[:, :-1].gather(-1, index)[..., 0]
    num_accepted = _leading(is_accepted, limit)
    return Verification(num_accepted, _next_probs(p, q, num_accepted, limit=limit))


def accept_block(p: Tensor, q: Tensor, drafts: Tensor, *, u: Tensor, limit: Tensor | None = None) -> Verification:
    """Verify drafts jointly, by block verification (arXiv 2403.10444, algorithm 2).

    The arguments are those of `accept`. Emitted tokens are distributed as p, and on average at least as many drafts are
    accepted as by `accept`: a draft with p > q compensates for an earlier one with p < q. A draft that `accept` would
    reject can be accepted together with later ones, so the two rules have different acceptance rates per position.
    """
    num_draft_tokens = drafts.shape[1]
    if not num_draft_tokens:
        return accept(p, q, drafts, u=u, limit=limit)
    weight = _prefix_weights(p, q, drafts)
    depth = torch.arange(1, num_draft_tokens + 1, device=drafts.device)
    last = torch.full_like(drafts[:, 0], num_draft_tokens) if limit is None else limit
    # The residual mass of p for another token after drafts 1..i; none is needed after the last draft.
    residual = (weight[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp_min(0).sum(-1)
    numerator = torch.where(depth == last[:, None], weight[:, 1:], F.pad(residual, (0, 1)))
    denominator = torch.where(depth == last[:, None], 1.0, F.pad(residual, (0, 1)) + 1 - weight[:, 1:])
    # The longest accepted prefix wins, even if shorter ones are rejected. At weight 1 with p = q the rule is 0 / 0.
    is_accepted = (depth <= last[:, None]) & ((u * denominator < numerator) | (weight[:, 1:] == 1))
    num_accepted = (is_accepted * depth).amax(-1)
    return Verification(num_accepted, _next_probs(p, q, num_accepted, limit=limit, scale=weight))


def _prefix_weights(p: Tensor, q: Tensor, drafts: Tensor) -> Tensor:
    """Return the probability that each prefix is accepted [B, K+1]: w_0 = 1, w_k = min(1, w_{k-1} p_k / q_k)."""
    index = drafts[..., None]
    p_draft, q_draft = p[:, :-1].gather(-1, index)[..., 0], q.gather(-1, index)[..., 0]
    weights = [torch.ones_like(p_draft[:, 0])]
    for depth in range(drafts.shape[1]):
        weights.append((weights[-1] * p_draft[:, depth] / q_draft[:, depth]).clamp_max(1))
    return torch.stack(weights, 1)


def _next_probs(
    p: Tensor, q: Tensor, num_accepted: Tensor, *, limit: Tensor | None, scale: Tensor | None = None
) -> Tensor:
    """Return the next token's distribution [B, V]: the residual max(scale * p - q, 0), or p after the last draft."""
    row, num_draft_tokens = torch.arange(len(num_accepted), device=num_accepted.device), q.shape[1]
    p_next = p[row, num_accepted]
    if not num_draft_tokens:
        return p_next
    is_rejected = num_accepted < (num_draft_tokens if limit is None else limit)
    scaled = p_next if scale is None else scale[row, num_accepted][:, None] * p_next
    residual = (scaled - q[row, num_accepted.clamp_max(num_draft_tokens - 1)]).clamp_min(0)
    total = residual.sum(-1, keepdim=True)
    # total is 0 where p and q differ by rounding only
    return torch.where(is_rejected[:, None] & (total > 0), residual / total, p_next)


class Verifier:
    """Verifies the drafts of a round by the trunk's logits."""

    def __init__(self, sampling: Sampling, *, block_verification: bool) -> None:
        """Create a verifier. block_verification: Verify a sequence's drafts jointly, see `accept_block`."""
        self.sampling, self.block_verification = sampling, block_verification

    def __call__(
        self,
        logits: Tensor,
        q: Tensor | None,
        drafts: Sequence[Sequence[int]],
        u: Sequence[Sequence[float]],
        *,
        seen: Tensor | None = None,
    ) -> list[tuple[int, int]]:
        """Verify drafts of different lengths; return (number of accepted drafts, next token) per sequence.

        Args:
            logits: [B, K+1, V], the trunk's.
            q: [B, K, V]; None if no sequence has drafts.
            drafts: Up to K per sequence.
            u: Uniforms per sequence, one more than drafts.
            seen: [B, V] bool, the tokens that a repetition penalty applies to.
        """
        tokens, limits = ragged(drafts, torch.int64, logits.device), list(map(len, drafts))
        uniforms, limit = ragged(u, torch.float32, logits.device), torch.tensor(limits, device=logits.device)
        result = self.decide(logits, logits[:, :0] if q is None else q, tokens, uniforms, limit, seen=seen)
        return [(num_accepted, next_token) for num_accepted, next_token in result.tolist()]

    def decide(
        self, logits: Tensor, q: Tensor, drafts: Tensor, u: Tensor, limit: Tensor, *, seen: Tensor | None = None
    ) -> Tensor:
        """Verify drafts [B, K] with uniforms u [B, K+1]; return [B, 2] int64: num_accepted and next token."""
        p = to_probs(logits, self.sampling, None if seen is None else seen_prefixes(seen, drafts))
        rule = accept_block if self.block_verification else accept
        verification = rule(p, q, drafts, u=u[:, : drafts.shape[1]], limit=limit)
        return torch.stack(
            [verification.num_accepted, sample_at(verification.next_probs, u.gather(1, limit[:, None])[:, 0])], dim=1
        )


def accept_greedy(best: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """Verify one sequence at temperature 0 by the trunk's argmax best [K+1]; return (num_accepted, next token)."""
    num_accepted = 0
    while num_accepted < len(drafts) and best[num_accepted] == drafts[num_accepted]:
        num_accepted += 1
    return num_accepted, best[num_accepted]


def _leading(is_accepted: Tensor, limit: Tensor | None) -> Tensor:
    """Count the accepted drafts before the first rejected one: bool [B, K] -> int64 [B]."""
    if limit is not None:
        is_accepted = is_accepted & (torch.arange(is_accepted.shape[1], device=is_accepted.device) < limit[:, None])
    return is_accepted.long().cumprod(-1).sum(-1)


@dataclass(frozen=True)
class VerifiedRound:
    """A drafted and verified round of a batch. Times are wall seconds, for all sequences together."""

    drafts: list[list[int]]
    confidences: list[list[float]]  # for `DraftLength.learn`
    verification: Sequence[tuple[int, int]]  # (num_accepted, next token) per sequence
    draft_s: float
    verify_s: float
    choice: CopyChoice = NO_COPIES
