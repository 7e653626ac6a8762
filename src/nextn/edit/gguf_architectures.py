"""Architectures of llama.cpp that are read: tensors and metadata of a GGUF as a checkpoint's, and the inverse changes.

What llama.cpp's converter changes is in its conversion/llama.py (`permute`), qwen.py (`Qwen3NextModel`,
`_LinearAttentionVReorderBase`) and glm.py, of 0c1e57098.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nextn.checkpoint.gguf_file import GgufFile
from nextn.edit.gguf_layout import HY_V3, LAYER, STEP35, YARN
from nextn.errors import CheckpointError, FamilyError
from nextn.families import LAYOUT_FIELD
from nextn.families.rows import STEP35_DRAFT

Config = dict[str, Any]
# Of Llama 3.1 and later; a GGUF has quotients of frequencies alone.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_LARGEST = 2**31 - 1  # of a number in the metadata
_MOST_ROWS = 2**24  # of all heads of a layer
_NEAR = 1e-4  # of such quotients
_MROPE = (11, 11, 10)  # the default of Qwen3.5


@dataclass(frozen=True, eq=False)
class Change:
    """What makes a stored tensor the checkpoint's: rows or columns in another order, then a function of all values."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    values: Callable[[Tensor], Tensor] | None = None

    @property
    def is_none(self) -> bool:
        return self.rows is None and self.columns is None and self.values is None

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result."""
        return stored if self.values is None else tuple(self.values(torch.empty(stored, device="meta")).shape)


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: Of the checkpoint; also the family of its head, if it has one.
        model_class: transformers' class.
        config: Returns what the config has beside `common_config`.
        layer: Names in a block -> in a decoder layer, without `.weight` or `.bias`. A number is put into `{}` for
            each slice of a tensor of experts.
        exact: The same for full names.
        changes: Names in `layer` or `exact` -> a function of the config that returns the change.
        norm_offset: What the converter adds to norm weights, except for names in `changes`.
        separate_head: Fields in the config of the head, which is in a folder of its own; none where it is not.
    """

    model_type: str
    model_class: str
    config: "Callable[[Metadata], Config]"
    layer: Mapping[str, str]
    exact: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[Config], Change]] = field(default_factory=dict)
    norm_offset: float = 0.0
    separate_head: Mapping[str, object] = field(default_factory=dict)

    def in_layer(self, rest: str) -> str | None:
        """Return the path in a decoder layer of `blk.N.<rest>`; None for a tensor that the architecture has not."""
        stem, _, kind = rest.rpartition(".")
        if rest in self.exact or stem not in self.layer or kind not in ("weight", "bias"):
            return self.exact.get(rest)
        return f"{self.layer[stem]}.{kind}"

    def change(self, rest: str, config: Config) -> Change:
        """Return the change of a tensor in a block, or of `output_norm.weight`."""
        stem = rest.rpartition(".")[0]
        if make := self.changes.get(rest) or self.changes.get(stem):
            return make(config)
        if self.norm_offset and rest.endswith("norm.weight"):
            return Change(values=lambda weight: weight - self.norm_offset)
        return Change()


