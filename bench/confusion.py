"""Planted cause x named cause: how often `diagnose` names what is wrong with an engine, by its counters alone.

The planted engine is the decoder itself with a fault in it, at temperatures 0 and 1, on prompts that the reference has
not seen. Each trained fixture is tried under every fault that its head can have, several times. A fault that so many
rounds cannot tell from another one on this head (said before it is tried) counts by itself.

    python bench/confusion.py --out bench/results/confusion.json
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import FIXTURES, forked, refrain

from nextn.benchmarking.workload import Prompt
from nextn.checkpoints.tensor_file import write_json
from nextn.decode import Round, Settings
from nextn.drafting import Contract
from nextn.figures.acceptance import Acceptance
from nextn.measuring.causes import FINE, alike, joined, named, ranked
from nextn.measuring.columns import Text, scored, states
from nextn.measuring.faults import FAULTS, Fault, planted
from nextn.measuring.hypotheses import Expected, Observed
from nextn.measuring.measure import Plan, reference
from nextn.measuring.suspects import expectations
from nextn.measuring.variants import read_as
from nextn.model import Model
from nextn.sampling import Sampling
from nextn.text import generate

TEMPERATURES = (0.0, 1.0)
RULE = "ratio"  # that of the engine that is right
BATCH = 50
REFERENCE_SEED, ENGINE_SEED = 10**6, 2 * 10**6


@dataclass(frozen=True)
class Trial:
    """One planted engine. named: what diagnose said. alike: what so many rounds cannot tell from the planted cause."""

    fixture: str
    planted: str
    named: tuple[str, ...]
    alike: tuple[str, ...]
    length: tuple[float, ...]

    @property
    def outcome(self) -> str:
        """right: this cause alone. group: this cause or one that looks the same. wrong: anything else."""
        if self.named == (self.planted,):
            return "right"
        same = {self.planted, *self.alike}
        return "group" if self.named and set(self.named) <= same else "wrong"


def prompts(fixture: str, count: int, *, seed: int) -> list[tuple[int, ...]]:
    """33 tokens each of the language that the fixture speaks."""
    language = forked if fixture.endswith("_fork") else refrain
    return [tuple(row.tolist()) for row in language(count, 33, seed=seed)]


def engine(
    model: Model, fault: Fault | None, ids: Sequence[tuple[int, ...]], plan: Plan, *, seed: int
) -> Iterator[Observed]:
    """What the decoder counts under the fault, at each temperature."""
    contract = Contract(**(fault.contract if fault else {}))  # type: ignore[arg-type]
    reading = planted(fault, model) if fault else None
    if reading is not None:
        model, contract = read_as(model, contract, [reading])
    rule = fault.rule if fault else ""
    for temperature in TEMPERATURES:
        settings = Settings(
            drafts=plan.drafts,
            sampling=Sampling(temperature),
            sampled_drafts=rule != "argmax",
            block=False,
            max_tokens=plan.max_tokens,
            seed=seed,
            contract=contract,
        )
        found = [
            each
            for start in range(0, len(ids), BATCH)
            for each in generate(model, ids[start : start + BATCH], settings, path="plain")
        ]
        if temperature and rule == "match":
            texts = [
                Text(prompt, each.tokens, temperature, each.finish == "eos")
                for prompt, each in zip(ids, found, strict=True)
            ]
            yield matched(model, texts, plan.drafts, seed=seed)
        else:
            total = Acceptance.of(Round((part,), 0.0, 0.0) for each in found for part in each.rounds)
            yield Observed(total.offered, total.kept)


def matched(model: Model, texts: Sequence[Text], drafts: int, *, seed: int) -> Observed:
    """Rounds by rule `match`, which the decoder does not have: walked over the texts, each round's end drawn from the
    law that it has, given the text."""
    generator = torch.Generator().manual_seed(seed)
    offered, kept = [0] * drafts, [0] * drafts
    for each in scored(model, texts, states(model.trunk, texts), drafts):
        given, start = each.survivals["match"].given, 0
        while start < len(each.rooms):
            room = min(drafts, each.rooms[start])
            chance = float(torch.rand((), generator=generator))
            stood = int((given[start, 1 : room + 1] > chance).sum())
            for depth in range(room):
                offered[depth] += stood >= depth
                kept[depth] += stood > depth
            start += stood + 1
    return Observed(tuple(offered), tuple(kept))


def trials(fixture: str, plan: Plan, *, count: int, repeats: int) -> Iterator[Trial]:
    """Every fault planted, `repeats` times, on `count` prompts of its own each."""
    model = Model.load(FIXTURES / fixture, dtype=torch.float32)
    asked = [Prompt(each, "all") for each in prompts(fixture, count, seed=REFERENCE_SEED)]
    expected = expectations(reference(model, asked, plan), model)
    known = {each.name for each in expected[0.0]}
    for fault in (None, *FAULTS):
        name = fault.name if fault else FINE
        for repeat in range(repeats if name in known else 0):
            ids = prompts(fixture, count, seed=ENGINE_SEED + repeat)
            seen = list(engine(model, fault, ids, plan, seed=1000 * (repeat + 1)))
            yield judged(fixture, name, list(zip(seen, expected.values(), strict=True)))


def judged(fixture: str, name: str, cases: Sequence[tuple[Observed, Sequence[Expected]]]) -> Trial:
    """What diagnose makes of it, with the same prompts' kind on both sides and both temperatures together."""
    causes = joined([ranked(*case) for case in cases])
    lengths = tuple(1 + sum(seen.kept) / max(1, seen.offered[0]) for seen, _ in cases)
    return Trial(fixture, name, named(causes), alike(name, *cases), lengths)


