"""Layouts of llama.cpp that hold a trunk together with a head: `step35` and `hy_v3`, and `glm4moe` of GLM-4.5's family.

llama.cpp's graphs of llama, qwen2, qwen3 and mistral hand no hidden state to a head. The graphs of the first two
architectures do, and compute the same trunk. Lines are of llama.cpp 0c1e57098, in src/models.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nextn.bounded_json import JsonObject
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import TensorInfo
from nextn.edit.adopt import BIASES, MODEL_TYPES, head_dim, layer_paths, windows
from nextn.errors import CheckpointError
from nextn.family_table import Family
from nextn.text_format import some

Value = str | bool | int | float | list[bool]

STEP35, HY_V3, GLM4_MOE = "step35", "hy_v3", "glm4moe"
# Architectures whose files nextn reads as a checkpoint (gguf_architectures), and those of which it reads dense ones.
READ = ("llama", "qwen2", "qwen3", "gemma3", GLM4_MOE, "qwen3moe", "qwen3next", "qwen35", "qwen35moe")
READ_DENSE = (STEP35, HY_V3)
_BY_HIDDEN = {"pre": STEP35, "post": HY_V3}  # the state that a head takes in -> the layout whose graph hands it over
_MODEL_TYPES = {STEP35: MODEL_TYPES, HY_V3: MODEL_TYPES, GLM4_MOE: ("glm4_moe",)}
HEAD_FOLDER = "head"  # in the converted checkpoint, for a head that is stored separately
_ROPE_TYPES = {
    STEP35: ("default", "linear", "llama3"),
    HY_V3: ("default", "linear", "yarn"),
    GLM4_MOE: ("default", "linear", "yarn"),
}
_ROPE_REASONS = {
    STEP35: "step35.cpp:456 gives the head the trunk's YaRN factor without its frequencies, and has no other types",
    HY_V3: "hy-v3.cpp loads no rope_freqs, which llama3 needs, and has no other types",
    GLM4_MOE: "glm4-moe.cpp:211 takes no factors, which llama3 needs, and has no other types; beside the trunk that "
    "was adopted, a head of `nextn train --layout step35` runs",
}
_SIGMOID = 2  # of llama.cpp's gating functions
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
LAYER_GLM4_MOE = {
    **LAYER, "post_attention_layernorm": "post_attention_norm", "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}  # fmt: skip
CORRECTION = ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
# Of YaRN's parameters: in a config -> in `rope.scaling`.
YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
# Roles in a head -> the name in `blk.N.nextn`.
HEAD = {
    "projection": "eh_proj", "token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head_norm",
    "embedding": "embed_tokens", "output": "shared_head_head",
}  # fmt: skip


@dataclass(frozen=True)
class StoredPart:
    """A tensor of the GGUF file, and the stored tensor whose bytes it gets, or those of all experts in turn."""

    name: str
    source: Checkpoint
    stored: tuple[str, ...]

    @property
    def info(self) -> TensorInfo:
        """The dtype and shape of the stored tensor, or of the first expert's."""
        return self.source.info(self.stored[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.stored), *self.info.shape) if self.name.endswith("_exps.weight") else self.info.shape


def layout_of(family: Family) -> str:
    """Return the layout whose graph runs a head of this family."""
    return GLM4_MOE if family.name == "glm4_moe" else _BY_HIDDEN[family.hidden]


def problems(config: JsonObject, layout: str) -> Iterator[str]:
    """Yield why a trunk with this config, with all defaults, cannot be in a layout, see `layout_of`."""
    if config["model_type"] not in (valid := _MODEL_TYPES[layout]):
        yield f"model_type {config['model_type']} is not one of {', '.join(valid)}, whose layers the graphs have"
        return
    if layout == HY_V3 and config["model_type"] != "qwen3":
        yield "hy-v3.cpp:56 needs attn_q_norm and attn_k_norm in every layer, which Qwen3 alone has"
    rope_type = config["rope_parameters"]["rope_type"]
    if rope_type not in _ROPE_TYPES[layout]:
        yield f"rotary embeddings of type {rope_type}: {_ROPE_REASONS[layout]}"
    if config["hidden_act"] != "silu":
        yield f"activation {config['hidden_act']}: the graphs have LLM_FFN_SILU alone"
    if layout != GLM4_MOE and any(windows(config)) and (layout == HY_V3 or rope_type != "default"):
        yield "layers with a sliding window: step35.cpp:245 alone has them, and without scaled rotary embeddings"
    if config.get("quantization_config"):
        yield "it is quantized: export the unquantized model, and quantize the GGUF with llama-quantize"


