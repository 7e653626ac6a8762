"""The MTP training loss: labels shifted inside documents, depths weighted, cross-entropy in chunks of the logits.

Knows no model, data set or optimizer: it takes one hidden tensor per depth (0 is the trunk) and the lm_head's weight.
Position i of depth k has seen the tokens up to t_{i+k} and predicts t_{i+k+1}.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.losses.chunked import IGNORE, cross_entropy, wide_dtype


@dataclass(frozen=True, eq=False)
class Targets:
    """The labels of a batch, each tensor [B, T].

    Attributes:
        tokens: Token ids, int64.
        documents: Document ids; None: a row is one document.
        mask: bool, True where a token counts as a label; None: everywhere.

    Example:
        >>> import torch
        >>> nextn.Targets(torch.tensor([[5, 6, 7]])).labels(depth=1).tolist()  # t_{i+2}, or none
        [[7, -100]]
    """

    tokens: Tensor
    documents: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in (("documents", self.documents), ("mask", self.mask)):
            if value is not None and value.shape != self.tokens.shape:
                shapes = f"{name} is {tuple(value.shape)} but tokens are {tuple(self.tokens.shape)}"
                raise ConfigError(f"{shapes}: give one each.")
        if self.mask is not None and self.mask.dtype != torch.bool:
            raise ConfigError(f"mask is {self.mask.dtype}; it must be bool, True where a token counts as a label.")

    def labels(self, depth: int) -> Tensor:
        """Return the labels [B, T-depth] int64 of one depth; IGNORE where there is none, as at the last position.

        A label is valid if tokens i to i+depth+1 belong to one document, so no document affects the loss of another.
        """
        rows, length = self.tokens.shape
        labels = self.tokens.new_full((rows, max(length - depth, 0)), IGNORE, dtype=torch.int64)
        valid = torch.ones_like(self.tokens, dtype=torch.bool) if self.mask is None else self.mask
        valid = valid[:, depth + 1 :]
        if self.documents is not None:
            # Number the runs of equal ids, so that an id that occurs again later in the sequence is another run.
            breaks = self.documents[:, 1:] != self.documents[:, :-1]
            run = torch.nn.functional.pad(breaks.cumsum(1), (1, 0))
            valid = valid & (run[:, depth + 1 :] == run[:, : valid.shape[1]])
        labels[:, :-1] = self.tokens[:, depth + 1 :].where(valid, IGNORE)
        return labels

    def counts(self, depths: int) -> Tensor:
        """Count the valid labels [depths + 1] of the trunk and each depth; they add up over ranks and micro-batches."""
        return torch.stack([(self.labels(k) != IGNORE).sum() for k in range(depths + 1)])


def depth_weights(depths: int, *, beta: float | None = None) -> tuple[float, ...]:
    """Return the weights w_1..w_depths: all 1 (DeepSeek-V3), or proportional to beta^(k-1) (FastMTP, beta 0.6).

    They add up to `depths`, so lambda keeps its meaning.
    """
    if beta is None:
        return (1.0,) * depths
    if not 0 < beta <= 1:
        raise ConfigError(f"beta {beta} is outside (0, 1]. FastMTP uses 0.6.")
    powers = [beta**k for k in range(depths)]
    return tuple(power * depths / sum(powers) for power in powers)


@dataclass(frozen=True, eq=False)
class LossReport:
    """The loss to differentiate, and its parts; sums and counts can be added over ranks and micro-batches."""

    total: Tensor  # scalar with gradient
    sums: Tensor  # [D+1] nats, detached: the negative log-likelihood of the valid labels of each depth
    counts: Tensor  # [D+1] int64: number of valid labels

    @property
    def per_depth(self) -> Tensor:
        """Mean cross-entropy [D+1] in nats of the trunk and of each depth; 0 where a depth has no label."""
        return self.sums / self.counts.clamp_min(1)


def mtp_loss(
    hiddens: Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    targets: Targets,
    *,
    lam: float,
    depth_weights: Sequence[float] | None = None,
    denominator: Literal["valid", "tokens"] | Tensor = "valid",
    chunk: int | None = None,
) -> LossReport:
    """Compute L_main + (lambda / D) sum_k w_k L_k (arXiv 2412.19437, eq. 24-25).

    Args:
        hiddens: final_hidden [B, T-k, H] of the trunk (k = 0) and each depth. Depths are scored even at lambda 0: pass
            hiddens[:1] to skip them.
        weight: The lm_head weight [V, H] of the trunk and all depths, or a sequence with one for each.
        targets: The labels of the batch.
        lam: The lambda of the MTP terms.
        depth_weights: w_k; None: all 1.
        denominator: The divisor of the summed cross-entropy of depth k: its own number of labels ("valid", as in
            Megatron), the trunk's ("tokens", the paper's 1/T, by which deeper depths weigh a little less in short
            sequences), or a tensor [D+1]. For gradient accumulation, pass the sum of Targets.counts over all
            micro-batches (averaged over ranks if gradients are averaged); then the losses add up to the batch's loss.
        chunk: Rows of logits that are in memory at a time; None: about 64 MB of them.

    Returns:
        The scalar loss, its sum for each depth, and the number of labels of each depth.

    Raises:
        ConfigError: Shapes or weights do not fit each other.

    Example:
        >>> import torch
        >>> targets, weight = nextn.Targets(torch.randint(0, 100, (2, 8))), torch.randn(100, 64)
        >>> hiddens = [torch.randn(2, 8 - k, 64) for k in range(3)]  # of the trunk and of two depths
        >>> report = nextn.mtp_loss(hiddens, weight, targets, lam=0.3)
        >>> tuple(report.total.shape), report.counts.tolist()
        ((), [14, 12, 10])
    """
    depths = len(hiddens) - 1
    weights_by_depth = (1.0,) * depths if depth_weights is None else tuple(depth_weights)
    labels = [targets.labels(k) for k in range(depths + 1)]
    weights = [weight] * (depths + 1) if isinstance(weight, Tensor) else list(weight)
    _check_shapes(hiddens, labels, weights, weights_by_depth)
    counts = torch.stack([(label != IGNORE).sum() for label in labels])
    divisors = denominators(denominator, counts, counts[:1])
    terms = [1.0, *(lam / depths * share for share in weights_by_depth)]
    wide = wide_dtype(hiddens[0], weights[0])
    scale = divisors.new_tensor(terms, dtype=wide) / divisors  # x / 0 only weights rows without label, all dropped
    total, sums = scale.new_zeros(()), scale.new_zeros(depths + 1)
    # Depths that share a weight are computed together.
    for shared in {id(tensor): tensor for tensor in weights}.values():
        group = [k for k, tensor in enumerate(weights) if tensor is shared]
        part, nll = cross_entropy(
            torch.cat([hiddens[k].flatten(0, 1) for k in group]),
            shared,
            torch.cat([labels[k].flatten() for k in group]),
            row_weights=torch.cat([scale[k].expand(labels[k].numel()) for k in group]),
            chunk=chunk,
        )
        total = total + part
        sums[group] = torch.stack([part.sum() for part in nll.split([labels[k].numel() for k in group])])
    return LossReport(total=total, sums=sums, counts=counts)


def denominators(denominator: str | Tensor, counts: Tensor, trunk: Tensor) -> Tensor:
    """Return the divisor of each depth's sum: its own count, the trunk's, or the given number, shaped as counts."""
    if isinstance(denominator, Tensor):
        if denominator.shape != counts.shape:
            message = f"denominator is {tuple(denominator.shape)}; {len(counts)} numbers are needed, one per depth."
            raise ConfigError(message)
        return denominator.to(counts.device)
    if denominator not in ("valid", "tokens"):
        raise ConfigError(f"denominator {denominator!r} is unknown. Use 'valid', 'tokens' or a tensor of counts.")
    return counts if denominator == "valid" else trunk


def _check_shapes(
    hiddens: Sequence[Tensor], labels: Sequence[Tensor], weights: Sequence[Tensor], weights_by_depth: Sequence[float]
) -> None:
    if not hiddens or len(weights) != len(hiddens):
        counts = f"{len(weights)} lm_head weights for {len(hiddens)} hiddens"
        raise ConfigError(f"{counts}; expected one tensor for all, or one for the trunk and each depth.")
    if len(weights_by_depth) != (depths := len(hiddens) - 1):
        raise ConfigError(f"{len(weights_by_depth)} depth weights for {depths} depths: give one for each depth.")
    for k, (hidden, label) in enumerate(zip(hiddens, labels, strict=True)):
        if hidden.shape[:-1] != label.shape:
            expected = f"[B, T-{k}] = {tuple(label.shape)}"
            raise ConfigError(f"hidden of depth {k} is {tuple(hidden.shape)}; {expected} is needed.")
