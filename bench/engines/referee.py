"""A real engine's texts and counters, compared with `nextn measure` of the same checkpoint on the same prompts.

Acceptance is compared in three ways: with the family's row, within the interval of `measure`; with the engine's own
documented convention (`conventions`), count for count; and paired by text, as both decode the same texts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from engines.client import Worker
from engines.protocol import Request

from nextn.engines.counters import Counters, sum_counters
from nextn.engines.metrics_formats import from_metrics
from nextn.errors import EngineError
from nextn.evaluate.conventions import Variant, apply_variants
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.teacher_forced import ReferenceText, ScoredText, score_texts, trunk_outputs
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.family_table import deviations
from nextn.model.model import Model
from nextn.model.trunk import TrunkOutput
from nextn.settings import Contract
from nextn.stats.intervals import Estimate, jackknife, proportion

# Whether the last round drafts and verifies beyond the requested number of tokens.
OVERRUNS = {"vllm": True, "llama.cpp": False, "transformers": False}
# Names of these engines in a family's row.
ROWS = {"vllm": "vllm", "llama.cpp": "llamacpp", "transformers": "transformers"}
# common/speculative.cpp: `begin` does not reset `pending_h`.
LEADS = "a position before the first: the prompt's first token with the last state of the previous request"
DEFINITIONS = {
    "engine": "a_1..a_K from the engine's own counters over the texts that equal ours: accepted at a position "
    "over accepted at the previous one",
    "ours": "the same of our decoder with the family's convention, counted as the engine counts: if it drafts no more "
    "than the remaining tokens, its counters treat a shorter last round as one whose deeper drafts were rejected",
    "interval_95": "of `ours`, by text, as in `nextn measure`",
    "inside": "all of the engine's figures are in the interval",
    "measure": "a_1..a_K by `nextn measure`, where a depth beyond the end of the text is not counted as rejected",
    "difference": "engine less measure, per depth, with the 95 % interval of a jackknife over texts, each "
    "left out on both sides: paired, as both are counted on the same texts",
    "counts": "[rounds, accepted at depth 1, ..., accepted at depth K], over the texts that equal ours",
    "same_counts": "counts equal those of our decoder exactly",
    "convention": "where the engine's documented convention differs from the row; [] where it does not",
    "same_under_convention": "counts equal those of our decoder with that convention exactly",
    "identical": "texts equal to our greedy baseline decoding in float32; `gap`: difference of our trunk's logits of "
    "the two tokens where a text first differs",
}


@dataclass(frozen=True)
class Seen:
    """An engine's texts and counters at one K, by prompt."""

    num_speculative_tokens: int
    texts: tuple[tuple[int, ...], ...]
    counts: tuple[Counters, ...]


def asked(worker: Worker, prompts: Sequence[tuple[int, ...]], k: int, tokens: int) -> Seen:
    """Ask all prompts greedily, one after the other; k = 0 is baseline decoding. Raises Unavailable.

    The last prompt is also asked first, without counting it, so that no counted request is the server's first.
    """
    texts, counts = [], []
    worker.ask(Request(list(prompts[-1]), tokens, k, []))
    before = _counters(worker) if k else None
    for prompt in prompts:
        answer = worker.ask(Request(list(prompt), tokens, k, []))
        texts.append(tuple(answer.tokens[:tokens]))
        if not k:
            continue
        if before is None:
            counts.append(_of_rounds(answer.lengths, k, tokens))
        else:
            now = from_metrics(worker.metrics())
            counts.append(now.minus(before))
            before = now
    return Seen(k, tuple(texts), tuple(counts))


def _counters(worker: Worker) -> Counters | None:
    """The engine's counters; None if it has none."""
    return from_metrics(worker.metrics()) if worker.hello["counts"] else None


def _of_rounds(lengths: Sequence[int], k: int, tokens: int) -> Counters:
    """Counters of an engine without any, from its rounds: all tokens of a round but the last are accepted drafts."""
    per_position = tuple(sum(length - 1 > depth for length in lengths) for depth in range(k))
    starts = [1 + sum(lengths[:index]) for index in range(len(lengths))]
    rounds = sum(start + 1 < tokens for start in starts)  # with one token remaining, nothing is drafted
    return Counters("rounds", rounds, None, sum(per_position), per_position)


