"""float32 between the kernels of a bf16 pass: what is rounded, where, and what that is worth."""

import pytest
import torch
import torch.nn.functional as F
from quick import others_slow
from replays import Replayed, fast_of
from tiny import FIXTURES

from nextn.model.model import Model
from nextn.model.trunk import Trunk
from nextn.runtime.native import precision, program
from nextn.runtime.native.abi import load
from nextn.runtime.native.precision import widen
from nextn.runtime.native.session import NativeTrunk
from nextn.runtime.native.weight_packing import PackedWeights

HALF = torch.bfloat16
TABLE = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(HALF)
TINY = 2**-9  # that 1 loses in bf16


def run(function, *inputs):
    return Replayed(function, [torch.ones_like(each) for each in inputs])(*inputs)


def test_sums_are_rounded_once():
    x = torch.ones(1, 3, 16, dtype=HALF)
    (out,) = run(lambda x: (x + TINY) - 1, x)
    assert out.dtype == HALF
    assert (out == TINY).all(), "and in bf16 0"


@pytest.mark.parametrize(
    "read", [lambda total: total, lambda total: F.rms_norm(total, (16,)) * 0 + 1], ids=["", "norm"]
)
def test_outputs_are_rounded_after_others_read_them(read):
    """The sum is an output, and other operations read it with the bits that the output loses."""

    def function(x):
        total = x + TINY
        return total, (total - 1) * read(total)

    total, rest = run(function, torch.ones(1, 2, 16, dtype=HALF))
    assert (total == 1).all()
    assert (rest == TINY).all()


def test_products_leave_as_sums():
    x = torch.zeros(1, 2, 16, dtype=HALF)
    x[..., 0], x[..., 1] = 1, TINY
    (out,) = run(lambda x: F.linear(x, torch.ones(16, 16, dtype=HALF)) - 1, x)
    assert (out == TINY).all()


@pytest.mark.parametrize("takes", [True, False])
def test_products_of_halves_read_halves(takes, monkeypatch):
    """Where the kernels widen, a row of x has all its bits, else those of bf16."""
    found = program.widen
    if takes and not load().takes_floats(1):
        pytest.skip("the kernels of this processor multiply bf16")
    monkeypatch.setattr(
        program, "widen", lambda *args, **kwargs: found(*args, **kwargs | {"takes_floats": lambda _: takes})
    )
    (out,) = run(lambda x: F.linear(x + TINY, torch.eye(16, dtype=HALF)) - 1, torch.ones(1, 2, 16, dtype=HALF))
    assert (out == (TINY if takes else 0)).all()


