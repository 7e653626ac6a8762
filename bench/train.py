"""Tokens/s and peak memory of a training step: the trunk alone, a naive MTP loss, and ours; K depths, packed sequences.

With `--published`, of a new head on the frozen SmolLM2-135M-Instruct instead: the loss over the whole vocabulary or
over `loss_vocab` tokens, with the trunk's states computed or cached, and the share that each step reaches of the
arithmetic's limit: its floating-point operations, as PyTorch counts them, at the rate of a large matrix product.

Each case is a process that keeps its model, and all take turns at a step, so that other load on the machine affects all
alike; medians. Memory is the rise of the process's resident peak above its memory before the model was built (Linux),
with gradients and the optimizer's state. About five minutes on two cores.

    python bench/train.py --out bench/results/train.json
    python bench/train.py --published --threads 1 --out bench/results/train-smollm2.json
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import resident
from record import write_record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nextn.data.corpus import Corpus, standard_library
from nextn.data.sources import load_corpora
from nextn.devices import matmul_seconds
from nextn.edit.published_model import smollm2
from nextn.losses.mtp_loss import LossReport
from nextn.model.head import Head
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import Model
from nextn.train.config import HeadConfig, TrainConfig
from nextn.train.head_run import StartingPoint, load_starting_point
from nextn.train.head_task import HeadTask
from nextn.train.joint_task import Example, JointTask
from nextn.train.loop import Trainer
from nextn.train.recipes import byte_model

LAYERS, WIDTH = 6, 256
SQUARE = 2048  # rows of the matrices whose product has the rate that steps are compared with
SIZES = {"batch-size": 4, "length": 512, "vocabulary": 32768, "threads": 2}


@dataclass(frozen=True)
class Case:
    """loss: `trunk` alone, `naive`: all logits of a depth at once and torch's cross-entropy, `ours`, or a `head`."""

    loss: str
    depths: int
    compile: bool = False
    checkpoint_layers: bool = False
    loss_vocab: int = 0
    cached: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        extras = [name for name in ("compile", "checkpoint_layers", "cached") if getattr(self, name)]
        vocabulary = [f"loss_vocab={self.loss_vocab}"] if self.loss_vocab else []
        return ", ".join([self.loss + (f" K={self.depths}" if self.depths else ""), self.dtype, *vocabulary, *extras])


CASES = [
    Case(loss, depths, **extra)
    for extra in ({}, {"compile": True}, {"checkpoint_layers": True})
    for loss, depths in (("trunk", 0), ("naive", 1), ("ours", 1), ("naive", 4), ("ours", 4))
    if loss != "naive" or not extra.get("checkpoint_layers")
]
HEAD_CASES = [
    Case("head", 4, loss_vocab=loss_vocab, cached=cached, dtype=dtype)
    for dtype, settings in (
        ("bfloat16", ((0, False), (0, True), (8192, False), (8192, True))),
        ("float32", ((0, False), (8192, True))),
    )
    for loss_vocab, cached in settings
]


class NaiveTask(JointTask):
    """The loss as it is usually written: per depth, logits in full, in fp32, then cross-entropy."""

    def loss(self, example: Example, lam: float, *, denominator: Tensor | None = None) -> LossReport:
        assert self.model.head is not None
        targets, depths = self._targets(example.batch), self.config.depths
        with torch.autocast(targets.tokens.device.type, torch.bfloat16):
            hidden = self.model.trunk(targets.tokens, documents=targets.documents)
            run = self.model.head.teacher_forced_hidden
            states = [hidden.final_hidden, *run(targets.tokens, hidden.head_input, depths, documents=targets.documents)]
            weights = lm_head_weights(self.model.trunk, self.model.head, depths)
            logits = [(state @ weight.T).float() for state, weight in zip(states, weights, strict=True)]
        losses = [F.cross_entropy(each.flatten(0, 1), targets.labels(k).flatten()) for k, each in enumerate(logits)]
        counts = targets.counts(depths)
        total = losses[0] + lam / depths * torch.stack(losses[1:]).sum()
        return LossReport(total, torch.stack(losses).detach() * counts, counts)


def corpus(vocabulary: int) -> Corpus:
    """Documents of the standard library, one token per word; which token does not matter here."""
    texts = [(path.name, path.read_text()) for path in standard_library()[:60]]
    return Corpus.from_texts(
        texts,
        lambda group: [[zlib.crc32(word.encode()) % (vocabulary - 1) for word in text.split()] for text in group],
        eos=vocabulary - 1,
    )


