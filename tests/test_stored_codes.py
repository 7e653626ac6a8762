"""Weights of quantized checkpoints, K-quants too, on the native backend: their own codes, bit by bit."""

from dataclasses import replace

import pytest
import torch
from packed import Case, Values, fp8_folder, quantize_folder, random_k_quant, random_values, section, stored
from quick import each_once, loop, others_slow
from reference_products import grouped_linear, kquant_linear
from safetensors.torch import save_file
from stored import in_one_file, set_config
from tiny import build, prompt
from torch import nn

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.gguf_blocks import KQuantWeight
from nextn.checkpoint.gguf_file import K_QUANTS
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.tensors import TensorReader
from nextn.decoding.generate import generate
from nextn.decoding.rounds import Settings
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import by_name
from nextn.model.model import Model
from nextn.model.packed_linear import PackedLinear, StandIns, StoredFp8, StoredIntegers, packed_layers
from nextn.runtime.backend import backend_for, unused_codes
from nextn.runtime.native.abi import FP8 as FP8_TYPE
from nextn.runtime.native.abi import INT4, load
from nextn.runtime.native.grouped import (
    EIGHT_BITS,
    FOUR_BITS,
    GroupedWeight,
    KQuantFormat,
    merge_kquants,
    quantize_groups,
)
from nextn.runtime.native.program import Replay
from nextn.runtime.native.stored_codes import unsupported
from nextn.runtime.native.trace import Trace, Untraceable
from nextn.runtime.native.weight_packing import PackedWeights

# Every layout, with and without zero points, in each type of scales, and groups that are several of a kernel's.
NATIVE = [
    Case("pack-quantized", 4, 32), Case("pack-quantized", 4, 64, symmetric=False, scale=torch.float16),
    Case("pack-quantized", 4, 0), Case("pack-quantized", 8, 0), Case("int-quantized", 8, 0),
    Case("gptq", 4, 128, symmetric=False, scale=torch.float16), Case("gptq", 4, 0, version=2, symmetric=False),
    Case("gptq", 8, 0), Case("gptq", 4, 96, auto_round=True), Case("awq", 4, 128, symmetric=False),
    Case("awq", 4, 32, symmetric=False, scale=torch.float16), Case("awq", 4, 64, symmetric=False, auto_round=True),
    Case("pack-quantized", 8, 32, scale=torch.float16), Case("int-quantized", 8, 64, symmetric=False),
    Case("gptq", 8, 128, symmetric=False, scale=torch.float16), Case("gptq", 8, 96),
    Case("gptq", 8, 0, symmetric=False),
]  # fmt: skip
OTHER = [
    (Case("pack-quantized", 4, 16), "groups of 16"),
    (Case("gptq", 4, 32, ordered=True), r"reordered groups \(desc_act\)"),
    (Case("gptq", 8, 16), "groups of 16"),
]


