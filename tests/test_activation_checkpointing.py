"""Activation checkpointing: the same gradients from layers that keep nothing, and no change where none are recorded."""

import pytest
import torch
from tiny import build, prompt

from nextn.losses.mtp_loss import Targets, mtp_loss
from nextn.model.lm_head_columns import lm_head_weights
from nextn.train.layer_inputs import checkpoint_layers


def gradients(model, tokens):
    hidden = model.trunk(tokens)
    hiddens = [hidden.final_hidden, *model.head.teacher_forced_hidden(tokens, hidden.head_input, 2)]
    mtp_loss(hiddens, lm_head_weights(model.trunk, model.head, 2), Targets(tokens), lam=0.3).total.backward()
    named = [*model.trunk.named_parameters(), *model.head.named_parameters()]
    return {name: value.grad for name, value in named if value.grad is not None}


def layers(model):
    return [*model.trunk.decoder.layers, *model.head.layers]


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5", "deepseek_v3", "deepseek_v4"])
def test_gradients_stay(name):
    tokens = torch.tensor([prompt(16)])
    plain, lean = build(name), build(name)
    checkpoint_layers(layers(lean))
    checkpoint_layers(layers(lean))
    expected, found = gradients(plain, tokens), gradients(lean, tokens)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_less_is_kept():
    """What autograd saves in the layers of a pass: their inputs, and nothing of what is inside."""
    kept = []
    for is_on in (False, True):
        model, total = build("glm4_moe"), 0
        if is_on:
            checkpoint_layers(model.trunk.decoder.layers)

        def pack(value):
            nonlocal total
            total += value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model.trunk(torch.tensor([prompt(64)])).final_hidden.sum().backward()
        kept.append(total)
    assert kept[1] < kept[0]


def test_decoding_is_untouched():
    """A layer that writes a cache must run once."""
    model = build("glm4_moe")
    tokens = torch.tensor([prompt(8)])
    plain = model.trunk(tokens).final_hidden
    checkpoint_layers(layers(model))
    cache = model.trunk.cache(1)
    assert torch.equal(model.trunk(tokens, cache).final_hidden, plain)
    with torch.no_grad():
        assert torch.equal(model.trunk(tokens).final_hidden, plain)
