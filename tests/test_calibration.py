"""Scales of four bits that are chosen by the activations of a text."""

import pytest
import torch
from tiny import build, prompt

from nextn.checkpoint.quantized_weights import round_to_nearest
from nextn.edit.quantize import quantize
from nextn.evaluate.accuracy import input_squares
from nextn.model.model import Model
from nextn.model.packed_linear import packed_layers

TEXTS = [prompt(21), prompt(9)]


def streamed(folder) -> Model:
    build("glm4_moe").save(folder, dtype=torch.bfloat16)
    return Model.load(folder, skip_head=True, stream=True)


def test_squares_are_those_of_the_inputs(tmp_path):
    """Of every Linear of every layer, over all tokens of all texts."""
    found = input_squares(streamed(tmp_path / "model").trunk, TEXTS)
    model, seen = Model.load(tmp_path / "model"), {}
    layer = model.trunk.decoder.layers[1]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.setdefault(len(seen), inputs[0]))
    with torch.inference_mode():
        for text in TEXTS:
            model.trunk(torch.tensor([text]))
    rows = torch.cat([each.flatten(0, 1) for each in seen.values()]).float()
    torch.testing.assert_close(found[1, "self_attn.o_proj.weight"], rows.square().mean(0))
    linear = {f"{name}.weight" for name, part in layer.named_modules() if isinstance(part, torch.nn.Linear)}
    assert {name for index, name in found if index == 1} == linear


@pytest.mark.more
def test_files_have_the_scales_of_the_calibration(tmp_path):
    """Those of each weight are chosen by its own input; a weight without one, and the head's, count all alike."""
    squares = input_squares(streamed(tmp_path / "model").trunk, TEXTS)
    weights = dict(Model.load(tmp_path / "model").trunk.model.named_parameters())
    kept = {key: value for key, value in squares.items() if "o_proj" not in key[1]}
    quantize(tmp_path / "model", tmp_path / "out", weights="int4", group_size=16, importance=kept)
    changed = 0
    for layer in packed_layers(Model.load(tmp_path / "out").trunk):
        name, found = layer.codes.name, layer.codes.integers()
        index, path = name.removeprefix("model.layers.").split(".", 1)
        expected = round_to_nearest(weights[name].detach(), 4, 16, kept.get((int(index), path)))
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales, expected.scales)
        changed += not torch.equal(expected.scales, round_to_nearest(weights[name].detach(), 4, 16).scales)
    assert changed > 2


def test_what_counts_more_is_nearer():
    """The error of outputs is less than with equal counts, on inputs whose channels differ as the counts say."""
    draws = torch.Generator().manual_seed(0)
    weight, counts = (
        torch.randn(64, 128, generator=draws),
        torch.logspace(-3, 1, 128)[torch.randperm(128, generator=draws)],
    )
    x = torch.randn(500, 128, generator=draws) * counts.sqrt()
    errors = [(x @ (round_to_nearest(weight, 4, 32, each).dequantize() - weight).T).norm() for each in (None, counts)]
    assert errors[1] < 0.9 * errors[0]
