"""A new head made of the trunk's parts: what is copied, that it computes what the trunk's layer did, how it begins."""

import math
from types import SimpleNamespace

import pytest
import torch
from quick import families, loop
from test_separate_head import SIZES, TRUNKS
from tiny import CONFIGS, FIXTURES, MOST, build, prompt, refrain
from torch import nn
from torch.nn import functional

from nextn.errors import ConfigError
from nextn.family_table import generic
from nextn.model.head import Head
from nextn.model.model import Model
from nextn.model.trunk import Trunk
from nextn.train import init_head as module
from nextn.train.config import HeadConfig
from nextn.train.head_run import _large_vocabulary
from nextn.train.init_head import init_head
from nextn.train.layer_inputs import measure_layers

TOKENS = torch.tensor([prompt(24, seed=row) for row in range(4)])


def spread_norm_weights(model):
    """Norm gains off 1, so that a norm that is left out or taken for another is seen."""
    with torch.no_grad():
        for name, value in model.trunk.named_parameters():
            if value.ndim == 1 and "norm" in name:
                value.add_(torch.randn_like(value) * 0.2)


@pytest.mark.parametrize("name", families(CONFIGS))
def test_every_family_gets_a_head(name):
    """Nothing is left at random, losses are finite from the first step on, and every part gets a gradient."""
    model = build(name, initializer_range=0.1)
    head, notes = init_head(model.family, model.trunk, TOKENS, num_modules=MOST[name])
    assert notes == []
    assert head.state_dict().keys() == build(name, modules=MOST[name]).head.state_dict().keys()
    hidden = model.trunk(TOKENS)
    states = head.teacher_forced_hidden(TOKENS, hidden.head_input.detach(), max(2, MOST[name]))
    logits = torch.cat([head.logits(head.layer_index(k), state).flatten(0, 1) for k, state in enumerate(states, 1)])
    assert torch.isfinite(logits).all()
    logits.logsumexp(-1).sum().backward()
    asleep = [key for key, value in head.named_parameters() if value.requires_grad and value.grad is None]
    assert not asleep


@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS))
def test_of_a_streamed_trunk(name, tmp_path):
    """The same values, of layers that are read one by one."""
    model = build(name, initializer_range=0.1)
    spread_norm_weights(model)
    model.save(tmp_path / "model")
    heads, layers = [], []
    for stream in (False, True):
        trunk = Model.load(tmp_path / "model", stream=stream).trunk
        torch.manual_seed(0)
        head, notes = init_head(model.family, trunk, TOKENS[:2], num_modules=MOST[name], on_layer=layers.append)
        assert notes == []
        heads.append(head.state_dict())
    assert [each.index for each in layers] == [*range(len(trunk.decoder.layers))] * 2  # of either trunk
    assert all(value.is_meta for value in trunk.decoder.layers.parameters())
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(value, heads[1][key]) for key, value in heads[0].items())


@pytest.mark.more
@loop("name", [name for name in CONFIGS if name not in ("nemotron_h", "exaone4_5")])
def test_scaled_writers_compute_the_same_on_a_scaled_stream(name):
    """A stream of a quarter of the size, and what is written into it divided by four: the same result by four."""
    check_scaled_writers(build(name, initializer_range=0.1))


OTHERS = [{"model_type": name} for name in ("olmo2", "starcoder2", "phi")] + [{"model_type": "glm4", "head_dim": 16}]


@loop("changes", [*OTHERS, *TRUNKS.values()])
def test_scaled_writers_of_a_trunk_without_a_family(changes):
    """In Gemma's and GLM-4's layers, norms write into the stream; OLMo 2's read it as it is."""
    torch.manual_seed(0)
    config = SIZES | changes | {"initializer_range": 0.1}
    trunk, family = Trunk.from_config(config), generic(config)
    if changes["model_type"] == "olmo2":
        block = Head(family, trunk).stack[0]
        assert module._scale_block(block, [{"self_attn": 1}], [3.0, 5.0], 1, family) == 5.0
        return
    check_scaled_writers(SimpleNamespace(trunk=trunk, family=family))


