"""A head beside a Trainer's fine-tune: what reaches the trunk, what is counted, logged, saved and gone on with."""

import copy
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from artifacts import inventory_of
from quick import case, others_slow
from tiny import prompt, refrain
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.provenance import Provenance, head_fingerprint
from nextn.errors import CheckpointError, ConfigError
from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.head import Head
from nextn.model.lm_head_columns import lm_head_weights
from nextn.model.model import Model, load_head
from nextn.train import trainer_hook
from nextn.train.cotrain import HeadSettings
from nextn.train.trainer_hook import train_head


@pytest.fixture(params=others_slow(["glm_one", "qwen"], "glm_one"))
def base(request, fixture_folder, tmp_path):
    return shutil.copytree(fixture_folder / request.param, tmp_path / "base")


@pytest.fixture
def qwen(fixture_folder, tmp_path):
    return shutil.copytree(fixture_folder / "qwen", tmp_path / "base")


class Phrases(Dataset):
    """Rows of different lengths, padded on the right; the first tokens are no labels, as of a user's turn."""

    def __init__(self, count: int = 8, length: int = 20) -> None:
        self.rows = refrain(count, length, seed=3)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens, real = self.rows[index], self.rows.shape[1] - index
        columns = torch.arange(len(tokens))
        labels = tokens.where((columns >= 3) & (columns < real), -100)
        return {"input_ids": tokens, "labels": labels, "attention_mask": (columns < real).long()}


def trainer_of(model, out, *, data=None, held_out=None, **options) -> Trainer:
    settings = {
        "max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "learning_rate": 1e-3, "disable_tqdm": True, "logging_steps": 1, "seed": 5,
    }  # fmt: skip
    args = TrainingArguments(str(out), **settings | options)
    return Trainer(model=model, args=args, train_dataset=data or Phrases(), eval_dataset=held_out)


def load(folder, dtype=torch.float32, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **changes)


def state(module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def differing(before, after) -> list[str]:
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def values(run, key) -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


@pytest.mark.more
@pytest.mark.parametrize(
    "options", [{}, *(case(each, quick=False) for each in ({"gradient_accumulation_steps": 2}, {"bf16": True}))]
)
def test_detached_leaves_the_trunk_as_without_a_head(base, tmp_path, options):
    """The trunk's losses, gradient norms and weights to the last bit, and all of the head trained. Catches a gradient
    through embedding, output head or states, a common clipping, and random numbers that the head uses up."""
    runs = []
    for name in ("alone", "beside"):
        model = load(base, attention_dropout=0.2)
        run = trainer_of(model, tmp_path / name, max_grad_norm=0.01, max_steps=3, **options)
        head = train_head(run, base, HeadSettings(depths=3)) if name == "beside" else None
        before = state(head) if head is not None else {}
        run.train()
        runs.append((run, state(model)))
    (alone, weights), (beside, trained) = runs
    assert differing(weights, trained) == []
    for key in ("loss", "grad_norm"):
        assert values(beside, key) == values(alone, key)
    assert set(differing(before, state(head))) == {
        name for name, value in head.named_parameters() if value.requires_grad
    }


@pytest.mark.more
@pytest.mark.parametrize("kind", others_slow(["full", "lora"], "lora"))
def test_joint_is_the_sum_of_both(base, tmp_path, kind):
    """One step of gradient descent is the trunk's loss plus lambda times the head's, gradient for gradient, over a step
    of two unequal micro-batches; the Trainer's `loss` stays the trunk's own."""
    model, twin = load(base), load(base)
    if kind == "lora":
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        models = []
        for each in (model, twin):
            torch.manual_seed(0)
            models.append(peft.get_peft_model(each, config))
        wrapped, other = models
    else:
        wrapped, other = model, twin
    seen = {}
    run = trainer_of(wrapped, tmp_path / "run", max_steps=1, gradient_accumulation_steps=4, max_grad_norm=0)
    head = train_head(run, base, HeadSettings(joint=True, depths=3, lam=0.7, beta=0.6))
    inner = run.create_optimizer

    def plain(*args):
        optimizer = inner(*args)
        optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(wrapped, head)))
        return optimizer

    run.create_optimizer = plain
    run.train()

    rows = [Phrases()[index] for index in range(8)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    own = load_head(base, twin)
    with own.trunk.capture_hidden() as states:
        alone = other(**batch).loss
    documents = batch["attention_mask"] - 1
    targets = Targets(batch["input_ids"], documents, batch["labels"] != -100)
    hiddens = [states[0].final_hidden, *own.teacher_forced_hidden(batch["input_ids"], states[0].head_input, 3)]
    report = mtp_loss(
        hiddens, lm_head_weights(own.trunk, own, 3), targets, lam=0.7, depth_weights=(3 / 1.96, 1.8 / 1.96, 1.08 / 1.96)
    )
    report.total.backward()
    expected = gradients(other, own)
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=2e-6, rtol=1e-3, msg=name)
    assert values(run, "loss")[0] == pytest.approx(alone.item(), rel=1e-4)
    for depth in (1, 2, 3):
        assert values(run, f"head_loss_{depth}")[0] == pytest.approx(report.per_depth[depth].item(), rel=1e-4)


