"""A real engine's texts and counters beside what `nextn measure` says of the same checkpoint on the same prompts.

Acceptance is compared three times: with the family's row, inside the interval that `measure` makes; with the engine's
own documented convention (`conventions`), count for count; and text by text, as both saw the same texts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from engines.client import Worker
from engines.protocol import Request

from nextn.benchmarking.workload import Prompt
from nextn.drafting import Contract
from nextn.engines.counters import Counters, summed
from nextn.engines.sources import from_metrics
from nextn.errors import EngineError
from nextn.figures.estimate import Estimate, jackknifed, share
from nextn.measuring.columns import Scored, Text, scored, states
from nextn.measuring.measure import Measured, Plan, reference
from nextn.measuring.variants import Variant, read_as
from nextn.model import Model
from nextn.trunk import Hidden

# Whether the last round's drafts are judged beyond the number of tokens asked for.
OVERRUNS = {"vllm": True, "llama.cpp": False, "transformers": False}
# What these engines are called in a family's row.
ROWS = {"vllm": "vllm", "llama.cpp": "llamacpp", "transformers": "transformers"}
# common/speculative.cpp: `begin` does not set `pending_h` back.
LEADS = "a column before the first: the prompt's first token with the last state of the request before"
DEFINITIONS = {
    "engine": "a_1..a_K from the engine's own counters over the texts that equal ours: kept at a position over kept "
    "at the one before",
    "ours": "the same of our decoder as the family's row says, counted as the engine counts: where it drafts no more "
    "than is missing to the end, its counters take the shorter last round for one whose deeper drafts were lost",
    "interval_95": "of `ours`, by text, as `nextn measure` makes it",
    "inside": "every engine figure lies in the interval",
    "measure": "a_1..a_K by `nextn measure`, where a depth that had no room is not counted as lost",
    "difference": "engine less measure, per depth, with the 95 % interval of a jackknife over texts, each "
    "left out on both sides: paired, as both are counted on the same texts",
    "counts": "[rounds, kept at depth 1, ..., kept at depth K], over the texts that equal ours",
    "same_counts": "counts are those of our decoder, to the last round",
    "convention": "where the engine's documented convention differs from the row; [] where it does not",
    "same_under_convention": "counts are those of our decoder switched to that convention, to the last round",
    "identical": "texts equal to our plain greedy decoding in float32; `gap`: how far apart our trunk's logits of "
    "the two tokens are where a text first differs",
}


@dataclass(frozen=True)
class Seen:
    """What an engine gave at one K: per prompt its text and what it counted."""

    drafts: int
    texts: tuple[tuple[int, ...], ...]
    counts: tuple[Counters, ...]


def asked(worker: Worker, prompts: Sequence[tuple[int, ...]], drafts: int, tokens: int) -> Seen:
    """All prompts, greedily, one after the other; before them the last one, uncounted, so that no request is a server's
    first. drafts: 0 for plain decoding. Raises Unavailable."""
    texts, counts = [], []
    worker.ask(Request(list(prompts[-1]), tokens, drafts, []))
    before = _counters(worker) if drafts else None
    for prompt in prompts:
        answer = worker.ask(Request(list(prompt), tokens, drafts, []))
        texts.append(tuple(answer.tokens[:tokens]))
        if not drafts:
            continue
        if before is None:
            counts.append(_of_rounds(answer.lengths, drafts, tokens))
        else:
            now = from_metrics(worker.metrics())
            counts.append(now.minus(before))
            before = now
    return Seen(drafts, tuple(texts), tuple(counts))


def _counters(worker: Worker) -> Counters | None:
    """None for an engine without counters."""
    return from_metrics(worker.metrics()) if worker.hello["counts"] else None


def _of_rounds(lengths: Sequence[int], drafts: int, tokens: int) -> Counters:
    """What an engine without counters would count: kept drafts are all but the last token of a round."""
    places = tuple(sum(length - 1 > depth for length in lengths) for depth in range(drafts))
    starts = [1 + sum(lengths[:place]) for place in range(len(lengths))]
    rounds = sum(start + 1 < tokens for start in starts)  # with room for one token, nothing is drafted
    return Counters("rounds", rounds, None, sum(places), places)


def conventions(model: Model, engine: str) -> list[Variant]:
    """Where this engine is documented to differ from the family's row, as readings of the head."""
    found = model.family.conventions(ROWS[engine])
    return [
        Variant(fact, f"{fact}: {value} for {getattr(model.family, fact)}", facts={fact: value})
        for fact, value in found.items()
    ]