def conventions(model: Model, engine: str) -> list[Variant]:
    """Return the documented differences of this engine from the family's row, as variants of the head."""
    facts = deviations(model.family, ROWS[engine])
    return [
        Variant(fact, f"{fact}: {value} for {getattr(model.family, fact)}", facts={fact: value})
        for fact, value in facts.items()
    ]


@dataclass(frozen=True, eq=False)
class Ours:
    """The checkpoint in float32, its measurement, and longer texts, so that drafts beyond the end can be verified."""

    model: Model
    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    measured: ReferenceReport
    long: tuple[ReferenceText, ...]

    @classmethod
    def of(
        cls,
        checkpoint: str,
        prompts: Sequence[tuple[int, ...]],
        *,
        tokens: int,
        num_speculative_tokens: int,
        head: Path | None = None,
    ) -> "Ours":
        model = Model.load(checkpoint, dtype=torch.float32, head=head)
        all_prompts = [Prompt(prompt, "all") for prompt in prompts]
        plan = ReferencePlan(
            num_speculative_tokens=num_speculative_tokens, temperatures=(0.0,), max_tokens=tokens, backend="torch"
        )
        longer = reference_acceptance(model, all_prompts, replace(plan, max_tokens=tokens + num_speculative_tokens + 1))
        texts = tuple(replace(text, ended=False) for text in longer.generated[0.0].texts)
        return cls(model, tuple(prompts), tokens, reference_acceptance(model, all_prompts, plan), texts)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [text.new for text in self.measured.generated[0.0].texts]

    def scores(self, variants: Sequence[Variant] = (), *, leads: bool = False) -> list[ScoredText]:
        """Score the long texts under variants of the head; `leads` adds llama.cpp's extra position, see LEADS."""
        model, contract = apply_variants(self.model, Contract(), list(variants))
        texts, hiddens = list(self.long), trunk_outputs(model.trunk, self.long)
        if leads:
            last = [
                each.head_input[len(text.prompt) + self.tokens - 2] for text, each in zip(texts, hiddens, strict=True)
            ]
            before = [last[-1], *last[:-1]]  # the last prompt was also asked before the first
            texts = [replace(text, prompt=(text.prompt[0], *text.prompt)) for text in texts]
            hiddens = [
                TrunkOutput(
                    torch.cat([each.final_hidden[:1], each.final_hidden]), torch.cat([lead[None], each.head_input])
                )
                for lead, each in zip(before, hiddens, strict=True)
            ]
        return list(score_texts(model, texts, hiddens, self.measured.plan.num_speculative_tokens, contract=contract))

    def counts(self, scores: Sequence[ScoredText], k: int, *, overruns: bool) -> list[Counters]:
        """Return what our decoder counts in rounds of k drafts, by text."""
        return [_count_rounds(each, k, self.tokens, overruns=overruns) for each in scores]

    @torch.inference_mode()
    def gap(self, prompt: Sequence[int], text: Sequence[int], theirs: Sequence[int]) -> dict[str, float] | None:
        """Return where a text differs from ours, and how much our trunk prefers its own token; None if it is equal."""
        index = next((i for i, pair in enumerate(zip(text, theirs, strict=False)) if pair[0] != pair[1]), None)
        if index is None:
            return None
        row = torch.tensor([[*prompt, *text[:index]]])
        logits = self.model.trunk.logits(self.model.trunk(row).final_hidden[:, -1])[0]
        return {"place": index, "gap": round((logits[text[index]] - logits[theirs[index]]).item(), 6)}


def _count_rounds(scored: ScoredText, k: int, tokens: int, *, overruns: bool) -> Counters:
    """Count the rounds of decoding a text of this many tokens; `overruns`: the last ones are verified in full."""
    given = scored.survivals["greedy"].given
    rounds, per_position, start = 0, [0] * k, 0
    while start + 2 < tokens or (overruns and start + 1 < tokens):
        limit = k if overruns else min(k, tokens - start - 2)
        accepted = int(given[start, 1 : limit + 1].sum())
        rounds += 1
        for depth in range(accepted):
            per_position[depth] += 1
        start += accepted + 1
    return Counters("nextn", rounds, None, sum(per_position), tuple(per_position))


