"""Linear layers that keep a checkpoint's codes: in torch they are linear layers, whatever is done with the model."""

import copy
import shutil

import pytest
import torch
from packed import Case, quantize_folder
from stored import in_one_file
from tiny import build, prompt

from nextn.errors import CheckpointError
from nextn.evaluate.conventions import Variant, apply_variants
from nextn.model.model import Model, load_head
from nextn.model.packed_linear import packed_layers
from nextn.runtime.backend import backend_for
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