def codes_of(folder, case: Case, all_values: list[Values]) -> list[StoredIntegers]:
    """Weights as a checkpoint stores them."""
    table = {
        f"model.layers.{index}.mlp.up_proj.{part}": value
        for index, values in enumerate(all_values)
        for part, value in stored(case, values).items()
    }
    save_file(table, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    set_config(folder, model_type="qwen3_5_text", num_hidden_layers=4, quantization_config=section(case))
    reader = TensorReader(Inventory.of(Checkpoint.open(folder), family=by_name("qwen3_5")))
    stand_ins = StandIns(torch.bfloat16)
    weights = [reader.stored(name) for name in sorted(reader.names())]
    return [StoredIntegers.of(each, stand_ins.of(each)) for each in weights]


def native_values(packed, rows: int, columns: int) -> torch.Tensor:
    """The values that products with a packed matrix use."""
    out = torch.empty(rows, columns)
    load().call("grouped_embedding", [out, packed.memory, torch.arange(rows)], [rows, columns, packed.type])
    return out


@loop("case", NATIVE, ids=str)
def test_native_values_are_the_stored_ones_exactly(case, tmp_path, monkeypatch):
    """Alone and beside another weight in one matrix; packed in one piece and in several."""
    values = [random_values(case, 72, 384, seed) for seed in (1, 2)]
    one, other = codes = codes_of(tmp_path, case, values)
    assert unsupported(one) is None
    first, second = (each.weight() for each in values)
    for num_bytes in (2**22, 32 * 384):
        monkeypatch.setattr("nextn.runtime.native.memory._SLICE", num_bytes)
        weights = PackedWeights(load(), replaced=codes)
        assert torch.equal(native_values(weights.pack([one.stand_in]), 72, 384), first)
        both = native_values(weights.pack([one.stand_in, other.stand_in], columns=32), 192, 384)
        assert torch.equal(both[:72], first)
        assert torch.equal(both[96:168], second)


def test_scales_in_float32_keep_sixteen_bits(tmp_path):
    for layout, bits, group in (("pack-quantized", 4, 128), ("int-quantized", 8, 0)):
        case = Case(layout, bits, group, scale=torch.float32)
        values = random_values(case, 64, 256)
        (codes,) = codes_of(tmp_path, case, [values])
        found = native_values(PackedWeights(load(), replaced=[codes]).pack([codes.stand_in]), 64, 256)
        assert (found - values.weight()).abs().le(values.weight().abs() * 2**-16).all()
        assert not torch.equal(found, values.weight())


@pytest.mark.parametrize(("case", "reason"), OTHER, ids=str)
def test_other_weights_are_dequantized(case, reason, tmp_path):
    """In the dtype of the model, and beside such weights in one matrix."""
    values = [random_values(case, 64, 384, seed) for seed in (1, 2)]
    codes = codes_of(tmp_path, case, values)
    with pytest.raises(AssertionError, match=f"^{reason}$"):
        raise AssertionError(unsupported(codes[0]))
    weights = PackedWeights(load(), replaced=codes)
    dense = [each.weight().bfloat16() for each in values]
    stand_ins = [each.stand_in for each in codes]
    assert weights.merge_key(stand_ins[0]) == weights.merge_key(dense[0])
    assert weights.pack(stand_ins).memory.equal(PackedWeights(load()).pack(dense).memory)


def test_codes_are_not_merged_with_weights_that_are_rounded(tmp_path):
    """Two layers of one input, both of four bits in groups of 32."""
    case = Case("gptq", 4, 32, symmetric=False)
    (codes,) = codes_of(tmp_path, case, [values := random_values(case, 64, 256)])
    x, dense = (torch.randn(rows, 256, generator=torch.Generator().manual_seed(3)).bfloat16() for rows in (5, 64))
    weights = PackedWeights(load(), FOUR_BITS, replaced=[codes])
    assert weights.type_of(codes.stand_in) == weights.type_of(dense)
    layers = lambda: [nn.functional.linear(x, weight) for weight in (codes.stand_in, dense)]  # noqa: E731
    replay = Replay.of(load(), Trace([x]), layers, weights)
    replay.run()
    stored = GroupedWeight(values.codes.to(torch.uint8), values.scales.float(), values.zeros.to(torch.uint8))
    for found, weight in zip(replay.outputs, (stored, quantize_groups(dense, 4, 32, load())), strict=True):
        torch.testing.assert_close(found, grouped_linear(x, weight).bfloat16())


def test_a_part_of_a_weight_is_refused(tmp_path):
    case = Case("gptq", 4, 128)
    (codes,) = codes_of(tmp_path, case, [random_values(case, 64, 256)])
    with pytest.raises(Untraceable, match=r"a part of model\.layers\.0\.mlp\.up_proj\.weight"):
        PackedWeights(load(), replaced=[codes]).pack([codes.stand_in[:32]])


def packed_model(folder, case: Case, name: str = "qwen3_5", **options) -> Model:
    build(name).save(folder, dtype=torch.bfloat16)
    quantize_folder(folder, case, is_random=False)
    return Model.load(folder, **options)


def product(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """The layer with activations in sixteen bits."""
    weight = layer.codes.integers()
    middle = torch.full(weight.scales.shape, weight.middle, dtype=torch.uint8)
    return grouped_linear(
        x, GroupedWeight(weight.codes, weight.scales.float(), middle if weight.zeros is None else weight.zeros)
    ).to(x.dtype)


CASES = [
    Case("pack-quantized", 4, 32), Case("pack-quantized", 8, 0), Case("gptq", 4, 32), Case("awq", 4, 32),
    Case("pack-quantized", 8, 32),
]  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("case", others_slow(CASES, CASES[0], CASES[1], CASES[4]), ids=str)
def test_models_compute_with_their_own_codes(case, tmp_path, monkeypatch):
    """The states are those of a torch twin with the same codes and activations in sixteen bits."""
    model = packed_model(tmp_path, case, dtype=torch.float32)
    kept = len([*packed_layers(model.trunk)])
    assert kept
    assert not unused_codes(model)
    made, tokens = backend_for(model, "native"), torch.tensor([prompt(21)])
    assert made.weight_bits is None
    with torch.no_grad():
        hidden = made.trunk(tokens, made.trunk.cache(1))
        states, found = hidden.head_input.clone(), hidden.final_hidden.clone()
        step = made.head.step(0, tokens, states, cache=made.head.cache(1)).final_hidden.clone()
        plain = model.trunk(tokens).final_hidden
        monkeypatch.setattr(PackedLinear, "forward", product)
        twin, twin_step = model.trunk(tokens).final_hidden, model.head.step(0, tokens, states).final_hidden
    for near, far in ((found, twin), (step, twin_step)):
        assert (near - far).norm() < 5e-3 * far.norm()
    assert 0 < (found - plain).norm() < 0.3 * plain.norm()


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "weights"),
    each_once([replace(CASES[0], symmetric=False), CASES[1], CASES[4]], ["stored", "int8", "int4"]),
    ids=str,
)
def test_drafts_do_not_change_the_text(case, weights, tmp_path):
    """Also where all other weights are rounded."""
    model = packed_model(tmp_path, case, "glm4_moe")
    model.trunk.weights = weights
    runs = [
        generate(model, [prompt(9)], Settings(num_speculative_tokens=k, max_tokens=24), backend="native")[0]
        for k in (0, 3)
    ]
    assert runs[0].tokens == runs[1].tokens
    assert len(runs[1].tokens) == 24


