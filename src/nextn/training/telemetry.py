"""Acceptance of a head on given text, as decoding that text would find it: its keys, its rounds, its rule.

No token is generated: the trunk and the head read whole texts, and the rounds are walked through afterwards.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nextn.corpus.batches import Batch
from nextn.distributed.parallel import ALONE, Ranks
from nextn.head import Head, outputs
from nextn.losses.loss import Targets
from nextn.measuring.columns import walk
from nextn.sampling import overlap
from nextn.trunk import Hidden, Trunk

DEFINITION = (
    "what decoding the text in rounds of K drafts would keep: a_k = expected depth-k drafts kept / offered, AL = "
    "tokens per round, rounds beginning where the one before ended. greedy: a draft is kept where the head's argmax is "
    "the trunk's. sampled: where it is with probability 1 - TV at the temperature, or min(1, q/p) of the text's token "
    "where the text was drawn from the trunk; drafts are judged one by one, judging them together keeps a little more. "
    "kv: `decode` = deeper drafts attend to what decoding lets them see; "
    "`own` = each depth to itself, for heads that cannot be unrolled"
)


@dataclass(frozen=True)
class Counts:
    """Expected numbers over rounds, of one rule. offered, kept [K]; emitted, rounds: of each row of text."""

    offered: tuple[float, ...]
    kept: tuple[float, ...]
    emitted: tuple[float, ...] = field(repr=False)
    rounds: tuple[float, ...] = field(repr=False)

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K, conditional; 0 where a depth is never offered."""
        return tuple(kept / offered if offered else 0.0 for kept, offered in zip(self.kept, self.offered, strict=True))

    @property
    def length(self) -> float:
        """AL at K."""
        return sum(self.emitted) / max(sum(self.rounds), 1e-9)

    @property
    def deviations(self) -> list[float]:
        """By how much each row moves AL, times the number of rows: their mean is 0."""
        mean = max(sum(self.rounds) / max(len(self.rounds), 1), 1e-9)
        return [(out - self.length * rounds) / mean for out, rounds in zip(self.emitted, self.rounds, strict=True)]


