"""The texts and the shapes of canaries: a synthetic language, and per family a small config that engines accept.

A text repeats a random word, each time with the next digit of a progression: `qxze4 qxze7 qxze0 ...`. The next token
follows from the text itself, so a head that did not see the prompt, sees it at other positions, or gets another hidden
state cannot predict it. The digits keep texts from being repetitive.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import PCG64, SeedSequence

from nextn.data.batches import permutation
from nextn.errors import ConfigError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MIN_LETTERS, _MAX_LETTERS = 3, 6  # of a word


def text(length: int, *, seed: Sequence[int]) -> str:
    """Return a text of `length` characters; the same for the same seed in every version of numpy."""
    bits = PCG64(SeedSequence(list(seed)))
    size, first, step = (
        int(value) for value in bits.random_raw(3) % np.array([_MAX_LETTERS - _MIN_LETTERS, 10, 3], np.uint64)
    )
    size, step = size + _MIN_LETTERS, step + 1
    word = "".join(_LETTERS[index] for index in permutation(bits, len(_LETTERS))[:size])
    num_words = length // (size + 2) + 1
    return "".join(f"{word}{(first + step * index) % 10} " for index in range(num_words))[:length]


def documents(count: int, length: int, *, seed: int) -> Iterator[tuple[str, str]]:
    """Return (name, text) of the training texts."""
    return ((str(index), text(length, seed=(seed, 0, index))) for index in range(count))


def prompts(count: int, *, seed: int) -> list[str]:
    """Return texts other than the documents, of lengths spread evenly from 12 to 44."""
    lengths = np.linspace(12, 44, count).round().astype(int).tolist()
    return [text(length, seed=(seed, 1, index)) for index, length in enumerate(lengths)]


# Limits of engines: vLLM's attention on CPUs takes head dimensions of 32, 64, 80, ..., and its latent attention only
# caches of 512 + 64; packed kernels need matrices whose sides are multiples of 32.
_SIZES: Mapping[str, object] = {
    "vocab_size": 264,
    "hidden_size": 128,
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
class CanaryShape:
    """The config of a family's canary, and how long to train it."""

    config: Mapping[str, object]  # of transformers
    special_tokens: tuple[str, ...] = ()  # that converters of the family expect
    # Of the trunk alone, then of trunk and head: few, as a head that is always right would hide faults.
    steps: tuple[int, int] = (300, 55)
    # Of Muon; where queries and keys have no norm, larger steps saturate attention and the model learns nothing but
    # letter frequencies.
    matrix_lr: float = 0.03


SHAPES: Mapping[str, CanaryShape] = {
    "glm4_moe": CanaryShape(
        {**_SIZES, **_EXPERTS, "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": False},
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "qwen3_5": CanaryShape(
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
    "deepseek_v3": CanaryShape(
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
            # As released. Without topk_method, vLLM creates no correction bias, and fails on the file's; without YaRN,
            # its rotary embedding for CPUs (0.32) reads the shared key, a slice of wider rows, as if rows were 64 wide.
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


def shape_of(family: str) -> CanaryShape:
    """Return a family's shape. Raises ConfigError for a family without one."""
    if family not in SHAPES:
        raise ConfigError(f"family {family!r}; canaries can be built of {', '.join(SHAPES)}")
    return SHAPES[family]
