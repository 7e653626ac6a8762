"""The native backend's self-check: what it must notice, and what it must let pass."""

import shutil

import pytest
import torch
from packed import Case, quantize_folder
from tiny import CONFIGS, build

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.runtime import backend, self_check
from nextn.runtime.backend import backend_for, make_backend
from nextn.runtime.native import session
from nextn.runtime.native.grouped import GroupedFormat
from nextn.runtime.self_check import BLOCK_SIZES, WithPackedValues

MODELS = ["glm4_moe", "qwen3_5", "qwen3_next"]  # experts, recurrent layers, both


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    return Model.build(CONFIGS[name], dtype=torch.bfloat16)


def changed_recording(monkeypatch, change) -> None:
    """Let what is recorded of a trunk be another one, with changed outputs of its decoder layers."""
    copy = session.copy_for_recording

    def changed(module, *args):
        twin = copy(module, *args)
        for layer in twin.decoder.layers if hasattr(twin, "decoder") else ():
            layer.register_forward_hook(lambda _, args, out: change(args[0], out))
        return twin

    monkeypatch.setattr(session, "copy_for_recording", changed)


def test_modules_in_float32_are_those_of_widened_weights():
    """The slow twin is a copy of the model in float32, without the casts of some modules to the weights' dtype."""
    tokens = torch.arange(sum(BLOCK_SIZES))[None] % 40
    for name in (*MODELS, "deepseek_v3", "mimo_v2"):
        model, wide = model_of(name), model_of(name)
        wide.trunk.float(), wide.head.float()
        with torch.inference_mode():
            with WithPackedValues([model.trunk, model.head], None):
                found = model.trunk(tokens)
                step = model.head.step(0, tokens, found.head_input)
            expected = wide.trunk(tokens)
            pairs = [
                (found.final_hidden, expected.final_hidden),
                (step.final_hidden, wide.head.step(0, tokens, expected.head_input).final_hidden),
            ]
        assert found.final_hidden.dtype == torch.float32
        assert max(max(self_check._errors(exact, other).values()) for other, exact in pairs) < 0.03, name
        assert model.trunk.dtype == torch.bfloat16


@pytest.mark.more
@pytest.mark.parametrize("what", ["lost bits", "skipped"])
def test_a_wrong_recording_is_noticed(monkeypatch, what):
    """Every other value of the residual stream off by 2 ** -4, and layers that do nothing."""
    if what == "skipped":
        changed_recording(monkeypatch, lambda states, out: states + 0 * out)
    else:
        changed_recording(monkeypatch, lambda _, out: out * (1 + 2**-4 * (torch.arange(out.shape[-1]) % 2)).to(out))
    for name in MODELS:
        assert "the recorded trunk differs" in backend_for(model_of(name)).reason, name


@pytest.mark.more
def test_a_backend_nearer_to_float32_than_torch_passes(monkeypatch):
    """On a model whose states bf16 changes by more than any fixed bound, as torch runs it."""
    monkeypatch.setitem(self_check._TOLERANCE, torch.bfloat16, 1e-4)
    monkeypatch.setattr(self_check, "_compare_logits", lambda *_: None)  # one product, whose rounding has a fixed bound
    for name in MODELS:
        assert backend_for(model_of(name)).name == "native", name


def swapped_scales(weight):
    return weight._replace(scales=weight.scales.roll(1, 0))


def doubled_groups(weight):
    """Each group with the scale of the one before it, as if groups had twice their size."""
    index = torch.arange(weight.scales.shape[1]) // 2 * 2
    return weight._replace(scales=weight.scales[:, index])


@pytest.mark.more
def test_wrongly_packed_weights_of_few_bits_are_noticed(monkeypatch):
    """The modules have the values of the rounded weights, so the bound is that of 16 bits."""
    pack = GroupedFormat.pack
    for dtype, weights, change in (
        (torch.bfloat16, "int4", swapped_scales),
        (torch.bfloat16, "int8", swapped_scales),
        (torch.float32, "int4", doubled_groups),
    ):
        torch.manual_seed(0)
        model = Model.build(CONFIGS["glm4_moe"], dtype=dtype)
        model.trunk.weights = weights
        monkeypatch.setattr(GroupedFormat, "pack", lambda self, weight, out, c=change: pack(self, c(weight), out))
        with pytest.raises(ConfigError, match="the recorded trunk differs"):
            make_backend(model.trunk, model.head, name="native")


def test_another_lm_head_than_the_packed_one_is_noticed(monkeypatch):
    """No state depends on it where embedding and lm_head are two weights."""
    model, build_native = model_of("glm4_moe"), backend._build_native
    model.trunk.weights = "int8"

    @torch.no_grad()
    def changed(trunk, head):
        made = build_native(trunk, head)
        made.trunk.predict(torch.zeros(1, trunk.hidden_shape[-1]))  # packs it
        trunk.output.weight.copy_(trunk.output.weight.roll(1, 0))
        return made

    monkeypatch.setattr(backend, "_build_native", changed)
    with pytest.raises(ConfigError, match="the recorded lm_head differs"):
        make_backend(model.trunk, model.head, name="native")


def test_no_number_is_an_error(monkeypatch):
    changed_recording(monkeypatch, lambda _, out: out * torch.nan)
    assert "relative error nan" in backend_for(build("glm4_moe")).reason


@pytest.mark.more
def test_a_head_whose_codes_are_dequantized_and_rounded(tmp_path):
    """No product takes groups of 16, and where bf16 is multiplied in pairs, the head has weights of seven bits."""
    shutil.copytree(SHIPPED, tmp_path / "model")
    quantize_folder(tmp_path / "model", Case("pack-quantized"), is_random=False)
    assert backend_for(Model.load(tmp_path / "model"), "native").name == "native"
