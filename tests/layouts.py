"""The published layouts: config and tensors of two trunk layers and of one block of the head, by name.

Where transformers has the trunk, test_artifacts lets it load these names and shapes; the heads' blocks, and the trunks
that transformers lacks, are as the loaders of vLLM, SGLang and llama.cpp match them. What those left open is said
beside the entry. Knows neither values nor files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parts import (
    DEEPSEEK,
    DIM,
    EXPERTS,
    GATED,
    HEADS,
    INDEXER,
    INNER,
    KV,
    LAYERS,
    QWEN_MOE,
    RANK,
    SPARSE,
    STREAMS,
    H,
    Shapes,
    collapse,
    deepseek_v4,
    dense,
    fused,
    gdn,
    gigachat,
    gqa,
    hyper,
    inkling,
    kda,
    lettered,
    mixer,
    mla,
    moe,
    norms,
    under,
)


@dataclass(frozen=True)
class Layout:
    """config: keys over the common sizes. trunk: tensors of layer 0 and 1. block: of the head, if not trunk[-1].

    extra: the trunk's tensors outside its layers, beside embedding, output and norm. module: canonical name -> shape of
    the head's, over what its roles usually are. norm: the trunk's final norm, below its root. text: config keys that
    stand in text_config. tied: no output head in the file.
    """

    config: dict[str, object]
    trunk: tuple[Shapes, Shapes]
    block: Shapes | None = None
    extra: Shapes = field(default_factory=dict)
    module: Shapes = field(default_factory=dict)
    norm: str = "norm"
    composite: bool = False
    tied: bool = False


# Keys of the configs, by what they describe.
ROUTED = {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "num_experts_per_tok": 2, "n_shared_experts": 1,
          "n_group": 1, "topk_group": 1}  # fmt: skip
GROUP = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": INNER}
LATENT = {"q_lora_rank": RANK, "kv_lora_rank": RANK, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": HEADS, "head_dim": None}  # fmt: skip
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
FIRST, SPLIT = {"first_k_dense_replace": 1}, {"mlp_layer_types": ["dense", "sparse"]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
QWEN = DELTA | {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
                "shared_expert_intermediate_size": INNER}  # fmt: skip


def config(model_type: str, *parts: Mapping[str, object]) -> dict[str, object]:
    return {"model_type": model_type} | {key: value for part in parts for key, value in part.items()}


def _glm() -> Iterator[tuple[str, Layout]]:
    """DeepSeek and GLM."""
    yield "deepseek_v3", Layout(config("deepseek_v3", ROUTED, LATENT, FIRST), DEEPSEEK)
    yield "deepseek_v32", Layout(config("deepseek_v32", ROUTED, LATENT, FIRST, INDEX), SPARSE)
    # Releases hold the experts as packed MXFP4, which no row describes: here they are as the rest.
    yield "deepseek_v4", Layout(
        config("deepseek_v4", ROUTED, INDEX, {
            "num_key_value_heads": 1, "intermediate_size": None, "head_dim": 16, "qk_rope_head_dim": 8,
            "q_lora_rank": RANK, "o_groups": 2,
            "o_lora_rank": 8, "num_hash_layers": 0, "compress_ratios": [4, 128], "hc_mult": STREAMS,
        }),
        (deepseek_v4(indexed=True, rate=4), deepseek_v4(indexed=False, rate=128)), deepseek_v4(indexed=False, rate=0),
        extra=collapse("hc_head"), module=collapse("collapse"),
    )  # fmt: skip
    biased = norms() | gqa(bias=True, qk=True)
    glm = config("glm4_moe", ROUTED, FIRST, {"attention_bias": True, "use_qk_norm": True})
    yield "glm4_moe", Layout(glm, (biased | dense(), biased | moe()))
    unnormed = norms() | gqa(bias=True)
    glm = config("glm4v_moe_text", ROUTED, FIRST, {"attention_bias": True})
    yield "glm4v_moe", Layout(glm, (unnormed | dense(), unnormed | moe()))
    yield "glm4_moe_lite", Layout(config("glm4_moe_lite", ROUTED, LATENT, SPLIT), DEEPSEEK)
    yield "glm_moe_dsa", Layout(config("glm_moe_dsa", ROUTED, LATENT, FIRST, INDEX), SPARSE)
    pooled = mla(rope=0) | INDEXER | under("self_attn.indexer", {
        "index_kpool_compress_ape": (4, 16), "index_kpool_compress_gate": (16, H),
    })  # fmt: skip
    streams = hyper("hc_attn") | hyper("hc_ffn")
    # That the head's indexer pools keys as the trunk's does is taken from vLLM, which builds the trunk's class.
    yield "glm5_next", Layout(
        config("glm5_next_text", ROUTED, LATENT, SPLIT, INDEX, {
            "qk_rope_head_dim": 0, "linear_head_dim": DIM, "linear_num_heads": HEADS, "hc_mult": STREAMS,
            "index_kpool": 4, "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
        }),
        (norms() | kda("self_attn") | dense() | streams, norms() | pooled | moe() | streams), norms() | pooled | moe(),
    )  # fmt: skip
    sandwich = norms("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    ocr = sandwich | gqa() | {"mlp.gate_up_proj.weight": (4 * H, H), "mlp.down_proj.weight": (H, 2 * H)}
    yield "glm_ocr", Layout(config("glm_ocr_text"), (ocr, ocr))


def _qwen() -> Iterator[tuple[str, Layout]]:
    """Qwen and MiMo."""
    recurrent = norms() | gdn()
    yield "qwen3_next", Layout(config("qwen3_next", QWEN), (norms() | gdn(one=True) | QWEN_MOE, GATED | QWEN_MOE))
    yield "qwen3_5", Layout(config("qwen3_5_text", DELTA), (recurrent | dense(), GATED | dense()))
    # bf16 releases fuse the trunk's experts and not the head's; fp8 ones fuse neither. Both load; here none is fused.
    yield "qwen3_5_moe", Layout(config("qwen3_5_moe_text", QWEN), (recurrent | QWEN_MOE, GATED | QWEN_MOE))
    # As with 3.5, the trunk's experts load fused and not; transformers writes them one by one.
    both = mixer("attn_hyper_connection") | mixer("mlp_hyper_connection")
    selected = gqa(qk=True, gate=2) | under("self_attn.indexer", {
        "index_qk_proj.weight": (24, H), "q_layernorm.weight": (8,), "k_layernorm.weight": (8,),
    })  # fmt: skip
    yield "qwen4_exp", Layout(
        config("qwen4_exp_text", QWEN, {
            "hc_count": STREAMS, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
            "indexer_budget": 8, "indexer_compress_ratio": 2,
        }),
        (gdn() | both | QWEN_MOE, selected | both | QWEN_MOE), selected | both | fused(QWEN_MOE),
        extra=mixer("hyper_connection_mixer", inject=False), norm="",
        module=mixer("collapse", inject=False) | {"hidden_norm.weight": (STREAMS * H,)},
    )  # fmt: skip
    # The trunk's layers have a shared expert and, outside them, banks of routed ones; the head's block has its own.
    shared = {name: shape for name, shape in QWEN_MOE.items() if ".experts." not in name and ".gate." not in name}
    banks = {f"meta_mlp.0.{name.removeprefix('mlp.')}": shape for name, shape in QWEN_MOE.items() if name not in shared}
    yield "interns2_mobius", Layout(
        config("interns2_mobius_text", QWEN, {"mtp_num_experts": EXPERTS, "mtp_num_experts_per_tok": 2}),
        (recurrent | shared, GATED | shared), GATED | QWEN_MOE, extra=banks,
    )  # fmt: skip
    qwen2 = norms() | gqa(bias=True) | dense()
    yield "mimo", Layout(config("mimo"), (qwen2, qwen2))
    # Sliding layers have twice the key-value heads. V2.5 and Pro have one self_attn.qkv_proj, fp8; its o_proj is bf16.
    sink = {"self_attn.attention_sink_bias": (HEADS,)}
    local = norms("input_layernorm", "pre_mlp_layernorm") | gqa(kv=HEADS) | sink | dense()
    yield "mimo_v2", Layout(
        config("mimo_v2_flash", ROUTED, {
            "n_shared_experts": None, "layer_types": ["full_attention", "sliding_attention"], "v_head_dim": 8,
        }),
        (norms() | gqa() | dense(), norms() | gqa(kv=HEADS) | sink | moe(shared="")), local,
    )  # fmt: skip


def _mixed() -> Iterator[tuple[str, Layout]]:
    """ERNIE, LongCat, Nemotron, Step."""
    ernie = {f"moe_{key}": value for key, value in
             {"intermediate_size": INNER, "num_experts": EXPERTS, "k": 2, "num_shared_experts": 1}.items()}  # fmt: skip
    statics = {"mlp.moe_statics.e_score_correction_bias": (1, EXPERTS)}
    plain = norms() | gqa()
    yield "ernie4_5_moe", Layout(
        config("ernie4_5_moe", ernie, {"tie_word_embeddings": True}),
        (plain | dense(), plain | moe(bias="") | statics), plain | dense(), tied=True,
    )  # fmt: skip
    yield "ernie4_5_vl_moe", Layout(
        config("ernie4_5_moe_vl", ernie), (plain | dense(), plain | moe(bias="") | statics), plain | dense(),
    )  # fmt: skip
    shortcut: Shapes = {}
    for half in ("0", "1"):
        shortcut |= norms(f"input_layernorm.{half}", f"post_attention_layernorm.{half}")
        shortcut |= mla(root=f"self_attn.{half}") | dense(f"mlps.{half}")
    router = {"mlp.router.classifier.weight": (EXPERTS + 2, H), "mlp.router.e_score_correction_bias": (EXPERTS + 2,)}
    shortcut |= router | {name: shape for name, shape in moe(shared="").items() if ".experts." in name}
    for name in ("longcat_flash", "longcat_flash_ngram"):
        yield name, Layout(
            config(name, LATENT, {
                "num_hidden_layers": None, "num_layers": LAYERS, "ffn_hidden_size": 2 * H,
                "expert_ffn_hidden_size": INNER, "moe_topk": 2, "n_routed_experts": EXPERTS, "zero_expert_num": 2,
            }),
            (shortcut, shortcut), norms() | mla() | dense("transformer_layer.mlp"),
        )  # fmt: skip
    mamba: Shapes = {
        "norm.weight": (H,), "mixer.A_log": (4,), "mixer.D": (4,), "mixer.dt_bias": (4,), "mixer.conv1d.bias": (64,),
        "mixer.conv1d.weight": (64, 1, 4), "mixer.in_proj.weight": (100, H), "mixer.norm.weight": (32,),
        "mixer.out_proj.weight": (H, 32),
    }  # fmt: skip
    attention, squared = norms("norm") | gqa(root="mixer"), norms("norm") | {
        name: shape for name, shape in moe(root="mixer").items() if "gate_proj" not in name
    }  # fmt: skip
    sizes = {"ssm_state_size": 8, "mamba_n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 8,
             "moe_shared_expert_intermediate_size": INNER}  # fmt: skip
    puzzle = [{"block_type": "attention"}, {"block_type": "moe", "n_routed_experts": EXPERTS}]
    for name, patterns in (
        ("nemotron_h", {"hybrid_override_pattern": "M*", "mtp_hybrid_override_pattern": "*E"}),
        ("nemotron_h_puzzle", {"block_configs": [{"block_type": "mamba"}, puzzle[0]], "mtp_block_configs": puzzle}),
    ):
        yield name, Layout(
            config(name, ROUTED, sizes, patterns),
            (mamba, attention), under("0", attention) | under("1", squared), norm="norm_f",
        )  # fmt: skip
    # The head is dense, as moe_layers_enum ends with the trunk; its sliding layers have more heads than the others.
    gated = norms() | gqa(qk=True) | {"self_attn.g_proj.weight": (HEADS, H)}
    stacked: Shapes = {"moe.gate.weight": (EXPERTS, H), "moe.router_bias": (EXPERTS,)} | dense("share_expert", INNER)
    stacked |= {name: (EXPERTS, *shape) for name, shape in dense("moe", INNER).items()}
    yield "step3p5", Layout(
        config("step3p5", ROUTED, SPLIT, {"share_expert_dim": INNER, "sliding_window": 8}),
        (gated | dense(), gated | stacked), gated | dense(),
    )  # fmt: skip
    yield "step5", Layout(
        config("step5", ROUTED, SPLIT, {"share_expert_dim": INNER, "sliding_window": 8}),
        (gated | dense(), gated | stacked), gated | dense(),
    )  # fmt: skip


def _ling() -> Iterator[tuple[str, Layout]]:
    """Ling, Hunyuan, EXAONE."""
    ling: Shapes = norms() | under("attention", {
        "query_key_value.weight": ((HEADS + 2 * KV) * DIM, H), "query_layernorm.weight": (DIM,),
        "key_layernorm.weight": (DIM,), "dense.weight": (H, HEADS * DIM),
    })  # fmt: skip
    routed = moe(bias="gate.expert_bias")
    yield "bailing_moe_v2", Layout(config("bailing_moe_v2", GROUP, FIRST), (ling | dense(), ling | routed))
    lightning = kda("attention", out="dense", low="f_proj g_proj")
    latent_ling = mla(query_rank=False, root="attention", out="dense") | {"attention.g_proj.weight": (HEADS, H)}
    yield (
        "bailing_hybrid",
        Layout(
            config(
                "bailing_hybrid",
                ROUTED,
                LATENT,
                FIRST,
                GROUP,
                {"head_dim": DIM, "q_lora_rank": None, "layer_group_size": 2},
            ),
            (norms() | lightning | dense(), norms() | latent_ling | routed),
        ),
    )
    hunyuan = norms() | gqa(qk=True)
    yield (
        "hy_v3",
        Layout(
            config("hy_v3", GROUP, SPLIT),
            (hunyuan | dense(), hunyuan | moe(bias="expert_bias", shared="shared_mlp", gate="router.gate")),
        ),
    )
    gate = {"self_attn.linear_gate.weight": (32, H), "self_attn.learnable_sink_param": (HEADS,)}
    four, ihc = norms() | mla() | INDEXER | gate, {}
    for stem in ("hc_attn_layer", "hc_mlp_layer"):
        ihc |= hyper(f"{stem}.hc_pre.hc", width=2 * STREAMS, scales=2)
    # Gate and sink in the head's attention, as in the trunk's: another loader (rtp-llm) reads both there.
    for name in ("hy_v4", "hy_v4_vl"):
        yield name, Layout(
            config(name, ROUTED, LATENT, SPLIT, INDEX, {"hc_mult": STREAMS}),
            (four | dense() | ihc, four | fused(moe()) | ihc), four | fused(moe()), extra=collapse("hc_head.hc_head"),
        )  # fmt: skip
    exaone = norms() | gqa(qk=True)
    yield (
        "exaone_moe",
        Layout(
            config("exaone_moe", GROUP, FIRST),
            (exaone | dense(), exaone | moe(bias="e_score_correction_bias")),
            exaone | dense(),
        ),
    )
    after = norms("post_attention_layernorm", "post_feedforward_layernorm") | gqa(qk=True) | dense()
    yield "exaone4_5", Layout(config("exaone4_5_text", {"sliding_window": 8}), (after, after))


def _rest() -> Iterator[tuple[str, Layout]]:
    """Inkling, Mellum, MiniMax."""
    yield "inkling", Layout(
        config("inkling_text", ROUTED, SPLIT, {
            "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV, "swa_head_dim": DIM, "d_rel": 4,
            "rel_extent": 8, "sliding_window_size": 8, "local_layer_ids": [0], "chain_hidden_post_norm": True,
        }),
        (inkling(sparse=False), inkling(sparse=True)), inkling(sparse=False), extra=norms("embed_norm"), composite=True,
    )  # fmt: skip
    mellum = norms() | gqa(qk=True) | moe(bias="", shared="")
    yield "mellum", Layout(config("mellum", GROUP), (mellum, mellum))
    block = lettered(moe(root="block_sparse_moe", bias="e_score_correction_bias"))
    lightning_index = {f"self_attn.index_{name}.weight": shape for name, shape in
                       {"q_proj": (16, H), "k_proj": (8, H), "q_norm": (8,), "k_norm": (8,)}.items()}  # fmt: skip
    minimax = norms() | gqa(qk=True)
    yield "minimax_m3", Layout(
        config("minimax_m3_vl_text", {
            "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": INNER, "rotary_dim": 4,
            "dense_intermediate_size": 2 * H, "shared_intermediate_size": INNER, "index_n_heads": 2,
            "index_head_dim": 8, "layer_types": ["full_attention", "minimax_m3_sparse"],
        }, SPLIT),
        (minimax | dense(), minimax | lightning_index | block),
    )  # fmt: skip


def _latent() -> Iterator[tuple[str, Layout]]:
    """Kimi, openPangu."""
    # Releases pack the trunk's experts as MXFP4. The head's block lacks the residuals over layers, its experts are as
    # narrow as the trunk's.
    residual = {f"{half}_{part}.weight": shape for half in ("self_attention_res", "mlp_res") for part, shape in
                (("norm", (H,)), ("proj", (1, H)))}  # fmt: skip
    kimi_moe = lettered(moe(root="block_sparse_moe"))
    kimi_moe |= {name: (INNER, INNER) for name in kimi_moe if ".experts." in name} | under("block_sparse_moe", {
        "routed_expert_down_proj.weight": (INNER, H), "routed_expert_up_proj.weight": (H, INNER),
        "routed_expert_norm.weight": (INNER,),
    })  # fmt: skip
    full = norms() | mla() | {"self_attn.g_proj.weight": (HEADS * 8, H)} | kimi_moe
    yield (
        "kimi_k3",
        Layout(
            config("kimi_k3", LATENT, GROUP),
            (norms() | kda("self_attn", low="f_a_proj f_b_proj g_proj") | dense() | residual, full | residual),
            full,
            extra={"output_attn_res_norm.weight": (H,), "output_attn_res_proj.weight": (1, H)},
        ),
    )
    double = norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm") | mla()
    yield (
        "pangu_ultra_moe",
        Layout(
            config("pangu_ultra_moe", ROUTED, LATENT, FIRST, {"sandwich_norm": True}),
            (double | dense(), double | moe()),
        ),
    )


def _single_engine() -> Iterator[tuple[str, Layout]]:
    """openPangu 2, A.X-K2, IQuest: transformers has no trunk of them, and at most one engine runs the head."""
    streams: Shapes = {}
    for half in ("attn_mhc_module", "mlp_mhc_module"):
        streams |= {f"{half}.phi": (24, STREAMS * H), f"{half}.branch_alpha": (3,), f"{half}.branch_beta": (24,),
                    f"{half}.norm_gamma": (STREAMS * H,)}  # fmt: skip
    conv = {f"self_attn.{name}_conv.weight": (width, 1, 3) for name, width in
            {"qa": RANK, "compresskv": RANK, "o": HEADS * 8}.items()}  # fmt: skip
    pangu = norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm") | mla()
    pangu |= conv | {"self_attn.param_sink_compressed_kv": (4, RANK), "self_attn.param_sink_k_pe": (4, 8)}
    yield "openpangu_v2", Layout(
        config("openpangu_v2", ROUTED, LATENT, FIRST, INDEX, {"mhc_num_stream": STREAMS, "sliding_window": 8}),
        (pangu | INDEXER | dense() | streams, pangu | moe() | streams | norms("block_post_layernorm")), pangu | moe(),
        extra={"merge_mhc_module.phi": (STREAMS, STREAMS * H), "merge_mhc_module.branch_alpha_pre": (1,)},
    )  # fmt: skip
    gated = {"norm.weight": (H,), "W_down.weight": (4, H), "W_up.weight": (H, 4)}
    mixed = hyper("attn_hc.hc") | hyper("ffn_hc.hc")
    yield "xing4_0", Layout(
        config("xing4_0", ROUTED, LATENT, FIRST, {"hc_mult": STREAMS}),
        (DEEPSEEK[0] | mixed, DEEPSEEK[1] | mixed), DEEPSEEK[1] | mixed,
    )  # fmt: skip
    attention = {name: shape for name, shape in SPARSE[1].items() if name.startswith("self_attn.")}
    attention |= {"self_attn.q_b_proj.weight": (HEADS * 24, 2 * RANK)}  # of queries and gates
    attention |= under("input_layernorm", gated)
    yield "axk2", Layout(
        config("axk2", ROUTED, LATENT, FIRST, INDEX, {"gated_norm_rank": 4}),
        (attention | norms("post_attention_layernorm") | dense(),
         attention | under("post_attention_layernorm", gated) | moe()),
    )  # fmt: skip
    quest = norms("attention_norm", "attn_out_norm", "feed_forward_norm") | gqa(qk=True)
    quest |= {"mlp.router.weight": (EXPERTS, H), "mlp.experts.fc": (EXPERTS, 2 * INNER, H),
              "mlp.experts.proj": (EXPERTS, H, INNER)}  # fmt: skip
    yield "iquest_q1", Layout(
        config("iquest_q1", GROUP), (quest | norms("ffn_out_norm"), quest), quest | norms("ffn_out_norm"),
    )  # fmt: skip
    latent = {"wq_a": (RANK, H), "q_norm": (RANK,), "wq_b": (HEADS * 16, RANK), "wq_b_gate": (HEADS * 8, RANK),
              "wkv_a": (RANK + 8, H), "kv_norm": (RANK,), "wkv_b": (KV * 16, RANK), "lambda_proj": (HEADS - KV, H),
              "wo": (H, HEADS * 8)}  # fmt: skip
    poly = {"act_fn.weight": (3,), "act_fn.bias": (1,)}
    motif = norms() | under("self_attn", {f"{name}.weight": shape for name, shape in latent.items()})
    motif_mlp = dense() | under("mlp", poly)
    mixed = {
        f"{half}.{part}": shape
        for half in ("mhc_attn", "mhc_ffn")
        for part, shape in {
            "rms_norm.weight": (STREAMS * H,),
            "proj_pre.weight": (STREAMS, STREAMS * H),
            "alpha_pre": (1,),
        }.items()
    }
    shared = {name.replace("mlp.", "shared_experts."): shape for name, shape in motif_mlp.items()}
    experts = {"router.gate.weight": (EXPERTS, H), "expert_bias": (EXPERTS,), "experts.down_proj": (EXPERTS, H, INNER),
               "experts.gate_up_proj": (EXPERTS, 2 * INNER, H), "experts.act_fn.weight": (EXPERTS, 3)}  # fmt: skip
    yield "motif3", Layout(
        config("Motif", {"num_experts": EXPERTS, "experts_top_k": 2, "q_lora_rank": RANK, "kv_lora_rank": RANK,
                         "moe_intermediate_size": INNER, "qk_rope_head_dim": 8, "v_head_dim": 8}),
        (motif | motif_mlp | mixed, motif | mixed | under("moe", experts | shared)), motif | motif_mlp,
    )  # fmt: skip


def _gated() -> Iterator[tuple[str, Layout]]:
    """dots, GigaChat; then Cohere."""
    note = norms() | mla() | {"self_attn.g_proj.weight": (HEADS, H), "self_attn.k_rope_only_layernorm.weight": (8,)}
    swa = {f"swa_{key}": value for key, value in LATENT.items() if value} | {"swa_num_attention_heads": HEADS}
    yield "dots3_note", Layout(
        config("dots3_note_text", ROUTED, LATENT, FIRST, INDEX, swa, {
            "head_dim": 16, "swa_head_dim": 16, "sliding_window_size": 8, "shared_experts_intermediate_size": INNER,
            "layer_types": ["full_attention", "sliding_attention"],
        }),
        (note | INDEXER | dense(), note | moe()), note | dense(),
    )  # fmt: skip
    giga = norms(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    )
    net = {name.replace("linear_attn", "self_attn"): shape for name, shape in gdn(one=True).items()}
    giga_mla = giga | mla() | {"self_attn.gate_proj.weight": (32, H)}
    # The head's MLP is dense for llama.cpp, which maps no experts there; which of the norms are gated was not seen.
    yield (
        "gigachat3_5",
        Layout(
            config("gigachat3_5", ROUTED, LATENT, FIRST, DELTA, {"full_attention_layers": [1]}),
            (gigachat(giga) | net | dense(), gigachat(giga_mla) | moe()),
            gigachat(giga_mla) | dense(),
            module=gigachat(norms("token_norm", "hidden_norm", "final_norm")),
            extra={"norm.gate_up_projection.weight": (4, H), "norm.gate_down_projection.weight": (H, 4)},
        ),
    )
    parallel = norms("input_layernorm") | gqa()
    yield "cohere2_moe", Layout(
        config("cohere2_moe", GROUP, SPLIT, {
            "intermediate_size": INNER, "prefix_dense_intermediate_size": 2 * H, "moe_intermediate_size": None,
            "tie_word_embeddings": True,
        }),
        (parallel | dense(), parallel | moe(bias="")), tied=True,
    )  # fmt: skip


LAYOUTS = {
    name: layout
    for kind in (_glm, _qwen, _mixed, _ling, _rest, _latent, _single_engine, _gated)
    for name, layout in kind()
}
