"""Evaluate on held-out text: teacher-forced loss and acceptance per depth, and acceptance as decoding would have it.

For held-out acceptance no token is generated: trunk and head run teacher-forced over whole texts, and the rounds are
simulated afterwards.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nextn.bounded_json import JsonObject
from nextn.data.batches import Batch
from nextn.data.degeneracy import Degeneracy, degeneracy
from nextn.decoding.rounds import rounds
from nextn.evaluate.teacher_forced import round_start_probs
from nextn.losses.chunked import cross_entropy
from nextn.losses.mtp_loss import Targets
from nextn.model.head import Head
from nextn.model.lm_head_columns import lm_head_inputs, lm_head_weights
from nextn.model.model import Model
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.settings import Settings
from nextn.speculative.sampling import overlap
from nextn.stats.acceptance import Acceptance, conditional_rates, expected_length, mean_length
from nextn.train.distributed import ALONE, Ranks

TEACHER_FORCED_DEFINITION = (
    "teacher-forced on held-out text: depth k takes the text's tokens and is compared with the trunk's distribution. "
    "match: argmax equals the trunk's argmax, given that it did at every shallower depth. overlap: sum min(p, q) "
    "= 1 - TV, likewise conditional. AL = 1 + sum over k of the product of the first k"
)
ACCEPTANCE_DEFINITION = (
    "what decoding the text in rounds of K drafts would accept: a_k = expected depth-k drafts accepted / drafted, AL = "
    "tokens per round, each round starting where the previous one ended. greedy: a draft is accepted where the head's "
    "argmax is the trunk's. sampled: with probability 1 - TV at the temperature, or min(1, q/p) of the text's token "
    "where the text was sampled from the trunk; drafts are verified one by one, block verification accepts slightly "
    "more. argmax: the head's argmax is drafted at the temperature, as engines do by default. "
    "kv: `decode` = deeper drafts attend to the keys that decoding gives them; "
    "`own` = each depth to its own, for heads without a key-value rollout"
)
_RULES = ("greedy", "sampled", "argmax")  # of held-out acceptance


@dataclass(frozen=True)
class TeacherForcedFigures:
    """Teacher-forced figures of D depths, as in `TEACHER_FORCED_DEFINITION`."""

    loss: tuple[float, ...]  # [D+1] mean cross-entropy in nats, the trunk's first
    match: tuple[float, ...]  # a_1..a_D
    overlap: tuple[float, ...]  # a_1..a_D
    definition: str = field(default=TEACHER_FORCED_DEFINITION, repr=False)

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
    """Compute teacher-forced figures over batches, `depths` deep, under autocast unless `dtype` is float32.

    `total` sums values over processes, each of which has its own rows.
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
        for depth, state in enumerate(lm_head_inputs(model.trunk, model.head, states)):
            labels = targets.labels(depth).flatten()
            _, nll = cross_entropy(state.flatten(0, 1), weights[depth], labels)
            sums[depth] += nll.sum().item()
            counts[depth] += (labels >= 0).sum().item()
        survived += survival(model, states, targets.labels(depths) >= 0)
    sums, counts, survived = total(torch.cat([sums[None], counts[None], survived])).split([1, 1, 2])
    match, overlaps = (conditional_rates(alive[1:], alive[:-1], undrafted=0.0) for alive in survived.tolist())
    return TeacherForcedFigures(tuple((sums / counts.clamp_min(1))[0].tolist()), match, overlaps)


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
    depths = len(states) - 1
    alive = valid.cpu().double()  # on the host: MPS has no float64
    survived = torch.zeros(2, depths + 1, dtype=torch.float64)
    for rule, accept in enumerate(_acceptance_probs(model.trunk, model.head, states)[:2]):
        reach = torch.cat([alive[:, None], accept], dim=1).cumprod(1)
        survived[rule] = sum(reach.sum(-1))  # in order of the sequences: rounding does not depend on their number
    return survived


