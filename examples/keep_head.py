"""Fine-tune with transformers' Trainer, in full and with LoRA, and keep the MTP head through both.

    python examples/keep_head.py MODEL OUT    # MODEL: a checkpoint with an MTP head, a folder or a hub id

MODEL is trained for a few steps on random tokens; give Trainer a data set of your own.
"""

import sys
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import nextn


def train(model: torch.nn.Module, out: Path, source: str) -> Trainer:
    tokens = torch.randint(0, 40, (8, 32))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    settings = TrainingArguments(str(out / "run"), max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True)
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[nextn.KeepHead(source)])
    trainer.train()
    return trainer


def fine_tune(model: PreTrainedModel, source: str, out: Path) -> Path:
    train(model, out, source).save_model(str(out / "full"))
    return out / "full"


def fine_tune_with_lora(model: PreTrainedModel, source: str, out: Path) -> Path:
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    train(lora, out, source)
    lora.merge_and_unload().save_pretrained(out / "merged")
    return out / "merged"


def main(source: str, out: Path) -> None:
    for run in (fine_tune, fine_tune_with_lora):
        folder = run(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), source, out)
        report = nextn.audit(folder)
        print(
            f"{folder}: {len(report.modules)} of {report.declared} modules,", "clean" if report.clean else "not clean"
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
