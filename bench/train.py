"""Tokens/s and peak memory of a training step: the trunk alone, a naive MTP loss, and ours; K depths, packed sequences.

Each case is a process that keeps its model, and all take turns at a step, so that other load on the machine affects all
alike; medians. Memory is the rise of the process's resident peak above its memory before the model was built (Linux),
with gradients and the optimizer's state. About five minutes on two cores.

    python bench/train.py --out bench/results/train.json
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

import torch
import torch.nn.functional as F
from memory import resident
from torch import Tensor

from nextn.checkpoint.safetensors_file import write_json
from nextn.data.corpus import Corpus, standard_library
from nextn.losses.mtp_loss import LossReport
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import Model
from nextn.train.config import TrainConfig
from nextn.train.joint_task import Example, JointTask
from nextn.train.loop import Trainer
from nextn.train.recipes import byte_model

LAYERS, WIDTH = 6, 256
SIZES = {"batch-size": 4, "length": 512, "vocabulary": 32768, "threads": 2}


@dataclass(frozen=True)
class Case:
    """loss: `trunk` alone, `naive`: all logits of a depth at once and torch's cross-entropy, or `ours`."""

    loss: str
    depths: int
    compile: bool = False
    checkpoint_layers: bool = False

    @property
    def name(self) -> str:
        extras = [name for name in ("compile", "checkpoint_layers") if getattr(self, name)]
        return ", ".join([self.loss + (f" K={self.depths}" if self.depths else ""), *extras])


CASES = [
    Case(loss, depths, **extra)
    for extra in ({}, {"compile": True}, {"checkpoint_layers": True})
    for loss, depths in (("trunk", 0), ("naive", 1), ("ours", 1), ("naive", 4), ("ours", 4))
    if loss != "naive" or not extra.get("checkpoint_layers")
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


def serve(case: Case, options: argparse.Namespace) -> None:
    """Run a step for each line on standard input, and print its seconds and the peak memory so far."""
    torch.set_num_threads(options.threads)
    data = corpus(options.vocabulary)
    config = TrainConfig(
        steps=1000, batch_size=options.batch_size, length=options.length, depths=case.depths, compile=case.compile,
        checkpoint_layers=case.checkpoint_layers,
    )  # fmt: skip
    before = resident("VmRSS")
    torch.manual_seed(0)
    model = Model.build(byte_model(layers=LAYERS, hidden=WIDTH, vocab_size=options.vocabulary))
    task = (NaiveTask if case.loss == "naive" else JointTask)(model, data, config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(task, out=Path(folder))
        for _ in sys.stdin:
            started = time.perf_counter()
            record = trainer._step()
            result = {"seconds": time.perf_counter() - started, "loss": record.loss[0]}
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
        rows.append(asdict(case) | {"name": case.name} | row | {"loss": records[0]["loss"]})
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    base = rows[0]["seconds"]
    for row in rows:
        cost = f"{row['seconds'] / base:5.2f} x the trunk alone"
        print(f"{row['name']:28} {row['tokens_per_s']:8.0f} tokens/s {row['peak_mb']:7.0f} MB {cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    parser.add_argument("--only", default="", help="pattern of the cases to run in addition to the trunk alone")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.case:
        serve(Case(**json.loads(options.case)), options)
        return
    rows = measured([CASES[0], *(case for case in CASES[1:] if re.search(options.only, case.name))], options)
    print_table(rows)
    if options.out:
        sizes = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SIZES}
        setting = {**sizes, "layers": LAYERS, "hidden": WIDTH, "dtype": "bfloat16 autocast", "torch": torch.__version__}
        write_json(options.out, {"setting": setting | {"repeats": options.repeats}, "records": rows})


if __name__ == "__main__":
    main()
