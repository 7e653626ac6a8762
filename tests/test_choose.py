"""Which path is chosen, why, and when it is chosen anew."""

import pytest
import torch
from tiny import CONFIGS, build

from nextn.errors import ConfigError
from nextn.fast import choose
from nextn.fast.engine import FastHead, FastTrunk
from nextn.head import Step
from nextn.model import Model
from nextn.trunk import Hidden


def test_the_fast_path_where_it_can():
    model = build("glm4_moe")
    made = model.engine()
    assert (made.path, type(made.trunk), type(made.head)) == ("fast", FastTrunk, FastHead)
    assert model.engine("plain").trunk is model.trunk


def test_what_cannot_be_recorded_is_plain_and_says_why():
    model = build("deepseek_v4")
    made = model.engine()
    assert (made.path, made.trunk, made.head) == ("plain", model.trunk, model.head)
    assert "compressed_sparse_attention" in made.reason
    with pytest.raises(ConfigError, match=r"no fast path: .*compressed_sparse_attention"):
        model.engine("fast")
    with pytest.raises(ConfigError, match="expected one of auto, fast, plain"):
        model.engine("quick")


@pytest.mark.parametrize(
    ("part", "name", "wrong"),
    [
        (FastTrunk, "the trunk", lambda found: Hidden(found.normed.roll(1, dims=-1), found.eaten)),
        (FastHead, "the head", lambda found: Step(found.normed.roll(1, dims=-1), found.recycled)),
    ],
)
def test_a_replay_that_says_something_else_is_not_used(monkeypatch, part, name, wrong):
    """Without the check, a model that does what no recording shows would decode to nonsense."""
    method = "__call__" if part is FastTrunk else "step"
    right = getattr(part, method)
    monkeypatch.setattr(part, method, lambda *args, **kwargs: wrong(right(*args, **kwargs)))
    assert f"{name} recorded says something else" in build("glm4_moe").engine().reason


def test_changed_weights_are_packed_anew():
    """Packed copies of old weights after a training step: right speed, wrong text."""
    model = build("glm4_moe")
    before = model.engine()
    assert model.engine() is before
    with torch.no_grad():
        model.trunk.output.weight.mul_(2)
    assert model.engine() is not before
    model.engine("fast")  # passes the check against the new weights


def test_half_precision_has_no_native_form():
    assert "torch.float16" in choose.engine(Model.build(CONFIGS["glm4_moe"], dtype=torch.float16).trunk, None).reason


def test_a_model_goes_to_its_device(fixture_folder):
    """meta stands for a device that is not a CPU: it has no fast path, and that is said."""
    model = Model.load(fixture_folder / "glm", device="meta")
    assert {part.device.type for part in (*model.trunk.parameters(), *model.head.parameters())} == {"meta"}
    assert "there is none on meta" in model.engine().reason


@pytest.mark.parametrize("device", ["nonsense", "cuda:97"])
def test_a_device_that_is_not_there(fixture_folder, device):
    with pytest.raises(ConfigError, match=f"{device}.*expected one of cpu"):
        Model.load(fixture_folder / "glm", device=device)


def test_a_model_that_moved_is_chosen_for_anew():
    """Copies of weights, or their addresses, that are no longer the model's."""
    model = build("glm4_moe")
    model.engine()
    assert "there is none on meta" in model.to(torch.device("meta")).engine().reason