def gradients(model, head):
    named = [*model.named_parameters(), *((f"head.{name}", value) for name, value in head.named_parameters())]
    return {name: value.grad.clone() for name, value in named if value.grad is not None}


def assert_saved(folder, head):
    """The head as it trains, in the published layout, with the record of its trunk; nothing for the audit to mend."""
    stored = Model.load(folder)
    assert (
        differing(state(stored.head), {name: value.to(stored.trunk.dtype) for name, value in state(head).items()}) == []
    )
    report = audit(Checkpoint.open(folder))
    assert report.clean, report.findings
    record = Provenance.read(Checkpoint.open(folder))
    assert record is not None
    assert (record.made_by, record.trained_with) == ("train", record.beside)
    assert record.trained_length == head.trained_length is not None


@pytest.mark.more
@pytest.mark.parametrize("dtype", others_slow([torch.float32, torch.bfloat16], torch.bfloat16))
def test_saved_with_every_checkpoint(base, tmp_path, dtype):
    run = trainer_of(load(base, dtype), tmp_path / "run", save_strategy="steps", save_steps=1)
    head = train_head(run, settings=HeadSettings(depths=2))
    run.train()
    run.save_model(tmp_path / "final")
    assert_saved(tmp_path / "final", head)
    assert_saved(tmp_path / "run" / "checkpoint-2", head)
    prints = [
        head_fingerprint(inventory_of(folder))
        for folder in (base, tmp_path / "run" / "checkpoint-1", tmp_path / "final")
    ]
    assert len(set(prints)) == 3


@pytest.mark.more
@pytest.mark.parametrize("kind", others_slow(["full", "lora", "bfloat16"], "full"))
def test_resumes_to_the_same_bits(qwen, tmp_path, kind):
    """Stopped and gone on with: model, head and their optimizer as never stopped. In bfloat16 the published head is
    rounded, and the one that trains must not be."""
    ends = []
    for out, starts in (("whole", [None]), ("parts", [1, None])):
        for stop in starts:
            model = load(qwen, torch.bfloat16 if kind == "bfloat16" else torch.float32)
            if kind == "lora":
                torch.manual_seed(0)
                config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, config)
            run = trainer_of(model, tmp_path / out, save_strategy="steps", save_steps=1, lr_scheduler_type="constant")
            head = train_head(run, qwen, HeadSettings(depths=2, joint=True))
            run.args.max_steps = stop or 2
            run.train(resume_from_checkpoint=(tmp_path / out / "checkpoint-1").exists())
        ends.append(state(model) | state(head))
    assert differing(*ends) == []


