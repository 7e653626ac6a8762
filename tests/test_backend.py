"""Which backend is chosen, why, and when it is rebuilt."""

import pytest
import torch
from quick import each_once
from reference_products import grouped_linear, round_cached
from tiny import CONFIGS, FIXTURES, build, decode, refrain
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nextn.errors import ConfigError
from nextn.model.head import HeadStep
from nextn.model.model import Model
from nextn.model.trunk import TrunkOutput
from nextn.runtime import backend
from nextn.runtime.backend import backend_for
from nextn.runtime.native.abi import Runtime, load
from nextn.runtime.native.grouped import EIGHT_BITS, FOUR_BITS, quantize_groups
from nextn.runtime.native.session import NativeHead, NativeTrunk
from nextn.runtime.native.weight_packing import dequantize, quantize
from nextn.stats.acceptance import Acceptance


@pytest.mark.more
def test_native_where_possible():
    model = build("glm4_moe")
    made = backend_for(model)
    assert (made.name, type(made.trunk), type(made.head)) == ("native", NativeTrunk, NativeHead)
    assert backend_for(model, "torch").trunk.module is model.trunk


def test_untraceable_models_use_torch_and_say_why():
    model = build("deepseek_v4")
    made = backend_for(model)
    assert (made.name, made.trunk.module, made.head.mtp_head) == ("torch", model.trunk, model.head)
    assert "compressed_sparse_attention" in made.reason
    with pytest.raises(ConfigError, match=r"native backend cannot run this model: .*compressed_sparse_attention"):
        backend_for(model, "native")
    with pytest.raises(ConfigError, match="expected one of auto, native, torch"):
        backend_for(model, "quick")


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("part", "name", "wrong"),
    [
        (NativeTrunk, "trunk", lambda found: TrunkOutput(found.final_hidden.roll(1, dims=-1), found.head_input)),
        (NativeHead, "head", lambda found: HeadStep(found.final_hidden.roll(1, dims=-1), found.next_hidden)),
    ],
)
def test_a_replay_that_differs_is_not_used(monkeypatch, part, name, wrong):
    """Without the check, a model with behavior that no recording captures would decode to nonsense."""
    method = "__call__" if part is NativeTrunk else "step"
    right = getattr(part, method)
    monkeypatch.setattr(part, method, lambda *args, **kwargs: wrong(right(*args, **kwargs)))
    assert f"the recorded {name} differs" in backend_for(build("glm4_moe")).reason


def as_other(weight, values):
    weight.data = values


@pytest.mark.more
@pytest.mark.one_case
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),  # no version tells: adapters are merged so
        lambda weight: as_other(weight, weight * 2),
        lambda weight: as_other(weight, weight.bfloat16()),  # as `Module.to` does
    ],
    ids=["in place", "in place by data", "another tensor", "another dtype"],
)
def test_changed_weights_are_packed_again(change):
    """Packed copies of old weights after a training step: right speed, wrong text."""
    model = build("glm4_moe")
    before = backend_for(model)
    assert backend_for(model) is before
    with torch.no_grad():
        for weight in (*model.trunk.parameters(), *model.head.parameters()):
            change(weight)
    assert backend_for(model) is not before
    backend_for(model, "native")  # passes the check against the new weights


def test_a_replaced_buffer_is_read():
    """Routers have buffers that training or a loaded checkpoint replaces."""
    model = build("glm4_moe")
    before = backend_for(model)
    router = model.trunk.decoder.layers[1].mlp.gate
    router.e_score_correction_bias = torch.tensor([0.0, 0.0, 9.0, 9.0])
    assert backend_for(model) is not before
    replaced = backend_for(model)
    router.e_score_correction_bias.data = torch.tensor([9.0, 9.0, 0.0, 0.0])
    assert backend_for(model) is not replaced
    kept, rotary = backend_for(model), model.trunk.decoder.rotary_emb
    rotary.inv_freq = rotary.inv_freq.clone()  # no checkpoint has it: what a pass changes is no other model
    assert backend_for(model) is kept


