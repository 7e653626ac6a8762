"""The native ops of a small function, with and without fusion."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from replays import Replayed

from nextn.runtime.native import fusion, program

NORMS = ("rms_norm", "add_rms_norm", "norm_rope")


class Counted:
    """Stands in for `fuse` and records the ops that it returns."""

    def __init__(self, *, on: bool = True) -> None:
        self.on, self.num_norms, self.num_roots = on, 0, 0
        self.ops: list[str] = []

    def __call__(self, groups, **kwargs):
        out = fusion.fuse(groups, **kwargs) if self.on else list(groups)
        self.num_norms += sum(group.entry.func in NORMS for group in out)
        self.ops += [step.op for group in out for step in group.instructions]
        self.num_roots += sum("rsqrt" in str(group.entry.func) for group in out)
        return out


@contextmanager
def counting(*, on: bool = True):
    """Recordings in its body go through a `Counted`."""
    counted = Counted(on=on)
    with patch.object(program, "fuse", counted):
        yield counted


def both(function, dtype, shape=(2, 5, 48)) -> Counted:
    """Compares the outputs with and without fusion, bit for bit, on inputs that were not recorded -> what was found."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    with counting() as on:
        fused = [out.clone() for out in Replayed(function, [torch.ones_like(given)])(given)]
    with counting(on=False):
        plain = Replayed(function, [torch.ones_like(given)])(given)
    assert all(torch.equal(one, other) for one, other in zip(fused, plain, strict=True))
    assert [out.dtype for out in fused] == [out.dtype for out in plain]
    return on