@dataclass(frozen=True)
class Foreseen:
    """greedy, sampled: by `DEFINITION`'s rules match and overlap. columns: where a round could begin."""

    greedy: Counts
    sampled: Counts
    columns: int
    kv: Literal["decode", "own"]
    temperature: float

    @property
    def score(self) -> float:
        """What heads are compared by: the mean of both acceptance lengths."""
        return (self.greedy.length + self.sampled.length) / 2

    def noise(self, other: "Foreseen | None" = None) -> float:
        """Standard error of the score, or of its difference from that of another head on the same texts."""
        mine = self._deviations
        rows = mine if other is None else [a - b for a, b in zip(mine, other._deviations, strict=True)]
        return statistics.stdev(rows) / len(rows) ** 0.5 if len(rows) > 1 else 0.0

    def is_worse(self, other: "Foreseen") -> bool:
        """Whether the score is lower than another head's on the same texts, by more than twice the noise."""
        return self.score - other.score < -2 * self.noise(other) - 1e-9

    @property
    def _deviations(self) -> list[float]:
        return [(a + b) / 2 for a, b in zip(self.greedy.deviations, self.sampled.deviations, strict=True)]

    def as_record(self) -> dict[str, object]:
        """What goes into metrics.jsonl."""
        figures = {
            name: {"acceptance": list(each.rates), "AL": each.length}
            for name, each in (("greedy", self.greedy), ("sampled", self.sampled))
        }
        return figures | {
            "score": self.score,
            "noise": self.noise(),
            "columns": self.columns,
            "kv": self.kv,
            "temperature": self.temperature,
            "definition": DEFINITION,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Foreseen":
        """Inverse of `dataclasses.asdict`, with lists for tuples."""
        parts = {
            name: Counts(**{key: tuple(value) for key, value in state[name].items()}) for name in ("greedy", "sampled")
        }
        return cls(**{**state, **parts})


@torch.no_grad()
def foreseen(
    trunk: Trunk,
    head: Head,
    batches: Iterable[tuple[Batch, Hidden | None]],
    depths: int,
    *,
    temperature: float = 1.0,
    drawn: bool = False,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks = ALONE,
) -> Foreseen:
    """Figures of `depths` drafts a round. hidden: the trunk's states of a batch, where they are known.

    drawn: the text that counts was drawn from the trunk at the temperature. dtype: autocast to it, fp32 = none. ranks:
    each process has rows of its own, and hears the figures of all.
    """
    totals = [[torch.zeros(depths, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
    rows: list[list[list[float]]] = [[[], []], [[], []]]
    columns = 0
    for batch, known in batches:
        tokens, documents = batch.tokens.to(trunk.device), batch.documents.to(trunk.device)
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            hidden = trunk(tokens, documents=documents) if known is None else known
            read = head.unrolled if head.can_unroll else head.hiddens
            states = [hidden.normed, *read(tokens, hidden.eaten, depths, documents=documents)]
        counted = batch.counted.to(tokens.device)
        valid = Targets(tokens, documents, counted).labels(depths) >= 0
        valid &= counted[:, 1 : valid.shape[1] + 1]  # the round's first token, which the trunk alone gives, counts, too
        columns += int(valid.sum())
        for rule, keep in enumerate(_keeps(trunk, head, tokens, states, temperature, drawn)):
            reach = torch.cat([keep.new_ones(len(keep), 1, keep.shape[-1]), keep.cumprod(1)], dim=1)
            starts = walk(reach, valid.cpu())
            totals[rule][0] += (starts[:, None] * reach[:, :-1]).sum((0, 2))
            totals[rule][1] += (starts[:, None] * reach[:, 1:]).sum((0, 2))
            rows[rule][0] += (starts[:, None] * reach).sum((1, 2)).tolist()
            rows[rule][1] += starts.sum(1).tolist()
    columns = int(ranks.total(torch.tensor(columns)))
    greedy, sampled = (
        Counts(
            *(tuple(ranks.total(each).tolist()) for each in total),
            *(tuple(ranks.dealt(torch.tensor(each, dtype=torch.float64)).tolist()) for each in told),
        )
        for total, told in zip(totals, rows, strict=True)
    )
    return Foreseen(greedy, sampled, columns, "decode" if head.can_unroll else "own", temperature)


def _keeps(
    trunk: Trunk, head: Head, tokens: Tensor, states: list[Tensor], temperature: float, drawn: bool
) -> tuple[Tensor, Tensor]:
    """-> two [B, K, C] on the CPU: the chance that a draft is kept by match, and by overlap."""
    depths = len(states) - 1
    columns = tokens.shape[1] - depths
    weights = outputs(trunk, head, depths)
    match, kept = (torch.zeros(len(tokens), depths, columns, dtype=torch.float64) for _ in range(2))
    for row in range(len(tokens)):  # one row of [columns, V] laws at a time bounds the memory
        logits = trunk.logits(states[0][row].to(trunk.output.weight.dtype)).float()
        laws = (logits / temperature).softmax(-1)
        for depth in range(1, depths + 1):
            guess = (states[depth][row, :columns].to(weights[depth].dtype) @ weights[depth].T).float()
            p, q = laws[depth : depth + columns], (guess / temperature).softmax(-1)
            match[row, depth - 1] = (p.argmax(-1) == q.argmax(-1)).cpu()
            text = tokens[row, depth + 1 : depth + 1 + columns, None]
            if drawn:
                chance = (q[: len(text)].gather(1, text) / p[: len(text)].gather(1, text)).clamp_max(1)[:, 0]
                kept[row, depth - 1, : len(text)] = chance.cpu()
            else:
                kept[row, depth - 1] = overlap(p, q).cpu()
    return match, kept
