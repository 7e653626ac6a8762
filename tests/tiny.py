"""Tiny models of every family, and the language that the trained fixtures speak."""

from collections.abc import Callable
from pathlib import Path

import torch

from nextn.data.corpus import Corpus
from nextn.decoding.drafter import Drafter
from nextn.decoding.rounds import rounds
from nextn.model.model import Model
from nextn.settings import Settings

FIXTURES = Path(__file__).parent / "fixtures"

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # large enough that random logits are far from ties
}
_MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}

_DENSE = _SIZES | {"intermediate_size": 64, "num_hidden_layers": 2}
# A window that every test text leaves.
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Multi-head latent attention.
_LATENT = {name: size for name, size in (_SIZES | _MOE).items() if name != "head_dim"} | {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GROUPS = {"n_group": 2, "topk_group": 1}
_ROUTED = _GROUPS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 16}
# An indexer that drops columns in every test text.
_INDEXED = _ROUTED | {
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, relu makes many scores 0, and equal scores have no order
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "mlp_ratio": 1.0,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
}

_GLM = _DENSE | _MOE | {"n_routed_experts": 4, "first_k_dense_replace": 1}
_SPLIT = {"mlp_layer_types": ["dense", "sparse"]}
_NO_END = {"eos_token_id": None}
_NO_ENDS = _NO_END | {"bos_token_id": None}
_COMPRESSED = ["compressed_sparse_attention", "heavily_compressed_attention"]

