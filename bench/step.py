"""Cost of K depths in training: step time relative to a trunk-only step, compared with what FLOPs predict.

One run with interleaved steps, medians; writes JSON. `python bench/step.py --out step.json`.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from record import write_record

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.corpus import Corpus, standard_library
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer
from nextn.train.recipes import Recipe, by_name


def flops_per_token(trainer: Trainer, depths: int) -> float:
    """6 FLOPs per multiply-accumulate of forward and backward pass: matrices, and attention over half the sequence."""
    assert isinstance(trainer.task, JointTask)
    model = trainer.task.model
    config, trunk = model.trunk.config, model.trunk
    attention = trainer.config.length * config.num_attention_heads * config.head_dim
    inner = sum(
        value.numel() for name, value in trunk.model.named_parameters() if value.ndim == 2 and "embed" not in name
    )
    output = trunk.output.weight.numel()
    head = sum(value.numel() for value in model.head.parameters() if value.ndim >= 2)
    return 6 * (inner + trunk.num_layers * attention + depths * (head + output + attention))


def trainer_of(recipe: Recipe, depths: int, corpus: Corpus, *, compile: bool) -> Trainer:
    from nextn.model.model import Model

    torch.manual_seed(0)
    config = replace(recipe.train, depths=depths, steps=1000, compile=compile)
    return Trainer(JointTask(Model.build(recipe.model), corpus, config), out=Path(tempfile.mkdtemp()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    recipe = by_name("demo", vocab_size=264)
    corpus = Corpus.from_files(standard_library()[:80], byte_tokenizer())
    trainers = {depths: trainer_of(recipe, depths, corpus, compile=not args.no_compile) for depths in (0, 1, 2, 4)}
    times: dict[int, list[float]] = {depths: [] for depths in trainers}
    for repeat in range(args.repeats + 2):
        for depths, trainer in trainers.items():
            started = time.perf_counter()
            trainer._step()
            if repeat >= 2:
                times[depths].append(time.perf_counter() - started)
    base, base_flops = statistics.median(times[0]), flops_per_token(trainers[0], 0)
    rows = []
    for depths, trainer in trainers.items():
        seconds = statistics.median(times[depths])
        ratio, predicted = seconds / base, flops_per_token(trainer, depths) / base_flops
        tokens = recipe.train.batch_size * recipe.train.length
        row = {"depths": depths, "seconds": seconds, "tokens_per_s": tokens / seconds, "over_trunk": ratio}
        rows.append(row | {"flops_predict": predicted, "over_prediction": ratio / predicted})
        print("  ".join(f"{key} {value:.3g}" for key, value in rows[-1].items()))
    write_record(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