class Metadata:
    """The metadata of an architecture, by names without it. A value that is missing or wrong is a CheckpointError."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 1, or the default, which may be 0."""
        value = self._value(name, default)
        if type(value) is not int or not (0 < value <= _LARGEST or value == default):
            raise self._wrong(name, value, f"a whole number from 1 to {_LARGEST}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(str(np.float32(value)))  # 1e-06, not what 32 bits make of it

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.file.metadata

    def has_tensor(self, rest: str) -> bool:
        """Whether a block of the file has this tensor."""
        return any(name.startswith("blk.") and name.split(".", 2)[2] == rest for name in self.file.tensors)

    @property
    def num_modules(self) -> int:
        """MTP layers, which are the last blocks."""
        return self.whole("nextn_predict_layers", 0)

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        count = self.whole("block_count") - self.num_modules
        if not 0 < count <= len(self.file.tensors):
            raise self._wrong("block_count", count + self.num_modules, "the number of blocks in the file")
        return count

    @property
    def head_dim(self) -> int:
        return self.whole("attention.key_length", self.whole("embedding_length") // self.whole("attention.head_count"))

    def _value(self, name: str, default: object) -> object:
        return self.file.metadata.get(f"{self.architecture}.{name}", default)

    def _wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        if value is None and (count := self.file.metadata.get(f"{self.architecture}.{name}[]")) is not None:
            value = f"a list of {count}"
        return CheckpointError(
            f"{self.file.path}: {self.architecture}.{name} is {value!r:.80}, it must be {expected}. Download or "
            "convert the file again."
        )


def common_config(meta: Metadata) -> Config:
    """Return what the config of every architecture has, without names of classes and dtypes."""
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] != meta.whole("embedding_length"):
        shape = None if embedding is None else embedding.shape
        raise CheckpointError(
            f"{meta.file.path}: token_embd.weight has shape {shape}, it must have rows of "
            f"{meta.whole('embedding_length')}. It holds no complete model: download it again."
        )
    if meta.head_dim * meta.whole("attention.head_count") > _MOST_ROWS:
        raise CheckpointError(f"{meta.file.path}: more than {_MOST_ROWS} values in the heads of a layer")
    # llama.cpp ends a text at each of them.
    ends = [*dict.fromkeys(id for name in ("eos", "eot", "eom") if (id := _token(meta, name)) is not None)]
    return {
        "vocab_size": embedding.shape[1],
        "hidden_size": meta.whole("embedding_length"),
        "intermediate_size": meta.whole("feed_forward_length"),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": meta.whole("attention.head_count"),
        "num_key_value_heads": meta.whole("attention.head_count_kv", meta.whole("attention.head_count")),
        "head_dim": meta.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.whole("context_length"),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(meta),
        "bos_token_id": _token(meta, "bos"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": _token(meta, "padding"),
    }


def _token(meta: Metadata, name: str) -> int | None:
    """The id of a special token; None where the file names none."""
    value = meta.file.metadata.get(key := f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value <= _LARGEST):
        raise CheckpointError(f"{meta.file.path}: {key} is {value!r:.80}, it must be a whole number")
    return value


def _rope(meta: Metadata) -> Config:
    rope: Config = {"rope_type": meta.text("rope.scaling.type", "none"), "rope_theta": meta.real("rope.freq_base", 1e4)}
    if "rope_freqs.weight" in meta.file.tensors:
        return rope | _llama3(meta)
    match rope["rope_type"]:
        case "none":
            return rope | {"rope_type": "default"}
        case "linear":
            return rope | {"factor": meta.real("rope.scaling.factor")}
        case "yarn":
            given = {
                name: meta.real(f"rope.scaling.{key}") for name, key in YARN.items() if meta.has(f"rope.scaling.{key}")
            }
            length = meta.whole("rope.scaling.original_context_length")
            return (
                rope | {"factor": meta.real("rope.scaling.factor"), "original_max_position_embeddings": length} | given
            )
    raise FamilyError(
        f"{meta.file.path}: rotary embeddings of type {rope['rope_type']}; none, linear, yarn and Llama 3.1's are read"
    )


def _llama3(meta: Metadata) -> Config:
    """Find factor and original length of Llama 3.1's scaling from the quotients of its frequencies."""
    quotients = meta.file.tensors["rope_freqs.weight"].rows(0, 1)[0].astype(np.float64)
    count = len(quotients)
    turns = meta.real("rope.freq_base", 1e4) ** (-np.arange(count) / count) / (2 * np.pi)  # per position
    factor = float(quotients.max())
    # A frequency between the two limits has a quotient that says how far it turns in the original length.
    smooth = (1 / quotients - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.zeros(count)
    between = (smooth > _NEAR) & (smooth < 1 - _NEAR)
    lengths = (_LOW + smooth[between] * (_HIGH - _LOW)) / turns[between]
    length = round(float(lengths.mean())) if lengths.size else _ORIGINAL
    smooth = np.clip((length * turns - _LOW) / (_HIGH - _LOW), 0, 1)
    if not np.abs(quotients * ((1 - smooth) / factor + smooth) - 1).max() < _NEAR:
        raise FamilyError(
            f"{meta.file.path}: rope_freqs.weight is not of Llama 3.1's scaling with the factors {_LOW} and {_HIGH}. "
            "Give the original checkpoint"
        )
    return {
        "rope_type": "llama3", "factor": round(factor, 4), "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH, "original_max_position_embeddings": length,
    }  # fmt: skip


def _llama(meta: Metadata) -> Config:
    return {"attention_bias": meta.has_tensor("attn_q.bias"), "mlp_bias": meta.has_tensor("ffn_up.bias")}


def _nothing(meta: Metadata) -> Config:
    return {}


def _glm4_moe(meta: Metadata) -> Config:
    return {
        "attention_bias": meta.has_tensor("attn_q.bias"),
        "use_qk_norm": meta.has_tensor("attn_q_norm.weight"),
        "partial_rotary_factor": meta.whole("rope.dimension_count") / meta.head_dim,
        "n_routed_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "n_shared_experts": meta.whole("expert_shared_count"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "first_k_dense_replace": meta.whole("leading_dense_block_count", 0),
        "n_group": meta.whole("expert_group_count", 1),
        "topk_group": meta.whole("expert_group_used_count", 1),
        "routed_scaling_factor": meta.real("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "num_nextn_predict_layers": meta.num_modules,
    }


def _qwen3_5(meta: Metadata) -> Config:
    blocks = range(meta.num_layers)
    is_recurrent = [f"blk.{index}.ssm_a" in meta.file.tensors for index in blocks]
    rotary = meta.whole("rope.dimension_count") / meta.head_dim
    rope: Config = {**_rope(meta), "partial_rotary_factor": rotary}
    sections = meta.file.arrays.get(f"{meta.architecture}.rope.dimension_sections", _MROPE)[:3]
    if sections != _MROPE:
        rope |= {"mrope_section": list(sections), "mrope_interleaved": True}
    heads, keys, size = (meta.whole(f"ssm.{name}") for name in ("time_step_rank", "group_count", "inner_size"))
    if heads % keys or size % heads or max(size, keys * meta.whole("ssm.state_size")) > _MOST_ROWS:
        raise CheckpointError(
            f"{meta.file.path}: {keys} key heads, {heads} value heads and {size} values of them do not divide, or are "
            f"more than {_MOST_ROWS}. Download or convert the file again."
        )
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_recurrent],
        "linear_conv_kernel_dim": meta.whole("ssm.conv_kernel"),
        "linear_key_head_dim": meta.whole("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size // heads,
        "rope_parameters": rope,
        "mtp_num_hidden_layers": meta.num_modules,
    }


def _rotary_pairs(heads: str) -> Callable[[Config], Change]:
    """Undo `permute`: pairs of a rotation are neighbors in the file, and halves of a head in a checkpoint."""

    def change(config: Config) -> Change:
        order = torch.arange(config[heads] * config["head_dim"]).view(config[heads], -1, 2)
        return Change(order.transpose(1, 2).flatten())

    return change


def _value_heads(config: Config, width: int, *, after: int = 0) -> Tensor:
    """The rows of value heads, `width` each: grouped by key head in a checkpoint, in turns in the file.

    Rows before them, `after` of all, stay.
    """
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = torch.arange(heads * width).view(heads // keys, keys, width).transpose(0, 1).flatten()
    return torch.cat([torch.arange(after), order + after])


def _value_rows(of_heads: str | None = None, *, after_keys: bool = False) -> Callable[[Config], Change]:
    def change(config: Config) -> Change:
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] if after_keys else 0
        return Change(_value_heads(config, config[of_heads] if of_heads else 1, after=keys))

    return change


def _convolution(config: Config) -> Change:
    rows = _value_rows("linear_value_head_dim", after_keys=True)(config).rows
    return Change(rows, values=lambda weight: weight.unsqueeze(1))


def _decay(config: Config) -> Change:
    return Change(_value_heads(config, 1), values=lambda values: torch.log(-values))


def _value_columns(config: Config) -> Change:
    return Change(columns=_value_heads(config, config["linear_value_head_dim"]))


_DENSE = {block: layer for layer, block in LAYER.items()}
_NORM_AFTER = {name: path for name, path in _DENSE.items() if name != "ffn_norm"}
_NORM_AFTER["post_attention_norm"] = "post_attention_layernorm"
_GLM4_MOE = {
    **_NORM_AFTER, "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")},
    **{f"ffn_{each}_exps": f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")},
}  # fmt: skip
_QWEN3_5 = {
    **_NORM_AFTER, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _llama, _DENSE,
        changes={"attn_q": _rotary_pairs("num_attention_heads"), "attn_k": _rotary_pairs("num_key_value_heads")},
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _nothing, _DENSE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _nothing, _DENSE),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, _GLM4_MOE,
        {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5, _QWEN3_5,
        {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        {
            "attn_qkv": _value_rows("linear_value_head_dim", after_keys=True),
            "attn_gate": _value_rows("linear_value_head_dim"),
            "ssm_alpha": _value_rows(), "ssm_beta": _value_rows(), "ssm_dt.bias": _value_rows(), "ssm_a": _decay,
            "ssm_conv1d": _convolution, "ssm_out": _value_columns, "ssm_norm": lambda config: Change(),
        },
        norm_offset=1.0,
    ),
}  # fmt: skip
_DRAFT_LAYOUTS = (STEP35, HY_V3)


def architecture_of(file: GgufFile) -> tuple[Architecture, Metadata]:
    """Return the architecture of a file. Raises FamilyError for one that is not read, which names those that are."""
    name = file.metadata.get("general.architecture")
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name], Metadata(file, name)
    if isinstance(name, str) and name in _DRAFT_LAYOUTS and f"{name}.expert_count" not in file.metadata:
        meta = Metadata(file, name)
        return _shared_layout(meta), meta
    raise FamilyError(
        f"{file.path}: its architecture is {name!r:.80}; nextn converts {', '.join(ARCHITECTURES)}, and the dense "
        f"{' and '.join(_DRAFT_LAYOUTS)} that `nextn export` writes. Give the original safetensors checkpoint"
    )


def _shared_layout(meta: Metadata) -> Architecture:
    """Return what a file of `nextn export` holds: a Llama-like trunk, known by its tensors, with a head beside it."""
    kind = "qwen3" if meta.has_tensor("attn_q_norm.weight") else "qwen2" if meta.has_tensor("attn_q.bias") else "llama"
    windows = meta.file.arrays.get(f"{meta.architecture}.attention.sliding_window_pattern", ())[: meta.num_layers]
    more: Config = {}
    if any(windows):
        more["sliding_window"] = meta.whole("attention.sliding_window")
        if kind != "llama":
            more |= {"use_sliding_window": True, "max_window_layers": 0}
            more["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windows]
    base, is_mistral = ARCHITECTURES[kind], kind == "llama" and any(windows)
    count = {"num_mtp_layers": meta.num_modules}
    is_apart = meta.architecture == STEP35
    return replace(
        base,
        model_type="mistral" if is_mistral else kind,
        model_class="MistralForCausalLM" if is_mistral else base.model_class,
        changes={},
        config=lambda _: {**base.config(meta), **more, **({} if is_apart else count)},
        separate_head={**count, LAYOUT_FIELD: STEP35_DRAFT.name} if is_apart else {},
    )
