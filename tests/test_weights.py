"""weights: tensors of local files as torch tensors; what is no plain number is told."""

import re

import pytest
import torch
from safetensors.torch import save_file

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.tensor_file import write_json
from nextn.checkpoints.weights import Weights
from nextn.families import by_name

FP8 = torch.float8_e4m3fn


def opened(tmp_path, tensors, **config) -> Weights:
    save_file(tensors, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", config)
    return Weights(Checkpoint.open(tmp_path), by_name("deepseek_v3"))


def test_names_and_values(tmp_path):
    """Scales are no tensors of their own, and an fp8 weight never comes without its."""
    tensors = {
        "a.weight": torch.full((4, 8), 2.0).to(FP8),
        "a.weight_scale_inv": torch.tensor([[0.25]]),
        "a.input_scale": torch.tensor(3.0),
        "b.weight": torch.full((2,), 0.5, dtype=torch.bfloat16),
    }
    with opened(tmp_path, tensors) as weights:
        assert sorted(weights.names()) == ["a.weight", "b.weight"]
        assert torch.equal(weights.read("a.weight"), torch.full((4, 8), 0.5))
        stored = weights.stored("b.weight")
        assert (stored.dtype, stored[...].dtype) == (torch.bfloat16, torch.bfloat16)
        assert weights.stored("a.weight").dtype is None
        assert (weights.method, weights.packed(weights.names())) == ("", None)


def test_blocks_of_the_config(tmp_path):
    """weight_block_size says which numbers share a scale."""
    tensors = {"a.weight": torch.ones(4, 8).to(FP8), "a.weight_scale_inv": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    section = {"quant_method": "fp8", "weight_block_size": [2, 4]}
    with opened(tmp_path, tensors, quantization_config=section) as weights:
        assert weights.problem("a.weight") is None
        assert weights.read("a.weight")[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
        assert weights.read("a.weight")[3].tolist() == [3, 3, 3, 3, 4, 4, 4, 4]
        assert weights.method == "fp8"


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ({}, "without its scales"),
        ({"a.weight_scale_inv": torch.ones(3, 1)}, r"mis-shaped: a.weight_scale_inv \(3, 1\), expected \(1, 1\)"),
        ({"a.weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, "wrong dtype: a.weight_scale_inv is I32"),
    ],
)
def test_scales_that_do_not_serve(tmp_path, scale, words):
    """Read without scales, or with others than were meant, a weight is wrong and nothing says so."""
    with opened(tmp_path, {"a.weight": torch.ones(4, 8).to(FP8)} | scale) as weights:
        assert re.search(words, weights.problem("a.weight"))


def test_packed_tensors(tmp_path):
    """int4 in int32 is not a number to be cast."""
    section = {"quant_method": "awq"}
    with opened(tmp_path, {"a.qweight": torch.zeros(4, 8, dtype=torch.int32)}, quantization_config=section) as weights:
        assert weights.packed(weights.names()) == "a.qweight"
        assert weights.method == "awq"
        assert weights.problem("a.qweight").startswith("wrong dtype: a.qweight is I32")
