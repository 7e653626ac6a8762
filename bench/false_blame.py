"""How often `measure --probe` blames a convention that is not at fault, and how often it finds one that is.

Heads without a wrong convention: sound, damaged (noise, few bits, a copied block, shuffled rows, a norm of zeros),
trained for a few steps, or of a trunk that was trained on. Naming any convention for them is a false blame. Heads with
one wrong convention: each variant of each sound head that costs drafts, injected; the probe has to name the variant
that undoes it.

The heads are the trained fixtures of the tests and canaries, which are trained into --work (about five minutes).

    python bench/false_blame.py --work runs/canaries --out bench/results/false-blame.json
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from record import write_record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from damaged_heads import DAMAGES, Language, damaged, stale, undertrained
from tiny import FIXTURES, forked, refrain

from nextn.conformance.build import build
from nextn.conformance.canary_model import SHAPES, prompts, text
from nextn.evaluate.conventions import apply_variants, variants
from nextn.evaluate.probe import RULES, ProbeReport, probe
from nextn.evaluate.reference_texts import generate_texts
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.evaluate.workload import ReferencePlan
from nextn.model.model import Model
from nextn.settings import Contract

K, NUM_PROMPTS, MAX_TOKENS = 3, 16, 24
UNDERTRAINED, STALE = (0, 5, 20, 50, 100), (5, 20, 60)  # training steps
RANDOM = ("noise", "shuffled", "zeroed")  # damages that depend on the seed
MIN_COST = 0.02  # accepted drafts per position that an injected fault has to cost, to count as one
IRREVERSIBLE = ("own:", "order:first", "order:one", "offset:+1")


@dataclass(frozen=True)
class Trial:
    """One probe; the fields are those of the JSON record.

    Attributes:
        expected: The variant that undoes the injected fault; "" for heads without one.
        cost: Accepted drafts per position that the fault costs, by the rule that shows more.
        rule: The rule that decided, by which the other figures are.
        best: The convention with the fewest changes that the best score does not beat.
        named: The convention that the probe names.
        before, after: Gains of controls.
        rate, perfect_rate: a_1 with best, and of a perfect head.
    """

    head: str
    condition: str
    expected: str
    cost: float
    outcome: str
    rule: str
    best: tuple[str, ...]
    named: tuple[str, ...]
    base_score: float
    best_score: float
    before: float
    after: float
    rate: float
    perfect_rate: float


class Head:
    """A sound head with its texts and the language that it was trained on."""

    def __init__(self, name: str, folder: Path, *, pairs: bool) -> None:
        self.name, self.model, self.pairs = name, Model.load(folder, dtype=torch.float32), pairs
        self.is_canary = folder.parent != FIXTURES
        self.texts = self.texts_of(self.model)

    def language(self, seed: int) -> Tensor:
        """Return [32, 64] tokens."""
        if self.is_canary:
            return torch.tensor([list(text(64, seed=(seed, 0, row)).encode()) for row in range(32)])
        return (forked if self.name.endswith("_fork") else refrain)(32, 64, seed=seed)

    def other_language(self, seed: int) -> Tensor:
        """Return tokens of a similar language, for a trunk that is trained on."""
        return self.language(seed).flip(1) if self.is_canary else forked(32, 64, seed=seed, other=0.15)

    def texts_of(self, model: Model) -> Sequence[ReferenceText]:
        """Return sampled continuations of this language's prompts."""
        ids = [row[:33].tolist() for row in self.language(10**6)[:NUM_PROMPTS]]
        if self.is_canary:
            ids = [list(each.encode()) for each in prompts(NUM_PROMPTS, seed=77)]
        plan = ReferencePlan(K, max_tokens=MAX_TOKENS, backend="torch")
        return generate_texts(model, ids, plan, 1.0).texts


def sound_conventions(head: Head, seeds: int) -> Iterator[Trial]:
    """Probe heads without a wrong convention."""
    yield trial(head, "sound", head.model, head.texts)
    for damage in DAMAGES:
        for seed in range(seeds if damage.startswith(RANDOM) else 1):
            yield trial(head, f"{damage}, seed {seed}", damaged(head.model, damage, seed), head.texts)
    language: Language = head.language
    for steps, model in undertrained(head.model, language, UNDERTRAINED, depths=2):
        yield trial(head, f"undertrained, {steps} steps", model, head.texts)
    for steps in STALE:
        model = stale(head.model, head.other_language, steps)
        yield trial(head, f"stale, {steps} steps", model, head.texts_of(model))


