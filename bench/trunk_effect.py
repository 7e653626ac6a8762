"""What MTP training does to the trunk: its held-out loss beside trunks trained without a head, from the same start.

Each run trains a small byte-level model from scratch, with `nextn`'s joint training. All runs of a seed start from the
same trunk and see the same batches, so that differences are taken seed by seed. Runs without a head are as long as the
others (equal tokens), or as long as the arithmetic of a run with D depths allows (equal compute). A run is added to the
record when it ends; runs that the record holds are skipped.

    python bench/trunk_effect.py --minutes 60                    # the grid at the smallest size
    python bench/trunk_effect.py --size 2M --only D1/0.3 --only "D0/as long as D1"
    python bench/trunk_effect.py --picture docs/images/trunk-effect.svg    # draws it and prints the table
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from own_text import python_corpora
from record import origin
from train import num_flops

from nextn.checkpoint.safetensors_file import write_json
from nextn.data.batches import Batches
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, encoder, eos_id
from nextn.data.sources import path_hashes, split_by_hash
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.stats.intervals import Estimate, paired_difference
from nextn.train.evaluation import teacher_forced_figures
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.metrics import StepRecord
from nextn.train.recipes import by_name, byte_model

OUT = Path(__file__).with_name("results") / "trunk-effect.json"
VOCABULARY, SEEDS, DEPTHS = 264, 3, (1, 3)
DEEPSEEK = "0.3,0.1@67%"  # DeepSeek-V3: 0.3 for 10 of 14.8 trillion tokens, then 0.1
LAMBDAS = ("0.1", "0.3", "1.0", DEEPSEEK)
COLORS = ("#2b6cb0", "#d9822b")
TEXTS = ("code", "prose")


@cache
def corpora(text: str) -> tuple[Corpus, Corpus]:
    """Return (train, held out) of `code`, the standard library, or `prose`, the texts of Python's `help()`."""
    if text == "code":
        return python_corpora()
    names = [f"{name}.txt" for name in sorted(topics.topics)]
    sides = split_by_hash(names, path_hashes([Path(name) for name in names]), held_out=0.3)
    tokenizer = byte_tokenizer()
    train, held_out = (
        Corpus.from_texts(
            ((name, topics.topics[name.removesuffix(".txt")]) for name in side), encoder(tokenizer), eos_id(tokenizer)
        )
        for side in sides
    )
    return train, held_out


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its runs."""

    layers: int
    hidden: int
    steps: int
    batch_size: int = 8
    length: int = 256
    eval_batches: int = 16
    compile: bool = True


SIZES = {
    "1M": Size(5, 128, 48),
    "2M": Size(5, 192, 100),
    "6M": Size(8, 256, 100, compile=False),
    "27M": Size(16, 384, 48, compile=False),
}


@dataclass(frozen=True)
class Run:
    """One training run. depths = 0: no head, with as much arithmetic as a run of `as_long_as` depths."""

    text: str
    seed: int
    depths: int = 0
    lam: str = "0"
    as_long_as: int = 0

    @property
    def setting(self) -> str:
        return f"D{self.depths}/{self.lam}" if self.depths else f"D0/as long as D{self.as_long_as}"

    @property
    def name(self) -> str:
        return f"{self.text}/{self.setting}/seed {self.seed}"

    @property
    def baselines(self) -> tuple["Run", "Run"]:
        """The runs without a head, of equal tokens and of equal compute."""
        return Run(self.text, self.seed), Run(self.text, self.seed, as_long_as=self.depths)


def grid(seeds: int = SEEDS) -> Iterator[Run]:
    """Yield all runs, one setting after the other, so that a record that is cut short has all seeds of a setting."""
    mains = [(0, "0", 0), *((depths, "0.3", 0) for depths in DEPTHS), *((0, "0", depths) for depths in DEPTHS)]
    others = ((depths, lam, 0) for depths, lam in product(DEPTHS, LAMBDAS) if lam != "0.3")
    for setting, seed, text in product([*mains, *others], range(seeds), TEXTS):
        yield Run(text, seed, *setting)


def trainer(run: Run, size: Size, steps: int, folder: Path) -> Trainer:
    """Build the trainer of a run. The trunk is built before the head, so it is the same in all runs of a seed."""
    torch.manual_seed(run.seed)
    model = Model.build(byte_model(layers=size.layers, hidden=size.hidden, vocab_size=VOCABULARY))
    model.head = model.head if run.depths else None
    config = replace(
        by_name("demo", vocab_size=VOCABULARY).train,
        steps=steps,
        batch_size=size.batch_size,
        length=size.length,
        depths=run.depths,
        lam=run.lam,
        seed=run.seed,
        warmup=max(1, size.steps // 10),
        compile=size.compile,
        eval_batches=1,
    )
    return Trainer(JointTask(model, corpora(run.text)[0], config), out=folder)


@cache
def step_flops(size: Size, depths: int) -> int:
    """Return the floating-point operations of a training step, optimizer included, as PyTorch counts them."""
    eager, run = replace(size, compile=False), Run("prose", 0, depths)
    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(run, eager, 1, Path(folder))
        return num_flops(subject)


def num_steps(run: Run, size: Size) -> int:
    ratio = step_flops(size, run.as_long_as) / step_flops(size, 0) if not run.depths else 1
    return round(size.steps * ratio)


def train(run: Run, size: Size) -> dict[str, object]:
    """Train, and return the figures of the run; loss is the trunk's on held-out text, in nats per byte."""
    losses, seconds = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        subject = trainer(run, size, num_steps(run, size), Path(folder))
        before = time.process_time()
        for record in subject.run():
            if isinstance(record, StepRecord):
                losses.append(record.loss[0])
                seconds.append(time.process_time() - before)
            before = time.process_time()
    assert isinstance(subject.task, JointTask)
    return {
        "loss": held_out_loss(subject.task.model, run.text, size),
        "first_loss": losses[0],  # equal in all runs of a seed and a text: the same trunk on the same batch
        "steps": len(losses),
        "tokens": len(losses) * subject.config.tokens_per_step,
        "flops": len(losses) * step_flops(size, run.depths),
        "cpu_seconds_per_step": round(statistics.median(seconds), 4),
    }


