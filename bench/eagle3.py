"""New heads for trunks that never had one, at equal tokens: ours, an EAGLE-3-style head, and other settings of ours.

Trunks: that of the checkpoint in the package, without its head (`tiny`, a dense Qwen3.5 of 2.3 M parameters), and two
of the layouts of Llama and Qwen3 (2.1 and 2.6 M) that are trained here on Python's sources; tokens are bytes. Each cell
trains a new head on the trunk's own sampled answers, on the same batches in every cell, with the trunk's lm_head.
`nextn.train.evaluation` follows rounds of four drafts through the trunk's answers to held-out prompts, greedy
ones for T = 0 and sampled ones for T = 1: keys are those of decoding, and the rule of acceptance is the same for all.

`mtp` is the head of `nextn train --freeze-trunk --init-head` with default settings. `eagle3` follows EAGLE-3 (arXiv
2503.01840) and its implementation (github.com/SafeAILab/EAGLE, eagle/traineagle3/cnets.py):

* features (section 3.1): the hidden states that enter layers 2, n // 2 and n - 3 are concatenated, and `fc` maps them
  to the hidden size;
* one decoder layer whose attention takes [embedding, feature], each after its norm, and adds to the feature;
* training-time test (section 3.2): from the second step on, the feature is the layer's own output, and a step
  attends to the first step's keys of earlier positions and to its own chain's, which is `kv = decode` here;
* the loss is the cross-entropy to the trunk's distribution, weighted by 0.8^(k-1), which is `kl` and `beta` = 0.8 here.

Its MLP is narrower than the trunk's, so that both heads have as many parameters; `eagle3, full MLP` has the trunk's.
Not as there: no draft vocabulary (there are 264 tokens), as many steps as drafts (four, not seven), no draft tree.

    python bench/eagle3.py                           # all cells: about an hour on one quiet core
    python bench/eagle3.py --only tiny/mtp           # only cells whose names start with this
    python bench/eagle3.py --layouts                 # the same head in several layouts, and a jointly trained one
    python bench/eagle3.py --markdown                # tables of docs/benchmarks/heads.md, also with --layouts

The layouts are on answers of their own run, as sampled answers differ between machines. `joint` is the head that was
trained together with `tiny`, on more text; `mtp` on `tiny` is in the layout of Qwen3.5, elsewhere in the generic one.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from typing import Any

import torch
from own_text import python_corpora, read_answers, run_steps, with_states, write_answers
from record import origin
from torch import Tensor, nn

import nextn
from nextn.cache.kv_cache import CACHE_ARGUMENT
from nextn.checkpoint.safetensors_file import write_json
from nextn.data.batches import Batch
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.family_table import Family, by_name, fitted
from nextn.model.head import Head, HeadStep
from nextn.model.head_layers import block_layer_types, build_block, build_norm
from nextn.model.model import Model
from nextn.model.trunk import Trunk, TrunkOutput
from nextn.train.config import HeadConfig, TrainConfig
from nextn.train.evaluation import heldout_acceptance
from nextn.train.head_run import StartingPoint, load_starting_point
from nextn.train.head_task import HeadTask
from nextn.train.init_head import init_head
from nextn.train.joint_task import Example, JointTask
from nextn.train.loop import Trainer

OUT = Path(__file__).with_name("results") / "eagle3.json"
LAYOUTS_OUT = OUT.with_name("head_layouts.json")
TINY = Path(nextn.__file__).with_name("assets") / "tiny"
LAYOUTS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}
TRUNKS = ("tiny", *LAYOUTS)


@dataclass(frozen=True)
class Size:
    """Sizes of trunks, data and runs; the defaults are those of the record."""

    layers: int = 8
    hidden: int = 160
    trunk_steps: int = 200
    trunk_batch: int = 16
    head_steps: int = 200
    length: int = 192
    prompt_tokens: int = 64
    answers: int = 320
    held_out: int = 64
    num_speculative_tokens: int = 4
    num_files: int = 200


@dataclass(frozen=True)
class Cell:
    """A head, and how it is trained where that is not the default."""

    head: str = "mtp"  # or `eagle3`, or `joint`: the trunk's own, as it is
    settings: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False  # random values, not copies of the trunk's last layer
    full_mlp: bool = False  # of `eagle3`: the trunk's MLP, and so more parameters than `mtp`
    last_state: bool = False  # of `eagle3`: the high feature is the state after the final norm, which `mtp` takes
    family: str = ""  # of `mtp`: in this family's layout, not in that of the trunk's own or the generic one
    trunks: tuple[str, ...] = TRUNKS


_EAGLE = {"kv": "decode"}
CELLS = {
    "mtp": Cell(),
    "eagle3": Cell("eagle3", _EAGLE),
    "mtp, kv=decode": Cell(settings=_EAGLE),
    "eagle3, lr=2e-3": Cell("eagle3", {**_EAGLE, "lr": 2e-3}),
    "mtp, lr=2e-3": Cell(settings={"lr": 2e-3}),
    "mtp, random": Cell(random=True),
    "eagle3, lr=2e-3, last state": Cell("eagle3", {**_EAGLE, "lr": 2e-3}, last_state=True),
    "eagle3, lr=4e-3": Cell("eagle3", {**_EAGLE, "lr": 4e-3}),
    "mtp, lr=4e-3": Cell(settings={"lr": 4e-3}),
    "eagle3, full MLP, lr=2e-3": Cell("eagle3", {**_EAGLE, "lr": 2e-3}, full_mlp=True),
    "mtp, depths=1": Cell(settings={"depths": 1}),
    "mtp, depths=2": Cell(settings={"depths": 2}),
    "mtp, depths=6": Cell(settings={"depths": 6}),
    "mtp, objective=ce": Cell(settings={"objective": "ce"}),
    "mtp, objective=lk-hybrid": Cell(settings={"objective": "lk-hybrid"}),
    "mtp, lr=5e-4": Cell(settings={"lr": 5e-4}),
    "mtp, optimizer=muon": Cell(settings={"optimizer": "muon", "matrix_lr": 0.01}),
}
BY_DRAFTS = ("mtp", "mtp, optimizer=muon", "eagle3, lr=2e-3", "eagle3, lr=4e-3")  # of the table of AL by K
LAYOUT_CELLS = {
    "joint": Cell("joint", trunks=("tiny",)),
    "mtp": Cell(),
    "mtp, generic layout": Cell(family="generic", trunks=("tiny",)),
    "mtp, layout=mimo": Cell(family="mimo_draft", trunks=("llama", "qwen3")),
}


class Eagle3Layer(nn.Module):
    """EAGLE-3's draft model, with the interface of an `MTPLayer`; its hidden input is three features or its output."""

    def __init__(self, family: Family, trunk: Trunk, intermediate_size: int) -> None:
        super().__init__()
        size, overrides = trunk.config.hidden_size, dict(family.block) | {"intermediate_size": intermediate_size}
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.hidden_norm, self.final_norm = build_norm(trunk), build_norm(trunk)
        self.block = build_block(trunk, 0, 1, overrides)
        attention = self.block.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
            trunk.initialize(getattr(attention, name))
        trunk.initialize(self.fc)
        (self.layer_type,) = self.layer_types = block_layer_types(trunk, 0, 1, overrides)
        self.layers = [self.block]
        self.to(trunk.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def forward(
        self, embedded: Tensor, hidden: Tensor, *, positions: Tensor, rotary: object, mask: Tensor | None, cache: object
    ) -> HeadStep:
        feature = self.fc(hidden) if hidden.shape[-1] > embedded.shape[-1] else hidden
        block = self.block
        states = torch.cat([block.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)
        attended = block.self_attn(
            hidden_states=states, position_embeddings=rotary, attention_mask=mask, **{CACHE_ARGUMENT: cache}
        )
        states = feature + attended[0]
        states = states + block.mlp(block.post_attention_layernorm(states))
        return HeadStep(self.final_norm(states), states)


class Eagle3Head(Head):
    """An EAGLE-3-style head; `head_input` of the trunk's output holds the three features."""

    def __init__(self, family: Family, trunk: Trunk, intermediate_size: int) -> None:
        super().__init__(family, trunk)
        self.stack = nn.ModuleList([Eagle3Layer(family, trunk, intermediate_size)])


def features(trunk: Trunk, batch: Batch) -> TrunkOutput:
    """Run the trunk; head_input [B, T, 3 H] are the states that enter its low, middle and high layers."""
    layers, states = trunk.decoder.layers, []
    with ExitStack() as stack:
        for index in (2, len(layers) // 2, len(layers) - 3):
            hook = layers[index].register_forward_pre_hook(lambda _, args: states.append(args[0]))
            stack.callback(hook.remove)
        output = trunk(batch.tokens, documents=batch.documents)
    return TrunkOutput(output.final_hidden, torch.cat(states, dim=-1))


def num_parameters(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def same_size_head(family: Family, trunk: Trunk) -> Eagle3Head:
    """Build an EAGLE-3-style head whose MLP is so narrow that it has as many parameters as an MTP head."""
    width, size = trunk.config.intermediate_size, trunk.config.hidden_size
    surplus = num_parameters(Eagle3Head(family, trunk, width)) - num_parameters(Head(family, trunk))
    return Eagle3Head(family, trunk, width - surplus // (3 * size))


def new_head(model: Model, cell: Cell, tokens: Tensor) -> Head:
    """Build the cell's head. tokens: a text on which the trunk's residual stream is measured."""
    family, trunk = model.family, model.trunk
    if cell.head == "mtp":
        return Head(family, trunk) if cell.random else init_head(family, trunk, tokens)[0]
    width = trunk.config.intermediate_size
    return Eagle3Head(family, trunk, width) if cell.full_mlp else same_size_head(family, trunk)


class KnownStatesTask(HeadTask):
    """Trains a head on the trunk's states of one epoch, which are computed once for all cells."""

    epoch: list[tuple[Batch, TrunkOutput]]
    last_state = False

    def example(self, step: int, *, rank: int = 0, world: int = 1) -> Example:
        batch, states = self.epoch[step % len(self.epoch)]
        return Example(batch, self.hidden_of(states))

    def hidden(self, example: Example) -> TrunkOutput:
        return example.hidden or self.hidden_of(features(self.model.trunk, example.batch))

    def hidden_of(self, states: TrunkOutput) -> TrunkOutput:
        """The states that this head takes: ours the one after the final norm."""
        final = states.final_hidden
        if not isinstance(self.head, Eagle3Head):
            return TrunkOutput(final, final)
        low_and_middle = states.head_input[..., : 2 * final.shape[-1]]
        return TrunkOutput(final, torch.cat([low_and_middle, final], dim=-1)) if self.last_state else states


class Experiment:
    """Trunks and their answers in a folder, each made on first use."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.train, self.held_out = python_corpora(size.num_files)
        self._states: dict[str, dict[str, list[tuple[Batch, TrunkOutput]]]] = {}

    def trunk(self, name: str) -> Path:
        """Return the folder of a trunk; one that is trained here is as transformers saves it, without a head."""
        folder, size = TINY if name == "tiny" else self.folder / name, self.size
        if folder.exists():
            return folder
        shape = {
            "vocab_size": 264, "hidden_size": size.hidden, "intermediate_size": 5 * size.hidden // 2,
            "num_hidden_layers": size.layers, "max_position_embeddings": 4096, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 257, "num_mtp_layers": 1, **LAYOUTS[name],
        }  # fmt: skip
        torch.manual_seed(0)
        model = Model.build(shape, tokenizer=byte_tokenizer())
        model.head = None
        config = TrainConfig(
            steps=size.trunk_steps, batch_size=size.trunk_batch, length=size.length, depths=0, optimizer="muon",
            lr=3e-3, matrix_lr=0.03, weight_decay=0.01, eval_batches=8, save_every=50,
        )  # fmt: skip
        task = JointTask(model, self.train, config, held_out=self.held_out)
        run_steps(Trainer(task, out=self.folder / f"run-{name}"))
        del model.trunk.model.config.num_mtp_layers
        model.trunk.model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return folder

    def answers(self, name: str, kind: str) -> Path:
        """Return the file of a trunk's answers: `train` (sampled), `greedy` or `sampled`, the last two held out."""
        size, is_train = self.size, kind == "train"
        return write_answers(
            Model.load(self.trunk(name), need_head=False, skip_head=True),
            self.train if is_train else self.held_out,
            self.folder / f"{name}-{kind}.jsonl",
            count=size.answers if is_train else size.held_out,
            prompt_tokens=size.prompt_tokens,
            max_tokens=size.length - size.prompt_tokens,
            greedy=kind == "greedy",
        )

    def states(self, name: str) -> dict[str, list[tuple[Batch, TrunkOutput]]]:
        """Return a trunk's answers with its states: an epoch of training, and the held-out ones by rule."""
        if name not in self._states:
            model = Model.load(self.trunk(name), need_head=False, skip_head=True, dtype=torch.float32)
            corpora = {kind: read_answers(self.answers(name, kind)) for kind in ("train", "greedy", "sampled")}
            self._states[name] = {
                kind: with_states(model.trunk, corpus, length=self.size.length, run=features)
                for kind, corpus in corpora.items()
            }
        return self._states[name]

    def trained(self, name: str, cell: Cell) -> dict[str, object]:
        """Train the cell's head, if it is a new one; return its figures, parameters and CPU time."""
        size, run, states = self.size, self.folder / "run-head", self.states(name)
        defaults = {"steps": size.head_steps, "length": size.length, "depths": size.num_speculative_tokens}
        config = HeadConfig(**defaults | {"eval_every": 0, "eval_batches": 1, "save_every": 0} | dict(cell.settings))
        torch.manual_seed(config.seed)
        start = StartingPoint(self.trunk(name), fresh=cell.head != "joint")
        model, origin, _ = load_starting_point(start, near=self.folder)
        if cell.family:
            model.family = fitted(by_name(cell.family), origin.checkpoint.config)
        if cell.head != "joint":
            model.head = new_head(model, cell, states["train"][0][0].tokens)
        parameters = num_parameters(model.head)
        corpus = read_answers(self.answers(name, "train"))
        task = KnownStatesTask(model, corpus, config, origin=origin, has_baseline=False)
        task.epoch, task.last_state = states["train"], cell.last_state
        shutil.rmtree(run, ignore_errors=True)
        seconds = 0.0 if cell.head == "joint" else run_steps(Trainer(task, out=run))
        return {**self.figures(task, states), "parameters": parameters, "cpu_seconds": seconds}

    def figures(
        self, task: KnownStatesTask, states: Mapping[str, list[tuple[Batch, TrunkOutput]]]
    ) -> dict[str, object]:
        """Return AL, its standard error and acceptance by depth on the trunk's greedy and sampled answers."""
        record: dict[str, object] = {}
        depths = self.size.num_speculative_tokens
        for rule in ("greedy", "sampled"):
            pairs = ((batch, task.hidden_of(output)) for batch, output in states[rule])
            result = heldout_acceptance(task.model.trunk, task.head, pairs, depths, on_policy=True)
            counts = getattr(result, rule)
            rates = [round(rate, 4) for rate in counts.rates]
            record[rule] = {"AL": round(counts.length, 3), "error": round(counts.error, 3), "acceptance": rates}
        return record


def measure(experiment: Experiment, out: Path, *, only: str = "", cells: Mapping[str, Cell] = CELLS) -> None:
    """Train the cells that `out` does not hold yet, and write it after each."""
    size = asdict(experiment.size)
    record = json.loads(out.read_text()) if out.exists() else {**origin(), "size": size, "cells": {}}
    if record["size"] != size:
        raise SystemExit(f"{out} holds cells of another size, {record['size']}; name another file with --out")
    for label, cell in cells.items():
        for name in cell.trunks:
            key = f"{name}/{label}"
            if key in record["cells"] or not key.startswith(only):
                continue
            row = record["cells"][key] = experiment.trained(name, cell)
            write_json(out, record)
            print(f"{key:36} {row['sampled']} {row['greedy']['AL']} {row['cpu_seconds']} s", flush=True)


def markdown(record: Mapping[str, Any]) -> str:
    """The table of docs/benchmarks/heads.md: AL@4 of each cell on each trunk, at T = 1 and T = 0."""
    return "\n".join(_lines(record["cells"]))


def _lines(cells: Mapping[str, Any]) -> Iterator[str]:
    trunks = [name for name in TRUNKS if any(key.startswith(f"{name}/") for key in cells)]
    yield f"| head | {' | '.join(f'{name}: parameters | T = 1 | T = 0' for name in trunks)} |"
    yield "|" + " --- |" * (1 + 3 * len(trunks))
    for label in CELLS:
        rows = [cells.get(f"{name}/{label}") for name in trunks]
        parts = [
            f"{row['parameters']:,} | {row['sampled']['AL']:.2f} | {row['greedy']['AL']:.2f}" if row else "- | - | -"
            for row in rows
        ]
        if any(rows):
            yield f"| {label} | {' | '.join(parts)} |"


def markdown_by_drafts(record: Mapping[str, Any], labels: Iterable[str]) -> str:
    """A table of the AL for K = 1 to 4 drafts, from the acceptance by depth, at T = 1 and T = 0."""
    lines = [f"| trunk | head | {' | '.join(f'T = {t}: K = 1 | 2 | 3 | 4' for t in (1, 0))} |", "|" + " --- |" * 10]
    for trunk, label in product(TRUNKS, labels):
        cell = record["cells"].get(f"{trunk}/{label}")
        if cell is None:
            continue
        lengths = [1 + total for rule in ("sampled", "greedy") for total in _expected(cell[rule]["acceptance"])]
        lines.append(f"| {trunk} | {label} | {' | '.join(f'{length:.2f}' for length in lengths)} |")
    return "\n".join(lines)


def _expected(acceptance: Sequence[float]) -> Iterator[float]:
    """Yield the mean number of accepted drafts of a round, for 1, 2, ... drafts."""
    return accumulate(accumulate(acceptance, mul))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: in bench/results")
    parser.add_argument("--layouts", action="store_true", help="the cells of head_layouts.json")
    parser.add_argument("--work", type=Path, default=Path("eagle3-work"), help="trunks, answers, runs")
    parser.add_argument("--only", default="", help="only cells whose names start with this, such as llama/mtp")
    parser.add_argument("--markdown", action="store_true", help="print the table of --out")
    args = parser.parse_args()
    out, cells = (LAYOUTS_OUT, LAYOUT_CELLS) if args.layouts else (OUT, CELLS)
    out = args.out or out
    if args.markdown:
        record = json.loads(out.read_text())
        by_drafts = markdown_by_drafts(record, LAYOUT_CELLS if args.layouts else BY_DRAFTS)
        print(by_drafts if args.layouts else f"{markdown(record)}\n\n{by_drafts}")
        return
    measure(Experiment(args.work, Size()), out, only=args.only, cells=cells)


if __name__ == "__main__":
    main()
