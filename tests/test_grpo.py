"""A head beside TRL's GRPOTrainer: it learns from the texts that the policy samples, and does not change the policy."""

from pathlib import Path

import datasets
import pytest
import torch
from test_sft import tokenizer  # noqa: F401  (a fixture)
from test_trainer_hook import differing, load, state, values
from trl import GRPOConfig, GRPOTrainer

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.losses.chunked import IGNORE
from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import load_head
from nextn.train.cotrain import HeadSettings, model_inputs
from nextn.train.trainer_hook import train_head


def reward(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def trainer_of(model, out, tokenizer, **options) -> GRPOTrainer:  # noqa: F811
    settings = {
        "max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 4, "num_generations": 2, "report_to": [],
        "max_completion_length": 8, "learning_rate": 1e-2, "disable_tqdm": True, "logging_steps": 1, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": ["1 2 3 4 5", "6 7"] * 8})
    args = GRPOConfig(str(out), **settings | options)
    return GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.more
def test_the_policy_trains_as_without_a_head(fixture_folder, tmp_path, tokenizer):  # noqa: F811
    """Rewards, losses and weights to the last bit, over micro-batches, and all of the head trained."""
    runs = []
    for name in ("alone", "beside"):
        model = load(fixture_folder / "qwen")
        run = trainer_of(model, tmp_path / name, tokenizer, gradient_accumulation_steps=2)
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


def test_the_loss_is_that_of_each_completion_alone(fixture_folder, tmp_path, tokenizer):  # noqa: F811
    """Prompts of different lengths, padded on the left, count neither as labels nor as context."""
    base = fixture_folder / "qwen"
    run = trainer_of(load(base, attn_implementation="sdpa"), tmp_path, tokenizer, max_steps=1)
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
def test_micro_batches_are_averaged(fixture_folder, tmp_path, tokenizer):  # noqa: F811
    """The same four completions in one part or two. Catches a gradient that is summed, or divided twice."""
    norms = []
    for parts in (1, 2):
        options = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts, "max_steps": 1}
        run = trainer_of(load(fixture_folder / "qwen"), tmp_path / str(parts), tokenizer, **options)
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
    assert all(torch.equal(value, saved[name].float()) for name, value in scope["head"].state_dict().items())
    assert not [each for each in audit(Checkpoint.open(tmp_path / "out")).findings if each.rule == "head-stale"]


def test_results_of_tools_are_no_labels():
    ids = torch.arange(1, 4)[None]
    ones = torch.ones_like(ids)
    batch = {"prompt_ids": ids, "prompt_mask": ones, "completion_ids": ids, "completion_mask": ones}
    batch["tool_mask"] = torch.tensor([[1, 0, 1]])
    assert model_inputs(batch)["labels"].tolist() == [[IGNORE] * 3 + [1, IGNORE, 3]]
