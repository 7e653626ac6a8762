"""The published model with the head in the package, in other engines: texts, counts, and what `diagnose` makes of them.

    python bench/published.py prompts.jsonl --engine llama.cpp --engine transformers --engine vllm --out FILE
    python bench/published.py prompts.jsonl --faults --out FILE

Trunk and head are written as one checkpoint for all three engines (`nextn adopt`). With --faults, our
own decoder and llama.cpp run the intact head, then a faulty one, llama.cpp where the fault is in the files; each trial
diagnoses the counts of another half of the prompts. Prompts are asked through the chat template
(`examples/smollm2/humaneval.py` writes HumanEval's).
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engine_faults import PLANTED, plant
from engines import environments
from engines.referee import Ours, compared
from engines.serving import Bench
from engines.starting import Starter

from nextn.checkpoint.checkpoint import SHIPPED_HEAD
from nextn.checkpoint.safetensors_file import write_json
from nextn.decoding.generate import generate
from nextn.edit.adopt import adopt
from nextn.edit.published_model import smollm2
from nextn.engines.counters import Counters, sum_counters
from nextn.evaluate.conventions import apply_variants
from nextn.evaluate.decoding_costs import processor_name
from nextn.evaluate.diagnose import Diagnosis, ObservedCase
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.faults import FAULTS, Fault, expectations, fault_variant
from nextn.evaluate.hypotheses import ExpectedCounts, observed_counts
from nextn.evaluate.likelihoods import NO_FAULT
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.workload import Prompt, ReferencePlan, read_prompts
from nextn.model.model import Model
from nextn.settings import Contract, Sampling, Settings

CONTEXT, K = 512, 3
SIMULATED = (
    "inputs-swapped",
    "norm-offset-missing",
    "wrong-hidden",
    "no-prefill",
    "pairs-off-by-one",
    "head-quantized",
)
SERVED = {"swapped": "inputs-swapped", "shifted": "norm-offset-missing"}  # of PLANTED, in the files
Ids = Sequence[tuple[int, ...]]


def engines(args: argparse.Namespace, checkpoint: Path, ids: Ids, bench: Bench) -> dict[str, Any]:
    """Compare each engine with our decoder, as `make test-engines` does on tiny checkpoints."""
    ours = Ours.of(str(checkpoint), ids, tokens=args.tokens, num_speculative_tokens=K)
    found: dict[str, Any] = {}
    for engine in args.engine:
        k_values = (1,) if engine == "transformers" else (1, K)
        served = bench.served(engine, checkpoint, ids, k_values, args.tokens)
        record = compared(ours, engine, served.plain, served.seen)
        found[engine] = {"date": date.today().isoformat(), "versions": served.versions, "flags": served.flags, **record}
        for row in (record["plain"], *record["by_drafts"]):
            print(
                engine,
                {key: row[key] for key in row if key in ("drafts", "identical", "gaps", "same_under_convention")},
            )
    return found


def decoded(model: Model, fault: Fault | None, ids: Ids, tokens: int) -> list[Counters]:
    """Return what our decoder counts of each prompt under a fault, greedily."""
    contract = Contract(**(fault.contract if fault else {}))  # type: ignore[arg-type]
    variant = fault_variant(fault, model) if fault else None
    if variant is not None:
        model, contract = apply_variants(model, contract, [variant])
    settings = Settings(num_speculative_tokens=K, sampling=Sampling(0.0), max_tokens=tokens, contract=contract)
    results = generate(model, ids, settings, backend="torch")
    return [
        Counters(
            "nextn",
            each.acceptance.num_rounds,
            sum(each.acceptance.num_drafted),
            sum(each.acceptance.num_accepted),
            per_position=each.acceptance.num_accepted,
            per_position_offered=each.acceptance.num_drafted,
        )
        for each in results
    ]


class Trials:
    """Diagnoses of halves of the prompts, by expectations that are computed once."""

    def __init__(self, model: Model, ids: Ids, tokens: int) -> None:
        self.plan = ReferencePlan(K, (0.0,), tokens, backend="torch")
        self.reference: ReferenceReport = reference_acceptance(model, [Prompt(each, "all") for each in ids], self.plan)
        self.expected: Sequence[ExpectedCounts] = expectations(self.reference, model)[0.0]

    def named(self, counts: Sequence[Counters], seed: int) -> tuple[str, ...]:
        indices = tuple(sorted(random.Random(seed).sample(range(len(counts)), len(counts) // 2)))
        total = sum_counters(counts[index] for index in indices)
        assert total is not None
        expected = tuple(each.select(indices) for each in self.expected)
        case = ObservedCase(
            EngineObservation(0.0, total, prompt_indices=indices), observed_counts(total, K), expected, 0.0, 0
        )
        return Diagnosis("", self.reference, (case,)).named

    def record(self, counts: Sequence[Counters], repeats: int) -> dict[str, Any]:
        names = Counter(" or ".join(sorted(self.named(counts, seed))) or "nothing known" for seed in range(repeats))
        total = sum_counters(counts)
        assert total is not None
        return {"counts": [total.num_drafts, *total.per_position], "named": dict(names.most_common())}


def faults(args: argparse.Namespace, checkpoint: Path, ids: Ids, bench: Bench) -> dict[str, Any]:
    """Diagnose the intact head and faulty ones, in our decoder and in llama.cpp."""
    model = Model.load(checkpoint, dtype=torch.float32)
    trials = Trials(model, ids, args.tokens)
    rows: dict[str, Any] = {}

    def note(name: str, counts: Sequence[Counters]) -> None:
        rows[name] = trials.record(counts, args.trials)
        print(name, rows[name], flush=True)

    for each in (None, *(each for each in FAULTS if each.name in SIMULATED)):
        note(f"{each.name if each else NO_FAULT} nextn", decoded(model, each, ids, args.tokens))
    for name, cause in {"": NO_FAULT, **SERVED}.items():
        folder = bench.folder / name if name else checkpoint
        if name:
            plant(next(each for each in PLANTED if each.name == name), checkpoint, folder, other=checkpoint)
        note(f"{cause} llama.cpp", bench.served("llama.cpp", folder, ids, (K,), args.tokens).seen[0].counts)
    return rows


def stored(path: Path | None) -> Mapping[str, Any]:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--engine", action="append", default=[], choices=("llama.cpp", "transformers", "vllm"))
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--trials", type=int, default=25, help="of each fault, and of the intact head")
    parser.add_argument("--engines", type=Path, default=environments.default_folder(), help="where they are built")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Starter(args.engines, args.threads), Path(folder), CONTEXT)
        checkpoint = Path(folder) / "smollm2"
        adopt(smollm2(), checkpoint, head=SHIPPED_HEAD)
        model = Model.load(checkpoint, need_head=False, skip_head=True)
        prompts = read_prompts(args.prompts)
        prompts = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
        ids = [each.tokens(model, chat=True) for each in prompts]
        record = {
            "model": "SmolLM2-135M-Instruct",
            "machine": processor_name(),
            "prompts": len(ids),
            "tokens": args.tokens,
            "engines": {},
            **stored(args.out),
        }
        try:
            record["engines"] |= engines(args, checkpoint, ids, bench) if args.engine else {}
            if args.faults:
                record["diagnose"] = {"date": date.today().isoformat(), "rows": faults(args, checkpoint, ids, bench)}
        finally:
            bench.close()
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()
