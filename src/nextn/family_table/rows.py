"""The rows of `families`: published MTP conventions, facts only.

Read in vLLM 0.33.0, SGLang 0.5.23, llama.cpp 0c1e57098 and transformers 5.23; no released checkpoint was opened.
Names are those that loaders and converters match; open questions are in `unverified`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from nextn.family_table.conventions import EngineSupport, Fp8, Missing
from nextn.family_table.spec import Family

_VLLM = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/"
_SGLANG = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
_LLAMA = "https://github.com/ggml-org/llama.cpp/blob/0c1e57098/"
_HF = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/"
_HF24 = _HF.replace("v5.23.0", "v5.24.0")  # of models that 5.23 lacks
_VM, _SM = _VLLM + "model_executor/models/", _SGLANG + "models/"
_LM, _LC = _LLAMA + "src/models/", _LLAMA + "conversion/"
_HM, _MTP_MODEL = _HF + "models/", _HF + "modeling_layers.py#L373"

# What holds for every family, by vLLM v1/worker/gpu/spec_decode/eagle/utils.py and model_loader/default_loader.py,
# SGLang speculative/eagle_worker_v2.py, llama.cpp common/speculative.cpp, transformers modeling_layers.py (MtpModel).
EVERYWHERE: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "passes the trunk's lm_head and, unless pipeline-parallel, its embedding to the draft model",
        "a pair has the position of its hidden state; drafts beyond the last module reuse module k % D",
    ),
    "sglang": (
        "passes the trunk's embedding and lm_head to the draft model; the file's are unused",
        "a pair has the position of its hidden state; one module is applied repeatedly unless the multi-layer "
        "worker runs",
    ),
    "llamacpp": (
        "uses blk.N.nextn.embed_tokens and blk.N.nextn.shared_head_head if the GGUF holds them, else the trunk's",
        "a pair has the position of its token; a pair of the first token and a zero state comes first",
        "--spec-type draft-mtp refuses a GGUF without nextn tensors",
    ),
    "transformers": (
        "use_mtp uses the trunk's embedding and lm_head and drafts as many tokens as there are modules",
        "finds the head by the trunk's ignore patterns, some of which name fixed layer indices",
    ),
}

# The families whose heads these engines also read with fused experts (`experts.gate_up_proj`), beside the row's form.
# vLLM 0.33.0: qwen3_5_mtp.py, hy_v4/nvidia/mtp.py, and layers/fused_moe/routed_experts.py for models that hand their
# weights to AutoWeightsLoader. SGLang 0.5.23: deepseek_common/deepseek_weight_loader.py, qwen3_5_mtp.py, qwen4_exp.py.
READS_FUSED: Mapping[str, frozenset[str]] = {
    "vllm": frozenset({"qwen3_next", "qwen3_5_moe", "qwen4_exp", "hy_v4", "exaone_moe", "ernie4_5_moe"}),
    "sglang": frozenset(
        {"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "hy_v4", "gigachat3_5", "qwen3_5_moe", "qwen4_exp"}
    ),
}

# And those whose row has them fused, and that they also read one by one, as NVFP4 and fp8 releases store them.
READS_SPLIT: Mapping[str, frozenset[str]] = {
    "vllm": frozenset({"qwen4_exp", "hy_v4"}), "sglang": frozenset({"qwen4_exp"}),
}  # fmt: skip

# The families whose projection these engines build unquantized whatever the config says (vLLM 0.33.0, SGLang 0.5.23),
# and those where they do so in ModelOpt's NVFP4 checkpoints; SGLang builds the whole head of Qwen3.5 unquantized there.
_ONE_LINEAR = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "glm5_next",
        "glm_ocr",
        "mimo",
        "mimo_v2",
        "ernie4_5_moe",
        "step3p5",
        "hy_v3",
        "hy_v4",
    }
)
PLAIN_PROJECTION: Mapping[str, frozenset[str]] = {
    "vllm": _ONE_LINEAR | {"bailing_hybrid", "pangu_ultra_moe", "kimi_k3"},
    "sglang": _ONE_LINEAR | {"qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "exaone_moe", "gigachat3_5"},
}
# Families of which SGLang's loader does not split the names of joined projections (qwen3_5_mtp.py has no
# packed_modules_mapping; sgl-project/sglang#35797).
ASKS_FOR_FUSED = frozenset({"qwen3_5", "qwen3_5_moe"})
PLAIN_IN_NVFP4: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), ("projection",)),
    "sglang": dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), ("projection", "block")),
}

_APPENDED = {
    "token_norm": "model.layers.{layer}.enorm",
    "hidden_norm": "model.layers.{layer}.hnorm",
    "projection": "model.layers.{layer}.eh_proj",
    "final_norm": "model.layers.{layer}.shared_head.norm",
    "embedding": "model.layers.{layer}.embed_tokens",
    "output": "model.layers.{layer}.shared_head.head",
    "block": "model.layers.{layer}",
}
_MTP_PREFIX = {
    "token_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "final_norm": "mtp.norm",
    "block": "mtp.layers.{module}",
}

_TEXT = {"model.language_model.": "model.", "language_model.": ""}
_NEXTN = ("num_nextn_predict_layers",)
_LOST = ("embedding",)

_PLAIN = "builds the projection unquantized: a quantized one would be read without its scales (vllm#48492)"
_ONE = "raises unless num_nextn_predict_layers is 1"
_STATEFUL = "model.generate rejects use_mtp for this family"
_NO_FIELD = "no num_mtp_layers in the config class, so use_mtp raises; the tensors are skipped on load"
_ASSUMED_BF16 = "that the released fp8 keeps the projection in bf16: inferred from engines that build it unquantized"
_FP8_UNKNOWN = "which head tensors the fp8 release keeps in bf16"


# A family's own block has only the trunk's attention, MLP and norms, and nothing else of its layers.
_PARTS = {name: name for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")}


def _module(root: str, **paths: str) -> dict[str, str]:
    usual = {"token_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "final_norm": "final_layernorm"}
    return {role: f"{root}.{path}" for role, path in (usual | paths).items()} | {"block": root}


def _vllm(
    file: str,
    *notes: str,
    missing: Missing = "unquantized",
    zeroes: bool = False,
    unset: tuple[str, ...] = (),
    skips: tuple[str, ...] = (),
) -> EngineSupport:
    zero: Literal["zero"] | None = "zero" if zeroes else None
    unquantized = ("projection",) if _PLAIN in "".join(notes) else ()
    return EngineSupport(
        "runs",
        _VLLM + file,
        position0=zero,
        missing=missing,
        unset=unset,
        skips=skips,
        unquantized=unquantized,
        notes=notes,
    )


def _sglang(file: str, *notes: str) -> EngineSupport:
    return EngineSupport("runs", _SM + file, missing="silent", modules=1, notes=notes)


def _gguf(file: str, *notes: str) -> EngineSupport:
    return EngineSupport("runs", _LM + file, trunk_roles=(), missing="raises", notes=notes)


def _kept(file: str, note: str = "kept in the GGUF, no graph") -> EngineSupport:
    return EngineSupport("loads", _LM + file, notes=(note,))


def _ignores(path: str, note: str = _NO_FIELD) -> EngineSupport:
    return EngineSupport("ignores", _HM + path, notes=(note,))


_NONE = EngineSupport("absent", "")
_UNRUN = dict.fromkeys(("vllm", "sglang", "llamacpp", "transformers"), _NONE)

# Of attention with norms of queries and keys, whatever config.json says: the values, lost by name, are among its parts.
_NORMED = {"self_attn.q_proj": "self_attn.q_norm", "self_attn.k_proj": "self_attn.k_norm",
           "self_attn.k_norm": "self_attn.v_proj"}  # fmt: skip

_ROUTER_BIAS = "mlp.gate.e_score_correction_bias"

# fmt: off
_DEEPSEEK_V3 = Family(
    name="deepseek_v3", title="DeepSeek-V3 / R1 / V3.1", model_types=("deepseek_v3",), draft_types=("deepseek_mtp",),
    router_bias=_ROUTER_BIAS,
    count_fields=("num_nextn_predict_layers", "num_mtp_layers"), default_count=1,
    # The paper (arXiv 2412.19437, eq. 21) writes the hidden first; the released code multiplies [enorm(e); hnorm(h)].
    names=_APPENDED, block={"first_k_dense_replace": 0}, fp8=Fp8(),
    engines={
        "vllm": _vllm("model_executor/models/deepseek_mtp.py#L76", _PLAIN, missing="module", zeroes=True, unset=_LOST),
        "sglang": _sglang("deepseek_nextn.py#L58", _ONE),
        "llamacpp": EngineSupport("drops", _LC + "deepseek.py#L398"),
        "transformers": EngineSupport("runs", _MTP_MODEL, missing="raises", layers=(61,), modules=1),
    },
    sources=(
        "https://arxiv.org/abs/2412.19437", "https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md",
        "https://github.com/vllm-project/vllm/issues/48492",
        # The release's headers, printed: eh_proj and both copies in BF16, 576 rows of kv_a_proj under 5 scales.
        "https://github.com/simpx/model-inspect/blob/main/README.md",
    ),
)
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3, name="deepseek_v32", title="DeepSeek-V3.2", model_types=("deepseek_v32",), draft_types=(),
    count_fields=_NEXTN, block={"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]},
    engines={
        "vllm": _vllm("models/deepseek_v32/nvidia/mtp.py#L64", _PLAIN, missing="module", zeroes=True, unset=_LOST),
        "sglang": _sglang("deepseek_nextn.py#L58", _ONE),
        "llamacpp": _gguf("deepseek32.cpp#L55", "the draft attends without the indexer"),
        "transformers": _ignores("deepseek_v32/modeling_deepseek_v32.py#L663"),
    },
    sources=("https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md",), unverified=(_ASSUMED_BF16,),
    remarks=("with index_share_for_mtp_iteration, engines pick indices at the first draft and reuse them",),
)
_DEEPSEEK_V4 = Family(
    name="deepseek_v4", router_bias=_ROUTER_BIAS, title="DeepSeek-V4",
    model_types=("deepseek_v4", "deepseek_ref"),  # the second in sgl-project's FP8 release
    count_fields=_NEXTN, default_count=1,
    names={
        "token_norm": "mtp.{module}.enorm", "hidden_norm": "mtp.{module}.hnorm",
        "token_projection": "mtp.{module}.e_proj", "hidden_projection": "mtp.{module}.h_proj",
        "final_norm": "mtp.{module}.norm", "collapse_fn": "mtp.{module}.hc_head_fn",
        "collapse_base": "mtp.{module}.hc_head_base", "collapse_scale": "mtp.{module}.hc_head_scale",
        "embedding": "mtp.{module}.emb.tok_emb", "output": "mtp.{module}.head", "block": "mtp.{module}",
    },
    trunk={"embedding": "embed", "output": "head"}, hidden="streams", next_hidden="streams",
    # Sliding attention alone, and a router that learns: the head's layer has no compressor and no table of tokens.
    block={"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]},
    block_renames={
        "self_attn.q_a_proj": "attn.wq_a", "self_attn.q_a_norm": "attn.q_norm", "self_attn.q_b_proj": "attn.wq_b",
        "self_attn.kv_proj": "attn.wkv", "self_attn.o_a_proj": "attn.wo_a", "self_attn.o_b_proj": "attn.wo_b",
        "self_attn.sinks": "attn.attn_sink", "self_attn": "attn", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "attn_hc.fn": "hc_attn_fn", "attn_hc.base": "hc_attn_base",
        "attn_hc.scale": "hc_attn_scale", "ffn_hc.fn": "hc_ffn_fn", "ffn_hc.base": "hc_ffn_base",
        "ffn_hc.scale": "hc_ffn_scale", "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
        "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
        "mlp.shared_experts.down_proj": "ffn.shared_experts.w2", "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
        "mlp.experts.{expert}.gate_proj": "ffn.experts.{expert}.w1",
        "mlp.experts.{expert}.down_proj": "ffn.experts.{expert}.w2",
        "mlp.experts.{expert}.up_proj": "ffn.experts.{expert}.w3", "mlp": "ffn",
    },
    trunk_renames={
        "model.embed_tokens": "embed", "model.hc_head.hc_fn": "hc_head_fn", "model.hc_head.hc_base": "hc_head_base",
        "model.hc_head.hc_scale": "hc_head_scale", "model.layers.{layer}.attn.norm": "layers.{layer}.attn.kv_norm",
        "model": "",
    },
    fp8=Fp8(scale="scale", unquantized=("token_norm", "hidden_norm", "final_norm", "embedding", "output")),
    engines={
        "vllm": _vllm(
            "models/deepseek_v4/nvidia/mtp.py#L79",
            "skips top-level embed.weight and head.weight: versions that do not hand over the trunk's leave both "
            "at initial values, for 0 % acceptance and no error (vllm#43456)",
            "refuses method mtp for DeepSeek-V4.1, whose mtp.* are DSpark stages", missing="module", zeroes=True,
            unset=("embedding", "output"), skips=("embedding", "output"),
        ),
        "sglang": _sglang("deepseek_v4_nextn.py#L56", _ONE, "missing tensors are logged"),
        "llamacpp": EngineSupport(
            "runs", _LC + "deepseek.py#L398", trunk_roles=(), missing="raises",
            notes=(
                "dropped unless converted with --mtp, into a GGUF of its own; e_proj and h_proj become one eh_proj",
            ),
        ),
        "transformers": _ignores("deepseek_v4/modeling_deepseek_v4.py#L1266", _STATEFUL),
    },
    sources=("https://github.com/vllm-project/vllm/issues/43456", "https://github.com/vllm-project/vllm/pull/43459"),
    own_block=True, block_lacks=("self_attn.compressor", "self_attn.indexer", "mlp.gate.tid2eid"),
    remarks=("the results of the two projections are added, which equals one [e, h] matrix",),
    unverified=("which releases hold emb.tok_emb and head inside the module", "the format of the experts' scales"),
)
_GLM4_MOE = replace(
    _DEEPSEEK_V3, name="glm4_moe", title="GLM-4.5 / 4.6 / 4.7 (and Air)", model_types=("glm4_moe",),
    draft_types=("glm4_moe_mtp",),
    engines={
        "vllm": EngineSupport(
            "runs", _VM + "glm4_moe_mtp.py#L80", next_hidden="pre", position0="zero", missing="unquantized",
            unset=_LOST, unquantized=("projection",), notes=(_PLAIN,),
        ),
        "sglang": _sglang("glm4_moe_nextn.py#L44", _ONE, "also reads an mtp.safetensors that the index does not name"),
        "llamacpp": _gguf("glm4-moe.cpp#L38"),
        "transformers": EngineSupport("runs", _MTP_MODEL, missing="raises", layers=(46, 92), modules=1),
    },
    sources=(_SGLANG + "model_loader/weight_utils.py#L240", "https://github.com/vllm-project/vllm/issues/48492"),
    unverified=(_ASSUMED_BF16,),
)
_GLM4V_MOE = replace(
    _GLM4_MOE, name="glm4v_moe", title="GLM-4.5V / 4.6V", model_types=("glm4v_moe", "glm4v_moe_text"), draft_types=(),
    count_fields=_NEXTN, default_count=0, wrappers=_TEXT,
    engines={
        "vllm": _NONE,
        "sglang": EngineSupport(
            "ignores", _SM + "glm4v_moe.py#L110",
            notes=("its loader has a branch for the head, and no draft class of this model calls it",),
        ),
        "llamacpp": _gguf("glm4-moe.cpp#L38"),
        "transformers": _ignores("glm4v_moe/modeling_glm4v_moe.py#L474"),
    },
    sources=(_LC + "glm.py#L107",), unverified=("one engine alone runs the head", _FP8_UNKNOWN),
)
_GLM4_MOE_LITE = replace(
    _GLM4_MOE, name="glm4_moe_lite", title="GLM-4.7-Flash", model_types=("glm4_moe_lite",),
    draft_types=("glm4_moe_lite_mtp",), count_fields=_NEXTN, block={"mlp_layer_types": ["sparse"]},
    engines={
        "vllm": replace(_GLM4_MOE.engines["vllm"], source=_VM + "glm4_moe_lite_mtp.py#L88"),
        "sglang": replace(_GLM4_MOE.engines["sglang"], source=_SM + "glm4_moe_lite_nextn.py#L47"),
        "llamacpp": replace(_GLM4_MOE.engines["llamacpp"], source=_LM + "deepseek2.cpp#L65"),
        "transformers": _ignores("glm4_moe_lite/modeling_glm4_moe_lite.py#L562"),
    },
)
_GLM_MOE_DSA = replace(
    _DEEPSEEK_V32, name="glm_moe_dsa", title="GLM-5 / 5.1 / 5.2 / 5.3", model_types=("glm_moe_dsa",),
    block={"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    engines={
        **_DEEPSEEK_V32.engines,
        "llamacpp": _gguf("glm-dsa.cpp#L88"),
        "transformers": _ignores("glm_moe_dsa/modeling_glm_moe_dsa.py#L637"),
    },
    # "GLM-5.2 keeps the recurrent MTP projection in BF16 for both BF16 and FP8 checkpoints."
    sources=(
        "https://github.com/InternLM/lmdeploy/pull/4945", "https://github.com/Blaizzy/mlx-vlm/pull/2079",
        _SM + "glm4_moe.py#L1288",
    ),
    unverified=(
        "whether repeated depths of GLM-5.2 read the first depth's keys, as Megatron-LM#6472 trains; no engine does so",
    ),
)
_GLM5_NEXT = replace(
    _GLM_MOE_DSA, name="glm5_next", title="GLM-5.3-Flash (GLM-5-Next)", model_types=("glm5_next", "glm5_next_text"),
    draft_types=("glm5_next_mtp",), wrappers=_TEXT,
    engines={
        "vllm": _vllm(
            "models/glm5next/common/mtp.py#L45", _PLAIN,
            "dequantizes q_a_proj, kv_a_proj_with_mqa, o_proj and the indexer's wk on load", zeroes=True, unset=_LOST,
        ),
        "sglang": _sglang("glm5_next_nextn.py#L24"),
        "llamacpp": _kept("glm5-next.cpp#L70", "its graph throws: not implemented yet"),
        "transformers": _ignores("glm5_next/modeling_glm5_next.py#L1388", _STATEFUL),
    },
    sources=("https://github.com/radixark/miles/pull/2788", "https://github.com/ggml-org/llama.cpp/pull/27773"),
    own_block=True, parts=_PARTS, unverified=(_FP8_UNKNOWN,),
)
_GLM_OCR = replace(
    _GLM4_MOE, name="glm_ocr", title="GLM-OCR", model_types=("glm_ocr", "glm_ocr_text"), draft_types=("glm_ocr_mtp",),
    count_fields=_NEXTN, block={}, wrappers=_TEXT, fp8=None, runtime_names=("gate_up_proj.weight",),
    engines={
        "vllm": replace(_GLM4_MOE.engines["vllm"], source=_VM + "glm_ocr_mtp.py#L57"),
        "sglang": _sglang("glm_ocr_nextn.py#L46"),
        "llamacpp": _kept("glm4.cpp#L50"),
        "transformers": _ignores("glm_ocr/modeling_glm_ocr.py#L317"),
    },
    sources=(), unverified=(),
)
_QWEN3_NEXT = Family(
    name="qwen3_next", title="Qwen3-Next", model_types=("qwen3_next",), draft_types=("qwen3_next_mtp",),
    count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"), default_count=1, names=_MTP_PREFIX,
    norm_weight="1+w", max_modules=1, layer_pairs=_NORMED,
    block={"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
    wrappers={"model.mtp.": "mtp."}, fp8=Fp8(),
    engines={
        "vllm": _vllm("model_executor/models/qwen3_next_mtp.py#L47"),
        "sglang": _sglang("qwen3_next_mtp.py#L40"),
        "llamacpp": _gguf("qwen3next.cpp#L132", "adds 1 to the stored norm weights"),
        "transformers": _ignores("qwen3_next/modeling_qwen3_next.py#L947", _STATEFUL),
    },
    sources=(_LC + "qwen.py#L299",),
    remarks=("the published config has no count field; every engine assumes one module",),
    unverified=(_FP8_UNKNOWN,),
)
_QWEN3_5 = replace(
    _QWEN3_NEXT, name="qwen3_5", title="Qwen3.5 / 3.6 / 3.8, Ternary Bonsai 2, MiMo-V2.6-Qwen, dense",
    model_types=("qwen3_5", "qwen3_5_text"),
    models=("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B", "Ternary-Bonsai-2-27B", "MiMo-V2.6-Distill-Qwen-9B",
            "Intern-S2-Preview"),
    draft_types=("qwen3_5_mtp",), count_fields=("mtp_num_hidden_layers",), block={"layer_types": ["full_attention"]},
    wrappers={"model.mtp.": "mtp.", **_TEXT}, text_wrapper="model.language_model.",  # its conversion_mapping.py
    engines={
        "vllm": _vllm(
            "model_executor/models/qwen3_5_mtp.py#L66",
            "treats fc as bf16 under modelopt_fp4, and the complete head as unquantized if a GPTQ rule that starts "
            "with -: holds mtp",
        ),
        "sglang": _sglang(
            "qwen3_5_mtp.py#L94", "treats the head as bf16 under NVFP4, and where mtp.* is in a list of exclusions",
        ),
        "llamacpp": _gguf("qwen35.cpp#L127", "adds 1 to the stored norm weights"),
        "transformers": _ignores("qwen3_5/modeling_qwen3_5.py#L918", _STATEFUL),
    },
    sources=(
        _LC + "qwen.py#L299", "https://github.com/Blaizzy/mlx-vlm/pull/2293",
        _SGLANG + "layers/quantization/quark/quark.py#L361", "https://huggingface.co/ndaly/MiMo-V2.6-Distill-Qwen-9B",
    ),
    remarks=(
        "3.6 and 3.8 have no MTP code of their own in any engine: read as 3.5",
        "Intern-S2-Preview has a text model of this type, or of the one with experts",
    ),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5, name="qwen3_5_moe", title="Qwen3.5 / 3.6 / 3.8, mixture of experts",
    models=("Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B", "Intern-S2-Preview"),
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"), draft_types=(),
    engines={
        **_QWEN3_5.engines,
        "llamacpp": replace(_QWEN3_5.engines["llamacpp"], source=_LM + "qwen35moe.cpp#L150"),
        "transformers": _ignores("qwen3_5_moe/modeling_qwen3_5_moe.py#L1001", _STATEFUL),
    },
)
_QWEN4_EXP = replace(
    _QWEN3_5_MOE, name="qwen4_exp", title="Qwen3.8-Flash-Next (qwen4_exp)", models=(),
    # The others in NVFP4 releases for a branch of vLLM, with the same tensors (Mia-AiLab/Qwen3.8-Flash-Next-NVFP4).
    model_types=("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"),
    draft_types=("qwen4_exp_mtp", "qwen3_8_flash_next_mtp"),
    names={
        "token_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden",
        "token_projection": "mtp.fc_embedding", "hidden_projection": "mtp.fc_hidden",
        "collapse": "mtp.hyper_connection_mixer", "block": "mtp.layers.{module}",
    },
    hidden="streams", next_hidden="streams", experts="fused",
    block={"layer_types": ["indexed_attention"], "ple_layer_ids": []}, own_block=True, block_lacks=("ple",),
    engines={
        "vllm": _vllm("models/qwen4_exp/nvidia/mtp.py#L172"),
        "sglang": _sglang("qwen4_exp_mtp.py#L27"),
        "llamacpp": EngineSupport("drops", _LC + "qwen4exp.py#L28"),
        "transformers": _ignores("qwen4_exp/modeling_qwen4_exp.py#L1318", _STATEFUL),
    },
    sources=(),
    remarks=("hidden_norm runs over all streams at once; fc_hidden is shared by them",),
    unverified=(
        "release status", "that experts are fused in bf16 files: transformers reads both, NVFP4 has them split",
        _FP8_UNKNOWN,
    ),
)
# Its trunk's layers take turns with a few banks of experts; the head's block is Qwen3.5's own, with fewer experts.
_INTERNS2_MOBIUS = replace(
    _QWEN3_5_MOE, name="interns2_mobius", title="InternS2-Mobius",
    model_types=("interns2_mobius", "interns2_mobius_text"), models=(),
    engines={
        "vllm": _vllm("model_executor/models/interns2_mobius.py#L446"),
        "sglang": EngineSupport(
            "runs", _SM + "qwen3_5_mtp.py#L94", missing="silent", modules=1,
            notes=("treats the head as bf16 under NVFP4, and where mtp.* is in a list of exclusions",),
        ),
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=(_VLLM + "config/speculative.py#L698", _SM + "interns2_mobius.py#L77"), own_block=True,
    block_adds=("mlp.experts.", "mlp.gate."),
    cannot_run="transformers has no trunk of this type",
    remarks=("the block has mtp_num_experts experts, of which mtp_num_experts_per_tok are used",),
    unverified=(_FP8_UNKNOWN,),
)
_MIMO = Family(
    name="mimo", title="MiMo-7B", model_types=("mimo",), draft_types=("mimo_mtp",), count_fields=_NEXTN,
    default_count=1,
    names=_module(
        "model.mtp_layers.{module}", token_norm="token_layernorm", hidden_norm="hidden_layernorm",
        projection="input_proj",
    ),
    concat="hidden_first", position0="zero",
    engines={
        "vllm": EngineSupport("runs", _VM + "mimo_mtp.py#L43", missing="unquantized", modules=1),
        "sglang": _sglang("mimo_mtp.py#L26"),
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=("https://github.com/XiaomiMiMo/MiMo",),
    cannot_run="transformers has no trunk of this type; the head itself needs nothing that Head lacks",
)
_MIMO_V2 = Family(
    name="mimo_v2", title="MiMo-V2-Flash / V2.5 / V2.6 / Pro / Omni", model_types=("mimo_v2_flash", "mimo_v2"),
    router_bias=_ROUTER_BIAS,
    models=("MiMo-V2.6-Flash-RL", "MiMo-V2.6-Pro-RL"), runtime_names=("qkv_proj.weight",),
    draft_types=("mimo_v2_mtp", "mimo_v2_omni_mtp"), count_fields=_NEXTN, default_count=3,
    names=_module("model.mtp.layers.{module}"),
    block_renames={"post_attention_layernorm": "pre_mlp_layernorm", "self_attn.sinks": "self_attn.attention_sink_bias"},
    # transformers names SGLang's code as this model's reference.
    order="unchained", block={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    fp8=Fp8(unquantized=("token_norm", "hidden_norm", "final_norm")),
    engines={
        "vllm": EngineSupport("runs", _VM + "mimo_v2_mtp.py#L57", order="recursive", missing="unquantized", modules=1),
        "sglang": EngineSupport(
            "runs", _SM + "mimo_v2_nextn.py#L60", missing="silent", notes=("as many modules as drafted tokens",),
        ),
        "llamacpp": EngineSupport(
            "runs", _LM + "mimo2.cpp#L34", hidden="pre", next_hidden="pre", order="chained", trunk_roles=(),
            missing="raises",
        ),
        "transformers": _ignores("mimo_v2_flash/modeling_mimo_v2_flash.py#L470"),
    },
    sources=(_LC + "mimo.py#L29",),
    remarks=(
        "the published config has no count: llama.cpp takes 3, vLLM 1",
        "V2.5 and Pro store one fp8 qkv_proj, cut for tensor parallelism",
    ),
    unverified=("whether the authors' code feeds the state before or after the norm", _FP8_UNKNOWN),
)
_ERNIE = Family(
    name="ernie4_5_moe", title="ERNIE-4.5 (mixture of experts)", model_types=("ernie4_5_moe",),
    draft_types=("ernie_mtp",), count_fields=_NEXTN, default_count=0,
    names={
        "token_norm": "model.mtp_emb_norm.{module}", "hidden_norm": "model.mtp_hidden_norm.{module}",
        "projection": "model.mtp_linear_proj.{module}", "block": "model.mtp_block.{module}",
    },
    next_hidden="pre", position0="zero", projection_bias="use_bias", block={"moe_layer_end_index": -1},
    engines={
        "vllm": EngineSupport("runs", _VM + "ernie_mtp.py#L44", missing="unquantized", modules=1),
        "sglang": _sglang("ernie4_eagle.py#L38", "a head that is not there at all raises"),
        "llamacpp": EngineSupport("drops", _LC + "ernie.py#L103"),
        "transformers": _ignores("ernie4_5_moe/modeling_ernie4_5_moe.py#L459"),
    },
    sources=(),
    remarks=(
        "no final norm: the block's raw state goes to lm_head and to the next depth",
        "the projection has a bias in SGLang if the config says use_bias; vLLM has none",
    ),
)
_LONGCAT = Family(
    name="longcat_flash", title="LongCat-Flash", model_types=("longcat_flash",), draft_types=("longcat_flash_mtp",),
    count_fields=_NEXTN, default_count=1,
    names=_module("model.mtp.layers.{module}", token_norm="enorm.m", hidden_norm="hnorm.m")
    | {"final_norm": "model.mtp.norm", "embedding": "model.mtp.embed_tokens"},
    block_renames={"mlp": "transformer_layer.mlp"}, max_modules=1,
    fp8=Fp8(unquantized=("token_norm", "hidden_norm", "final_norm", "embedding")),
    engines={
        "vllm": EngineSupport("runs", _VM + "longcat_flash_mtp.py#L29", missing="unquantized", unset=_LOST, modules=1),
        "sglang": _sglang("longcat_flash_nextn.py#L199"),
        "llamacpp": _NONE,
        "transformers": _ignores("longcat_flash/modeling_longcat_flash.py#L543"),
    },
    sources=(), own_block=True,
    # The trunk's layers are two of each and a mixture of experts; the first of each pair is like the head's block.
    parts={
        "self_attn": "self_attn.0", "mlp": "mlps.0", "input_layernorm": "input_layernorm.0",
        "post_attention_layernorm": "post_attention_layernorm.0",
    },
    block={"num_layers": 1},
    remarks=(
        "the head is unquantized if disable_quant_module lists mtp",
        "q_a_layernorm and kv_a_layernorm are scaled on load where the config says mla_scale_q_lora, "
        "mla_scale_kv_lora",
        "transformers 5.23 wants tensors of the experts that compute nothing (zero_expert_num), which files do not "
        "have: it refuses the layout, Nextn reads and writes it",
    ),
)
_NEMOTRON_H = Family(
    name="nemotron_h", title="Nemotron-H / Nemotron-3", model_types=("nemotron_h", "nemotron_h_omni"),
    draft_types=("nemotron_h_mtp",), count_fields=_NEXTN, default_count=0,
    names={
        "token_norm": "mtp.layers.0.enorm", "hidden_norm": "mtp.layers.0.hnorm", "projection": "mtp.layers.0.eh_proj",
        "final_norm": "mtp.layers.1.final_layernorm", "block": "mtp.layers",
    },
    trunk={"embedding": "backbone.embeddings", "output": "lm_head"}, max_modules=1,
    # transformers, vLLM and SGLang read both; transformers has model. in memory (its conversion_mapping.py).
    wrappers={"language_model.": "", "model.": "backbone."}, text_wrapper="model.",
    block={"layers_block_type": ["full_attention", "moe"]},
    engines={
        "vllm": EngineSupport("runs", _VM + "nemotron_h_mtp.py#L45", missing="unquantized", modules=1),
        "sglang": _sglang("nemotron_h_mtp.py#L45"),
        "llamacpp": EngineSupport(
            "runs", _LM + "nemotron-h-moe.cpp#L4", trunk_roles=(), missing="raises", modules=1,
            notes=("the final norm subtracts the mean (LayerNorm); the other engines' does not",),
        ),
        "transformers": _ignores("nemotron_h/modeling_nemotron_h.py#L1012", _STATEFUL),
    },
    sources=(_LC + "nemotron.py#L256",), own_block=True,
    block_pairs={"mixer.gate": "mixer.gate.e_score_correction_bias"},
    remarks=(
        "final norm: LayerNorm in llamacpp, RMSNorm in vllm and sglang",
        "mtp_hybrid_override_pattern says which layers a module has; these names are those of the pattern *E",
    ),
    unverified=("which final norm the authors' code has",),
)
_NEMOTRON_PUZZLE = replace(
    _NEMOTRON_H, name="nemotron_h_puzzle", title="Nemotron-H Puzzle", model_types=("nemotron_h_puzzle",),
    draft_types=(), models=("NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B",),
    engines=_UNRUN | {"sglang": _sglang("nemotron_h_mtp.py#L45")}, sources=(_SGLANG + "configs/nemotron_h.py#L212",),
    cannot_run="transformers has no trunk of this type",
    remarks=("mtp_block_configs says which layers the head has, and their sizes; the file is mtp.safetensors",),
)
_STEP = Family(
    name="step3p5", router_bias=_ROUTER_BIAS, title="Step-3.5-Flash / Step-3.7", model_types=("step3p5", "step3p7"),
    draft_types=("step3p5_mtp",), count_fields=_NEXTN, default_count=0, layer_pairs=_NORMED,
    wrappers=_TEXT,  # of NVFP4 releases, says SGLang's step3p7.py
    names=_module(
        "model.layers.{layer}", final_norm="transformer.shared_head.norm", output="transformer.shared_head.output",
    ),
    aliases={
        "final_norm": ("model.layers.{layer}.shared_head.norm",),
        "output": ("model.layers.{layer}.shared_head.output", "model.layers.{layer}.shared_head.head"),
        "block": ("model.layers.{layer}.transformer",),
    },
    block_renames={
        "mlp.gate.e_score_correction_bias": "moe.router_bias", "mlp.gate": "moe.gate", "mlp.experts": "moe",
        "mlp.shared_experts": "share_expert",
    },
    # layer_types and moe_layers_enum of the published config run on over the head's layers; the limits do not bind.
    block={
        "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"], "swiglu_limits": None,
        "swiglu_limits_shared": None,
    },
    own=("output",), hidden="pre", next_hidden="pre", norm_weight="1+w", order="chained", experts="stacked", fp8=Fp8(),
    trunk_experts=("split", "fused", "stacked"),
    engines={
        "vllm": EngineSupport(
            "runs", _VM + "step3p5_mtp.py#L57", trunk_roles=("embedding",), missing="raises",
            notes=("the V1 runner does not fill the cache of modules >= 1 over the prompt",),
        ),
        "sglang": EngineSupport("runs", _SM + "step3p5_mtp.py#L61", trunk_roles=(), missing="raises"),
        "llamacpp": _gguf("step35.cpp#L49", "fills every module's cache with the trunk's states"),
        "transformers": EngineSupport(
            "runs", _MTP_MODEL, hidden="post", next_hidden="post", missing="raises",
            notes=(
                "step3p7 alone; finds shared_head.norm but not transformer.shared_head.norm",
                "builds a sliding module with the heads of full attention, not of the sliding layers",
            ),
        ),
    },
    sources=(_LC + "step3.py#L121", _HM + "step3p7/configuration_step3p7.py#L103"),
    unverified=(_FP8_UNKNOWN,),
)
_STEP5 = replace(
    _STEP, name="step5", title="Step-5", model_types=("step5", "step5_vl", "step5_text"), draft_types=("step5_mtp",),
    engines={
        "vllm": EngineSupport(
            "runs", _VLLM + "models/step5/nvidia/mtp.py#L69", trunk_roles=("embedding",), missing="raises",
        ),
        "sglang": _NONE,
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=(_VLLM + "transformers_utils/configs/step5.py#L106",), cannot_run="transformers has no trunk of this type",
    remarks=(
        "zero_centered of the config says whether norms multiply by 1 + w (its default) or by w",
        "with fp32_residual_connection, states between layers and depths are in float32",
    ),
    unverified=("one engine alone runs the head", _FP8_UNKNOWN),
)
_BAILING_V2 = Family(
    name="bailing_moe_v2", title="Ling 2.0 / Ring 2.0", model_types=("bailing_moe_v2", "bailing_moe"),
    models=("Ling-mini-2.0", "Ling-flash-2.0", "Ling-1T", "Ring-mini-2.0", "Ring-flash-2.0", "Ring-1T"),
    count_fields=_NEXTN, default_count=0, names=_module("model.layers.{layer}"),
    trunk={"embedding": "model.word_embeddings", "output": "lm_head"},
    engines={
        "vllm": _NONE,
        "sglang": _sglang("bailing_moe_nextn.py#L69"),
        "llamacpp": _kept("bailingmoe2.cpp#L73"),
        "transformers": _NONE,
    },
    sources=(), cannot_run="transformers has no trunk of this type",
)
_BAILING_HYBRID = replace(
    _BAILING_V2, name="bailing_hybrid", router_bias=_ROUTER_BIAS, models=(), title="Ling 2.5 / Ring 2.5, Ling 3",
    model_types=("bailing_hybrid", "bailing_moe_v3_vl"), draft_types=("bailing_hybrid_mtp", "bailing_hybrid_v3_mtp"),
    count_fields=("num_nextn_predict_layers", "num_mtp_layers"),
    block={"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
    block_renames={
        "self_attn.o_proj": "attention.dense", "self_attn": "attention",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    },
    wrappers=_TEXT,
    engines={
        "vllm": _vllm(
            "model_executor/models/bailing_moe_mtp.py#L48", "zeroes the first embedding for 2.5, not for 3",
            _PLAIN + ", for 2.5", missing="module", zeroes=True,
        ),
        "sglang": _sglang("bailing_moe_nextn.py#L69"),
        "llamacpp": EngineSupport("runs", _LM + "bailingmoe3.cpp#L73", missing="raises", notes=("Ling 3 alone",)),
        "transformers": EngineSupport(
            "refuses", _HM + "bailing_hybrid/modeling_bailing_hybrid.py#L898", notes=(_STATEFUL,),
        ),
    },
    sources=(_VM + "bailing_moe_v3_mtp.py#L59", _HF + "conversion_mapping.py#L2206"), cannot_run="",
    unverified=(_FP8_UNKNOWN,),
)
_HY_V3 = Family(
    name="hy_v3", title="Hunyuan V3 (HY-V3)", model_types=("hy_v3",), draft_types=("hy_v3_mtp",), count_fields=_NEXTN,
    default_count=0, names=_module("model.layers.{layer}", output="shared_head"), read_only_copies=("output",),
    block={"mlp_layer_types": ["sparse"]}, layer_pairs=_NORMED,
    block_renames={
        "mlp.gate": "mlp.router.gate", "mlp.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_experts": "mlp.shared_mlp",
    },
    engines={
        "vllm": _vllm("model_executor/models/hy_v3_mtp.py#L93", _PLAIN, missing="silent", zeroes=True),
        "sglang": _sglang("hunyuan_v3_nextn.py#L41"),
        "llamacpp": _gguf("hy-v3.cpp#L34"),
        "transformers": _ignores("hy_v3/modeling_hy_v3.py#L428"),
    },
    sources=(_HF + "conversion_mapping.py#L2270",),
    remarks=(
        "a copy shared_head.weight is read and not written: vLLM's comment names it and every engine skips it, but "
        "llama.cpp's converter stops at the name, so that the release cannot hold it",
    ),
)
_HY_V4 = Family(
    name="hy_v4", title="Hunyuan V4 (HY-V4)", model_types=("hy_v4",), draft_types=("hy_v4_mtp",), count_fields=_NEXTN,
    router_bias=_ROUTER_BIAS,
    default_count=0, names=_module("model.mtp_layers.{module}"), spare_count=True, experts="fused",
    trunk_experts=("fused",),
    block={"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    block_renames={"self_attn.gate_proj": "self_attn.linear_gate", "self_attn.sinks": "self_attn.learnable_sink_param"},
    # transformers reads the published names, and writes others: hc_pre in the wrong place, all gates as attention's.
    trunk_renames={
        "model.layers.{layer}.mlp.linear_gate": "model.layers.{layer}.mlp.gate_proj",
        "model.layers.{layer}.mlp.shared_experts.linear_gate": "model.layers.{layer}.mlp.shared_experts.gate_proj",
        "model.hc_pre.hc_head": "model.hc_head",
        "model.layers.{layer}.hc_pre.hc_attn_layer": "model.layers.{layer}.hc_attn_layer.hc_pre",
        "model.layers.{layer}.hc_pre.hc_mlp_layer": "model.layers.{layer}.hc_mlp_layer.hc_pre",
    },
    engines={
        "vllm": _vllm(
            "models/hy_v4/nvidia/mtp.py#L323", _PLAIN,
            "mtp_quant_algo of the config says how the head is quantized: FP8, BF16 or as the trunk",
            zeroes=True,
        ),
        "sglang": _sglang("hunyuan_v4_nextn.py#L51"),
        "llamacpp": EngineSupport("drops", _LC + "hy_v4.py#L58"),
        "transformers": _ignores("hy_v4/modeling_hy_v4.py#L750"),
    },
    sources=(_HF + "conversion_mapping.py#L158",), own_block=True, parts=_PARTS,
    remarks=("num_nextn_predict_layers is 1 or 2 for one module",), unverified=("release status", _FP8_UNKNOWN),
)
_EXAONE_MOE = Family(
    name="exaone_moe", title="EXAONE-MoE (K-EXAONE)", model_types=("exaone_moe",), draft_types=("exaone_moe_mtp",),
    count_fields=_NEXTN, default_count=0, names=_MTP_PREFIX, layer_pairs=_NORMED,
    block={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}, max_modules=1,
    engines={
        "vllm": _vllm("model_executor/models/exaone_moe_mtp.py#L32"),
        "sglang": _sglang("exaone_moe_mtp.py#L38"),
        "llamacpp": _kept("exaone-moe.cpp#L66"),
        "transformers": _ignores("exaone_moe/modeling_exaone_moe.py#L395"),
    },
    sources=(_VM + "exaone_moe.py#L235", _LC + "exaone.py#L158"),
    remarks=(
        "the block slides unless mtp_layer_types says otherwise; full attention has RoPE in vLLM alone",
        "the MLP is dense in vLLM and llama.cpp",
    ),
)
_EXAONE4_5 = replace(
    _EXAONE_MOE, name="exaone4_5", title="EXAONE-4.5", model_types=("exaone4_5", "exaone4_5_text"),
    draft_types=("exaone4_5_mtp",), block={}, max_modules=None, wrappers=_TEXT,
    engines={
        "vllm": _vllm("model_executor/models/exaone4_5_mtp.py#L45"),
        "sglang": _NONE,
        "llamacpp": _kept("exaone4.cpp#L41"),
        "transformers": _ignores("exaone4_5/modeling_exaone4_5.py#L521"),
    },
    sources=(_LC + "exaone.py#L158",),
    remarks=(
        "several modules share mtp.fc and the norms; with mtp_share_layers they share mtp.layers.0, too",
        "the block norms after attention and MLP, as the trunk's layers do",
    ),
    unverified=("how many modules the release has",),
)
_INKLING = Family(
    name="inkling", title="Inkling", model_types=("inkling_mm_model", "inkling_model", "inkling_text"),
    runtime_names=("w13_weight", "w2_weight", "w13_dn.weight"), draft_types=("inkling_mtp",),
    count_fields=("mtp_config.num_nextn_predict_layers", "num_mtp_layers"),
    default_count=0,
    names={
        "token_norm": "model.mtp.layers.{module}.embed_norm", "hidden_norm": "model.mtp.layers.{module}.hidden_norm",
        "projection": "model.mtp.layers.{module}.input_proj", "final_norm": "model.mtp.chain_norm",
        "block": "model.mtp.layers.{module}.transformer_block",
    },
    optional={"final_norm": "chain_hidden_post_norm"},
    trunk={"embedding": "model.llm.embed", "output": "model.llm.unembed"}, concat="hidden_first", order="chained",
    block={"layer_types": ["hybrid"], "mlp_layer_types": ["dense"]},
    block_renames={
        "self_attn.q_proj": "attn.wq_du", "self_attn.k_proj": "attn.wk_dv", "self_attn.v_proj": "attn.wv_dv",
        "self_attn.r_proj": "attn.wr_du", "self_attn.o_proj": "attn.wo_ud", "self_attn.k_sconv.conv1d": "attn.k_sconv",
        "self_attn.v_sconv.conv1d": "attn.v_sconv", "self_attn": "attn", "attn_sconv.conv1d": "attn_sconv",
        "mlp_sconv.conv1d": "mlp_sconv", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
        "mlp.gate_up_proj": "mlp.w13_dn", "mlp.down_proj": "mlp.w2_md",
    },
    interleaved_gate_up=("mlp",),
    engines={
        "vllm": _vllm("models/inkling/nvidia/mtp.py#L76", missing="raises"),
        "sglang": EngineSupport("runs", _SM + "inkling.py#L1667", missing="raises"),
        "llamacpp": _NONE,
        "transformers": EngineSupport(
            "runs", _MTP_MODEL, embedded="raw", missing="raises",
            notes=("a sliding module (mtp_config.local_layer_ids) has no window: its mask is the causal one",),
        ),
    },
    sources=(_HF + "conversion_mapping.py#L188",),
    remarks=(
        "embedding: vLLM says that the raw one costs first-token acceptance 0.85 -> 0.70",
        "with log_scaling_n_floor, full attention depends on the position: a pair's is its token's in transformers, "
        "its state's elsewhere and here",
        "the head is bf16 whatever the trunk is, in mtp.safetensors",
    ),
)
_MELLUM = Family(
    name="mellum", title="Mellum", model_types=("mellum",),
    count_fields=("num_nextn_predict_layers", "num_mtp_layers"), default_count=0, names=_MTP_PREFIX,
    block={"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]}, max_modules=1, layer_pairs=_NORMED,
    engines={
        "vllm": _NONE,
        "sglang": _NONE,
        "llamacpp": EngineSupport("absent", _LM + "mellum.cpp"),
        "transformers": EngineSupport("runs", _MTP_MODEL, missing="raises", modules=1),
    },
    sources=(_HM + "mellum/modular_mellum.py#L144",),
)
_MINIMAX_M3 = Family(
    name="minimax_m3", router_bias=_ROUTER_BIAS, title="MiniMax-M3",
    model_types=("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3_text", "minimax_m3"),
    draft_types=("minimax_m3_mtp",), count_fields=("num_mtp_modules",), default_count=1,
    names=_module("model.mtp.layers.{module}") | {"block": "model.mtp.layers.{module}.transformer_layer"},
    next_hidden="pre", norm_weight="1+w", wrappers={"language_model.": ""}, separate_gate_up=("mlp.shared_experts",),
    block={"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"]}, layer_pairs=_NORMED,
    block_renames={
        "self_attn.indexer.q_proj": "self_attn.index_q_proj", "self_attn.indexer.k_proj": "self_attn.index_k_proj",
        "self_attn.indexer.q_norm": "self_attn.index_q_norm", "self_attn.indexer.k_norm": "self_attn.index_k_norm",
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.gate": "block_sparse_moe.gate", "mlp.shared_experts": "block_sparse_moe.shared_experts",
        "mlp.experts.{expert}.gate_proj": "block_sparse_moe.experts.{expert}.w1",
        "mlp.experts.{expert}.down_proj": "block_sparse_moe.experts.{expert}.w2",
        "mlp.experts.{expert}.up_proj": "block_sparse_moe.experts.{expert}.w3",
    },
    engines={
        "vllm": _vllm(
            "models/minimax_m3/nvidia/mtp.py#L41", "num_mtp_modules > 1 does not start the multi-module runner",
            "weight_scale_inv means MXFP8 scales", missing="module", zeroes=True,
        ),
        "sglang": EngineSupport("ignores", _SM + "minimax_m3.py#L860"),
        "llamacpp": EngineSupport("drops", _LC + "minimax.py#L214"),
        "transformers": _ignores("minimax_m3_vl/modeling_minimax_m3_vl.py#L686"),
    },
    sources=(_HF + "conversion_mapping.py#L756",),
    unverified=("next_hidden: only one engine runs the head", _FP8_UNKNOWN),
)
_KIMI_K3 = Family(
    name="kimi_k3", title="Kimi-K3", model_types=("kimi_k3",), draft_types=("kimi_k3_mtp",), count_fields=_NEXTN,
    default_count=0, names=_APPENDED, hidden="pre", next_hidden="pre", wrappers=_TEXT,
    engines={
        "vllm": _vllm("models/kimi_k3/nvidia/mtp.py#L71", zeroes=True, unset=_LOST),
        "sglang": _NONE,
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=(), own_block=True, block_lacks=("self_attention_res", "mlp_res"),
    cannot_run="transformers has no trunk of this type",
    remarks=("lm_head takes the state after the norm, hidden and next_hidden are before it",),
    unverified=("one engine alone runs the head", "that eh_proj is bf16 in the release: vLLM builds it unquantized"),
)
_PANGU = replace(
    _DEEPSEEK_V3, name="pangu_ultra_moe", title="openPangu-Ultra-MoE", model_types=("pangu_ultra_moe",),
    draft_types=("pangu_ultra_moe_mtp",), count_fields=_NEXTN, block={}, fp8=None,
    engines={
        "vllm": replace(_DEEPSEEK_V3.engines["vllm"], source=_VM + "openpangu_mtp.py#L51", missing="unquantized"),
        "sglang": _NONE,
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=(), cannot_run="transformers has no trunk of this type", unverified=("one engine alone runs the head",),
)
_PANGU_V2 = replace(
    _DEEPSEEK_V3, name="openpangu_v2", title="openPangu-2.0-Flash", model_types=("openpangu_v2",), draft_types=(),
    count_fields=_NEXTN, default_count=0, order="chained", block={}, fp8=None,
    engines=dict.fromkeys(("vllm", "sglang", "llamacpp", "transformers"), _NONE),
    sources=(
        "https://github.com/ikawrakow/ik_llama.cpp/pull/2065",
        "https://github.com/ikawrakow/ik_llama.cpp/blob/00a929e/src/graphs/build_openpangu.cpp#L25",
        "https://github.com/vllm-project/vllm/pull/47271",
    ),
    own_block=True, block_lacks=("attn_mhc_module", "mlp_mhc_module", "block_post_layernorm"),
    cannot_run="transformers has no trunk of this type",
    remarks=(
        "ik_llama.cpp runs it: its converter maps the names above, and its graph has no hyper-connections in the block",
        "the file's embedding and lm_head inside a module are used where it has them",
        "the block slides with a window of its own (sliding_window_list)",
    ),
    unverified=("whether the trunk's state is taken before or after its final norm",),
)
_AXK2 = replace(
    _DEEPSEEK_V32, name="axk2", title="A.X-K2", model_types=("axk2",), count_fields=_NEXTN, default_count=0, block={},
    fp8=None, engines=_UNRUN,
    sources=("https://github.com/ggml-org/llama.cpp/pull/26757", _HM + "axk2/modeling_axk2.py#L51"),
    cannot_run="no public code runs this head, so that its conventions are not known",
    remarks=("a pull request for llama.cpp adds it; A.X-K1 has no head",),
    unverified=("which of the head's own norms are gated, as those of the trunk's layers are",),
)
_XING4 = replace(
    _DEEPSEEK_V3, name="xing4_0", title="Xing4.0 (XingChen4)", model_types=("xing4_0", "xingchen4"), draft_types=(),
    count_fields=_NEXTN, default_count=0, block={}, fp8=None, engines=_UNRUN, own_block=True,
    models=("Xing4.0-29B-A4B",),
    sources=("https://github.com/Blaizzy/mlx-vlm/blob/v0.7.10/mlx_vlm/models/xing4_0/language.py#L92",),
    cannot_run="transformers has no trunk of this type",
    remarks=("mlx-vlm 0.7.10 loads the trunk and drops the head",),
    unverified=("whether the head's block has hyper-connections (attn_hc, ffn_hc), as the trunk's layers have",),
)
_LONGCAT_NGRAM = replace(
    _LONGCAT, name="longcat_flash_ngram", title="LongCat-Flash with n-gram embeddings (Lite), and sparse",
    # The last is the class of LongCat-2.0, whose model_type is null.
    model_types=("longcat_flash_ngram", "longcat_flash_sparse", "longcat"), draft_types=(), engines=_UNRUN,
    models=("LongCat-Flash-Lite", "LongCat-2.0"),
    sources=(
        "https://github.com/Blaizzy/mlx-vlm/blob/v0.7.10/mlx_vlm/models/longcat_flash_ngram/language.py#L178",
        "https://github.com/Blaizzy/mlx-vlm/blob/v0.7.10/mlx_vlm/models/longcat_flash_sparse/language.py#L667",
        "https://github.com/vllm-project/vllm/pull/48302",
    ),
    cannot_run="transformers has no trunk of this type",
    remarks=("mlx-vlm 0.7.10 loads the trunk and drops model.mtp.",),
    unverified=("whether the head embeds n-grams, as the trunk does",),
)
_ERNIE_VL = replace(
    _ERNIE, name="ernie4_5_vl_moe", title="ERNIE-4.5-VL (mixture of experts)",
    model_types=("ernie4_5_moe_vl", "ernie4_5_vl_moe"), draft_types=(), engines=_UNRUN, wrappers=_TEXT, own_block=True,
    sources=("https://github.com/Blaizzy/mlx-vlm/blob/v0.7.10/mlx_vlm/models/ernie4_5_moe_vl/language.py#L673",),
    cannot_run="the trunk routes tokens of images to experts of their own, which nextn does not do",
    remarks=("mlx-vlm 0.7.10 drops mtp_block, mtp_linear_proj, mtp_hidden_norm and mtp_emb_norm at any depth",),
    unverified=("which releases hold a head",),
)
_HY_V4_VL = replace(
    _HY_V4, name="hy_v4_vl", title="Hunyuan V4 VL (HY-V4-VL)", model_types=("hy_v4_vl", "hy_v4_vl_text"),
    draft_types=(), wrappers=_TEXT,
    engines=_UNRUN | {
        "transformers": EngineSupport(
            "ignores", _HF24 + "models/hy_v4_vl/modeling_hy_v4_vl.py#L718", notes=(_NO_FIELD,),
        ),
    },
    sources=(_HF24 + "conversion_mapping.py#L190",),
    cannot_run="transformers has a trunk of this type from 5.24 on, and nextn has not been run on it",
)
_IQUEST_Q1 = Family(
    name="iquest_q1", title="IQuest-Q1", model_types=("iquest_q1",), draft_types=("iquest_q1_mtp",),
    count_fields=("num_mtp_layers",), default_count=0,
    names=_module("mtp_layers.{module}") | {"block": "mtp_layers.{module}.mtp_model_layer"},
    block_renames={
        "mlp.gate": "mlp.router", "mlp.experts.gate_up_proj": "mlp.experts.fc",
        "mlp.experts.down_proj": "mlp.experts.proj",
    },
    experts="fused", trunk_experts=("fused",),
    engines={
        "vllm": _NONE,
        "sglang": EngineSupport(
            "runs", _SM + "iquest_q1_mtp.py#L23", trunk_roles=(), missing="unquantized", modules=1,
            notes=(
                "takes the head as a checkpoint of its own, with embed_tokens, lm_head and mtp. in place of "
                "mtp_layers.0., and skips mtp_layers. beside the trunk",
            ),
        ),
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=(_SM + "iquest_q1.py#L798", _SGLANG + "configs/iquest_q1.py#L166"), own_block=True,
    block_pairs={"attn_out_norm": "ffn_out_norm"},
    cannot_run="transformers has no trunk of this type",
    remarks=("the block is the trunk's first layer, which norms its MLP's output (ffn_out_norm); later ones do not",),
    unverified=("one engine alone runs the head", "that the names behind mtp_layers.<number>. are those of the draft"),
)
_MOTIF3 = Family(
    name="motif3", title="Motif-3", model_types=("Motif",), count_fields=_NEXTN, default_count=0,
    models=("Motif-3-Beta", "Motif-3-NVFP4"),
    names={
        "token_norm": "model.mtp_layers.{module}.embed_norm", "projection": "model.mtp_layers.{module}.input_proj",
        "final_norm": "model.mtp_layers.{module}.final_layernorm", "block": "model.mtp_layers.{module}",
    },
    concat="hidden_first", order="chained",
    engines=_UNRUN | {"llamacpp": EngineSupport("drops", _LC.replace("0c1e57098", "1732a6b") + "motif3.py#L12")},
    sources=(
        "https://github.com/MotifTechnologies/vllm/blob/4cd9eb4/vllm/model_executor/models/motif_mtp.py#L24-L31",
    ),
    own_block=True, block_lacks=("mhc_attn", "mhc_ffn"), block_adds=("mlp.",),
    cannot_run="transformers has no trunk of this type",
    remarks=(
        "the vendor's fork of vLLM runs it: the trunk's state has no norm in front of the projection",
        "the block is dense, slides with a window of its own and has no hyper-connections",
    ),
    unverified=("one engine alone runs the head", _FP8_UNKNOWN),
)
_DOTS3_NOTE = Family(
    name="dots3_note", title="dots.note (dots3)", model_types=("dots3_note", "dots3_note_text"),
    router_bias=_ROUTER_BIAS,
    draft_types=("dots3_note_mtp",), count_fields=_NEXTN, default_count=1,
    names=_APPENDED | {"embedding": "model.mtp.embed_tokens"}, own=("embedding",), max_modules=1, wrappers=_TEXT,
    block={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    engines={
        "vllm": EngineSupport(
            "runs", _VLLM + "models/dots3_note/nvidia/mtp.py#L34", position0="zero", trunk_roles=("output",),
            missing="module", unset=_LOST,
        ),
        "sglang": EngineSupport(
            "runs", _SM + "dots3_common/nextn.py#L34", trunk_roles=("output",), missing="silent", modules=1,
        ),
        "llamacpp": _kept("dots3note.cpp#L109"),
        "transformers": _ignores("dots3_note/modeling_dots3_note.py#L672"),
    },
    sources=(_LC + "dots3.py#L37", _VLLM + "models/dots3_note/nvidia/model.py#L627", _SM + "dots3_nextn.py#L6"),
    remarks=("the published config has no count: llama.cpp looks for model.mtp.embed_tokens.weight",),
)
_GIGACHAT = replace(
    _DEEPSEEK_V3, name="gigachat3_5", title="GigaChat 3.5", model_types=("gigachat3_5",), draft_types=(),
    count_fields=_NEXTN, default_count=0, next_hidden="pre", order="chained", block={}, fp8=None,
    engines={
        "vllm": _NONE,
        "sglang": EngineSupport("runs", _SM + "gigachat35_mtp.py#L45", missing="silent"),
        "llamacpp": _NONE,
        "transformers": _NONE,
    },
    sources=(), cannot_run="transformers has no trunk of this type", unverified=("one engine alone runs the head",),
)
_COHERE2_MOE = replace(
    _DEEPSEEK_V3, name="cohere2_moe", title="Cohere2-MoE (North-Mini-Code)", model_types=("cohere2_moe",),
    router_bias="",
    draft_types=(), count_fields=_NEXTN, default_count=0, fp8=None,
    # Full attention with RoPE, which transformers has in its sliding layers alone: so a window that nothing leaves.
    block={"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"], "sliding_window": 2**40},
    engines={
        "vllm": _NONE,
        "sglang": _NONE,
        "llamacpp": EngineSupport("runs", _LM + "cohere2moe.cpp#L52", trunk_roles=(), missing="raises", modules=1),
        "transformers": _ignores("cohere2_moe/modeling_cohere2_moe.py#L563"),
    },
    sources=(_LC + "command_r.py#L76",), unverified=("one engine alone runs the head",),
)

# Heads for trunks whose models were published without one. They are not in FAMILIES, as no model_type is theirs.
_NO_MTP = "no MTP graph for models without a family of their own"
# The layout of transformers' MtpModel for any decoder: module k is layer num_hidden_layers + k.
GENERIC = replace(
    _DEEPSEEK_V3, name="generic", title="A head for any decoder-only model", model_types=(), draft_types=(),
    count_fields=("num_mtp_layers",), default_count=0, block={}, fp8=None, wrappers=_TEXT,
    runtime_names=("qkv_proj.weight", "qkv_proj.bias", "gate_up_proj.weight", "gate_up_proj.bias"),  # Phi, GLM-4
    names={role: path for role, path in _APPENDED.items() if role not in ("embedding", "output")},
    engines={
        "vllm": EngineSupport("absent", _VM + "registry.py#L657", notes=(_NO_MTP,)),
        "sglang": EngineSupport("absent", _SM + "registry.py", notes=(_NO_MTP,)),
        "llamacpp": EngineSupport("absent", _LM, notes=(_NO_MTP,)),
        "transformers": EngineSupport(
            "runs", _MTP_MODEL, missing="raises",
            notes=("needs the layer's name in _keys_to_ignore_on_load_unexpected",),
        ),
    },
    sources=(_MTP_MODEL,), unverified=(),
)
# vLLM and SGLang run it as a separate draft beside any trunk whose sizes a Qwen2 layer can have, and hand it the
# trunk's state after the final norm, and embeddings without what the trunk's model does to them.
MIMO_DRAFT = replace(
    _MIMO, name="mimo_draft", title="A draft in MiMo's layout beside another trunk", model_types=(), draft_types=(),
    default_count=1, max_modules=1, embedded="raw", layer_model="qwen2", separate=True, cannot_run="",
    engines={
        **_MIMO.engines,
        "llamacpp": EngineSupport(
            "refuses", _LLAMA + "common/speculative.cpp#L1534",
            notes=("the graphs of trunks without a head hand over no hidden state, and drafts would be silently bad",),
        ),
    },
)
# The block is the trunk's own layer without scaled rotary embeddings: in step35.cpp it is the layer with a window.
STEP35_DRAFT = replace(
    GENERIC, name="step35_draft", title="A head for a GGUF in step35's layout with another trunk", max_modules=1,
    hidden="pre", next_hidden="pre", has_scaled_rotary=False, separate=True,
    engines={
        **dict.fromkeys(("vllm", "sglang", "transformers"), _NONE),
        "llamacpp": EngineSupport("runs", _LM + "step35.cpp#L49", notes=("from the file of `nextn export`",)),
    },
    sources=(),
)
# A head in a repository of its own whose layers have queries only. Its config.json has its own sizes.
GEMMA4_ASSISTANT = Family(
    name="gemma4_assistant", title="Gemma 4 assistants", model_types=(),
    draft_types=("gemma4_assistant", "gemma4_unified_assistant"), count_fields=(), default_count=1, max_modules=1,
    trunk_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    models=tuple(f"gemma-4-{size}-it-assistant" for size in ("E2B", "E4B", "12B", "26B-A4B", "31B")),
    names={
        "projection": "pre_projection", "next_projection": "post_projection", "final_norm": "model.norm",
        "output": "model.embed_tokens", "centroids": "masked_embedding.centroids",
        "token_ordering": "masked_embedding.token_ordering", "block": "model.layers",
    },
    aliases={"output": ("lm_head",)}, own=("output",), orders=("token_ordering",),
    optional=dict.fromkeys(("centroids", "token_ordering"), "use_ordered_embeddings"),
    # Its files hold nothing of the trunk.
    trunk={"embedding": "trunk.embed_tokens", "output": "trunk.lm_head"}, separate=True, trunk_kv="token",
    engines={
        "vllm": EngineSupport(
            "runs", _VM + "gemma4_mtp.py#L61", trunk_kv="hidden", trunk_roles=("embedding",),
            notes=("v1/spec_decode/gemma4.py: reads the trunk's last layer of the type that stores keys",),
        ),
        "sglang": EngineSupport("runs", _SM + "gemma4_mtp.py#L59", trunk_kv="hidden", trunk_roles=("embedding",)),
        "llamacpp": EngineSupport(
            "runs", _LM + "gemma4-assistant.cpp#L47", trunk_roles=("embedding",), missing="raises",
            notes=("conversion/gemma.py leaves out the centroids: drafts are from the whole vocabulary",),
        ),
        "transformers": EngineSupport(
            "runs", _HM + "gemma4_assistant/modeling_gemma4_assistant.py#L109", trunk_roles=("embedding",),
            missing="raises", notes=(
                "generate(assistant_model=): a rejected draft's keys stay visible in the round after it",
                "5.23 cannot build one, nor hand over the keys of a trunk without shared layers; 5.24 can build one",
            ),
        ),
    },
    sources=(_HF + "generation/candidate_generator.py#L1209",),
    unverified=("which position of the queries the released weights were trained with",),
)

FAMILIES: tuple[Family, ...] = (
    _DEEPSEEK_V3, _DEEPSEEK_V32, _DEEPSEEK_V4, _GLM4_MOE, _GLM4V_MOE, _GLM4_MOE_LITE, _GLM_MOE_DSA, _GLM5_NEXT,
    _GLM_OCR, _QWEN3_NEXT, _QWEN3_5, _QWEN3_5_MOE, _QWEN4_EXP, _INTERNS2_MOBIUS, _MIMO, _MIMO_V2, _ERNIE, _ERNIE_VL,
    _LONGCAT, _LONGCAT_NGRAM, _NEMOTRON_H, _NEMOTRON_PUZZLE, _STEP, _STEP5, _BAILING_V2, _BAILING_HYBRID, _HY_V3,
    _HY_V4, _HY_V4_VL, _EXAONE_MOE, _EXAONE4_5, _INKLING, _MELLUM, _MINIMAX_M3, _KIMI_K3, _PANGU, _PANGU_V2, _XING4,
    _AXK2, _IQUEST_Q1, _MOTIF3, _DOTS3_NOTE, _GIGACHAT, _COHERE2_MOE,
)
# fmt: on
