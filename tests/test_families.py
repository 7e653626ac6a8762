"""Families: the names table both ways, counts, look-ups, and that every row says what it must."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from quick import loop
from tiny import CONFIGS

from nextn.errors import FamilyError
from nextn.family_table import ENGINES, by_config, by_name, deviations, disagreements, rows

ROWS = {row.name: row for row in rows()}
LAYERS = 61

# Typed from the published names, family by family: (family, layers of its trunk, name in the file, name in the head).
PUBLISHED = [
    ("deepseek_v3", 61, "model.layers.61.embed_tokens.weight", "0.embedding.weight"),
    ("deepseek_v3", 61, "model.layers.61.enorm.weight", "0.token_norm.weight"),
    ("deepseek_v3", 61, "model.layers.61.hnorm.weight", "0.hidden_norm.weight"),
    ("deepseek_v3", 61, "model.layers.61.eh_proj.weight", "0.projection.weight"),
    ("deepseek_v3", 61, "model.layers.61.shared_head.norm.weight", "0.final_norm.weight"),
    ("deepseek_v3", 61, "model.layers.61.shared_head.head.weight", "0.output.weight"),
    ("deepseek_v3", 61, "model.layers.61.self_attn.kv_b_proj.weight", "0.block.self_attn.kv_b_proj.weight"),
    ("deepseek_v3", 61, "model.layers.61.mlp.experts.7.up_proj.weight", "0.block.mlp.experts.7.up_proj.weight"),
    (
        "deepseek_v3", 61, "model.layers.61.self_attn.o_proj.weight_scale_inv",
        "0.block.self_attn.o_proj.weight_scale_inv",
    ),
    ("deepseek_v32", 61, "model.layers.61.self_attn.indexer.wk.weight", "0.block.self_attn.indexer.wk.weight"),
    ("deepseek_v4", 43, "mtp.0.enorm.weight", "0.token_norm.weight"),
    ("deepseek_v4", 43, "mtp.0.e_proj.weight", "0.token_projection.weight"),
    ("deepseek_v4", 43, "mtp.0.e_proj.scale", "0.token_projection.scale"),
    ("deepseek_v4", 43, "mtp.1.h_proj.weight", "1.hidden_projection.weight"),
    ("deepseek_v4", 43, "mtp.0.hc_head_fn", "0.collapse_fn"),
    ("deepseek_v4", 43, "mtp.0.hc_head_base", "0.collapse_base"),
    ("deepseek_v4", 43, "mtp.0.hc_head_scale", "0.collapse_scale"),
    ("deepseek_v4", 43, "mtp.0.norm.weight", "0.final_norm.weight"),
    ("deepseek_v4", 43, "mtp.0.emb.tok_emb.weight", "0.embedding.weight"),
    ("deepseek_v4", 43, "mtp.0.head.weight", "0.output.weight"),
    ("deepseek_v4", 43, "mtp.0.attn_norm.weight", "0.block.input_layernorm.weight"),
    ("deepseek_v4", 43, "mtp.0.ffn.experts.3.w1.scale", "0.block.mlp.experts.3.gate_proj.scale"),
    ("deepseek_v4", 43, "mtp.0.hc_attn_fn", "0.block.attn_hc.fn"),
    ("glm4_moe", 46, "model.layers.46.shared_head.norm.weight", "0.final_norm.weight"),
    ("glm4_moe", 92, "model.layers.92.eh_proj.weight", "0.projection.weight"),
    ("glm4_moe_lite", 47, "model.layers.47.self_attn.kv_a_layernorm.weight", "0.block.self_attn.kv_a_layernorm.weight"),
    ("glm_moe_dsa", 78, "model.layers.78.hnorm.weight", "0.hidden_norm.weight"),
    ("glm5_next", 45, "model.language_model.layers.45.eh_proj.weight", "0.projection.weight"),
    ("glm_ocr", 16, "model.language_model.layers.16.shared_head.norm.weight", "0.final_norm.weight"),
    ("glm4v_moe", 46, "model.language_model.layers.46.eh_proj.weight", "0.projection.weight"),
    ("interns2_mobius", 40, "mtp.fc.weight", "0.projection.weight"),
    ("step3p5", 45, "model.language_model.layers.45.eh_proj.weight", "0.projection.weight"),
    ("step5", 45, "model.layers.46.transformer.shared_head.output.weight", "1.output.weight"),
    ("openpangu_v2", 46, "model.layers.48.shared_head.norm.weight", "2.final_norm.weight"),
    ("axk2", 61, "model.layers.61.enorm.weight", "0.token_norm.weight"),
    ("xing4_0", 40, "model.layers.40.eh_proj.weight", "0.projection.weight"),
    ("longcat_flash_ngram", 14, "model.mtp.layers.0.enorm.m.weight", "0.token_norm.weight"),
    ("ernie4_5_vl_moe", 28, "model.language_model.mtp_linear_proj.0.weight", "0.projection.weight"),
    ("nemotron_h_puzzle", 52, "mtp.layers.1.final_layernorm.weight", "0.final_norm.weight"),
    ("hy_v4_vl", 60, "model.mtp_layers.0.hnorm.weight", "0.hidden_norm.weight"),
    ("iquest_q1", 40, "mtp_layers.0.mtp_model_layer.attention_norm.weight", "0.block.attention_norm.weight"),
    ("iquest_q1", 40, "mtp_layers.0.eh_proj.weight", "0.projection.weight"),
    ("iquest_q1", 40, "mtp_layers.0.mtp_model_layer.mlp.experts.fc", "0.block.mlp.experts.gate_up_proj"),
    ("iquest_q1", 40, "mtp_layers.0.mtp_model_layer.mlp.router.weight", "0.block.mlp.gate.weight"),
    ("motif3", 53, "model.mtp_layers.0.embed_norm.weight", "0.token_norm.weight"),
    ("motif3", 53, "model.mtp_layers.0.mlp.act_fn.bias", "0.block.mlp.act_fn.bias"),
    ("qwen3_next", 48, "mtp.pre_fc_norm_embedding.weight", "0.token_norm.weight"),
    ("qwen3_5", 32, "mtp.pre_fc_norm_hidden.weight", "0.hidden_norm.weight"),
    ("qwen3_5", 32, "model.mtp.fc.weight", "0.projection.weight"),
    ("qwen3_5", 32, "mtp.layers.0.self_attn.q_norm.weight", "0.block.self_attn.q_norm.weight"),
    ("qwen3_5_moe", 48, "mtp.fc.weight", "0.projection.weight"),
    ("qwen3_5_moe", 48, "mtp.norm.weight", "0.final_norm.weight"),
    ("qwen4_exp", 40, "mtp.fc_embedding.weight", "0.token_projection.weight"),
    ("qwen4_exp", 40, "mtp.fc_hidden.weight", "0.hidden_projection.weight"),
    ("qwen4_exp", 40, "mtp.hyper_connection_mixer.input_mix.weight", "0.collapse.input_mix.weight"),
    ("mimo", 36, "model.mtp_layers.0.token_layernorm.weight", "0.token_norm.weight"),
    ("mimo", 36, "model.mtp_layers.0.hidden_layernorm.weight", "0.hidden_norm.weight"),
    ("mimo", 36, "model.mtp_layers.0.input_proj.weight", "0.projection.weight"),
    ("mimo", 36, "model.mtp_layers.0.final_layernorm.weight", "0.final_norm.weight"),
    ("mimo", 36, "model.mtp_layers.0.self_attn.q_proj.bias", "0.block.self_attn.q_proj.bias"),
    ("mimo_v2", 48, "model.mtp.layers.2.enorm.weight", "2.token_norm.weight"),
    ("mimo_v2", 48, "model.mtp.layers.1.pre_mlp_layernorm.weight", "1.block.post_attention_layernorm.weight"),
    ("mimo_v2", 48, "model.mtp.layers.0.self_attn.attention_sink_bias", "0.block.self_attn.sinks"),
    ("mimo_v2", 48, "model.mtp.layers.0.self_attn.qkv_proj.weight", "0.block.self_attn.qkv_proj.weight"),
    ("mimo_v2", 48, "model.mtp.layers.0.final_layernorm.weight", "0.final_norm.weight"),
    ("ernie4_5_moe", 28, "model.mtp_emb_norm.0.weight", "0.token_norm.weight"),
    ("ernie4_5_moe", 28, "model.mtp_hidden_norm.0.weight", "0.hidden_norm.weight"),
    ("ernie4_5_moe", 28, "model.mtp_linear_proj.0.weight", "0.projection.weight"),
    ("ernie4_5_moe", 28, "model.mtp_block.0.mlp.up_proj.weight", "0.block.mlp.up_proj.weight"),
    ("longcat_flash", 28, "model.mtp.embed_tokens.weight", "0.embedding.weight"),
    ("longcat_flash", 28, "model.mtp.layers.0.enorm.m.weight", "0.token_norm.weight"),
    ("longcat_flash", 28, "model.mtp.layers.0.hnorm.m.weight", "0.hidden_norm.weight"),
    ("longcat_flash", 28, "model.mtp.layers.0.eh_proj.weight_scale_inv", "0.projection.weight_scale_inv"),
    ("longcat_flash", 28, "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight", "0.block.mlp.up_proj.weight"),
    ("longcat_flash", 28, "model.mtp.norm.weight", "0.final_norm.weight"),
    ("nemotron_h", 52, "mtp.layers.0.enorm.weight", "0.token_norm.weight"),
    ("nemotron_h", 52, "mtp.layers.0.mixer.q_proj.weight", "0.block.0.mixer.q_proj.weight"),
    ("nemotron_h", 52, "mtp.layers.1.norm.weight", "0.block.1.norm.weight"),
    ("nemotron_h", 52, "language_model.mtp.layers.1.final_layernorm.weight", "0.final_norm.weight"),
    ("step3p5", 45, "model.layers.45.transformer.shared_head.norm.weight", "0.final_norm.weight"),
    ("step3p5", 45, "model.layers.47.transformer.shared_head.output.weight", "2.output.weight"),
    ("step3p5", 45, "model.layers.46.shared_head.norm.weight", "1.final_norm.weight"),
    ("step3p5", 45, "model.layers.46.moe.gate_proj.weight", "1.block.mlp.experts.gate_proj.weight"),
    ("bailing_moe_v2", 20, "model.layers.20.final_layernorm.weight", "0.final_norm.weight"),
    ("bailing_hybrid", 42, "model.layers.42.attention.dense.weight", "0.block.self_attn.o_proj.weight"),
    ("bailing_hybrid", 42, "model.layers.42.attention.kv_b_proj.weight", "0.block.self_attn.kv_b_proj.weight"),
    ("hy_v3", 80, "model.layers.80.final_layernorm.weight", "0.final_norm.weight"),
    ("hy_v3", 80, "model.layers.80.mlp.router.gate.weight", "0.block.mlp.gate.weight"),
    ("hy_v3", 80, "model.layers.80.mlp.gate_proj.weight", "0.block.mlp.gate_proj.weight"),
    ("hy_v3", 80, "model.layers.80.mlp.expert_bias", "0.block.mlp.e_score_correction_bias"),
    ("hy_v4", 34, "model.mtp_layers.0.eh_proj.weight", "0.projection.weight"),
    ("exaone_moe", 48, "mtp.fc.weight", "0.projection.weight"),
    ("exaone4_5", 64, "mtp.layers.1.mlp.up_proj.weight", "1.block.mlp.up_proj.weight"),
    ("inkling", 66, "model.mtp.layers.3.hidden_norm.weight", "3.hidden_norm.weight"),
    ("inkling", 66, "model.mtp.layers.3.embed_norm.weight", "3.token_norm.weight"),
    ("inkling", 66, "model.mtp.layers.0.input_proj.weight", "0.projection.weight"),
    ("inkling", 66, "model.mtp.layers.0.transformer_block.attn.wq_du.weight", "0.block.self_attn.q_proj.weight"),
    ("inkling", 66, "model.mtp.chain_norm.weight", "0.final_norm.weight"),
    ("mellum", 28, "mtp.pre_fc_norm_hidden.weight", "0.hidden_norm.weight"),
    ("minimax_m3", 60, "language_model.model.mtp.layers.1.enorm.weight", "1.token_norm.weight"),
    ("minimax_m3", 60, "model.mtp.layers.0.final_layernorm.weight", "0.final_norm.weight"),
    (
        "minimax_m3", 60, "model.mtp.layers.0.transformer_layer.self_attn.q_proj.weight",
        "0.block.self_attn.q_proj.weight",
    ),
    ("kimi_k3", 60, "language_model.model.layers.60.eh_proj.weight", "0.projection.weight"),
    ("pangu_ultra_moe", 61, "model.layers.61.shared_head.norm.weight", "0.final_norm.weight"),
    ("dots3_note", 46, "model.mtp.embed_tokens.weight", "0.embedding.weight"),
    ("dots3_note", 46, "model.layers.46.hnorm.weight", "0.hidden_norm.weight"),
    ("gigachat3_5", 40, "model.layers.41.enorm.weight", "1.token_norm.weight"),
    ("cohere2_moe", 40, "model.layers.40.shared_head.norm.weight", "0.final_norm.weight"),
]  # fmt: skip

# Spellings that are read and never written.
READ_ONLY = {("step3p5", "model.layers.46.shared_head.norm.weight"), ("qwen3_5", "model.mtp.fc.weight")}

# The trunk's own, which no head may claim.
TRUNK = [
    ("deepseek_v3", 61, "model.layers.60.mlp.gate.weight"),
    ("deepseek_v3", 61, "model.embed_tokens.weight"),
    ("deepseek_v3", 61, "lm_head.weight"),
    ("deepseek_v4", 43, "layers.42.attn.wq_a.weight"),
    ("deepseek_v4", 43, "head.weight"),
    ("deepseek_v4", 43, "norm.weight"),
    ("glm_ocr", 16, "model.language_model.layers.15.input_layernorm.weight"),
    ("qwen3_5", 32, "model.language_model.layers.3.self_attn.q_proj.weight"),
    ("mimo_v2", 48, "model.layers.0.self_attn.attention_sink_bias"),
    ("nemotron_h", 52, "backbone.layers.0.norm.weight"),
    ("nemotron_h", 52, "backbone.embeddings.weight"),
    ("longcat_flash", 28, "model.layers.0.input_layernorm.0.weight"),
    ("inkling", 66, "model.llm.embed.weight"),
    ("dots3_note", 46, "model.layers.45.input_layernorm.weight"),
]


def roles(row, modules):
    """Canonical names of every role, in the modules for which the layout has a place."""
    for module in range(modules):
        for role, path in row.names.items():
            if module and "{" not in path:
                continue
            whole = role.startswith("collapse_")
            inside = (*row.block_renames, "self_attn.q_proj", "mlp.experts.3.down_proj") if role == "block" else ("",)
            for rest in inside:
                tail = "" if whole else (f".{rest}" if rest else "") + ".weight"
                yield f"{module}.{role}{tail}"


@loop("name", ROWS)
@loop("layers", [2, LAYERS])
def test_names_go_both_ways(name, layers):
    """A name that does not come back as itself would be lost on save or taken for another on load."""
    row = ROWS[name]
    seen = {}
    for each in roles(row, row.max_modules or 3):
        for wrapper in ("", *row.wrappers):
            stored = row.published(each, layers, wrapper=wrapper)
            assert row.canonical(stored, layers) == each, stored
            assert seen.setdefault((wrapper, stored), each) == each, f"two tensors would be written to {stored}"


@loop(("name", "layers", "stored", "wanted"), PUBLISHED)
def test_published_names_are_known(name, layers, stored, wanted):
    """A row whose pattern misses a published name would report a head that is there as missing, or save it under a name
    that no engine reads."""
    row = ROWS[name]
    assert row.canonical(stored, layers) == wanted
    written = [row.published(wanted, layers, wrapper=wrapper) for wrapper in ("", *row.wrappers)]
    assert (stored in written) != ((name, stored) in READ_ONLY)


@loop(("name", "layers", "stored"), TRUNK)
def test_trunk_is_not_head(name, layers, stored):
    """A pattern that is too wide would take trunk tensors for the head's."""
    assert ROWS[name].canonical(stored, layers) is None


