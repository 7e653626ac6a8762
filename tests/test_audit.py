"""audit: each rule finds its fault in a checkpoint of a published layout and keeps quiet on sound ones."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from artifacts import LAYERS, LAYOUTS, H, V, bf16, load_json, publish, tensors, values
from huggingface_hub.errors import StrictDataclassError
from packed import Case, quantize_folder
from quick import families, loop
from tiny import build
from transformers import CONFIG_MAPPING
from typer.main import get_command

import nextn
from nextn.audit_rules import IDS, audit
from nextn.audit_rules.config_claims import ACCEPTED
from nextn.audit_rules.separate import IDS as SEPARATE
from nextn.audit_rules.values import IDS as VALUES
from nextn.checkpoint.checkpoint import INDEX, Checkpoint
from nextn.checkpoint.foreign_names import foreign, of_adapter
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.cli import app
from nextn.edit.convert import convert
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, FamilyError
from nextn.family_table import by_name, rows


def findings(folder, rule=None):
    """All that is not a note, or all of one rule."""
    found = audit(Checkpoint.open(folder)).findings
    return [each for each in found if (each.rule == rule if rule else each.severity != "note")]


def drop(pattern):
    """A table without the tensors whose name fits."""

    def change(table):
        gone = [name for name in table if re.search(pattern, name)]
        assert gone
        for name in gone:
            del table[name]

    return change


def rename(pattern, to):
    def change(table):
        for name in [each for each in table if re.search(pattern, each)]:
            table[re.sub(pattern, to, name)] = table.pop(name)

    return change


def put(name, shape, dtype="BF16"):
    """Another tensor of this name: normal numbers, or any finite bytes."""
    data = bf16(values(name, shape, norm_weight=1.0, seed=1))
    if dtype != "BF16":
        size = int(np.prod(shape)) * (4 if dtype in ("F32", "I32") else 1)
        data = np.random.default_rng(0).integers(0, 64, size, "u1").tobytes()
    return lambda table: table.update({name: RawTensor(dtype, shape, data)})


def widen(pattern):
    """Matrices of these names in fp32, with the same values."""

    def change(table):
        for name, tensor in table.items():
            if re.search(pattern, name) and len(tensor.shape) > 1:
                data = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).tobytes()
                table[name] = RawTensor("F32", tensor.shape, data)

    return change


def as_mlx(table, layers=(0, 1, 2)):
    """kv_b_proj as MLX's loaders split it, per attention head."""
    for stem in [f"model.layers.{layer}.self_attn" for layer in layers]:
        drop(rf"{stem}\.kv_b_proj")(table)
        put(f"{stem}.embed_q.weight", (4, 16, 8))(table)
        put(f"{stem}.unembed_out.weight", (4, 8, 16))(table)


HEAD = r"^model\.layers\.2\."
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}}
INT4 = {
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    }
}  # fmt: skip
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}


