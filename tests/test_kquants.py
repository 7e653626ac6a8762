"""Products with the weights of K-quants."""

import pytest
import torch
from packed import random_k_quant
from quick import loop
from reference_products import kquant_linear

from nextn.checkpoint.gguf_blocks import KQuantWeight
from nextn.checkpoint.gguf_file import K_QUANTS
from nextn.errors import ConfigError
from nextn.runtime.native.abi import load
from nextn.runtime.native.grouped import KQuantFormat, merge_kquants


def take(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bool)


def multiplied(x: torch.Tensor, weight: KQuantWeight) -> torch.Tensor:
    n, k = weight.codes.shape
    layout = KQuantFormat(weight.kind)
    packed = layout.pack_rows(weight, take)
    out = torch.empty(len(x), n)
    load().call("linear", [out, x, packed], [n, k, 1, layout.type])
    return out


def activations(rows: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype)


@loop("kind", K_QUANTS)
@loop("rows", [1, 2, 3, 9, 10, 11, 33])
def test_products_are_those_of_torch(kind, rows):
    x, weight = activations(rows, 768), random_k_quant(kind, 72, 768)
    expected = kquant_linear(x, weight)
    torch.testing.assert_close(multiplied(x, weight), expected, rtol=1e-5, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_only_activations_are_rounded(kind):
    """Whole activations of up to 32767 in each group of 128 have a scale of one."""
    x = torch.randint(-32767, 32768, (4, 512), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::128] = 32767
    weight = random_k_quant(kind, 64, 512)
    expected = x.double() @ weight.dequantize().double().T
    found = multiplied(x, weight).double()
    assert (found - expected).abs().max() < 1e-6 * expected.std() * 512**0.5


@pytest.mark.parametrize("kind", K_QUANTS)
def test_a_row_has_the_same_bits_beside_any_others(kind):
    x, weight = activations(29, 512), random_k_quant(kind, 96, 512)
    alone = torch.cat([multiplied(row[None], weight) for row in x])
    assert torch.equal(multiplied(x, weight), alone)


@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize("slice_bytes", [2**22, 32 * 512])
def test_merged_weights_are_packed_side_by_side(kind, slice_bytes, monkeypatch):
    monkeypatch.setattr("nextn.runtime.native.memory._SLICE", slice_bytes)
    x, weights = activations(3, 512), [random_k_quant(kind, n, 512) for n in (64, 96)]
    one, other = (multiplied(x, weight) for weight in weights)
    merged = multiplied(x, merge_kquants(weights, 2, 16))
    halves = [torch.cat(each, dim=1) for each in zip(one.chunk(2, dim=1), other.chunk(2, dim=1), strict=True)]
    assert torch.equal(merged, torch.cat(halves, dim=1))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_gated_layers_and_experts_are_linear_layers(kind):
    half, layout = torch.bfloat16, KQuantFormat(kind)
    x, weights = activations(5, 512), [random_k_quant(kind, n, 512) for n in (48, 49)]
    pair = [weight.map(lambda part: part[:48]) for weight in weights]
    one, other = (multiplied(x, weight) for weight in pair)
    found, expected = torch.empty(2, 5, 48, dtype=half)
    load().call("silu_mul", [expected, one, other])
    load().call("gated_linear", [found, x, layout.pack_rows(merge_kquants(pair, 3, 16), take)], [48, 512, layout.type])
    assert torch.equal(found, expected)
    ids, out = torch.tensor([1, 0, -1, 1, 0]), torch.full((5, 48), 7.0)
    memory = [layout.pack_rows(weight, take).view(torch.uint8) for weight in pair]
    load().call("expert_linear", [out, x, ids, torch.cat(memory).view(torch.bool)], [48, 512, layout.type])
    experts = [multiplied(x, weight) for weight in pair]
    rows = [torch.full((48,), 7.0) if expert < 0 else experts[expert][row] for row, expert in enumerate(ids.tolist())]
    assert torch.equal(out, torch.stack(rows))


def test_a_number_of_columns_that_has_no_whole_superblocks_is_refused():
    with pytest.raises(ConfigError, match="linear"):
        load().call(
            "linear", [torch.empty(1, 32), torch.zeros(1, 300), torch.zeros(9, dtype=torch.bool)], [32, 300, 1, 15]
        )