def test_every_family_has_a_published_name():
    """A new row must come with literal names of its own."""
    assert set(ROWS) == {name for name, *_ in PUBLISHED}


def test_layer_index_counts_from_the_trunk():
    """A head of another trunk's depth must not be read as module -15 or as a later module of this one."""
    row = ROWS["glm4_moe"]
    assert row.canonical("model.layers.46.eh_proj.weight", 92) is None
    assert row.canonical("model.layers.92.eh_proj.weight", 46) == "46.projection.weight"


def test_second_module_without_a_place_is_refused():
    """Two modules written under one name: the second would overwrite the first, unsaid."""
    with pytest.raises(FamilyError, match=r"stores mtp\.fc once"):
        ROWS["qwen3_5"].published("1.projection.weight", 4)


def test_wrappers_are_written_where_they_apply():
    """Qwen3.5's head stays at the top level of a vision-language checkpoint; GLM-OCR's does not."""
    wrapper = "model.language_model."
    assert ROWS["qwen3_5"].published("0.projection.weight", 4, wrapper=wrapper) == "mtp.fc.weight"
    stored = ROWS["glm_ocr"].published("0.projection.weight", 16, wrapper=wrapper)
    assert stored == "model.language_model.layers.16.eh_proj.weight"


SHARED = [
    ("deepseek_v3", "model.embed_tokens.weight", "embedding"),
    ("deepseek_v4", "embed.weight", "embedding"),
    ("deepseek_v4", "head.weight", "output"),
    ("deepseek_v4", "lm_head.weight", None),
    ("bailing_hybrid", "model.word_embeddings.weight", "embedding"),
    ("inkling", "model.llm.unembed.weight", "output"),
    ("nemotron_h", "backbone.embeddings.weight", "embedding"),
    ("qwen3_5_moe", "model.language_model.embed_tokens.weight", "embedding"),
    ("kimi_k3", "language_model.lm_head.weight", "output"),
    ("deepseek_v3", "model.layers.61.embed_tokens.weight", None),
]


