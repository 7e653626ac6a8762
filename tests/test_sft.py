"""A head beside TRL's SFTTrainer: packed rows, its fused output head, a chat's assistant tokens, LoRA that it makes."""

import datasets
import peft
import pytest
import torch
from test_trainer_hook import differing, inventory, load, state, values
from tiny import refrain
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import load_head
from nextn.train.cotrain import HeadSettings
from nextn.train.trainer_hook import train_head

ROWS = [row.tolist() for row in refrain(6, 18, seed=3)]
ROWS = [row[: 18 - 2 * index] for index, row in enumerate(ROWS)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(index): index for index in range(40)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="39", pad_token="38")


def trainer_of(model, out, tokenizer, *, data=None, peft_config=None, **options) -> SFTTrainer:
    settings = {
        "max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "learning_rate": 1e-3, "disable_tqdm": True, "logging_steps": 1, "bf16": False, "max_length": 64,
        "activation_checkpointing": False,
    }  # fmt: skip
    return SFTTrainer(
        model, SFTConfig(str(out), **settings | options), processing_class=tokenizer, peft_config=peft_config,
        train_dataset=data or datasets.Dataset.from_dict({"input_ids": ROWS}),
    )  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("packed", [False, True])
def test_losses_are_those_of_each_document_alone(fixture_folder, tmp_path, tokenizer, packed):
    """All rows in one step, side by side or in one row, with the trunk's own attention inside each: the sums over the
    documents, one at a time. Catches labels or attention that reach over a document's end."""
    base = fixture_folder / "glm_one"
    how = {"padding_free": True, "packing": True, "packing_strategy": "bfd"} if packed else {}
    model = load(base, attn_implementation="sdpa")
    run = trainer_of(model, tmp_path, tokenizer, max_steps=1, per_device_train_batch_size=6, **how)
    if packed:  # TRL's own choice needs flash attention; sdpa masks by the positions that its collator makes
        run.data_collator.padding_free = True
    train_head(run, base, HeadSettings(depths=3))
    run.train()
    alone = load(base)
    own = load_head(base, alone)
    sums, counts = torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for row in ROWS:
            tokens = torch.tensor([row])
            hidden = own.trunk(tokens)
            hiddens = [hidden.final_hidden, *own.teacher_forced_hidden(tokens, hidden.head_input, 3)]
            report = mtp_loss(hiddens, lm_head_weights(own.trunk, own, 3), Targets(tokens), lam=1.0)
            sums, counts = sums + report.sums, counts + report.counts
    assert values(run, "loss")[0] == pytest.approx((sums / counts)[0].item(), rel=1e-3)
    for depth in (1, 2, 3):
        assert values(run, f"head_loss_{depth}")[0] == pytest.approx((sums / counts)[depth].item(), rel=1e-3)
    assert values(run, "head_greedy_AL")[0] >= 1


@pytest.mark.more
def test_the_users_tokens_do_not_count(fixture_folder, tmp_path, tokenizer):
    """completion_only_loss: with every token but the last two a prompt, each depth has two labels a row, or fewer."""
    texts = [" ".join(map(str, row)) for row in ROWS]
    halves = [text.rsplit(" ", 2) for text in texts]
    data = datasets.Dataset.from_dict(
        {"prompt": [half[0] for half in halves], "completion": [f" {half[1]} {half[2]}" for half in halves]}
    )
    run = trainer_of(load(fixture_folder / "qwen"), tmp_path, tokenizer, data=data, per_device_train_batch_size=6)
    head = train_head(run, fixture_folder / "qwen", HeadSettings(depths=2))
    seen = []
    inner = run.get_batch_samples
    run.get_batch_samples = lambda *args: seen.append(inner(*args)) or seen[-1]
    run.train()
    labels = seen[0][0][0]["labels"]
    assert ((labels != -100).sum(1) == 3).all()  # the completion, and the eos behind it
    assert head.training
    assert values(run, "head_loss_2")


@pytest.mark.slow
def test_lora_of_trl(fixture_folder, tmp_path, tokenizer):
    """peft_config: TRL wraps the model; adapters and head train, the rest stays, and a checkpoint goes on exactly."""
    base, ends = fixture_folder / "qwen", []
    for out, starts in (("whole", [None]), ("parts", [1, None])):
        for stop in starts:
            lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
            run = trainer_of(
                load(base), tmp_path / out, tokenizer, peft_config=lora, save_strategy="steps", save_steps=1,
                lr_scheduler_type="constant",
            )  # fmt: skip
            head = train_head(run, base, HeadSettings(joint=True))
            before = state(run.model)
            run.args.max_steps = stop or 2
            run.train(resume_from_checkpoint=(tmp_path / out / "checkpoint-1").exists())
        ends.append(state(run.model) | state(head))
    assert differing(*ends) == []
    assert all("lora_" in name for name in differing(before, state(run.model)))
    run.save_model(tmp_path / "adapter")
    assert Checkpoint.open(tmp_path / "adapter" / "head" / "head.safetensors").tensors
    run.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert len(inventory(tmp_path / "merged").modules) == 1
