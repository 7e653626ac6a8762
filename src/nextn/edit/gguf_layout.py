"""Two layouts of llama.cpp that hold a Llama-like trunk together with a head: `step35` and `hy_v3`.

llama.cpp's graphs of llama, qwen2, qwen3 and mistral hand no hidden state to a head. The graphs of these two
architectures do, and compute the same trunk. Lines are of llama.cpp 0c1e57098, in src/models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.errors import CheckpointError

Value = str | bool | int | float | list[bool]

STEP35, HY_V3 = "step35", "hy_v3"
BY_HIDDEN = {"pre": STEP35, "post": HY_V3}  # the state that a head takes in -> the layout whose graph hands it over
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = {STEP35: ("default", "linear", "llama3"), HY_V3: ("default", "linear", "yarn")}
_ROPE_REASONS = {
    STEP35: "step35.cpp:456 gives the head the trunk's YaRN factor without its frequencies, and has no other types",
    HY_V3: "hy-v3.cpp loads no rope_freqs, which llama3 needs, and has no other types",
}
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # of llama.cpp's `llama_ftype`, by the dtype of most tensors
# More positions than any context has; llama.cpp multiplies it by the number of sequences, in 32 bits.
_NO_WINDOW = 1 << 24
# Of a decoder layer, without `.weight` or `.bias`: in a checkpoint -> in a block of the file.
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
# Of YaRN's parameters: in a config -> in `rope.scaling`.
YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_BIASES = {f"self_attn.{name}_proj.bias" for name in "qkv"}  # the only ones that the graphs add
# Roles in a head -> the name in `blk.N.nextn`.
HEAD = {
    "projection": "eh_proj", "token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head_norm",
    "embedding": "embed_tokens", "output": "shared_head_head",
}  # fmt: skip


@dataclass(frozen=True)
class StoredPart:
    """A tensor of the GGUF, and the one whose bytes it gets."""

    name: str
    source: Checkpoint
    stored: str


def problems(config: Mapping[str, Any], layout: str) -> Iterator[str]:
    """Yield why a trunk with this config cannot be in a layout.

    Args:
        config: As transformers reads it, with all defaults.
        layout: One of `BY_HIDDEN`.
    """
    if config["model_type"] not in _MODEL_TYPES:
        yield f"model_type {config['model_type']} is not one of {', '.join(_MODEL_TYPES)}, whose layers the graphs have"
        return
    if layout == HY_V3 and config["model_type"] != "qwen3":
        yield "hy-v3.cpp:56 needs attn_q_norm and attn_k_norm in every layer, which Qwen3 alone has"
    rope_type = config["rope_parameters"]["rope_type"]
    if rope_type not in _ROPE_TYPES[layout]:
        yield f"rotary embeddings of type {rope_type}: {_ROPE_REASONS[layout]}"
    if config["hidden_act"] != "silu":
        yield f"activation {config['hidden_act']}: the graphs have LLM_FFN_SILU alone"
    if any(_sliding(config)) and (layout == HY_V3 or rope_type != "default"):
        yield "layers with a sliding window: step35.cpp:245 alone has them, and without scaled rotary embeddings"
    if config.get("quantization_config"):
        yield "it is quantized: export the unquantized model, and quantize the GGUF with llama-quantize"


def _sliding(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer of the trunk has a sliding window."""
    types = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return [bool(config.get("sliding_window")) and each == "sliding_attention" for each in types]


def metadata(config: Mapping[str, Any], layout: str, *, dtype: str) -> dict[str, Value]:
    """Return the metadata of trunk and head without the tokenizer's.

    Args:
        config: See `problems`, which must have none.
        layout: One of `BY_HIDDEN`.
        dtype: Of most tensors: F32, F16 or BF16.
    """
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    values: dict[str, Value] = {
        "block_count": config["num_hidden_layers"] + 1,
        "nextn_predict_layers": 1,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],  # must be there; there are no experts
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        # step35.cpp:9 halves it for layers without a window.
        "rope.dimension_count": head_dim * (2 if layout == STEP35 else 1),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values |= _yarn(rope)
    if layout == STEP35:
        values |= _windows(config, head_dim)
    general: dict[str, Value] = {"general.type": "model", "general.file_type": _FILE_TYPES[dtype]}
    return general | {f"{layout}.{key}": value for key, value in values.items()}