@loop(("name", "stored", "role"), SHARED)
def test_shared_tensors_are_found_where_the_trunk_keeps_them(name, stored, role):
    """The DeepSeek-V4 case: embed.weight and head.weight at the top level are the head's shared tensors."""
    assert ROWS[name].shared_role(stored) == role


def test_no_type_is_claimed_twice():
    """Two rows for one model_type: the choice would depend on their order."""
    kinds = [kind for row in ROWS.values() for kind in (*row.model_types, *row.draft_types)]
    assert len(kinds) == len(set(kinds))
    assert len(ROWS) == len(rows())


@loop(("kind", "name"), [(kind, row.name) for row in rows() for kind in (*row.model_types, *row.draft_types)])
def test_config_finds_its_row(kind, name):
    """By the top-level type, and by the text model's under a wrapper that no row knows."""
    assert by_config({"model_type": kind}).name == name
    assert by_config({"model_type": "some_vl", "text_config": {"model_type": kind}}).name == name


def test_outer_type_wins():
    """Kimi-K3's text model is of a type that other models have, too; EXAONE-4.5's is EXAONE-4's, without a head."""
    assert by_config({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}).name == "kimi_k3"
    assert by_config({"model_type": "glm_ocr", "text_config": {"model_type": "glm4_moe"}}).name == "glm_ocr"
    with pytest.raises(FamilyError):
        by_config({"model_type": "exaone4"})


