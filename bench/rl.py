"""Acceptance over the steps of a GRPO run, of a head that follows the policy and of the head as it was.

TRL's GRPOTrainer trains a byte-level model of Python code towards text in capital letters; `nextn.train_head` trains
the head on the completions. The policy is the same with and without the head, bit for bit, so one run gives both
curves: at each step, both heads are run over the completions of the step, which the policy has just sampled. AL is
1 + the sum over k of the expected share of positions whose drafts 1..k would all be accepted (1 - TV, temperature 1).

    python bench/rl.py MODEL --out bench/results/rl.json      # about two minutes on one core
    python bench/rl.py --markdown                             # the table of docs/how-to/beside-fine-tune.md
"""

import argparse
import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from own_text import python_corpora
from record import write_record
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import nextn
from nextn.data.batches import sample_prompts
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.train.cotrain import CotrainLoss, HeadSettings, model_inputs, targets_of

OUT = Path(__file__).with_name("results") / "rl.json"


@dataclass(frozen=True)
class Size:
    """Sizes of the run; the defaults are those of the record."""

    steps: int = 60
    prompts: int = 4  # of a step
    completions: int = 4  # of a prompt
    prompt_tokens: int = 32
    tokens: int = 32  # of a completion
    lr: float = 3e-4
    head_lr: float = 1e-3
    num_speculative_tokens: int = 4
    window: int = 10  # steps that are averaged


def share_of_capitals(completions: list[str], **_: object) -> list[float]:
    return [sum(letter.isupper() for letter in text) / max(len(text), 1) for text in completions]


def trainer_of(source: str, run: Path, size: Size) -> GRPOTrainer:
    """Build the Trainer of the policy; prompts are lines of Python's sources."""
    tokenizer, (corpus, _) = byte_tokenizer(), python_corpora(200)
    count = size.steps * size.prompts
    prompts = sample_prompts(corpus, count=count, length=size.prompt_tokens, seed=1)
    data = datasets.Dataset.from_dict({"prompt": [tokenizer.decode(each) for each in prompts]})
    arguments = GRPOConfig(
        str(run), max_steps=size.steps, per_device_train_batch_size=size.prompts * size.completions,
        num_generations=size.completions, max_completion_length=size.tokens, learning_rate=size.lr,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, bf16=False, seed=0, gradient_checkpointing=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return GRPOTrainer(model, share_of_capitals, args=arguments, train_dataset=data, processing_class=tokenizer)


def measure(source: str, run: Path, size: Size) -> dict[str, object]:
    """Train the policy and its head; return reward and AL of both heads, averaged over windows of steps."""
    trainer = trainer_of(source, run, size)
    settings = HeadSettings(depths=size.num_speculative_tokens, objective="kl", lr=size.head_lr)
    head = nextn.train_head(trainer, source, settings)
    losses = {"follows": CotrainLoss(head, settings), "as it was": CotrainLoss(copy.deepcopy(head), settings)}
    survived: dict[str, list[Tensor]] = {name: [] for name in losses}
    inner = trainer.compute_loss

    def compute_loss(model: torch.nn.Module, inputs: Mapping[str, Any], **options: Any) -> Tensor:
        with head.trunk.capture_hidden() as captured:
            loss = inner(model, inputs, **options)
        batch = model_inputs(inputs)
        targets = targets_of(batch)
        for name, cotrain in losses.items():
            with torch.no_grad():
                states = cotrain.states(batch["input_ids"], targets, captured[0])
                survived[name].append(cotrain.survival(states, targets)[1])
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    rows = []
    for start in range(0, size.steps, size.window):
        window = slice(start, start + size.window)
        lengths = {name: _length(torch.stack(counts[window]).sum(0)) for name, counts in survived.items()}
        reward = sum(rewards[window]) / len(rewards[window])
        rows.append({"steps": f"{start + 1} to {start + size.window}", "reward": round(reward, 3), **lengths})
        print(rows[-1], flush=True)
    return {"model": Path(source).name, "size": asdict(size), "rows": rows}


def _length(survived: Tensor) -> float:
    """AL of [K+1] positions whose drafts 1..k would all be accepted; [0]: all."""
    return round(1 + (survived[1:] / survived[0]).sum().item(), 3)


def markdown(record: Mapping[str, Any]) -> str:
    """The table of docs/how-to/beside-fine-tune.md."""
    lines = ["| steps | reward | AL@4, `train_head` | AL@4, head as it was |", "| --- | --- | --- | --- |"]
    for row in record["rows"]:
        lines.append(f"| {row['steps']} | {row['reward']:.2f} | {row['follows']:.2f} | {row['as it was']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a checkpoint with a head and nextn's byte tokenizer")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=Path("rl-work"), help="the Trainer's folder")
    parser.add_argument("--markdown", action="store_true", help="print the table of --out")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.out.read_text())))
        return
    write_record(args.out, measure(args.model, args.work, Size()))


if __name__ == "__main__":
    main()
