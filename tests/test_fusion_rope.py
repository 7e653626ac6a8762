"""Fusion of rotary embeddings: the same bits, and only if nothing else reads the intermediate results."""

import pytest
import torch
from fusions import both
from quick import loop

ANGLES = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(2))
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def heads(x):
    return x.view(2, 5, 3, 16).transpose(1, 2)


def turned(x):
    lower, upper = x.chunk(2, dim=-1)
    return torch.cat((-upper, lower), dim=-1)


def angles(x):
    """Of the input's type, and no constants: their positions are an input, too."""
    moved = x.flatten()[0] * 0 + ANGLES.to(x.dtype)
    return moved.cos(), moved.sin()


def rotated(x):
    cosine, sine = angles(x)
    return heads(x) * cosine + turned(heads(x)) * sine


def sine_first(x):
    cosine, sine = angles(x)
    return cosine * heads(x) + sine * turned(heads(x))


def in_place(x):
    """A part of the dims is rotated and concatenated with the rest, as in partial rotary embeddings."""
    cosine, sine = angles(x)
    part = heads(x)[..., :8]
    moved = part * cosine[..., :8] + turned(part) * sine[..., :8]
    return torch.cat((moved, heads(x)[..., 8:]), dim=-1)


def other_signs(x):
    cosine, sine = angles(x)
    lower, upper = heads(x).chunk(2, dim=-1)
    return heads(x) * cosine + torch.cat((-lower, upper), dim=-1) * sine


def unlike(x):
    cosine, sine = angles(x)
    return heads(x) * cosine + turned(heads(x).flip(-1)) * sine


def middle_is_kept(x):
    cosine, sine = angles(x)
    other = turned(heads(x))
    return heads(x) * cosine + other * sine, other


def scaled(x):
    cosine, sine = angles(x)
    return torch.add(heads(x) * cosine, turned(heads(x)) * sine, alpha=2)


def thirds(x):
    cosine, sine = angles(x)
    return heads(x) * cosine + torch.cat((-heads(x)[..., 4:], heads(x)[..., :4]), dim=-1) * sine


@TYPES
@pytest.mark.parametrize("function", [rotated, sine_first])
def test_a_rotation_is_one_op(function, dtype):
    ops = both(function, dtype).ops
    assert ops.count("rope") == 1
    assert not {"neg", "copy"} & set(ops[ops.index("cos") :])


@TYPES
def test_a_rotated_part_is_written_where_it_is_joined(dtype):
    ops = both(in_place, dtype).ops
    assert ops[-2:] == ["rope", "copy"]  # the copy is of the part that is not rotated


@TYPES
@loop("function", [other_signs, unlike, middle_is_kept, scaled, thirds])
def test_what_is_no_rotation_stays(function, dtype):
    assert "rope" not in both(function, dtype).ops