@pytest.mark.parametrize(("name", "family"), [
    ("LongcatCausalLM", "longcat_flash_ngram"), ("Glm4MoeForCausalLM", "glm4_moe"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"), ("DeepseekV3ForCausalLM", "deepseek_v3"),
])  # fmt: skip
def test_a_config_without_a_model_type(name, family):
    """LongCat-2.0 has null there."""
    assert by_config({"model_type": None, "architectures": [name]}).name == family
    assert by_config({"model_type": "glm4_moe", "architectures": [name]}).name == "glm4_moe"


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "llama", "text_config": None}])
def test_unknown_type_says_what_to_do(config):
    """A user must see what would be valid."""
    with pytest.raises(FamilyError, match=r"--init-head.*--head.*-k 0.*nextn families.*--family"):
        by_config(config)
    with pytest.raises(FamilyError, match=r"'lama'.*glm4_moe"):
        by_name("lama")
    with pytest.raises(FamilyError, match=r"no model_type.*--family"):
        by_config({})


COUNTS = [
    ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 2}, 2),
    ({"model_type": "deepseek_v3", "num_mtp_layers": 3}, 3),
    ({"model_type": "deepseek_v3"}, 1),
    ({"model_type": "glm4_moe", "num_nextn_predict_layers": 0}, 0),
    ({"model_type": "qwen3_next"}, 1),
    ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}, 1),
    ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 0}}, 0),
    ({"model_type": "qwen3_8_flash_next", "text_config": {"mtp_num_hidden_layers": 1}}, 1),
    ({"model_type": "kimi_k3", "text_config": {"num_nextn_predict_layers": 1}}, 1),
    ({"model_type": "mimo_v2_flash"}, 3),
    ({"model_type": "minimax_m3_vl", "text_config": {"num_mtp_modules": 2}}, 2),
    ({"model_type": "step3p7", "text_config": {"num_nextn_predict_layers": 3}}, 3),
    ({"model_type": "step3p5"}, 0),
    ({"model_type": "nemotron_h", "num_nextn_predict_layers": 1}, 1),
    ({"model_type": "inkling_mm_model", "mtp_config": {"num_nextn_predict_layers": 5}, "text_config": {}}, 5),
    ({"model_type": "inkling_mm_model", "mtp_config": None}, 0),
    ({"model_type": "inkling_text", "num_mtp_layers": 2}, 2),
    ({"model_type": "hy_v4", "num_nextn_predict_layers": 1}, 1),
    ({"model_type": "hy_v4", "num_nextn_predict_layers": 2}, 1),
    ({"model_type": "hy_v4", "num_nextn_predict_layers": 0}, 0),
]