@pytest.mark.more
def test_lora(qwen, tmp_path):
    """Adapters are saved with their head beside them, and the merged model gets it."""
    model = peft.get_peft_model(load(qwen), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    run = trainer_of(model, tmp_path / "run")
    head = train_head(run, qwen)
    run.train()
    run.save_model(tmp_path / "adapter")
    stored = load_head(tmp_path / "adapter" / "head" / "head.safetensors", load(qwen))
    assert differing(state(stored), state(head)) == []
    assert peft.PeftModel.from_pretrained(load(qwen), tmp_path / "adapter") is not None
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_saved(tmp_path / "merged", head)


def test_a_frozen_trunk(qwen, tmp_path):
    """Head alone: every weight of the trunk stays, bit for bit. The head's step is as long as clipping lets it be."""
    model = load(qwen).requires_grad_(False)
    before = state(model)
    run = trainer_of(model, tmp_path, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.01)
    head = train_head(run, qwen)
    start = state(head)
    run.train()
    assert differing(before, state(model)) == []
    steps = [(value - start[name]).norm() for name, value in state(head).items()]
    assert all(step > 0 for step in steps)
    assert torch.stack(steps).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert values(run, "head_grad_norm")[0] > 0.01


@pytest.mark.more
def test_a_fresh_head_learns(qwen, tmp_path):
    """From nothing, in the fixtures' language: the loss of each depth falls, and acceptance rises. lr is the head's."""
    run = trainer_of(
        load(qwen), tmp_path, max_steps=40, logging_steps=20, learning_rate=1e-6, data=Phrases(64),
        per_device_train_batch_size=8,
    )  # fmt: skip
    head = train_head(run, settings=HeadSettings(depths=2, num_modules=1, lr=3e-3))
    run.train()
    assert head.num_modules == 1
    for depth in (1, 2):
        first, last = values(run, f"head_loss_{depth}")
        assert last < first - 0.2
    first, last = values(run, "head_greedy_AL")
    assert last > first
    assert all(math.isfinite(value) for value in values(run, "head_grad_norm"))


@pytest.fixture(scope="module")
def speaker(fixture_folder):
    """A trunk that has learned which tokens are frequent, as in any language, and rows of such text."""
    model = load(fixture_folder / "qwen")
    weights, generator = 1.0 / torch.arange(1, 41) ** 1.5, torch.Generator().manual_seed(0)
    rows = torch.multinomial(weights, 64 * 20, replacement=True, generator=generator).view(64, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(40):
        batch = rows[step % 4 :: 4]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.more
@pytest.mark.parametrize("kind", others_slow(["full", "lora"], "lora"))
def test_a_fresh_head_begins_as_its_trunk(speaker, tmp_path, monkeypatch, kind):
    """Made of the trunk's last layer, its first loss is well below that of random values; adapters do not hide the
    layer, and making it draws nothing from the Trainer's random numbers."""

    def first_loss(name):
        model = copy.deepcopy(speaker[0])
        layer = model.model.layers[-1].self_attn.q_proj.weight.clone()
        if kind == "lora":
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, config)
        run = trainer_of(model, tmp_path / name, max_steps=1, data=speaker[1], per_device_train_batch_size=64)
        before = torch.get_rng_state()
        with warnings.catch_warnings(action="error", category=UserWarning):
            head = train_head(run, settings=HeadSettings(depths=2, num_modules=1))
        assert torch.equal(torch.get_rng_state(), before)
        is_copy = torch.equal(head.stack[0].layers[0].self_attn.q_proj.weight, layer)
        run.train()
        return values(run, "head_loss_1")[0], is_copy

    made, is_copy = first_loss("made")
    assert is_copy
    monkeypatch.setattr(
        trainer_hook,
        "init_head",
        lambda family, trunk, _, num_modules: (Head(family, trunk, num_modules=num_modules), []),
    )
    random, is_copy = first_loss("random")
    assert not is_copy
    assert made < random - 0.5


def test_a_fresh_head_needs_text_and_room(qwen, fixture_folder, tmp_path):
    run = trainer_of(load(qwen), tmp_path)
    run.train_dataset = None
    with pytest.raises(ConfigError, match="give the Trainer a train_dataset first"):
        train_head(run, settings=HeadSettings(num_modules=1))
    with pytest.raises(ConfigError, match=r"modules = 5; .* allows at most"):
        train_head(trainer_of(load(qwen), tmp_path), settings=HeadSettings(num_modules=5))


def test_evaluation_is_logged_and_changes_nothing(qwen, tmp_path):
    """eval_loss is the trunk's own; the head's figures come beside it, and can choose the best checkpoint."""
    model = load(qwen)
    run = trainer_of(model, tmp_path, held_out=Phrases(4))
    alone = run.evaluate()["eval_loss"]
    train_head(run, qwen, HeadSettings(depths=2))
    reported = run.evaluate()
    assert reported["eval_loss"] == alone
    assert 1 < reported["eval_head_greedy_AL"] <= 3
    assert {"eval_head_match_1", "eval_head_match_2", "eval_head_overlap_2", "eval_head_loss_2"} <= reported.keys()


def test_the_best_checkpoint_brings_its_head(qwen, tmp_path):
    """load_best_model_at_end puts the trunk back; a head of another step beside it would be stale."""
    run = trainer_of(
        load(qwen), tmp_path, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_head_loss_1", greater_is_better=True,
        held_out=Phrases(4),
    )  # fmt: skip
    head = train_head(run, qwen, HeadSettings(lr=0.01))
    run.train()
    best = run.state.best_model_checkpoint
    assert best.endswith("checkpoint-1")
    assert differing(state(Model.load(best).head), state(head)) == []


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_gradient(qwen, tmp_path):
    ends = []
    for is_on in (False, True):
        model = load(qwen)
        run = trainer_of(model, tmp_path, gradient_checkpointing=is_on)
        head = train_head(run, qwen, HeadSettings(joint=True))
        run.train()
        ends.append(state(model) | state(head))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], atol=1e-6, rtol=1e-5)


