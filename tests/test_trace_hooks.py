"""What the hooks of a recording record, refuse and restore; the native ops of recurrent layers."""

import threading
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from quick import loop
from replays import Replayed
from tiny import build
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from nextn.errors import ConfigError
from nextn.model.layer_types import LayerType
from nextn.runtime.backend import backend_for
from nextn.runtime.native.abi import Runtime, load
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


MAX_BLOCK = 9
TYPES = [torch.float32, torch.bfloat16]


@cache
def team(threads: int) -> Runtime:
    return Runtime(load().library, threads)


def header(memory: Tensor) -> Tensor:
    return torch.tensor([memory.data_ptr()])


def delta_inputs(dtype: torch.dtype, *, width: int, dims: tuple[int, int] = (32, 80), batch: int = 2) -> list[Tensor]:
    """q, k, v, g, beta of 2 key and 6 value heads; q, k and v lie in one row per token."""
    torch.manual_seed(0)
    dim_k, dim_v = dims
    mixed = torch.randn(batch, width, 4 * dim_k + 6 * dim_v).to(dtype)
    q, k, v = mixed.split([2 * dim_k, 2 * dim_k, 6 * dim_v], -1)
    g, beta = -torch.rand(batch, width, 6), torch.rand(batch, width, 6).to(dtype)
    return [q.unflatten(-1, (2, dim_k)), k.unflatten(-1, (2, dim_k)), v.unflatten(-1, (6, dim_v)), g, beta]


def run_delta(inputs: list[Tensor], states: Tensor, *, norm: bool = True, threads: int = 1) -> Tensor:
    out = torch.full(inputs[2].shape, float("nan"), dtype=inputs[0].dtype)
    team(threads).call("gated_delta_rule", [out, *inputs, header(states)], [MAX_BLOCK, norm])
    return out


def new_states(inputs: list[Tensor]) -> Tensor:
    """[B, heads, elements of a state and of the steps of a block]; the steps are unset."""
    (batch, _, heads, dim_v), dim_k = inputs[2].shape, inputs[0].shape[-1]
    states = torch.full((batch, heads, dim_k * dim_v + MAX_BLOCK * (dim_k + dim_v + 1)), float("nan"))
    states[:, :, : dim_k * dim_v] = torch.randn(batch, heads, dim_k * dim_v, generator=torch.Generator().manual_seed(1))
    return states


def current(states: Tensor, inputs: list[Tensor]) -> Tensor:
    """The states before the block [B, heads, Dk, Dv]."""
    dim_k, dim_v = inputs[0].shape[-1], inputs[2].shape[-1]
    return states[:, :, : dim_k * dim_v].unflatten(-1, (dim_k, dim_v))


def commit(states: Tensor, inputs: list[Tensor], counts: list[int], *, threads: int = 1) -> Tensor:
    """Return the states after this many positions of each sequence."""
    sizes = [MAX_BLOCK, inputs[2].shape[2], inputs[0].shape[-1], inputs[2].shape[-1], len(counts)]
    team(threads).call("commit_state", [torch.tensor(counts), header(states)], sizes)
    return current(states, inputs)


@pytest.mark.more
@loop("norm", [True, False])
@loop("dims", [(32, 80), (128, 128), (24, 21)], ids=str)
@loop("dtype", TYPES, ids=str)
def test_delta_agrees_with_transformers(dtype: torch.dtype, dims: tuple[int, int], norm: bool) -> None:
    inputs = delta_inputs(dtype, width=7, dims=dims)
    if not norm:
        inputs[1] = inputs[1] * 0.2
    states = new_states(inputs)
    first = current(states, inputs).clone()
    out = run_delta(inputs, states, norm=norm)
    assert torch.equal(current(states, inputs), first), "only a commit changes the state"
    q, k, v, g, beta = inputs
    for last in range(1, 8):
        expected, state = torch_recurrent_gated_delta_rule(
            *(x[:, :last] for x in (q, k, v)),
            g=g[:, :last],
            beta=beta[:, :last],
            initial_state=first.clone(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=norm,
        )
        committed = commit(states.clone(), inputs, [last, last])
        torch.testing.assert_close(committed, state, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(out, expected, **({} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}))
    assert states[:, :, -2 * (dims[0] + dims[1] + 1) :].isnan().all(), "nothing is written beyond the block"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_delta_gives_a_token_the_same_bits_in_every_window(dtype: torch.dtype) -> None:
    """All at once on two threads; one by one; and a sequence alone: with `commit_state` between the blocks."""
    inputs = delta_inputs(dtype, width=9)
    states, single = new_states(inputs), new_states(inputs)
    whole = run_delta(inputs, states, threads=2)
    for token in range(9):
        out = run_delta([x[:, token : token + 1] for x in inputs], single)
        assert torch.equal(out, whole[:, token : token + 1])
        after = commit(single, inputs, [1, 1])
        assert torch.equal(after, commit(states.clone(), inputs, [token + 1] * 2, threads=2))
    alone = new_states(inputs)[1:].contiguous()
    assert torch.equal(run_delta([x[1:] for x in inputs], alone), whole[1:])


@pytest.mark.parametrize("threads", [1, 2])
def test_each_sequence_commits_its_own_count(threads: int) -> None:
    inputs = delta_inputs(torch.float32, width=MAX_BLOCK, batch=3)
    states = new_states(inputs)
    run_delta(inputs, states)
    expected = [commit(states.clone(), inputs, [count] * 3)[row] for row, count in enumerate((4, 0, 9))]
    assert torch.equal(commit(states, inputs, [4, 0, 9], threads=threads), torch.stack(expected))


def run_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, *, silu: bool, threads: int = 1
) -> Tensor:
    # [B, m, C] seen as [B, C, m]: what the delta rule reads next
    out = torch.full((x.shape[0], x.shape[2], x.shape[1]), float("nan"), dtype=x.dtype).transpose(1, 2)
    views = [out, x, weight, *([] if bias is None else [bias]), header(history)]
    team(threads).call("causal_conv", views, [history.shape[1] - weight.shape[1] + 1, silu])
    return out