@loop(("config", "count"), COUNTS)
def test_counts_are_parsed(config, count):
    """A count read from the wrong place makes a whole head look absent, or an absent one declared."""
    assert by_config(config).num_modules(config) == count


@pytest.mark.parametrize("bad", [-1, 1.5, True, "1", [1]])
def test_bad_count_is_refused(bad):
    """A config from a stranger must not become a traceback."""
    for field in ROWS["glm4_moe"].count_fields:  # the one that the config has is named
        with pytest.raises(FamilyError, match=f"{field} = .*expected a whole number"):
            ROWS["glm4_moe"].num_modules({field: bad})


def test_count_beyond_the_layout_is_refused():
    with pytest.raises(
        FamilyError, match="mtp_num_hidden_layers declares 2 MTP layers, the layout has at most 1; set it to"
    ):
        ROWS["qwen3_5"].num_modules({"mtp_num_hidden_layers": 2})


@loop(
    ("config", "new"),
    [(config, new) for config, _ in COUNTS for new in (0, 1, 2, 4) if new <= (by_config(config).max_modules or 4)],
)
def test_written_count_is_read_back(config, new):
    """A count written beside the one that is read would leave the old promise standing."""
    row = by_config(config)
    before = repr(config)
    written = row.with_count(config, new)
    assert row.num_modules(written) == new
    assert repr(config) == before
    assert {key: value for key, value in written.items() if value != config.get(key)}.keys() <= {
        *row.count_fields, "text_config", "mtp_config"
    }  # fmt: skip