def table(found: Sequence[Trial]) -> str:
    """Planted in rows; what was named, how often."""
    lines = []
    for fixture in dict.fromkeys(each.fixture for each in found):
        lines.append(f"{fixture}: planted -> named")
        for name in dict.fromkeys(each.planted for each in found if each.fixture == fixture):
            here = [each for each in found if (each.fixture, each.planted) == (fixture, name)]
            said = Counter(" or ".join(each.named) or "nothing known" for each in here)
            marks = Counter(each.outcome for each in here)
            like = f"   (cannot be told here from {', '.join(here[0].alike)})" if here[0].alike else ""
            told = "; ".join(f"{count} x {names}" for names, count in said.most_common())
            lines.append(f"  {name:17} {dict(marks)!s:14} {told}{like}")
    return "\n".join(lines)


def summary(found: Sequence[Trial]) -> dict[str, object]:
    """Shares over the trials of faults that can be told apart, and of those that cannot."""
    apart = [each for each in found if not each.alike]
    joint = [each for each in found if each.alike]
    return {
        "trials": len(found),
        "can_be_told": len(apart),
        "right": sum(each.outcome == "right" for each in apart),
        "diagonal": sum(each.outcome == "right" for each in apart) / max(1, len(apart)),
        "cannot_be_told": len(joint),
        "right_group": sum(each.outcome != "wrong" for each in joint),
        "faults_told_on_some_fixture": sorted({each.planted for each in apart}),
        "faults_told_on_none": sorted({each.planted for each in joint} - {each.planted for each in apart}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", nargs="*", default=["glm_fork", "step_fork", "qwen"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, found = time.process_time(), []
    plan = Plan(args.drafts, TEMPERATURES, args.max_tokens, chat=False, path="plain", rule=RULE)
    for fixture in args.fixtures:
        here = list(trials(fixture, plan, count=args.prompts, repeats=args.repeats))
        print(table(here), flush=True)
        found += here
    record = summary(found)
    print("\n".join(f"{name}: {value}" for name, value in record.items()))
    if args.out is not None:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        rows = [vars(each) | {"outcome": each.outcome} for each in found]
        cpu = {"cpu_s": round(time.process_time() - started)}
        write_json(args.out, {"settings": settings, "summary": record, "trials": rows} | cpu)


if __name__ == "__main__":
    main()