def joint_task(case: Case, options: argparse.Namespace) -> JointTask:
    data = corpus(options.vocabulary)
    config = TrainConfig(
        steps=1000, batch_size=options.batch_size, length=options.length, depths=case.depths, compile=case.compile,
        checkpoint_layers=case.checkpoint_layers, dtype=case.dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model.build(byte_model(layers=LAYERS, hidden=WIDTH, vocab_size=options.vocabulary))
    return (NaiveTask if case.loss == "naive" else JointTask)(model, data, config)


def head_task(case: Case, options: argparse.Namespace, folder: Path) -> HeadTask:
    """A new head on SmolLM2. The text is Python's standard library."""
    model, origin, _ = load_starting_point(StartingPoint(smollm2("float32"), fresh=True), near=folder / "run")
    model.head = Head(model.family, model.trunk)
    config = HeadConfig(
        steps=options.repeats + 2, batch_size=options.batch_size, length=options.length, depths=case.depths,
        loss_vocab=case.loss_vocab, dtype=case.dtype,
    )  # fmt: skip
    task = HeadTask(model, load_corpora([], model.tokenizer)[0], config, origin=origin)
    if case.cached:
        for _ in task.cached(folder / "states").fill():
            pass
    return task


def num_flops(trainer: Trainer) -> int:
    """Run a step, and return its floating-point operations."""
    # Only attention that is made of matrix products is counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer._step()
    return int(counter.get_total_flops())


def serve(case: Case, options: argparse.Namespace) -> None:
    """Run a step for each line on standard input, and print its seconds and the peak memory so far."""
    torch.set_num_threads(options.threads)
    before = resident("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        task = head_task(case, options, Path(folder)) if case.loss == "head" else joint_task(case, options)
        trainer = Trainer(task, out=Path(folder) / "run")
        counted = {"flops": num_flops(trainer)} if case.loss == "head" else {}
        for _ in sys.stdin:
            started = time.perf_counter()
            record = trainer._step()
            result = {"seconds": time.perf_counter() - started, "loss": record.loss[0], **counted}
            if counted:
                result["flops_per_s"] = (
                    2 * SQUARE**3 / matmul_seconds(getattr(torch, case.dtype), size=SQUARE, repeats=1)
                )
            print(json.dumps(result | {"bytes": resident("VmHWM") - before}), flush=True)


@contextmanager
def worker(case: Case, options: argparse.Namespace) -> Iterator[Callable[[], dict[str, float]]]:
    """Start a process of the case; yield a function that makes it run a step."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    command += [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in SIZES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ask, answer = process.stdin, process.stdout
        assert ask is not None
        assert answer is not None

        def step() -> dict[str, float]:
            print(file=ask, flush=True)
            return json.loads(answer.readline())

        yield step
        ask.close()


def measured(cases: list[Case], options: argparse.Namespace) -> list[dict[str, object]]:
    """Run all cases in turn. Two steps of each are a warm-up: compilation and first allocations."""
    results: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    with ExitStack() as stack:
        steps = {case: stack.enter_context(worker(case, options)) for case in cases}
        for turn in range(options.repeats + 2):
            for case in [*cases[turn % len(cases) :], *cases[: turn % len(cases)]]:
                results[case].append(steps[case]())
            print(f"turn {turn + 1} of {options.repeats + 2}", file=sys.stderr, flush=True)
    tokens = options.batch_size * options.length
    rows = []
    for case, records in results.items():
        seconds = sorted(record["seconds"] for record in records[2:])
        row = {"seconds": statistics.median(seconds), "fastest": seconds[0], "slowest": seconds[-1]}
        row |= {"tokens_per_s": tokens / row["seconds"], "peak_mb": records[-1]["bytes"] / 1e6}
        if case.loss == "head":
            rate = statistics.median(record["flops_per_s"] for record in records[2:])
            row |= {"flops": records[0]["flops"], "flops_per_s": rate}
            row["share_of_limit"] = row["flops"] / rate / row["seconds"]
        rows.append(asdict(case) | {"name": case.name} | row | {"loss": records[0]["loss"]})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    base = rows[0]["seconds"]
    for row in rows:
        cost = f"{row['seconds'] / base:5.2f} x the time of the first row"
        share = f", {row['share_of_limit']:.0%} of the arithmetic's limit" if "share_of_limit" in row else ""
        print(f"{row['name']:42} {row['tokens_per_s']:8.0f} tokens/s {row['peak_mb']:7.0f} MB {cost}{share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    parser.add_argument("--published", action="store_true", help="a new head on SmolLM2")
    parser.add_argument("--only", default="", help="pattern of the cases to run in addition to the trunk alone")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.case:
        serve(Case(**json.loads(options.case)), options)
        return
    first, *others = HEAD_CASES if options.published else CASES
    rows = measured([first, *(case for case in others if re.search(options.only, case.name))], options)
    print_table(rows)
    sizes = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SIZES}
    model = {"model": "SmolLM2-135M-Instruct"} if options.published else {"layers": LAYERS, "hidden": WIDTH}
    setting = {**sizes, **model, "repeats": options.repeats}
    write_record(options.out, {"setting": setting, "records": rows})


if __name__ == "__main__":
    main()