def test_count_is_written_where_it_is_read():
    """Engines read the text model's count in a composite config, and Inkling's at the top level."""
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    assert by_config(config).with_count(config, 1)["text_config"]["mtp_num_hidden_layers"] == 1
    config = {"model_type": "inkling_mm_model", "text_config": {"model_type": "inkling_text"}}
    assert by_config(config).with_count(config, 4)["mtp_config"] == {"num_nextn_predict_layers": 4}


@loop("name", ROWS)
def test_row_is_whole(name):
    """A row that leaves an engine, a source or a reason out decides something in silence."""
    row = ROWS[name]
    assert tuple(row.engines) == ENGINES
    assert {"token_norm", "block", *(["hidden_norm"] if row.runs else [])} <= set(row.names)
    assert ("projection" in row.names) != ({"token_projection", "hidden_projection"} <= set(row.names))
    assert any(engine.support == "runs" for engine in row.engines.values()) or (row.cannot_run and row.sources)
    for engine in row.engines.values():
        assert (engine.support == "absent" and not engine.source) or engine.source.startswith("https://github.com/")
        assert (engine.support == "runs") or not (engine.trunk_roles != ("embedding", "output") or engine.unset)
        assert engine.support != "runs" or engine.missing != "unknown"
    assert all(source.startswith("https://") for source in row.sources)
    cited = [*row.sources, *(engine.source for engine in row.engines.values() if engine.support != "absent")]
    code = [source for source in cited if re.search(r"/blob/.*\.(py|cpp)", source)]
    assert all(re.search(r"/blob/(?!main|master).*#L\d+(-L\d+)?$", source) for source in code)
    assert row.runs == (row.cannot_run == "")
    assert set(row.own) <= set(row.names)
    assert ("streams" in (row.hidden, row.next_hidden)) == any(role.startswith("collapse") for role in row.names)


