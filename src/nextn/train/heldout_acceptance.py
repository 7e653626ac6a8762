"""Held-out acceptance of a head, as decoding the text in speculative rounds would have it, and the best head so far.

No token is generated: trunk and head run teacher-forced over whole texts, and the rounds are simulated afterwards.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nextn.data.batches import Batch
from nextn.evaluate.teacher_forced import round_start_probs
from nextn.losses.mtp_loss import Targets
from nextn.model.head import Head, lm_head_weights
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.speculative.sampling import overlap
from nextn.train.ranks import ALONE, Ranks

DEFINITION = (
    "what decoding the text in rounds of K drafts would accept: a_k = expected depth-k drafts accepted / drafted, AL = "
    "tokens per round, each round starting where the previous one ended. greedy: a draft is accepted where the head's "
    "argmax is the trunk's. sampled: with probability 1 - TV at the temperature, or min(1, q/p) of the text's token "
    "where the text was sampled from the trunk; drafts are verified one by one, block verification accepts slightly "
    "more. kv: `decode` = deeper drafts attend to the keys that decoding gives them; "
    "`own` = each depth to its own, for heads without a key-value rollout"
)


@dataclass(frozen=True)
class PositionCounts:
    """Expected counts over the rounds of a text, under one acceptance rule."""

    num_drafted: tuple[float, ...]  # [K]
    num_accepted: tuple[float, ...]  # [K]
    emitted: tuple[float, ...] = field(repr=False)  # tokens, of each sequence
    rounds: tuple[float, ...] = field(repr=False)  # of each sequence

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K, conditional; 0 for a depth that is never drafted."""
        return tuple(
            accepted / drafted if drafted else 0.0
            for accepted, drafted in zip(self.num_accepted, self.num_drafted, strict=True)
        )

    @property
    def length(self) -> float:
        """Mean acceptance length (AL) at K."""
        return sum(self.emitted) / max(sum(self.rounds), 1e-9)

    @property
    def deviations(self) -> list[float]:
        """The influence of each sequence on AL, times the number of sequences: their mean is 0."""
        mean = max(sum(self.rounds) / max(len(self.rounds), 1), 1e-9)
        return [
            (emitted - self.length * rounds) / mean for emitted, rounds in zip(self.emitted, self.rounds, strict=True)
        ]


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Held-out acceptance of one head, defined by `DEFINITION`."""

    greedy: PositionCounts
    sampled: PositionCounts
    num_positions: int  # where a round could start
    kv: Literal["decode", "own"]
    temperature: float

    @property
    def score(self) -> float:
        """The mean of both acceptance lengths, by which heads are compared."""
        return (self.greedy.length + self.sampled.length) / 2

    def noise(self, other: "HeldOutAcceptance | None" = None) -> float:
        """Return the standard error of the score, or of its difference from another head's on the same texts."""
        own = self._deviations
        deviations = own if other is None else [a - b for a, b in zip(own, other._deviations, strict=True)]
        return statistics.stdev(deviations) / len(deviations) ** 0.5 if len(deviations) > 1 else 0.0

    def is_worse(self, other: "HeldOutAcceptance") -> bool:
        """Return whether the score is below another head's on the same texts by more than twice the noise."""
        return self.score - other.score < -2 * self.noise(other) - 1e-9

    @property
    def _deviations(self) -> list[float]:
        return [(a + b) / 2 for a, b in zip(self.greedy.deviations, self.sampled.deviations, strict=True)]

    def as_record(self) -> dict[str, object]:
        """Return the record for metrics.jsonl."""
        figures = {
            name: {"acceptance": list(counts.rates), "AL": counts.length}
            for name, counts in (("greedy", self.greedy), ("sampled", self.sampled))
        }
        return figures | {
            "score": self.score,
            "noise": self.noise(),
            "num_positions": self.num_positions,
            "kv": self.kv,
            "temperature": self.temperature,
            "definition": DEFINITION,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "HeldOutAcceptance":
        """Invert `dataclasses.asdict`; tuples may be lists."""
        parts = {
            name: PositionCounts(**{key: tuple(value) for key, value in state[name].items()})
            for name in ("greedy", "sampled")
        }
        return cls(**{**state, **parts})


@torch.no_grad()
def heldout_acceptance(
    trunk: Trunk,
    head: Head,
    batches: Iterable[tuple[Batch, TrunkOutput | None]],
    depths: int,
    *,
    temperature: float = 1.0,
    on_policy: bool = False,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks = ALONE,
) -> HeldOutAcceptance:
    """Measure held-out acceptance with `depths` drafts per round.

    Args:
        trunk: The trunk.
        head: The head.
        batches: Batches, and the trunk's states of each where they are known already.
        depths: K.
        temperature: Of the sampled figures.
        on_policy: Whether the labels were sampled from the trunk at the temperature.
        dtype: Autocast dtype; float32 = no autocast.
        ranks: The processes; each evaluates its own rows and returns the figures of all.
    """
    totals = [[torch.zeros(depths, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
    per_sequence: list[list[list[float]]] = [[[], []], [[], []]]
    num_positions = 0
    for batch, known in batches:
        tokens, documents = batch.tokens.to(trunk.device), batch.documents.to(trunk.device)
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            hidden = trunk(tokens, documents=documents) if known is None else known
            run = head.rollout_hidden if head.can_rollout else head.teacher_forced_hidden
            states = [hidden.final_hidden, *run(tokens, hidden.head_input, depths, documents=documents)]
        label_mask = batch.label_mask.to(tokens.device)
        valid = Targets(tokens, documents, label_mask).labels(depths) >= 0
        valid &= label_mask[:, 1 : valid.shape[1] + 1]  # a round's first token, the trunk's own, must be a label too
        num_positions += int(valid.sum())
        for rule, accept in enumerate(_acceptance_probs(trunk, head, tokens, states, temperature, on_policy)):
            reach = torch.cat([accept.new_ones(len(accept), 1, accept.shape[-1]), accept.cumprod(1)], dim=1)
            starts = round_start_probs(reach, valid.cpu())
            totals[rule][0] += (starts[:, None] * reach[:, :-1]).sum((0, 2))
            totals[rule][1] += (starts[:, None] * reach[:, 1:]).sum((0, 2))
            per_sequence[rule][0] += (starts[:, None] * reach).sum((1, 2)).tolist()
            per_sequence[rule][1] += starts.sum(1).tolist()
    num_positions = int(ranks.total(torch.tensor(num_positions)))
    greedy, sampled = (
        PositionCounts(
            *(tuple(ranks.total(counts).tolist()) for counts in total),
            *(tuple(ranks.gather_rows(torch.tensor(counts, dtype=torch.float64)).tolist()) for counts in sequences),
        )
        for total, sequences in zip(totals, per_sequence, strict=True)
    )
    return HeldOutAcceptance(greedy, sampled, num_positions, "decode" if head.can_rollout else "own", temperature)


def _acceptance_probs(
    trunk: Trunk, head: Head, tokens: Tensor, states: list[Tensor], temperature: float, on_policy: bool
) -> tuple[Tensor, Tensor]:
    """Two [B, K, T - K] on the CPU: the probability that a draft is accepted, by argmax match and by sampling."""
    depths = len(states) - 1
    num_positions = tokens.shape[1] - depths
    weights = lm_head_weights(trunk, head, depths)
    match, accept = (torch.zeros(len(tokens), depths, num_positions, dtype=torch.float64) for _ in range(2))
    for row in range(len(tokens)):  # the probs [positions, V] of one sequence at a time, to bound memory
        logits = trunk.logits(states[0][row].to(trunk.output.weight.dtype)).float()
        probs = (logits / temperature).softmax(-1)
        for depth in range(1, depths + 1):
            draft_logits = (states[depth][row, :num_positions].to(weights[depth].dtype) @ weights[depth].T).float()
            p, q = probs[depth : depth + num_positions], (draft_logits / temperature).softmax(-1)
            match[row, depth - 1] = (p.argmax(-1) == q.argmax(-1)).cpu()
            text = tokens[row, depth + 1 : depth + 1 + num_positions, None]
            if on_policy:
                ratio = (q[: len(text)].gather(1, text) / p[: len(text)].gather(1, text)).clamp_max(1)[:, 0]
                accept[row, depth - 1, : len(text)] = ratio.cpu()
            else:
                accept[row, depth - 1] = overlap(p, q).cpu()
    return match, accept


@dataclass
class BestTracker:
    """The held-out acceptance of the initial head and of the best one so far, for early stopping."""

    patience: int = 0  # consecutive evaluations without improvement after which training ends; 0 = never
    baseline: HeldOutAcceptance | None = None  # of the head that training started from, None for a fresh one
    best: HeldOutAcceptance | None = None  # of the trained heads
    best_step: int = 0
    since: int = 0  # evaluations since the best one

    def update(self, step: int, acceptance: HeldOutAcceptance) -> bool:
        """Record an evaluation and return whether it is the best so far; step 0 is the baseline."""
        if step == 0:
            self.baseline = acceptance
            return False
        if self.best is None or acceptance.score > self.best.score:
            self.best, self.best_step, self.since = acceptance, step, 0
            return True
        self.since += step > self.best_step
        return False

    @property
    def is_done(self) -> bool:
        return 0 < self.patience <= self.since

    @property
    def is_worse(self) -> bool:
        """Whether the best trained head is worse than the initial one, beyond noise."""
        return self.baseline is not None and self.best is not None and self.best.is_worse(self.baseline)

    def __str__(self) -> str:
        """Both scores and the uncertainty of their difference, for messages."""
        if self.baseline is None or self.best is None:
            return "no head to compare with"
        noise = 2 * self.best.noise(self.baseline)
        return f"acceptance length {self.best.score:.3f}, was {self.baseline.score:.3f}, +-{noise:.3f} on held-out text"

    def as_record(self) -> dict[str, object]:
        """Return the record for JSON reports."""
        figures = {"baseline": self.baseline, "best": self.best}
        return {name: value and value.as_record() for name, value in figures.items()} | {"best_step": self.best_step}

    def as_state(self) -> dict[str, object]:
        """Return plain values for `load_state`."""
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `as_state` returned; `patience` stays."""
        for name in ("baseline", "best"):
            setattr(self, name, state[name] and HeldOutAcceptance.from_state(state[name]))
        self.best_step, self.since = state["best_step"], state["since"]
