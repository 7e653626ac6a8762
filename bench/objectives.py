"""Comparison of losses, unrolled steps, keys and texts for training heads on frozen trunks, one head per cell.

`bare`: a byte-level trunk that was trained without a head gets a new one. `stale`: a trunk and head that were trained
together, the trunk then fine-tuned on other text, so that its head no longer matches; that head is trained on. `joint`,
the head that was trained with its trunk, is what both are compared with. Each cell of the table trains one head, in
less than a minute on two cores; AL@1..8 are of `nextn.train.evaluation` on the trunk's own answers to held-out
prompts, greedy ones for T = 0 and sampled ones for T = 1. Results and files in the work folder are reused.

    python bench/objectives.py                       # all cells: about an hour on two cores
    python bench/objectives.py --only bare/kl        # only cells whose names start with this
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from own_text import prose_corpora, python_corpora, read_answers, run_steps, with_states, write_answers
from record import write_record

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.data.batches import Batches
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.errors import ConfigError
from nextn.losses.distillation import OBJECTIVES
from nextn.model.model import Model
from nextn.train.config import HeadConfig, TrainConfig
from nextn.train.evaluation import heldout_acceptance
from nextn.train.head_task import HeadTask
from nextn.train.init_head import init_head
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.recipes import by_name

DEPTHS = 8


@dataclass(frozen=True)
class Size:
    """Sizes of models, data and runs; the defaults are those of the table."""

    layers: int = 4
    hidden: int = 192
    trunk_steps: int = 390
    tune_steps: int = 150
    head_steps: int = 200
    batch_size: int = 8
    length: int = 192
    answers: int = 320
    held_out: int = 24
    answer_tokens: int = 128
    files: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.length - self.answer_tokens


@dataclass(frozen=True)
class Cell:
    trunk: str
    objective: str
    depths: int
    kv: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.trunk}/{self.objective}/{self.depths}-step/{self.kv}/{self.text}"


def cells() -> Iterator[Cell]:
    """Yield the cells: all on the trunk's own answers, some also on the data for comparison."""
    for objective, trunk in product(OBJECTIVES, ("bare", "stale")):
        for kv in ("own", "decode"):
            yield Cell(trunk, objective, 4, kv, "answers")
        if objective != "e2e-tv":  # with one step it equals tv
            yield Cell(trunk, objective, 1, "own", "answers")
        yield Cell(trunk, objective, 4, "own", "data")


