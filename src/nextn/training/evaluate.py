"""What a head is worth on held-out text: loss per depth and the acceptance the decoder will see."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nextn.corpus.batches import Batch
from nextn.corpus.loops import Degeneracy, degeneracy
from nextn.decode import Settings, rounds
from nextn.figures.acceptance import Acceptance
from nextn.figures.speedup import expected_length
from nextn.head import outputs
from nextn.losses.loss import Targets, cross_entropy
from nextn.model import Model
from nextn.sampling import overlap

DEFINITION = (
    "teacher-forced on held-out text: depth k eats the text's tokens and is compared with the trunk's law there. "
    "match: argmax equals the trunk's argmax, given that it did at every shallower depth. overlap: sum min(p, q) "
    "= 1 - TV, likewise conditional. AL = 1 + sum over k of the product of the first k"
)


@dataclass(frozen=True)
class Forced:
    """loss [D+1]: mean cross-entropy in nats, the trunk's first. match, overlap: a_1..a_D by `DEFINITION`."""

    loss: tuple[float, ...]
    match: tuple[float, ...]
    overlap: tuple[float, ...]
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
class Decoded:
    """The decoder's own figures on held-out prompts. looping: share of the texts that the degeneracy check flags."""

    acceptance: Acceptance
    looping: float
    checks: tuple[Degeneracy, ...] = field(repr=False)


@torch.no_grad()
def forced(
    model: Model,
    batches: Iterable[Batch],
    depths: int,
    *,
    dtype: torch.dtype = torch.float32,
    total: Callable[[Tensor], Tensor] = lambda values: values,
) -> Forced:
    """Teacher-forced figures over batches, `depths` deep; dtype: autocast to it, fp32 = none.

    total: adds values up over processes, each of which has rows of its own.
    """
    assert model.head is not None or not depths
    sums, counts = torch.zeros(depths + 1, dtype=torch.float64), torch.zeros(depths + 1, dtype=torch.float64)
    reached = torch.zeros(2, depths + 1, dtype=torch.float64)
    for batch in batches:
        tokens, documents = batch.tokens.to(model.trunk.device), batch.documents.to(model.trunk.device)
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            hidden = model.trunk(tokens, documents=documents)
            states = [hidden.normed]
            if model.head is not None and depths:
                states += model.head.hiddens(tokens, hidden.eaten, depths, documents=documents)
        targets = Targets(tokens, documents, batch.counted.to(tokens.device))
        weights = outputs(model.trunk, model.head, depths)
        for depth, state in enumerate(states):
            labels = targets.labels(depth).flatten()
            _, nll = cross_entropy(state.flatten(0, 1), weights[depth], labels)
            sums[depth] += nll.sum().item()
            counts[depth] += (labels >= 0).sum().item()
        reached += survival(model, states, targets.labels(depths) >= 0)
    sums, counts, reached = total(torch.cat([sums[None], counts[None], reached])).split([1, 1, 2])
    rates = (reached[:, 1:] / reached[:, :-1].clamp_min(1e-9)).tolist()
    return Forced(tuple((sums / counts.clamp_min(1))[0].tolist()), tuple(rates[0]), tuple(rates[1]))


def decoded(model: Model, prompts: Sequence[Sequence[int]], settings: Settings) -> Decoded:
    """Decode the prompts as one batch and count what was kept."""
    texts: list[list[int]] = [[] for _ in prompts]
    log = []
    for each in rounds(model.trunk, model.head, prompts, settings):
        log.append(each)
        for part in each.rows:
            texts[part.row] += part.emitted
    checks = tuple(degeneracy(text) for text in texts)
    return Decoded(Acceptance.of(log), sum(check.looping for check in checks) / len(checks), checks)


def survival(model: Model, states: Sequence[Tensor], valid: Tensor) -> Tensor:
    """-> [2, D+1]: expected columns whose depths 1..k are all kept, by argmax and by 1 - TV; k = 0 counts all."""
    depths, columns = len(states) - 1, valid.shape[1]
    weights = outputs(model.trunk, model.head, depths)
    survived = torch.zeros(2, depths + 1, dtype=torch.float64)
    for row in range(len(valid)):  # one row of [columns, V] laws at a time bounds the memory
        alive = valid[row].cpu().double().expand(2, -1).clone()  # on the host: MPS has no float64
        survived[:, 0] += alive.sum(-1)
        trunk = model.trunk.logits(states[0][row].to(model.trunk.output.weight.dtype)).float()
        for depth in range(1, depths + 1):
            p = trunk[depth : depth + columns]
            q = (states[depth][row, :columns].to(weights[depth].dtype) @ weights[depth].T).float()
            match = p.argmax(-1) == q.argmax(-1)
            alive *= torch.stack([match, overlap(p.softmax(-1), q.softmax(-1))]).cpu().double()
            survived[:, depth] += alive.sum(-1)
    return survived