def conv_inputs(
    dtype: torch.dtype, *, width: int, kernel: int, channels: int = 37
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, width, channels).to(dtype).transpose(1, 2)
    history = torch.zeros(2, MAX_BLOCK + kernel - 1, channels, dtype=dtype)
    history[:, : kernel - 1] = torch.randn(2, kernel - 1, channels)
    return x, torch.randn(channels, kernel).to(dtype), torch.randn(channels).to(dtype), history


@loop("silu", [True, False])
@loop("biased", [True, False])
@loop("kernel", [4, 2, 1])
@loop("dtype", TYPES, ids=str)
def test_conv_agrees_with_torch(dtype: torch.dtype, kernel: int, biased: bool, silu: bool) -> None:
    x, weight, bias, history = conv_inputs(dtype, width=7, kernel=kernel)
    whole = torch.cat([history[:, : kernel - 1].mT, x], -1)
    out = run_conv(x, weight, bias if biased else None, history, silu=silu)
    expected = F.conv1d(whole.double(), weight.double()[:, None], bias.double() if biased else None, groups=37)
    expected = (F.silu(expected) if silu else expected).to(dtype)
    # A sum that lies between two bf16 numbers may round to either.
    torch.testing.assert_close(out, expected, **({} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}))
    if dtype == torch.bfloat16:
        assert (out == expected).float().mean() > 0.97
    assert torch.equal(history[:, : kernel - 1 + 7].mT, whole)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_conv_gives_a_position_the_same_bits_in_every_block(dtype: torch.dtype) -> None:
    """All at once on two threads; then in blocks of which only a part is committed, as after a rejected draft."""
    x, weight, bias, history = conv_inputs(dtype, width=9, kernel=4)
    parts = history.clone()
    whole = run_conv(x, weight, bias, history, silu=True, threads=2)
    code = {torch.float32: 0, torch.bfloat16: 1}[dtype]
    done = 0
    for width, kept in [(4, 2), (3, 3), (2, 0), (1, 1), (3, 2)]:
        out = run_conv(x[:, :, done : done + width], weight, bias, parts, silu=True)
        assert torch.equal(out, whole[:, :, done : done + width])
        load().call("commit_history", [torch.tensor([kept, kept]), header(parts)], [MAX_BLOCK, 4, 37, 2, code])
        done += kept
    assert torch.equal(parts[:, :3], history[:, done : done + 3])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_row_keeps_its_own_count_of_columns(dtype: torch.dtype, threads: int) -> None:
    history = torch.randn(3, MAX_BLOCK + 3, 5).to(dtype)
    before = history.clone()
    code = {torch.float32: 0, torch.bfloat16: 1}[dtype]
    team(threads).call("commit_history", [torch.tensor([0, 2, 9]), header(history)], [MAX_BLOCK, 4, 5, 3, code])
    for row, count in enumerate([0, 2, 9]):
        assert torch.equal(history[row, :3], before[row, count : count + 3])


def test_conv_takes_any_strides_and_a_broadcast_row() -> None:
    x, weight, _, history = conv_inputs(torch.float32, width=5, kernel=3)
    history[1] = history[0]
    same = run_conv(x[:1].expand(2, -1, -1), weight, None, history, silu=False)
    assert torch.equal(same[0], same[1])
    assert same.isfinite().all()


def test_windows_beyond_the_room_are_refused() -> None:
    inputs = delta_inputs(torch.float32, width=MAX_BLOCK + 1)
    with pytest.raises(ConfigError, match="gated_delta_rule"):
        run_delta(inputs, new_states(inputs))
    x, weight, _, history = conv_inputs(torch.float32, width=MAX_BLOCK + 1, kernel=4)
    with pytest.raises(ConfigError, match="conv"):
        run_conv(x, weight, None, history, silu=True)