def packed_types(monkeypatch) -> dict[int, int]:
    """Address of a packed weight -> its type, filled while backends are made."""
    types: dict[int, int] = {}
    pack = PackedWeights.pack

    def watched(self, weights, *args):
        packed = pack(self, weights, *args)
        types.update({weight.data_ptr(): packed.type for weight in weights})
        return packed

    monkeypatch.setattr(PackedWeights, "pack", watched)
    return types


@pytest.mark.more
def test_codes_are_rounded_only_once(tmp_path, monkeypatch):
    """With weights int8, linear layers keep four bits, and all others get eight."""
    model = packed_model(tmp_path, CASES[0])
    model.trunk.weights = "int8"
    packed = packed_types(monkeypatch)
    backend_for(model, "native")
    kept = {layer.codes.stand_in.data_ptr() for layer in packed_layers(model.trunk, model.head)}
    assert {packed[each] for each in kept} == {INT4}
    assert packed[model.trunk.embedding.weight.data_ptr()] == EIGHT_BITS.type


@pytest.mark.more
def test_what_a_pass_computes_from_a_weight_is_noticed(tmp_path, monkeypatch):
    """The recording has no values of weights; the model then runs in torch, dequantized, with the reason."""
    model = packed_model(tmp_path, CASES[0])
    monkeypatch.setattr(
        PackedLinear, "forward", lambda self, x: nn.functional.linear(x, (self.weight * 1.0).to(x), self.bias)
    )
    made = backend_for(model)
    assert made.name == "torch"
    assert "differs from the torch backend (relative error nan" in made.reason
    assert not [*packed_layers(model.trunk, model.head)]
    assert backend_for(model) is made


@pytest.mark.more
def test_weights_are_dequantized_for_the_self_check_alone(tmp_path, monkeypatch):
    """One layer at a time, as it runs."""
    names: list[str] = []
    dequantize = StoredIntegers.dequantize
    monkeypatch.setattr(StoredIntegers, "dequantize", lambda self: names.append(self.name) or dequantize(self))
    model = packed_model(tmp_path, CASES[0])
    assert not names
    backend_for(model, "native")
    assert set(names) == {layer.codes.name for layer in packed_layers(model.trunk, model.head)}
    # Twice where products round their inputs: torch's own error is measured, too.
    assert max(map(names.count, names)) <= 2
    names.clear()
    generate(model, [prompt(9)], Settings(num_speculative_tokens=3, max_tokens=8), backend="native")
    assert not names