def _windows(config: Mapping[str, Any], head_dim: int) -> dict[str, Value]:
    """One layer must have a window (llama-model.cpp:2807): the head's, without a limit, where none of the trunk has."""
    trunk = _sliding(config)
    return {
        "attention.sliding_window": config["sliding_window"] if any(trunk) else _NO_WINDOW,
        "attention.sliding_window_pattern": [*trunk, all(trunk) or not any(trunk)],
        "rope.freq_base_swa": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count_swa": head_dim,
    }


def _yarn(rope: Mapping[str, Any]) -> dict[str, Value]:
    given = {f"rope.scaling.{key}": float(rope[name]) for name, key in YARN.items() if rope.get(name) is not None}
    return {"rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]), **given}


def rope_factors(config: Mapping[str, Any]) -> list[float]:
    """Return what llama.cpp divides each frequency by: those of Llama 3.1's scaling; [] for other types."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return []
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**config), "cpu")
    count = len(scaled)
    return [rope["rope_theta"] ** (-index / count) / each for index, each in enumerate(scaled.tolist())]


def parts(trunk: Inventory, head: Inventory, layout: str) -> list[StoredPart]:
    """Return the tensors of trunk and head in the order of the file.

    Raises CheckpointError for tensors of the trunk that the layout has no place for, and for missing ones.
    """
    checkpoint, count = trunk.checkpoint, trunk.num_layers
    is_tied = "output" not in trunk.shared or bool(checkpoint.config.get("tie_word_embeddings"))
    named = {"token_embd.weight": trunk.shared["embedding"], "output_norm.weight": "model.norm.weight"}
    if not is_tied or layout == STEP35:  # step35.cpp:57 has no other place for it
        named["output.weight"] = trunk.shared["embedding" if is_tied else "output"]
    strange = []
    for name in checkpoint.tensors:
        layer = trunk.family.trunk_layer(name)
        if layer is not None and layer[0] < count:
            own = _in_layer(layer[1])
            named |= {} if own is None else {f"blk.{layer[0]}.{own}": name}
            strange += [name] if own is None and not name.endswith("rotary_emb.inv_freq") else []
    if strange:
        raise CheckpointError(f"{checkpoint.path}: llama.cpp's {layout} graph has no {strange[0]}, nor a bias for it")
    found = [StoredPart(own, checkpoint, checkpoint.info(name).name) for own, name in named.items()]
    return [*found, *_head_parts(head, count)]


def _head_parts(head: Inventory, index: int) -> Iterator[StoredPart]:
    for canonical, stored in head.stored.items():
        _, role, *rest = canonical.split(".", 2)
        own = _in_layer(rest[0]) if role == "block" else f"nextn.{HEAD[role]}.weight"
        if own is None:
            raise CheckpointError(f"{head.checkpoint.path}: {stored} has no place in llama.cpp's layout")
        yield StoredPart(f"blk.{index}.{own}", head.checkpoint, stored)


def _in_layer(path: str) -> str | None:
    """The name in a block of the GGUF of a tensor in a layer; None if there is none."""
    stem, _, kind = path.rpartition(".")
    return f"{LAYER[stem]}.{kind}" if stem in LAYER and (kind == "weight" or path in _BIASES) else None


def common_dtype(listed: Sequence[StoredPart]) -> str:
    """Return the dtype of most of the tensors' bytes; CheckpointError for one that is stored as no floating point."""
    sizes = dict.fromkeys(_FILE_TYPES, 0)
    for each in listed:
        info = each.source.info(each.stored)
        if info.dtype not in sizes:
            valid = ", ".join(sizes)
            raise CheckpointError(f"{each.source.path}: {each.stored} is {info.dtype}; valid for a GGUF are {valid}")
        sizes[info.dtype] += info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])