@loop("name", ROWS)
def test_inner_names_are_one_to_one(name):
    """Two paths of the block stored under one name."""
    table = ROWS[name].block_renames
    assert len(set(table.values())) == len(table)


@loop("name", ROWS)
def test_differing_engines_are_listed(name):
    """An engine that computes the head in another way must be named with the fact and the value."""
    row = ROWS[name]
    text = "\n".join(disagreements(row))
    for engine, entry in row.engines.items():
        for fact in ("embedded", "hidden", "next_hidden", "position0", "order"):
            value = getattr(entry, fact)
            if value is not None and value != getattr(row, fact):
                assert re.search(rf"^{fact}: .*{value} in [^;]*{engine}", text, re.M), (engine, fact)


def test_known_disagreements():
    """The three that matter most: MiMo-V2, Step in transformers, GLM-4.5's next_hidden in vLLM."""
    lines = disagreements(ROWS["mimo_v2"])
    assert "hidden: post in vllm, sglang; pre in llamacpp" in lines
    assert "order: recursive in vllm; unchained in sglang; chained in llamacpp" in lines
    assert any(line.startswith("output:") and "transformers" in line for line in disagreements(ROWS["step3p5"]))
    assert "next_hidden: pre in vllm; post in sglang, llamacpp, transformers" in disagreements(ROWS["glm4_moe"])


