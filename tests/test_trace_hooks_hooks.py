"""What the hooks record and refuse, and that they restore everything."""

import threading
from types import SimpleNamespace

import pytest
import torch
from replays import Replayed
from tiny import build
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nextn.model.layer_types import LayerType
from nextn.runtime.backend import backend_for
from nextn.runtime.native.trace import TraceRecorder, Untraceable
from nextn.runtime.native.trace_hooks import RecordingCache, copy_for_recording

attend = ALL_ATTENTION_FUNCTIONS["nextn"]
experts = ALL_EXPERTS_FUNCTIONS["nextn"]
FULL = LayerType("full_attention")


def cache_of(kind: LayerType, *, int8: bool = False) -> RecordingCache:
    starts, positions = torch.zeros(1, dtype=torch.int64), torch.arange(3)[None]
    return RecordingCache([kind], torch.zeros(1, 3, dtype=torch.int64), starts, positions, int8=int8)


def noted(kind: LayerType = FULL, *, columns: int = 3, int8: bool = False, value_size: int = 8, **kwargs):
    """The trace entry of attention of 4 heads over 2 kv heads at 3 positions, and the layer."""
    cache, query = cache_of(kind, int8=int8), torch.zeros(1, 4, 3, 16)
    trace = TraceRecorder([query], cache.layers)
    with torch.no_grad(), trace:
        module = SimpleNamespace(layer_idx=0)
        keys, values = torch.zeros(1, 2, columns, 16), torch.zeros(1, 2, columns, value_size)
        out, _ = attend(module, query, keys, values, None, **kwargs)
    assert out.shape == (1, 3, 4, value_size)
    return trace.entries[-1], cache.layers[0]


def test_attention_is_noted_with_its_numbers():
    entry, layer = noted(LayerType("sliding_attention", 5), scaling=0.5, softcap=30.0, s_aux=torch.ones(4))
    assert (entry.func, entry.ints, entry.reals) == ("attention", (0, 5), (0.5, 30.0))
    assert [tuple(view.shape) for view in entry.args] == [
        (1, 4, 3, 8),
        (1, 4, 3, 16),
        (1, 2, 3, 16),
        (1, 2, 3, 8),
        (1,),
        (3,),
        (4,),
    ]
    assert layer.shape == (2, 16, 8)
    plain, _ = noted()
    assert (plain.ints, plain.reals, len(plain.args)) == ((0, 0), (0.25, 0.0), 6)


def test_attention_with_an_int8_cache():
    entry, _ = noted(int8=True)
    assert entry.ints == (1, 0)
    with pytest.raises(Untraceable, match="heads of size 16 and 6, not multiples of 4"):
        noted(int8=True, value_size=6)


def test_attention_over_other_columns_is_refused():
    with pytest.raises(Untraceable, match="other positions than the block's own"):
        noted(columns=7)


def test_attention_with_strange_arguments_is_refused():
    noted(position_ids=torch.zeros(1), sliding_window=3, indices=None)
    with pytest.raises(Untraceable, match="attention with bias, indices"):
        noted(indices=torch.zeros(1), bias=1, use_cache=True)


def test_nothing_is_noted_without_a_recording():
    with pytest.raises(Untraceable, match="no pass is being recorded"):
        attend(SimpleNamespace(layer_idx=0), *torch.zeros(3, 1, 1, 1, 1), None)


def test_layers_without_native_form_are_refused():
    with pytest.raises(Untraceable, match="type conv"):
        cache_of(LayerType("conv"))


def test_the_length_of_the_cache_is_no_constant():
    with pytest.raises(Untraceable, match="the length of the cache"):
        cache_of(FULL).get_seq_length()


def implementations(*modules) -> set[tuple[str, str]]:
    configs = [part.config for module in modules for part in module.modules() if hasattr(part, "config")]
    return {(config._attn_implementation, config._experts_implementation) for config in configs}


def test_what_is_recorded_shares_tensors_and_hooks_and_no_config():
    model = build("glm4_moe")
    before = implementations(model.trunk, model.head)
    model.trunk.final_norm.register_forward_hook(hook := lambda *_: None)
    trunk = copy_for_recording(model.trunk)
    head = copy_for_recording(model.head, [(model.trunk, trunk)])
    assert implementations(trunk, head) == {("nextn", "nextn")}
    assert implementations(model.trunk, model.head) == before != {("nextn", "nextn")}
    assert head.trunk is trunk is not model.trunk
    assert hook in trunk.final_norm._forward_hooks.values()
    for copied, original in ((trunk, model.trunk), (head, model.head)):
        for tensors in ("parameters", "buffers"):
            pairs = zip(getattr(copied, tensors)(), getattr(original, tensors)(), strict=True)
            assert all(one is other for one, other in pairs)


def test_what_cannot_be_copied_is_not_recorded():
    model = build("glm4_moe")
    model.trunk.num_accepted = threading.Lock()
    assert "cannot be copied for recording" in backend_for(model).reason


class Experts(nn.Module):
    """As transformers' experts without a gate say what they are."""

    is_transposed, _is_expert_parallel, has_gate, has_bias, has_post_expert_norm = False, False, False, True, True
    act_fn = staticmethod(torch.relu)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"up_proj": (4, 16, 8), "up_proj_bias": (4, 16), "down_proj": (4, 8, 16), "down_proj_bias": (4, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def post_expert_norm(self, out):
        return out * 0.5

    def forward(self, states, ids, weights):
        out = torch.zeros_like(states)
        for token, place in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1])).tolist():
            expert = ids[token, place]
            inner = torch.relu(self.up_proj[expert] @ states[token] + self.up_proj_bias[expert])
            out[token] += weights[token, place] * (self.down_proj[expert] @ inner + self.down_proj_bias[expert]) * 0.5
        return out


def given(seed: int):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)])
    return torch.randn(5, 8, generator=generator), ids, torch.rand(5, 2, generator=generator)


def test_experts_with_biases_and_a_norm(monkeypatch):
    monkeypatch.setattr("replays.Trace", TraceRecorder)
    module = Experts()
    made = Replayed(lambda *states: experts(module, *states), given(0))
    assert made.replay.torch_ops == []
    with torch.no_grad():
        torch.testing.assert_close(made(*given(1))[0], module(*given(1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trait", ["is_transposed", "_is_expert_parallel"])
def test_experts_laid_out_otherwise_are_refused(trait):
    module = Experts()
    setattr(module, trait, True)
    with pytest.raises(Untraceable, match="transposed, or distributed"):
        experts(module, *given(0))
