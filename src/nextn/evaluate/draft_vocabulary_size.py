"""The draft vocabulary that is fastest here: fewer tokens cost less to draft from, but hold the right one less often.

The trunk continues pieces of a text greedily, and one pass scores the head's drafts there. A draft of a smaller
vocabulary is counted as right where the whole one is right with a token that it contains; where the whole one is wrong,
a smaller one may be right, which is not counted. Decoding stays lossless with any vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nextn.data.degeneracy import degeneracy
from nextn.decoding.generate import generate
from nextn.errors import ConfigError
from nextn.evaluate.decoding_costs import draft_bytes, measure_costs
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText, Survival, score_texts, trunk_outputs
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.runtime.backend import Backend, backend_for
from nextn.runtime.native.lm_head import FORMAT, has_four_bits
from nextn.settings import Settings
from nextn.speculative.draft_vocabulary import DraftVocabulary, by_frequency
from nextn.stats.acceptance import conditional_rates
from nextn.stats.speedup import Costs, Spread, best_k, expected_speedup

_HELD_OUT = 8  # one of this many parts of the text is continued, and not counted
_NUM_PROMPTS, _PROMPT, _NEW = 8, 32, 64  # tokens of each prompt and of its continuation
_SMALLEST = 256
_MIN_GAIN = 1.02  # a smaller vocabulary must promise this much more than the whole one


@dataclass(frozen=True)
class SizeEstimate:
    """The expected speedup over plain decoding with a draft vocabulary of this size, at the best K."""

    size: int
    rates: tuple[float, ...]  # a_1, ..., a_K
    num_speculative_tokens: int
    speedup: float


@dataclass(frozen=True, eq=False)
class DraftVocabularyChoice:
    """The draft vocabulary that is fastest here, None for the whole one, and the estimates of all sizes."""

    vocabulary: DraftVocabulary | None
    speedup: float  # expected with it, from a draft step that was measured with it
    estimates: tuple[SizeEstimate, ...]  # smallest size first, the whole vocabulary last


def choose_draft_vocabulary(
    model: Model,
    tokens: Sequence[int],
    *,
    num_speculative_tokens: int,
    always: Collection[int] = (),
    backend: str = "auto",
) -> DraftVocabularyChoice:
    """Set the model's draft vocabulary to that with the highest expected speedup on this machine at up to K drafts.

    Acceptance is measured on the last part of `tokens`, a text similar to what will be decoded; every vocabulary
    contains `always`. Raises ConfigError for a text that is too short or whose continuations repeat themselves, or
    without a head.
    """
    head, vocab_size = model.head, model.trunk.vocab_size
    if head is None:
        raise ConfigError("the checkpoint has no head, so there is nothing to draft with")
    if len(tokens) < _HELD_OUT * _NUM_PROMPTS * _PROMPT:
        raise ConfigError(
            f"--draft-vocab: the text has {len(tokens)} tokens, and to choose a size, "
            f"{_HELD_OUT * _NUM_PROMPTS * _PROMPT} are needed: add text, or give the size as FILE:SIZE"
        )
    split = len(tokens) - len(tokens) // _HELD_OUT
    head.draft_vocabulary = None
    scored = _score_continuations(model, tokens[split:], num_speculative_tokens, backend)
    costs = measure_costs(model, num_speculative_tokens=num_speculative_tokens, backend=backend)
    order = by_frequency([tokens[:split]], vocab_size, always=always)
    ranks, smallest = torch.from_numpy(np.argsort(order)), max(_SMALLEST, len(set(always)))
    sizes = [size for size in (2**power for power in range(vocab_size.bit_length())) if smallest <= size < vocab_size]
    engine = backend_for(model, backend)
    estimates = tuple(_estimate(model, engine, scored, ranks, costs, size) for size in [*sizes, vocab_size])
    best = max(estimates, key=lambda each: each.speedup)
    if best.size < vocab_size:
        head.draft_vocabulary = DraftVocabulary(torch.from_numpy(np.sort(order[: best.size])), vocab_size)
        costs = measure_costs(model, num_speculative_tokens=num_speculative_tokens, backend=backend)
        speedup = expected_speedup(costs, best.rates, best.num_speculative_tokens)
        if speedup >= _MIN_GAIN * estimates[-1].speedup:
            return DraftVocabularyChoice(head.draft_vocabulary, speedup, estimates)
    head.draft_vocabulary = None
    return DraftVocabularyChoice(None, estimates[-1].speedup, estimates)


def _score_continuations(model: Model, held_out: Sequence[int], k: int, backend: str) -> list[ScoredText]:
    starts = range(0, len(held_out) - _PROMPT + 1, max(_PROMPT, len(held_out) // _NUM_PROMPTS))
    prompts = [list(held_out[start : start + _PROMPT]) for start in starts][:_NUM_PROMPTS]
    results = generate(model, prompts, Settings(num_speculative_tokens=k, max_tokens=_NEW), backend=backend)
    texts = [
        ReferenceText(tuple(prompt), result.tokens, ended=result.finish in ("eos", "context"))
        for prompt, result in zip(prompts, results, strict=True)
    ]
    usable = [text for text in texts if text.remaining and not degeneracy(text.new).is_degenerate]
    if not usable:
        raise ConfigError(
            "the model's continuations of the text end at once or repeat themselves, so that no draft vocabulary can "
            "be chosen by them; give a text of the kind that the model was trained on, or a number of tokens"
        )
    outputs = trunk_outputs(backend_for(model, backend).trunk, usable)
    return list(score_texts(model, usable, outputs, k))


def _estimate(
    model: Model, engine: Backend, scored: Sequence[ScoredText], ranks: Tensor, costs: Costs, size: int
) -> SizeEstimate:
    """engine: Measured with the whole vocabulary. ranks: [V], of each token by frequency."""
    assert model.head is not None
    counts = [_within(each, ranks < size).round_counts(each.remaining, costs.max_speculative_tokens) for each in scored]
    drafted, accepted = (torch.tensor([count[side] for count in counts]).sum(0).tolist() for side in (0, 1))
    rates = conditional_rates(accepted, drafted, undrafted=0.0)
    # About, as a draft step at batch 1 takes the time of reading its weights; the choice is measured afterwards.
    share = _draft_bytes(model.head, engine, size) / _draft_bytes(model.head, engine, model.trunk.vocab_size)
    draft = Spread(costs.draft.median * share, costs.draft.low * share, costs.draft.high * share, costs.draft.num)
    costs = replace(costs, draft=draft)
    best = max(1, best_k(costs, rates))
    return SizeEstimate(size, rates, best, expected_speedup(costs, rates, best))


def _draft_bytes(head: Head, engine: Backend, size: int) -> int:
    lm_head_bits = FORMAT.bits if engine.name == "native" and has_four_bits(head, size) else None
    return draft_bytes(head, engine.head_bits, num_tokens=size, lm_head_bits=lm_head_bits)


def _within(scored: ScoredText, in_vocabulary: Tensor) -> Survival:
    """The same with a draft accepted only if its token is in the vocabulary [V]."""
    survival = scored.survivals["greedy"]
    allowed, new = torch.ones_like(survival.given), in_vocabulary[torch.tensor(scored.text.new)].double()
    for depth in range(1, survival.given.shape[1]):
        count = min(len(allowed), len(new) - depth)
        allowed[:count, depth] = allowed[:count, depth - 1] * new[depth : depth + count]
    return Survival(survival.given * allowed, survival.expected * allowed[:, 1:])
