"""Layers and experts that keep a checkpoint's codes: in torch they are the dequantized model."""

import copy
import math
import shutil

import pytest
import torch
from packed import Case, fp8_folder, quantize_folder
from quick import each_once, others_slow
from stored import in_one_file
from test_stored_codes import packed_types, states_and_texts
from tiny import build, prompt

from nextn.checkpoint.tensors import TensorReader
from nextn.decoding.generate import generate
from nextn.decoding.rounds import Settings
from nextn.errors import CheckpointError, ConfigError
from nextn.evaluate.conventions import Variant, apply_variants
from nextn.evaluate.decoding_costs import step_bytes
from nextn.model.model import Model, load_head
from nextn.model.packed_experts import PackedExperts, StackedCodes, packed_parts, weights_with_codes
from nextn.model.packed_linear import packed_layers
from nextn.runtime.backend import backend_for, unused_codes
from nextn.runtime.native.abi import FP8, INT4, INT8, load
from nextn.runtime.native.trace import Untraceable
from nextn.runtime.native.weight_packing import PackedWeights
from nextn.settings import Contract

CASE = Case("gptq", 4, 32)
TOKENS = torch.tensor([prompt(21)])


def packed_folder(folder, name: str = "qwen3_5", **changes):
    """A packed checkpoint, and the values of its weights."""
    build(name, **changes).save(folder, dtype=torch.bfloat16)
    return folder, quantize_folder(folder, CASE)


@pytest.mark.more
def test_layers_of_trunk_and_head_keep_their_codes(tmp_path):
    """All that are loaded as they are stored; the lm_head is dequantized."""
    folder, weights = packed_folder(tmp_path / "model", tie_word_embeddings=False)
    model = Model.load(folder)
    kept = {layer.codes.name for layer in packed_layers(model.trunk, model.head)}
    assert kept == weights.keys() - {"lm_head.weight"}
    assert "lm_head.weight" in weights
    assert torch.equal(model.trunk.output.weight, weights["lm_head.weight"].bfloat16())
    for layer in packed_layers(model.trunk, model.head):
        assert torch.equal(layer.weight, weights[layer.codes.name].bfloat16())
        assert layer.weight.shape == (layer.out_features, layer.in_features)


@pytest.mark.more
def test_what_is_saved_is_dequantized(tmp_path):
    folder, weights = packed_folder(tmp_path / "model")
    Model.load(folder).save(tmp_path / "saved")
    saved = Model.load(tmp_path / "saved")
    assert not [*packed_layers(saved.trunk, saved.head)]
    values = saved.trunk.model.state_dict()
    assert all(torch.equal(values[name], weights[name].bfloat16()) for name in weights.keys() & values.keys())
    assert len(weights.keys() & values.keys()) > 10
    with torch.inference_mode():
        assert torch.equal(saved.trunk(TOKENS).final_hidden, Model.load(folder).trunk(TOKENS).final_hidden)


@pytest.mark.more
def test_dequantized_models_can_be_trained(tmp_path):
    folder, _ = packed_folder(tmp_path / "model")
    model = Model.load(folder)
    names = {name for name, _ in model.trunk.named_parameters()}
    with torch.no_grad():
        before = model.trunk(TOKENS).final_hidden
        assert torch.equal(model.dequantize().trunk(TOKENS).final_hidden, before)
    assert not [*packed_layers(model.trunk, model.head)]
    added = {name for name, _ in model.trunk.named_parameters()} - names
    assert all(name.endswith("proj.weight") for name in added)
    model.trunk(TOKENS).final_hidden.sum().backward()
    assert all(model.trunk.get_parameter(name).grad is not None for name in added)


@pytest.mark.more
def test_gradients_pass_through_layers_that_keep_their_codes(tmp_path):
    folder, _ = packed_folder(tmp_path / "model")
    grads = []
    for model in (Model.load(folder), Model.load(folder).dequantize()):
        model.trunk(TOKENS).final_hidden.sum().backward()
        grads.append(model.trunk.embedding.weight.grad)
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0


@pytest.mark.more
def test_copies_share_the_files(tmp_path):
    folder, _ = packed_folder(tmp_path / "model")
    model = Model.load(folder)
    twin = copy.deepcopy(model.trunk)
    assert {id(layer.codes) for layer in packed_layers(twin)} == {
        id(layer.codes) for layer in packed_layers(model.trunk)
    }
    with torch.inference_mode():
        assert torch.equal(twin(TOKENS).final_hidden, model.trunk(TOKENS).final_hidden)


