"""The loss and the figures of a head beside a fine-tune: depths alone, over the labels that a whole step has.

It knows no Trainer: it is given the trunk's states of one batch.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextn.errors import ConfigError
from nextn.figures.speedup import expected_length
from nextn.finetune.tuned import must_mask
from nextn.head import Head, outputs
from nextn.losses.loss import Targets, cross_entropy, depth_weights
from nextn.losses.objectives import OBJECTIVES, Teacher, head_loss
from nextn.model import Model
from nextn.training.evaluate import survival
from nextn.trunk import Hidden, Trunk


@dataclass(frozen=True)
class HeadSettings:
    """How a head trains beside a fine-tune.

    joint: the head's gradient reaches the trunk, too, times `lam` (arXiv 2412.19437, eq. 24-25); else the trunk trains
    as without a head, and `lam` means nothing. depths: K of the loss. beta: depth weights proportional to beta^(k-1);
    None = equal. objective: `ce` on the text's tokens, or another of `objectives`, on the trunk's law. unrolled: depths
    attend to what decoding lets them see (`Head.unrolled`). lr: of the head, on the Trainer's schedule; None = the
    Trainer's. num_modules: of a fresh head, made of the trunk's parts; 0 = the head is loaded.
    """

    joint: bool = False
    depths: int = 4
    lam: float = 0.3
    beta: float | None = None
    objective: str = "ce"
    unrolled: bool = False
    lr: float | None = None
    num_modules: int = 0

    def __post_init__(self) -> None:
        if self.depths < 1 or self.num_modules < 0:
            raise ConfigError(f"{self.depths=}, {self.num_modules=}; expected depths >= 1 and num_modules >= 0")
        if not (math.isfinite(self.lam) and self.lam > 0) or not (self.lr is None or 0 < self.lr < 1):
            raise ConfigError(f"{self.lam=}, {self.lr=}; expected lam > 0 and 0 < lr < 1")
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective {self.objective!r} is unknown. Use one of {', '.join(OBJECTIVES)}.")
        depth_weights(self.depths, beta=self.beta)


class SeveredTrunk(Trunk):
    """A trunk that no gradient of the head reaches: embedding and output head are read, not trained."""

    def embed(self, tokens: Tensor, *, raw: bool = False) -> Tensor:
        return super().embed(tokens, raw=raw).detach()

    @property
    def readout(self) -> Tensor:
        return super().readout.detach()


class Beside:
    """A head and how it trains. Depths that a batch is too short for are left out.

    autocast: makes the context that states and losses are computed in.
    """

    def __init__(
        self, head: Head, settings: HeadSettings, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.head, self.settings, self.autocast = head, settings, autocast
        self.model = Model(head.trunk, head, head.family)
        self.weights = depth_weights(settings.depths, beta=settings.beta)
        if settings.unrolled and not head.can_unroll:
            raise ConfigError(f"{head.family.name}: its head cannot be unrolled; leave `unrolled` out")

    def counts(self, targets: Targets) -> Tensor:
        """Labels [K] int64 of each depth; summed over micro-batches and ranks they are what `loss` is over."""
        return targets.counts(self.settings.depths)[1:]

    def states(self, tokens: Tensor, targets: Targets, hidden: Hidden) -> list[Tensor]:
        """The trunk's normed states and those of each depth [B, T-k, H]; detached from the trunk unless joint."""
        depths = min(self.settings.depths, tokens.shape[1] - 1)
        if hidden.normed.shape[:2] != tokens.shape:
            raise ConfigError(
                f"the trunk's states are {tuple(hidden.normed.shape[:2])} for tokens {tuple(tokens.shape)}: a head "
                "cannot train beside virtual tokens (prompt or prefix tuning); use LoRA"
            )
        if not depths:
            return [hidden.normed]
        eaten = hidden.eaten if self.settings.joint else hidden.eaten.detach()
        run = self.head.unrolled if self.settings.unrolled else self.head.hiddens
        with self.autocast(), self._own_chance():
            return [hidden.normed, *run(tokens, eaten, depths, documents=self._documents(targets))]

    def loss(self, states: Sequence[Tensor], targets: Targets, over: Tensor) -> tuple[Tensor, Tensor]:
        """-> the sum over k of w_k / K * (depth k's summed objective) / over[k], and these sums [K], detached.

        over [K]: labels that the whole step has. Times lam if joint.
        """
        settings, depths = self.settings, len(states) - 1
        sums = over.new_zeros(settings.depths, dtype=torch.float32)
        if not depths:
            return sums.sum(), sums
        scale = (settings.lam if settings.joint else 1.0) / settings.depths
        shares, over = self.weights[:depths], over[:depths].clamp_min(1)
        trunk, *weights = outputs(self.head.trunk, self.head, depths)
        with self.autocast():
            if settings.objective == "ce":
                total, sums[:depths] = _hard(
                    states[1:], weights, targets, over.new_tensor(shares, dtype=torch.float32) * scale / over
                )
            else:
                told = head_loss(
                    states[1:], weights, Teacher(states[0], trunk), targets, objective=settings.objective,
                    depth_weights=shares, denominator=over, scale=scale * depths,
                )  # fmt: skip
                total, sums[:depths] = told.total, told.sums
        return total, sums

    @torch.no_grad()
    def reached(self, states: Sequence[Tensor], targets: Targets) -> Tensor:
        """-> [2, K+1]: columns whose depths 1..k would all be kept, by argmax and by 1 - TV (`evaluate.DEFINITION`)."""
        found = torch.zeros(2, self.settings.depths + 1, dtype=torch.float64)
        depths = len(states) - 1
        found[:, : depths + 1] = survival(self.model, states, targets.labels(depths) >= 0)
        return found

    def _documents(self, targets: Targets) -> Tensor | None:
        assert targets.documents is not None
        if not must_mask(targets.documents):
            return None
        kinds = [kind for index in range(self.head.num_modules) for kind in self.head.kinds(index)]
        mixing = next((kind.name for kind in kinds if not kind.can_pack), None)
        attention = self.head.trunk.config._attn_implementation
        if mixing is None and attention in ("sdpa", "eager"):
            return targets.documents
        reason = f"with attn_implementation={attention!r}" if mixing is None else f"for a head with {mixing} layers"
        raise ConfigError(
            f"rows with several documents, or padded on the left, are not supported {reason}: "
            "use one document a row, padded on the right"
            + (", or attn_implementation='sdpa'" if mixing is None else "")
        )

    def _own_chance(self) -> AbstractContextManager[object]:
        """Detached, the head leaves the random state as it found it, so that the trunk's dropout is as without it."""
        if self.settings.joint:
            return nullcontext()
        device = self.head.trunk.device
        return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _hard(
    states: Sequence[Tensor], weights: Sequence[Tensor], targets: Targets, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The text's own tokens as targets: no law of the trunk is made, as `head_loss` would for its figures."""
    totals, sums = [], []
    for k, (state, weight) in enumerate(zip(states, weights, strict=True)):
        total, nll = cross_entropy(state.flatten(0, 1), weight, targets.labels(k + 1).flatten())
        totals.append(total * scale[k])
        sums.append(nll.sum())
    return torch.stack(totals).sum(), torch.stack(sums)


@dataclass
class Tally:
    """Sums over batches: the objective and labels [K], and `Beside.reached` [2, K+1]; they add over ranks."""

    depths: int
    device: torch.device
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # which MPS does not have
        self.sums = torch.zeros(4, self.depths + 1, dtype=dtype, device=self.device)

    def add(self, sums: Tensor, counts: Tensor, reached: Tensor | None = None) -> None:
        self.sums[0, 1:] += sums
        self.sums[1, 1:] += counts
        if reached is not None:
            self.sums[2:] += reached.to(self.sums)

    def figures(self) -> dict[str, float]:
        """Mean objective of each depth with labels; match, overlap and their AL where they were measured."""
        sums, counts, *reached = self.sums.tolist()
        out = {f"loss_{k}": sums[k] / counts[k] for k in range(1, self.depths + 1) if counts[k]}
        for name, length, alive in zip(("match", "overlap"), ("greedy_AL", "sampled_AL"), reached, strict=True):
            if alive[0]:
                rates = [alive[k + 1] / alive[k] if alive[k] else math.nan for k in range(self.depths)]
                out |= {f"{name}_{k}": rate for k, rate in enumerate(rates, start=1) if not math.isnan(rate)}
                out[length] = expected_length(rates)
        return out
