"""The native backend's self-check: what it must notice, and what it must let pass."""

import pytest
import torch
from tiny import CONFIGS, build

from nextn.model.model import Model
from nextn.runtime import self_check
from nextn.runtime.backend import backend_for
from nextn.runtime.native import session
from nextn.runtime.self_check import BLOCK_SIZES, InFloat32

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
            with InFloat32():
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


@pytest.mark.parametrize("what", ["lost bits", "skipped"])
def test_a_wrong_recording_is_noticed(monkeypatch, what):
    """Every other value of the residual stream off by 2 ** -4, and layers that do nothing."""
    if what == "skipped":
        changed_recording(monkeypatch, lambda states, out: states + 0 * out)
    else:
        changed_recording(monkeypatch, lambda _, out: out * (1 + 2**-4 * (torch.arange(out.shape[-1]) % 2)).to(out))
    for name in MODELS:
        assert "the recorded trunk differs" in backend_for(model_of(name)).reason, name


def test_a_backend_nearer_to_float32_than_torch_passes(monkeypatch):
    """On a model whose states bf16 changes by more than any fixed bound, as torch runs it."""
    monkeypatch.setitem(self_check._TOLERANCE, torch.bfloat16, 1e-4)
    for name in MODELS:
        assert backend_for(model_of(name)).name == "native", name


def test_no_number_is_an_error(monkeypatch):
    changed_recording(monkeypatch, lambda _, out: out * torch.nan)
    assert "relative error nan" in backend_for(build("glm4_moe")).reason