def test_soft_objectives_are_on_the_trunks_distribution(qwen, tmp_path):
    """1 - overlap is what TV is the mean of, so the figure that is logged for depth 1 says the loss."""
    run = trainer_of(load(qwen), tmp_path, max_steps=1, per_device_train_batch_size=1)
    train_head(run, qwen, HeadSettings(objective="tv", depths=1))
    run.train()
    assert values(run, "head_loss_1")[0] == pytest.approx(1 - values(run, "head_overlap_1")[0], rel=1e-4)
    with pytest.raises(ConfigError, match="expected one of ce, kl"):
        HeadSettings(objective="hope")


@pytest.mark.more
def test_unrolled(qwen, tmp_path):
    """Depths beyond the module then attend as in decoding: other losses from depth 2 on."""
    reported = []
    for unrolled in (False, True):
        run = trainer_of(load(qwen), tmp_path, max_steps=1)
        train_head(run, qwen, HeadSettings(unrolled=unrolled, depths=2))
        run.train()
        reported.append([values(run, f"head_loss_{depth}")[0] for depth in (1, 2)])
    assert reported[0][0] == pytest.approx(reported[1][0], abs=1e-5)
    assert abs(reported[0][1] - reported[1][1]) > 1e-4


@pytest.mark.more
def test_rows_shorter_than_the_depths(qwen, tmp_path):
    run = trainer_of(
        load(qwen), tmp_path, data=[{"input_ids": torch.tensor(prompt(2)), "labels": torch.tensor(prompt(2))}] * 4
    )
    train_head(run, qwen, HeadSettings(depths=4))
    run.train()
    assert all(math.isfinite(value) for value in values(run, "loss"))


@pytest.mark.slow
def test_a_trainer_that_divides_by_micro_batches(qwen, tmp_path):
    """Of a model that takes no count of labels the Trainer averages micro-batches; the head's loss stays one over all
    labels of the step. And no step begins with the gradient of the one before."""
    ends, begun = [], []
    fresh = TrainerCallback()
    fresh.on_step_begin = lambda *_, **__: begun.append(all(value.grad is None for value in head.parameters()))
    for accepts in (True, False):
        run = trainer_of(
            load(qwen).requires_grad_(False), tmp_path, gradient_accumulation_steps=4, optim="sgd",
            learning_rate=0.05, max_grad_norm=0, lr_scheduler_type="constant", data=Phrases(16),
        )  # fmt: skip
        run.model_accepts_loss_kwargs = accepts
        run.add_callback(fresh)
        head = train_head(run, qwen)
        run.train()
        ends.append(state(head))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, atol=1e-6, rtol=1e-4, msg=name)
    assert begun == [True] * 4


@pytest.mark.slow
def test_two_processes_are_one(fixture_folder, tmp_path):
    """Under DistributedDataParallel the head is outside of what is synchronized: its gradient, labels and figures must
    still be those of all ranks, and joint, so must the trunk's."""
    script, base = Path(__file__).with_name("ranks_beside.py"), fixture_folder / "glm_one"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ends = []
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", ranks)):
        command = [sys.executable, *launcher, script, base, tmp_path / name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        ends.append(torch.load(tmp_path / f"{name}.pt"))
    assert "head_match_2" in ends[0]
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_what_cannot_work_is_refused(qwen, tmp_path):
    """At once, by name: a silent wrong would be found out after the run."""
    run = trainer_of(load(qwen), tmp_path)
    run.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="DeepSpeed"):
        train_head(run)
    run.is_deepspeed_enabled, run.is_fsdp_enabled = False, True
    with pytest.raises(ConfigError, match="FSDP"):
        train_head(run)
    run.is_fsdp_enabled = False
    train_head(run)
    with pytest.raises(ConfigError, match="a head already"):
        train_head(run)
    lora = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="lm_head"):
        train_head(trainer_of(peft.get_peft_model(load(qwen), lora), tmp_path))
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run = trainer_of(peft.get_peft_model(load(qwen), virtual), tmp_path)
    train_head(run, qwen)
    with pytest.raises(ConfigError, match="virtual tokens"):
        run.train()
    load(qwen).save_pretrained(tmp_path / "lost")
    with pytest.raises(CheckpointError, match="head"):
        train_head(trainer_of(load(qwen), tmp_path), tmp_path / "lost")
    run = trainer_of(load(qwen), tmp_path)
    run.create_optimizer_and_scheduler(4)
    with pytest.raises(ConfigError, match="scheduler"):
        train_head(run)
    with pytest.raises(ConfigError, match="depths = 0; expected a whole number >= 1"):
        HeadSettings(depths=0)
