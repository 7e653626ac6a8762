"""Named training recipes that need only this package: models and settings for the built-in byte-level corpus."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nextn.checkpoint.safetensors_file import atomic
from nextn.data.batches import leading_prompts, sample_prompts
from nextn.data.corpus import Corpus
from nextn.errors import ConfigError
from nextn.train.config import TrainConfig


@dataclass(frozen=True)
class Recipe:
    """A model and the settings of its training stages."""

    title: str
    model: dict[str, object]  # a transformers config
    train: TrainConfig
    minutes: float  # approximate time on two cores with bfloat16 instructions
    # Settings of a second stage that trains only the head, see `prepare_joint_run`.
    refine: Mapping[str, object] | None = None


def byte_model(*, layers: int, hidden: int, vocab_size: int) -> dict[str, object]:
    """Return the config of a deep, narrow dense Qwen3.5 with attention in every layer: draft steps are cheap for it."""
    shape = _shape(layers, hidden, vocab_size)
    return shape | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * layers}


def _shape(layers: int, hidden: int, vocab_size: int) -> dict[str, object]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 1 << (hidden // 128).bit_length() - 1,  # a power of two, for an even split over cores
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }


# Overrides of `byte_model`: several heads in spite of the small width.
_NARROW = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# Overrides of `byte_model` with 8 layers of 256: three gated delta nets per layer with attention; the head attends.
_HYBRID = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
# A GLM-4.5 of 16 layers of 384, dense except for its last layer, with few heads, and a head with small experts. It is
# deep so that a draft step costs a sixteenth of a trunk pass, and of this family because most engines run its head.
_MIXED = {
    "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": False, "first_k_dense_replace": 15,
    "n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 288, "n_group": 1,
    "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1152,
}  # fmt: skip


def _byte_training(**settings: object) -> TrainConfig:
    """Settings with which byte-level models of this size learn fastest, plus the recipe's own."""
    shared = {"lam": "1.0", "optimizer": "muon", "lr": 3e-3, "matrix_lr": 0.03, "weight_decay": 0.01}
    return TrainConfig.from_dict(shared | settings)


def by_name(name: str, *, vocab_size: int) -> Recipe:
    """Return the recipe called `name`. Raises ConfigError for an unknown name."""
    recipes = {
        "demo": Recipe(
            "5-minute byte-level code model with an MTP head",
            byte_model(layers=8, hidden=256, vocab_size=vocab_size),
            _byte_training(steps=390, batch_size=16, length=256, depths=2, compile=True),
            5,
        ),
        "tiny": Recipe(
            "byte-level code model of 5 MB, the one that comes with the package",
            byte_model(layers=12, hidden=128, vocab_size=vocab_size) | _NARROW,
            _byte_training(steps=1200, depths=4, compile=True, save_every=200, eval_every=200),
            15,
        ),
        "code": Recipe(
            "half-hour byte-level code model, made to be decoded fast",
            # 52 MB in bfloat16 exceed the CPU cache: as for larger models, a baseline step is limited by memory
            # bandwidth, and verification uses compute that would idle. Attention reads no weights, so it is kept small.
            _shape(layers=16, hidden=384, vocab_size=vocab_size) | _MIXED,
            _byte_training(steps=450, batch_size=8, length=512, depths=4, compile=True, save_every=100),
            27,
            # The head alone on its trunk's distribution, with more depths than the first stage could afford.
            {"steps": 340, "depths": 6, "optimizer": "muon", "matrix_lr": 0.01, "lr": 1e-3, "eval_every": 100},
        ),
        "hybrid": Recipe(
            "quarter-hour byte-level code model with gated delta nets, to see what MTP brings where state is recurrent",
            byte_model(layers=8, hidden=256, vocab_size=vocab_size) | _HYBRID,
            _byte_training(steps=400, batch_size=8, length=256, depths=4, save_every=100),
            15,
        ),
    }
    if name not in recipes:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(recipes)}")
    return recipes[name]


def held_out_prompts(corpus: Corpus, *, count: int = 8, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of 128 tokens, shorter ones if the text is short, none if there is almost none.

    For conversations and answers, return up to `count` of their prompts.
    """
    if prompts := leading_prompts(corpus, count=count, seed=seed):
        return [prompt.tolist() for prompt in prompts]
    for length in (128, 32, 8):
        try:
            return [text.tolist() for text in sample_prompts(corpus, count=count, length=length, seed=seed)]
        except ConfigError:
            continue
    return []


def write_prompts(file: Path, corpus: Corpus) -> None:
    """Write up to 24 held-out prompts, as token ids, for `nextn bench --prompts`."""
    for count in (24, 8, 1):
        if prompts := held_out_prompts(corpus, count=count, seed=1):
            lines = [json.dumps({"prompt": prompt, "domain": "held-out"}) for prompt in prompts]
            with atomic(file) as target:
                target.write("\n".join(lines).encode() + b"\n")
            return
