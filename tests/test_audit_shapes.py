"""Blocks of their own kind, tensors that do not fit each other, what config.json says of layers, rows apart."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from artifacts import publish
from quick import loop
from test_oracle import their_logits
from tiny import CONFIGS, build, decode, prompt
from transformers.cache_utils import DynamicCache, MtpCache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as TABLE
from transformers.masking_utils import create_sliding_window_causal_mask

import nextn
from nextn.audit_rules import audit
from nextn.cache.family_caches import ConvolutionLayer, PerSequenceCache
from nextn.cache.kv_cache import CACHE_ARGUMENT, KVCache
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor, read_header
from nextn.errors import ConfigError, RollbackError
from nextn.family_table import disagreements
from nextn.model.family_layers import collapse_streams
from nextn.model.model import Model


def texts(rows, columns):
    return torch.randint(0, 64, (rows, columns), generator=torch.Generator().manual_seed(5))


def whole(trunk, tokens):
    """The slow twin: transformers' own cache, one pass, no roll-back."""
    cache = DynamicCache(config=trunk.config)
    return trunk.decoder(input_ids=tokens, use_cache=True, **{CACHE_ARGUMENT: cache}).last_hidden_state * trunk.scale


# Streams.


def test_collapse_is_the_trunks():
    """The head's collapse has parameters of its own but the trunk's formula: a wrong eps, norm or axis shows."""
    trunk = build("deepseek_v4", hc_eps=0.1, rms_norm_eps=0.1).trunk
    theirs, streams = trunk.decoder.hc_head, torch.randn(2, 5, *trunk.hidden_shape)
    with torch.no_grad():
        for value in (theirs.hc_base, theirs.hc_scale):
            value.add_(torch.randn_like(value))
        parts = (theirs.hc_fn, theirs.hc_base, theirs.hc_scale)
        ours = collapse_streams(streams, *parts, eps=trunk.config.hc_eps, norm_eps=trunk.config.rms_norm_eps)
        torch.testing.assert_close(ours, theirs(streams))


def test_the_head_takes_the_last_layers_output():
    """`eaten` are the residual streams: the trunk's own collapse and norm make its normed state of them."""
    trunk = build("deepseek_v4").trunk
    with torch.no_grad():
        hidden = trunk(texts(2, 9))
        assert hidden.head_input.shape == (2, 9, 2, 32)
        torch.testing.assert_close(trunk.final_norm(trunk.decoder.hc_head(hidden.head_input)), hidden.final_hidden)


def test_streams_side_by_side():
    """Qwen4's streams are one long state: normed as one, projected each alone, collapsed as by the trunk."""
    model = build("qwen4_exp")
    trunk, module, size = model.trunk, model.head.stack[0], 32
    with torch.no_grad():
        hidden = trunk(texts(2, 9))
        assert hidden.head_input.shape == (2, 9, 2 * size)
        torch.testing.assert_close(trunk.decoder.hyper_connection_mixer(hidden.head_input), hidden.final_hidden)
        embedded, final_hidden = trunk.embed(texts(2, 9)), module.hidden_norm(hidden.head_input)
        torch.testing.assert_close(final_hidden.square().mean(-1), torch.ones(2, 9), atol=1e-3, rtol=0)
        first, second = module._project_inputs(embedded, hidden.head_input).split(size, dim=-1)
        both = module.token_projection(module.token_norm(embedded))
        torch.testing.assert_close(first, both + module.hidden_projection(final_hidden[..., :size]))
        torch.testing.assert_close(second, both + module.hidden_projection(final_hidden[..., size:]))


# Blocks made of a layer's parts.


@pytest.mark.parametrize("name", ["hy_v4", "glm5_next", "longcat_flash"])
def test_plain_blocks(name):
    """A block that keeps more of a layer than its parts would ask files for it; one without a norm or a residual
    trains and decodes."""
    model = build(name)
    trunk, module, states = model.trunk, model.head.stack[0], torch.randn(1, 5, 32)
    block, positions = module.block, torch.arange(5)[None]
    assert set(dict(block.named_children())) == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    given = {"rotary": trunk.rotary(states, positions, module.layer_type), "mask": trunk.mask(module.layer_type, 5)}
    with torch.no_grad():
        block.input_layernorm.weight.uniform_()
        block.post_attention_layernorm.weight.uniform_()
        got = module._run_layers(states, positions=positions, cache=None, **given)
        block.self_attn.o_proj.weight.zero_()  # attention adds nothing: what is left is the MLP's half
        half = module._run_layers(states, positions=positions, cache=None, **given)
        torch.testing.assert_close(half, states + block.mlp(block.post_attention_layernorm(states)))
        assert (got - half).abs().max() > 1e-2