def test_conventions_of_an_engine():
    """What it takes otherwise than the row, and nothing else: neither what is unsaid nor what it takes alike."""
    row = ROWS["glm4_moe"]
    assert deviations(row, "vllm") == {"next_hidden": "pre", "position0": "zero"}
    assert deviations(row, "sglang") == {}
    assert deviations(replace(row, position0="zero"), "vllm") == {"next_hidden": "pre"}
    facts = {"embedded": "raw", "hidden": "pre", "next_hidden": "pre", "position0": "zero", "order": "chained"}
    other = replace(row, engines=row.engines | {"sglang": replace(row.engines["sglang"], **facts)})
    assert deviations(other, "sglang") == {name: each for name, each in facts.items() if each != getattr(row, name)}
    assert len(deviations(other, "sglang")) >= 4


# Typed, not derived: the families that `Head` computes as it stands, with what it goes by.
_USUAL = ("embedding_first", "post", "post", "w", "keep")
RUNS = {
    "deepseek_v3": _USUAL,
    "deepseek_v32": _USUAL,
    "deepseek_v4": ("embedding_first", "streams", "streams", "w", "keep"),
    "glm4_moe": _USUAL,
    "glm4v_moe": _USUAL,
    "glm4_moe_lite": _USUAL,
    "glm_moe_dsa": _USUAL,
    "glm5_next": _USUAL,
    "qwen4_exp": ("embedding_first", "streams", "streams", "1+w", "keep"),
    "glm_ocr": _USUAL,
    "qwen3_next": ("embedding_first", "post", "post", "1+w", "keep"),
    "qwen3_5": ("embedding_first", "post", "post", "1+w", "keep"),
    "qwen3_5_moe": ("embedding_first", "post", "post", "1+w", "keep"),
    "mimo_v2": _USUAL,
    "nemotron_h": _USUAL,
    "dots3_note": _USUAL,
    "ernie4_5_moe": ("embedding_first", "post", "pre", "w", "zero"),
    "step3p5": ("embedding_first", "pre", "pre", "1+w", "keep"),
    "bailing_hybrid": _USUAL,
    "hy_v3": _USUAL,
    "hy_v4": _USUAL,
    "exaone_moe": _USUAL,
    "inkling": ("hidden_first", "post", "post", "w", "keep"),
    "exaone4_5": _USUAL,
    "longcat_flash": _USUAL,
    "mellum": _USUAL,
    "minimax_m3": ("embedding_first", "post", "pre", "1+w", "keep"),
    "cohere2_moe": _USUAL,
}


def test_families_that_run():
    """A fact changed by accident trains and decodes without an error, at a worse acceptance."""
    facts = {
        row.name: (row.concat, row.hidden, row.next_hidden, row.norm_weight, row.position0)
        for row in rows()
        if row.runs
    }
    assert facts == RUNS
    assert set(CONFIGS) == set(RUNS), "a family that runs is built tiny and goes through every test"


def test_facts_of_the_others():
    """Where a family differs from DeepSeek-V3, by the names of the document."""
    assert {row.name for row in rows() if row.concat == "hidden_first"} == {"mimo", "inkling", "motif3"}
    assert {row.name for row in rows() if row.norm_weight == "1+w"} == {
        "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "interns2_mobius", "step3p5", "step5", "minimax_m3"
    }  # fmt: skip
    assert {row.name for row in rows() if row.hidden == "pre"} == {"step3p5", "step5", "kimi_k3"}
    assert {row.name for row in rows() if row.own} == {"step3p5", "step5", "dots3_note"}
    assert ROWS["deepseek_v4"].fp8.scale == "scale"
    assert "projection" not in ROWS["longcat_flash"].fp8.unquantized


def test_no_torch():
    """Audit answers in seconds: the rows must not cost a torch import."""
    code = "import sys, nextn.family_table as f; f.rows(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
