"""The published model with the head in the package, in other engines: texts, counts, and what `diagnose` makes of them.

    python bench/published.py prompts.jsonl --engine llama.cpp --engine transformers --engine vllm --out FILE
    python bench/published.py prompts.jsonl --faults nextn --faults llama.cpp --out FILE

Trunk and head are written as one checkpoint for all three engines (`nextn adopt`), or in the form that `nextn export`
writes for each. For that the head's weights are put into the layouts mimo and step35; in the first it computes the
same, in the second it gets another hidden state, so that less is accepted. With --faults, our own decoder and llama.cpp
run the intact head, then a faulty one, llama.cpp where the fault is in the files; each trial diagnoses the counts of
another half of the prompts. Prompts are asked through the chat template (`examples/smollm2/humaneval.py` writes
HumanEval's).
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import origin, write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engine_faults import INJECTED, plant
from engines import environments
from engines.referee import Ours, compared
from engines.serving import Bench
from engines.starting import Starter

from nextn.checkpoint.checkpoint import SHIPPED_HEAD, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.decoding.generate import generate
from nextn.edit.adopt import adopt
from nextn.edit.export import export
from nextn.edit.published_model import smollm2
from nextn.engines.counters import Counters, sum_counters
from nextn.evaluate.conventions import apply_variants
from nextn.evaluate.diagnose import Diagnosis
from nextn.evaluate.engine_run import EngineObservation
from nextn.evaluate.faults import FAULTS, Fault, expectations, fault_variant
from nextn.evaluate.hypotheses import ExpectedCounts, observed_counts
from nextn.evaluate.likelihoods import NO_FAULT
from nextn.evaluate.observed_case import ObservedCase
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.workload import Prompt, ReferencePlan, read_prompts
from nextn.family_table import by_name, fitted
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.settings import Contract, Sampling, Settings
from nextn.train.head_files import HEAD_FILE, write_standalone_head
from nextn.train.head_run import LAYOUTS

CONTEXT, K = 512, 3
# The checkpoint of `nextn adopt`, or a form of `nextn export`.
ENGINES = ("llama.cpp", "transformers", "vllm", "llama.cpp step35", "transformers own", "vllm mimo")
SIMULATED = (
    "inputs-swapped",
    "norm-offset-missing",
    "wrong-hidden",
    "no-prefill",
    "pairs-off-by-one",
    "head-quantized",
)
CAUSES = {"swapped": "inputs-swapped", "shifted": "norm-offset-missing"}  # of PLANTED
Ids = Sequence[tuple[int, ...]]


# In the files; `cause` is what they are called in the record.
SERVED = [replace(each, cause=CAUSES[each.name]) for each in INJECTED if each.name in CAUSES]


def relaid(trunk: Path, layout: str, folder: Path) -> Path:
    """Write the head in the package in another layout, in float32."""
    model = Model.load(trunk, head=SHIPPED_HEAD)
    assert model.head is not None
    tensors = {name: value.clone() for name, value in model.head.named_parameters()}
    model.family = fitted(by_name(LAYOUTS[layout]), Checkpoint.open(trunk).config)
    head = Head(model.family, model.trunk)
    with torch.no_grad():
        for name, value in head.named_parameters():
            value.copy_(tensors.get(name, torch.zeros_like(value)))  # the biases are new
            if "projection" in name and model.family.concat == "hidden_first":
                value.copy_(torch.cat(value.chunk(2, dim=1)[::-1], dim=1))
            if "hidden_norm" in name and model.family.hidden == "pre":
                value.mul_(model.trunk.final_norm.weight)
    origin = Inventory.of(Checkpoint.open(trunk), family=model.family)
    write_standalone_head(origin, head, folder / HEAD_FILE, dtype=torch.float32, source="")
    return folder


def form(name: str, adopted: Path, folder: Path) -> tuple[Path, Path | None, dict[str, Any]]:
    """Return what serves as `name`: the checkpoint, the head beside it, and options of the worker."""
    engine, _, layout = name.partition(" ")
    if not layout:
        return adopted, None, {}
    # llama.cpp multiplies weights of bfloat16 by inputs that it rounds to them.
    trunk, out = smollm2("float32" if engine == "llama.cpp" else "bfloat16"), folder / layout
    head = relaid(trunk, layout, folder / f"{layout}-head") if layout in LAYOUTS else SHIPPED_HEAD
    made = export(head, out if engine != "llama.cpp" else folder / f"{layout}.gguf", engine, trunk=trunk)
    if engine == "llama.cpp":
        return trunk, head, {"gguf": made.path}
    if engine == "transformers":
        return made.path, None, {}
    return trunk, made.path, {"draft": str(made.path), "overrides": {"num_nextn_predict_layers": 1}}


def engines(args: argparse.Namespace, adopted: Path, ids: Ids, bench: Bench) -> dict[str, Any]:
    """Compare each engine with our decoder, as `make test-engines` does on tiny checkpoints."""
    found: dict[str, Any] = {}
    for name in args.engine:
        engine = name.partition(" ")[0]
        checkpoint, head, options = form(name, adopted, bench.folder)
        ours = Ours.of(str(checkpoint), ids, tokens=args.tokens, num_speculative_tokens=K, head=head)
        k_values = (1,) if engine == "transformers" else (1, K)
        served = bench.served(engine, checkpoint, ids, k_values, args.tokens, **options)
        record = compared(ours, engine, served.plain, served.seen)
        flags = json.loads(json.dumps(served.flags).replace(f"{bench.folder}/", ""))
        about = {**origin(), "versions": served.versions}
        found[name] = {**about, "flags": flags, **record}
        shown = ("drafts", "identical", "gaps", "engine", "counts", "row_counts", "same_under_convention")
        for row in (record["plain"], *record["by_drafts"]):
            print(name, {key: row[key] for key in row if key in shown}, flush=True)
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


def faults(args: argparse.Namespace, adopted: Path, ids: Ids, bench: Bench) -> dict[str, Any]:
    """Diagnose the intact head and faulty ones, in our decoder and in engines."""
    rows: dict[str, Any] = {}

    def note(name: str, trials: Trials, counts: Sequence[Counters]) -> None:
        rows[name] = trials.record(counts, args.trials)
        print(name, rows[name], flush=True)

    for name in args.faults:
        engine = name.partition(" ")[0]
        checkpoint, head, options = (adopted, None, {}) if name == "nextn" else form(name, adopted, bench.folder)
        model = Model.load(checkpoint, head=head, dtype=torch.float32)
        trials = Trials(model, ids, args.tokens)
        if name == "nextn":
            for each in (None, *(each for each in FAULTS if each.name in SIMULATED)):
                note(f"{each.name if each else NO_FAULT} nextn", trials, decoded(model, each, ids, args.tokens))
            continue
        for fault in (None, *SERVED):
            folder = intact = head or checkpoint
            if fault is not None:
                folder = bench.folder / f"{fault.name}-{engine}"
                plant(fault, intact, folder, other=intact)
            served = {**options, "draft": str(folder)} if head else options
            trunk = checkpoint if head else folder
            seen = bench.served(engine, trunk, ids, (K,), args.tokens, **served).seen[0]
            note(f"{fault.cause if fault else NO_FAULT} {name}", trials, seen.counts)
    return rows


def stored(path: Path | None) -> Mapping[str, Any]:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--engine", action="append", default=[], choices=ENGINES)
    parser.add_argument("--faults", action="append", default=[], choices=("nextn", "llama.cpp", "vllm mimo"))
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
            "prompts": len(ids),
            "tokens": args.tokens,
            "engines": {},
            **stored(args.out),
        }
        try:
            record["engines"] |= engines(args, checkpoint, ids, bench) if args.engine else {}
            if args.faults:
                rows = record.get("diagnose", {}).get("rows", {}) | faults(args, checkpoint, ids, bench)
                record["diagnose"] = {**origin(), "rows": rows}
        finally:
            bench.close()
    write_record(args.out, record)


if __name__ == "__main__":
    main()
