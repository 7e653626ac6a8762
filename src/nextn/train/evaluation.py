"""Evaluate a model on held-out text: teacher-forced loss and acceptance per depth, and acceptance when decoding."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextn.data.batches import Batch
from nextn.data.degeneracy import Degeneracy, degeneracy
from nextn.decoding.rounds import rounds
from nextn.losses.mtp_loss import Targets, cross_entropy
from nextn.model.head import lm_head_weights
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.speculative.sampling import overlap
from nextn.stats.acceptance import Acceptance
from nextn.stats.speedup import expected_length

DEFINITION = (
    "teacher-forced on held-out text: depth k takes the text's tokens and is compared with the trunk's distribution. "
    "match: argmax equals the trunk's argmax, given that it did at every shallower depth. overlap: sum min(p, q) "
    "= 1 - TV, likewise conditional. AL = 1 + sum over k of the product of the first k"
)


@dataclass(frozen=True)
class TeacherForcedFigures:
    """Teacher-forced figures of D depths, as in `DEFINITION`."""

    loss: tuple[float, ...]  # [D+1] mean cross-entropy in nats, the trunk's first
    match: tuple[float, ...]  # a_1..a_D
    overlap: tuple[float, ...]  # a_1..a_D
    definition: str = field(default=DEFINITION, repr=False)

    @property
    def greedy_length(self) -> float:
        """AL at K = D under greedy decoding."""
        return expected_length(self.match)

    @property
    def sampled_length(self) -> float:
        """AL at K = D under sampling at temperature 1."""
        return expected_length(self.overlap)


@dataclass(frozen=True)
class DecodedFigures:
    """Figures of decoding held-out prompts."""

    acceptance: Acceptance
    repetitive: float  # share of texts that are degenerate
    checks: tuple[Degeneracy, ...] = field(repr=False)


@torch.no_grad()
def teacher_forced_figures(
    model: Model,
    batches: Iterable[Batch],
    depths: int,
    *,
    dtype: torch.dtype = torch.float32,
    total: Callable[[Tensor], Tensor] = lambda values: values,
) -> TeacherForcedFigures:
    """Compute teacher-forced figures over batches, `depths` deep.

    dtype: autocast dtype, float32 = no autocast. total: sums values over processes, each of which has its own rows.
    """
    assert model.head is not None or not depths
    sums, counts = torch.zeros(depths + 1, dtype=torch.float64), torch.zeros(depths + 1, dtype=torch.float64)
    survived = torch.zeros(2, depths + 1, dtype=torch.float64)
    for batch in batches:
        tokens, documents = batch.tokens.to(model.trunk.device), batch.documents.to(model.trunk.device)
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            hidden = model.trunk(tokens, documents=documents)
            states = [hidden.final_hidden]
            if model.head is not None and depths:
                states += model.head.teacher_forced_hidden(tokens, hidden.head_input, depths, documents=documents)
        targets = Targets(tokens, documents, batch.label_mask.to(tokens.device))
        weights = lm_head_weights(model.trunk, model.head, depths)
        for depth, state in enumerate(states):
            labels = targets.labels(depth).flatten()
            _, nll = cross_entropy(state.flatten(0, 1), weights[depth], labels)
            sums[depth] += nll.sum().item()
            counts[depth] += (labels >= 0).sum().item()
        survived += survival(model, states, targets.labels(depths) >= 0)
    sums, counts, survived = total(torch.cat([sums[None], counts[None], survived])).split([1, 1, 2])
    rates = (survived[:, 1:] / survived[:, :-1].clamp_min(1e-9)).tolist()
    return TeacherForcedFigures(tuple((sums / counts.clamp_min(1))[0].tolist()), tuple(rates[0]), tuple(rates[1]))


def decoded_figures(model: Model, prompts: Sequence[Sequence[int]], settings: Settings) -> DecodedFigures:
    """Decode the prompts as one batch and measure acceptance."""
    texts: list[list[int]] = [[] for _ in prompts]
    log = []
    for step in rounds(model.trunk, model.head, prompts, settings):
        log.append(step)
        for part in step.rows:
            texts[part.row] += part.emitted
    checks = tuple(degeneracy(text) for text in texts)
    return DecodedFigures(Acceptance.of(log), sum(check.is_degenerate for check in checks) / len(checks), checks)


def survival(model: Model, states: Sequence[Tensor], valid: Tensor) -> Tensor:
    """Return [2, D+1]: expected positions whose depths 1..k are all accepted, by argmax and by 1 - TV; k = 0 is all."""
    depths, num_positions = len(states) - 1, valid.shape[1]
    weights = lm_head_weights(model.trunk, model.head, depths)
    survived = torch.zeros(2, depths + 1, dtype=torch.float64)
    for row in range(len(valid)):  # the logits [positions, V] of one sequence at a time, to bound memory
        alive = valid[row].cpu().double().expand(2, -1).clone()  # on the host: MPS has no float64
        survived[:, 0] += alive.sum(-1)
        trunk_logits = model.trunk.logits(states[0][row].to(model.trunk.output.weight.dtype)).float()
        for depth in range(1, depths + 1):
            p = trunk_logits[depth : depth + num_positions]
            q = (states[depth][row, :num_positions].to(weights[depth].dtype) @ weights[depth].T).float()
            match = p.argmax(-1) == q.argmax(-1)
            alive *= torch.stack([match, overlap(p.softmax(-1), q.softmax(-1))]).cpu().double()
            survived[:, depth] += alive.sum(-1)
    return survived
