"""Teacher-forced scoring of a head over texts that gives the exact counts of decoding, without decoding.

A round that starts at position i knows the tokens up to t_{i+1}; its draft of depth k is verified against t_{i+k+1}.
Accepted drafts are the text's own tokens, so the text holds everything that a round of decoding would see. Above
temperature 0 acceptance is random, but its distribution given the text is known (`RULES`), so no draft is sampled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nextn.checkpoint.mapped_memory import release_pages, released_after_use
from nextn.errors import ConfigError
from nextn.model.head import Head
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import Model
from nextn.model.streamed_trunk import StreamedTrunk
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.runtime.protocols import DecodingTrunk
from nextn.runtime.torch_backend import TorchTrunk
from nextn.settings import Contract, Sampling
from nextn.speculative.sampling import to_probs

# Acceptance rule -> probability that depths 1..k are all accepted, given the text x; r_j = q_j(x_j) / p_j(x_j), where
# p is the trunk's distribution and q the head's, after the text's own tokens. It is P(accepted and x) / P(x), in which
# the distribution of the drafts cancels.
RULES = {
    "greedy": "[x_j = argmax q_j] for all j: the text is the trunk's argmax",
    "ratio": "product of min(1, r_j): drafts sampled from q, verified one by one (Leviathan et al. 2023, algorithm 1)",
    "block": "min over j <= k of min(1, r_1 ... r_j): drafts verified jointly (Sun et al. 2024, algorithm 2)",
    "argmax": "[x_j = argmax q_j] for all j: argmax drafts, accepted with probability p(draft), as by comparing with "
    "a sampled token",
    "match": "product of q_j(x_j): drafts sampled from q, accepted only if the trunk samples the same token",
}
PERFECT = "perfect"  # scored beside them: rule argmax of a head that has the trunk's own distribution, q = p
_MAX_POSITIONS = 2048  # of one parallel pass: texts are batched up to this number of padded positions
_MAX_STARTS = 128  # round starts whose distributions are in memory at once, ...
_MAX_LOGITS = 2**23  # ... and elements of each of their tensors


@dataclass(frozen=True)
class ReferenceText:
    """A prompt and the trunk's continuation."""

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    temperature: float = 0.0
    ended: bool = False  # by eos or a full context, not by max_tokens: then a draft of the last token is verified too

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.new

    @property
    def remaining(self) -> list[int]:
        """The number of drafts that can be verified in a round that starts after new token s = 0, 1, ...; 1 or more."""
        last = len(self.new) - (1 if self.ended else 2)
        return [last - start for start in range(last)]


