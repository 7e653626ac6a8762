"""Starting values of new heads on frozen trunks: held-out acceptance after 0, 50, 200, ... steps of the same batches.

* `fitted`: what `nextn train --init-head` makes, a copy of the last layer behind a projection fitted to its input;
* `sum`: the same layer; the projection adds the normalized embedding and state;
* `state`: the projection passes the normalized state alone;
* `middle`: as `fitted`, with a copy of the trunk's middle layer;
* `random`: random values.

    python bench/initial_heads.py tiny --steps 0 50 200 1000
    python bench/initial_heads.py tiny --variants fitted random --optimizer muon      # added to the record
    python bench/initial_heads.py smollm2 --variants fitted --optimizer muon --matrix-lr 0.005 --steps 0 100 200
    python bench/initial_heads.py smollm2 --variants fitted --loss-vocab 0 --steps 0 50 200

Text and labels: Python's standard library, and what the trunk predicts on it. AL is that of K = 4 drafts.
"""

import argparse
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from record import origin
from torch import Tensor, nn

from nextn.checkpoint.safetensors_file import write_json
from nextn.data.batches import sample_prompts
from nextn.data.sources import load_corpora
from nextn.edit.published_model import smollm2
from nextn.model.head import Head, MTPLayer
from nextn.model.model import Model
from nextn.train import init_head as starting_values
from nextn.train.config import HeadConfig
from nextn.train.head_run import StartingPoint, load_starting_point
from nextn.train.head_task import HeadTask
from nextn.train.loop import Trainer
from nextn.train.metrics import HeadRecord, StepRecord

PUBLISHED = {"smollm2": "float32", "smollm2-bfloat16": "bfloat16"}
OUT = Path(__file__).with_name("results") / "initial-heads.json"


def fitted(model: Model, tokens: Tensor) -> Head:
    return starting_values.init_head(model.family, model.trunk, tokens)[0]


def added(model: Model, tokens: Tensor) -> Head:
    with patch.object(starting_values, "can_fit", lambda *_: False):
        return fitted(model, tokens)


def state_alone(model: Model, tokens: Tensor) -> Head:
    head = added(model, tokens)
    for layer in head.stack:
        assert isinstance(layer, MTPLayer)
        halves = layer.projection.weight.data.chunk(2, dim=1)
        halves[head.family.concat == "hidden_first"].zero_()
    return head


def middle(model: Model, tokens: Tensor) -> Head:
    def copy(layer: nn.Module, kind: object, trunk: object, family: object) -> object:
        count = len(model.trunk.decoder.layers) // 2 + 1
        layers = model.trunk.decoder.layers[:count]
        shorter = SimpleNamespace(
            decoder=SimpleNamespace(layers=layers), layer_types=model.trunk.layer_types, dtype=model.trunk.dtype
        )
        return original(layer, kind, shorter, family)

    original = starting_values._copy_layer
    with patch.object(starting_values, "_copy_layer", copy):
        return fitted(model, tokens)


def at_random(model: Model, tokens: Tensor) -> Head:
    return Head(model.family, model.trunk)


VARIANTS: dict[str, Callable[[Model, Tensor], Head]] = {
    "fitted": fitted,
    "sum": added,
    "state": state_alone,
    "middle": middle,
    "random": at_random,
}


def trained(checkpoint: Path | str, variant: str, steps: list[int], config: HeadConfig) -> list[dict[str, object]]:
    """Return loss and held-out acceptance at these steps."""
    run = Path("runs") / "initial-heads"
    shutil.rmtree(run, ignore_errors=True)
    torch.manual_seed(config.seed)
    model, origin, _ = load_starting_point(StartingPoint(checkpoint, fresh=True), near=run)
    train, held_out = load_corpora([], model.tokenizer)
    prompts = sample_prompts(train, count=8, length=512, seed=0)
    model.head = VARIANTS[variant](model, torch.tensor([each.tolist() for each in prompts]))
    task = HeadTask(model, train, config, held_out=held_out, origin=origin)
    rows: dict[int, dict[str, object]] = {}
    for record in Trainer(task, out=run).run():
        if isinstance(record, StepRecord) and record.step - 1 in rows:
            rows[record.step - 1]["loss"] = round(record.loss[0], 3)  # at depth 1, of the next batch, before its update
        elif isinstance(record, HeadRecord) and record.step in steps:
            rows[record.step] = {"step": record.step}
            for rule in ("greedy", "sampled"):
                counts = getattr(record.heldout, rule)
                rows[record.step][rule] = {"AL": round(counts.length, 3), "error": round(counts.error, 3)}
            print(f"  {variant:8} {rows[record.step]}", flush=True)
    return [*rows.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trunks", nargs="+", help="folders, `tiny`, `smollm2` or `smollm2-bfloat16`")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 50, 200, 1000])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--matrix-lr", type=float, default=HeadConfig.matrix_lr, help="of Muon")
    parser.add_argument("--loss-vocab", type=int, default=8192, help="tokens that the loss is computed over; 0: all")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    config = HeadConfig(
        steps=max(args.steps), batch_size=args.batch_size, length=args.length, depths=4,
        eval_every=math.gcd(*args.steps), eval_batches=8, save_every=0, loss_vocab=args.loss_vocab,
        optimizer=args.optimizer, matrix_lr=args.matrix_lr,
    )  # fmt: skip
    others = {"matrix_lr": (args.matrix_lr, HeadConfig.matrix_lr), "loss_vocab": (args.loss_vocab, 8192)}
    changed = [f"{name}={value:g}" for name, (value, default) in others.items() if value != default]
    key = ", ".join([args.optimizer, *changed])
    record = json.loads(args.out.read_text()) if args.out.exists() else {"trunks": {}}
    record |= origin()
    for name in args.trunks:
        checkpoint = smollm2(PUBLISHED[name]) if name in PUBLISHED else name
        print(name)
        run = partial(trained, checkpoint, steps=args.steps, config=config)
        row = record["trunks"].setdefault(name, {}).setdefault(key, {})
        row["tokens_per_step"] = args.batch_size * args.length
        for variant in args.variants:
            row[variant] = run(variant)
            write_json(args.out, record)


if __name__ == "__main__":
    main()
