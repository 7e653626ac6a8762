"""The torch path on a GPU (`make test-gpu`) against the results of CPUs. NEXTN_TEST_DEVICE=cpu rehearses the tests."""

import copy
import os

import pytest
import rank_jobs
import torch
from packed import fp8_folder
from tiny import CONFIGS, MOST, build, decode, prompt, refrain
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from nextn.cache.attention_layer import write_each, write_indexed
from nextn.edit.quantize import quantize
from nextn.losses.distillation import head_loss
from nextn.losses.divergences import Teacher
from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.settings import Sampling
from nextn.train.cotrain import HeadSettings
from nextn.train.distributed import ALONE, Ranks
from nextn.train.trainer_hook import train_head

DEVICE = torch.device(os.environ.get("NEXTN_TEST_DEVICE", "cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
# What a sum over the tests' few hundred values may be off by, relative to float32 on a CPU.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class OneOfOne(Ranks):
    """FSDP2 with one process, which shards and gathers as several do."""

    is_alone = False


@pytest.fixture
def one_of_one(tmp_path):
    backend = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield OneOfOne(device=DEVICE)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_drafts_change_no_text(name):
    """Every family, prompts of different lengths."""
    model = build(name, modules=MOST[name]).to(DEVICE)
    trunk = backend_for(model, "torch").trunk
    assert trunk.device.type == DEVICE.type
    prompts = [prompt(length, seed=length) for length in (3, 17, 40)]
    texts, _ = decode(model, prompts, num_speculative_tokens=3, max_tokens=10)
    assert texts == decode(model, prompts, num_speculative_tokens=0, max_tokens=10)[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, top_k=9), Sampling(1.0, top_p=0.8)])
@pytest.mark.parametrize("name", ["glm", "glm_two", "qwen", "v4", "step"])
def test_trained_heads_decode_as_on_cpus(name, sampling, fixture_folder):
    prompts = refrain(3, 33, seed=10**6).tolist()
    logs = []
    for device in ("cpu", DEVICE):
        model = Model.load(fixture_folder / name, dtype=torch.float32, device=device)
        logs.append(decode(model, prompts, num_speculative_tokens=4, max_tokens=24, sampling=sampling)[1])
    assert [each.rows for each in logs[0]] == [each.rows for each in logs[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["glm", "qwen"])
def test_half_precision_drafts_as_float32(name, dtype, fixture_folder):
    """Of trained heads, whose texts have few near-ties: drafts and texts of most rounds are the same."""
    prompts, logs = refrain(3, 33, seed=10**6).tolist(), []
    for each, device in ((torch.float32, "cpu"), (dtype, DEVICE)):
        model = Model.load(fixture_folder / name, dtype=each, device=device)
        logs.append(decode(model, prompts, num_speculative_tokens=4, max_tokens=24)[1])
    rows = [[row for step in log for row in step.rows] for log in logs]
    same = sum(one == other for one, other in zip(*rows, strict=False))
    assert same >= 0.9 * len(rows[0])


def test_states_are_written_where_each_sequence_ends():
    generator, starts = torch.Generator().manual_seed(0), [5, 0, 9]
    buffer, states = (torch.randn(3, 2, slots, 8, generator=generator) for slots in (16, 4))
    slow = buffer.clone()
    write_each(slow, states, starts)
    fast = buffer.to(DEVICE)
    write_indexed(fast, states.to(DEVICE), starts)
    assert torch.equal(fast.cpu(), slow)


def losses(dtype, device):
    """Values and gradients of the joint loss, then of a head's loss: [2 + hidden gradients + weight gradient]."""
    generator = torch.Generator().manual_seed(3)
    hidden = [torch.randn(4, 40 - depth, 32, generator=generator) for depth in range(3)]
    weight, tokens = torch.randn(300, 32, generator=generator), torch.randint(300, (4, 40), generator=generator)
    hidden = [each.to(device, dtype).requires_grad_() for each in hidden]
    weight, tokens = weight.to(device, dtype).requires_grad_(), tokens.to(device)
    targets = Targets(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
    joint = mtp_loss(hidden, weight, targets, lam=0.3).total
    head = head_loss(hidden[1:], weight, Teacher(hidden[0].detach(), weight), targets, objective="kl").total
    grads = torch.autograd.grad(joint + head, [*hidden, weight])
    return [value.float().cpu() for value in (joint.detach(), head.detach(), *grads)]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_losses_and_gradients(dtype):
    for value, exact in zip(losses(dtype, DEVICE), losses(torch.float32, "cpu"), strict=True):
        assert (value - exact).norm() <= TOLERANCES[dtype] * exact.norm()


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_joint_training(name, tmp_path, one_of_one):
    """Losses, match rates and norms of four steps, by one process and sharded."""
    expected = rank_jobs.reported(rank_jobs.trainer(ALONE, tmp_path / "cpu", name).run())
    for ranks in (Ranks(device=DEVICE), one_of_one):
        subject = rank_jobs.trainer(ranks, tmp_path / type(ranks).__name__, name)
        assert all(isinstance(each, DTensor) for each in subject.task.named.values()) == (ranks is one_of_one)
        for line, other in zip(rank_jobs.reported(subject.run()), expected, strict=True):
            assert line == pytest.approx(other, rel=2e-3, abs=2e-3)


def test_a_head_of_a_frozen_trunk(tmp_path):
    logs = []
    for ranks in (ALONE, Ranks(device=DEVICE)):
        trainer = rank_jobs.head_trainer(ranks, tmp_path / ranks.device.type / "run")
        logs.append(rank_jobs.reported(trainer.run()))
    for line, other in zip(logs[1], logs[0], strict=True):
        assert line == pytest.approx(other, rel=2e-3, abs=2e-3)


def test_a_head_beside_a_trainer(fixture_folder, tmp_path):
    """transformers' Trainer, whose losses and those of the head are as on a CPU."""
    rows = [{"input_ids": row, "labels": row} for row in refrain(8, 20, seed=3)]
    logs = []
    for device in ("cpu", DEVICE.type):
        model = AutoModelForCausalLM.from_pretrained(fixture_folder / "glm_one", dtype=torch.float32)
        arguments = TrainingArguments(
            str(tmp_path / device), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=device == "cpu",
            learning_rate=1e-3, disable_tqdm=True, logging_steps=1, save_strategy="no", seed=5,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=copy.deepcopy(rows))
        train_head(trainer, fixture_folder / "glm_one", HeadSettings())
        trainer.train()
        keys = ("loss", "head_loss_1")
        logs.append([entry[key] for entry in trainer.state.log_history for key in keys if key in entry])
    assert len(logs[0]) >= 4
    assert logs[1] == pytest.approx(logs[0], rel=2e-3)


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_quantized_weights(weights, fixture_folder, tmp_path):
    """Blocks of fp8, rows of int8 and groups of int4 give the texts that they give on a CPU."""
    folder = tmp_path / weights
    if weights == "fp8":
        Model.load(fixture_folder / "glm").save(folder, dtype=torch.bfloat16)
        fp8_folder(folder, (128, 128))
    else:
        quantize(fixture_folder / "glm", folder, weights=weights, head_bits=8)
    prompts = refrain(3, 33, seed=10**6).tolist()
    texts = [
        decode(Model.load(folder, dtype=torch.float32, device=device), prompts, num_speculative_tokens=3, max_tokens=16)
        for device in ("cpu", DEVICE)
    ]
    assert texts[0][0] == texts[1][0]