@dataclass(frozen=True, eq=False)
class Survival:
    """Probabilities that the drafts of a round from start s are accepted; entries beyond a text's end are ignored."""

    given: Tensor  # [S, K+1] float64: P(depths 1..k are all accepted), given the text
    expected: (
        Tensor  # [S, K]: the same, averaged over depth k's token by the trunk's distribution, which has less noise
    )

    def round_counts(self, remaining: Sequence[int], k: int) -> tuple[list[float], list[float]]:
        """Return expected (num_drafted, num_accepted) by depth of decoding this text in rounds of K = k.

        A round that accepts j drafts is followed by one j + 1 tokens later, so starts after accepted drafts are rarer
        than others: these are not the counts over all positions alike.
        """
        drafted, accepted = self.counts_by_start(remaining, k)
        return drafted.sum(0).tolist(), accepted.sum(0).tolist()

    def counts_by_start(self, remaining: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
        """Return `round_counts` by the start of their round, [S, K] each."""
        if not remaining:
            empty = torch.zeros(0, k, dtype=torch.float64)
            return empty, empty
        starts, reach, verified = _round_starts(self.given[None, :, : k + 1], remaining)
        return (starts * reach[..., :-1] * verified)[0], (starts * self.expected[:, :k] * verified)[0]


def engine_round_counts(parts: Sequence[Survival], remaining: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Return `Survival.round_counts` of texts with the same remaining numbers, as engines without draft counts show it.

    An engine that counts only accepted drafts by position implies as drafted, at depth k, all rounds that accepted
    every shallower draft, also those too close to the end to draft that deep. Both are [texts, K].
    """
    given = torch.stack([part.given[: len(remaining)] for part in parts])
    expected = torch.stack([part.expected[: len(remaining)] for part in parts])
    starts, reach, verified = _round_starts(given[..., : k + 1], remaining)
    return (starts * reach[..., :-1]).sum(1), (starts * expected[..., :k] * verified).sum(1)


def _round_starts(given: Tensor, remaining: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(P(a round starts there) [B, S, 1], `given` up to the text's end [B, S, K+1], whether it is verified [S, K])."""
    limits, depths = torch.tensor(remaining)[:, None], torch.arange(given.shape[-1])
    reach = given * (depths <= limits)  # no draft beyond the end is verified
    starts = round_start_probs(reach.transpose(1, 2), torch.ones(given.shape[:2], dtype=torch.bool))
    return starts[..., None], reach, depths[:-1] < limits


def round_start_probs(reach: Tensor, valid: Tensor) -> Tensor:
    """Return the probability [B, T] that a round starts at each position: the first of each run of valid ones, or
    where the previous round ended.

    reach [B, K+1, T] float64: P(a round from there accepts its first 0..K drafts). valid [B, T]: whether one may start.
    """
    batch, num_lengths, num_positions = reach.shape
    lengths = reach - torch.cat(
        [reach[:, 1:], reach.new_zeros(batch, 1, num_positions)], dim=1
    )  # P(exactly k accepted)
    starts = reach.new_zeros(batch, num_positions + num_lengths)
    for position in range(num_positions):
        here = valid[:, position]
        is_first = here & ~valid[:, position - 1] if position else here
        ahead = starts[:, position : position + num_lengths]
        ahead.copy_(ahead.where(here[:, None], 0.0))  # also drops rounds that would reach beyond the gap
        starts[:, position] = torch.where(is_first, 1.0, starts[:, position])
        starts[:, position + 1 : position + num_lengths + 1] += starts[:, position, None] * lengths[:, :, position]
    return starts[:, :num_positions]


@dataclass(frozen=True, eq=False)
class ScoredText:
    """One text, scored under one convention of the head; S is the number of round starts."""

    text: ReferenceText
    survivals: dict[str, Survival]  # by acceptance rule; above temperature 0 also of a `PERFECT` head
    drafts: Tensor  # [S], the argmax of depth 1
    ranks: Tensor  # [S], how many tokens depth 1 ranks above the text's
    remaining: list[int] = field(init=False)  # [S], `ReferenceText.remaining`

    def __post_init__(self) -> None:
        object.__setattr__(self, "remaining", self.text.remaining)


@torch.inference_mode()
def trunk_outputs(
    trunk: Trunk | DecodingTrunk, texts: Iterable[ReferenceText], *, chunk: int = 512
) -> list[TrunkOutput]:
    """Run the trunk over each text, in chunks as decoding prefills it; the states are [T, H] each.

    Those of a streamed trunk are recalled from its last run.
    """
    if isinstance(trunk, StreamedTrunk):
        return [trunk.recall(text.tokens) for text in texts]
    if isinstance(trunk, Trunk):
        with released_after_use(trunk.decoder.layers):
            return trunk_outputs(TorchTrunk(trunk), texts, chunk=chunk)
    outputs = []
    chunk = min(chunk, trunk.max_block_size or chunk)
    for text in texts:
        with trunk.pass_context():
            cache, parts = trunk.cache(1), []
            for block in torch.tensor([text.tokens], device=trunk.device).split(chunk, dim=1):
                part = trunk(block, cache)
                parts.append(
                    (part.final_hidden[0].clone(), part.head_input[0].clone())
                )  # the next pass overwrites them
                cache.commit([block.shape[1]])
        outputs.append(TrunkOutput(*(torch.cat(states) for states in zip(*parts, strict=True))))
    return outputs


@torch.inference_mode()
def score_texts(
    model: Model,
    texts: Sequence[ReferenceText],
    hiddens: Sequence[TrunkOutput],
    depths: int,
    *,
    contract: Contract | None = None,
) -> Iterator[ScoredText]:
    """Score the drafts of rounds of K = depths from every start of each text; `hiddens` are their `trunk_outputs`.

    It takes one parallel pass if `Head.can_rollout`, else position by position through the head's own caches.
    `contract` injects faults of decoding; an offset of +1, with which no decoder could draft, can be scored.
    Raises ConfigError if there is no head, or for contract.refresh = False: then drafts depend on where rounds started.
    """
    contract, head = contract or Contract(), model.head
    if head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to measure")
    if not contract.refresh:
        message = "contract.refresh = False can only be decoded, not scored: the head's cache depends on earlier rounds"
        raise ConfigError(message)
    inputs = [_head_inputs(text, hidden, contract, head) for text, hidden in zip(texts, hiddens, strict=True)]
    for text, hidden, chains in zip(texts, hiddens, _draft_states(head, inputs, depths), strict=True):
        yield _score(model, text, chains, hidden.final_hidden, depths)
    release_pages(lm_head_weights(model.trunk, head, depths))


@dataclass(frozen=True, eq=False)
class _HeadInputs:
    """What the head gets for one text: tokens [T] and states [T, ...]; `first` is the position of start 0."""

    tokens: Tensor
    states: Tensor
    first: int


def _head_inputs(text: ReferenceText, hidden: TrunkOutput, contract: Contract, head: Head) -> _HeadInputs:
    tokens, states = torch.tensor(text.tokens, device=hidden.head_input.device), hidden.head_input
    if contract.offset:
        shifted = torch.zeros_like(states)
        if contract.offset < 0:
            shifted[1:] = states[:-1]
        else:
            shifted[:-1] = states[1:]
        states = shifted
    # Without prefill the head's cache starts with the positions that the first round runs.
    cut = 0 if contract.prefill else max(0, len(text.prompt) - head.num_modules)
    return _HeadInputs(tokens[cut:], states[cut:], len(text.prompt) - 1 - cut)


def _draft_states(head: Head, inputs: Sequence[_HeadInputs], depths: int) -> Iterator[list[Tensor]]:
    """Per text and depth the head's final hidden states [<= S, H] at the starts, as far as the text's tokens go."""
    if not head.can_rollout:
        yield from (_stepwise_states(head, each, depths) for each in inputs)
        return
    for group in _groups(inputs):
        width = max(depths + 1, *(len(each.tokens) for each in group))
        tokens = pad_sequence([_padded(each.tokens, width) for each in group], batch_first=True)
        states = pad_sequence([_padded(each.states, width) for each in group], batch_first=True)
        outs = head.rollout_hidden(tokens, states, depths)
        for row, each in enumerate(group):
            ends = [len(each.tokens) - depth for depth in range(1, depths + 1)]
            yield [out[row, each.first : max(each.first, end)] for out, end in zip(outs, ends, strict=True)]


def _groups(inputs: Sequence[_HeadInputs]) -> Iterator[list[_HeadInputs]]:
    group: list[_HeadInputs] = []
    for each in inputs:
        if group and (len(group) + 1) * max(len(other.tokens) for other in [*group, each]) > _MAX_POSITIONS:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _padded(values: Tensor, width: int) -> Tensor:
    """[T, ...] with zeros appended up to width; attention is causal, so no earlier position sees them."""
    return torch.cat([values, values.new_zeros(max(0, width - len(values)), *values.shape[1:])])


def _stepwise_states(head: Head, inputs: _HeadInputs, depths: int) -> list[Tensor]:
    """The same by the decoder's own calls: caches filled up to each position, then a chain that is rolled back."""
    modules, length = min(head.num_modules, depths), len(inputs.tokens)
    tokens, caches = _padded(inputs.tokens, length + depths), [head.cache(1) for _ in range(modules)]
    outs: list[list[Tensor]] = [[] for _ in range(depths)]
    for start, end in [(0, inputs.first)] * bool(inputs.first) + [(i, i + 1) for i in range(inputs.first, length - 1)]:
        states = inputs.states[None, start:end]
        for depth in range(1, modules + 1):
            step = head.step(depth - 1, tokens[None, start + depth : end + depth], states, cache=caches[depth - 1])
            caches[depth - 1].commit([end - start])
            states = step.next_hidden if head.uses_next_hidden(depth + 1) else states
            outs[depth - 1].append(step.final_hidden[0])
        if start < inputs.first:
            outs = [[] for _ in range(depths)]
            continue
        for depth in range(modules + 1, depths + 1):
            token = tokens[None, start + depth : end + depth]
            step = head.repeat(modules - 1, token, step.next_hidden, cache=caches[-1])
            caches[-1].commit([1])
            outs[depth - 1].append(step.final_hidden[0])
        caches[-1].rollback_to([end])
    ends = [length - depth - inputs.first for depth in range(1, depths + 1)]
    return [torch.cat(out)[: max(0, end)] for out, end in zip(outs, ends, strict=True)]


def _score(
    model: Model, text: ReferenceText, chains: Sequence[Tensor], final_hidden: Tensor, depths: int
) -> ScoredText:
    """Compare each start's drafts with the text and, above temperature 0, with the trunk's distributions."""
    count, prompt_length = len(text.remaining), len(text.prompt)
    new_tokens = torch.tensor(text.new, device=final_hidden.device)
    rules = ["greedy"] if not text.temperature else [*(rule for rule in RULES if rule != "greedy"), PERFECT]
    given = {rule: torch.ones(count, depths + 1, dtype=torch.float64) for rule in rules}
    expected = {rule: torch.zeros(count, depths, dtype=torch.float64) for rule in rules}
    drafts, ranks = torch.zeros(2, count, dtype=torch.long)
    ratios = torch.ones(count, dtype=torch.float64)  # r_1 ... r_k
    sampling = Sampling(text.temperature)
    size = max(1, min(_MAX_STARTS, _MAX_LOGITS // model.trunk.vocab_size))
    for first in range(0, count, size):
        # The trunk's distributions behind these starts, of which each depth takes its part.
        states = final_hidden[prompt_length + first : prompt_length + min(first + size + depths - 1, count)]
        p = to_probs(model.trunk.logits(states), sampling) if text.temperature else None
        for depth in range(1, min(depths, count - first) + 1):
            here = slice(first, min(first + size, count - depth + 1))
            logits = _logits(model, depth, chains[depth - 1][here])
            target = new_tokens[here.start + depth : here.stop + depth]
            best = logits.argmax(-1)
            if depth == 1:
                drafts[here] = best.cpu()
                above = logits > logits.gather(-1, target[:, None])
                ranks[here] = torch.stack([row.count_nonzero() for row in above]).cpu()  # ten times as fast as a sum
            probs = None
            if p is not None:
                probs = p[depth - 1 : depth - 1 + len(logits)], to_probs(logits, sampling)
            before = {rule: given[rule][here, depth - 1] for rule in rules}
            now, mean, ratios[here] = _accept_depth(before, ratios[here], best, probs, target)
            for rule in rules:
                given[rule][here, depth], expected[rule][here, depth - 1] = now[rule], mean[rule]
    return ScoredText(text, {rule: Survival(given[rule], expected[rule]) for rule in rules}, drafts, ranks)


def _logits(model: Model, depth: int, final_hidden: Tensor) -> Tensor:
    assert model.head is not None
    return model.head.logits(model.head.layer_index(depth), final_hidden).float()


def _accept_depth(
    before: dict[str, Tensor], ratios: Tensor, best: Tensor, probs: tuple[Tensor, Tensor] | None, target: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """One depth of `RULES`: (given, expected, r_1 ... r_k) from those of the depth before."""
    correct = (best == target).cpu().double()
    if probs is None:
        now = {rule: given * correct for rule, given in before.items()}
        return now, now, ratios
    p, q = probs
    largest, likeliest = p.max(-1)
    q_target, p_target = (each.gather(-1, target[:, None])[:, 0].cpu().double() for each in (q, p))
    ratio = q_target / p_target.clamp_min(torch.finfo(torch.float32).tiny)
    now = {
        "ratio": before["ratio"] * ratio.clamp_max(1),
        "block": torch.minimum(before["block"], ratios * ratio),
        "argmax": before["argmax"] * correct,
        "match": before["match"] * q_target,
        PERFECT: before[PERFECT] * (likeliest == target).cpu().double(),
    }
    scale = [each[:, None].to(q) for each in (ratios, before["block"])]
    mean = {
        "ratio": before["ratio"] * torch.minimum(p, q).sum(-1).cpu().double(),
        "block": torch.minimum(scale[0] * q, scale[1] * p).sum(-1).cpu().double(),
        "argmax": before["argmax"] * p.gather(-1, best[:, None])[:, 0].cpu().double(),
        "match": before["match"] * (p * q).sum(-1).cpu().double(),
        PERFECT: before[PERFECT] * largest.cpu().double(),
    }
    return now, mean, ratios * ratio