class Workload:
    """Trunks, texts and answers in a folder, each created on first use."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size, self.tokenizer = folder, size, byte_tokenizer()

    def text(self, trunk: str) -> tuple[Corpus, Corpus]:
        """Return (train, held out): Python's sources, or the prose of its documentation for the fine-tuned trunk."""
        return prose_corpora() if trunk == "stale" else python_corpora(self.size.files)

    def model(self, trunk: str) -> Path:
        """Return the folder of `bare`, `joint` or `stale`."""
        folder = self.folder / trunk
        if not folder.exists():
            getattr(self, f"_make_{trunk}")(folder)
        return folder

    def answers(self, trunk: str, kind: str) -> Path:
        """Return the file of answers: `train` (sampled, on training texts), `greedy` or `drawn` (sampled)."""
        size = self.size
        return write_answers(
            Model.load(self.model(trunk), need_head=False),
            self.text(trunk)[kind != "train"],
            self.folder / f"{trunk}-{kind}.jsonl",
            count=size.answers if kind == "train" else size.held_out,
            prompt_tokens=size.prompt_tokens,
            max_tokens=size.answer_tokens,
            greedy=kind == "greedy",
        )

    def own_text(self, trunk: str, kind: str) -> Corpus:
        """Return those answers as a corpus; of those to train on, 1 % are left out."""
        file = self.answers(trunk, kind)
        return load_corpora([file], self.tokenizer, held_out=0.01)[0] if kind == "train" else read_answers(file)

    def _make_bare(self, folder: Path) -> None:
        self._train(folder, depths=0)

    def _make_joint(self, folder: Path) -> None:
        self._train(folder, depths=4)

    def _make_stale(self, folder: Path) -> None:
        model, (corpus, _) = Model.load(self.model("joint")), self.text("stale")
        config = TrainConfig(
            steps=self.size.tune_steps, batch_size=self.size.batch_size, length=self.size.length, depths=0, lr=5e-4
        )
        run_steps(Trainer(JointTask(model, corpus, config), out=self.folder / "run-stale"))
        model.save(folder)

    def _train(self, folder: Path, *, depths: int) -> None:
        size, recipe = self.size, by_name("demo", vocab_size=264)
        shape = recipe.model | {"num_hidden_layers": size.layers, "hidden_size": size.hidden}
        shape |= {"layer_types": ["full_attention"] * size.layers, "num_attention_heads": size.hidden // 64}
        shape |= {"num_key_value_heads": size.hidden // 128, "intermediate_size": 5 * size.hidden // 2}
        torch.manual_seed(0)
        model = Model.build(shape, tokenizer=self.tokenizer)
        model.head = model.head if depths else None
        config = replace(
            recipe.train,
            steps=size.trunk_steps,
            depths=depths,
            batch_size=2 * size.batch_size,
            length=size.length,
            compile=False,
        )
        corpus, held_out = self.text("bare")
        run_steps(Trainer(JointTask(model, corpus, config, held_out=held_out), out=self.folder / f"run-{folder.name}"))
        model.save(folder)


def trained(workload: Workload, cell: Cell) -> dict[str, object]:
    """Train the cell's head; return its figures and the CPU time."""
    size, folder = workload.size, workload.model(cell.trunk)
    corpus = workload.text(cell.trunk)[0] if cell.text == "data" else workload.own_text(cell.trunk, "train")
    model = Model.load(folder, need_head=False)
    config = HeadConfig(
        steps=size.head_steps,
        batch_size=size.batch_size,
        length=size.length,
        depths=cell.depths,
        objective=cell.objective,
        kv=cell.kv,
        eval_every=0,
        eval_batches=1,
        save_every=0,
    )
    if model.head is None:
        torch.manual_seed(0)
        tokens = Batches(corpus, batch_size=2, length=size.length, seed=0).batch(0).tokens
        model.head, _ = init_head(model.family, model.trunk, tokens)
    task = HeadTask(model, corpus, config, origin=Inventory.of(Checkpoint.open(folder)), has_baseline=False)
    run = workload.folder / "run-cell"
    shutil.rmtree(run, ignore_errors=True)
    seconds = run_steps(Trainer(task, out=run))
    return {"cpu_seconds": seconds, **figures(workload, cell.trunk, model)}


def figures(workload: Workload, trunk: str, model: Model) -> dict[str, object]:
    """Return AL@1..8 and the acceptance by depth of the head on its trunk's own answers, at T = 0 and T = 1."""
    record: dict[str, object] = {}
    for kind, rule in (("greedy", "greedy"), ("drawn", "sampled")):
        corpus = workload.own_text(trunk, kind)
        pairs = with_states(model.trunk, corpus, length=workload.size.length)
        # Fewer drafts start rounds at other positions, so each K is evaluated separately.
        by_drafts = [
            getattr(heldout_acceptance(model.trunk, model.head, pairs, drafts, on_policy=True), rule)
            for drafts in range(1, DEPTHS + 1)
        ]
        record[f"AL_T{int(kind == 'drawn')}"] = [round(counts.length, 3) for counts in by_drafts]
        record[f"acceptance_T{int(kind == 'drawn')}"] = [round(rate, 4) for rate in by_drafts[-1].rates]
    return record


def measure(out: Path, work: Path, size: Size, *, only: str = "") -> dict[str, Any]:
    """Train the cells that `out` does not hold yet, and write it after each."""
    known = json.loads(out.read_text()) if out.exists() else {}
    if known and known["size"] != vars(size):
        raise ConfigError(f"{out} holds cells of another size, {known['size']}; name another file with --out")
    results: dict[str, dict[str, object]] = known.get("cells", {})
    workload = Workload(work, size)
    for name in ("joint", "stale"):
        if f"{name}/as it is" not in results and f"{name}/as it is".startswith(only):
            model = Model.load(workload.model(name))
            results[f"{name}/as it is"] = figures(workload, name, model)
            write_record(out, {"size": vars(size), "cells": results})
    for cell in cells():
        if cell.name not in results and cell.name.startswith(only):
            results[cell.name] = trained(workload, cell)
            write_record(out, {"size": vars(size), "cells": results})
            print(row(cell.name, results[cell.name]), flush=True)
    return {"cells": results}


def row(name: str, cell: dict[str, object]) -> str:
    lengths = [f"{cell[key][k - 1]:5.2f}" for key in ("AL_T0", "AL_T1") for k in (1, 2, 4, 8)]
    return f"{name:36} {' '.join(lengths[:4])}   {' '.join(lengths[4:])}   {cell.get('cpu_seconds', '')}"


def markdown(cells: Mapping[str, Mapping[str, object]]) -> str:
    """The table of docs/reference/objectives.md."""
    names = [name for name in ("joint/as it is", "stale/as it is") if name in cells]
    names += sorted((name for name in cells if name not in names), key=_sort_key)
    lines = ["| head | steps | keys | text | T = 0: AL@1, 2, 4, 8 | T = 1 |", "|---|---|---|---|---|---|"]
    for name in names:
        trunk, objective, *how = name.split("/")
        steps, keys, text = how or ("", "", "")
        both = [", ".join(f"{cells[name][key][k - 1]:.2f}" for k in (1, 2, 4, 8)) for key in ("AL_T0", "AL_T1")]
        lines.append(
            f"| {trunk}, {objective} | {steps.removesuffix('-step')} | {keys} | {text} | {both[0]} | {both[1]} |"
        )
    return "\n".join(lines)


def _sort_key(name: str) -> tuple[object, ...]:
    """By trunk, then by what is varied, with the objectives in their order."""
    trunk, objective, steps, keys, text = name.split("/")
    return trunk, text, -int(steps[0]), keys != "own", OBJECTIVES.index(objective)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "objectives.json")
    parser.add_argument("--work", type=Path, default=Path("objectives-work"), help="trunks, answers, runs")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/reference/objectives.md")
    parser.add_argument("--head-steps", type=int, default=Size.head_steps)
    parser.add_argument("--only", default="", help="only cells whose names start with this, such as bare/kl")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.out.read_text())["cells"]))
        return
    print(f"{'':36} AL@1  @2    @4    @8  T = 0; the same at T = 1; CPU seconds")
    for name, cell in measure(args.out, args.work, replace(Size(), head_steps=args.head_steps), only=args.only)[
        "cells"
    ].items():
        print(row(name, cell))


if __name__ == "__main__":
    main()