def check_scaled_writers(model):
    trunk = model.trunk
    spread_norm_weights(model)
    block = Head(model.family, trunk).stack[0]
    with torch.no_grad():
        places, _ = module._copy_layer(block.layers[0], block.layer_types[0], trunk, model.family)
    shape = trunk.hidden_shape if trunk.stage == "streams" else (trunk.config.hidden_size,)
    states, positions = 2 * torch.randn(2, 8, *shape), torch.arange(8).expand(2, -1)
    how = {
        "positions": positions,
        "rotary": trunk.rotary(trunk.embed(TOKENS[:2, :8]), positions, block.layer_type),
        "mask": trunk.mask(block.layer_type, 8, rows=2),
        "cache": None,
    }
    with torch.no_grad():
        want = block._run_layers(states, **how) / 4
        module._scale_outputs(block.layers[0], dict.fromkeys(places, 1 / 4), model.family)
        torch.testing.assert_close(block._run_layers(states / 4, **how), want, rtol=2e-3, atol=2e-3)
    assert (want - states / 4).norm() > 0.002 * states.norm()


def test_parts_are_the_last_of_their_kind_divided_by_the_size_of_their_stream():
    model = build("qwen3_5", initializer_range=0.1)  # three recurrent layers, then one of attention
    with torch.no_grad():
        model.trunk.decoder.layers[-1].mlp.down_proj.weight.mul_(3)
    head, _ = init_head(model.family, model.trunk, TOKENS)
    layer, last = head.stack[0].layers[0], model.trunk.decoder.layers[-1]
    size = measure_layers(model.trunk, TOKENS, ())[0][-1]
    assert torch.equal(layer.self_attn.q_proj.weight, last.self_attn.q_proj.weight)
    torch.testing.assert_close(layer.self_attn.o_proj.weight * size**0.5, last.self_attn.o_proj.weight)
    torch.testing.assert_close(layer.mlp.down_proj.weight * size**0.5, last.mlp.down_proj.weight)
    assert torch.equal(head.stack[0].final_norm.weight, model.trunk.final_norm.weight)


def test_what_the_family_has_of_its_own_is_the_trunks():
    model = build("step3p5", modules=3)
    head, _ = init_head(model.family, model.trunk, TOKENS, num_modules=3)
    for own in head.stack:
        assert torch.equal(own.output.weight, model.trunk.output.weight)
        assert torch.equal(own.final_norm.weight, model.trunk.final_norm.weight)


def test_a_layer_that_reads_its_stream_as_it_is_gets_one_of_its_size():
    """EXAONE 4.5 has no norm in front of attention and MLP: the projection makes the stream as large as it was."""
    model = build("exaone4_5", initializer_range=0.1)
    head, _ = init_head(model.family, model.trunk, TOKENS)
    sizes, _, states = measure_layers(model.trunk, TOKENS, ())
    block = head.stack[0]
    writers = [each.self_attn.o_proj.weight for each in model.trunk.decoder.layers]
    (place,) = [at for at, each in enumerate(writers) if torch.equal(block.layers[0].self_attn.o_proj.weight, each)]
    inputs = block._project_inputs(model.trunk.embed(TOKENS)[:, 1:], states[:, :-1])
    assert inputs.square().mean().sqrt().item() == pytest.approx(sizes[place], rel=0.3)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["glm", "qwen", "step"])
def test_the_block_gets_what_its_original_had_one_position_later(name):
    """On text that the projection was not fitted to, and so the loss begins below that of guessing."""
    model = Model.load(FIXTURES / name, dtype=torch.float32)
    trunk, fitted, held_out = model.trunk, refrain(32, 48, seed=1), refrain(8, 48, seed=2)
    head, _ = init_head(model.family, trunk, fitted)
    block, last = head.stack[0], len(trunk.decoder.layers) - 1
    with torch.no_grad():
        sizes, inputs, states = measure_layers(trunk, held_out, {last})
        want = inputs[last][:, 2:] / inputs[last][:, 2:].square().mean(-1, keepdim=True).sqrt() * sizes[last] ** 0.5
        parts = trunk.embed(held_out)[:, 2:], states[:, 1:-1]
        got = block._project_inputs(*parts)
        mean = (head.new_norm()(parts[0]) + head.new_norm()(parts[1])) * (sizes[last] / 2) ** 0.5
        loss = cross_entropy(head.teacher_forced_hidden(held_out, states, 1)[0], trunk, held_out)
    assert (got - want).square().mean() < min(0.8 * want.square().mean(), 0.7 * (mean - want).square().mean())
    assert name == "step" or loss < math.log(trunk.vocab_size)  # its layers must look back, which no projection does