def test_fp32_stays_fp32_in_a_bf16_checkpoint(tmp_path):
    """Hyper-connections, sinks, router bias: named otherwise in files, they would be cast by name alone."""
    build("deepseek_v4").save(tmp_path / "model", dtype=torch.bfloat16)
    found = {}
    for shard in (tmp_path / "model").glob("*.safetensors"):
        found |= {name: info.dtype for name, info in read_header(shard).tensors.items()}
    for name in ("hc_head_fn", "hc_attn_fn", "hc_ffn_scale", "attn.attn_sink", "ffn.gate.bias"):
        assert found[f"mtp.0.{name}"] == "F32"
        assert found[name if name == "hc_head_fn" else f"layers.1.{name}"] == "F32"
    assert found["mtp.0.e_proj.weight"] == found["mtp.0.attn.wq_a.weight"] == "BF16"
    again = Model.load(tmp_path / "model")
    assert again.head.stack[0].block.attn_hc.fn.dtype == again.head.stack[0].collapse_fn.dtype == torch.float32
    out = decode(again, [prompt(9), prompt(4)], num_speculative_tokens=3, max_tokens=6)[0]
    assert [len(text) for text in out] == [6, 6]


# Compressed attention.


def test_lone_columns_of_ragged_rows():
    """A single query sees every entry that transformers' heavy compression has: also those of a longer row."""
    trunk, tokens = build("deepseek_v4").trunk, texts(2, 30)
    wrong = tokens.clone()
    wrong[1, 3:] = (wrong[1, 3:] + 7) % 64  # what is not kept, so that entries made of it are stale
    with torch.inference_mode():
        reference, cache = whole(trunk, tokens), trunk.cache(2)
        trunk(wrong[:, :21], cache)
        cache.commit([21, 3])
        for _ in range(8):
            at = list(cache.lengths)
            step = torch.stack([tokens[row, start : start + 1] for row, start in enumerate(at)])
            got = trunk(step, cache).final_hidden
            cache.commit([1, 1])
            for row, start in enumerate(at):
                torch.testing.assert_close(got[row], reference[row, start : start + 1], atol=3e-4, rtol=0)


