"""Fusion of SwiGLU, rotary embeddings and linear layers of one input, in every family: the same bits."""

import pytest
import torch
import torch.nn.functional as F
from fusions import both, counting
from quick import families, loop, others_slow
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


TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def gated(x):
    up = x.flip(0)
    return F.silu(x) * up


def later(x):
    up = x.flip(0)
    gate = F.silu(x)
    return gate * (up + 1)


def read_again(x):
    gate = F.silu(x)
    return gate * x.flip(0)


def halves(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


SPELLED = {
    "gate first": gated,
    "gate last": lambda x: x.flip(0) * F.silu(x),
    "something between": later,
    "halves of one product": halves,
    "one row for all": lambda x: F.silu(x) * x[0, 0],
    "a width of no whole registers": lambda x: F.silu(x[..., :21]) * x[..., 21:42],
}
OTHERWISE = {
    "read twice": lambda x: (lambda gate: gate * x.flip(0) + gate)(F.silu(x)),
    "kept": lambda x: (lambda gate: (gate * x.flip(0), gate))(F.silu(x)),
    "its input is read before the product": read_again,
    "another function": lambda x: torch.sigmoid(x) * x.flip(0),
    "a number": lambda x: F.silu(x) * 2,
    "its square": lambda x: (lambda gate: gate * gate)(F.silu(x)),
}


@TYPES
@loop("name", SPELLED)
def test_a_gate_is_one_op(name, dtype):
    ops = both(SPELLED[name], dtype).ops
    assert ops.count("silu_mul") == 1
    assert "silu" not in ops


@TYPES
@loop("name", OTHERWISE)
def test_what_is_no_gate_stays(name, dtype):
    assert "silu_mul" not in both(OTHERWISE[name], dtype).ops


def test_a_gate_that_changes_before_its_product_stays():
    def changed(x):
        a = x + 1
        gate = F.silu(a)
        a.mul_(2)
        return gate * a

    assert "silu_mul" not in both(changed, torch.float32).ops


ANGLES = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(2))


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


DRAWS = torch.Generator().manual_seed(2)
WEIGHTS = {
    dtype: [torch.randn(rows, 48, generator=DRAWS).to(dtype) for rows in (40, 16, 7, 130)]
    for dtype in (torch.float32, torch.bfloat16)
}
BIASES = {dtype: [each[:, 0].clone() for each in weights] for dtype, weights in WEIGHTS.items()}


def merged_layer(x, at, *, bias=False):
    return F.linear(x, WEIGHTS[x.dtype][at], BIASES[x.dtype][at] if bias else None)


def queries_keys_values(x):
    return merged_layer(x, 0), merged_layer(x, 1), merged_layer(x, 2)


def something_between(x):
    """A norm of the queries before the keys are computed, as in Qwen3's layers."""
    queries = merged_layer(x, 0) * 2
    return queries, merged_layer(x, 1)


def merged_mlp(x):
    return F.linear(F.silu(merged_layer(x, 0)) * merged_layer(x, 0).neg(), WEIGHTS[x.dtype][0].t().contiguous())


def two_inputs(x):
    other = x + 1
    return merged_layer(x, 0), merged_layer(other, 1), merged_layer(x, 2), merged_layer(other, 3)


MERGED = {
    "queries, keys, values": (queries_keys_values, 1),
    "with biases": (lambda x: [merged_layer(x, at, bias=True) for at in range(4)], 1),
    "something between": (something_between, 1),
    "a gate and its other half": (merged_mlp, 2),
    "two inputs": (two_inputs, 2),
}
SEPARATE = {
    "another input": lambda x: (merged_layer(x, 0), merged_layer(x.flip(0), 1)),
    "another part of one input": lambda x: (merged_layer(x[:1], 0), merged_layer(x[1:], 1)),
    "one has a bias": lambda x: (merged_layer(x, 0), merged_layer(x, 1, bias=True)),
    "read by something else between": lambda x: (merged_layer(x, 0), x + 1, merged_layer(x, 1)),
    "one of the other": lambda x: merged_layer(merged_layer(x, 0)[..., :1] + x, 1),
}


@TYPES
@loop("name", MERGED)
def test_layers_of_one_input_are_one_op(name, dtype):
    function, count = MERGED[name]
    assert both(function, dtype).ops.count("linear") == count


@TYPES
@loop("name", SEPARATE)
def test_others_stay_apart(name, dtype):
    assert both(SEPARATE[name], dtype).ops.count("linear") == 2


@TYPES
def test_a_changed_input_parts_them(dtype):
    def changed(x):
        a = x + 1
        first = merged_layer(a, 0)
        a.mul_(2)
        return first, merged_layer(a, 1)

    assert both(changed, dtype).ops.count("linear") == 2


@TYPES
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 13, 48), (3, 17, 48)], ids=str)
def test_any_number_of_rows(shape, dtype):
    assert both(queries_keys_values, dtype, shape).ops.count("linear") == 1
