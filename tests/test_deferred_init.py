"""Deferred initialization computes, one tensor at a time and in any order, the bits that building modules gives."""

from contextlib import nullcontext

import pytest
import torch
from quick import families, loop
from tiny import CONFIGS, MOST, build, prompt
from torch import nn

from nextn.family_table import generic
from nextn.model.deferred_init import DeferredInit
from nextn.model.model import Model
from nextn.model.trunk import Trunk
from nextn.train.init_head import init_head


def both(make):
    """What make(None) and make(deferred) return, and what computes the latter's values; both have drawn as much."""
    torch.manual_seed(0)
    whole, state = make(None), torch.get_rng_state()
    torch.manual_seed(0)
    deferred = DeferredInit()
    later = make(deferred)
    assert torch.equal(torch.get_rng_state(), state)
    return whole, later, deferred


def check_equal(whole, later, deferred):
    """Values are computed from the last parameter to the first, so that each draws at its own state."""
    deferred.finish(later)
    expected, actual = dict(whole.named_parameters()), dict(later.named_parameters())
    assert expected.keys() == actual.keys()
    for name, value in reversed(actual.items()):
        assert value.requires_grad == expected[name].requires_grad
        value = deferred.compute(value) if value in deferred else value
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name
    buffers = dict(later.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in whole.named_buffers())


@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS))
@loop("dtype", [torch.float32, torch.bfloat16])
def test_a_model(name, dtype):
    """Trunk and head of every family, with tied parameters as one."""

    def make(deferred):
        with deferred.building() if deferred else nullcontext():
            return Model.build(CONFIGS[name], num_modules=MOST[name], dtype=dtype)

    whole, later, deferred = both(make)
    matrices = [value for value in later.trunk.parameters() if value.ndim > 1]
    assert any(value.is_meta for value in matrices)
    check_equal(nn.ModuleList([whole.trunk, whole.head]), nn.ModuleList([later.trunk, later.head]), deferred)


@pytest.mark.more
@pytest.mark.parametrize("name", families(CONFIGS))
def test_a_head_made_of_the_trunk(name):
    """Copies of the trunk's values, scaled, with noise, and cast."""
    model = build(name, initializer_range=0.1)
    check_head(model.family, model.trunk, num_modules=MOST[name])


def test_a_head_for_a_model_without_a_family():
    """It is tried before it is returned, with its values."""
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    check_head(generic(config), Trunk.from_config(config), num_modules=2)


def check_head(family, trunk, **options):
    def make(deferred):
        head, notes = init_head(family, trunk, torch.tensor([prompt(24)]), deferred=deferred, **options)
        assert notes == []
        with deferred or nullcontext():
            for value in head.parameters():
                value.data = value.data.to("cpu", torch.float64)
        return head

    check_equal(*both(make))


def test_values_as_they_are():
    """A module that has values keeps them, whatever happens to its own tensors after that; ties stay."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    expected = {name: value.detach().double() for name, value in module.named_parameters()}
    deferred = DeferredInit()
    deferred.defer(module)
    with deferred:
        module.double()
    assert module[0].weight is module[1].weight
    assert all(value.is_meta for value in module.parameters())
    with deferred.computed(module):
        assert all(torch.equal(value, expected[name]) for name, value in module.named_parameters())
    assert all(torch.equal(deferred.take(value), expected[name]) for name, value in module.named_parameters())
    assert not any(value in deferred for value in module.parameters())


def test_operations():
    """Views, values that are read at once, operands that change later, and order."""
    deferred, other = DeferredInit(), torch.ones(4)
    with deferred.building():
        a, b = torch.empty(4, 4), torch.empty(4)
        a.normal_()
        a[1].zero_()
        a.diagonal().add_(other)
        b.copy_(a[0])
        c = (a * 2).sum()
        a.mul_(3)
    other.zero_()
    assert all(value.is_meta for value in (a, b, c))
    with deferred:
        is_large, total = bool(a.abs().max() > 1), c.item()
        real = torch.zeros(4).copy_(b)
    a, b, c = map(deferred.compute, (a, b, c))
    assert torch.equal(a[1], torch.tensor([0.0, 3.0, 0.0, 0.0]))
    torch.testing.assert_close(a[0], 3 * b)
    assert is_large == bool(a.abs().max() > 1)
    assert total == c.item()
    assert torch.equal(real, b)
    torch.testing.assert_close(c, 2 * a.sum() / 3)
