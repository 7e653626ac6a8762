"""Train an MTP head alongside a fine-tune in transformers' Trainer, by adding the one line with a comment.

    python examples/trainer_head.py OUT [MODEL]    # MODEL: a checkpoint with an MTP head, a folder or a hub id

Without MODEL, a tiny random one is created. It learns random phrases; give Trainer a data set of your own.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import nextn

TINY = {
    "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": True,
}  # fmt: skip


def phrases(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows that repeat a phrase of six tokens, which can be drafted from the row itself."""
    rows = torch.randint(0, 64, (count, 6)).repeat(1, 5)
    return [{"input_ids": row, "labels": row} for row in rows]


def main(out: Path, source: str | None) -> None:
    if source is None:
        source = str(out / "base")
        nextn.Model.build(TINY).save(source)
    settings = TrainingArguments(
        str(out / "run"), max_steps=20, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=10,
        save_strategy="no", report_to="tensorboard", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    trainer = Trainer(model, settings, train_dataset=phrases(160), eval_dataset=phrases(8))
    nextn.train_head(trainer, settings=nextn.HeadSettings(joint=True, depths=3))  # the head of the loaded model
    trainer.train()
    print(f"on held-out rows, {trainer.evaluate()['eval_head_greedy_AL']:.2f} tokens a round")
    trainer.save_model(str(out / "model"))
    report = nextn.audit(out / "model")
    print(
        f"{out / 'model'}: {len(report.modules)} of {report.declared} modules,",
        "clean" if report.clean else "not clean",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
