"""Muon in float32: torch's, but for where it rounds."""

import platform

import pytest
import torch

from nextn.training.half import half_pays
from nextn.training.muon import Muon32, orthogonal
from nextn.training.optimisers import optimisers
from nextn.training.train_config import TrainConfig


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_come_near_one(shape):
    """Catches a matrix whose directions keep the sizes that they had, and one that is turned."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(matrix)
    assert made.shape == matrix.shape
    sizes = torch.linalg.svdvals(made)
    assert sizes.min() > 0.5
    assert sizes.max() < 1.5
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(made.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_zeros_stay_zeros():
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_its_steps_are_those_of_torch(shape):
    """Momentum to the last bit; parameters as far as bfloat16 tells."""
    draws = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=draws), torch.randn(5, *shape, generator=draws)
    options = {"lr": 0.03, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    left = torch.nn.Parameter(torch.ones(2, 2))  # has no gradient
    ends, moments = [], []
    for kind in (torch.optim.Muon, Muon32):
        value = torch.nn.Parameter(start.clone())
        optimiser = kind([value, left], **options)
        for gradient in gradients:
            value.grad = gradient.clone()
            optimiser.step()
        ends.append(value.detach())
        moments.append(optimiser.state[value]["momentum_buffer"])
    assert torch.equal(*moments)
    moved = (ends[0] - start).norm()
    assert (ends[0] - ends[1]).norm() < 0.03 * moved
    assert torch.equal(left, torch.ones(2, 2))


@pytest.mark.parametrize(("pays", "kind", "dtype"), [(True, "Muon", "bfloat16"), (False, "Muon32", "float32")])
def test_what_the_machine_multiplies_fast(monkeypatch, pays, kind, dtype):
    """Catches bfloat16 on processors that convert around each product, where training takes ten times as long."""
    for place in ("half", "optimisers"):
        monkeypatch.setattr(f"nextn.training.{place}.half_pays", lambda device="": pays)
    config = TrainConfig(steps=1, optimizer="muon")
    assert config.dtype == dtype
    made = optimisers({"layers.0.weight": torch.nn.Parameter(torch.zeros(4, 4))}, config)
    assert type(made[-1]).__name__ == kind
    assert TrainConfig(steps=1, dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="what torch's kernels need is told for x86 here")
def test_bfloat16_pays_where_registers_are_long():
    """Catches a rule that says the same on every machine: torch multiplies it with AVX-512 and what builds on it."""
    assert half_pays("cpu") == torch.backends.cpu.get_cpu_capability().startswith("AVX512")