def wrong_conventions(head: Head) -> Iterator[Trial]:
    """Inject every reversible variant of the sound head that costs drafts."""
    sound = probe(head.model, head.texts, K, pairs=False)
    costs = {
        score.keys[0]: -min(sound.gain(score, sound.base, rule).value for rule in RULES) for score in sound.alternatives
    }
    for variant in variants(head.model, Contract()):
        if costs[variant.key] >= MIN_COST and not variant.key.startswith(IRREVERSIBLE):
            model, contract = apply_variants(head.model, Contract(), [variant])
            yield trial(
                head, f"fault {variant.key}", model, head.texts, contract, undo(variant.key), costs[variant.key]
            )


def undo(key: str) -> str:
    """Return the key of the variant that undoes another one."""
    axis, _, value = key.rpartition(":")
    if axis.startswith("norm-weight"):
        return f"{axis}:{-int(value):+d}"
    if axis == "order":
        order = [int(index) - 1 for index in value.split("-")]
        return "order:" + "-".join(str(order.index(index) + 1) for index in range(len(order)))
    return "offset:+0" if axis == "offset" else key


def trial(
    head: Head,
    condition: str,
    model: Model,
    texts: Sequence[ReferenceText],
    contract: Contract | None = None,
    expected: str = "",
    cost: float = 0.0,
) -> Trial:
    report: ProbeReport = probe(model, texts, K, contract=contract, pairs=head.pairs)
    rule, best = report.rule, report.best(report.rule)
    scores = report.base.accepted_per_position(rule), best.accepted_per_position(rule), *report.control_gains(rule)
    rates = best.rates[0], report.perfect_rate
    result = Trial(
        head.name, condition, expected, round(cost, 3), report.outcome, rule, best.keys, report.preferred.keys,
        *(round(figure, 4) for figure in (*scores, *rates)),
    )  # fmt: skip
    print(json.dumps(asdict(result)), flush=True)
    return result


def summary(trials: Sequence[Trial]) -> dict[str, object]:
    """Count false blames and faults found, with controls and by the gain alone."""
    sound = [each for each in trials if not each.expected]
    faulty = [each for each in trials if each.expected]

    def counts(faults: Sequence[Trial]) -> dict[str, int]:
        return {"faults": len(faults), "found": sum(each.named == (each.expected,) for each in faults)}

    return {
        "heads_without_fault": len(sound),
        "false_blames": sum(bool(each.named) for each in sound),
        "all_faults": counts(faulty),
        "faults_that_cost_0.1_or_more": counts([each for each in faulty if each.cost >= 0.1]),
    }


def stored(path: Path | None, new: Sequence[Trial]) -> list[Trial]:
    """Return the trials in the file that this run did not repeat: heads and kinds of trials may be run one by one."""
    rows = json.loads(path.read_text())["trials"] if path is not None and path.exists() else []
    trials = [Trial(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
              for row in rows]  # fmt: skip
    repeated = {(each.head, bool(each.expected)) for each in new}
    return [each for each in trials if (each.head, bool(each.expected)) not in repeated]


def canary(work: Path, family: str) -> Path:
    """Return the folder of a family's canary, trained if it is not there."""
    folder = work / family
    if not folder.exists():
        build(folder, family)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the canaries")
    parser.add_argument("--seeds", type=int, default=3, help="of each random damage")
    parser.add_argument("--heads", nargs="*", default=[], help="only these fixtures and families")
    parser.add_argument("--conventions", nargs="*", choices=("right", "wrong"), default=("right", "wrong"))
    parser.add_argument("--pairs", action="store_true", help="also try pairs of changes, as `measure --probe` does")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trials: list[Trial] = []
    for name in args.heads or [*sorted(folder.name for folder in FIXTURES.iterdir()), *SHAPES]:
        folder = canary(args.work, name) if name in SHAPES else FIXTURES / name
        head = Head(name, folder, pairs=args.pairs)
        trials += sound_conventions(head, args.seeds) if "right" in args.conventions else []
        trials += wrong_conventions(head) if "wrong" in args.conventions else []
    trials += stored(args.out, trials)
    record = summary(trials)
    print(json.dumps(record, indent=2))
    header = {
        "drafts": K, "prompts": NUM_PROMPTS, "max_tokens": MAX_TOKENS, "seeds": args.seeds, "pairs": args.pairs,
    }  # fmt: skip
    write_record(args.out, {**header, "summary": record, "trials": [asdict(each) for each in trials]})


if __name__ == "__main__":
    main()