def _standard_error(deviations: Sequence[float]) -> float:
    return statistics.stdev(deviations) / len(deviations) ** 0.5 if len(deviations) > 1 else 0.0


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Expected counts over the rounds of several sequences, under one acceptance rule."""

    num_drafted: tuple[float, ...]  # [K], as of `Acceptance`
    num_accepted: tuple[float, ...]  # [K]
    emitted: tuple[float, ...] = field(repr=False)  # tokens, of each sequence
    rounds: tuple[float, ...] = field(repr=False)  # of each sequence

    @property
    def rates(self) -> tuple[float, ...]:
        """a_1..a_K; 0 for a depth that is never drafted."""
        return conditional_rates(self.num_accepted, self.num_drafted, undrafted=0.0)

    @property
    def length(self) -> float:
        """Mean acceptance length (AL); 0 without rounds."""
        return mean_length(sum(self.emitted), sum(self.rounds), no_rounds=0.0)

    @property
    def deviations(self) -> list[float]:
        """The influence of each sequence on AL, times the number of sequences: their mean is 0."""
        mean = max(sum(self.rounds) / max(len(self.rounds), 1), 1e-9)
        pairs = zip(self.emitted, self.rounds, strict=True)
        return [(emitted - self.length * rounds) / mean for emitted, rounds in pairs]

    @property
    def error(self) -> float:
        """The standard error of AL."""
        return _standard_error(self.deviations)


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Held-out acceptance of one head, defined by `ACCEPTANCE_DEFINITION`."""

    greedy: ExpectedAcceptance
    sampled: ExpectedAcceptance
    argmax: ExpectedAcceptance
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
        return _standard_error(deviations)

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
            for name, counts in zip(_RULES, (self.greedy, self.sampled, self.argmax), strict=True)
        }
        return figures | {
            "score": self.score,
            "noise": self.noise(),
            "num_positions": self.num_positions,
            "kv": self.kv,
            "temperature": self.temperature,
            "definition": ACCEPTANCE_DEFINITION,
        }

    @classmethod
    def from_state(cls, state: JsonObject) -> "HeldOutAcceptance":
        """Invert `dataclasses.asdict`; tuples may be lists."""
        parts = {rule: ExpectedAcceptance(**{key: tuple(each) for key, each in state[rule].items()}) for rule in _RULES}
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
    """Measure held-out acceptance with `depths` drafts per round, on batches and the trunk's states, if known.

    `on_policy`: the labels were sampled from the trunk at the temperature. Each process evaluates its own rows and
    returns the figures of all.
    """
    totals = [[torch.zeros(depths, dtype=torch.float64) for _ in range(2)] for _ in _RULES]
    per_sequence: list[list[list[float]]] = [[[], []] for _ in _RULES]
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
        text = tokens if on_policy else None
        for rule, accept in enumerate(_acceptance_probs(trunk, head, states, temperature, text)):
            reach = torch.cat([accept.new_ones(len(accept), 1, accept.shape[-1]), accept.cumprod(1)], dim=1)
            starts = round_start_probs(reach, valid.cpu())
            totals[rule][0] += (starts[:, None] * reach[:, :-1]).sum((0, 2))
            totals[rule][1] += (starts[:, None] * reach[:, 1:]).sum((0, 2))
            per_sequence[rule][0] += (starts[:, None] * reach).sum((1, 2)).tolist()
            per_sequence[rule][1] += starts.sum(1).tolist()
    num_positions = int(ranks.total(torch.tensor(num_positions)))
    greedy, sampled, argmax = (
        ExpectedAcceptance(
            *(tuple(ranks.total(counts).tolist()) for counts in total),
            *(tuple(ranks.gather_rows(torch.tensor(counts, dtype=torch.float64)).tolist()) for counts in sequences),
        )
        for total, sequences in zip(totals, per_sequence, strict=True)
    )
    kv: Literal["decode", "own"] = "decode" if head.can_rollout else "own"
    return HeldOutAcceptance(greedy, sampled, argmax, num_positions, kv, temperature)


def _acceptance_probs(
    trunk: Trunk, head: Head | None, states: Sequence[Tensor], temperature: float = 1.0, text: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Three [B, K, T - K] on the CPU: the probability that a draft is accepted, by each of `_RULES`.

    text: [B, T] tokens that were sampled from the trunk at the temperature, if they were.
    """
    depths = len(states) - 1
    num_sequences, num_positions = len(states[0]), states[0].shape[1] - depths
    match, accept, likely = (torch.zeros(num_sequences, depths, num_positions, dtype=torch.float64) for _ in _RULES)
    for row in range(num_sequences):  # the probs [positions, V] of one sequence at a time, to bound memory
        logits = trunk.logits(states[0][row].to(trunk.output.weight.dtype)).float()
        probs = (logits / temperature).softmax(-1)
        for depth in range(1, depths + 1):
            assert head is not None
            draft_logits = head.logits(head.layer_index(depth), states[depth][row, :num_positions]).float()
            p, q = probs[depth : depth + num_positions], (draft_logits / temperature).softmax(-1)
            best = q.argmax(-1)
            match[row, depth - 1] = (p.argmax(-1) == best).cpu()
            if text is None:
                accept[row, depth - 1] = overlap(p, q).cpu()
                likely[row, depth - 1] = p.gather(1, best[:, None])[:, 0].cpu()
            else:
                target = text[row, depth + 1 : depth + 1 + num_positions, None]
                ratio = q[: len(target)].gather(1, target) / p[: len(target)].gather(1, target)
                # 0 / 0 at tokens of a prompt, which were not sampled: no round starts there, but NaN * 0 is NaN.
                accept[row, depth - 1, : len(target)] = ratio.nan_to_num(nan=0.0).clamp_max(1)[:, 0].cpu()
                likely[row, depth - 1, : len(target)] = (best[: len(target)] == target[:, 0]).cpu().double()
    return match, accept, likely


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
        """The AL of each rule, before and after, and what is compared with which uncertainty, for messages."""
        best, baseline = self.best, self.baseline
        if baseline is None or best is None:
            return "no head to compare with"
        sampled = f"T = {best.temperature:g}"
        labels = ("greedy", sampled, f"{sampled} argmax drafts (vLLM, llama.cpp)")
        lengths = (
            f"{label} {getattr(best, rule).length:.3f} (was {getattr(baseline, rule).length:.3f})"
            for rule, label in zip(_RULES, labels, strict=True)
        )
        return (
            f"held-out AL {', '.join(lengths)}; compared by the mean of the first two: "
            f"{best.score - baseline.score:+.3f} +-{2 * best.noise(baseline):.3f}"
        )

    def as_record(self) -> dict[str, object]:
        """Return the record for JSON reports."""
        figures = {"baseline": self.baseline, "best": self.best}
        return {name: value and value.as_record() for name, value in figures.items()} | {"best_step": self.best_step}

    def as_state(self) -> dict[str, object]:
        """Return plain values for `load_state`."""
        return asdict(self)

    def load_state(self, state: JsonObject) -> None:
        """Restore what `as_state` returned; `patience` stays."""
        for name in ("baseline", "best"):
            setattr(self, name, state[name] and HeldOutAcceptance.from_state(state[name]))
        self.best_step, self.since = state["best_step"], state["since"]
