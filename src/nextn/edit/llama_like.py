"""Llama-style trunks: what other layouts need to know of their config to hold them with the same computation."""

from collections.abc import Mapping
from typing import Any

from nextn.checkpoint.checkpoint import Checkpoint

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_STEMS = (
    "input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)  # fmt: skip
BIASES = frozenset(f"self_attn.{name}_proj.bias" for name in "qkv")  # of a decoder layer, that other layouts also have


def full_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's config with all defaults, as transformers reads it."""
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.for_model(**checkpoint.config).to_dict()
    return config


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def windows(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer of the trunk whether it has a sliding window."""
    types = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return [bool(config.get("sliding_window")) and each == "sliding_attention" for each in types]


def layer_paths(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors in a decoder layer without a bias of o_proj or of the MLP."""
    norms = ("self_attn.q_norm", "self_attn.k_norm") if config["model_type"] == "qwen3" else ()
    biases = BIASES if config["model_type"] == "qwen2" else frozenset()
    return {f"{stem}.weight" for stem in (*_STEMS, *norms)} | biases
