"""Tiny Gemma 4 trunks and their assistants, in the shapes of the published sizes, built with transformers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForCausalLM

from nextn.model.model import Model

VOCABULARY, WINDOW = 96, 8
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
    "max_position_embeddings": 256, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
_SHARED = {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY}
_K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
# Size -> what its trunk has beyond the common, and whether its assistant has centroids.
SIZES: Mapping[str, tuple[Mapping[str, object], bool]] = {
    "E2B": ({**_SHARED, "use_double_wide_mlp": True}, True),
    "E4B": (_SHARED, True),
    "12B": (_K_IS_V, False),
    "26B-A4B": ({**_K_IS_V, **_MOE}, False),
    "31B": (_K_IS_V, False),
}


def build(size: str, folder: Path, **changes: object) -> tuple[Path, Path]:
    """Save a trunk and its assistant of a size's shape with random weights; return their folders. changes: of both."""
    torch.manual_seed(sorted(SIZES).index(size))
    options, centroids = SIZES[size]
    unified = size == "12B"
    layers = {"layer_types": _PATTERN * 2, "num_hidden_layers": 6}
    config = AutoConfig.for_model(
        "gemma4_unified_text" if unified else "gemma4_text", **{**_COMMON, **layers, **options, **changes}
    )
    trunk = (Gemma4UnifiedForCausalLM if unified else Gemma4ForCausalLM)(config)
    own = {name: value for name, value in options.items() if name in _K_IS_V} | {
        "hidden_size": 16, "intermediate_size": 24, "layer_types": [*_PATTERN[:1] * 3, _PATTERN[-1]],
        "num_hidden_layers": 4, "num_kv_shared_layers": 4, "final_logit_softcapping": None,
    }  # fmt: skip
    text = AutoConfig.for_model("gemma4_unified_text" if unified else "gemma4_text", **{**_COMMON, **own, **changes})
    assistant_config = (Gemma4UnifiedAssistantConfig if unified else Gemma4AssistantConfig)(
        text_config=text.to_dict(), backbone_hidden_size=32, use_ordered_embeddings=centroids, num_centroids=8,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    assistant = reference(assistant_config)
    if centroids:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(len(assistant.masked_embedding.token_ordering)))
    for model, name in ((trunk, "trunk"), (assistant, "assistant")):
        for norm in [each for key, each in model.named_parameters() if "norm" in key]:
            norm.data.uniform_(0.5, 1.5)
        for key, scalar in model.named_buffers():
            if key.endswith("layer_scalar"):
                scalar.uniform_(0.5, 1.5)
        model.save_pretrained(folder / size / name)
    return folder / size / "trunk", folder / size / "assistant"


def multimodal(trunk: Path, folder: Path) -> Path:
    """Save a trunk as the published models are stored, inside a model with images; return the folder."""
    text = AutoConfig.from_pretrained(trunk)
    kinds = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token")
    ids = {f"{kind}_id": 90 + index for index, kind in enumerate(kinds)}
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text.to_dict(), **ids))
    state = {name.removeprefix("model."): value for name, value in load_file(trunk / "model.safetensors").items()}
    model.model.language_model.load_state_dict(state)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def reference(config: Gemma4AssistantConfig | Gemma4UnifiedAssistantConfig) -> torch.nn.Module:
    """Build transformers' assistant. 5.23 refuses layers that all share keys, which 5.24 builds."""
    unified = isinstance(config, Gemma4UnifiedAssistantConfig)
    text_class = type(config.text_config)
    before = Gemma4TextConfig.kv_sharing_modes, text_class.kv_sharing_modes
    modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    Gemma4TextConfig.kv_sharing_modes = text_class.kv_sharing_modes = modes
    try:
        return (Gemma4UnifiedAssistantForCausalLM if unified else Gemma4AssistantForCausalLM)(config).eval()
    finally:
        Gemma4TextConfig.kv_sharing_modes, text_class.kv_sharing_modes = before


def marked_texts(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Texts whose first token says by which of four permutations of 24 tokens most others follow."""
    permutations = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(k)) for k in range(4)])
    marks = torch.randint(4, (count,), generator=generator)
    columns = [torch.randint(24, (count,), generator=generator)]
    for _ in range(length - 2):
        jumps, others = torch.rand(count, generator=generator) < 0.1, torch.randint(24, (count,), generator=generator)
        columns.append(torch.where(jumps, others, permutations[marks, columns[-1]]))
    return torch.stack([marks + 60, *(column + 3 for column in columns)], dim=1)


def train(model: Model, steps: int) -> None:
    """Train trunk and head on such texts. The head learns without hidden states, so it must read the trunk's keys."""
    generator, layers = torch.Generator().manual_seed(0), model.head.stack[0]
    layers.projection.weight.data[:, model.trunk.config.hidden_size :] = 0

    def losses(tokens: torch.Tensor, part: torch.nn.Module) -> torch.Tensor:
        if part is model.trunk:
            return cross_entropy(model.trunk.logits(part(tokens).final_hidden)[:, 1:-1].mT, tokens[:, 2:])
        with torch.no_grad():
            hidden = model.trunk(tokens).head_input
        states = model.head.rollout_hidden(tokens, hidden, 3)
        return sum(
            cross_entropy(layers.output(state)[:, 1:-1].mT, tokens[:, depth + 2 :])
            for depth, state in enumerate(states, start=1)
        )

    for part in (model.trunk, model.head):
        optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3, weight_decay=0)
        for _ in range(steps):
            optimizer.zero_grad()
            losses(marked_texts(16, 24, generator), part).backward()
            if part is model.head:
                layers.projection.weight.grad[:, model.trunk.config.hidden_size :] = 0
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
