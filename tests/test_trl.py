"""A head beside TRL's trainers: packed rows, chats, texts that the policy samples; the fine-tune does not change."""

import copy
import warnings
from pathlib import Path

import datasets
import peft
import pytest
import torch
from artifacts import inventory_of
from test_trainer_hook import differing, load, state, values
from tiny import refrain
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.errors import ConfigError
from nextn.losses.chunked import IGNORE
from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import load_head
from nextn.train.cotrain import HeadSettings, model_inputs
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
    """peft_config: TRL wraps the model; adapters and head train, the rest stays, and a checkpoint resumes exactly."""
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
    assert len(inventory_of(tmp_path / "merged").modules) == 1


def reward(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def grpo_trainer_of(model, out, tokenizer, **options) -> GRPOTrainer:
    settings = {
        "max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 4, "num_generations": 2, "report_to": [],
        "max_completion_length": 8, "learning_rate": 1e-2, "disable_tqdm": True, "logging_steps": 1, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": ["1 2 3 4 5", "6 7"] * 8})
    args = GRPOConfig(str(out), **settings | options)
    return GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.more
def test_the_policy_trains_as_without_a_head(fixture_folder, tmp_path, tokenizer):
    """Rewards, losses and weights to the last bit, over micro-batches, and all of the head trained."""
    runs = []
    for name in ("alone", "beside"):
        model = load(fixture_folder / "qwen")
        run = grpo_trainer_of(model, tmp_path / name, tokenizer, gradient_accumulation_steps=2)
        head = train_head(run, fixture_folder / "qwen", HeadSettings(depths=3)) if name == "beside" else None
        before = state(head) if head is not None else {}
        untrained = state(model)
        run.train()
        runs.append((run, state(model)))
    (alone, weights), (beside, trained) = runs
    assert differing(untrained, weights)
    assert differing(weights, trained) == []
    for key in ("loss", "grad_norm", "reward"):
        assert values(beside, key) == values(alone, key)
    assert set(differing(before, state(head))) == {
        name for name, value in head.named_parameters() if value.requires_grad
    }
    assert values(beside, "head_sampled_AL")[-1] >= 1


def test_the_loss_is_that_of_each_completion_alone(fixture_folder, tmp_path, tokenizer):
    """Prompts of different lengths, padded on the left, count neither as labels nor as context."""
    base = fixture_folder / "qwen"
    run = grpo_trainer_of(load(base, attn_implementation="sdpa"), tmp_path, tokenizer, max_steps=1)
    train_head(run, base, HeadSettings(depths=3))
    batches, inner = [], run.compute_loss
    run.compute_loss = lambda model, inputs, **options: batches.append(inputs) or inner(model, inputs, **options)
    run.train()
    (batch,) = batches
    assert set(batch["prompt_mask"].sum(1).tolist()) == {2, 5}
    own = load_head(base, load(base))
    sums, counts = torch.zeros(4), torch.zeros(4)
    joined = model_inputs(batch)
    for tokens, labels, mask in zip(joined["input_ids"], joined["labels"], joined["attention_mask"], strict=True):
        real = mask.bool()
        text = tokens[None, real]
        with torch.no_grad():
            hidden = own.trunk(text)
            hiddens = [hidden.final_hidden, *own.teacher_forced_hidden(text, hidden.head_input, 3)]
            targets = Targets(text, torch.zeros_like(text), (labels != IGNORE)[None, real])
            report = mtp_loss(hiddens, lm_head_weights(own.trunk, own, 3), targets, lam=1.0)
        sums, counts = sums + report.sums, counts + report.counts
    assert counts[0] == batch["completion_mask"].sum()
    for depth in (1, 2, 3):
        assert values(run, f"head_loss_{depth}")[0] == pytest.approx((sums / counts)[depth].item(), rel=1e-3)


@pytest.mark.more
def test_micro_batches_are_averaged(fixture_folder, tmp_path, tokenizer):
    """The same four completions in one part or two. Catches a gradient that is summed, or divided twice."""
    norms = []
    for parts in (1, 2):
        options = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts, "max_steps": 1}
        run = grpo_trainer_of(load(fixture_folder / "qwen"), tmp_path / str(parts), tokenizer, **options)
        train_head(run, fixture_folder / "qwen", HeadSettings(depths=1))
        run.train()
        norms += values(run, "head_grad_norm")
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_the_documented_loop_of_another_trainer(fixture_folder, tmp_path):
    """The guide's code runs; no gradient of the head's loss reaches the policy, and all of the head gets one."""
    page = (Path(__file__).parents[1] / "docs/how-to/beside-fine-tune.md").read_text()
    code = next(part.split("```")[0] for part in page.split("```python") if "CotrainLoss" in part.split("```")[0])
    model, tokens = load(fixture_folder / "qwen"), torch.randint(0, 38, (2, 12))
    scope = {
        "model": model, "tokens": tokens, "mask": torch.ones_like(tokens), "labels": tokens,
        "policy_loss": torch.zeros((), requires_grad=True),
    }  # fmt: skip
    exec(code.replace("org/base", str(fixture_folder / "qwen")), scope)
    assert all(value.grad is None for value in model.parameters())
    assert all(value.grad is not None for value in scope["head"].parameters())
    assert scope["survived"].shape == (2, 5)
    with torch.no_grad():  # as an optimizer does
        for value in scope["head"].parameters():
            value.mul_(1.5)
    saving = next(part.split("```")[0] for part in page.split("```python") if "save_head" in part.split("```")[0])
    exec(saving.replace('"out"', repr(str(tmp_path / "out"))), scope)
    saved = nextn.Model.load(tmp_path / "out").head.state_dict()
    assert nextn.load(tmp_path / "out").trained_length == 12
    assert all(torch.equal(value, saved[name].float()) for name, value in scope["head"].state_dict().items())
    assert not [each for each in audit(Checkpoint.open(tmp_path / "out")).findings if each.rule == "head-stale"]


LLAMA = LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([[1, 2]], "tokens is list"), (torch.tensor([1, 2]), r"tokens: \[2\]; expected"), (torch.tensor([[99]]), "below")],
)
def test_a_new_head_of_other_tokens_is_refused(tokens, message):
    with pytest.raises(ConfigError, match=message):
        nextn.new_head(LlamaForCausalLM(LLAMA), tokens)


