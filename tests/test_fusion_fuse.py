"""Fusion in every family that is recorded: the same bits."""

import pytest
import torch
from fusions import counting
from quick import families, others_slow
from replays import fast_of
from test_session import RECORDED
from tiny import build, prompt


def states(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the trunk's blocks of 9 and 1 positions, and of the head's block of 4."""
    model = build(name)
    for part in (model.trunk, model.head):
        part.to(dtype)
    fast, out = fast_of(model), []
    with torch.inference_mode():
        cache = fast.trunk.cache(1)
        for columns in (9, 1):
            hidden = fast.trunk(torch.tensor([prompt(columns, seed=columns)]), cache)
            out += [hidden.final_hidden.clone(), hidden.head_input.clone()]
            cache.commit([columns])
        step = fast.head.step(0, torch.tensor([prompt(4)]), out[1][:, :4], cache=fast.head.cache(1))
    return [*out, step.final_hidden.clone(), step.next_hidden.clone()]


@pytest.mark.more
@pytest.mark.parametrize("dtype", others_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", families(RECORDED))
def test_every_family(name, dtype):
    with counting() as on:
        fused = states(name, dtype)
    with counting(on=False) as off:
        plain = states(name, dtype)
    assert all(torch.equal(one, other) for one, other in zip(fused, plain, strict=True))
    assert len(on.ops) < len(off.ops)
    # Cohere's norms take the mean off first.
    assert (on.num_norms > 0, on.num_roots > 0) == ((False, True) if name == "cohere2_moe" else (True, False))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "op"),
    [("glm4_moe", "rope"), ("glm4_moe", "gated_linear"), ("glm4_moe", "add_rms_norm"), ("qwen3_5", "norm_rope")],
)
def test_blocks_of_usual_families_are_taken_together(name, op):
    with counting() as on:
        states(name, torch.bfloat16)
    assert on.ops.count(op) >= 2
    assert "neg" not in on.ops
