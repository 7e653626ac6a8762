"""Logits are sums in float32, whatever the dtype of the lm_head."""

import torch
from quick import loop
from torch import nn

from nextn.model import logits
from nextn.model.logits import float_linear, logits_of


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