def compared(ours: Ours, engine: str, plain: Seen, seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the record of one family in one engine; see DEFINITIONS."""
    variants = conventions(ours.model, engine)
    row = ours.scores()
    convention = ours.scores(variants, leads=engine == "llama.cpp") if variants or engine == "llama.cpp" else row
    descriptions = [each.description for each in variants] + [LEADS] * (engine == "llama.cpp")
    return {
        "prompts": len(ours.prompts),
        "tokens": ours.tokens,
        "convention": descriptions,
        "plain": _texts(ours, plain),
        "by_drafts": [_row(ours, engine, each, row, convention) for each in seen],
    }


def _row(
    ours: Ours, engine: str, seen: Seen, row: Sequence[ScoredText], convention: Sequence[ScoredText]
) -> dict[str, object]:
    k, overruns, texts = seen.num_speculative_tokens, OVERRUNS[engine], ours.texts
    same = [index for index, text in enumerate(seen.texts) if text == texts[index]]
    theirs, by_row, by_convention = (
        [counts[index] for index in same]
        for counts in (seen.counts, *(ours.counts(each, k, overruns=overruns) for each in (row, convention)))
    )
    by_text = [counts_of([each], k) for each in by_row]
    estimates = [
        proportion(*([row[depth] for row in by_text] for depth in (last, last - 1))) for last in range(1, k + 1)
    ]
    rates = rates_of(theirs, k)
    return {
        "drafts": k,
        **_texts(ours, seen),
        "engine": rates,
        "ours": [each.value for each in estimates],
        "interval_95": [[each.low, each.high] for each in estimates],
        "inside": all(_inside(*each) for each in zip(rates, estimates, strict=True)),
        "measure": [each.value for each in ours.measured.figures(0.0, k=k).rates],
        "difference": _differences(theirs, by_row, k),
        "counts": counts_of(theirs, k),
        "row_counts": counts_of(by_row, k),
        "same_counts": counts_of(theirs, k) == counts_of(by_row, k),
        "convention_counts": counts_of(by_convention, k),
        "same_under_convention": counts_of(theirs, k) == counts_of(by_convention, k),
    }


def _inside(rate: float | None, estimate: Estimate) -> bool:
    """Whether the rate is in the interval; its ends at 0 and 1 are rounded."""
    return rate is None or estimate.low - 1e-9 <= rate <= estimate.high + 1e-9


def _texts(ours: Ours, seen: Seen) -> dict[str, object]:
    texts = ours.texts
    gaps = [ours.gap(*each) for each in zip(ours.prompts, texts, seen.texts, strict=True)]
    complete = [len(text) == len(theirs) for text, theirs in zip(texts, seen.texts, strict=True)]
    same = sum(gap is None and full for gap, full in zip(gaps, complete, strict=True))
    return {"identical": same, "gaps": [gap for gap in gaps if gap]}


def counts_of(counts: Sequence[Counters], k: int) -> list[int]:
    """Return [rounds, accepted at depth 1, ..., accepted at depth K]."""
    total = sum_counters(counts)
    if total is None or total.num_drafts is None:
        raise EngineError("no counts of drafts")
    return [total.num_drafts, *[*total.per_position, *[0] * k][:k]]


def rates_of(counts: Sequence[Counters], k: int) -> list[float | None]:
    """Return a_1..a_K; None for a depth that was never reached."""
    return _rates(counts_of(counts, k))


def _rates(sums: Sequence[float]) -> list[float | None]:
    return [accepted / drafted if drafted else None for drafted, accepted in pairwise(sums)]


def _differences(theirs: Sequence[Counters], ours: Sequence[Counters], k: int) -> list[Mapping[str, float | None]]:
    """Per depth, on the same texts."""

    def difference(depth: int, sums: Sequence[float]) -> float:
        rates = [_rates(side)[depth] for side in (sums[: k + 1], sums[k + 1 :])]
        return math.nan if None in rates else rates[0] - rates[1]

    rows = [(*counts_of([a], k), *counts_of([b], k)) for a, b in zip(theirs, ours, strict=True)]
    return [jackknife(partial(difference, depth), rows).as_record() for depth in range(k)]
