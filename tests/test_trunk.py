"""The trunk: transformers' logits, in float32 whatever the lm_head's dtype; masks by layer type; new layers."""

import pytest
import torch
from quick import loop
from tiny import CONFIGS, build
from torch import nn

from nextn.errors import RollbackError
from nextn.model import logits
from nextn.model.layer_types import LayerType
from nextn.model.logits import float_linear, logits_of
from nextn.model.trunk import Trunk


@pytest.mark.more
@loop("name", CONFIGS)
def test_logits_are_those_of_transformers(name):
    """Catches a scale of the logits that is left out, and a decoder other than the model's own."""
    trunk, tokens = build(name).trunk, torch.randint(0, 64, (2, 12))
    with torch.no_grad():
        ours = trunk.logits(trunk(tokens).final_hidden)
        torch.testing.assert_close(ours, trunk.model(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)


_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": None}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_FALCON = _SIZES | _MAMBA | {"model_type": "falcon_h1", "mamba_d_ssm": 64}
_JAMBA = {"model_type": "jamba", "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 2}
_JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts_per_tok": 1}
_GRIFFIN = _SIZES | {"model_type": "recurrent_gemma", "head_dim": 8, "lru_width": 32, "num_key_value_heads": 1}
_MINIMAX = {"model_type": "minimax", "num_local_experts": 2, "head_dim": 8}


@pytest.mark.parametrize(
    "config",
    [
        _SIZES | {"model_type": "hyperclovax", "logits_scaling": 0.5},
        _SIZES | {"model_type": "granite", "logits_scaling": 0.5},
        _FALCON | {"lm_head_multiplier": 0.5},
        _GRIFFIN | {"logits_soft_cap": 0.1},
    ],
    ids=lambda config: config["model_type"],
)
def test_the_scale_of_logits_is_that_of_transformers(config):
    trunk, tokens = Trunk.from_config(config), torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        ours = trunk.logits(trunk(tokens).final_hidden)
        torch.testing.assert_close(ours, trunk.model(input_ids=tokens, use_cache=False).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_SIZES | _JAMBA, "as if nothing was cached"),
        (
            _SIZES | _MINIMAX | {"layer_types": ["linear_attention", "full_attention"]},
            "does not run over nextn's caches",
        ),
        (_FALCON, "layers with attention and a recurrent state"),
        (_GRIFFIN, "keeps the states of its recurrent layers outside of caches"),
        (_SIZES | _MAMBA | {"model_type": "bamba", "attn_layer_indices": [1]}, None),
    ],
    ids=["jamba", "minimax", "falcon_h1", "recurrent_gemma", "bamba"],
)
def test_states_that_do_not_continue_are_refused(config, words):
    """Drafts are verified in blocks, which some models of transformers compute as if nothing was cached."""
    torch.manual_seed(0)
    trunk = Trunk.from_config(config)

    def run():
        trunk(torch.randint(0, 64, (1, 4)), trunk.cache(1))

    if words is None:
        return run()
    with pytest.raises(RollbackError, match=words):
        run()


@pytest.mark.more
@loop("name", CONFIGS)
def test_rotary_is_what_the_layers_get(name):
    """A head's block that is handed other angles than the trunk's layers of its kind attends to other distances."""
    trunk, tokens = build(name).trunk, torch.randint(0, 64, (1, 12))
    given = {}
    for layer, kind in zip(trunk.decoder.layers, trunk.layer_types, strict=False):

        def note(_, args, kwargs, kind=kind):
            given[kind] = kwargs.get("position_embeddings")

        layer.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        trunk(tokens)
        for kind, wanted in given.items():
            found = trunk.rotary(trunk.embedding(tokens), torch.arange(12)[None], kind)
            assert (found is None) == (wanted is None)
            for ours, theirs in zip(flat(found), flat(wanted), strict=True):
                torch.testing.assert_close(ours, theirs.expand_as(ours), atol=1e-5, rtol=1e-5)


def flat(angles):
    """Cosine and sine, or those of every label where a layer chooses for itself."""
    if isinstance(angles, dict):
        return [each for label in sorted(angles) for each in angles[label]]
    return angles or ()