@dataclass(frozen=True, eq=False)
class Ours:
    """The checkpoint in float32, its measurement, and longer texts, so that rounds may be judged beyond the end."""

    model: Model
    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    measured: Measured
    long: tuple[Text, ...]

    @classmethod
    def of(cls, checkpoint: str, prompts: Sequence[tuple[int, ...]], *, tokens: int, drafts: int) -> "Ours":
        model = Model.load(checkpoint, dtype=torch.float32)
        asked = [Prompt(prompt, "all") for prompt in prompts]
        plan = Plan(drafts=drafts, temperatures=(0.0,), max_tokens=tokens, path="plain")
        longer = reference(model, asked, replace(plan, max_tokens=tokens + drafts + 1))
        texts = tuple(replace(text, ended=False) for text in longer.drawn[0.0].texts)
        return cls(model, tuple(prompts), tokens, reference(model, asked, plan), texts)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [text.new for text in self.measured.drawn[0.0].texts]

    def scores(self, readings: Sequence[Variant] = (), *, leads: bool = False) -> list[Scored]:
        """The long texts under a reading of the head. leads: with llama.cpp's column before the first, see LEADS."""
        model, contract = read_as(self.model, Contract(), list(readings))
        texts, hiddens = list(self.long), states(model.trunk, self.long)
        if leads:
            last = [each.eaten[len(text.prompt) + self.tokens - 2] for text, each in zip(texts, hiddens, strict=True)]
            before = [last[-1], *last[:-1]]  # the last prompt was sent once before the first
            texts = [replace(text, prompt=(text.prompt[0], *text.prompt)) for text in texts]
            hiddens = [
                Hidden(torch.cat([each.normed[:1], each.normed]), torch.cat([lead[None], each.eaten]))
                for lead, each in zip(before, hiddens, strict=True)
            ]
        return list(scored(model, texts, hiddens, self.measured.plan.drafts, contract=contract))

    def counts(self, scores: Sequence[Scored], drafts: int, *, overruns: bool) -> list[Counters]:
        """What our decoder counts at K = drafts, per text."""
        return [_walked(each, drafts, self.tokens, overruns=overruns) for each in scores]

    @torch.inference_mode()
    def gap(self, prompt: Sequence[int], text: Sequence[int], theirs: Sequence[int]) -> dict[str, float] | None:
        """Where a text leaves ours, and by how much our trunk prefers its own token; None where it does not."""
        place = next((i for i, pair in enumerate(zip(text, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            return None
        row = torch.tensor([[*prompt, *text[:place]]])
        logits = self.model.trunk.logits(self.model.trunk(row).normed[:, -1])[0]
        return {"place": place, "gap": round((logits[text[place]] - logits[theirs[place]]).item(), 6)}


def _walked(found: Scored, drafts: int, tokens: int, *, overruns: bool) -> Counters:
    """Rounds behind each other through a text of so many tokens. overruns: the last ones are judged in full."""
    given = found.survivals["greedy"].given
    rounds, places, start = 0, [0] * drafts, 0
    while start + 2 < tokens or (overruns and start + 1 < tokens):
        room = drafts if overruns else min(drafts, tokens - start - 2)
        kept = int(given[start, 1 : room + 1].sum())
        rounds += 1
        for depth in range(kept):
            places[depth] += 1
        start += kept + 1
    return Counters("nextn", rounds, None, sum(places), tuple(places))


def compared(ours: Ours, engine: str, plain: Seen, seen: Sequence[Seen]) -> dict[str, object]:
    """The record of one family in one engine; see DEFINITIONS."""
    readings = conventions(ours.model, engine)
    row = ours.scores()
    convention = ours.scores(readings, leads=engine == "llama.cpp") if readings or engine == "llama.cpp" else row
    said = [each.says for each in readings] + [LEADS] * (engine == "llama.cpp")
    return {
        "prompts": len(ours.prompts),
        "tokens": ours.tokens,
        "convention": said,
        "plain": _texts(ours, plain),
        "by_drafts": [_row(ours, engine, each, row, convention) for each in seen],
    }


def _row(ours: Ours, engine: str, seen: Seen, row: Sequence[Scored], convention: Sequence[Scored]) -> dict[str, object]:
    drafts, overruns, texts = seen.drafts, OVERRUNS[engine], ours.texts
    places = [place for place, text in enumerate(seen.texts) if text == texts[place]]
    theirs, by_row, by_convention = (
        [counts[place] for place in places]
        for counts in (seen.counts, *(ours.counts(each, drafts, overruns=overruns) for each in (row, convention)))
    )
    by_text = [counts_of([each], drafts) for each in by_row]
    held = [share(*([row[depth] for row in by_text] for depth in (k, k - 1))) for k in range(1, drafts + 1)]
    rates = rates_of(theirs, drafts)
    return {
        "drafts": drafts,
        **_texts(ours, seen),
        "engine": rates,
        "ours": [each.value for each in held],
        "interval_95": [[each.low, each.high] for each in held],
        "inside": all(_inside(*each) for each in zip(rates, held, strict=True)),
        "measure": [each.value for each in ours.measured.figures(0.0, drafts=drafts).rates],
        "difference": _differences(theirs, by_row, drafts),
        "counts": counts_of(theirs, drafts),
        "row_counts": counts_of(by_row, drafts),
        "same_counts": counts_of(theirs, drafts) == counts_of(by_row, drafts),
        "convention_counts": counts_of(by_convention, drafts),
        "same_under_convention": counts_of(theirs, drafts) == counts_of(by_convention, drafts),
    }


def _inside(rate: float | None, held: Estimate) -> bool:
    """Whether it is in the interval, whose ends at 0 and 1 are rounded."""
    return rate is None or held.low - 1e-9 <= rate <= held.high + 1e-9


def _texts(ours: Ours, seen: Seen) -> dict[str, object]:
    texts = ours.texts
    found = [ours.gap(*each) for each in zip(ours.prompts, texts, seen.texts, strict=True)]
    whole = [len(text) == len(theirs) for text, theirs in zip(texts, seen.texts, strict=True)]
    same = sum(gap is None and full for gap, full in zip(found, whole, strict=True))
    return {"identical": same, "gaps": [gap for gap in found if gap]}


def counts_of(counts: Sequence[Counters], drafts: int) -> list[int]:
    """[rounds, kept at depth 1, ..., kept at depth K]."""
    total = summed(counts)
    if total is None or total.drafts is None:
        raise EngineError("no counts of drafts")
    places = [*total.per_position, *[0] * drafts][:drafts]
    return [total.drafts, *places]


def rates_of(counts: Sequence[Counters], drafts: int) -> list[float | None]:
    """a_1..a_K, None for a depth that was never reached."""
    return [kept / offered if offered else None for offered, kept in pairwise(counts_of(counts, drafts))]


def _differences(theirs: Sequence[Counters], ours: Sequence[Counters], drafts: int) -> list[Mapping[str, float | None]]:
    """Per depth, on the same texts."""

    def at(depth: int, places: Sequence[int]) -> float:
        both = [rates_of([each[place] for place in places], drafts)[depth] for each in (theirs, ours)]
        return math.nan if None in both else both[0] - both[1]

    return [jackknifed(lambda places, depth=depth: at(depth, places), len(ours)).as_record() for depth in range(drafts)]
