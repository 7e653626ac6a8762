"""Attention in blocks is torch's attention, gradients too, whatever a mask shows; taken where it fits."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from quick import loop
from tiny import CONFIGS, build
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nextn.cache.attention_layer import packed
from nextn.cache.rollout_cache import chain_mask
from nextn.model.model import Model
from nextn.train.config import TrainConfig
from nextn.train.cotrain import CotrainLoss, HeadSettings, targets_of
from nextn.train.cpu_attention import CPU_ATTENTION, attend, cpu_attention, use_cpu_attention
from nextn.train.joint_task import prepare_layers
from nextn.train.recipes import byte_model

LAYER = SimpleNamespace(num_key_value_groups=2, training=True)
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 17 + [2] * 3, [0] * 39 + [1]])


def drawn(length, columns, *, heads=4, kv_heads=2, dim=8, dim_v=6, dtype=torch.float64):
    draws = torch.Generator().manual_seed(1)
    shapes = (heads, length, dim), (kv_heads, columns, dim), (kv_heads, columns, dim_v)
    return [torch.randn(2, *shape, generator=draws).to(dtype).requires_grad_() for shape in shapes]


def scattered():
    seen = torch.rand(2, 1, 40, 57, generator=torch.Generator().manual_seed(5)) < 0.05
    seen[..., 3] = True
    return seen


MASKS = {
    "causal": torch.ones(40, 40, dtype=torch.bool).tril()[None, None],
    "documents": packed(DOCUMENTS)[1],
    "chains": chain_mask(40, 1, 3),
    "chains within documents": chain_mask(40, 1, 4, within=packed(DOCUMENTS)[1]),
    "a window": chain_mask(40, 1, 2, window=7),
    "all": torch.ones(1, 1, 40, 40, dtype=torch.bool),
    "anything": scattered(),
}


@loop("block", [7, 16, 40, 64])
@loop("name", MASKS)
def test_values_and_gradients_are_torchs(name, block):
    seen = MASKS[name]
    inputs = drawn(*seen.shape[2:])
    query, key, value = inputs
    expected = F.scaled_dot_product_attention(
        query, *(each.repeat_interleave(2, 1) for each in (key, value)), attn_mask=seen, scale=1.0
    )
    out, _ = attend(query, key, value, seen, block)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    onto = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    found, wanted = (torch.autograd.grad(each, inputs, onto) for each in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def as_layers_make_them(states):
    """The same values, their heads beside one another in each column."""
    return states.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def test_gradients_do_not_depend_on_how_the_inputs_lie():
    seen, (query, key, value) = MASKS["documents"], drawn(40, 40)
    onto = torch.randn(2, 4, 40, 6, dtype=query.dtype, generator=torch.Generator().manual_seed(2))
    found = []
    for inputs in ((query, key, value), tuple(map(as_layers_make_them, (query, key, value)))):
        out, _ = attend(*inputs, seen, 16)
        found.append(torch.autograd.grad(out, inputs, onto))
    for one, other in zip(*found, strict=True):
        assert other.abs().max() > 0.1
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.more
@pytest.mark.parametrize("lie", [lambda states: states, as_layers_make_them])
def test_the_op_matches_its_fake(lie):
    """Where blocks look at everything, so that all weights mean something."""
    torch.library.opcheck(attend, (*map(lie, drawn(40, 40)), MASKS["all"], 20))


def traced(function, *inputs):
    """The result, and whether attention in blocks was in the graph."""
    found = []

    def backend(graph, _):
        found.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    return torch.compile(function, backend=backend)(*inputs), torch.ops.nextn.attention_in_blocks.default in found


@pytest.mark.more
@pytest.mark.parametrize("name", [None, "documents", "chains"])
def test_compiled_steps_in_bfloat16_take_it(name):
    seen = None if name is None else MASKS[name].repeat_interleave(8, 2).repeat_interleave(8, 3)
    length, columns = (320, 320) if seen is None else seen.shape[2:]
    query, key, value = drawn(length, columns, dtype=torch.bfloat16)
    expected, _ = sdpa_attention_forward(LAYER, query.float(), key.float(), value.float(), seen)
    (out, weights), took = traced(lambda: cpu_attention(LAYER, query, key, value, seen, position_ids=None))
    assert took
    assert weights is None
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


def test_autocast_decides_the_type():
    query, key, value = drawn(256, 256, dtype=torch.float32)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return cpu_attention(LAYER, query, key, value, None)[0]

    out, took = traced(step)
    assert took
    assert out.dtype is torch.bfloat16


OTHERS = {
    "float32": ({"dtype": torch.float32}, {}),
    "few columns": ({"length": 128, "columns": 128}, {}),
    "dropout": ({}, {"dropout": 0.1}),
    "a mask that is added": ({}, {"attention_mask": torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16)}),
    "a mask for each head": ({}, {"attention_mask": torch.ones(1, 4, 256, 256, dtype=torch.bool)}),
    "not causal": ({}, {"is_causal": False}),
    "keys of before, without a mask": ({"columns": 300}, {}),
}


@pytest.mark.more
@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_know_goes_to_torchs(name):
    shape, given = OTHERS[name]
    query, key, value = drawn(**{"length": 256, "columns": 256, "dtype": torch.bfloat16} | shape)
    given = {"attention_mask": None} | given
    _, took = traced(lambda: cpu_attention(LAYER, query, key, value, **given))
    assert not took


def test_layers_that_look_ahead_go_to_torchs():
    """Those of a tower for images say so themselves."""
    tower = SimpleNamespace(num_key_value_groups=2, training=True, is_causal=False)
    query, key, value = drawn(256, 256, dtype=torch.bfloat16)
    _, took = traced(lambda: cpu_attention(tower, query, key, value, None))
    assert not took


def test_steps_that_are_not_compiled_are_torchs_bit_for_bit():
    query, key, value = drawn(256, 256, dtype=torch.bfloat16)
    out, expected = (each(LAYER, query, key, value, None)[0] for each in (cpu_attention, sdpa_attention_forward))
    assert torch.equal(out, expected)


@pytest.mark.slow
def test_gradients_of_compiled_layers_are_those_of_torchs_attention():
    """Every weight of a layer and a head's block, in bfloat16 both times: what training runs on."""
    tokens = torch.randint(264, (2, 192), generator=torch.Generator().manual_seed(3))
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Model.build(byte_model(layers=1, hidden=256, vocab_size=264))
        assert model.head is not None
        prepare_layers(model, TrainConfig(steps=1, compile=is_compiled))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.trunk(tokens)
            final_hidden = [hidden.final_hidden, *model.head.teacher_forced_hidden(tokens, hidden.head_input, 2)]
        sum((states.float() ** 3).mean() for states in final_hidden).backward()
        named = [*model.trunk.model.named_parameters(), *model.head.named_parameters()]
        found.append({name: value.grad for name, value in named if value.grad is not None})
    eager, compiled = found
    assert len(eager) > 20
    assert eager.keys() == compiled.keys()
    for name, grad in eager.items():
        apart = (grad - compiled[name]).norm() / grad.norm()
        assert apart < 0.05, (name, apart)