def test_half_precision_has_no_native_form():
    assert (
        "torch.float16"
        in backend.make_backend(Model.build(CONFIGS["glm4_moe"], dtype=torch.float16).trunk, None).reason
    )


def test_a_model_goes_to_its_device(fixture_folder):
    """meta stands for a device that is not a CPU: no native backend, with the reason."""
    model = Model.load(fixture_folder / "glm", device="meta")
    assert {part.device.type for part in (*model.trunk.parameters(), *model.head.parameters())} == {"meta"}
    assert "runs on CPUs, the model is on meta" in backend_for(model).reason


@pytest.mark.parametrize("device", ["nonsense", "cuda:97"])
def test_a_device_that_is_not_there(fixture_folder, device):
    with pytest.raises(ConfigError, match=f"{device}.*expected one of auto"):
        Model.load(fixture_folder / "glm", device=device)


@pytest.mark.more
def test_a_model_that_moved_gets_a_new_backend():
    """Copies of weights, or their addresses, that are no longer the model's."""
    model = build("glm4_moe")
    backend_for(model)
    assert "runs on CPUs, the model is on meta" in backend_for(model.to(torch.device("meta"))).reason


@pytest.fixture
def pairs(monkeypatch):
    """As on a processor with bf16 pair products; the kernels exist on all."""
    monkeypatch.setattr(Runtime, "has_bf16_pair_products", True)


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


@pytest.mark.more
def test_a_head_drafts_by_seven_bits_in_bfloat16_and_by_all_where_asked(pairs):
    model = half("glm4_moe")
    assert backend_for(model, "native").head_bits == 7
    model.head.exact = True
    assert backend_for(model, "native").head_bits is None
    assert backend_for(build("glm4_moe"), "native").head_bits is None
    assert backend.make_backend(model.trunk, None).head_bits is None


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "mimo_v2", "qwen3_5_moe"])
def test_seven_bits_of_weights_that_have_no_more_lose_nothing(pairs, name):
    """Codes, scales, blocks and experts of a whole head: an error in one of them shows in the states."""
    model = half(name)
    with torch.no_grad():
        for weight in (*model.head.parameters(), model.trunk.output.weight):
            if weight.ndim > 1 and weight.dtype == torch.bfloat16:
                weight.copy_(with_seven_bits(weight))
    rounded = backend_for(model, "native")
    model.head.exact = True
    exact = backend_for(model, "native")
    assert (rounded.head_bits, exact.head_bits) == (7, None)
    tokens = torch.randint(model.trunk.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = []
        for made in (rounded, exact):
            states = made.trunk(tokens, made.trunk.cache(1)).head_input.clone()
            final_hidden = made.head.step(0, tokens, states, cache=made.head.cache(1)).final_hidden.clone()
            found.append((final_hidden, made.head.predict(0, final_hidden).logits))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02 * float(other.float().abs().max()))


@pytest.mark.more
def test_a_rounded_head_changes_no_text_and_drafts_as_well(pairs):
    model, start = Model.load(FIXTURES / "glm", dtype=torch.bfloat16), refrain(6, 40, seed=9).tolist()
    made = backend_for(model, "native")
    texts, log = decode(made, start, num_speculative_tokens=3, max_tokens=32)
    model.head.exact = True
    exact = backend_for(model, "native")
    assert (made.head_bits, exact.head_bits) == (7, None)
    others, other_log = decode(exact, start, num_speculative_tokens=3, max_tokens=32)
    assert texts == others == decode(exact, start, num_speculative_tokens=0, max_tokens=32)[0]
    lengths = Acceptance.of(log).length, Acceptance.of(other_log).length
    assert lengths[0] > 0.95 * lengths[1] > 1.5


@pytest.mark.more
def test_a_rounded_head_reads_its_states_by_rounded_weights_too(pairs):
    """Otherwise drafts made one by one in Python, with the trunk's LM head, would differ from those of a round."""
    model = half("glm4_moe")
    weight, states = model.trunk.output.weight, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    found = backend_for(model, "native").head.predict(0, states.bfloat16()).logits.float()
    seven, all_bits = (states.bfloat16().float() @ each.T for each in (dequantize(*quantize(weight)), weight.float()))
    assert (found - seven).norm() < (found - all_bits).norm() / 2