def held_out_loss(model: Model, text: str, size: Size) -> float:
    """Return the trunk's loss in float32 on the same rows for all runs."""
    rows = Batches(corpora(text)[1], batch_size=8, length=size.length, seed=0)
    with torch.compiler.set_stance("force_eager"):
        return teacher_forced_figures(model, map(rows.batch, range(size.eval_batches)), 0).loss[0]


def measure(out: Path, size: Size, *, seeds: int = SEEDS, only: Sequence[str] = (), minutes: float = 1e9) -> None:
    """Train the runs that `out` does not hold, of the settings in `only` or of all, and write it after each."""
    started = time.monotonic()
    record = json.loads(out.read_text()) if out.exists() else {**origin(), "size": asdict(size), "runs": {}}
    if record["size"] != asdict(size):
        raise ConfigError(f"{out} holds runs of another size, {record['size']}; name another file with --out")
    for run in grid(seeds):
        if run.name in record["runs"] or (only and run.setting not in only):
            continue
        if time.monotonic() - started > 60 * minutes:
            return
        record["runs"][run.name] = result = train(run, size)
        write_json(out, record)
        print(f"{run.name:40} {result['loss']:.4f}  {result['cpu_seconds_per_step']} s per step", flush=True)


def difference(runs: Mapping[str, Mapping[str, Any]], setting: Run, baseline: Run) -> Estimate:
    """Return the loss of a setting minus that of a baseline, paired by seed, with its 95 % interval."""
    losses = [[runs[replace(run, seed=seed).name]["loss"] for seed in range(SEEDS)] for run in (setting, baseline)]
    return paired_difference(*losses, [1.0] * SEEDS)