def test_training_turns_it_on_and_nobody_sees_it_in_the_file(tmp_path):
    model = Model.build(byte_model(layers=2, hidden=128, vocab_size=264))
    prepare_layers(model, TrainConfig(steps=1, dtype="bfloat16"))
    layers = [*model.trunk.decoder.layers, *model.head.layers]
    assert {layer.self_attn.config._attn_implementation for layer in layers} == {"nextn_blocks"}
    model.save(tmp_path / "model")
    assert "nextn_blocks" not in (tmp_path / "model" / "config.json").read_text()


def test_packed_rows_beside_a_fine_tune_are_the_same_with_it():
    """Of a model that was trained by `nextn train` before, in one process."""
    model = Model.build(byte_model(layers=2, hidden=128, vocab_size=264))
    tokens = torch.randint(264, (1, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    targets = targets_of({"input_ids": tokens, "labels": tokens, "position_ids": positions})
    losses = []
    for _ in range(2):
        cotrain = CotrainLoss(model.head, HeadSettings(depths=2))
        states = cotrain.states(tokens, targets, model.trunk(tokens, documents=targets.documents))
        losses.append(cotrain.loss(states, targets, cotrain.counts(targets))[1].tolist())
        use_cpu_attention(model.trunk.model, model.head)
    assert model.trunk.config._attn_implementation == CPU_ATTENTION
    assert losses[0] == losses[1]


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_family_computes_anything_else(dtype):
    """Some of transformers' models mask by an indexer only where the attention has a name that they know."""
    config = TrainConfig(steps=1, dtype="bfloat16")
    taken, tokens = 0, torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(3))
    for name in CONFIGS:
        model = build(name)
        found = []
        for _ in range(2):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                found.append(model.trunk(tokens).final_hidden.float())
            prepare_layers(model, config)
        taken += model.trunk.config._attn_implementation == "nextn_blocks"
        apart = (found[1] - found[0]).abs()  # in bfloat16, tokens at a tie choose other experts
        most = 0.0 if dtype == "float32" else 0.05 * float(found[0].abs().max())
        assert float(apart.max() if dtype == "float32" else apart.median()) <= most, name
    assert taken > len(CONFIGS) // 2


def test_other_attention_stays():
    model = Model.build(byte_model(layers=2, hidden=128, vocab_size=264))
    model.trunk.config._attn_implementation = "eager"
    use_cpu_attention(model.trunk.model)
    assert model.trunk.config._attn_implementation == "eager"
