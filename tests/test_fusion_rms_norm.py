"""Fusion of RMSNorm: every usual form is matched, the bits stay the same, and other operations are left alone."""

import torch
from fusions import both
from quick import loop

EPS = 1e-6


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
    "weight in float": lambda x: (rms(x) * WEIGHT).to(x.dtype),
    "one plus": lambda x: (rms(x) * (1 + WEIGHT.to(x.dtype).float())).to(x.dtype),
    "no weight": lambda x: rms(x, eps=0.25).to(x.dtype),
    "stays float": lambda x: rms(x) * WEIGHT,
    "nothing behind": lambda x: rms(x, eps=1e-5),
    "float weight on a rounded row": lambda x: WEIGHT * rms(x).to(x.dtype),
    "squares as products": lambda x: squared(x.float()),
    "root first": lambda x: root(x.float()) * WEIGHT,
    "per head": lambda x: (WEIGHT[:16].to(x.dtype) * rms(x.view(2, 5, 3, 16)).to(x.dtype)).transpose(1, 2),
    "twice": lambda x: WEIGHT.to(x.dtype) * rms(WEIGHT.to(x.dtype) * rms(x).to(x.dtype)).to(x.dtype),
    "gated": lambda x: WEIGHT.to(x.dtype) * rms(x).to(x.dtype) * torch.sigmoid(x),
    "a weight for each row": lambda x: rms(x) * WEIGHT[:5, None],
    "then a gate": lambda x: rms(x) * x[0, 0],
}
# Operations left after the norms; a weight that follows a rounding to another type is not fused.
BEHIND = {
    "twice": ["rms_norm"],
    "gated": ["sigmoid", "mul"],
    "a weight for each row": ["mul"],
    "then a gate": ["mul"],
    ("float weight on a rounded row", torch.bfloat16): ["mul"],
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


@loop("dtype", [torch.float32, torch.bfloat16], ids=str)
@loop("name", SPELLED)
def test_spellings(name, dtype):
    behind = BEHIND.get(name, BEHIND.get((name, dtype), []))
    assert both(SPELLED[name], dtype).ops == ["rms_norm", *behind]


@loop("dtype", [torch.float32, torch.bfloat16], ids=str)
@loop("name", OTHERWISE)
def test_what_is_no_norm_stays(name, dtype):
    assert both(OTHERWISE[name], dtype).num_norms == 0
