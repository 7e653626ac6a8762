"""Trunks that are read layer by layer: the same bits as in memory, one layer at a time, and clear errors."""

import os
from pathlib import Path

import pytest
import torch
from quick import families
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, FIXTURES, build, prompt

from nextn.checkpoint.tensors import TensorReader
from nextn.errors import CheckpointError, ConfigError
from nextn.model import transformers_loading
from nextn.model.model import Model

BATCHES = [torch.tensor([prompt(21, seed=1), prompt(21, seed=2)]), torch.tensor([prompt(34, seed=3)])]


def assert_same(streamed, loaded, batches=BATCHES, **options):
    """The streamed trunk's states have the bits of the loaded one's passes."""
    got = streamed.trunk.run(batches, **options)
    with torch.inference_mode():
        for output, tokens in zip(got, batches, strict=True):
            expected = loaded.trunk(tokens)
            assert torch.equal(output.final_hidden, expected.final_hidden)
            assert torch.equal(output.head_input, expected.head_input)


@pytest.mark.parametrize("name", families(CONFIGS))
def test_same_bits_for_every_family(name, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_loading, "_EXPERTS_AT_ONCE", 3)  # of 4, so that there is an incomplete part
    build(name).save(tmp_path / "model")
    loaded, streamed = Model.load(tmp_path / "model"), Model.load(tmp_path / "model", stream=True)
    assert streamed.notes == loaded.notes
    assert_same(streamed, loaded)


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_same_bits_for_trained_models(name, trained):
    streamed = Model.load(FIXTURES / name, dtype=torch.float32, stream=True)
    assert_same(streamed, trained[name], [tokens % trained[name].trunk.vocab_size for tokens in BATCHES])


@pytest.mark.parametrize(
    ("name", "fp8"), [("deepseek_v4", False), ("qwen3_next", False), ("glm4_moe", True), ("deepseek_v3", True)]
)
def test_same_bits_in_bf16_and_from_fp8(name, fp8, tmp_path):
    build(name).save(tmp_path / "model", dtype=torch.bfloat16, fp8=fp8)
    streamed = Model.load(tmp_path / "model", stream=True)
    assert streamed.trunk.dtype == torch.bfloat16
    assert_same(streamed, Model.load(tmp_path / "model"))


@pytest.fixture
def folder(tmp_path) -> Path:
    build("glm_moe_dsa").save(tmp_path / "model")
    return tmp_path / "model"


def shard(folder: Path) -> Path:
    """The file with the decoder layers."""
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


def test_states_in_files_have_the_same_bits(folder):
    """Every layer's output is written to a file and read back, tuples with indices included; no file is left."""
    assert_same(Model.load(folder, stream=True), Model.load(folder), max_state_bytes=0)
    assert not list(folder.parent.glob("nextn-states-*"))


def test_only_one_layer_is_in_memory(folder, monkeypatch):
    """When a layer runs, the parameters of all others are on the meta device; after the pass, all are."""
    trunk = Model.load(folder, stream=True).trunk
    layers, seen = trunk.decoder.layers, []

    def check(module, *_):
        if not any(value.is_meta for value in module.parameters()):
            seen.append([any(not value.is_meta for value in layer.parameters()) for layer in layers])

    for layer in layers:
        layer.register_forward_pre_hook(check)
    trunk.run(BATCHES)
    one_hot = torch.eye(len(layers), dtype=torch.bool)
    assert seen == [alone for alone in one_hot.tolist() for _ in BATCHES]
    assert all(value.is_meta for value in layers.parameters())


def test_progress_counts_the_bytes_of_each_layer(folder):
    model, progress = Model.load(folder, stream=True), []
    model.trunk.run(BATCHES, on_layer=progress.append)
    tensors = [(name, tensor) for name, tensor in load_file(shard(folder)).items() if ".layers." in name]
    indices = range(model.trunk.num_layers)
    by_layer = [sum(tensor.nbytes for name, tensor in tensors if f".layers.{index}." in name) for index in indices]
    assert [each.num_bytes for each in progress] == by_layer


def test_single_passes_are_refused(folder):
    with pytest.raises(ConfigError, match="cannot run single passes or generate"):
        Model.load(folder, stream=True).trunk(BATCHES[0])


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_tensor_is_reported_before_anything_runs(folder):
    rewrite(shard(folder), lambda tensors: tensors.pop("model.layers.1.self_attn.o_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing or have another shape: model\.layers\.1\.self_attn\.o_proj"):
        Model.load(folder, stream=True)


def test_values_that_are_not_finite_are_reported(folder):
    name = "model.layers.1.self_attn.o_proj.weight"
    rewrite(shard(folder), lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    model = Model.load(folder, stream=True)
    with pytest.raises(CheckpointError, match=r"layer 1: 1 tensors hold NaN or Inf: self_attn\.o_proj\.weight"):
        model.trunk.run(BATCHES)


def test_file_truncated_while_streaming_is_an_error(folder):
    """Without the read ahead of the mapped file, the process would end with SIGBUS."""
    model, path = Model.load(folder, stream=True), shard(folder)
    with pytest.raises(CheckpointError, match=path.name):
        model.trunk.run(BATCHES, on_layer=lambda _: os.truncate(path, 1000))


def test_every_layer_tensor_gives_its_pages_back(folder, monkeypatch):
    """Pages of the mapped file that a layer was copied from stay in the process unless they are released by name."""
    model, released = Model.load(folder, stream=True), set()
    monkeypatch.setattr(TensorReader, "release", lambda self, name: released.add(name))
    model.trunk.run(BATCHES)
    assert released == {name for name in load_file(shard(folder)) if ".layers." in name}