class QuantizedTwin(TorchDispatchMode):
    """Products of torch with quantized weights and activations of sixteen bits, as the native backend makes them.

    A weight is a matrix of a linear layer, an embedding or experts; a router, say, is none. With int4, those of the
    trunk's layers have four bits, and the others eight.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        modules = [part for each in (model.trunk, model.head) for part in each.modules()]
        layers = model.trunk.decoder.layers.parameters() if model.trunk.weights == "int4" else ()
        four_bits = {id(weight) for weight in layers}
        self.memory = [
            (weight.data_ptr(), weight.data_ptr() + weight.nbytes, id(weight) in four_bits)
            for part in modules
            for weight in part.parameters(recurse=False)
            if weight.ndim == 3 or isinstance(part, (nn.Linear, nn.Embedding))
        ]
        for part in modules:
            if hasattr(part, "config"):
                part.config._experts_implementation = "eager"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.embedding.default:
            return quantize_groups(args[0], *EIGHT_BITS, load()).dequantized.to(args[0].dtype)[args[1]]
        if func in (aten.mm.default, aten.addmm.default):
            *bias, x, weight = args
            for start, end, is_int4 in self.memory:
                if start <= weight.data_ptr() < end:
                    return sum(bias, self.product(x, weight.T, is_int4)).to(x.dtype)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def product(x: torch.Tensor, weight: torch.Tensor, is_int4: bool) -> torch.Tensor:
        return grouped_linear(x, quantize_groups(weight, *(FOUR_BITS if is_int4 else EIGHT_BITS), load()))


def quantized(model: Model, weights: str) -> Model:
    model.trunk.weights = weights
    return model


few_bits = pytest.mark.parametrize("weights", ["int8", "int4"])


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "weights"), each_once(["glm4_moe", "deepseek_v3", "qwen3_5", "qwen3_5_moe"], ["int8", "int4"])
)
def test_products_are_those_of_rounded_weights_and_activations(name, weights):
    """Of all linear layers, experts, the embedding and the LM head, and of no router."""
    model = quantized(build(name), weights)
    made = backend_for(model)
    assert (made.name, made.weight_bits, made.head_bits) == ("native", int(weights[-1]), 8)
    tokens = torch.randint(model.trunk.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # in inference mode, linear layers are no products yet
        hidden = made.trunk(tokens, made.trunk.cache(1))
        states, found = hidden.head_input.clone(), hidden.final_hidden.clone()
        step = made.head.step(0, tokens, states, cache=made.head.cache(1)).final_hidden.clone()
        logits = made.trunk.predict(found).logits.clone(), made.head.predict(0, step).logits.clone()
        with QuantizedTwin(model):
            twin = model.trunk(tokens).final_hidden
            twin_step = model.head.step(0, tokens, states).final_hidden
            twin_logits = model.trunk.logits(found), model.head.logits(0, step)
        plain = model.trunk(tokens).final_hidden
    for near, far in ((found, twin), (step, twin_step), *zip(logits, twin_logits, strict=True)):
        # Where the two round a sum differently, an activation may get the next code.
        assert (near - far).norm() < 5e-3 * far.norm()
    assert (found - twin).norm() < 0.5 * (found - plain).norm()


@pytest.mark.more
@pytest.mark.parametrize(
    ("folder", "dtype", "weights"),
    each_once(
        [("glm", torch.bfloat16), ("glm", torch.float32), ("qwen", torch.bfloat16)], ["int8", "int4", "int8 cache"]
    ),
)
def test_models_of_few_bits_decode_with_drafts_what_they_decode_without(folder, dtype, weights):
    """Also with keys and values of eight bits."""
    model, start = Model.load(FIXTURES / folder, dtype=dtype), refrain(6, 40, seed=9).tolist()
    made = backend_for(with_int8_cache(model) if weights == "int8 cache" else quantized(model, weights))
    texts, log = decode(made, start, num_speculative_tokens=3, max_tokens=32)
    assert texts == decode(made, start, num_speculative_tokens=0, max_tokens=32)[0]
    assert texts[2:3] == decode(made, start[2:3], num_speculative_tokens=4, max_tokens=32)[0], "alone"
    assert Acceptance.of(log).length > 1.5


@pytest.mark.one_case
@few_bits
def test_quantized_models_read_many_states_as_they_read_one(weights):
    """More states than one replay takes, as a large batch has."""
    model = quantized(build("glm4_moe"), weights)
    predict = backend_for(model).trunk.predict
    states = torch.randn(10, 20, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = predict(states).logits.clone()
        alone = torch.stack([predict(each).logits.clone() for each in states])
        assert torch.equal(logits, alone)
        assert not torch.equal(logits, model.trunk.logits(states))


@pytest.mark.more
def test_quantized_weights_are_never_silently_something_else():
    model = quantized(build("glm4_moe"), "int8")
    with pytest.raises(ConfigError, match="only the native backend has weights = 'int8'"):
        backend_for(model, "torch")
    with pytest.raises(ConfigError, match=r"only the native backend has weights.*compressed_sparse_attention"):
        backend_for(quantized(build("deepseek_v4"), "int8"))
    before = backend_for(model)
    model.trunk.weights = "stored"
    assert backend_for(model) is not before
    assert backend_for(model).weight_bits is None
    model.trunk.weights = "int7"
    with pytest.raises(ConfigError, match="weights = 'int7'; expected one of stored, int8, int4"):
        backend_for(model)


def with_int8_cache(model: Model) -> Model:
    model.trunk.kv_cache_dtype = "int8"
    return model


class RoundedCache(TorchFunctionMode):
    """Attention of torch over keys and values in eight bits, one scale per position and head."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.scaled_dot_product_attention:
            query, *pair = args
            args = (query, *map(round_cached, pair))
        return func(*args, **(kwargs or {}))


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "exaone_moe", "qwen3_5"])
def test_an_int8_cache_holds_rounded_keys_and_values(name):
    """In trunk and head; latent attention and sliding windows, too."""
    model = with_int8_cache(build(name))
    made = backend_for(model)
    assert made.name == "native"
    tokens = torch.randint(model.trunk.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        hidden = made.trunk(tokens, made.trunk.cache(1))
        states, found = hidden.head_input.clone(), hidden.final_hidden.clone()
        step = made.head.step(0, tokens, states, cache=made.head.cache(1)).final_hidden.clone()
        plain, plain_step = model.trunk(tokens).final_hidden, model.head.step(0, tokens, states).final_hidden
        with RoundedCache():
            twin, twin_step = model.trunk(tokens).final_hidden, model.head.step(0, tokens, states).final_hidden
    for near, far, exact in ((found, twin, plain), (step, twin_step, plain_step)):
        assert (near - far).norm() < 1e-4 * far.norm()
        assert (near - exact).norm() > 10 * (near - far).norm()


@pytest.mark.more
def test_an_int8_cache_is_never_silently_something_else():
    with pytest.raises(ConfigError, match="only the native backend has kv_cache_dtype = 'int8'"):
        backend_for(with_int8_cache(build("glm4_moe")), "torch")
    with pytest.raises(ConfigError, match=r"cannot run this model: .*compressed_sparse_attention"):
        backend_for(with_int8_cache(build("deepseek_v4")))
    model = build("glm4_moe")
    before = backend_for(model)
    model.trunk.kv_cache_dtype = "int4"
    with pytest.raises(ConfigError, match="kv_cache_dtype = 'int4'; expected one of auto, int8"):
        backend_for(model)
    after = backend_for(with_int8_cache(model))
    assert after is not before
    sizes = [made.cache(1).bytes_per_position for made in (before.trunk, before.head, after.trunk, after.head)]
    assert sizes == [2 * 2 * (8 + 8) * 4, 2 * (8 + 8) * 4, 2 * 2 * (8 + 8 + 8), 2 * (8 + 8 + 8)]


def test_an_int8_cache_needs_heads_of_four_channels():
    with pytest.raises(ConfigError, match="int8 KV cache of heads of size 6 and 6, not multiples of 4"):
        backend_for(with_int8_cache(build("glm4_moe", head_dim=6)))