PARTS = {
    "compressed-tensors": lambda rows, columns: {
        "weight_packed": ((rows, columns // 8), "I32"), "weight_scale": ((rows, 1), "BF16")},
    "gptq": lambda rows, columns: {"qweight": ((columns // 8, rows), "I32"), "scales": ((1, rows), "BF16"),
                                   "qzeros": ((1, rows // 8), "I32")},
    "modelopt": lambda rows, columns: {
        "weight": ((rows, columns // 2), "U8"), "weight_scale": ((rows, columns // 16), "F8_E4M3"),
        "weight_scale_2": ((), "F32")},
}  # fmt: skip


def pack(table, start="", method="compressed-tensors"):
    """Trunk and head, or what starts so, as a method packs them."""
    for name in [each for each in table if re.match(rf"{start}.*(self_attn|mlp)\..*_proj\.weight$", each)]:
        for part, (shape, dtype) in PARTS[method](*table.pop(name).shape).items():
            put(f"{name.removesuffix('weight')}{part}", shape, dtype)(table)


def pack_trunk(table, method="compressed-tensors"):
    """A recipe that passed the head by, and did not say so."""
    head = {name: table[name] for name in table if re.match(r"mtp\.", name)}
    pack(table, method=method)
    for name in [each for each in table if each.startswith("mtp.")]:
        del table[name]
    table.update(head)


# rule -> what breaks a checkpoint so, and what the finding must say
BROKEN = {
    "dropped by save_pretrained": (
        "head-absent", "error", "qwen3_5", {"change": drop("^mtp")}, "declares 1 MTP layer, and no tensor of it"),
    "dropped, config silent": (
        "head-absent", "warning", "qwen3_next", {"change": drop("^mtp"), "config": {"mtp_num_hidden_layers": None}},
        "has no mtp_num_hidden_layers; its default in Qwen3-Next is 1"),
    "one expert lost": (
        "head-partial", "error", "deepseek_v3", {"change": drop(HEAD + r"mlp\.experts\.3\.up_proj")},
        r"stores 31 tensors and lacks 1: model.layers.2.mlp.experts.3.up_proj\."),
    "projection and a norm lost": (
        "head-partial", "error", "glm4_moe", {"change": drop(HEAD + "(eh_proj|enorm)")},
        r"lacks 2: model.layers.2.eh_proj, model.layers.2.enorm\."),
    "block's attention lost": (
        "head-partial", "error", "qwen3_5", {"change": drop("^mtp.*self_attn")}, "lacks 6: mtp.layers.0.self_attn.k_n"),
    "own output head lost": (
        "head-partial", "error", "step3p5", {"change": drop("shared_head.output")},
        "lacks 1: model.layers.2.transformer.shared_head.output"),
    "an expert of a block of its own": (
        "head-partial", "error", "deepseek_v4", {"change": drop(r"^mtp.*experts\.3\.")}, r"lacks 3: mtp.0.*experts\.3"),
    "experts as transformers fuses them": (
        "experts-form", "warning", "deepseek_v3", {"change": lambda table: (
            drop(HEAD + r"mlp\.experts")(table), put("model.layers.2.mlp.experts.gate_up_proj", (4, 32, H))(table),
            put("model.layers.2.mlp.experts.down_proj", (4, H, 16))(table))}, "are fused.*; vLLM reads them split"),
    "experts fused that nobody reads so": (
        "experts-form", "error", "glm4_moe", {"change": lambda table: (
            drop(HEAD + r"mlp\.experts")(table), put("model.layers.2.mlp.experts.gate_up_proj", (4, 32, H))(table),
            put("model.layers.2.mlp.experts.down_proj", (4, H, 16))(table))}, "vLLM and SGLang read them split"),
    "a matrix of the fused experts lost": (
        "head-partial", "error", "qwen3_5_moe", {"change": lambda table: (
            drop("^mtp.*experts")(table), put("mtp.layers.0.mlp.experts.gate_up_proj", (4, 32, H))(table))},
        r"lacks 1: mtp.layers.0.mlp.experts.down_proj\."),
    "fused experts beside single ones": (
        "experts-twice", "error", "qwen3_5_moe", {"change": put("mtp.layers.0.mlp.experts.gate_up_proj", (4, 32, H))},
        "head are stored split .* and fused"),
    "fused experts beside single ones in the trunk": (
        "experts-twice", "error", "glm4_moe", {"change": put("model.layers.1.mlp.experts.gate_up_proj", (4, 32, H))},
        "layer 1 are stored split .* and fused"),
    "experts of the trunk in both forms": (
        "experts-twice", "error", "glm4_moe", {"change": lambda table: (
            put("model.layers.1.mlp.experts.gate_up_proj", (4, 32, H))(table),
            put("model.layers.1.mlp.experts.down_proj", (4, H, 16))(table))}, "layer 1 are stored split .* and fused"),
    "experts fused in part": (
        "experts-form", "error", "qwen3_5_moe", {"change": lambda table: (
            drop(r"^mtp.*experts.*(gate|up)_proj")(table),
            put("mtp.layers.0.mlp.experts.gate_up_proj", (4, 32, H))(table))}, "each with a part of them: split"),
    "experts of the trunk fused in part": (
        "experts-form", "warning", "glm4_moe", {"change": lambda table: (
            drop(r"layers\.1\..*experts\.\d.*(gate|up)_proj")(table),
            put("model.layers.1.mlp.experts.gate_up_proj", (4, 32, H))(table))}, "layer 1 .* each with a part of them"),
    "fused experts as modules": (
        "names-foreign", "error", "qwen3_5_moe", {"change": lambda table: (
            drop("^mtp.*experts")(table), put("mtp.layers.0.mlp.experts.gate_up_proj.weight", (4, 32, H))(table),
            put("mtp.layers.0.mlp.experts.down_proj.weight", (4, H, 16))(table))}, "fused experts with a module each"),
    "an engine's fused projections": (
        "names-foreign", "error", "qwen3_5", {"change": lambda table: (
            drop(r"^model.*mlp\.(gate|up)_proj")(table),
            *(put(f"model.layers.{layer}.mlp.gate_up_proj.weight", (4 * H, H))(table) for layer in range(LAYERS)))},
        r"2 tensors .*fused projections"),
    "kv_b_proj as MLX splits it": (
        "names-foreign", "error", "glm4_moe_lite", {"change": as_mlx}, "3 tensors .* MLX.* such as .*embed_q"),
    "a published head beside MLX's trunk": (
        "names-foreign", "error", "glm4_moe_lite", {"change": partial(as_mlx, layers=(0, 1))}, "2 tensors .* MLX"),
    "fused experts transposed": (
        "shape", "error", "qwen3_5_moe", {"change": lambda table: (
            drop("^mtp.*experts")(table), put("mtp.layers.0.mlp.experts.gate_up_proj", (4, H, 32))(table),
            put("mtp.layers.0.mlp.experts.down_proj", (4, 16, H))(table))}, r"\[16, 32\] per expert, transposed"),
    "a matrix of a trunk layer lost": (
        "trunk-partial", "error", "glm4_moe", {"change": drop(r"layers\.0\.self_attn\.k_proj\.weight")},
        "lacks model.layers.0: self_attn.k_proj: no loader"),
    "bf16 as integers of 16 bits": (
        "quantization", "error", "qwen3_5", {"change": lambda table: table.update({
            "mtp.fc.weight": replace(table["mtp.fc.weight"], dtype="U16")})}, "such as mtp.fc, as integers"),
    "norms of queries lost in every layer": (
        "trunk-partial", "error", "qwen3_5",
        {"change": drop(r"^mtp|\.q_norm"), "config": {"mtp_num_hidden_layers": 0}}, "self_attn.q_norm: no"),
    "values lost in every layer": (
        "trunk-partial", "error", "exaone_moe", {"change": drop(r"^model.*\.v_proj")}, "1: self_attn.v_proj: no"),
    "gates lost in every layer of a dense trunk": (
        "trunk-partial", "error", "mimo", {"change": drop(r"^model\.layers.*mlp\.gate_proj")}, "0: mlp.gate_proj, "),
    "routers lost in every layer": (
        "trunk-partial", "error", "step3p5", {"change": drop(r"layers\.[01]\.moe\.gate\.weight")}, "1: mlp.gate: no"),
    "experts lost in every layer": (
        "trunk-partial", "error", "mellum", {"change": drop(r"^model\.layers.*\.experts\.")}, "0: mlp.experts, model"),
    "biases of routers lost in every layer": (
        "trunk-partial", "error", "mimo_v2", {
            "change": drop(r"^model\.layers.*correction_bias"), "config": {"topk_method": "noaux_tc"}},
        "mlp.gate.e_score_correction_bias: no"),
    "half of a layer alone of its type": (
        "trunk-partial", "error", "qwen3_5", {"change": drop(r"^model.*layers\.1\.self_attn\.(q_proj|q_norm|k_proj)")},
        r"lacks model.layers.1: self_attn.k_proj, .*q_norm, .*q_proj: no loader"),
    "half of the only dense MLP": (
        "trunk-partial", "error", "glm4_moe", {"change": drop(r"layers\.0\.mlp\.(gate|up)_proj")},
        "lacks model.layers.0: mlp.gate_proj, model.layers.0: mlp.up_proj: no"),
    "a layer's attention lost": (
        "trunk-partial", "error", "glm4_moe", {"change": drop(r"layers\.0\.self_attn")}, "layers.0: self_attn:"),
    "half of the only linear attention": (
        "trunk-partial", "error", "qwen3_5", {"change": drop(r"linear_attn\.(A_log|conv1d|in_proj_qkv)")},
        "layers.0: linear_attn.A_log, .*linear_attn.conv1d, .*linear_attn.in_proj_qkv: no"),
    "a part of the only delta attention": (
        "trunk-partial", "error", "glm5_next", {"change": drop(r"\.dt_bias$")}, "self_attn.dt_bias: no"),
    "a part of the only Mamba layer": (
        "trunk-partial", "error", "nemotron_h", {"change": drop(r"\.D$")}, "mixer.D: no"),
    "experts of the trunk lost": (
        "trunk-partial", "error", "deepseek_v3", {"change": drop(r"layers\.1\.mlp\.experts\.[12]\.")},
        "lacks model.layers.1: mlp.experts.1, model.layers.1: mlp.experts.2: no"),
    "final norm lost": (
        "trunk-partial", "error", "qwen3_5", {"change": drop(r"^model\.(language_model\.)?norm\.")}, "the final norm"),
    "another number of heads": (
        "config-contradicts", "error", "glm4_moe", {"config": {"num_attention_heads": 8}},
        "q_proj.weight has 32 rows; num_attention_heads = 8"),
    "a dtype that torch does not have": (
        "config-contradicts", "error", "glm4_moe", {"config": {"dtype": "torch.bfloat16"}}, "dtype = 'torch.bfloat16'"),
    "another number of experts": (
        "config-contradicts", "error", "deepseek_v3", {"config": {"n_routed_experts": 8}}, "have 4 experts; n_"),
    "another hidden size": (
        "config-contradicts", "error", "glm4_moe", {"config": {"hidden_size": 2 * H}}, "has 32 columns; hidden"),
    "other layer types": (
        "config-contradicts", "error", "qwen3_next", {"config": {"layer_types": ["full_attention"] * 2}},
        "have linear_attn in layer 0 and self_attn in layer 1"),
    "a layer type for the head's layer": (
        "config-contradicts", "error", "qwen3_next", {"config": {"layer_types": [
            "linear_attention", "full_attention", "full_attention"]}}, "trunk has 2 layers; length of layer_types = 3"),
    "a bias of the head's norm": (
        "names-unknown", "error", "qwen3_5", {"change": put("mtp.norm.bias", (H,))}, "engine maps: mtp.norm.bias"),
    "counted one layer too few": (
        "names-unknown", "warning", "qwen3_next", {"config": {"num_hidden_layers": 1}},
        r"1 layer \(1\) beyond the trunk's 1"),
    "a trunk under another path": (
        "names-unknown", "error", "qwen3_5", {"change": rename(r"^model\.(language_model\.)?", "transformer.")},
        "of layers under another path, such as transformer.layers.0"),
    "a text model under the names of one with vision": (
        "names-unknown", "error", "bailing_hybrid", {"change": rename("^", "language_model.")},
        "under language_model., and config.json is of a model of text alone"),
    "two counts": (
        "config-contradicts", "error", "qwen3_5",
        {"config": {"text_config": {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers": 1}},
        "mtp_num_hidden_layers = 1 and text_config.mtp_num_hidden_layers = 0"),
    "two fields of one count": (
        "config-contradicts", "error", "deepseek_v3", {"config": {"num_mtp_layers": 3}}, "_layers = 1 and num_mtp_lay"),
    "two quantization methods": (
        "config-contradicts", "error", "qwen3_5", {"fp8": True, "config": {
            "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}}}},
        "quant_method = fp8, and gptq in text_config"),
    "tied, with an lm_head of its own": (
        "tied-differs", "error", "glm4_moe", {"config": {"tie_word_embeddings": True}}, "lm_head.weight differs from"),
    "an adapter that was not merged": (
        "names-foreign", "error", "qwen3_5", {"change": lambda table: (
            rename(r"^mtp\.fc\.", "mtp.fc.modules_to_save.default.")(table),
            rename(r"^(mtp.*q_proj)\.", r"\1.base_layer.")(table),
            put("mtp.layers.0.self_attn.q_proj.lora_A.default.weight", (8, H))(table))}, "an adapter"),
    "experts as in an engine's memory": (
        "names-foreign", "error", "qwen3_5_moe", {"change": lambda table: (
            drop("^mtp.*experts")(table), put("mtp.layers.0.mlp.experts.w13_weight", (4, 32, H))(table),
            put("mtp.layers.0.mlp.experts.w2_weight", (4, H, 16))(table))}, "memory of vLLM"),
    "the first of two heads": (
        "names-foreign", "warning", "qwen3_5_moe", {"change": rename(r"^mtp\.", "mtp.normal.")}, "vLLM drops them"),
    "the second of two heads": (
        "names-foreign", "note", "qwen3_5_moe", {"change": put("mtp.sci.fc.weight", (8, H))}, "LMDeploy alone"),
    "KTransformers' experts": (
        "names-foreign", "error", "deepseek_v3", {"change": lambda table: (
            table.clear(), put("blk.1.ffn_up_exps.0.numa.0.weight", (8, 8), "I8")(table))}, "KTransformers alone"),
    "experts numbered behind their weight": (
        "names-foreign", "error", "qwen3_5_moe", {"change": rename(
            r"^(.*experts)\.(\d+)\.(\w+)\.weight$", r"\1.\3.weight\2")}, "36 tensors .*numbered behind their weight"),
    "a compiled model": (
        "names-foreign", "error", "glm4_moe", {"change": rename("^", "_orig_mod.")}, "a wrapper of torch"),
    "tied on one level, without an lm_head": (
        "trunk-missing", "error", "qwen3_5", {"change": drop("^lm_head"), "config": {
            "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}}, "lm_head shared"),
    "HY-V4 as transformers saves it": (
        "names-foreign", "error", "hy_v4", {"change": rename(r"mlp\.gate_proj", "mlp.linear_gate")}, "1 tensor .*Y-V4"),
    "names of a GGUF file": (
        "names-foreign", "error", "glm4_moe", {"change": rename(r"^model\.layers\.2\.", "blk.2.nextn.")}, "llama.cpp"),
    "a name of another layer class": (
        "names-unknown", "error", "glm4_moe", {"change": put("model.layers.2.self_attn.kv_b_proj.weight", (8, H))},
        "no known engine maps: model.layers.2.self_attn.kv_b_proj.weight;"),
    "a tensor more in the projection": (
        "names-unknown", "error", "qwen3_5", {"change": put("mtp.fc.router.weight", (8, H))}, "maps: mtp.fc.router"),
    "counted as a layer": (
        "head-elsewhere", "error", "glm4_moe", {"config": {"num_hidden_layers": LAYERS + 1}},
        "Layer 2 holds the head's eh_proj, enorm, hnorm and shared_head.norm, and the config counts it"),
    "a layer too far": (
        "head-elsewhere", "error", "glm4_moe", {"change": rename(r"layers\.2\.", "layers.5.")},
        "stored as layer 5; with 2 trunk layers, engines look for it as layer 2"),
    "another family's layout": (
        "head-elsewhere", "error", "deepseek_v3", {"change": lambda table: (
            rename(HEAD + "enorm", "mtp.pre_fc_norm_embedding")(table),
            rename(HEAD + "hnorm", "mtp.pre_fc_norm_hidden")(table), rename(HEAD + "eh_proj", "mtp.fc")(table),
            drop(HEAD)(table))}, "in the layout of qwen3_next.*vLLM, SGLang.* look.*at model.layers.2"),
    "a wrapper before the head's names": (
        "head-elsewhere", "error", "qwen3_5", {"change": rename(r"^mtp\.", "model.language_model.mtp.")},
        "prefix before mtp.: vLLM and SGLang read"),
    "another wrapper, as MLX writes it": (
        "head-elsewhere", "error", "qwen3_5_moe", {"change": rename(r"^mtp\.", "language_model.mtp.")}, "prefix befor"),
    "a dense block where every layer has experts": (
        "head-partial", "error", "qwen3_5_moe", {"change": lambda table: (
            drop(r"^mtp.*mlp\.")(table), *(put(f"mtp.layers.0.mlp.{name}_proj.weight", (H, H))(table)
                                           for name in ("gate", "up", "down")))}, "lacks 17: mtp.layers.0.mlp.exp"),
    "config silent": (
        "head-undeclared", "warning", "qwen3_5", {"config": {"mtp_num_hidden_layers": 0}}, "stored: 1, declared: 0"),
    "one of three lost": (
        "modules-missing", "error", "step3p5", {"modules": 3, "change": drop(r"layers\.3\.")}, "3 MTP layers; of 1 no"),
    "the first of three lost": (
        "modules-missing", "error", "step3p5", {"modules": 3, "change": drop(r"layers\.2\.")}, "3 MTP layers; of 0 no"),
    "nobody's names": (
        "names-unknown", "error", "qwen3_5", {"change": rename("^mtp", "draft.mtp_head")},
        "no known engine maps: draft.mtp_head.*at mtp.layers.0"),
    "config counts too few layers": (
        "names-unknown", "warning", "glm4_moe",
        {"change": drop(HEAD), "config": {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}},
        r"1 layer \(1\) beyond the trunk's 1"),
    "norm of another width": (
        "shape", "error", "glm4_moe", {"change": put("model.layers.2.enorm.weight", (H // 2,))}, r"is \[16\]"),
    "projection of one half": (
        "shape", "error", "qwen3_5", {"change": put("mtp.fc.weight", (H, H))}, r"mtp.fc.weight is \[32, 32\]"),
    "block of another width": (
        "shape", "error", "glm4_moe", {"change": put("model.layers.2.self_attn.o_proj.weight", (H, 2 * H))}, "o_proj"),
    "own output of another vocabulary": (
        "shape", "error", "step3p5",
        {"change": put("model.layers.2.transformer.shared_head.output.weight", (V // 2, H))}, r"is \[32, 32\]"),
    "vocabulary grown in the config": (
        "vocabulary", "error", "glm4_moe", {"config": {"vocab_size": V + 8}},
        "vocab_size is 72, the rows are 64 of lm_head.weight and 64 of model"),
    "trunk's embedding lost": (
        "trunk-missing", "error", "deepseek_v4", {"change": rename("^embed", "model.embed_tokens")},
        "not stored as embed.weight; model.embed_tokens.weight is stored, a name of another family: .*vLLM"),
    "top-level embed and head alone": (
        "shared-missing", "warning", "deepseek_v4", {"copies": False},
        "embed.weight and head.weight only.*vLLM versions.*initial values.*SGLang uses the trunk's"),
    "pipeline-parallel vLLM": (
        "shared-missing", "note", "deepseek_v3", {"copies": False},
        "engines use the trunk's, except vLLM with pipeline parallelism"),
    "stale copy of the embedding": (
        "copy-differs", "warning", "glm4_moe", {"change": put("model.layers.2.embed_tokens.weight", (V, H))},
        "embed_tokens.weight: in its values; llama.cpp uses the copy; vLLM, SGLang and transformers use the trunk's"),
    "copy of a smaller vocabulary": (
        "copy-differs", "warning", "glm4_moe", {"change": put("model.layers.2.embed_tokens.weight", (V - 8, H))},
        r"BF16 \[56, 32\] against BF16 \[64, 32\]"),
    "own head replaced": (
        "own-head-overwritten", "note", "step3p5", {}, "has its own lm_head; transformers uses the trunk's instead"),
    "no layer 61": ("layer-index", "note", "deepseek_v3", {}, "transformers loads .* as layer 61 only; here it is l"),
    "several modules as one": (
        "too-many-modules", "note", "mimo_v2", {"modules": 3}, "3 MTP layers are stored; vLLM uses 1"),
    "a model of one expert": (
        "single-expert", "error", "glm4_moe",
        {"change": drop(r"mlp\.experts\.[123]\."), "config": {"n_routed_experts": 1, "num_experts_per_tok": 1}},
        "1 routed expert in 1 group: .*vLLM on a CPU .*first pass; llama.cpp needs more experts than groups"),
    "as many groups as experts": (
        "single-expert", "error", "deepseek_v3", {"config": {"n_group": 4}}, "4 routed experts in 4 groups"),
    "a head of one expert": (
        "head-partial", "error", "glm4_moe", {"change": drop(HEAD + r"mlp\.experts\.[123]\.")}, r"lacks 9:"),
    "ignored on load": ("engine-ignores", "note", "qwen3_5", {}, "transformers skips the head"),
    "lost at conversion": ("engine-drops", "note", "deepseek_v3", {}, "llama.cpp loses the head"),
    "refused": ("engine-refuses", "note", "bailing_hybrid", {}, "transformers refuses"),
    "kept without a graph": ("engine-loads", "note", "glm_ocr", {}, "llama.cpp stores the head and cannot"),
    "unknown to engines": ("engine-absent", "note", "mellum", {}, "vLLM, SGLang and llama.cpp lack this fam"),
    "not run here": ("not-run", "note", "nemotron_h_puzzle", {}, "transformers has no trunk of this type"),
    "packed trunk, plain head, int4": (
        "quantization", "error", "qwen3_5", {"change": pack_trunk, "config": INT4},
        r"stores 8 matrices, such as mtp.*, unquantized, .*\(compressed-tensors\) has engines build"),
    "packed trunk, plain head, GPTQ": (
        "quantization", "warning", "qwen3_5", {"change": partial(pack_trunk, method="gptq"), "config": GPTQ},
        ", unquantized, and .* has SGLang build them"),
    "packed trunk, fused plain experts of the head, the rest listed": (
        "quantization", "error", "qwen3_5_moe", {"change": lambda table: (
            pack_trunk(table), drop("^mtp.*experts")(table),
            put("mtp.layers.0.mlp.experts.gate_up_proj", (4, 32, H))(table),
            put("mtp.layers.0.mlp.experts.down_proj", (4, H, 16))(table)), "config": {
            "quantization_config": INT4["quantization_config"] | {"ignore": ["lm_head", "re:mtp(?!.*experts)"]}}},
        "stores 2 matrices, such as mtp.layers.0.mlp.experts.down_proj, .*_up_proj, unquantized"),
    "packed trunk, plain head, ModelOpt": (
        "quantization", "warning", "qwen3_5", {"change": partial(pack_trunk, method="modelopt"), "config": MODELOPT},
        "has vLLM build them quant"),
    "packed head, left out": (
        "quantization", "error", "qwen3_5",
        {"change": pack, "config": {"quantization_config": INT4["quantization_config"] | {"ignore": ["re:mtp.*"]}}},
        ", as compressed, .*build them unquantized"),
    "packed trunk, plain head, listed without the names that SGLang asks for": (
        "quantization", "warning", "qwen3_5", {"change": pack_trunk, "config": {
            "quantization_config": INT4["quantization_config"] | {"ignore": ["lm_head", "mtp.fc", *(
                f"mtp.layers.0.{name}_proj" for name in (
                    *(f"self_attn.{each}" for each in "qkvo"), "mlp.gate", "mlp.up", "mlp.down"))]}}},
        r"SGLang joins .*self_attn\.qkv_proj, .*mlp\.gate_up_proj"),
    "packed head, no config": (
        "quantization", "error", "qwen3_5", {"change": lambda table: pack(table, "mtp")},
        r"\(no quantization\) has engines build them un"),
    "packed trunk, no config": (
        "quantization", "error", "qwen3_5", {"change": lambda table: pack(table, "(?!mtp)")},
        "The trunk stores .* as codes with scales, and the config declares no quantization"),
    "embedding in codes, no config": (
        "quantization", "error", "qwen3_5",
        {"change": put("lm_head.weight", (V, H // 8), "I32")},
        "stores 1 matrix, such as lm_head, as codes"),
    "projection in fp8": (
        "quantization", "error", "deepseek_v3", {"fp8": True, "change": lambda table: (
            put("model.layers.2.eh_proj.weight", (H, 2 * H), "F8_E4M3")(table),
            put("model.layers.2.eh_proj.weight_scale_inv", (1, 1), "F32")(table))},
        "vLLM builds the projection unquantized"),
    "a config that says nothing": (
        "quantization", "error", "qwen3_5", {"config": {"quantization_config": "fp8"}}, "must be an object"),
    "dequantized, config kept": (
        "quantization-unused", "error", "deepseek_v3", {"config": FP8},
        "declares fp8, and no tensor of trunk or head is quantized"),
    "int4 config, bf16 weights": (
        "quantization-unused", "error", "qwen3_5", {"config": {"text_config": INT4}}, "declares compressed-tensors"),
    "scales lost": (
        "scale-missing", "error", "deepseek_v3", {"fp8": True, "change": drop(HEAD + ".*weight_scale_inv")},
        "matrices, .* in fp8 without a scale"),
    "scale of a copy that is unquantized": (
        "scale-unused", "error", "deepseek_v3", {"change": put(
            "model.layers.2.shared_head.head.weight_scale", (V, 1))}, "beside unquantized matrices"),
    "scales of a trunk that was dequantized": (
        "scale-unused", "error", "deepseek_v3",
        {"change": put("model.layers.1.self_attn.o_proj.weight_scale_inv", (1, 1), "F32")}, "1 scale of the trunk"),
    "head in fp32, trunk in bf16": (
        "precision-higher", "note", "qwen3_5", {"change": widen(r"^mtp\.")}, "in fp32, the trunk in 16 bits"),
    "head in fp8, trunk in bf16": (
        "precision-lower", "warning", "qwen3_5", {"change": lambda table: (
            put("mtp.layers.0.self_attn.o_proj.weight", (H, H), "F8_E4M3")(table),
            put("mtp.layers.0.self_attn.o_proj.weight_scale_inv", (1, 1), "F32")(table))}, "in 8 bits, .* 16"),
}  # fmt: skip


def well_worded(finding):
    """Sentences, and commands that the command line takes: alone, or in backticks inside a sentence."""
    assert finding.found.endswith(".")
    assert finding.valid.endswith(".")
    alone = finding.fix.startswith("nextn ")
    assert alone or (finding.fix[0].isupper() and finding.fix.endswith("."))
    for command in [finding.fix] if alone else re.findall("`(nextn .+?)`", finding.fix):
        verb, *args = shlex.split(command)[1:]
        get_command(app).commands[verb].make_context(verb, args or ["MODEL"])
    assert alone or "nextn " not in re.sub("`.+?`", "", finding.fix)


@pytest.mark.one_case
@pytest.mark.parametrize("fault", BROKEN)
def test_rule(fault, tmp_path):
    """A rule that does not see its fault, calls it by another name, or says it without place, remedy or fact."""
    rule, severity, family, options, says = BROKEN[fault]
    found = findings(publish(tmp_path, family, **options), rule)
    assert found, [each.rule for each in findings(tmp_path)]
    assert found[0].severity == severity
    assert re.search(says, found[0].found), found[0].found
    for each in found:
        assert each.place
        well_worded(each)


@loop("fault", BROKEN)
def test_one_cause_one_finding(fault, tmp_path):
    """A fault that sets off other rules, too, hides its cause."""
    rule, _, family, options, _ = BROKEN[fault]
    others = {each.rule for each in findings(publish(tmp_path, family, **options))} - {rule}
    allowed = {
        "head in fp8, trunk in bf16": {"quantization"},
        "packed head, no config": {"quantization"},
        "projection in fp8": {"shape"},
        "a dense block where every layer has experts": {"names-unknown"},
    }
    assert others <= allowed.get(fault, set())


def test_every_rule_has_its_fault():
    """A rule without a test."""
    elsewhere = {"index", "side-file", "stored-twice", "head-none", *SEPARATE, *VALUES}  # SEPARATE: test_export
    elsewhere |= {
        "draft-model-stored",
        "draft-model-absent",
        "head-withheld",
        "experts-pruned",
        "query-head",
    }  # own test files
    assert {rule for rule, *_ in BROKEN.values()} | elsewhere == set(IDS)


UNUSED_BUT_FINE = {
    "quantized on load": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "torchao": {"quant_method": "torchao", "quant_type": "int8wo"},
    "only the KV cache": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    "everything left out": FP8["quantization_config"] | {"modules_to_not_convert": ["model.layers"]},
}


@pytest.mark.parametrize("config", UNUSED_BUT_FINE)
def test_configs_that_unquantized_weights_may_have(config, tmp_path):
    """A method that engines apply to bf16 files, or a config that covers none of the weights."""
    publish(tmp_path, "glm4_moe", config={"quantization_config": UNUSED_BUT_FINE[config]})
    assert not findings(tmp_path, "quantization-unused")


def test_one_quantized_matrix_is_used(tmp_path):
    """A mixed checkpoint: the head's own disagreement with the config is what is wrong."""
    publish(tmp_path, "deepseek_v3", config=FP8, change=lambda table: (
        put("model.layers.0.self_attn.o_proj.weight", (H, 32), "F8_E4M3")(table),
        put("model.layers.0.self_attn.o_proj.weight_scale_inv", (1, 1), "F32")(table)))  # fmt: skip
    assert not findings(tmp_path, "quantization-unused")


def test_the_fix_of_an_unused_config(tmp_path):
    """The keys that the finding names, in the files that it names, are all that must go."""
    folder = publish(tmp_path, "deepseek_v3", config=FP8)
    write_json(folder / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    (finding,) = findings(folder, "quantization-unused")
    keys = re.findall(r"the key (\S+) from (\S+\.json)", finding.fix)
    assert keys == [("quantization_config", "config.json"), ("quantization", "hf_quant_config.json")]
    for key, file in keys:
        config = json.loads((folder / file).read_text())
        del config[key]
        write_json(folder / file, config)
    assert audit(Checkpoint.open(folder)).clean


def variants(name):
    family = by_name(name)
    yield {}
    yield {"shards": 3}
    yield {"copies": False} if name != "deepseek_v4" else {}
    yield from ({"wrapper": wrapper} for wrapper in family.wrappers if wrapper != "model.mtp.")  # no engine reads it
    if family.max_modules != 1:
        yield {"modules": 2}
    if family.fp8:
        yield {"fp8": True}


@pytest.mark.more
@pytest.mark.parametrize("name", families(LAYOUTS))
def test_clean(name, tmp_path):
    """A false alarm on a sound checkpoint, in any layout and form that the family is published in."""
    for place, options in enumerate(variants(name)):
        report = audit(Checkpoint.open(publish(tmp_path / str(place), name, **options)))
        assert report.clean, (options, [each for each in report.findings if each.severity != "note"])
        assert report.modules == tuple(range(report.declared))


@pytest.mark.parametrize("file", ["model.safetensors", "head.safetensors"])
def test_head_alone_is_no_fault(tmp_path, file):
    """What `extract` and `train --head-only` write has no trunk and no index, and is not to be blamed for it."""
    publish(tmp_path, "glm4_moe", change=drop(r"^(model\.(layers\.[01]|embed|norm)|lm_head)"))
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    assert not findings(tmp_path)


def test_index_and_files(tmp_path):
    """A shard that never came, tensors that the index puts elsewhere or does not list: each file once."""
    publish(tmp_path, "glm4_moe", shards=4)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["model.layers.2.enorm.weight"]
    moved = next(name for name, file in index["weight_map"].items() if file.startswith("model-00001"))
    index["weight_map"][moved] = "model-00003-of-00004.safetensors"
    write_json(tmp_path / INDEX, index)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    said = " | ".join(f"{each.place} {each.found}" for each in findings(tmp_path, "index"))
    assert "model-00002-of-00004.safetensors, which is absent" in said
    assert "The index lists not or elsewhere 2 tensors in" in said
    assert "1 tensor of the head among them" in said


def test_a_head_lost_beside_layers_that_the_config_does_not_count(tmp_path):
    """They are not the head's where it has names of its own: both losses are named."""
    publish(tmp_path, "qwen3_next", change=drop(r"mtp\."), config={"num_hidden_layers": 1})
    assert findings(tmp_path, "head-absent")
    assert findings(tmp_path, "names-unknown")


EXPERT_FIELDS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def test_names_of_dtypes(tmp_path):
    """Those that torch has, under both names of the field."""
    folder = publish(tmp_path, "glm4_moe")
    config = json.loads((folder / "config.json").read_text())
    for name in ("bfloat16", "half", "float8_e4m3fn", "bf16", "float12"):
        write_json(folder / "config.json", config | {"torch_dtype": name})
        assert len(findings(folder, "config-contradicts")) == (not hasattr(torch, name))


def test_one_quantization_method_on_both_levels(tmp_path):
    folder = publish(tmp_path, "qwen3_5", fp8=True)
    config = load_json(folder / "config.json")
    inner = config.get("text_config", {}) | {"quantization_config": config["quantization_config"]}
    write_json(folder / "config.json", config | {"text_config": inner})
    assert not findings(folder, "config-contradicts")


def test_config_of_the_other_kind(tmp_path):
    """The config of a mixture of experts beside a dense model of the same family, and the other way."""
    publish(tmp_path / "dense", "qwen3_5", config={"model_type": "qwen3_5_moe_text"} | EXPERT_FIELDS)
    sparse = publish(tmp_path / "sparse", "qwen3_5_moe", config={"model_type": "qwen3_5_text"})
    config = json.loads((sparse / "config.json").read_text())
    write_json(sparse / "config.json", {key: value for key, value in config.items() if key not in EXPERT_FIELDS})
    expected = {"dense": ("num_experts", "No layer of the trunk has experts"),
                "sparse": ("model_type", "every layer of the trunk has experts")}  # fmt: skip
    for name, (field, words) in expected.items():
        (found,) = findings(tmp_path / name, "config-contradicts")
        assert found.place == f"config.json: {field}"
        assert found.found.startswith(words)


def test_layers_under_two_paths(tmp_path):
    """Half of a text-only export beside half of a vision-language model's: each loader finds one of them."""

    def half(table):
        for name in [each for each in table if ".layers.1." in each and not each.startswith("mtp.")]:
            table[name.replace("language_model.", "")] = table.pop(name)

    publish(tmp_path, "qwen3_5", wrapper="model.language_model.", change=half)
    (found,) = findings(tmp_path, "names-unknown")
    assert "and 11 not, such as model.layers.1." in found.found


def test_names_of_text_alone_under_a_vision_language_class(tmp_path):
    """A text-only export beside the base's config.json: transformers finds no layer, with the other class all."""

    def text_only(table):
        for name in [*table]:
            table[name.replace("language_model.", "")] = table.pop(name)

    for kind, number in {"ForConditionalGeneration": 1, "ForCausalLM": 0}.items():
        config = {"architectures": [f"Qwen3_5{kind}"]}
        folder = publish(tmp_path / kind, "qwen3_5", wrapper="model.language_model.", change=text_only, config=config)
        found = findings(folder, "names-unknown")
        assert [each.fix.endswith("to ['Qwen3_5ForCausalLM'].") for each in found] == [True] * number
    joint = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    whole = publish(tmp_path / "whole", "qwen3_5", wrapper="model.language_model.", config=joint)
    assert findings(whole, "names-unknown") == []


def test_engines_of_the_family_are_not_those_of_foreign_names(tmp_path):
    """Intern-S2-Preview's heads: that vLLM runs the family must not be said beside that it drops these names."""
    publish(tmp_path, "qwen3_5_moe", change=rename(r"^mtp\.", "mtp.normal."))
    assert {each.rule for each in audit(Checkpoint.open(tmp_path)).findings} == {"names-foreign"}


def headless(table):
    for name in [each for each in table if each.startswith("mtp.")]:
        del table[name]


def test_a_draft_model_in_a_subfolder_is_no_head(tmp_path):
    """A converter that keeps DSpark's draft model in a folder of its own: there is no head to restore from it."""
    publish(tmp_path, "deepseek_v4", change=headless, config={"num_nextn_predict_layers": 1})
    (tmp_path / "dspark").mkdir()
    names = ("mtp.0.ffn_norm.weight", "mtp.2.markov_head.markov_w1.weight")
    write_safetensors(
        tmp_path / "dspark/model.safetensors", {each: RawTensor("BF16", (4,), bytes(8)) for each in names}
    )
    shutil.copy(tmp_path / "config.json", tmp_path / "dspark")
    [absent] = findings(tmp_path, "head-absent")
    assert "dspark" not in absent.found + absent.fix


def test_a_count_that_is_absent_is_not_called_declared(tmp_path):
    """Unsloth's exports have neither the head nor its count: what loads them names the family's default."""
    publish(tmp_path, "qwen3_5", change=headless)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mtp_num_hidden_layers"]
    write_json(tmp_path / "config.json", config)
    with pytest.raises(CheckpointError, match=r"config.json has no mtp_num_hidden_layers, whose default is 1"):
        nextn.load(tmp_path)


def test_head_in_a_file_that_never_came(tmp_path):
    """The index knows where the head is; restoring it from elsewhere would be the longer way."""
    publish(tmp_path, "glm4_moe", shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    head = {name for name in index["weight_map"] if name.startswith("model.layers.2.")}
    index["weight_map"] |= dict.fromkeys(head, "model-00003-of-00003.safetensors")
    write_json(tmp_path / INDEX, index)
    opened = Checkpoint.open(tmp_path)
    for file, header in opened.headers.items():
        rest = {name: opened.raw(name) for name in header.tensors if name not in head}
        write_safetensors(tmp_path / file, rest)
    [absent] = findings(tmp_path, "head-absent")
    assert "the index puts 34 tensors of it in model-00003-of-00003.safetensors, which is absent" in absent.found
    assert absent.fix.startswith("Download model-00003-of-00003.safetensors again, or run `nextn restore ")
    (index_fix,) = (each.fix for each in findings(tmp_path, "index"))
    assert f"or run `nextn restore {tmp_path} " in index_fix
    with pytest.raises(CheckpointError, match=r"Download model-00003-of-00003.*again, or run `nextn restore"):
        nextn.load(tmp_path)
    index["weight_map"]["model.layers.1.mlp.experts.9.up_proj.weight"] = "model-00004-of-00004.safetensors"
    write_json(tmp_path / INDEX, index)
    with pytest.raises(CheckpointError, match=r"Download model-00004-of-00004\.safetensors again") as caught:
        nextn.restore(tmp_path, "tiny", family="glm4_moe")
    texts = [str(caught.value)] + [each.fix for each in findings(tmp_path) if each.rule in ("head-absent", "index")]
    with pytest.raises(CheckpointError, match="Download") as caught:
        nextn.load(tmp_path)
    assert "nextn restore" not in " ".join([*texts, str(caught.value)])  # which refuses a trunk that is not complete


def test_parts_that_a_lost_file_may_hold(tmp_path):
    """The only shared experts are in a shard that never came: no field of config.json is wrong."""
    publish(tmp_path, "glm4_moe")
    folder = tmp_path / "cut"
    opened = Checkpoint.open(tmp_path)
    cut = {name: opened.raw(name) for name in opened.tensors if "layers.1.mlp.shared" not in name}
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    write_safetensors(folder / "model-00001-of-00002.safetensors", cut)
    files = {name: f"model-0000{1 + (name not in cut)}-of-00002.safetensors" for name in opened.tensors}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": files})
    assert findings(folder, "index")
    assert not findings(folder, "config-contradicts")


@pytest.mark.parametrize(
    ("name", "severity", "says"),
    [("glm4_moe", "warning", "SGLang reads it"), ("qwen3_5", "error", "no engine"), ("inkling", "note", "no engine")],
)
def test_side_file(name, severity, says, tmp_path):
    """A head in mtp.safetensors that the index does not name: who reads it all the same is the row's to say."""
    [found] = findings(publish(tmp_path, name, shards=2, side_file="mtp.safetensors"), "side-file")
    assert (found.severity, found.place) == (severity, "mtp.safetensors")
    assert says in found.found


@pytest.mark.parametrize(("same", "severity"), [(True, "note"), (False, "warning")])
def test_stored_twice(same, severity, tmp_path):
    """Two spellings of every tensor: harmless if equal, and one finding."""

    def twice(table):
        head = {name: values for name, values in table.items() if name.startswith("mtp.")}
        other = {name: values if same else RawTensor("BF16", values.shape, bytes(len(values.data)))
                 for name, values in head.items()}  # fmt: skip
        table |= {f"model.{name}": values for name, values in other.items()}

    [found] = findings(publish(tmp_path, "qwen3_5", change=twice), "stored-twice")
    assert (found.severity, "15 tensors" in found.found, "model.mtp.fc.weight, mtp.fc.weight" in found.found) == (
        severity, True, True)  # fmt: skip
    notes = convert(tmp_path, tmp_path / "out", to="qwen3_5", dry_run=True).notes
    assert len([note for note in notes if "with other values than" in note]) == (not same)


@pytest.mark.parametrize(
    ("pattern", "fix"), [(r"^mtp\.", "--force"), ("down_proj", "zero_to_fp32"), (".", "zero_to_fp32")]
)
def test_weights_without_values(pattern, fix, tmp_path):
    """DeepSpeed's ZeRO-3: one finding, and no other of the same tensors."""
    empty = [name for name in tensors("qwen3_5") if re.search(pattern, name)]
    nothing = dict.fromkeys(empty, RawTensor("BF16", (0,), b""))
    folder = publish(tmp_path, "qwen3_5", change=lambda table: table.update(nothing))
    [found] = [each for each in audit(folder).findings if each.rule != "engine-ignores"]
    assert (found.rule, found.severity) == ("shape", "error")
    assert f"{len(empty)} tensor" in found.found
    assert fix in found.fix


def tokenizer(folder, **parts):
    vocab = {f"t{place}": place for place in range(V - 2)}
    write_json(folder / "tokenizer.json", {"model": {"vocab": vocab}, "added_tokens": []} | parts)
    return folder


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"added_tokens": [{"id": V - 1}]}, None),
        ({"added_tokens": [{"id": V}]}, "warning: .* added tokens with ids up to 64, the embedding has 64 rows"),
        ({"model": {"vocab": [["a", 0.0]] * (V + 1)}}, "error: .* ids up to 64"),
        ({"model": {"vocab": [["a", 0.0]] * V}}, None),
        ({"model": 5, "added_tokens": {"id": 99}}, None),
    ],
)
def test_tokenizer(parts, says, tmp_path):
    """Added tokens that the embedding has no row for are read past its end; a small tokenizer is padding."""
    found = findings(tokenizer(publish(tmp_path, "glm4_moe"), **parts), "vocabulary")
    assert [bool(re.search(says, f"{each.severity}: {each.found}")) for each in found] == ([True] if says else [])


def test_broken_tokenizer_is_one_finding(tmp_path):
    """A pointer file of Git LFS in place of tokenizer.json must not hide what else is wrong."""
    publish(tmp_path, "glm4_moe", config={"vocab_size": V + 1})
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    assert {each.place for each in findings(tmp_path)} == {"config.json: vocab_size", "tokenizer.json"}


def test_copies_are_compared_beyond_the_first_bytes(tmp_path):
    """A copy that differs in its middle alone, as after training some rows of the embedding."""
    rows = 4096

    def grow(table):
        for name in [each for each in table if re.search("embed_tokens|head.weight", each)]:
            table[name] = RawTensor("BF16", (rows, H), bytes(rows * H * 2))
        data = bytearray(rows * H * 2)
        data[100_000:160_000] = b"\1" * 60_000
        table["model.layers.2.embed_tokens.weight"] = RawTensor("BF16", (rows, H), bytes(data))

    found = findings(publish(tmp_path, "glm4_moe", change=grow, config={"vocab_size": rows}), "copy-differs")
    assert [each.place for each in found] == ["model.layers.2.embed_tokens.weight"]


def test_sizes_that_the_config_names_otherwise(tmp_path):
    """Step-3.5's released config.json: key heads under another name, and more heads in some layers than in others."""
    path = publish(tmp_path, "step3p5", change=put("model.layers.0.self_attn.q_proj.weight", (96, H))) / "config.json"
    config = json.loads(path.read_text())
    own = {"num_attention_groups": config.pop("num_key_value_heads")}
    own["attention_other_setting"] = {"num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 8}
    for changed, is_wrong in ((own, False), ({"num_key_value_heads": 4}, True)):
        path.write_text(json.dumps(config | changed))
        found = [each.found for each in audit(Checkpoint.open(tmp_path)).findings if each.rule == "config-contradicts"]
        assert [("k_proj.weight has 16 rows" in each) for each in found] == [True] * is_wrong, found


def test_undecidable_checkpoints(tmp_path):
    """No row or no layer count: an error that names what is missing and, where it can, the families that would fit."""
    with pytest.raises(FamilyError, match=r"names match the layout of deepseek_v3, .*glm4_moe.*try --family NAME"):
        audit(Checkpoint.open(publish(tmp_path / "a", "glm4_moe", config={"model_type": "mine"})))
    with pytest.raises(CheckpointError, match="has num_hidden_layers = 'many'"):
        audit(Checkpoint.open(publish(tmp_path / "b", "glm4_moe", config={"num_hidden_layers": "many"})))
    report = audit(Checkpoint.open(tmp_path / "a"), family="glm4_moe")
    assert (report.family, report.clean) == ("glm4_moe", True)


def test_worst_first_and_without(tmp_path):
    """A table whose first line is a note, or --ignore that leaves the verdict as it was."""
    publish(tmp_path, "deepseek_v3", change=drop(HEAD), config={"vocab_size": 1})
    report = audit(Checkpoint.open(tmp_path))
    assert [each.severity for each in report.findings] == sorted(each.severity for each in report.findings)
    assert not report.clean
    assert report.without({"head-absent", "vocabulary"}).clean


MENDED = ("head-absent", "head-partial", "modules-missing", "quantization", "scale-missing", "scale-unused")
RESTORED = [fault for fault, (rule, *_) in BROKEN.items() if rule in MENDED and fault != "a config that says nothing"]


@pytest.mark.one_case
@pytest.mark.parametrize("fault", RESTORED)
def test_restore_fixes_findings(fault, tmp_path):
    """A command that is refused, or that is not enough."""
    rule, _, family, options, _ = BROKEN[fault]
    folder = publish(tmp_path / "broken", family, **options)
    fix = findings(folder, rule)[0].fix
    if not fix.startswith("nextn restore"):
        return
    restore(folder, publish(tmp_path / "base", family, modules=options.get("modules", 1)), force="--force" in fix)
    assert not [each for each in findings(folder, rule) if each.severity == "error"]


@loop(("lost", "valid"), [("2", "All 3."), ("3", "All 3, or num_nextn_predict_layers = 1."), ("[34]", "= 1.")])
def test_number_of_modules_that_engines_find(lost, valid, tmp_path):
    """They count from the first: a head without it, or with a gap, is not declared by a smaller number."""
    publish(tmp_path, "step3p5", modules=3, change=drop(rf"layers\.{lost}\."))
    (finding,) = [each for each in findings(tmp_path) if each.severity == "error"]
    assert finding.valid.endswith(valid)


def test_no_family_has_names_of_running_programs():
    """A wrapper before a head's own names is all that is found, as IQuest-Q1 shares `mtp_model_layer` with Megatron."""
    for family in rows():
        places = [stem.format(layer=61, module=0) for stem in family.names.values()]
        found = foreign(f"_orig_mod.{place}.weight" for place in (*places, f"{family.names['block']}.mlp.down_proj"))
        assert [kind.what for kind, _ in found] == ["a wrapper of torch (compile, FSDP or activation checkpointing)"]


def test_an_adapter_is_a_file_of_its_names_alone():
    """A head beside matrices of an adapter, as some trainers save it, is a part of the model."""
    matrix, whole = "model.layers.0.q_proj.lora_A.weight", "base_model.model.mtp.fc.weight"
    assert [of_adapter(names) for names in ([matrix, whole], [matrix, "mtp.fc.weight"], [whole])] == [
        True,
        False,
        False,
    ]


def test_an_adapters_matrices_are_of_one_kind():
    """They have the prefix of its model, too, which is no second fault."""
    ((kind, names),) = foreign(["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    assert len(names) == 1
    assert "matrices" in kind.what


def test_names_of_megatron_without_a_family(tmp_path):
    """Advised to take Megatron's names for those of a family that has some of them."""
    put("mtp.layers.0.enorm.weight", (H,))(table := {})
    put("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight", (H, H))(table)
    write_safetensors(tmp_path / "model.safetensors", table)
    write_json(tmp_path / "config.json", {"model_type": "qwen3", "num_hidden_layers": 2})
    assert "names-foreign" in [each.rule for each in findings(tmp_path)]


@loop(("family", "pattern", "new"), [
    ("bailing_moe_v2", r"^model\.layers\.2\.(?!enorm|hnorm|eh_proj)", "mtp.layers.0.mtp_model_layer."),
    ("nemotron_h", r"^mtp\.layers\.0\.(?=mixer|norm)", "mtp.layers.0.mtp_model_layer.layers.0."),
])  # fmt: skip
def test_one_finding_on_a_head_with_names_of_megatron(family, pattern, new, tmp_path):
    """No advice to remove the rest of it, nor to restore what is there."""
    publish(tmp_path, family, change=lambda table: (
        rename(pattern, new)(table), rename(r"^model\.layers\.2\.", "mtp.layers.0.")(table)))  # fmt: skip
    assert [each.rule for each in findings(tmp_path) if each.severity == "error"] == ["names-foreign"]


def test_packed_weights_that_no_reader_fits(tmp_path):
    """Sizes that the config contradicts, and variants that are not read, in trunk and head: what is clean loads."""
    build("glm4_moe").save(tmp_path / "plain", dtype=torch.bfloat16)
    changes = {"": {}, "wrong group size": {"group_size": 64}, "unsupported": {"checkpoint_format": "gptq_p"}}
    for place, (words, fields) in enumerate(changes.items()):
        folder = shutil.copytree(tmp_path / "plain", tmp_path / str(place))
        quantize_folder(folder, Case("gptq", group=32))
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= fields
        (folder / "config.json").write_text(json.dumps(config))
        found = [each for each in findings(folder, "quantization") if "packed weight" in each.found]
        assert [words in each.found for each in found] == ([True] if words else [])


@pytest.mark.more
def test_sizes_that_are_none(tmp_path):
    """Of another type, negative, or lists of so many numbers that every size is the product of some."""
    publish(tmp_path, "glm4_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    wrong = {"n_routed_experts": (-4, 4.5, True, "4"), "hidden_size": (0, "32"), "num_attention_heads": (4.0,),
             "intermediate_size": (-1, [None], []), "num_key_value_heads": (None, [2, None]),
             "eos_token_id": ([None], "2", [[2]])}  # fmt: skip
    for field, values_ in wrong.items():
        for value in values_:
            write_json(tmp_path / "config.json", config | {field: value})
            places = [each.place for each in findings(tmp_path, "config-contradicts")]
            assert f"config.json: {field}" in places, (field, value)
    for right in (
        {"eos_token_id": None},
        {"eos_token_id": [2, 3]},
        {"head_dim": None},
        {"pad_token_id": None},
        {"moe_intermediate_size": [config["moe_intermediate_size"]] * LAYERS},
    ):
        write_json(tmp_path / "config.json", config | right)
        assert not findings(tmp_path, "config-contradicts")
    many = list(range(1, 100_000))
    write_json(tmp_path / "config.json", config | {"head_dim_x": many, "x_head_dim": many, "num_x_heads": many})
    assert not findings(tmp_path)


def accepts(model_type, field, value):
    """Whether transformers makes a config of its defaults with this in the model's; a value may be a function of it."""
    config = CONFIG_MAPPING[model_type]().to_dict()
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    text[field] = value(text) if callable(value) else value
    try:
        CONFIG_MAPPING[model_type].from_dict(config)
    except (StrictDataclassError, LookupError, TypeError, ValueError):
        return False
    return True


def longer(field, default):
    return lambda text: [*(text.get(field) or [default] * (text.get("num_hidden_layers") or 0)), default]


@pytest.mark.more
@loop("field", list(ACCEPTED))
def test_what_configuration_classes_accept(field):
    """Values that the class of a family in transformers accepts are reported for no model of it."""
    lists = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
    value = longer(field, lists[field]) if field in lists else [2, None] if field.endswith("_id") else None
    names = {family.name: [each for each in family.model_types if each in CONFIG_MAPPING] for family in rows()}
    accepted = {name for name, types in names.items() if any(accepts(each, field, value) for each in types)}
    assert len([name for name, types in names.items() if types]) >= 30
    assert accepted <= ACCEPTED[field]
    assert ACCEPTED[field] - accepted <= {"generic", "step3p5", "step5"}  # without a class, or with two


@pytest.mark.more
@loop(
    "family, field, value",
    (
        ("ernie4_5_moe", "num_key_value_heads", None),
        ("cohere2_moe", "num_key_value_heads", None),
        ("glm_ocr", "eos_token_id", [2, None]),
        ("glm4_moe", "mlp_layer_types", ["dense", "sparse", "sparse", "sparse"]),
        ("glm4_moe", "moe_layer_freq", [0, 1, 1]),
        ("glm_moe_dsa", "num_key_value_heads", None),
    ),
)
def test_values_that_a_class_accepts(family, field, value, tmp_path):
    config = load_json(publish(tmp_path, family) / "config.json")
    if isinstance(value, list) and field == "mlp_layer_types":
        dense = config["first_k_dense_replace"]
        value = ["dense" if index < dense else "sparse" for index in range(config["num_hidden_layers"] + 1)]
    text = config.get("text_config", config)
    text[field] = value
    write_json(tmp_path / "config.json", config)
    assert not [each for each in findings(tmp_path, "config-contradicts") if field in each.place]


def test_a_value_is_shown_as_json(tmp_path):
    config = load_json(publish(tmp_path, "glm4_moe") / "config.json")
    write_json(tmp_path / "config.json", config | {"eos_token_id": [None]})
    (found,) = findings(tmp_path, "config-contradicts")
    assert "[null]" in found.found
    write_json(tmp_path / "config.json", config | {"eos_token_id": [None] * 1000})
    (found,) = findings(tmp_path, "config-contradicts")
    assert len(found.found) < 200


def test_a_vision_model_that_is_not_there(tmp_path):
    """Nothing looks at it, and a clean report says so."""
    vision = {"vision_config": {"depth": 2}}
    assert (
        "vision_config"
        in audit(publish(tmp_path, "qwen3_5", wrapper="model.language_model.", config=vision)).unchecked[0]
    )


def test_a_head_between_the_trunks_layers(tmp_path):
    """A merge that repeats layers and takes the head for one: to end the trunk there would cut off the rest."""

    def repeat(table):
        table |= {name.replace(".1.", ".3.", 1): table[name] for name in table if ".layers.1." in name}

    folder = publish(tmp_path, "glm4_moe", change=repeat, config={"num_hidden_layers": LAYERS + 2})
    (finding,) = findings(folder, "head-elsewhere")
    assert finding.fix.startswith("Save the trunk again without layer 2")


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3_5_moe", "glm_moe_dsa"])
def test_every_tensor_of_a_layer_counts(name, tmp_path):
    """Norms, biases, routers and indexers, which no matrix is beside: transformers has no value for them, either."""
    checkpoint = Checkpoint.open(publish(tmp_path, name))
    for lost in (each for each in checkpoint.tensors if re.search(r"layers\.[01]\.", each)):
        left = {key: info for key, info in checkpoint.tensors.items() if key != lost}
        assert not audit(replace(checkpoint, tensors=left), sample=True).clean, lost


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_puzzle", "interns2_mobius", "gigachat3_5"])
def test_every_tensor_of_a_head_counts(name, tmp_path):
    """Also where no layer of the trunk has experts, and of norms with a gate; not copies, nor the bias of a router."""
    checkpoint = Checkpoint.open(publish(tmp_path, name))
    copies = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    stored = [each for each in Inventory.of(checkpoint).stored.values() if not each.endswith(copies)]
    several = (rf"\.experts\.{each}" for each in ("3", "1", "[^3]", "", ".*gate_proj", ".*up_proj", ".*(up|down)_proj"))
    patterns = (*several, r"\.(experts\.|gate\.weight)")
    groups = [{each for each in stored if re.search(pattern, each)} for pattern in patterns]
    for lost in (*({each} for each in stored), *filter(None, groups)):
        left = {key: info for key, info in checkpoint.tensors.items() if key not in lost}
        assert not audit(replace(checkpoint, tensors=left), sample=True).clean, lost


@pytest.mark.more
def test_layers_with_experts_are_compared_with_each_other(tmp_path):
    """A router is clean where the first layer is dense, and no list in the config says so."""

    def repeat(table):
        head = {name.replace(".2.", ".4.", 1): table.pop(name) for name in [*table] if ".layers.2." in name}
        sparse = [name for name in table if ".layers.1." in name]
        table |= {name.replace(".1.", f".{index}.", 1): table[name] for index in (2, 3) for name in sparse} | head

    checkpoint = Checkpoint.open(publish(tmp_path, "glm4_moe", change=repeat, config={"num_hidden_layers": 4}))
    assert "model.layers.0.mlp.gate_proj.weight" in checkpoint.tensors
    assert audit(checkpoint, sample=True).clean
    for lost in (each for each in checkpoint.tensors if re.search(r"layers\.[123]\.(?!mlp\.experts)", each)):
        left = {key: info for key, info in checkpoint.tensors.items() if key != lost}
        assert not audit(replace(checkpoint, tensors=left), sample=True).clean, lost


ROUTERS = {  # as mlx_lm names them for two families, and the gate of an attention
    "step3p5": rename(r"(layers\.1)\.moe\.gate\.weight", r"\1.mlp.gate.gate.weight"),
    "bailing_moe_v2": rename(r"(layers\.1\.mlp\.gate)\.weight", r"\1.gate_proj.weight"),
    "mimo": put("model.layers.1.self_attn.gate.weight", (4, H)),
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_under_other_names(family, tmp_path):
    """A router may be a module of its own below the gate; a gate outside an MLP has no experts."""
    assert not findings(publish(tmp_path / "model", family, change=ROUTERS[family]), "trunk-partial")


@loop("family", LAYOUTS)
def test_biases_of_routers(family, tmp_path):
    """Where the config says that a bias chooses the experts, it is asked for in the families that store it so alone."""
    bias, config = r"layers\.[01]\..*(correction_bias|router_bias|expert_bias|gate\.bias)$", {"topk_method": "noaux_tc"}
    folder = publish(tmp_path / "model", family, config=config)
    assert not findings(folder, "trunk-partial")
    if "mlp.gate.e_score_correction_bias" in Inventory.of(Checkpoint.open(folder)).running_paths.values():
        (found,) = findings(publish(tmp_path / "lost", family, change=drop(bias), config=config), "trunk-partial")
        assert "mlp.gate.e_score_correction_bias: no" in found.found


@pytest.mark.parametrize("config", [{}, FP8])
def test_tables_of_experts_are_no_codes(config, tmp_path):
    """DeepSeek-V4's layers that choose experts by token store a table, in either width of integers."""
    rules = []
    for place, dtype in enumerate(("I32", "I64")):
        table = RawTensor(dtype, (V, 2), bytes(V * 2 * (4 + 4 * place)))
        change = partial(dict.update, **{"layers.0.ffn.gate.tid2eid": table})
        folder = publish(tmp_path / dtype, "deepseek_v4", config=config | {"num_hash_layers": 1}, change=change)
        rules.append([each.rule for each in findings(folder)])
    assert rules[0] == rules[1]
    assert ("quantization-unused" in rules[0]) is bool(config)


def test_weights_and_their_scales(tmp_path):
    """One of them is in a file that is not there, of trunk and head."""
    checkpoint = Checkpoint.open(publish(tmp_path, "qwen3_5", fp8=True))
    scales = [each for each in checkpoint.tensors if each.endswith(".weight_scale_inv")]
    for lost in [*scales, *(each.removesuffix("_scale_inv") for each in scales)]:
        left = replace(checkpoint, tensors={key: info for key, info in checkpoint.tensors.items() if key != lost})
        found = [each.found for each in audit(left, sample=True).findings if each.severity != "note"]
        assert lost.partition(".weight")[0] in " ".join(found), lost


def test_a_bias_is_no_projection(tmp_path):
    """A role of which nothing but the bias is left."""

    def lose(table):
        table["mtp.fc.bias"] = replace(table.pop("mtp.fc.weight"), shape=(H,), data=bytes(2 * H))

    (finding,) = findings(publish(tmp_path, "qwen3_5", change=lose), "head-partial")
    assert "lacks 1: mtp.fc" in finding.found


@pytest.mark.parametrize("name", [row.name for row in rows() if row.runtime_names and row.name in LAYOUTS])
def test_foreign_tensors_beside_names_that_look_foreign(name, tmp_path):
    """Names that other layouts have only in an engine's memory are the family's own, beside an adapter and in one."""
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": RawTensor("BF16", (2, 2), bytes(8))}
    folder = publish(tmp_path / name, name, shards=2, change=lambda table: table.update(adapter))
    (found,) = findings(folder)
    assert (found.rule, found.place) == ("names-foreign", next(iter(adapter)))
    unmerged = publish(tmp_path / "unmerged", name, change=rename("^", "base_model.model."))
    (found,) = findings(unmerged)
    assert found.rule == "names-foreign"
    assert found.found.startswith(f"{len(Checkpoint.open(unmerged).tensors)} tensors")
