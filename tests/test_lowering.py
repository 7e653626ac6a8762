"""Every rule against torch, on inputs that the recording did not see; what has no native form is named, and right."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from quick import loop
from replays import Replayed, listed
from torch import Tensor

NEAR = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
BOTH = pytest.mark.parametrize("dtype", NEAR, ids=str)


@dataclass
class Given:
    """x, y [3, 4, 8] floats; ids [3, 4] of 0..5; mask [3, 4, 8]. What `_constant` makes is no input."""

    x: Tensor
    y: Tensor
    ids: Tensor
    mask: Tensor

    def constant(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(self.x.dtype)


def inputs(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(3, 4, 8, generator=generator).to(dtype) for _ in range(2))
    return [
        x,
        y,
        torch.randint(6, (3, 4), generator=generator),
        torch.randint(2, (3, 4, 8), generator=generator).bool(),
    ]


def _part_written(g):
    out = g.x.clone()
    out[:, 1:, ::2] = g.y[:, 1:, ::2]
    return out


def _scattered_in_place(g):
    return torch.zeros_like(g.x).scatter_(-1, g.ids[..., None] % 8, 1.0)


NATIVE = {
    "add": lambda g: g.x + g.y,
    "add scalar": lambda g: g.x + 1.5,
    "add alpha": lambda g: torch.add(g.x, g.y, alpha=0.5),
    "sub": lambda g: torch.sub(g.x, g.y, alpha=2),
    "sub scalar": lambda g: g.x - 0.25,
    "mul rows": lambda g: g.x * g.y[:, :1],
    "mul columns": lambda g: g.y[..., :1] * g.x,
    "mul constant": lambda g: g.constant(8) * g.x,
    "mul of other types": lambda g: g.x * g.y.float(),
    "div": lambda g: g.x / (g.y.abs() + 1),
    "div scalar": lambda g: g.x / 3,
    "pow": lambda g: g.x.pow(2),
    "eq": lambda g: g.ids == 3,
    "ne": lambda g: g.ids != g.ids[:, :1],
    "lt": lambda g: g.x < g.y,
    "le": lambda g: g.ids <= 2,
    "gt": lambda g: g.x > 0.1,
    "ge": lambda g: g.ids >= g.ids[:1],
    "minimum": lambda g: torch.minimum(g.x, g.y),
    "maximum": lambda g: torch.maximum(g.x, g.y),
    "remainder": lambda g: g.ids % 4,
    "floor_divide": lambda g: g.ids // 2,
    "and": lambda g: g.mask & (g.x > 0),
    "or": lambda g: g.mask | (g.x > 0),
    "xor": lambda g: g.mask ^ (g.x > 0),
    "not": lambda g: ~g.mask,
    "in place": lambda g: g.x.clone().add_(g.y).mul_(2).sub_(0.5).div_(3),
    "neg": lambda g: -g.x,
    "exp": lambda g: g.x.exp(),
    "log": lambda g: (g.x.abs() + 1).log(),
    "sqrt": lambda g: g.x.abs().sqrt(),
    "rsqrt": lambda g: (g.x.abs() + 1).rsqrt(),
    "reciprocal": lambda g: (g.x.abs() + 1).reciprocal(),
    "sign": lambda g: g.x.sign(),
    "silu": lambda g: F.silu(g.x),
    "sigmoid": lambda g: g.x.sigmoid(),
    "tanh": lambda g: g.x.tanh(),
    "relu": lambda g: g.x.relu(),
    "rotary": lambda g: torch.cat([g.x.cos(), g.x.sin()], dim=-1),
    "to float": lambda g: g.x.float(),
    "to bf16": lambda g: g.x.bfloat16(),
    "to whole": lambda g: g.mask.to(torch.int64),
    "clone": lambda g: g.x.transpose(0, 2).clone(),
    "contiguous": lambda g: g.x.transpose(1, 2).contiguous(),
    "reshape that copies": lambda g: g.x.transpose(0, 1).reshape(4, 24) * 2,
    "reshape that does not": lambda g: g.x.reshape(12, 8)[:, 1:5] * 2,
    "sum": lambda g: g.x.sum(-1),
    "sum of dims": lambda g: g.x.sum((0, 2), keepdim=True),
    "sum of all": lambda g: g.ids.sum(),
    "mean": lambda g: g.x.mean(1),
    "amax": lambda g: g.x.amax(-1, keepdim=True),
    "zeros": lambda g: torch.zeros_like(g.x) + g.y,
    "ones": lambda g: torch.ones_like(g.x) - g.y,
    "new ones": lambda g: g.x.new_ones(4, 8) + g.y,
    "new zeros": lambda g: g.x.new_zeros(4, 8) + g.y,
    "full": lambda g: torch.full_like(g.x, 2.5) * g.y,
    "linear": lambda g: F.linear(g.x, g.constant(6, 8)),
    "linear of turned rows": lambda g: torch.mm(g.x[0].t(), g.constant(4, 6)),
    "linear with bias": lambda g: F.linear(g.x.view(12, 8), g.constant(6, 8), g.constant(6)),
    "part written": _part_written,
    "embedding": lambda g: F.embedding(g.ids, g.constant(6, 8)),
    "cat rows": lambda g: torch.cat([g.x, g.y[:1], g.x]),
    "cat columns": lambda g: torch.cat([g.x[..., 4:], -g.y[..., :4]], dim=-1),
    "cat of nothing": lambda g: torch.cat([g.x.new_zeros(0), g.x], dim=1),
    "stack": lambda g: torch.stack([g.x, g.y], dim=1),
    "stack last": lambda g: torch.stack([g.x, g.y], dim=-1),
    "where": lambda g: torch.where(g.mask, g.x, g.y[:1]),
    "masked_fill": lambda g: g.x.masked_fill(g.mask, -1.0),
    "masked_fill rows": lambda g: g.x.masked_fill(g.mask[:, :, :1], float("-inf")),
    "masked_fill in place": lambda g: g.x.clone().masked_fill_(g.mask, 3.0),
    "softmax": lambda g: g.x.softmax(-1),
    "softmax in float": lambda g: F.softmax(g.x, dim=-1, dtype=torch.float32),
    "topk": lambda g: g.x.topk(3, dim=-1),
    "topk unsorted": lambda g: g.x.topk(8, dim=-1, sorted=False)[0].sum(-1),
    "argmax": lambda g: g.x.argmax(-1),
    "argmax kept": lambda g: g.x.argmax(-1, keepdim=True),
    "cumsum": lambda g: g.x.cumsum(-1),
    "gather": lambda g: g.x.gather(2, g.ids[..., None]),
    "gather rows": lambda g: g.x.gather(1, g.ids[:, :2, None].expand(-1, -1, 8) % 4),
    "scatter": lambda g: g.x.scatter(2, g.ids[..., None], g.y[..., :1]),
    "scatter a value": lambda g: g.x.scatter(2, g.ids[..., None], 9.0),
    "scatter in place": _scattered_in_place,
    "index": lambda g: g.constant(6, 5)[g.ids],
    "index select": lambda g: g.x.index_select(1, g.ids[0] % 4),
    "gelu": lambda g: F.gelu(g.x),
    "gelu tanh": lambda g: F.gelu(g.x, approximate="tanh"),
    "softplus": lambda g: F.softplus(g.x),
    "softplus steep": lambda g: F.softplus(g.x, beta=2.0, threshold=1.0),
    "clamp": lambda g: g.x.clamp(-0.5, 0.5),
    "clamp below": lambda g: g.x.clamp(min=0.1),
    "clamp above": lambda g: g.x.clamp(max=0.1),
    "clamp_min": lambda g: torch.clamp_min(g.x, 0.2),
    "layer norm": lambda g: F.layer_norm(g.x, (8,), g.constant(8), g.constant(8), 1e-5),
    "pad": lambda g: F.pad(g.x, (1, 2, 0, 1)),
    "pad with": lambda g: F.pad(g.x, (0, 3), value=-2.0),
}

# What stays with torch, and the operations that do.
LEFT = {
    "product of inputs": (lambda g: g.x[0] @ g.y[0].t(), ["aten.mm.default"]),
    "products of inputs": (lambda g: g.x @ g.y.transpose(1, 2), ["aten.bmm.default"]),
    "pow of tensors": (lambda g: g.x.abs().pow(g.y), ["aten.pow.Tensor_Tensor"]),
    "softmax of columns": (lambda g: g.x.softmax(1), ["aten._softmax.default"]),
    "cumsum of rows": (lambda g: g.x.cumsum(0), ["aten.cumsum.default"]),
    "smallest": (lambda g: g.x.topk(2, largest=False), ["aten.topk.default"]),
    "argmax of all": (lambda g: g.x.argmax(), ["aten.argmax.default"]),
    "two indices": (lambda g: g.x[g.ids[0] % 3, g.ids[1] % 4], ["aten.index.Tensor"]),
    "layer norm without gain": (lambda g: F.layer_norm(g.x, (8,)), ["aten.native_layer_norm.default"]),
    "pad that cuts": (lambda g: F.pad(g.x, (-1, 0)), ["aten.constant_pad_nd.default"]),
    "division that rounds": (lambda g: torch.div(g.x, g.y, rounding_mode="floor"), ["aten.div.Tensor_mode"]),
    "between native ones": (
        lambda g: (g.x * 2).flip(0).add(g.y).roll(1, 0),
        ["aten.flip.default", "aten.roll.default"],
    ),
}


def compared(function, dtype) -> list[str]:
    """Replay against function on two sets of new inputs -> what was left to torch."""
    made = Replayed(lambda *given: function(Given(*given)), inputs(0, dtype))
    for seed in (1, 2):
        given = inputs(seed, dtype)
        expected, found = listed(function(Given(*given))), made(*given)
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
    return made.replay.torch_ops


@pytest.mark.one_case
@BOTH
@loop("name", NATIVE)
def test_native_equals_torch(name, dtype):
    assert compared(NATIVE[name], dtype) == []


@BOTH
@loop("name", LEFT)
def test_what_is_left_to_torch(name, dtype):
    function, left = LEFT[name]
    assert [each for each in compared(function, dtype) if "copy" not in each] == left
