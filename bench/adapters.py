"""How acceptance falls with the strength of a LoRA adapter, and how many training steps of the head bring it back.

A LoRA adapter (peft) of a model of Python code is trained on text of another domain, the C++ headers that PyTorch
comes with, in `transformers.Trainer`. Its change of the weights, times 0, 0.25, 0.5, 1 and 2, is then merged into the
trunk. At each strength, the trunk answers held-out prompts of that domain, and `nextn.train.evaluation` follows
rounds of four drafts through these answers: with the head as it was, and after so many steps of training on answers of
that trunk, as `nextn train --freeze-trunk` does by default, but without decay of the learning rate. At strength 0 the
trunk is the original: what training brings there is due to the domain.

    python bench/adapters.py MODEL --out bench/results/adapters.json     # about 10 minutes on one core
    python bench/adapters.py MODEL --markdown                            # the table of docs/how-to/stale-head.md
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import peft
import torch
import transformers
from own_text import read_answers, with_states, write_answers
from peft.tuners.lora import LoraLayer
from record import origin

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import write_json
from nextn.data.batches import Batch, Batches
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.model.model import Model
from nextn.model.trunk import TrunkOutput
from nextn.train.config import HeadConfig
from nextn.train.evaluation import heldout_acceptance, teacher_forced_figures
from nextn.train.head_task import HeadTask
from nextn.train.loop import Trainer
from nextn.train.metrics import StepRecord

STRENGTHS = (0.0, 0.25, 0.5, 1.0, 2.0)
STEPS = (25, 50, 100, 200)
OUT = Path(__file__).with_name("results") / "adapters.json"


@dataclass(frozen=True)
class Size:
    """Sizes of data and runs; the defaults are those of the record."""

    rank: int = 16
    tune_steps: int = 300
    lr: float = 2e-3
    batch_size: int = 8
    prompt_tokens: int = 64
    answer_tokens: int = 128
    answers: int = 320
    held_out: int = 64
    num_speculative_tokens: int = 4

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def cpp_corpora() -> tuple[Corpus, Corpus]:
    """Return (train, held out) of the C++ headers of PyTorch's library c10."""
    folder = Path(torch.__file__).parent / "include" / "c10"
    return load_corpora(sorted(folder.rglob("*.h")), byte_tokenizer())


class Experiment:
    """An adapter, trunks with it at each strength, and their answers, in a folder, each made on first use."""

    def __init__(self, source: str, folder: Path, size: Size) -> None:
        self.source, self.folder, self.size = source, folder, size
        self.train, self.held_out = cpp_corpora()

    def adapter(self) -> Path:
        """Return the folder of the adapter."""
        folder, size = self.folder / "adapter", self.size
        if folder.exists():
            return folder
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=size.rank, lora_alpha=2 * size.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(Model.load(self.source, dtype=torch.float32).trunk.model, config)
        batches = Batches(self.train, batch_size=size.batch_size, length=size.length, seed=0)
        texts = [row for step in range(size.tune_steps) for row in batches.batch(step).tokens]
        arguments = transformers.TrainingArguments(
            str(self.folder / "run-adapter"), max_steps=size.tune_steps, per_device_train_batch_size=size.batch_size,
            learning_rate=size.lr, lr_scheduler_type="cosine", warmup_steps=20, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in texts]
        transformers.Trainer(model, arguments, train_dataset=data).train()
        model.save_pretrained(folder)
        return folder

    def model(self, strength: float) -> Path:
        """Return the folder of the model with the adapter merged at that strength, its head unchanged."""
        folder = self.folder / f"strength-{strength:g}"
        if not folder.exists():
            model = Model.load(self.source, dtype=torch.float32)
            tuned = peft.PeftModel.from_pretrained(model.trunk.model, self.adapter())
            for layer in tuned.modules():
                if isinstance(layer, LoraLayer):
                    layer.scale_layer(strength)
            tuned.merge_and_unload()
            model.save(folder)
        return folder

    def answers(self, strength: float, kind: str) -> Path:
        """Return the file of answers: `train` (sampled), `greedy` or `sampled`, the last two to held-out prompts."""
        size, is_train = self.size, kind == "train"
        return write_answers(
            Model.load(self.model(strength)),
            self.train if is_train else self.held_out,
            self.folder / f"strength-{strength:g}-{kind}.jsonl",
            count=size.answers if is_train else size.held_out,
            prompt_tokens=size.prompt_tokens,
            max_tokens=size.answer_tokens,
            greedy=kind == "greedy",
        )

    def texts(self, strength: float) -> dict[str, list[tuple[Batch, TrunkOutput]]]:
        """Return the answers to held-out prompts with the trunk's states, by rule of acceptance."""
        trunk = Model.load(self.model(strength)).trunk
        return {
            rule: with_states(trunk, read_answers(self.answers(strength, rule)), length=self.size.length)
            for rule in ("greedy", "sampled")
        }

    def figures(self, model: Model, texts: Mapping[str, list[tuple[Batch, TrunkOutput]]]) -> dict[str, object]:
        """Return AL and acceptance by depth of the model's head on these texts."""
        assert model.head is not None
        record: dict[str, object] = {}
        for rule, pairs in texts.items():
            result = heldout_acceptance(
                model.trunk, model.head, pairs, self.size.num_speculative_tokens, on_policy=True
            )
            counts = getattr(result, rule)
            record[rule] = {"AL": round(counts.length, 3), "acceptance": [round(rate, 4) for rate in counts.rates]}
        return record

    def trained(
        self, strength: float, texts: Mapping[str, list[tuple[Batch, TrunkOutput]]], steps: tuple[int, ...]
    ) -> Iterator[tuple[int, dict[str, object]]]:
        """Train the head on the trunk's answers; yield its figures after each number of steps."""
        folder, run = self.model(strength), self.folder / "run-head"
        corpus = read_answers(self.answers(strength, "train"))
        config = HeadConfig(
            steps=max(steps), length=self.size.length, decay=0.0, eval_every=0, eval_batches=1, save_every=0
        )
        model = Model.load(folder)
        task = HeadTask(model, corpus, config, origin=Inventory.of(Checkpoint.open(folder)), has_baseline=False)
        shutil.rmtree(run, ignore_errors=True)
        for _ in task.cached(run / "hidden").fill():
            pass
        for record in Trainer(task, out=run).run():
            if isinstance(record, StepRecord) and record.step in steps:
                yield record.step, self.figures(model, texts)

    def bits_per_byte(self, model: Model) -> float:
        """Return the trunk's loss on held-out text of the domain; tokens are bytes."""
        batches = Batches(self.held_out, batch_size=8, length=self.size.length, seed=0)
        loss = teacher_forced_figures(model, (batches.batch(index) for index in range(16)), 0).loss[0]
        return round(loss / torch.tensor(2.0).log().item(), 3)

    def repetitive(self, strength: float) -> dict[str, float]:
        """Return the share of repetitive answers, greedy and sampled."""
        return {kind: _repetitive_share(self.answers(strength, kind)) for kind in ("greedy", "sampled")}