UNSUPPORTED = {
    "an operation without a kernel": lambda x: (x + TINY).flip(-1) - 1,
    "a table of halves": lambda x: (x.view(-1)[:4] + TINY).index_select(0, (x.view(-1)[:2] * 0).long()) - 1,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_others_keep_halves(name):
    function = UNSUPPORTED[name]
    x = torch.rand(1, 2, 16, generator=torch.Generator().manual_seed(1)).to(HALF)
    (out,) = run(function, x)
    torch.testing.assert_close(out, function(x), atol=2**-8, rtol=2**-7)


def test_without_a_kernel_for_float32_the_operands_stay(monkeypatch):
    """As if the rule for rows of a table forgot that they have its dtype."""
    monkeypatch.delitem(precision._RULES, "index_select")

    def function(x):
        return TABLE.index_select(0, (x.view(-1)[:2] * 3).long()) + TINY - x[:, :2, :16]

    x = torch.rand(1, 2, 16, generator=torch.Generator().manual_seed(1)).to(HALF)
    (out,) = run(function, x)
    torch.testing.assert_close(out, function(x), atol=2**-6, rtol=2**-6)


def test_operands_of_a_fused_op_need_no_common_dtype():
    """What torch computes between kernels is in bf16; what they add to it keeps its bits, fused with it or not."""
    x = torch.ones(1, 2, 16, dtype=HALF)
    weight = torch.ones(16, dtype=HALF)

    def function(x):
        total = x.flip(0) + (x + TINY)
        return total - 2, F.rms_norm(total, (16,), weight), F.silu(x) * (x.flip(0) + TINY) - F.silu(x)

    total, scaled, gated = run(function, x)
    assert (total == TINY).all()
    assert (scaled == 1).all()
    assert (gated == (F.silu(torch.ones(())) * TINY).to(HALF)).all()


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm_one", "qwen"])
def test_logits_of_a_trained_model(name, monkeypatch):
    """In bf16 beside float32 of the same weights and a KV cache in bf16: where kernels widen, nothing else rounds.

    Where they multiply bf16 (AVX512-BF16, AMX), inputs of products are rounded, too, which hides what rounding the sums
    would add: there the logits are nearer than those of torch's modules.
    """
    model, exact = (Model.load(FIXTURES / name, dtype=HALF) for _ in range(2))
    exact.trunk.float()
    tokens = torch.arange(3, 35)[None] % model.trunk.vocab_size
    expected = _logits_with_rounded_cache(exact, tokens, monkeypatch)

    def error():
        trunk = fast_of(model).trunk
        with torch.inference_mode():
            output = trunk(tokens, trunk.cache(1))
            logits = trunk.read(output).logits
        assert output.final_hidden.dtype == logits.dtype == torch.float32
        return relative(logits, expected), relative(logits.bfloat16(), expected)

    found, with_rounded_logits = error()
    if not load().takes_floats(1):
        with torch.inference_mode():
            assert found < 0.7 * relative(model.trunk.logits(model.trunk(tokens).final_hidden), expected)
        return
    monkeypatch.setattr(program, "widen", _without_residual_stream)
    with_rounded_sums, _ = error()
    assert found < 0.6 * with_rounded_sums
    assert found < 0.8 * with_rounded_logits
    assert found < 2**-9


def _logits_with_rounded_cache(model, tokens, monkeypatch):
    attention = F.scaled_dot_product_attention

    def rounded(query, key, value, *args, **options):
        return attention(query, key.to(HALF).float(), value.to(HALF).float(), *args, **options)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(F, "scaled_dot_product_attention", rounded)
        return model.trunk.logits(model.trunk(tokens).final_hidden)


def _without_residual_stream(groups, trace, outputs, *, narrow=(), **options):
    sums = {"add": 0, "add_rms_norm": 1}
    steps = [step for group in groups for step in group.instructions if step.op in sums]
    keys = {step.tensors[sums[step.op]].untyped_storage()._cdata for step in steps}
    return widen(groups, trace, outputs, narrow={*narrow, *keys}, **options)


_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 3, "initializer_range": 0.15, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_WINDOWED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
_CAPPED = _SIZES | _WINDOWED | {"final_logit_softcapping": 5.0}
# Trunks with numbers of their own between the products: capped scores and logits, multipliers, scaled embeddings, norms
# of queries and keys, scalars of layers, attention sinks.
UNUSUAL = {
    "gemma2": _CAPPED | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0},
    "gemma4_text": _CAPPED
    | {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "granite": _SIZES | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 2.0},
    "gemma3_text": _SIZES | _WINDOWED | {"query_pre_attn_scalar": 16},
    "cohere2": _SIZES | _WINDOWED | {"logit_scale": 0.25},
    "mimo_v2_flash": _SIZES
    | _WINDOWED
    | {"v_head_dim": 8, "mlp_layer_types": ["dense"] * 3}
    | {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in set(_WINDOWED["layer_types"])}
    },
}


@pytest.mark.parametrize("model_type", others_slow(UNUSUAL, "gemma2", "gemma4_text"))
def test_bf16_is_nearer_to_float32_than_torch(model_type):
    """KL divergence of next-token distributions from those of the same weights in float32: over 80 positions, in blocks
    that decoding has, the median is below that of torch's modules (by a third to a half of it, or more)."""
    torch.manual_seed(0)
    exact = Trunk.from_config({"model_type": model_type, **UNUSUAL[model_type]}).eval()
    for name, value in [*exact.named_parameters(), *exact.named_buffers()]:
        if value.ndim < 2 and ("norm" in name or "sink" in name or "layer_scalar" in name):
            value.data += torch.rand_like(value) - 0.5
        value.data = value.data.to(HALF).float() if name in exact.state_dict() else value.data
    half = Trunk.from_config({"model_type": model_type, **UNUSUAL[model_type]}, dtype=HALF).eval()
    half.load_state_dict(exact.state_dict())
    tokens = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = exact.logits(exact(tokens).final_hidden)
        torchs = half.logits(half(tokens).final_hidden)
        native, parts = NativeTrunk(half, load(), PackedWeights(load())), []
        cache = native.cache(2)
        for block in tokens.split([16, 1, 3, 4, 16], dim=1):
            parts.append(native.read(native(block, cache)).logits.float().clone())
            cache.commit([block.shape[1]] * 2)
    found, own = (median_kl(expected, logits) for logits in (torch.cat(parts, dim=1), torchs))
    assert found < 0.8 * own, (found, own)


def median_kl(expected, found):
    expected, found = (each.double().log_softmax(-1) for each in (expected, found))
    return float((expected.exp() * (expected - found)).sum(-1).median())