@pytest.mark.more
def test_variants_and_heads_to_train_have_values_that_can_change(tmp_path):
    folder, weights = packed_folder(tmp_path / "model")
    model = Model.load(folder)
    changed, _ = apply_variants(model, Contract(), [Variant("zero", "zeros", change=lambda head: zero(head))])
    expected = {name for name in weights if name.startswith("mtp.")}
    assert len([*packed_layers(model.head)]) == len(expected) > 0
    assert not changed.head.get_submodule("stack.0.block.mlp.up_proj").weight.any()
    assert not [*packed_layers(load_head(folder, model.trunk))]


def zero(head):
    for name, value in [*head.named_parameters()]:
        head.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(torch.zeros_like(value))


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj"])
def test_scales_that_are_not_finite(name, tmp_path):
    folder, _ = packed_folder(tmp_path / "model")
    in_one_file(folder, lambda table: table[f"{name}.scales"].view(-1)[3:4].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=rf"(1 trunk tensors hold NaN or Inf|non-finite): {name}"):
        Model.load(folder)


@pytest.mark.more
def test_models_that_only_torch_can_run_are_dequantized(tmp_path):
    """In float16, and what was in memory before is gone."""
    folder, weights = packed_folder(tmp_path / "model")
    model = Model.load(folder, dtype=torch.float16)
    made = backend_for(model)
    assert made.name == "torch"
    assert "torch.float16, only float32 and bfloat16: load the model as one" in made.reason
    layer = model.trunk.decoder.layers[0].mlp.up_proj
    assert torch.equal(dict(layer.named_parameters())["weight"], weights["model.layers.0.mlp.up_proj.weight"].half())


@pytest.mark.more
def test_the_files_may_be_removed_after_loading(tmp_path):
    """They stay open, as those of other weights do."""
    folder, weights = packed_folder(tmp_path / "model")
    model = Model.load(folder)
    shutil.rmtree(folder)
    layer = model.trunk.decoder.layers[0].mlp.up_proj
    assert torch.equal(layer.weight, weights["model.layers.0.mlp.up_proj.weight"].bfloat16())
    assert backend_for(model).name == "native"


CASES = [Case("pack-quantized", 4, 32), Case("gptq", 4, 32, symmetric=False), Case("int-quantized", 8, 0)]
FAMILIES = ["glm4_moe", "qwen3_next", "deepseek_v3"]


def quantized(folder, case: Case | None, name: str = "glm4_moe"):
    """A checkpoint with quantized experts (None: fp8 in blocks), and the dequantized values of its weights."""
    build(name).save(folder, dtype=torch.bfloat16)
    if case is None:
        fp8_folder(folder, (32, 64))
        return folder, {}
    return folder, quantize_folder(folder, case, is_random=False)


def packed_experts(model: Model) -> list[PackedExperts]:
    """Of the trunk, then of the head."""
    return [part for part in packed_parts(model.trunk, model.head) if isinstance(part, PackedExperts)]


def stacked_parameters(model: Model) -> list[str]:
    named = [*model.trunk.named_parameters(), *model.head.named_parameters()]
    return [name for name, value in named if ".experts." in name and value.ndim == 3]


@pytest.mark.more
@pytest.mark.parametrize(("case", "name"), each_once([CASES[1], None], FAMILIES), ids=str)
def test_torch_computes_what_dequantized_experts_compute(case, name, tmp_path):
    """Bit for bit, as a checkpoint of the dequantized values is loaded."""
    folder, weights = quantized(tmp_path / "model", case, name)
    model = Model.load(folder)
    assert packed_experts(model)
    assert not stacked_parameters(model)
    if weights:
        build(name).save(tmp_path / "plain", dtype=torch.bfloat16)
        in_one_file(tmp_path / "plain", lambda table: table.update({n: w.bfloat16() for n, w in weights.items()}))
        twin = Model.load(tmp_path / "plain")
    else:
        twin = Model.load(folder).dequantize()
    assert stacked_parameters(twin)
    assert any(isinstance(part, PackedExperts) for part in model.head.modules())
    with torch.inference_mode():
        states, expected = model.trunk(TOKENS), twin.trunk(TOKENS)
        assert torch.equal(states.final_hidden, expected.final_hidden)
        found, expected = (each.head.step(0, TOKENS, states.head_input).final_hidden for each in (model, twin))
        assert torch.equal(found, expected)