CONFIGS: dict[str, dict[str, object]] = {
    "deepseek_v3": _LATENT | _ROUTED | {"model_type": "deepseek_v3"},
    "deepseek_v4": _SIZES
    | _MOE
    | {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "n_routed_experts": 4,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "partial_rotary_factor": 0.5,
        "sliding_window": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "index_n_heads": 16,  # with few, many scores are zero, and which of equals the indexer picks is chance
        "index_head_dim": 8,
        "index_topk": 3,
        "layer_types": ["sliding_attention", *_COMPRESSED, _COMPRESSED[0]],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    },
    "glm4_moe": _GLM | {"model_type": "glm4_moe"},
    "qwen3_next": _SIZES
    | _MOE
    | _DELTA
    | {"model_type": "qwen3_next", "num_experts": 4, "shared_expert_intermediate_size": 16, "intermediate_size": 64},
    "qwen3_5": _SIZES | _DELTA | {"model_type": "qwen3_5_text", "intermediate_size": 64},
    "qwen3_5_moe": _SIZES
    | _MOE
    | _DELTA
    | {"model_type": "qwen3_5_moe_text", "num_experts": 4, "shared_expert_intermediate_size": 16},
    "glm4_moe_lite": _LATENT | _GROUPS | {"model_type": "glm4_moe_lite", "n_routed_experts": 4, "q_lora_rank": 16},
    "bailing_hybrid": _LATENT
    | _GROUPS
    | _NO_END
    | {
        "model_type": "bailing_hybrid",
        "num_experts": 4,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_group_size": 2,
        "first_k_dense_replace": 1,
        "pad_token_id": None,
    },
    "hy_v3": _DENSE | _MOE | {"model_type": "hy_v3", "num_experts": 4},
    "exaone_moe": _DENSE | _MOE | _WINDOWED | _SPLIT | _NO_END | {"model_type": "exaone_moe", "num_experts": 4},
    "mellum": _DENSE | _MOE | _WINDOWED | _SPLIT | {"model_type": "mellum", "num_experts": 4},
    "cohere2_moe": _DENSE
    | _WINDOWED
    | _SPLIT
    | _NO_ENDS
    | {
        "model_type": "cohere2_moe",
        "num_experts": 4,
        "prefix_dense_intermediate_size": 64,
        "tie_word_embeddings": True,
        "logit_scale": 0.25,
    },
    "deepseek_v32": _LATENT | _INDEXED | {"model_type": "deepseek_v32"},
    "glm_moe_dsa": _LATENT
    | _INDEXED
    | {"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "hy_v4": _LATENT
    | _INDEXED
    | _NO_ENDS
    | {
        "model_type": "hy_v4",
        "num_hidden_layers": 3,
        "indexer_types": ["full", "full", "shared"],
        "hc_mult": 2,
        "learnable_sink_init": 0.5,
        "pad_token_id": None,
    },
    "glm5_next": {
        "model_type": "glm5_next",
        "text_config": _LATENT
        | _INDEXED
        | {
            "model_type": "glm5_next_text",
            "num_hidden_layers": 3,
            "n_group": 1,
            "qk_rope_head_dim": 0,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "index_kpool": 2,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "initializer_range": 0.1,  # with more, the chunked delta rule is off the step by step one
            "pad_token_id": None,
        },
        "vision_config": _VISION,
    },
    "qwen4_exp": _SIZES
    | _MOE
    | _DELTA
    | {
        "model_type": "qwen4_exp_text",
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "eos_token_id": 3,
    },
    "step3p5": {
        "model_type": "step3p7",
        "text_config": _DENSE
        | _MOE
        | _WINDOWED
        | _SPLIT
        | {
            "share_expert_dim": 16,
            "n_routed_experts": 4,
            "num_sliding_attention_heads": 2,
            "num_nextn_predict_layers": 3,
            "mtp_layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mtp_mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "vision_config": _VISION,
    },
    "minimax_m3": {
        "model_type": "minimax_m3_vl",
        "text_config": _SIZES
        | _SPLIT
        | _NO_ENDS
        | {
            "num_hidden_layers": 2,
            "intermediate_size": 16,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            # Blocks that are dropped in every test text.
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 3,
            "index_topk_blocks": 2,
        },
        "vision_config": _VISION | {"hidden_size": 16},
        "projector_hidden_size": 16,
    },
    "longcat_flash": {name: size for name, size in _LATENT.items() if name != "num_hidden_layers"}
    | _NO_ENDS
    | {
        "model_type": "longcat_flash",
        "num_layers": 2,
        "q_lora_rank": 16,
        "head_dim": 8,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "inkling": {
        "model_type": "inkling_mm_model",
        "text_config": _SIZES
        | _MOE
        | {
            "model_type": "inkling_text",
            "num_hidden_layers": 3,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 6,
            "d_rel": 4,
            "rel_extent": 16,
            "log_scaling_n_floor": 8,
            "local_layer_ids": [0, 2],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "conv_kernel_size": 3,
            "logits_mup_width_multiplier": 2.0,
            "vocab_size": 72,
            "unpadded_vocab_size": 64,
            "eos_token_id": None,
        },
        "mtp_config": {"num_nextn_predict_layers": 1, "chain_hidden_post_norm": True, "local_layer_ids": [1]},
        "vision_config": {"model_type": "inkling_vision", "hidden_size": 16, "num_hidden_layers": 2, "patch_size": 4},
        "audio_config": {"model_type": "inkling_audio", "n_mel_bins": 2, "mel_vocab_size": 4},
    },
    "glm_ocr": {
        "model_type": "glm_ocr",
        "text_config": _DENSE
        | {
            "model_type": "glm_ocr_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": _VISION,
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "text_config": _GLM
        | {
            "model_type": "glm4v_moe_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 0],
            },
        },
        "vision_config": _VISION,
    },
    "exaone4_5": {
        "model_type": "exaone4_5",
        "text_config": _DENSE | _WINDOWED | _NO_END | {"model_type": "exaone4"},
        "vision_config": _VISION | {"fullatt_block_indexes": [0], "num_key_value_heads": 2},
    },
    "nemotron_h": _SIZES
    | _MOE
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 16,
        "n_routed_experts": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "initializer_range": 0.1,  # with more, the chunked scan is 1e-2 off the step by step one
        "eos_token_id": None,
    },
    "mimo_v2": _DENSE
    | _MOE
    | {
        "model_type": "mimo_v2_flash",
        "n_routed_experts": 4,
        "num_key_value_heads": 1,
        "v_head_dim": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
        },
    },
    "dots3_note": _LATENT
    | _INDEXED
    | _SPLIT
    | _NO_ENDS
    | {
        "model_type": "dots3_note_text",
        "layer_types": ["indexed_attention", "sliding_attention"],
        "head_dim": 16,
        "sliding_window": 5,
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "pad_token_id": None,
    },
    "ernie4_5_moe": _DENSE
    | {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "use_bias": True,
    },
}

# (family, modules) of every tiny model that is built: a second module where the layout has room and it says more.
_SEVERAL = {
    "deepseek_v3": (2, 3),
    "glm4_moe": (2, 3),
    "step3p5": (3,),
    "exaone4_5": (2,),
    "mimo_v2": (3,),
}
BUILDS = [(name, count) for name in CONFIGS for count in (1, *_SEVERAL.get(name, ()))]
MOST = dict(BUILDS)


def build(name: str, *, modules: int = 1, seed: int = 0, **changes: object) -> Model:
    """A random tiny model of the family, in fp32."""
    torch.manual_seed(seed)
    config = CONFIGS[name]
    inner = config.get("text_config")
    changed = config | changes if inner is None else config | {"text_config": inner | changes}
    model = Model.build(changed, num_modules=modules)
    for path, value in [*model.trunk.named_parameters(), *model.head.named_parameters()]:
        if "index_kpool" in path or ".ple.conv1d" in path:  # zeros or ones in a fresh model, which hide faults
            value.data.normal_()
    return model


def prompt(length: int, *, seed: int = 0, vocab_size: int = 64) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def refrain(count: int, length: int, *, seed: int, vocab_size: int = 40) -> torch.Tensor:
    """[count, length] rows that repeat a random phrase of 5 to 11 tokens.

    What comes next stands in the row itself, so a head that never saw the prompt cannot know it.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        period = int(torch.randint(5, 12, (1,), generator=generator))
        phrase = torch.randperm(vocab_size, generator=generator)[:period]
        rows.append(phrase.repeat(length // period + 1)[:length])
    return torch.stack(rows)


def forked(count: int, length: int, *, seed: int, vocab_size: int = 40, other: float = 0.3) -> torch.Tensor:
    """Refrains in which each place of the phrase has two tokens: the other one comes with that chance, each time anew.

    So the distribution of what comes next is broad, and which of the two is likelier must be counted in the row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        period = int(torch.randint(5, 12, (1,), generator=generator))
        pair = torch.randperm(vocab_size, generator=generator)[: 2 * period].view(2, period)
        takes = (torch.rand(length, generator=generator) < other).long()
        rows.append(pair[takes, torch.arange(length) % period])
    return torch.stack(rows)


def refrains(count: int, length: int, *, seed: int, eos: int = 63) -> Corpus:
    """Those rows as a corpus of `count` documents."""
    texts = [
        (str(place), " ".join(map(str, row.tolist()))) for place, row in enumerate(refrain(count, length, seed=seed))
    ]
    return Corpus.from_texts(texts, lambda batch: [[int(word) for word in text.split()] for text in batch], eos=eos)


def decode(
    model: Model, prompts: list[list[int]], *, make_drafter: Callable[..., Drafter] = Drafter, **settings: object
) -> tuple[list[list[int]], list]:
    """All new tokens per prompt, and the rounds."""
    out: list[list[int]] = [[] for _ in prompts]
    log = []
    for each in rounds(model.trunk, model.head, prompts, Settings(**settings), make_drafter=make_drafter):
        log.append(each)
        for part in each.rows:
            out[part.row] += part.emitted
    return out, log
