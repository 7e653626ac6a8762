"""Trunks whose decoder layers are loaded one at a time have the same values; what is loaded so, and what is not."""

import pytest
import torch
from tiny import build, prompt

from nextn.errors import CheckpointError, ConfigError
from nextn.model.model import Model
from nextn.train.distributed import Ranks
from nextn.train.fingerprint import fingerprint, fingerprint_of
from nextn.train.head_run import StartingPoint, load_starting_point, prepare_head_run

TWO = Ranks(0, 2)


@pytest.mark.parametrize("name", ["glm4_moe", "longcat_flash", "qwen3_next"])
def test_the_same_trunk(name, tmp_path):
    """Its state one layer at a time, and its passes when all layers are loaded."""
    build(name).save(tmp_path / "model")
    loaded, deferred = Model.load(tmp_path / "model").trunk, Model.load(tmp_path / "model", defer=True).trunk
    assert fingerprint_of(deferred.state_items()) == fingerprint(loaded.model)
    assert all(value.is_meta for value in deferred.decoder.layers.parameters())
    assert not any(value.requires_grad for layer in deferred.loaded_layers() for value in layer.parameters())
    deferred.close()
    tokens = torch.tensor([prompt(21, seed=1)])
    with torch.inference_mode():
        assert torch.equal(deferred(tokens).head_input, loaded(tokens).head_input)


def test_which_start_is_deferred(tmp_path):
    """Of several processes, with the checkpoint's head or that of a file; a fresh head needs the loaded layers."""
    build("glm4_moe").save(tmp_path / "model")
    for start, is_deferred in (
        (StartingPoint(tmp_path / "model"), True), (StartingPoint(tmp_path / "model", tmp_path / "model"), True),
        (StartingPoint(tmp_path / "model", fresh=True), False),
    ):  # fmt: skip
        model = load_starting_point(start, near=tmp_path, ranks=TWO)[0]
        assert any(value.is_meta for value in model.trunk.decoder.layers.parameters()) == is_deferred
        assert (model.head is None) == start.fresh
    with pytest.raises(ConfigError, match="--stream runs in one process"):
        prepare_head_run(tmp_path, StartingPoint(tmp_path / "model", stream=True), data=[], settings={}, ranks=TWO)


def test_values_that_are_not_finite(tmp_path):
    model = build("glm4_moe")
    with torch.no_grad():
        model.trunk.decoder.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    model.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layer 1: 1 tensors hold NaN or Inf: self_attn\.o_proj\.weight"):
        list(Model.load(tmp_path / "model", defer=True).trunk.loaded_layers())
