"""What canaries look like: small configs that engines accept, the tokens that converters ask for, how long to train.

Sizes follow from engines: vLLM's attention on CPUs takes heads of 32, 64, 80, ... dimensions, and its latent attention
caches of 512 + 64 alone; matrices whose sides are multiples of 32 run in packed kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nextn.errors import ConfigError

_WIDTH = 128
_SIZES: Mapping[str, object] = {
    "vocab_size": 264,
    "hidden_size": _WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "initializer_range": 0.05,
}
_EXPERTS: Mapping[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Shape:
    """config: of transformers. marks: special tokens of the family's tokenizer. steps: of the trunk alone, then of
    both: few, as a head that is always right would hide faults. matrix_lr: Muon's rate; where queries and keys have no
    norm, larger steps saturate attention and nothing but letter frequencies is learned."""

    config: Mapping[str, object]
    marks: tuple[str, ...] = ()
    steps: tuple[int, int] = (300, 55)
    matrix_lr: float = 0.03


SHAPES: Mapping[str, Shape] = {
    "glm4_moe": Shape(
        {**_SIZES, **_EXPERTS, "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": False},
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "qwen3_5": Shape(
        {
            **_SIZES,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "full_attention_interval": 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        ("<|im_start|>", "<|im_end|>"),
    ),
    "deepseek_v3": Shape(
        {
            **{name: size for name, size in _SIZES.items() if name != "head_dim"},
            **_EXPERTS,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 2,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            # As released. Without the first, vLLM makes no correction bias, and ends with the file's at hand; without
            # YaRN, its rotation for CPUs (0.32) reads the shared key, a slice of wider rows, as if rows were 64 wide.
            "topk_method": "noaux_tc",
            "max_position_embeddings": 4 * 1024,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "scoring_func": "sigmoid",
        },
        steps=(400, 100),
        matrix_lr=0.006,
    ),
}


def shape_of(family: str) -> Shape:
    """Raises ConfigError for a family that has none."""
    if family not in SHAPES:
        raise ConfigError(f"family {family!r}; canaries are made of {', '.join(SHAPES)}")
    return SHAPES[family]
