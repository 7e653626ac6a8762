"""Tensors of a checkpoint: values that are no numbers."""

import pytest
import torch

from nextn.checkpoint.tensors import is_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_anywhere(dtype):
    """Also in the tails that vector loops leave, and beside values whose sum would be infinite."""
    assert is_finite(torch.empty(0, dtype=dtype))
    for size in (1, 7, 33, 100):
        values = torch.full((size,), 3e38 if dtype in (torch.float32, torch.bfloat16, torch.float64) else 400.0)
        assert is_finite(values.to(dtype))
        for bad in ("nan",) if dtype == torch.float8_e4m3fn else ("nan", "inf", "-inf"):
            for index in range(size):
                spoiled = values.clone()
                spoiled[index] = float(bad)
                assert not is_finite(spoiled.to(dtype)), (size, index, bad)


def test_matrices_and_views():
    matrix = torch.ones(5, 40)
    assert is_finite(matrix.T[::2])
    matrix[3, 39] = float("nan")
    assert not is_finite(matrix.T[1::2])
    assert is_finite(matrix[:3])


def test_subclasses():
    """A tensor made of others has their values, one without parts its own."""

    class Plain(torch.Tensor):
        pass

    class Packed(torch.Tensor):
        def __tensor_flatten__(self):
            return ["codes", "scale"], None

    def packed(scale: float) -> torch.Tensor:
        tensor = torch.zeros(3).as_subclass(Packed)
        tensor.codes, tensor.scale = torch.ones(3, dtype=torch.uint8), torch.tensor([1.0, scale])
        return tensor

    assert is_finite(torch.ones(3).as_subclass(Plain))
    assert is_finite(packed(2.0))
    for bad in (float("nan"), float("inf")):
        assert not is_finite(torch.tensor([1.0, bad]).as_subclass(Plain)), bad
        assert not is_finite(packed(bad)), bad
