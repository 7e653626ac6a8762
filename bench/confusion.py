"""Confusion matrix of `diagnose`: how often it names the injected fault of an engine, by its counters alone.

The faulty engine is the decoder itself with an injected fault, at temperatures 0 and 1, on prompts that the reference
does not hold. Each trained fixture is tried under every fault that its head can have, several times. A fault that so
many rounds cannot tell from another one on this head (computed beforehand) is counted separately.

    python bench/confusion.py --out bench/results/confusion.json
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from record import write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import FIXTURES, forked, refrain

from nextn.decoding.generate import generate
from nextn.decoding.records import Round
from nextn.evaluate.conventions import apply_variants
from nextn.evaluate.faults import FAULTS, Fault, expectations, fault_variant
from nextn.evaluate.hypotheses import ObservedCounts
from nextn.evaluate.likelihoods import (
    NO_FAULT,
    Evidence,
    combine_causes,
    indistinguishable_from,
    name_causes,
    rank_causes,
)
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.teacher_forced import ReferenceText, score_texts, trunk_outputs
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.model import Model
from nextn.settings import Contract, Sampling, Settings
from nextn.stats.acceptance import Acceptance

TEMPERATURES = (0.0, 1.0)
RULE = "ratio"  # of the engine without a fault
BATCH = 50
REFERENCE_SEED, ENGINE_SEED = 10**6, 2 * 10**6


@dataclass(frozen=True)
class Trial:
    """One faulty engine; the fields are those of the JSON record.

    Attributes:
        planted: The injected fault.
        named: The causes that diagnose named.
        alike: What this many rounds cannot tell from the injected fault.
        length: AL by temperature.
    """

    fixture: str
    planted: str
    named: tuple[str, ...]
    alike: tuple[str, ...]
    length: tuple[float, ...]

    @property
    def outcome(self) -> str:
        """right: this cause alone; group: this cause or an indistinguishable one; wrong: anything else."""
        if self.named == (self.planted,):
            return "right"
        same = {self.planted, *self.alike}
        return "group" if self.named and set(self.named) <= same else "wrong"


def prompts(fixture: str, count: int, *, seed: int) -> list[tuple[int, ...]]:
    """Return prompts of 33 tokens in the language that the fixture was trained on."""
    language = forked if fixture.endswith("_fork") else refrain
    return [tuple(row.tolist()) for row in language(count, 33, seed=seed)]


def engine(
    model: Model, fault: Fault | None, ids: Sequence[tuple[int, ...]], plan: ReferencePlan, *, seed: int
) -> Iterator[ObservedCounts]:
    """Yield what the decoder counts under the fault, at each temperature."""
    contract = Contract(**(fault.contract if fault else {}))  # type: ignore[arg-type]
    variant = fault_variant(fault, model) if fault else None
    if variant is not None:
        model, contract = apply_variants(model, contract, [variant])
    rule = fault.rule if fault else ""
    for temperature in TEMPERATURES:
        settings = Settings(
            num_speculative_tokens=plan.num_speculative_tokens,
            sampling=Sampling(temperature),
            sampled_drafts=rule != "argmax",
            block_verification=False,
            max_tokens=plan.max_tokens,
            seed=seed,
            contract=contract,
        )
        results = [
            each
            for start in range(0, len(ids), BATCH)
            for each in generate(model, ids[start : start + BATCH], settings, backend="torch")
        ]
        if temperature and rule == "match":
            texts = [
                ReferenceText(prompt, each.tokens, temperature, each.finish == "eos")
                for prompt, each in zip(ids, results, strict=True)
            ]
            yield matched(model, texts, plan.num_speculative_tokens, seed=seed)
        else:
            total = Acceptance.of(Round((part,), 0.0, 0.0) for each in results for part in each.rounds)
            yield ObservedCounts(total.num_drafted, total.num_accepted)


def matched(model: Model, texts: Sequence[ReferenceText], k: int, *, seed: int) -> ObservedCounts:
    """Count rounds by rule `match`, which the decoder does not implement.

    Rounds follow each other through the texts; the length of each is sampled from its distribution given the text.
    """
    generator = torch.Generator().manual_seed(seed)
    num_drafted, num_accepted = [0] * k, [0] * k
    for each in score_texts(model, texts, trunk_outputs(model.trunk, texts), k):
        given, start = each.survivals["match"].given, 0
        while start < len(each.remaining):
            limit = min(k, each.remaining[start])
            u = float(torch.rand((), generator=generator))
            accepted = int((given[start, 1 : limit + 1] > u).sum())
            for depth in range(limit):
                num_drafted[depth] += accepted >= depth
                num_accepted[depth] += accepted > depth
            start += accepted + 1
    return ObservedCounts(tuple(num_drafted), tuple(num_accepted))


def trials(fixture: str, plan: ReferencePlan, *, count: int, repeats: int) -> Iterator[Trial]:
    """Inject every fault `repeats` times, each time on `count` other prompts."""
    model = Model.load(FIXTURES / fixture, dtype=torch.float32)
    reference_prompts = [Prompt(each, "all") for each in prompts(fixture, count, seed=REFERENCE_SEED)]
    expected = expectations(reference_acceptance(model, reference_prompts, plan), model)
    known = {each.name for each in expected[0.0]}
    for fault in (None, *FAULTS):
        name = fault.name if fault else NO_FAULT
        for repeat in range(repeats if name in known else 0):
            ids = prompts(fixture, count, seed=ENGINE_SEED + repeat)
            observed = list(engine(model, fault, ids, plan, seed=1000 * (repeat + 1)))
            yield diagnosed(fixture, name, list(map(Evidence, observed, expected.values())))


def diagnosed(fixture: str, name: str, cases: Sequence[Evidence]) -> Trial:
    """Diagnose both temperatures together; the prompts of both sides are of one kind."""
    causes = combine_causes([rank_causes(case) for case in cases])
    lengths = tuple(1 + sum(counts.num_accepted) / max(1, counts.num_drafted[0]) for counts, *_ in cases)
    return Trial(fixture, name, name_causes(causes), indistinguishable_from(name, *cases), lengths)


def table(trials: Sequence[Trial]) -> str:
    """Render one line per injected fault, with what was named how often."""
    lines = []
    for fixture in dict.fromkeys(each.fixture for each in trials):
        lines.append(f"{fixture}: injected -> named")
        for name in dict.fromkeys(each.planted for each in trials if each.fixture == fixture):
            here = [each for each in trials if (each.fixture, each.planted) == (fixture, name)]
            names = Counter(" or ".join(each.named) or "nothing known" for each in here)
            outcomes = Counter(each.outcome for each in here)
            like = f"   (cannot be told here from {', '.join(here[0].alike)})" if here[0].alike else ""
            counted = "; ".join(f"{count} x {causes}" for causes, count in names.most_common())
            lines.append(f"  {name:17} {dict(outcomes)!s:14} {counted}{like}")
    return "\n".join(lines)


def summary(trials: Sequence[Trial]) -> dict[str, object]:
    """Count the outcomes of faults that can be told apart, and of those that cannot."""
    distinct = [each for each in trials if not each.alike]
    ambiguous = [each for each in trials if each.alike]
    return {
        "trials": len(trials),
        "can_be_told": len(distinct),
        "right": sum(each.outcome == "right" for each in distinct),
        "diagonal": sum(each.outcome == "right" for each in distinct) / max(1, len(distinct)),
        "cannot_be_told": len(ambiguous),
        "right_group": sum(each.outcome != "wrong" for each in ambiguous),
        "faults_told_on_some_fixture": sorted({each.planted for each in distinct}),
        "faults_told_on_none": sorted({each.planted for each in ambiguous} - {each.planted for each in distinct}),
    }


def stored(path: Path | None, fixtures: Sequence[str]) -> list[Trial]:
    """Return the trials of other fixtures in the file, as each fixture may be run alone."""
    rows = json.loads(path.read_text())["trials"] if path is not None and path.exists() else []
    fields = ("fixture", "planted", "named", "alike", "length")
    trials = [Trial(*(tuple(row[name]) if name not in fields[:2] else row[name] for name in fields)) for row in rows]
    return [each for each in trials if each.fixture not in fixtures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", nargs="*", default=["glm_fork", "glm", "step"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--num-speculative-tokens", "-k", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, results = time.process_time(), list[Trial]()
    plan = ReferencePlan(
        args.num_speculative_tokens, TEMPERATURES, args.max_tokens, chat=False, backend="torch", rule=RULE
    )
    for fixture in args.fixtures:
        here = list(trials(fixture, plan, count=args.prompts, repeats=args.repeats))
        print(table(here), flush=True)
        results += here
    results += stored(args.out, args.fixtures)
    record = summary(results)
    print("\n".join(f"{name}: {value}" for name, value in record.items()))
    print(f"{time.process_time() - started:.0f} s of one core")
    others = {name: value for name, value in vars(args).items() if name not in ("out", "fixtures")}
    settings = {"drafts": others.pop("num_speculative_tokens")} | others
    rows = [vars(each) | {"outcome": each.outcome} for each in results]
    write_record(args.out, {"settings": settings, "summary": record, "trials": rows})


if __name__ == "__main__":
    main()