def metadata(config: JsonObject, layout: str, *, dtype: str) -> dict[str, Value]:
    """Return the metadata of trunk and head but the tokenizer's; most tensors are F32, F16 or BF16."""
    size = head_dim(config)
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
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        # step35.cpp:9 halves it for layers without a window.
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1)) * (2 if layout == STEP35 else 1),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values |= _yarn(rope)
    if layout == STEP35:
        values |= _windows(config)
    if layout == GLM4_MOE:
        values |= _experts(config)
    general: dict[str, Value] = {"general.type": "model", "general.file_type": _FILE_TYPES[dtype]}
    return general | {f"{layout}.{key}": value for key, value in values.items()}


def _windows(config: JsonObject) -> dict[str, Value]:
    """One layer must have a window (llama-model.cpp:2807): the head's, without a limit, where none of the trunk has."""
    trunk = windows(config)
    return {
        "attention.sliding_window": config["sliding_window"] if any(trunk) else _NO_WINDOW,
        "attention.sliding_window_pattern": [*trunk, all(trunk) or not any(trunk)],
        "rope.freq_base_swa": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count_swa": head_dim(config),
    }


def _experts(config: JsonObject) -> dict[str, Value]:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": _SIGMOID,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
    }


def _yarn(rope: JsonObject) -> dict[str, Value]:
    given = {f"rope.scaling.{key}": float(rope[name]) for name, key in YARN.items() if rope.get(name) is not None}
    return {"rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]), **given}


def rope_factors(config: JsonObject) -> list[float]:
    """Return what llama.cpp divides each frequency by: those of Llama 3.1's scaling; [] for other types."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return []
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**config), "cpu")
    count = len(scaled)
    return [rope["rope_theta"] ** (-index / count) / each for index, each in enumerate(scaled.tolist())]


def parts(trunk: Inventory, head: Inventory, config: JsonObject, layout: str) -> list[StoredPart]:
    """Return the tensors of trunk and head in the order of the file.

    Raises CheckpointError if the layout has no place for a tensor, or one is missing.
    """
    checkpoint, count = trunk.checkpoint, trunk.num_layers
    outer = {"token_embd.weight": trunk.shared.get("embedding"), "output_norm.weight": "model.norm.weight"}
    is_tied = bool(config["tie_word_embeddings"])
    if not is_tied or layout == STEP35:  # step35.cpp:57 has no other place for it
        outer["output.weight"] = trunk.shared.get("embedding" if is_tied else "output")
    found = [StoredPart(own, checkpoint, (name,)) for own, name in outer.items() if name in checkpoint.tensors]
    for index, layer in sorted(trunk.layers.items()):
        paths = {path: info.name for path, info in layer.items() if not path.endswith("rotary_emb.inv_freq")}
        found += _block_parts(checkpoint, index, paths, layout)
    found += _head_parts(head, count, layout)
    needed = [*outer, *(f"blk.{index}.{own}" for index in range(count + 1) for own in _block(config, layout, index))]
    if missing := [name for name in needed if name not in {each.name for each in found}]:
        raise CheckpointError(f"{checkpoint.path}: tensors of the GGUF that trunk and head lack: {some(missing, 3)}")
    _refuse_uneven(found, config)
    return found


def _block(config: JsonObject, layout: str, index: int) -> list[str]:
    if layout != GLM4_MOE:
        return sorted(own for path in layer_paths(config) if (own := _in_layer(path, layout)))
    dense = ("ffn_gate", "ffn_up", "ffn_down")
    names = {f"{own}.weight" for own in LAYER_GLM4_MOE.values() if not own.startswith("ffn")}
    if index < config["first_k_dense_replace"]:
        names |= {f"{own}.weight" for own in dense}
    else:
        names |= {f"{own}_{kind}.weight" for own in dense for kind in ("exps", "shexp")}
        names |= {CORRECTION[1], "ffn_gate_inp.weight"}
    if not config["use_qk_norm"]:
        names -= {"attn_q_norm.weight", "attn_k_norm.weight"}
    return sorted(names | ({f"attn_{each}.bias" for each in "qkv"} if config["attention_bias"] else set()))


def _refuse_uneven(listed: Sequence[StoredPart], config: JsonObject) -> None:
    """Raise CheckpointError for experts that cannot be stacked."""
    for part in listed:
        if not part.name.endswith("_exps.weight"):
            continue
        infos, count = [part.source.info(each) for each in part.stored], config["n_routed_experts"]
        kinds = sorted({f"{each.dtype} {list(each.shape)}" for each in infos})
        if len(infos) != count or len(kinds) > 1:
            raise CheckpointError(
                f"{part.source.path}: {part.name} of the GGUF holds n_routed_experts = {count} experts of one dtype "
                f"and shape; {len(infos)} are stored, as {some(kinds)}"
            )


def _head_parts(head: Inventory, index: int, layout: str) -> Iterator[StoredPart]:
    block = {}
    for canonical, stored in head.stored.items():
        _, role, *rest = canonical.split(".", 2)
        if role == "block":
            block[rest[0]] = stored
        else:
            yield StoredPart(f"blk.{index}.nextn.{HEAD[role]}.weight", head.checkpoint, (stored,))
    yield from _block_parts(head.checkpoint, index, block, layout)


def _block_parts(source: Checkpoint, index: int, paths: Mapping[str, str], layout: str) -> Iterator[StoredPart]:
    """Yield the tensors of a block from those of a layer: path -> name."""
    experts: dict[str, dict[int, str]] = {}
    for path, stored in paths.items():
        if layout == GLM4_MOE and (match := _EXPERT.fullmatch(path)):
            experts.setdefault(f"ffn_{match[2]}_exps", {})[int(match[1])] = stored
        elif (own := _in_layer(path, layout)) is not None:
            yield StoredPart(f"blk.{index}.{own}", source, (stored,))
        else:
            raise CheckpointError(f"{source.path}: llama.cpp's {layout} graph has no {stored}, nor a bias for it")
    for own, by_number in experts.items():
        yield StoredPart(f"blk.{index}.{own}.weight", source, tuple(by_number[each] for each in sorted(by_number)))


def _in_layer(path: str, layout: str) -> str | None:
    """The name in a block of the GGUF of a tensor in a layer; None if there is none."""
    names = LAYER_GLM4_MOE if layout == GLM4_MOE else LAYER
    if layout == GLM4_MOE and path == CORRECTION[0]:
        return CORRECTION[1]
    stem, _, kind = path.rpartition(".")
    return f"{names[stem]}.{kind}" if stem in names and (kind == "weight" or path in BIASES) else None


def common_dtype(listed: Sequence[StoredPart]) -> str:
    """Return the dtype of most of the tensors' bytes; CheckpointError for one that is stored as no floating point."""
    sizes = dict.fromkeys(_FILE_TYPES, 0)
    for each in listed:
        info = each.info
        if info.dtype not in sizes:
            valid = ", ".join(sizes)
            raise CheckpointError(f"{each.source.path}: {info.name} is {info.dtype}; valid for a GGUF are {valid}")
        sizes[info.dtype] += info.nbytes * len(each.stored)
    return max(sizes, key=lambda dtype: sizes[dtype])


def is_read(architecture: object, metadata: Mapping[str, object]) -> bool:
    """Whether nextn reads files of this architecture with this metadata as a checkpoint."""
    return architecture in READ or (architecture in READ_DENSE and f"{architecture}.expert_count" not in metadata)
