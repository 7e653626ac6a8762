"""Which path is chosen, why, and when it is chosen anew."""

import pytest
import torch
from tiny import CONFIGS, FIXTURES, build, decode, refrain

from nextn.errors import ConfigError
from nextn.fast import choose
from nextn.fast.engine import FastHead, FastTrunk
from nextn.fast.native import Runtime
from nextn.fast.quantized import dequantized, quantized
from nextn.figures.acceptance import Acceptance
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
    assert "runs on CPUs, the model is on meta" in model.engine().reason


@pytest.mark.parametrize("device", ["nonsense", "cuda:97"])
def test_a_device_that_is_not_there(fixture_folder, device):
    with pytest.raises(ConfigError, match=f"{device}.*expected one of auto"):
        Model.load(fixture_folder / "glm", device=device)


def test_a_model_that_moved_is_chosen_for_anew():
    """Copies of weights, or their addresses, that are no longer the model's."""
    model = build("glm4_moe")
    model.engine()
    assert "runs on CPUs, the model is on meta" in model.to(torch.device("meta")).engine().reason


@pytest.fixture
def pairs(monkeypatch):
    """As on a processor that multiplies pairs of bf16; the kernels are there on all."""
    monkeypatch.setattr(Runtime, "multiplies_pairs", True)


def half(name: str) -> Model:
    model = build(name)
    for part in (model.trunk, model.head):
        part.to(torch.bfloat16)
    return model


def with_seven_bits(weight: torch.Tensor) -> torch.Tensor:
    """Whole numbers up to 63 times a power of two: what loses nothing."""
    whole = (weight.float() * 400).round().clamp(-63, 63)
    whole[..., 0] = 63
    return (whole / 1024).to(weight.dtype)


def test_a_head_drafts_by_seven_bits_in_bfloat16_and_by_all_where_asked(pairs):
    model = half("glm4_moe")
    assert model.engine("fast").head_bits == 7
    model.head.exact = True
    assert model.engine("fast").head_bits is None
    assert build("glm4_moe").engine("fast").head_bits is None
    assert choose.engine(model.trunk, None).head_bits is None


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "mimo_v2", "qwen3_5_moe"])
def test_seven_bits_of_weights_that_have_no_more_lose_nothing(pairs, name):
    """Codes, scales, blocks and experts of a whole head: an error in one of them is seen in the states."""
    model = half(name)
    with torch.no_grad():
        for weight in (*model.head.parameters(), model.trunk.output.weight):
            if weight.ndim > 1 and weight.dtype == torch.bfloat16:
                weight.copy_(with_seven_bits(weight))
    rounded = model.engine("fast")
    model.head.exact = True
    exact = model.engine("fast")
    assert (rounded.head_bits, exact.head_bits) == (7, None)
    tokens = torch.randint(model.trunk.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = []
        for made in (rounded, exact):
            states = made.trunk(tokens, made.trunk.cache(1)).eaten.clone()
            normed = made.head.step(0, tokens, states, cache=made.head.cache(1)).normed.clone()
            found.append((normed, made.head.predict(0, normed).logits))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02 * float(other.float().abs().max()))


def test_a_rounded_head_changes_no_text_and_drafts_as_well(pairs):
    model, start = Model.load(FIXTURES / "glm", dtype=torch.bfloat16), refrain(6, 40, seed=9).tolist()
    made = model.engine("fast")
    texts, log = decode(made, start, drafts=3, max_tokens=32)
    model.head.exact = True
    exact = model.engine("fast")
    assert (made.head_bits, exact.head_bits) == (7, None)
    others, other_log = decode(exact, start, drafts=3, max_tokens=32)
    assert texts == others == decode(exact, start, drafts=0, max_tokens=32)[0]
    lengths = Acceptance.of(log).length, Acceptance.of(other_log).length
    assert lengths[0] > 0.95 * lengths[1] > 1.5


def test_a_rounded_head_reads_its_states_by_rounded_weights_too(pairs):
    """Else drafts made one by one in Python, by the trunk's own output head, would be others than those of a round."""
    model = half("glm4_moe")
    weight, states = model.trunk.output.weight, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    found = model.engine("fast").head.predict(0, states.bfloat16()).logits.float()
    seven, all_bits = (states.bfloat16().float() @ each.T for each in (dequantized(*quantized(weight)), weight.float()))
    assert (found - seven).norm() < (found - all_bits).norm() / 2