@pytest.mark.parametrize("dropped", [1, 6, 17])
def test_compressed_columns_can_be_dropped(dropped):
    """Columns that stood and were wrong leave no trace in the entries, open window or closed."""
    trunk, tokens = build("deepseek_v4").trunk, texts(1, 40)
    wrong = tokens.clone()
    wrong[:, 25 - dropped :] = (wrong[:, 25 - dropped :] + 7) % 64
    with torch.inference_mode():
        reference, cache = whole(trunk, tokens), trunk.cache(1)
        trunk(wrong[:, :25], cache)
        cache.commit([25])
        cache.rollback_to([25 - dropped])
        got = trunk(tokens[:, 25 - dropped :], cache).final_hidden
        torch.testing.assert_close(got, reference[:, 25 - dropped :], atol=3e-4, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v4", "inkling", "minimax_m3"])
def test_state_between_documents_is_refused(name):
    """Compressors, convolutions, blocks of columns reach over the border of packed documents, whatever a mask says."""
    trunk = build(name).trunk
    assert not trunk.can_pack
    with pytest.raises(ConfigError, match="one document per sequence"):
        trunk(texts(1, 6), documents=torch.tensor([[0, 0, 0, 1, 1, 1]]))


# Short convolutions.


def test_convolution_inputs_move_back_and_forth():
    """After any keeps and drops, the state holds each row's own last inputs, and zeros before its first."""
    generator, layer = torch.Generator().manual_seed(0), ConvolutionLayer(1, max_rollback=8)
    cache, texts = KVCache([layer], 2), [torch.zeros(3, 4), torch.zeros(3, 4)]  # four columns of nothing, the kernel's
    for counts, drops in (([3, 1], [0, 0]), ([0, 2], [2, 3]), ([4, 4], [5, 0]), ([2, 0], [1, 4]), ([4, 4], [0, 0])):
        cache.begin(4)
        window = torch.randn(2, 3, 4, generator=generator)
        seen = layer.update_conv_state(window, conv_kernel_size=4)
        for row, text in enumerate(texts):
            assert torch.equal(seen[row], torch.cat([text[:, -4:], window[row]], dim=1))
            texts[row] = torch.cat([text, window[row, :, : counts[row]]], dim=1)
        cache.commit(counts)
        cache.rollback_to([length - drop for length, drop in zip(cache.lengths, drops, strict=True)])
        texts = [text[:, : text.shape[1] - drop] for text, drop in zip(texts, drops, strict=True)]
    cache.select([1])
    cache.begin(1)
    assert torch.equal(layer.update_conv_state(torch.ones(1, 3, 1), conv_kernel_size=4)[0, :, :4], texts[1][:, -4:])


def test_dropping_more_than_is_held_raises():
    layer = ConvolutionLayer(1, max_rollback=3)
    cache = KVCache([layer], 1)
    cache.begin(9)
    layer.update_conv_state(torch.randn(1, 2, 9), conv_kernel_size=4)
    cache.commit([9])
    with pytest.raises(RollbackError, match=r"4 positions cannot be rolled back.*stored for 3"):
        cache.rollback_to([5])


@pytest.mark.parametrize("name", ["inkling", "glm5_next", "qwen4_exp"])
def test_rows_of_different_lengths_go_apart(name):
    """Their attention counts all rows from one offset: in one pass, the shorter row would be wrong. Neither pools, nor
    n-grams, nor the convolution over them know columns that were not kept."""
    trunk, tokens = build(name).trunk, texts(2, 20)
    with torch.inference_mode():
        reference, cache = whole(trunk, tokens), trunk.cache(2)
        assert isinstance(cache, PerSequenceCache)
        trunk(tokens[:, :9], cache)
        cache.commit([9, 4])
        got = trunk(torch.stack([tokens[0, 9:12], tokens[1, 4:7]]), cache).final_hidden
        torch.testing.assert_close(got[0], reference[0, 9:12], atol=1e-4, rtol=0)
        torch.testing.assert_close(got[1], reference[1, 4:7], atol=1e-4, rtol=0)
        cache.commit([0, 3])
        assert cache.lengths == [9, 7]
        cache.select([1])
        torch.testing.assert_close(trunk(tokens[1:, 7:9], cache).final_hidden[0], reference[1, 7:9], atol=1e-4, rtol=0)


# transformers' own MTP as an oracle.


def inkling(folder, modules, *, post_norm=True, log_floor=None):
    """A tiny Inkling of ours, and transformers' trunk of its checkpoint."""
    torch.manual_seed(0)
    text = CONFIGS["inkling"]["text_config"] | {"log_scaling_n_floor": log_floor, "initializer_range": 0.1}
    mtp = {"num_nextn_predict_layers": modules, "chain_hidden_post_norm": post_norm, "local_layer_ids": [1]}
    model = Model.build(CONFIGS["inkling"] | {"text_config": text, "mtp_config": mtp}, num_modules=modules)
    with torch.no_grad():
        for value in [*model.trunk.parameters(), *model.head.parameters()]:
            if value.ndim == 1:
                value.uniform_(0.5, 1.5)  # gains of one would hide a norm that is left out before another
    model.save(folder)
    return model, type(model.trunk.model).from_pretrained(folder, dtype=torch.float32).eval()


def switched(model, **facts):
    family = replace(model.family, **facts)
    model.head.family = family
    for module in model.head.stack:
        module.family = family
    return model


@pytest.mark.more
@pytest.mark.parametrize(("modules", "post_norm"), [(1, True), (3, True), (2, False)])
def test_inkling_equals_transformers_but_for_the_embedding(modules, post_norm, tmp_path, monkeypatch):
    """With the raw embedding our logits are transformers' at every depth, to 1e-5 in fp32: catches a wrong half of the
    projection, norm, state, convolution, relative bias, window, muP width or slice of the vocabulary.

    transformers takes the trunk's embed_norm out (MtpModel.tie_with_main_model); vLLM and SGLang keep it, and vLLM
    measured the raw embedding at 0.70 first-token acceptance against 0.85. So the row says `normed`. transformers 5.23
    also forgets the window of a sliding MTP layer: its table has the causal mask where the sliding one is meant.
    """
    meant = {"sliding_attention": create_sliding_window_causal_mask}
    monkeypatch.setitem(TABLE, "hybrid_sliding", TABLE["hybrid_sliding"] | meant)
    model, oracle = inkling(tmp_path / "model", modules, post_norm=post_norm)
    text = prompt(24)
    ids, wanted = torch.tensor([text]), their_logits(oracle, text, modules)
    with torch.inference_mode():
        hidden = model.trunk(ids).head_input
        assert model.family.embedded == "normed"
        assert (model.head(ids, hidden, depths=modules)[0] - wanted).abs().max() > 1e-2
        ours = switched(model, embedded="raw").head(ids, hidden, depths=modules)[0]
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    assert "embedded: normed in vllm, sglang; raw in transformers" in disagreements(model.family)


def test_inkling_positions_matter_with_log_scaling(tmp_path):
    """Where full attention scales by the log of the position, transformers counts a pair at its token's, vLLM and we at
    its state's: one column's difference, and the only one."""
    model, oracle = inkling(tmp_path / "model", 1, log_floor=8)
    text = prompt(24)
    ids, wanted = torch.tensor([text]), their_logits(oracle, text, 1)
    module, columns = switched(model, embedded="raw").head.stack[0], len(text) - 1
    with torch.inference_mode():
        hidden = model.trunk(ids).head_input
        assert (model.head(ids, hidden)[0] - wanted).abs().max() > 1e-4
        step = module(
            model.trunk.embed(ids[:, 1:], raw=True),
            hidden[:, :-1],
            positions=torch.arange(columns)[None],
            rotary=None,
            mask=model.trunk.mask(module.layer_type, columns),
            cache=MtpCache(config=oracle.config.get_mtp_config()),
        )
        torch.testing.assert_close(model.trunk.logits(step.final_hidden)[0, :, None], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.more
def test_inkling_writes_what_transformers_writes(tmp_path):
    """`generate(use_mtp=True)` and our decoder write the same greedy text."""
    model, oracle = inkling(tmp_path / "model", 2, log_floor=8)
    start = prompt(9)
    out = oracle.generate(torch.tensor([start]), use_mtp=True, do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert out[0, len(start) :].tolist() == decode(model, [start], num_speculative_tokens=2, max_tokens=12)[0][0]


@pytest.mark.more
def test_a_norm_that_the_config_does_not_promise_is_not_there(tmp_path):
    """chain_norm is one for all modules, or none: a fresh one in its place would be trained and saved unasked."""
    names = {}
    for post_norm in (True, False):
        inkling(tmp_path / "model", 2, post_norm=post_norm)
        names[post_norm] = {
            name for shard in (tmp_path / "model").glob("*.safetensors") for name in read_header(shard).tensors
        }
        assert Model.load(tmp_path / "model").head.num_modules == 2
    assert names[True] - names[False] == {"model.mtp.chain_norm.weight"}


@pytest.mark.more
def test_the_text_model_alone_runs(tmp_path):
    """A checkpoint of Inkling's text model keeps its head through save and load, too."""
    text = CONFIGS["inkling"]["text_config"] | {"num_mtp_layers": 1, "chain_hidden_post_norm": True}
    torch.manual_seed(0)
    model = Model.build(text)
    model.save(tmp_path / "model")
    again = Model.load(tmp_path / "model")
    assert (
        decode(again, [prompt(9)], num_speculative_tokens=3, max_tokens=8)[0]
        == decode(model, [prompt(9)], num_speculative_tokens=0, max_tokens=8)[0]
    )


@pytest.mark.parametrize(
    ("family", "lost"), [("qwen3_5", "mtp.layers.0.mlp.gate_proj"), ("glm4_moe", "layers.0.mlp.up_proj")]
)
def test_half_of_a_projection(family, lost, tmp_path):
    """Rows that a merge of tensor-parallel shards lost, of head or trunk: no loader takes the module."""

    def halve(table):
        (name,) = (each for each in table if each.endswith(f"{lost}.weight"))
        rows, columns = table[name].shape
        table[name] = RawTensor("BF16", (rows // 2, columns), table[name].data[: rows * columns])

    checkpoint = Checkpoint.open(publish(tmp_path, family, change=halve))
    found = [each for each in audit(checkpoint).findings if each.severity == "error"]
    assert [each.rule for each in found] == ["shape"]
    assert lost in found[0].found


@pytest.mark.parametrize("layers", ["", r"layers\.2\."])
def test_scales_of_another_size(layers, tmp_path):
    """Scales that a faulty export computed from packed values are half as many, of the whole checkpoint or the head."""

    def pack(table):
        for name in [each for each in table if each.endswith("_proj.weight") and "eh_proj" not in each]:
            rows, columns = table[name].shape
            groups = columns // (32 if re.search(layers, name) else 16)
            table[name] = RawTensor("U8", (rows, columns // 2), bytes(rows * columns // 2))
            table[f"{name}_scale"] = RawTensor("F8_E4M3", (rows, groups), b"\x38" * (rows * groups))
            table[f"{name}_scale_2"] = RawTensor("F32", (), bytes(4))

    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.2.eh_proj"]}
    checkpoint = Checkpoint.open(publish(tmp_path, "glm4_moe", change=pack, config={"quantization_config": section}))
    found = [each for each in audit(checkpoint, sample=True).findings if each.severity == "error"]
    assert [each.rule for each in found] == ["quantization"]
    assert re.search(r"such as .*weight_scale .* expected .* for groups of 16", found[0].found)


def test_scales_of_another_method(tmp_path):
    """MXFP4 as Quark stores it, which nextn does not read: 32 values have a scale."""

    def pack(table, groups):
        for name in [each for each in table if each.endswith("_proj.weight") and "eh_proj" not in each]:
            rows, columns = table[name].shape
            table[name] = RawTensor("U8", (rows, columns // 2), bytes(rows * columns // 2))
            count = -(-columns // groups)
            table[f"{name}_scale"] = RawTensor("U8", (rows, count), bytes(rows * count))

    section = {"quant_method": "quark", "exclude": ["lm_head", "model.layers.2.eh_proj"]}
    for groups, count in ((32, 0), (16, 1)):
        options = {"change": partial(pack, groups=groups), "config": {"quantization_config": section}}
        checkpoint = Checkpoint.open(publish(tmp_path / str(groups), "glm4_moe", **options))
        found = [each.found for each in audit(checkpoint, sample=True).findings if each.rule == "quantization"]
        assert [("of scales" in each) for each in found] == [True] * count


def test_blocks_of_another_size(tmp_path):
    """fp8 scales that do not fit the block of the config."""

    def change(table):
        name = next(each for each in table if each.endswith("q_proj.weight_scale_inv"))
        table[name] = RawTensor("F32", (1, 7), bytes(28))

    checkpoint = Checkpoint.open(publish(tmp_path, "qwen3_5", fp8=True, change=change))
    assert any(each.rule == "quantization" and "[1, 7]" in each.found for each in audit(checkpoint).findings)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_copies_in_another_dtype(dtype, tmp_path):
    """Equal values are equal copies; other values are not."""

    def cast(table, offset=0.0):
        for name in ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"):
            values = (np.frombuffer(table[name].data, "<u2").astype("<u4") << 16).view("<f4") + offset
            kind = {"F16": "<f2", "F32": "<f4"}[dtype]
            table[name] = RawTensor(dtype, table[name].shape, values.astype(kind).tobytes())

    def rules(folder, change):
        return {each.rule for each in audit(Checkpoint.open(publish(folder, "deepseek_v3", change=change))).findings}

    assert "copy-differs" not in rules(tmp_path / "equal", cast)
    assert "copy-differs" in rules(tmp_path / "other", lambda table: cast(table, 0.01))


@loop(
    ("family", "field", "value"),
    [
        ("glm4_moe", "use_qk_norm", False),
        ("glm4_moe", "attention_bias", False),
        ("deepseek_v3", "attention_bias", True),
        ("glm4_moe", "first_k_dense_replace", 2),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse", "sparse"]),
        ("mimo_v2", "moe_layer_freq", [1, 1]),
        ("qwen3_next", "mlp_only_layers", [1]),
        ("qwen3_next", "decoder_sparse_step", 2),
        ("qwen3_5", "layer_types", ["linear_attention"]),
        ("qwen3_5", "attn_output_gate", False),
        ("deepseek_v3", "q_lora_rank", None),
        ("glm4_moe", "n_shared_experts", 0),
        ("glm4_moe", "n_shared_experts", 2),
        ("deepseek_v3", "qk_rope_head_dim", 16),
        ("qwen3_next", "linear_num_key_heads", 7),
        ("glm4_moe", "num_experts_per_tok", 9),
        ("nemotron_h", "hybrid_override_pattern", "M|*/*E"),  # Megatron's: stages, and the head's layers
    ],
)
def test_a_claim_that_no_tensor_supports(family, field, value, tmp_path):
    """Clean although loaders refuse the weights, or one finding for each matrix of one wrong number."""
    found = nextn.audit(publish(tmp_path, family, config={field: value})).findings
    assert [(each.rule, field in each.found) for each in found if each.severity != "note"] == [
        ("config-contradicts", True)
    ]


def test_layers_of_a_pattern_of_megatron(tmp_path):
    config = {"num_hidden_layers": None, "hybrid_override_pattern": "M|*/*E"}
    assert Inventory.of(Checkpoint.open(publish(tmp_path, "nemotron_h", config=config))).num_layers == 2


def test_norms_without_weights(tmp_path):
    """Llama 4 has use_qk_norm, and norms of queries and keys without weights; other types are not known better."""
    config = {"model_type": "llama4_text", "num_mtp_layers": 1, "use_qk_norm": True}
    found = nextn.audit(publish(tmp_path, "mimo", config=config)).findings
    assert "use_qk_norm" not in "".join(each.found for each in found)