def cross_entropy(hidden, trunk, tokens):
    return torch.nn.functional.cross_entropy(trunk.logits(hidden[:, :-1]).flatten(0, 1), tokens[:, 2:].flatten())


@pytest.mark.more
def test_it_learns_sooner_than_from_chance():
    """On a trained trunk, cross-entropy against its distribution after a few steps."""
    model = Model.load(FIXTURES / "glm", dtype=torch.float32)
    model.trunk.requires_grad_(False)
    tokens = refrain(16, 48, seed=3)
    hidden = model.trunk(tokens)

    def loss(head):
        logits = head.logits(0, head.teacher_forced_hidden(tokens, hidden.head_input, 1)[0])
        probs = model.trunk.logits(hidden.final_hidden[:, 1:]).softmax(-1)
        return -(probs * logits.log_softmax(-1)).sum(-1).mean()

    def losses(head):
        optimizer = torch.optim.AdamW([each for each in head.parameters() if each.requires_grad], lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            loss(head).backward()
            optimizer.step()
        return loss(head).item()

    torch.manual_seed(0)
    fresh, _ = init_head(model.family, model.trunk, tokens)
    chance = Head(model.family, model.trunk)
    assert losses(fresh) < 0.8 * losses(chance)


def test_modules_without_room():
    model = build("qwen3_5")
    with pytest.raises(ConfigError, match="modules = 2; qwen3_5 allows at most 1"):
        init_head(model.family, model.trunk, TOKENS, num_modules=2)


class Codes(nn.Module):
    """A linear layer with codes under `weight`, as of bitsandbytes (int8) and transformers (fp8), and a bias."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.out_features, self.in_features, self.bias = linear.out_features, linear.in_features, torch.tensor(1.0)
        self.scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(dtype))

    def forward(self, inputs):
        return functional.linear(inputs, self.weight.float() * self.scale) + self.bias


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_5", torch.int8), ("glm4_moe", torch.float8_e4m3fn)])
def test_codes_of_another_library_are_no_weights(name, dtype):
    """Its layers' codes copied as values, or matrices that are left at random."""
    model = build(name, initializer_range=0.1)
    block = Head(model.family, model.trunk).stack[0]
    for layer in model.trunk.decoder.layers:
        for path, linear in [*layer.named_modules()]:
            if type(linear) is nn.Linear and path.startswith("self_attn"):
                layer.set_submodule(path, Codes(linear, dtype))
    with torch.no_grad():
        _, notes = module._copy_layer(block.layers[0], block.layer_types[0], model.trunk, model.family)
        last = model.trunk.decoder.layers[-1].self_attn.q_proj
        torch.testing.assert_close(block.layers[0].self_attn.q_proj.weight, last.weight.float() * last.scale)
    assert notes == []


def test_a_note_on_vocabularies_that_take_most_of_a_step():
    """Not where the shorter loss is refused."""
    trunk, config = SimpleNamespace(vocab_size=50_000, logit_cap=None), HeadConfig(steps=1)
    (note,) = _large_vocabulary(trunk, config)
    assert "50,000" in note
    assert "--set loss_vocab=8192" in note
    for changed in ({"vocab_size": 1000}, {"logit_cap": 30.0}):
        assert not _large_vocabulary(SimpleNamespace(**{**vars(trunk), **changed}), config)
    for settings in ({"objective": "ce"}, {"loss_vocab": 8192}):
        assert not _large_vocabulary(trunk, HeadConfig(steps=1, **settings))