def settings(runs: Mapping[str, Mapping[str, Any]]) -> list[Run]:
    """Return one run of each setting that the record holds, with its baselines, for every text and seed."""
    every = [Run(TEXTS[0], 0, as_long_as=depths) for depths in (0, *DEPTHS)]
    every += [Run(TEXTS[0], 0, depths, lam) for depths, lam in product(DEPTHS, LAMBDAS)]

    def is_complete(setting: Run) -> bool:
        own = [replace(setting, text=text, seed=seed) for text, seed in product(TEXTS, range(SEEDS))]
        return all(run.name in runs for each in own for run in (each, *each.baselines))

    return list(filter(is_complete, every))


def label(setting: Run) -> str:
    schedule = setting.lam.replace(",", ", then ").replace("@67%", "")
    return f"D = {setting.depths}, λ = {schedule}" if setting.depths else "no head"


def markdown(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/explanation/effect-on-the-trunk.md."""
    heads = [f"{text}: {what}" for text in TEXTS for what in ("loss", "equal tokens", "equal compute")]
    lines = [f"| setting | arithmetic | {' | '.join(heads)} |", "|" + " --- |" * (2 + len(heads))]
    for setting in settings(runs):
        compute = runs[setting.name]["flops"] / runs[setting.baselines[0].name]["flops"]
        cells = [label(setting), f"{compute:.2f}"]
        for row in (replace(setting, text=text) for text in TEXTS):
            loss = statistics.mean(runs[replace(row, seed=seed).name]["loss"] for seed in range(SEEDS))
            compared = row.baselines if row.depths else row.baselines[: row.as_long_as > 0]
            gaps = [difference(runs, row, baseline) for baseline in compared]
            shown = [f"{gap.value:+.4f} ± {gap.high - gap.value:.4f}" for gap in gaps]
            cells += [f"{loss:.4f}", *shown, *[""] * (2 - len(shown))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draw the differences with their intervals as an SVG: a panel per text, a row per setting."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "nextn", "font.size": 9})
    rows = [setting for setting in settings(runs) if setting.depths]
    size = (7.6, 1.3 + 0.4 * len(rows))
    figure, panels = plt.subplots(1, len(TEXTS), sharex=True, sharey=True, figsize=size, layout="constrained")
    for text, axes in zip(TEXTS, panels, strict=True):
        for kind, words in enumerate(("equal tokens", "equal compute")):
            runs_of = [replace(setting, text=text) for setting in rows]
            gaps = [difference(runs, run, run.baselines[kind]) for run in runs_of]
            y = [row - 0.14 + 0.28 * kind for row in range(len(rows))]
            errors = [gap.high - gap.value for gap in gaps]
            axes.errorbar([gap.value for gap in gaps], y, xerr=errors, fmt="o", color=COLORS[kind], label=words, ms=4)
        axes.axvline(0, color="#1f2933", lw=0.8)
        axes.set_title(text, loc="left", fontweight="bold")
        axes.grid(axis="x", color="#e4e7eb")
        axes.set_yticks(range(len(rows)), [label(setting) for setting in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    figure.supxlabel("nats per byte, minus the trunk without a head; left of 0, MTP helps", fontsize=9)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--out", type=Path, help="record; default: one of the size, in bench/results")
    parser.add_argument("--minutes", type=float, default=60, help="no run starts after this time")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", action="append", default=[], help="only this setting; repeatable")
    parser.add_argument("--markdown", action="store_true", help="print the table of --out")
    parser.add_argument("--picture", type=Path, help="draw --out as an .svg file")
    args = parser.parse_args()
    out = args.out or OUT.with_stem(f"{OUT.stem}-{args.size}")
    if args.markdown or args.picture:
        runs = json.loads(out.read_text())["runs"]
        print(markdown(runs))
        if args.picture:
            draw(runs, args.picture)
        return
    measure(out, SIZES[args.size], seeds=args.seeds, only=args.only, minutes=args.minutes)


if __name__ == "__main__":
    main()
