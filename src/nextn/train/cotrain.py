"""Targets, loss and figures of a head that is trained alongside a fine-tune (cotraining).

This module knows no Trainer: it is given a batch, the trunk's states of it, and the label counts of the whole step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextn.errors import ConfigError, require, require_at_least
from nextn.losses.chunked import IGNORE, cross_entropy
from nextn.losses.distillation import OBJECTIVES, head_loss
from nextn.losses.divergences import Teacher
from nextn.losses.mtp_loss import Targets, depth_weights
from nextn.model.head import Head
from nextn.model.lm_head_columns import lm_head_inputs, lm_head_weights
from nextn.model.model import Model
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.stats.acceptance import conditional_rates, expected_length
from nextn.train.cpu_attention import CPU_ATTENTION
from nextn.train.evaluation import survival
from nextn.train.packed_rows import document_indices

_UNSUPPORTED = ("pixel_values", "inputs_embeds", "input_features", "shift_labels")  # inputs that are more than text


@dataclass(frozen=True)
class HeadSettings:
    """How a head is cotrained with a fine-tune.

    Attributes:
        joint: The head's gradient, times `lam`, also reaches the trunk (arXiv 2412.19437, eq. 24-25); otherwise the
            trunk trains as it would without a head, and `lam` is not used.
        depths: K of the loss.
        lam: Weight of the head's loss.
        beta: Depth weights are proportional to beta^(k-1); None = equal.
        objective: `ce` on the text's tokens, or another of `OBJECTIVES`, on the trunk's output distribution.
        unrolled: Depths attend to the keys that decoding gives them (`Head.rollout_hidden`).
        lr: Of the head, on the Trainer's schedule; None = the Trainer's.
        num_modules: Of a fresh head, initialized from the trunk; 0 = load the head.

    Example:
        >>> nextn.HeadSettings(joint=True, depths=3, lam=0.3).objective
        'ce'
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
        require_at_least(self, depths=1, num_modules=0)
        require(
            self,
            lam=(0 < self.lam < math.inf, "a number > 0"),
            lr=(self.lr is None or 0 < self.lr < 1, "0 < lr < 1, or None for the Trainer's"),
            objective=(self.objective in OBJECTIVES, f"one of {', '.join(OBJECTIVES)}"),
        )
        depth_weights(self.depths, beta=self.beta)


class DetachedTrunk(Trunk):
    """A trunk that no gradient of the head reaches: the head uses embed_tokens and lm_head detached.

    Example:
        >>> model = nextn.load("tiny").trunk.model  # a transformers model
        >>> head = nextn.load_head("tiny", model, trunk_class=nextn.DetachedTrunk)
        >>> head.trunk.lm_head.requires_grad
        False
    """

    def embed(self, tokens: Tensor, *, raw: bool = False) -> Tensor:
        return super().embed(tokens, raw=raw).detach()

    @property
    def lm_head(self) -> Tensor:
        return super().lm_head.detach()

    @property
    def lm_head_bias(self) -> Tensor | None:
        bias = super().lm_head_bias
        return None if bias is None else bias.detach()


