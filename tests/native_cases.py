"""Tensors as the native runtime meets them: any strides, broadcasts, dtypes, and the values that break kernels."""

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30, 88.0, -88.0, 1e4, 3e38, float("inf"), float("-inf"), float("nan"))

seeds = st.integers(0, 2**31 - 1)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
    lambda head: st.sampled_from((1, 3, 16, 31, 64, 130, 700)).map(lambda last: (*head, last))
)


def values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, special: bool = False) -> Tensor:
    """Random values; with `special`, about a third are ones that break kernels."""
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype is torch.int64:
        return torch.randint(-50, 50, shape, generator=generator)
    plain = torch.randn(shape, generator=generator) * 4
    rare = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
    taken = torch.rand(shape, generator=generator) < (0.3 if special else 0)
    return torch.where(taken, rare, plain).to(dtype)


def strided(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The same values, laid out dense, with gaps, or with the dims in another order."""
    kind = int(torch.randint(3, (1,), generator=generator))
    if kind == 1:
        wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] * 2 + 1))
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if kind == 2:
        order = torch.randperm(tensor.ndim, generator=generator).tolist()
        back = [order.index(dim) for dim in range(tensor.ndim)]
        return tensor.permute(order).contiguous().permute(back)
    return tensor


def operand(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, special: bool = False) -> Tensor:
    """A strided tensor of `shape` in which some dims may repeat (stride 0)."""
    repeats = torch.rand(len(shape), generator=generator) < 0.25
    base = tuple(1 if repeat else size for repeat, size in zip(repeats.tolist(), shape, strict=True))
    return strided(values(base, dtype, generator, special), generator).expand(shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """An out tensor of any layout, filled with what must not stay."""
    return strided(torch.full(shape, 77, dtype=dtype), generator)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but for the payload of NaN and the sign of zero."""
    return torch.allclose(actual.double(), expected.double(), rtol=0, atol=0, equal_nan=True)