def _repetitive_share(file: Path) -> float:
    answers = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return round(sum(answer["repetitive"] for answer in answers) / len(answers), 3)


def measure(experiment: Experiment, out: Path, *, strengths: tuple[float, ...], steps: tuple[int, ...]) -> None:
    """Measure the strengths that `out` does not hold yet, and write it after each."""
    size = asdict(experiment.size)
    record = json.loads(out.read_text()) if out.exists() else {**origin(), "size": size, "strengths": {}}
    if record["size"] != size:
        raise SystemExit(f"{out} holds figures of another size, {record['size']}; name another file with --out")
    record["model"] = Path(experiment.source).name
    for strength in strengths:
        if f"{strength:g}" in record["strengths"]:
            continue
        model, texts = Model.load(experiment.model(strength)), experiment.texts(strength)
        row = {"bits_per_byte": experiment.bits_per_byte(model), "repetitive": experiment.repetitive(strength)}
        row["0"] = experiment.figures(model, texts)
        row |= {str(step): figures for step, figures in experiment.trained(strength, texts, steps)}
        record["strengths"][f"{strength:g}"] = row
        write_json(out, record)
        print(f"{strength:4g}  {_lengths(row, 'sampled')}   greedy {_lengths(row, 'greedy')}", flush=True)


def _lengths(row: Mapping[str, Mapping[str, Mapping[str, float]]], rule: str) -> str:
    return "  ".join(f"{row[str(count)][rule]['AL']:.2f}" for count in (0, *STEPS) if str(count) in row)


def markdown(record: Mapping[str, Mapping[str, Mapping[str, object]]]) -> str:
    """The table of docs/how-to/stale-head.md: AL@4 at temperature 1 by strength and steps."""
    columns = ["the old head", *(f"{count} steps" for count in STEPS)]
    lines = [f"| strength | bits per byte | {' | '.join(columns)} |", "|" + " --- |" * (2 + len(columns))]
    for strength, row in sorted(record["strengths"].items(), key=lambda pair: float(pair[0])):
        lengths = [f"{row[str(step)]['sampled']['AL']:.2f}" if str(step) in row else "-" for step in (0, *STEPS)]
        lines.append(f"| {strength} | {row['bits_per_byte']:.2f} | {' | '.join(lengths)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a checkpoint with a head and nextn's byte tokenizer")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=Path("adapters-work"), help="adapter, trunks, answers, runs")
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--markdown", action="store_true", help="print the table of --out")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.out.read_text())))
        return
    measure(
        Experiment(args.model, args.work, Size()), args.out, strengths=tuple(args.strengths), steps=tuple(args.steps)
    )


if __name__ == "__main__":
    main()