@pytest.mark.more
def test_torch_dequantizes_only_experts_that_are_chosen(tmp_path, monkeypatch):
    folder, _ = quantized(tmp_path / "model", CASES[0])
    model, used = Model.load(folder), []
    plain = StackedCodes.dequantize
    monkeypatch.setattr(StackedCodes, "dequantize", lambda self, expert: used.append(expert) or plain(self, expert))
    with torch.inference_mode():
        model.trunk(TOKENS[:, :1])
    num_chosen = model.trunk.config.num_experts_per_tok
    num_layers = sum(isinstance(part, PackedExperts) for part in model.trunk.modules())
    assert len(used) == 2 * num_chosen * num_layers  # two stacked weights
    assert num_chosen < model.trunk.config.n_routed_experts


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(FAMILIES, "qwen3_next"))
def test_native_fp8_experts_are_the_dequantized_ones_bit_for_bit(name, tmp_path, monkeypatch):
    # In bf16, torch sends positions of these random models to other experts than in float32.
    monkeypatch.setattr("nextn.runtime.self_check.check", lambda *given, **more: None)
    folder, _ = quantized(tmp_path / "model", None, name)
    model, twin = Model.load(folder), Model.load(folder).dequantize()
    assert packed_experts(model)
    assert not unused_codes(model)
    (found, text), (expected, other) = states_and_texts(model), states_and_texts(twin)
    assert all(map(torch.equal, found, expected))
    assert text == other


