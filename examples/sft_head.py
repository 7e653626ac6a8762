"""Train a full MTP head alongside a LoRA fine-tune in TRL's SFTTrainer, by adding the one line with a comment.

    python examples/sft_head.py OUT [MODEL]    # MODEL: a checkpoint with an MTP head, a folder or a hub id

Without MODEL, a tiny random byte-level model is created. The data are sums; give SFTTrainer a data set of your own.
"""

import sys
from pathlib import Path

import datasets
import peft
import torch
from trl import SFTConfig, SFTTrainer

import nextn
from nextn.data.byte_tokenizer import byte_tokenizer

TINY = {
    "model_type": "qwen3_5_text", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True,
}  # fmt: skip


def sums(count: int) -> datasets.Dataset:
    """Questions, and answers that begin by repeating the question; only the answers are labels."""
    pairs = torch.randint(0, 50, (count, 2)).tolist()
    prompts = [f"{a} + {b} = ?\n" for a, b in pairs]
    return datasets.Dataset.from_dict({
        "prompt": prompts, "completion": [f"{a} + {b} = {a + b}. The sum is {a + b}." for a, b in pairs],
    })  # fmt: skip


def main(out: Path, source: str | None) -> None:
    if source is None:
        source = str(out / "base")
        nextn.Model.build(TINY, tokenizer=byte_tokenizer()).save(source)
    settings = SFTConfig(
        str(out / "run"), max_steps=20, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=10, bf16=False,
        model_init_kwargs={"dtype": "float32"}, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(source, settings, train_dataset=sums(160), eval_dataset=sums(8), peft_config=lora)
    nextn.train_head(trainer, settings=nextn.HeadSettings(depths=3))  # detached: the adapters train as without a head
    trainer.train()
    print(f"on held-out answers, {trainer.evaluate()['eval_head_greedy_AL']:.2f} tokens a round")
    trainer.model.merge_and_unload().save_pretrained(out / "model")
    report = nextn.audit(out / "model")
    print(
        f"{out / 'model'}: {len(report.modules)} of {report.declared} modules,",
        "clean" if report.clean else "not clean",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