FP8 = [((128, 128), "weight_scale_inv"), ((32, 64), "weight_scale_inv"), ((1, 2**20), "weight_scale"),
       (None, "weight_scale")]  # fmt: skip


def fp8_model(folder, block, suffix: str = "weight_scale_inv", name: str = "qwen3_5", **options) -> Model:
    build(name).save(folder, dtype=torch.bfloat16)
    fp8_folder(folder, block, suffix)
    return Model.load(folder, **options)


def states_and_texts(model: Model) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Native states of trunk and head, and a text with drafts."""
    model.head.exact = True
    made, tokens = backend_for(model, "native"), torch.tensor([prompt(21)])
    with torch.no_grad():
        hidden = made.trunk(tokens, made.trunk.cache(1))
        states = [hidden.final_hidden.clone(), hidden.head_input.clone()]
        states.append(made.head.step(0, tokens, states[1], cache=made.head.cache(1)).final_hidden.clone())
    settings = Settings(num_speculative_tokens=3, max_tokens=12)
    return states, [text.tokens for text in generate(model, [prompt(9)], settings, backend="native")]


@pytest.mark.more
@pytest.mark.parametrize(
    ("block", "suffix", "dtype", "weights"),
    each_once(FP8, [torch.bfloat16, torch.float32], ["stored", "int8", "int4"]),
    ids=str,
)
def test_fp8_models_are_the_dequantized_ones_bit_for_bit(block, suffix, dtype, weights, tmp_path):
    """With one byte per weight as stored; where all weights are rounded, those in fp8 are, too."""
    name = "glm4_moe" if weights == "int4" else "qwen3_5"  # whose states do not survive four bits
    model = fp8_model(tmp_path, block, suffix, name, dtype=dtype)
    twin = Model.load(tmp_path, dtype=dtype).dequantize()
    kept = [layer.codes for layer in packed_layers(model.trunk, model.head)]
    assert len(kept) > 5
    assert all(isinstance(codes, StoredFp8) and unsupported(codes) is None for codes in kept)
    assert not unused_codes(model)
    model.trunk.weights = twin.trunk.weights = weights
    (found, text), (expected, other) = states_and_texts(model), states_and_texts(twin)
    for near, far in zip(found, expected, strict=True):
        assert torch.equal(near, far)
    assert text == other


def test_fp8_weights_are_packed_in_one_byte(tmp_path):
    model = fp8_model(tmp_path, (128, 128))
    weights = PackedWeights(load(), replaced=(codes := [layer.codes for layer in packed_layers(model.trunk)]))
    packed = [weights.pack([each.stand_in]) for each in codes]
    assert {each.type for each in packed} == {FP8_TYPE + 2}
    for each, matrix in zip(codes, packed, strict=True):
        rows, columns = each.stand_in.shape
        assert matrix.memory.nbytes == -(-rows // 32) * -(-columns // 128) * 32 * (128 + 4)


@pytest.mark.more
def test_fp8_blocks_that_no_product_reads_are_dequantized(tmp_path):
    model, twin = fp8_model(tmp_path, (8, 16)), Model.load(tmp_path).dequantize()
    (note,) = unused_codes(model)
    assert "as no product supports blocks of 8 x 16" in note
    for near, far in zip(states_and_texts(model)[0], states_and_texts(twin)[0], strict=True):
        assert torch.equal(near, far)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "part"),
    each_once(["model.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj"], ["weight", "weight_scale_inv"]),
)
def test_fp8_values_that_are_not_finite(name, part, tmp_path):
    fp8_model(tmp_path, (128, 128))

    def damage(table):
        flat = table[f"{name}.{part}"].view(-1)
        if part == "weight":
            flat.view(torch.uint8)[3] = 0xFF
        else:
            flat[0] = torch.inf

    in_one_file(tmp_path, damage)
    with pytest.raises(CheckpointError, match=rf"(1 trunk tensors hold NaN or Inf|non-finite): {name}"):
        Model.load(tmp_path)


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