class CotrainLoss:
    """Compute the loss of a head on the trunk's states; depths that a batch is too short for are skipped.

    Args:
        head: The head, on a trunk whose hidden states are given to `states`.
        settings: Depths, objective and weights.
        autocast: Returns the context in which states and losses are computed.

    Raises:
        ConfigError: The head's trunk or the settings cannot be trained with.

    Example:
        >>> import torch
        >>> model = nextn.load("tiny", dtype=torch.float32)
        >>> cotrain = nextn.CotrainLoss(model.head, nextn.HeadSettings(depths=2))
        >>> tokens = torch.randint(0, 256, (2, 8))
        >>> targets = nextn.targets_of({"input_ids": tokens, "labels": tokens})
        >>> states = cotrain.states(tokens, targets, model.trunk(tokens))
        >>> loss, sums = cotrain.loss(states, targets, cotrain.counts(targets))
        >>> loss.backward()
        >>> [tuple(state.shape) for state in states], tuple(sums.shape)
        ([(2, 8, 128), (2, 7, 128), (2, 6, 128)], (2,))
    """

    def __init__(
        self, head: Head, settings: HeadSettings, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.head, self.settings, self.autocast = head, settings, autocast
        head.trunk.check_losses()
        self.model = Model(head.trunk, head, head.family)
        self.weights = depth_weights(settings.depths, beta=settings.beta)
        if settings.unrolled and not head.can_rollout:
            raise ConfigError(f"{head.family.name}: its head cannot be unrolled; leave `unrolled` out")

    def counts(self, targets: Targets) -> Tensor:
        """Return the labels of each depth, [K] int64; summed over micro-batches and ranks, the `loss` denominator."""
        return targets.counts(self.settings.depths)[1:]

    def states(self, tokens: Tensor, targets: Targets, hidden: TrunkOutput) -> list[Tensor]:
        """Return the final hidden states of the trunk and of each depth, [B, T-k, H]; detached unless joint."""
        depths = min(self.settings.depths, tokens.shape[1] - 1)
        if hidden.final_hidden.shape[:2] != tokens.shape:
            raise ConfigError(
                f"the trunk's states are {tuple(hidden.final_hidden.shape[:2])} for tokens {tuple(tokens.shape)}: a "
                "head cannot be trained with virtual tokens (prompt or prefix tuning); use LoRA"
            )
        if not depths:
            return [hidden.final_hidden]
        head_input = hidden.head_input if self.settings.joint else hidden.head_input.detach()
        run = self.head.rollout_hidden if self.settings.unrolled else self.head.teacher_forced_hidden
        known = self.head.trained_length or 0
        # In training; a batch of shorter rows is not looked at, as a GPU would be waited for.
        if torch.is_grad_enabled() and targets.documents is not None and targets.documents.shape[1] > known:
            self.head.trained_length = max(longest_document(targets.documents), known) or None
        with self.autocast(), self._isolated_rng():
            return [hidden.final_hidden, *run(tokens, head_input, depths, documents=self._documents(targets))]

    def loss(self, states: Sequence[Tensor], targets: Targets, denominator: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over k of w_k / K * (depth k's summed objective) / denominator[k], and the sums [K], detached.

        denominator [K]: labels of the whole step. The loss is multiplied by lam if joint.
        """
        settings, depths = self.settings, len(states) - 1
        sums = denominator.new_zeros(settings.depths, dtype=torch.float32)
        if not depths:
            return sums.sum(), sums
        scale = (settings.lam if settings.joint else 1.0) / settings.depths
        shares, denominator = self.weights[:depths], denominator[:depths].clamp_min(1)
        trunk, *weights = lm_head_weights(self.head.trunk, self.head, depths)
        states = lm_head_inputs(self.head.trunk, self.head, states)
        with self.autocast():
            if settings.objective == "ce":
                depth_scales = denominator.new_tensor(shares, dtype=torch.float32) * scale / denominator
                total, sums[:depths] = _cross_entropy_sum(states[1:], weights, targets, depth_scales)
            else:
                report = head_loss(
                    states[1:], weights, Teacher(states[0], trunk), targets, objective=settings.objective,
                    depth_weights=shares, denominator=denominator, scale=scale * depths,
                )  # fmt: skip
                total, sums[:depths] = report.total, report.sums
        return total, sums

    @torch.no_grad()
    def survival(self, states: Sequence[Tensor], targets: Targets) -> Tensor:
        """Return [2, K+1] positions whose depths 1..k would all be accepted, by argmax and by 1 - TV."""
        survived = torch.zeros(2, self.settings.depths + 1, dtype=torch.float64)
        depths = len(states) - 1
        survived[:, : depths + 1] = survival(self.model, states, targets.labels(depths) >= 0)
        return survived

    def _documents(self, targets: Targets) -> Tensor | None:
        assert targets.documents is not None
        if not must_mask(targets.documents):
            return None
        kinds = [kind for index in range(self.head.num_modules) for kind in self.head.layer_types(index)]
        mixing = next((kind.name for kind in kinds if not kind.can_pack), None)
        attention = self.head.trunk.config._attn_implementation
        if mixing is None and attention in ("sdpa", "eager", CPU_ATTENTION):
            return targets.documents
        reason = f"with attn_implementation={attention!r}" if mixing is None else f"for a head with {mixing} layers"
        raise ConfigError(
            f"rows with several documents, or padded on the left, are not supported {reason}: "
            "use one document per row, padded on the right"
            + (", or attn_implementation='sdpa'" if mixing is None else "")
        )

    def _isolated_rng(self) -> AbstractContextManager[object]:
        """Unless joint, restore the random state after the head, so that the trunk's dropout is as without it."""
        if self.settings.joint:
            return nullcontext()
        device = self.head.trunk.device
        return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _cross_entropy_sum(
    states: Sequence[Tensor], weights: Sequence[Tensor], targets: Targets, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy on the text's tokens, without the trunk's distribution, which `head_loss` needs for its figures."""
    totals, sums = [], []
    for k, (state, weight) in enumerate(zip(states, weights, strict=True)):
        total, nll = cross_entropy(state.flatten(0, 1), weight, targets.labels(k + 1).flatten())
        totals.append(total * scale[k])
        sums.append(nll.sum())
    return torch.stack(totals).sum(), torch.stack(sums)


@dataclass
class RunningFigures:
    """Sums over batches of objective and labels [K], and of `CotrainLoss.survival` [2, K+1]; they add over ranks."""

    depths: int
    device: torch.device
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # which MPS does not have
        self.sums = torch.zeros(4, self.depths + 1, dtype=dtype, device=self.device)

    def add(self, sums: Tensor, counts: Tensor, survived: Tensor | None = None) -> None:
        """Add the sums of a batch, and its survival if it was measured."""
        self.sums[0, 1:] += sums
        self.sums[1, 1:] += counts
        if survived is not None:
            self.sums[2:] += survived.to(self.sums)

    def figures(self) -> dict[str, float]:
        """Return the mean objective of each depth with labels; match, overlap and their AL if they were measured."""
        sums, counts, *survived = self.sums.tolist()
        figures = {f"loss_{k}": sums[k] / counts[k] for k in range(1, self.depths + 1) if counts[k]}
        for name, length, alive in zip(("match", "overlap"), ("greedy_AL", "sampled_AL"), survived, strict=True):
            if alive[0]:
                rates = conditional_rates(alive[1:], alive[:-1])
                figures |= {f"{name}_{k}": rate for k, rate in enumerate(rates, start=1) if not math.isnan(rate)}
                figures[length] = expected_length(rates)
        return figures


def model_inputs(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the model's inputs and labels of a batch: of TRL's GRPO, prompts and completions joined, as it joins them.

    Labels are what the policy sampled: not the prompt, nor the results of tools in a completion.
    """
    if "completion_ids" not in batch:
        return batch
    prompt, completion, mask = batch["prompt_ids"], batch["completion_ids"], batch["completion_mask"]
    sampled = (mask * batch.get("tool_mask", 1)).bool()
    return {
        **batch,
        "input_ids": torch.cat([prompt, completion], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], mask], dim=1),
        "labels": torch.cat([torch.full_like(prompt, IGNORE), completion.where(sampled, IGNORE)], dim=1),
    }


def targets_of(inputs: Mapping[str, object]) -> Targets:
    """Convert a batch of a transformers Trainer to targets.

    Args:
        inputs: `input_ids` and `labels` [B, T] int64; where rows hold several documents, also what marks them:
            `position_ids` that restart, a numbered `attention_mask`, `cu_seq_lens_q` or `seq_idx`.

    Returns:
        The trunk's labels: none where they are -100, nor on padding. Documents [B, T] are those of packed rows, -1 on
        padding.

    Raises:
        ConfigError: The batch has more than text, no labels, or a marking of packed rows that is not known.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, 6, 7, 8]])}
        >>> nextn.targets_of(batch).counts(depths=1).tolist()  # of the trunk and of depth 1
        [3, 2]
    """
    tokens, labels = inputs.get("input_ids"), inputs.get("labels")
    unsupported = next((name for name in _UNSUPPORTED if inputs.get(name) is not None), None)
    if unsupported is not None or not isinstance(tokens, Tensor) or not isinstance(labels, Tensor):
        names = unsupported or ", ".join(sorted(inputs))
        raise ConfigError(f"a head is trained on batches of text with input_ids and labels; this one has {names}")
    if tokens.is_nested or tokens.ndim != 2 or labels.shape != tokens.shape:
        shapes = ["nested" if each.is_nested else tuple(each.shape) for each in (tokens, labels)]
        raise ConfigError(f"input_ids and labels are {shapes[0]} and {shapes[1]}; expected [rows, tokens], both alike")
    if _are_shifted(tokens, labels):
        message = "labels are shifted: each is the next of input_ids; give labels at their own token's position"
        raise ConfigError(message)
    documents = document_indices(inputs, tokens)
    mask = (labels != IGNORE) & (documents >= 0)
    return Targets(labels.where(mask, tokens), documents, mask)


def _are_shifted(tokens: Tensor, labels: Tensor) -> bool:
    """Return whether all labels are those of the next position, and not those of their own."""
    has_label = labels != IGNORE
    is_next = (labels[:, :-1] == tokens[:, 1:]) | ~has_label[:, :-1]
    return bool(is_next.all() & (has_label & (labels != tokens)).any() & has_label[:, :-1].any())


def longest_document(documents: Tensor) -> int:
    """Return the tokens of the longest of the documents [B, T], padding (-1) not counted."""
    rows = torch.arange(len(documents), device=documents.device)[:, None] * documents.numel()
    return max((documents + rows)[documents >= 0].unique(return_counts=True)[1].tolist(), default=0)


def must_mask(documents: Tensor) -> bool:
    """Return whether causal attention would mix documents [B, T]; not if each row is one document, padded right."""
    right_padding = (documents < 0).flip(1).cumprod(1).flip(1).bool()
    return not bool(((documents == documents[:, :1]) & (documents >= 0) | right_padding).all())