@pytest.mark.parametrize("name", ["glm4_moe", "mimo_v2"])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_see_what_they_may(name, window):
    """A position sees itself and those before it in its document and its window, with and without sdpa."""
    trunk, documents = build(name).trunk, [0, 0, 0, 0, 1, 1, 1, 1, 1]
    within = torch.tensor([[[[a == b for b in documents] for a in documents]]])
    mask = trunk.mask(LayerType("sliding_attention", window), len(documents), within=within)[0, 0]
    seen = mask if mask.dtype == torch.bool else mask == 0
    for query in range(len(documents)):
        for position in range(len(documents)):
            near = window is None or query - position < window
            assert bool(seen[query, position]) == (
                position <= query and near and documents[query] == documents[position]
            )


def test_mask_only_where_one_is_needed():
    """sdpa is faster without a mask; an indexer has none to fall back on."""
    trunk = build("glm4_moe").trunk
    assert trunk.mask(LayerType(), 9) is None
    assert trunk.mask(LayerType("sliding_attention", 9), 9) is None
    assert trunk.mask(LayerType("sliding_attention", 8), 9) is not None
    assert trunk.mask(LayerType("indexed_attention"), 1) is not None


def test_block_is_made_like_the_layers_of_its_kind():
    """Step-3.5's sliding layers have heads of their own number; the config of the whole trunk names the other."""
    model = build("step3p5", modules=3)
    assert [module.layer_type.window for module in model.head.stack] == [5, None, 5]
    assert [module.block.self_attn.num_heads for module in model.head.stack] == [2, 4, 2]
    assert [type(module.block.mlp).__name__ for module in model.head.stack] == [
        "Step3p7MLP", "Step3p7SparseMoeBlock", "Step3p7SparseMoeBlock"
    ]  # fmt: skip


def test_block_of_two_layers():
    """Nemotron-H's module is an attention layer and an MoE layer, and only the first keeps anything."""
    model = build("nemotron_h")
    assert [kind.name for kind in model.head.stack[0].layer_types] == ["full_attention", "dummy"]
    assert len(model.head.cache(1).layers) == 2


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@loop("values", [1, 100, 2**20])
@loop("rows", [(), (1,), (2, 3)], ids=str)
def test_products_are_not_rounded(values, rows, monkeypatch):
    """In slices of any size: each of K additions may be wrong by half a unit of the sum of magnitudes."""
    monkeypatch.setattr(logits, "_VALUES", values)
    x, weight, bias = drawn(*rows, 48), drawn(70, 48, seed=1), drawn(70, seed=2)
    for given in (None, bias):
        out = float_linear(x, weight, given)
        more = 0 if given is None else given.double()
        exact, size = x.double() @ weight.double().T + more, x.double().abs() @ weight.double().abs().T + 4
        assert out.dtype == torch.float32
        assert ((out - exact).abs() <= size * 50 * 2**-24).all()
        assert (out.bfloat16() != out).float().mean() > 0.9


def test_states_keep_their_bits():
    x, weight = torch.tensor([[1 + 2**-12, 1.0]]), torch.tensor([[1, -1], [0, 1]]).bfloat16()
    assert float_linear(x, weight).tolist() == [[2**-12, 1]]
    assert float_linear(x.double(), weight.double()).dtype == torch.float64


def test_logits_that_rounding_would_make_equal_differ():
    """Two logits as those at which SmolLM2 names Paris or does not."""
    output = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    output.weight.data = torch.tensor([[25.25, 0.0447], [25.25, 0.0520]]).bfloat16()
    x = torch.ones(2, dtype=torch.bfloat16)
    assert torch.equal(*output(x))
    assert logits_of(output, x).argmax() == 1


def test_gradients_are_those_of_a_linear_layer():
    inputs = [drawn(3, 8).requires_grad_(), drawn(5, 8, seed=1).requires_grad_(), drawn(5, seed=2).requires_grad_()]
    plain = [each.detach().float().requires_grad_() for each in inputs]
    onto = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(float_linear(*inputs), inputs, onto)
    expected = torch.autograd.grad(nn.functional.linear(*plain), plain, onto)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(found, expected, strict=True))


def test_another_layer_computes_its_own_logits():
    output = nn.Sequential(nn.Linear(8, 5, dtype=torch.bfloat16), nn.ReLU())
    x = drawn(3, 8)
    found = logits_of(output, x.float())
    assert found.dtype == torch.float32
    assert torch.equal(found, output(x).float())