@pytest.mark.more
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_products_read_the_codes(case, tmp_path, monkeypatch):
    """The states are near those of the dequantized model, and drafts do not change the text."""
    folder, _ = quantized(tmp_path / "model", case)
    model, types = Model.load(folder), packed_types(monkeypatch)
    backend = backend_for(model, "native")
    experts = [weight for part in packed_experts(model) for weight in part.codes.values()]
    assert experts
    assert {types[weight.stand_in.data_ptr()] for weight in experts} <= {*range(INT4, INT4 + 3), *range(INT8, INT8 + 3)}
    with torch.inference_mode():
        near, far = backend.trunk(TOKENS, backend.trunk.cache(1)).final_hidden, model.trunk(TOKENS).final_hidden
    errors = (near - far).float().norm(dim=-1) / far.float().norm(dim=-1)
    assert 0 < errors.median() < 0.05
    texts = [
        generate(model, [prompt(9)], Settings(num_speculative_tokens=k, max_tokens=24), backend="native")[0].tokens
        for k in (0, 3)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24


@pytest.mark.more
@pytest.mark.parametrize(("case", "expected"), [(CASES[0], INT4), (None, INT8 + 1)], ids=["int4", "fp8"])
def test_codes_are_rounded_only_once(case, expected, tmp_path, monkeypatch):
    """With weights int8, four bits stay, and fp8 becomes eight bits."""
    folder, _ = quantized(tmp_path / "model", case)
    model, types = Model.load(folder), packed_types(monkeypatch)
    model.trunk.weights = "int8"
    backend_for(model, "native")
    found = {types[weight.stand_in.data_ptr()] for part in packed_experts(model) for weight in part.codes.values()}
    assert found == {expected}


@pytest.mark.more
def test_experts_in_another_order_are_noticed(tmp_path, monkeypatch):
    folder, _ = quantized(tmp_path / "model", CASES[0])
    plain = StackedCodes.parts

    def rotated(self, weight):
        parts = plain(self, weight)
        return None if parts is None else [*parts[1:], parts[0]]

    monkeypatch.setattr(StackedCodes, "parts", rotated)
    with pytest.raises(ConfigError, match="differs from the torch backend"):
        backend_for(Model.load(folder), "native")


def test_stand_ins_report_their_rows(tmp_path):
    folder, _ = quantized(tmp_path / "model", None)
    codes = packed_experts(Model.load(folder))[0].codes["gate_up_proj"]
    half = codes.stand_in.shape[1] // 2
    first, second = codes.stand_in.split(half, dim=1)
    assert [[each.name.rpartition("experts.")[2] for each in expert] for expert in codes.parts(first)[:2]] == [
        ["0.gate_proj.weight"], ["1.gate_proj.weight"],
    ]  # fmt: skip
    assert codes.parts(second)[0][0].name.endswith("experts.0.up_proj.weight")
    assert [len(expert) for expert in codes.parts(codes.stand_in)] == [2] * len(codes.experts)
    assert codes.parts(codes.stand_in[:, : half // 2]) is None
    assert codes.parts(codes.stand_in[1:]) is None
    assert codes.memory.nbytes == 2 * half * codes.stand_in.element_size()
    with pytest.raises(Untraceable, match=r"a part of model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight"):
        PackedWeights(load(), replaced=[codes]).pack([codes.stand_in[:, : half // 2]])
    whole = PackedWeights(load(), replaced=[codes]).pack([codes.stand_in])
    assert (whole.type >= FP8) == (half % 32 == 0)


@pytest.mark.more
def test_saved_experts_are_dequantized(tmp_path):
    folder, _ = quantized(tmp_path / "model", CASES[1])
    model = Model.load(folder)
    model.save(tmp_path / "saved")
    saved = Model.load(tmp_path / "saved")
    assert not [*packed_parts(saved.trunk)]
    with torch.inference_mode():
        assert torch.equal(saved.trunk(TOKENS).final_hidden, model.trunk(TOKENS).final_hidden)


def test_copies_share_the_codes_and_dequantized_models_can_be_trained(tmp_path):
    folder, _ = quantized(tmp_path / "model", CASES[1])
    model = Model.load(folder)
    twin = copy.deepcopy(model.trunk)
    assert set(map(id, weights_with_codes(twin))) == set(map(id, weights_with_codes(model.trunk)))
    with torch.inference_mode():
        assert torch.equal(twin(TOKENS).final_hidden, model.trunk(TOKENS).final_hidden)
    model.dequantize().trunk(TOKENS).final_hidden.sum().backward()
    names = stacked_parameters(model)
    assert names
    trained = dict(model.trunk.named_parameters())
    assert all(trained[name].grad is not None for name in names if name in trained)
    assert trained.keys() & set(names)


@pytest.mark.more
def test_a_layer_with_one_matrix_in_16_bits_is_dequantized(tmp_path):
    folder, weights = quantized(tmp_path / "model", CASES[0])
    name = "model.layers.1.mlp.experts.2.up_proj"

    def replace(table):
        for key in [key for key in table if key.startswith(f"{name}.")]:
            del table[key]
        table[f"{name}.weight"] = weights[f"{name}.weight"].bfloat16()

    expected = Model.load(folder)
    with torch.inference_mode():
        expected = expected.trunk(TOKENS).final_hidden
    in_one_file(folder, replace)
    model = Model.load(folder)
    assert [part for part in model.head.modules() if isinstance(part, PackedExperts)] == packed_experts(model) != []
    with torch.inference_mode():
        assert torch.equal(model.trunk(TOKENS).final_hidden, expected)


@pytest.mark.more
def test_scales_of_experts_that_are_not_finite(tmp_path):
    folder, _ = quantized(tmp_path / "model", CASES[0])
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    in_one_file(folder, lambda table: table[name].view(-1)[3:4].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"1 trunk tensors hold NaN or Inf: model\.layers\.1\.mlp\.experts\.2"):
        Model.load(folder)


def test_a_step_reads_the_codes_of_the_experts_that_are_chosen(tmp_path):
    folder, _ = quantized(tmp_path / "model", CASES[0])
    model = Model.load(folder)
    weights = [weight for part in packed_experts(model) for weight in part.codes.values()]
    stored = sum(matrix.num_bytes for weight in weights for matrix in weight.matrices)
    config = model.trunk.config
    stored -= sum(
        matrix.num_bytes
        for weight in weights_with_codes(model.head)
        for matrix in weight.matrices
        if ".experts." in matrix.name
    )
    before = step_bytes(model.trunk)
    share = config.num_experts_per_tok / config.n_routed_experts
    config.num_experts_per_tok = config.n_routed_experts
    assert math.isclose(step_bytes(model.trunk) - before, stored * (1 - share), abs_tol=8)


@pytest.mark.more
def test_loading_dequantizes_one_expert_per_layer(tmp_path, monkeypatch):
    """The first one, whose values show how parameters consist of stored tensors."""
    folder, _ = quantized(tmp_path / "model", CASES[0], "qwen3_next")
    names: list[str] = []
    read = TensorReader.integers
    monkeypatch.setattr(TensorReader, "integers", lambda self, name: names.append(name) or read(self, name))
    model = Model.load(folder)
    assert len(packed_experts(model)) > 3
    assert not [name for name in names if ".experts." in name and ".experts.0." not in name]
