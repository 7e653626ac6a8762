"""RMS norms of recorded passes: found in every family that has them, and the bits stay."""

import pytest
import torch
from replays import Replayed, fast_of
from test_engine import RECORDED
from tiny import build, prompt

from nextn.fast import fuse, program

EPS = 1e-6


class Counted:
    """Stands in for `fused`: notes the ops that it leaves, and counts the norms that it found."""

    def __init__(self, *, on: bool = True) -> None:
        self.on, self.num_norms, self.num_roots = on, 0, 0
        self.ops: list[str] = []

    def __call__(self, groups, **kwargs):
        out = fuse.fused(groups, **kwargs) if self.on else list(groups)
        self.num_norms += sum(group.entry.func == "rms_norm" for group in out)
        self.ops += [step.op for group in out for step in group.instructions]
        self.num_roots += sum("rsqrt" in str(group.entry.func) for group in out)
        return out


@pytest.fixture
def counting(monkeypatch):
    def begin(*, on: bool = True) -> Counted:
        counted = Counted(on=on)
        monkeypatch.setattr(program, "fused", counted)
        return counted

    return begin


def states(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the trunk's windows of 9 and 1 columns, and of the head's of 4."""
    model = build(name)
    for part in (model.trunk, model.head):
        part.to(dtype)
    fast, out = fast_of(model), []
    with torch.inference_mode():
        cache = fast.trunk.cache(1)
        for columns in (9, 1):
            hidden = fast.trunk(torch.tensor([prompt(columns, seed=columns)]), cache)
            out += [hidden.normed.clone(), hidden.eaten.clone()]
            cache.keep([columns])
        step = fast.head.step(0, torch.tensor([prompt(4)]), out[1][:, :4], cache=fast.head.cache(1))
    return [*out, step.normed.clone(), step.recycled.clone()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECORDED)
def test_every_norm_of_every_family(name, dtype, counting):
    on = counting()
    fused = states(name, dtype)
    counting(on=False)
    assert all(torch.equal(one, other) for one, other in zip(fused, states(name, dtype), strict=True))
    # Cohere's norms take the mean off first.
    assert (on.num_norms > 0, on.num_roots > 0) == ((False, True) if name == "cohere2_moe" else (True, False))


def rms(x, *, eps=EPS):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def squared(wide):
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)


def root(wide):
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * wide


def fourth(wide):
    return wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + EPS)


def rows_eps(eps, wide):
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def other_products(wide):
    return wide * torch.rsqrt((wide * WEIGHT).mean(-1, keepdim=True) + 100)


WEIGHT = torch.randn(48, generator=torch.Generator().manual_seed(3))
SPELLED = {
    "llama": lambda x: WEIGHT.to(x.dtype) * rms(x).to(x.dtype),
    "gain in float": lambda x: (rms(x) * WEIGHT).to(x.dtype),
    "one plus": lambda x: (rms(x) * (1 + WEIGHT.to(x.dtype).float())).to(x.dtype),
    "no gain": lambda x: rms(x, eps=0.25).to(x.dtype),
    "stays float": lambda x: rms(x) * WEIGHT,
    "nothing behind": lambda x: rms(x, eps=1e-5),
    "float gain on a rounded row": lambda x: WEIGHT * rms(x).to(x.dtype),
    "squares as products": lambda x: squared(x.float()),
    "root first": lambda x: root(x.float()) * WEIGHT,
    "per head": lambda x: (WEIGHT[:16].to(x.dtype) * rms(x.view(2, 5, 3, 16)).to(x.dtype)).transpose(1, 2),
    "twice": lambda x: WEIGHT.to(x.dtype) * rms(WEIGHT.to(x.dtype) * rms(x).to(x.dtype)).to(x.dtype),
    "gated": lambda x: WEIGHT.to(x.dtype) * rms(x).to(x.dtype) * torch.sigmoid(x),
    "a gain for each row": lambda x: rms(x) * WEIGHT[:5, None],
    "then a gate": lambda x: rms(x) * x[0, 0],
}
# What stands behind the norms of a spelling; a gain that follows a rounding to another type is none of the norm's.
BEHIND = {
    "twice": ["rms_norm"],
    "gated": ["sigmoid", "mul"],
    "a gain for each row": ["mul"],
    "then a gate": ["mul"],
    ("float gain on a rounded row", torch.bfloat16): ["mul"],
}
# What is no norm of the last dim, or whose middle is read elsewhere.
OTHERWISE = {
    "mean of columns": lambda x: x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + EPS),
    "of another": lambda x: x.float() * torch.rsqrt((x.float() + 1).pow(2).mean(-1, keepdim=True) + EPS),
    "fourth powers": lambda x: fourth(x.float()),
    "products of two": lambda x: other_products(x.float()),
    "root is kept": lambda x: (lambda root: (x.float() * root, root))(
        torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    ),
    "mean is kept": lambda x: (lambda mean: x.float() * torch.rsqrt(mean + EPS) + mean)(
        x.float().pow(2).mean(-1, keepdim=True)
    ),
    "rows that are not dense": lambda x: WEIGHT[:5] * rms(x.transpose(1, 2)),
    "a float row of its own": lambda x: x.double().float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + EPS),
    "a row's eps": lambda x: rows_eps(x[..., :1].float().abs(), x.float()),
}


def both(function, dtype, counting) -> Counted:
    """Compares the outputs with and without fusion on inputs that were not recorded -> what was found."""
    given = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(4)).to(dtype)
    on = counting()
    fused = [out.clone() for out in Replayed(function, [torch.ones_like(given)])(given)]
    counting(on=False)
    plain = Replayed(function, [torch.ones_like(given)])(given)
    assert all(torch.equal(one, other) for one, other in zip(fused, plain, strict=True))
    assert [out.dtype for out in fused] == [out.dtype for out in plain]
    return on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPELLED)
def test_spellings(name, dtype, counting):
    behind = BEHIND.get(name, BEHIND.get((name, dtype), []))
    assert both(SPELLED[name], dtype, counting).ops == ["rms_norm", *behind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_no_norm_stays(name, dtype, counting):
    assert both(OTHERWISE[name], dtype, counting).num_norms == 0