@pytest.mark.parametrize("kind", ["qwen3_5", "llama"])
def test_the_documented_loop_with_a_new_head(kind, fixture_folder, tmp_path):
    """With public names alone: it is made, learns, is saved beside its trunk, and drafts there; Llama has no family."""
    page = (Path(__file__).parents[1] / "docs/how-to/beside-fine-tune.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```python")]
    making, loop, saving = (
        next(each for each in blocks if name in each) for name in ("nextn.new_head", "CotrainLoss", "save_head")
    )
    model = load(fixture_folder / "qwen") if kind == "qwen3_5" else LlamaForCausalLM(LLAMA)
    tokens = torch.randint(0, 38, (2, 40))
    padded = torch.ones_like(tokens).index_fill_(1, torch.tensor([38, 39]), 0)
    scope = {
        "model": model, "tokens": tokens, "mask": padded, "labels": tokens.where(padded > 0, IGNORE),
        "policy_loss": torch.zeros((), requires_grad=True), "nextn": nextn,
    }  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        exec(making, scope)
    before = copy.deepcopy(scope["head"].state_dict())
    optimizer = torch.optim.AdamW(scope["head"].parameters(), lr=3e-3)
    for _ in range(4):
        exec("cotrain" + loop.split("cotrain", 1)[1], scope)
        optimizer.step()
        optimizer.zero_grad()
    exec(saving.replace('"out"', repr(str(tmp_path / "out"))), scope)
    saved, learned = nextn.load(tmp_path / "out"), scope["head"].state_dict()
    assert saved.trained_length == 38
    assert all(torch.equal(value, saved.head.state_dict()[name].float()) for name, value in learned.items())
    assert not all(torch.equal(value, before[name]) for name, value in learned.items())
    assert nextn.audit(tmp_path / "out", require_head=True).clean
    assert nextn.save_head(scope["head"], tmp_path / "alone" / "head.safetensors") is None
    nextn.save_head(scope["head"], tmp_path / "alone" / "head.safetensors")  # over its own
    config = (tmp_path / "out" / "config.json").read_text()
    for name in ("head.safetensors", "model.safetensors"):
        with pytest.raises(ConfigError, match="its folder has another model"):
            nextn.save_head(scope["head"], tmp_path / "out" / name)
    assert (tmp_path / "out" / "config.json").read_text() == config
    with pytest.raises(ConfigError, match="no such folder; save the trunk there first"):
        nextn.save_head(scope["head"], tmp_path / "none")
    alone = nextn.load(tmp_path / "out", head=tmp_path / "alone" / "head.safetensors")
    assert alone.trained_length == 38
    assert all(torch.equal(value, alone.head.state_dict()[name].float()) for name, value in learned.items())
    settings = nextn.Settings(num_speculative_tokens=2, max_tokens=8)
    (result,) = nextn.generate(saved, [tokens[0, :8].tolist()], settings)
    assert result.acceptance.num_rounds


def test_results_of_tools_are_no_labels():
    ids = torch.arange(1, 4)[None]
    ones = torch.ones_like(ids)
    batch = {"prompt_ids": ids, "prompt_mask": ones, "completion_ids": ids, "completion_mask": ones}
    batch["tool_mask"] = torch.tensor([[1, 0, 1]])
    assert model_inputs(batch)["labels"].tolist() == [[IGNORE] * 3 + [1, IGNORE, 3]]
