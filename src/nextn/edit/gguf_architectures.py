"""Architectures of llama.cpp that are read: tensors and metadata of a GGUF as a checkpoint's, and the inverse changes.

What llama.cpp's converter changes is in its conversion/llama.py (`permute`), qwen.py (`Qwen3NextModel`,
`_LinearAttentionVReorderBase`) and glm.py, of 0c1e57098.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nextn.checkpoint.gguf_file import GgufFile
from nextn.edit.gguf_layout import CORRECTION, LAYER, LAYER_GLM4_MOE, READ, READ_DENSE, STEP35, is_read
from nextn.edit.gguf_metadata import MOST_ROWS, Config, Metadata, rope_parameters
from nextn.errors import CheckpointError, FamilyError
from nextn.family_table import LAYOUT_FIELD
from nextn.family_table.rows import STEP35_DRAFT

_MROPE = (11, 11, 10)  # the default of Qwen3.5
_GELU = "gelu_pytorch_tanh"
_GEMMA3_PERIOD, _GEMMA3_27B = 6, 62  # every so many layers one with full attention; layers of the largest model


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
    """One architecture."""

    model_type: str  # of the checkpoint; also the family of its head, if it has one
    model_class: str  # transformers' class
    config: Callable[[Metadata], Config]  # returns what the config has beside `common_config`
    # Names in a block -> in a decoder layer, without `.weight` or `.bias`. A number is put into `{}` for each slice of
    # a tensor of experts.
    layer: Mapping[str, str]
    exact: Mapping[str, str] = field(default_factory=dict)  # the same for full names
    # Names in `layer` -> that of a tensor whose rows follow in the checkpoint's tensor.
    joined: Mapping[str, str] = field(default_factory=dict)
    # Names in `layer` or `exact` -> a function of the config that returns the change.
    changes: Mapping[str, Callable[[Config], Change]] = field(default_factory=dict)
    norm_offset: float = 0.0  # what the converter adds to norm weights, except for names in `changes`
    # Fields in the config of the head, which is in a folder of its own; none where it is not.
    separate_head: Mapping[str, object] = field(default_factory=dict)

    def in_layer(self, rest: str) -> str | None:
        """Return the path in a decoder layer of `blk.N.<rest>`; None for a tensor that the architecture has not."""
        stem, _, kind = rest.rpartition(".")
        if rest in self.exact or stem not in self.layer or kind not in ("weight", "bias"):
            return self.exact.get(rest)
        return f"{self.layer[stem]}.{kind}"

    def joined_to(self, name: str) -> str | None:
        """Return the name in the file of the tensor whose rows follow those of tensor `name`; None if none does."""
        head, _, stem = name.removesuffix(".weight").rpartition(".")
        return f"{head}.{self.joined[stem]}.weight" if stem in self.joined else None

    def change(self, rest: str, config: Config) -> Change:
        """Return the change of a tensor in a block, or of `output_norm.weight`."""
        stem = rest.rpartition(".")[0]
        if make := self.changes.get(rest) or self.changes.get(stem):
            return make(config)
        if self.norm_offset and rest.endswith("norm.weight"):
            return Change(values=lambda weight: weight - self.norm_offset)
        return Change()


def _llama(meta: Metadata) -> Config:
    return {"attention_bias": meta.has_tensor("attn_q.bias"), "mlp_bias": meta.has_tensor("ffn_up.bias")}


def _glm4_moe(meta: Metadata) -> Config:
    return {
        "attention_bias": meta.has_tensor("attn_q.bias"),
        "use_qk_norm": meta.has_tensor("attn_q_norm.weight"),
        "partial_rotary_factor": meta.integer("rope.dimension_count") / meta.head_dim,
        "n_routed_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "n_shared_experts": meta.integer("expert_shared_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "n_group": meta.integer("expert_group_count", 1),
        "topk_group": meta.integer("expert_group_used_count", 1),
        "routed_scaling_factor": meta.real("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "num_nextn_predict_layers": meta.num_modules,
    }


def _qwen_moe(meta: Metadata) -> Config:
    return {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        # As llama.cpp's graphs have it: every layer has experts, whose weights are normalized.
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _qwen3_5_moe(meta: Metadata) -> Config:
    shared = meta.integer("expert_shared_feed_forward_length")
    return {**_qwen3_5(meta), **_qwen_moe(meta), "shared_expert_intermediate_size": shared}


def _qwen3_5(meta: Metadata) -> Config:
    blocks = range(meta.num_layers)
    is_recurrent = [f"blk.{index}.ssm_a" in meta.file.tensors for index in blocks]
    rotary = meta.integer("rope.dimension_count") / meta.head_dim
    rope: Config = {**rope_parameters(meta), "partial_rotary_factor": rotary}
    sections = meta.file.arrays.get(f"{meta.architecture}.rope.dimension_sections", _MROPE)[:3]
    if sections != _MROPE:
        rope |= {"mrope_section": list(sections), "mrope_interleaved": True}
    heads, keys, size = (meta.integer(f"ssm.{name}") for name in ("time_step_rank", "group_count", "inner_size"))
    if heads % keys or size % heads or max(size, keys * meta.integer("ssm.state_size")) > MOST_ROWS:
        raise CheckpointError(
            f"{meta.file.path}: {keys} key heads, {heads} value heads and {size} values of them do not divide, or are "
            f"more than {MOST_ROWS}. Download or convert the file again."
        )
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_recurrent],
        "linear_conv_kernel_dim": meta.integer("ssm.conv_kernel"),
        "linear_key_head_dim": meta.integer("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size // heads,
        "rope_parameters": rope,
        "mtp_num_hidden_layers": meta.num_modules,
    }


def _gemma3(meta: Metadata) -> Config:
    """As llama.cpp's src/models/gemma3.cpp, which knows the width of a head's scores by the number of layers."""
    window, count = meta.integer("attention.sliding_window", 0), meta.num_layers
    is_local = meta.file.arrays.get("gemma3.attention.sliding_window_pattern")
    if is_local is None:
        period = meta.integer("attention.sliding_window_pattern", _GEMMA3_PERIOD)
        is_local = tuple((index + 1) % period != 0 for index in range(count))
    types = ["sliding_attention" if window and each else "full_attention" for each in is_local[:count]]
    scores = meta.integer("embedding_length") // meta.integer("attention.head_count")
    return {
        "hidden_act": _GELU, "hidden_activation": _GELU, "attention_bias": False,
        "query_pre_attn_scalar": scores if count == _GEMMA3_27B else meta.head_dim,
        "layer_types": types, "sliding_window": window or None,
        "rope_parameters": {
            "full_attention": rope_parameters(meta),
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.real("rope.freq_base_swa", 1e4)},
        },
        "final_logit_softcapping": meta.real("final_logit_softcapping", 0.0) or None,
    }  # fmt: skip


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


def _by_key_head(config: Config) -> Change:
    """Rows of q, k, v and z of a key head follow each other in a checkpoint, q of all heads and so on in the file."""
    keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    sizes = [*[config["linear_key_head_dim"]] * 2, *[per_key * config["linear_value_head_dim"]] * 2]
    parts = torch.arange(keys * sum(sizes)).split([keys * size for size in sizes])
    return Change(torch.cat([part.view(keys, -1) for part in parts], dim=1).flatten())


def _convolution(config: Config) -> Change:
    rows = _value_rows("linear_value_head_dim", after_keys=True)(config).rows
    return Change(rows, values=lambda weight: weight.unsqueeze(1))


def _one_row(config: Config) -> Change:
    """A matrix of one row, which may be a vector in the file."""
    return Change(values=lambda weight: weight.reshape(1, -1))


_DENSE = {block: layer for layer, block in LAYER.items()}
_NORM_AFTER = {name: path for name, path in _DENSE.items() if name != "ffn_norm"}
_NORM_AFTER["post_attention_norm"] = "post_attention_layernorm"
_PROJECTIONS = ("gate", "up", "down")
_EXPERTS = {f"ffn_{each}_exps": f"mlp.experts.{{}}.{each}_proj" for each in _PROJECTIONS}
_GLM4_MOE = {block: layer for layer, block in LAYER_GLM4_MOE.items()} | _EXPERTS
_ROUTED = {"ffn_gate_inp": "mlp.gate", **_EXPERTS}
_SHARED = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_SHARED |= {f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in _PROJECTIONS}
_QWEN3_5 = {
    **_NORM_AFTER, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip


def _without_dense(layer: Mapping[str, str]) -> dict[str, str]:
    return {name: path for name, path in layer.items() if name not in {f"ffn_{each}" for each in _PROJECTIONS}}


_QWEN3_NEXT = {
    **_without_dense(_NORM_AFTER), "attn_qkv": "linear_attn.in_proj_qkvz", "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", **_ROUTED, **_SHARED,
}  # fmt: skip
_QWEN35 = Architecture(
    "qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5, _QWEN3_5,
    {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    changes={
        "attn_qkv": _value_rows("linear_value_head_dim", after_keys=True),
        "attn_gate": _value_rows("linear_value_head_dim"),
        "ssm_alpha": _value_rows(), "ssm_beta": _value_rows(), "ssm_dt.bias": _value_rows(),
        "ssm_a": lambda config: Change(_value_heads(config, 1), values=lambda values: torch.log(-values)),
        "ssm_conv1d": _convolution, "ssm_norm": lambda config: Change(),
        "ssm_out": lambda config: Change(columns=_value_heads(config, config["linear_value_head_dim"])),
    },
    norm_offset=1.0,
)  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _llama, _DENSE,
        changes={"attn_q": _rotary_pairs("num_attention_heads"), "attn_k": _rotary_pairs("num_key_value_heads")},
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", lambda meta: {}, _DENSE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", lambda meta: {}, _DENSE),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _gemma3,
        _NORM_AFTER | {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        norm_offset=1.0,
    ),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, _GLM4_MOE,
        {CORRECTION[1]: CORRECTION[0]},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _qwen_moe, {**_without_dense(_DENSE), **_ROUTED}
    ),
    "qwen3next": replace(
        _QWEN35, model_type="qwen3_next", model_class="Qwen3NextForCausalLM", config=_qwen3_5_moe, layer=_QWEN3_NEXT,
        joined={"attn_qkv": "attn_gate"},
        changes={
            "attn_qkv": _by_key_head, "ssm_conv1d": lambda config: Change(values=lambda weight: weight.unsqueeze(1)),
            "ssm_a": lambda config: Change(values=lambda values: torch.log(-values)),
            "ssm_norm": lambda config: Change(), "ffn_gate_inp_shexp": _one_row,
        },
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35, model_type="qwen3_5_moe_text", model_class="Qwen3_5MoeForCausalLM", config=_qwen3_5_moe,
        layer={**_without_dense(_QWEN3_5), **_ROUTED, **_SHARED},
        changes={**_QWEN35.changes, "ffn_gate_inp_shexp": _one_row},
    ),
}  # fmt: skip


def architecture_of(file: GgufFile) -> tuple[Architecture, Metadata]:
    """Return the architecture of a file. Raises FamilyError for one that is not read, which names those that are."""
    name = file.metadata.get("general.architecture")
    if isinstance(name, str) and is_read(name, file.metadata):
        meta = Metadata(file, name)
        return ARCHITECTURES.get(name) or _shared_layout(meta), meta
    raise FamilyError(
        f"{file.path}: its architecture is {name!r:.80}; nextn converts {', '.join(READ)}, and the dense "
        f"{' and '.join(READ_DENSE)} that `nextn export` writes. Give the original safetensors checkpoint"
    )


def _shared_layout(meta: Metadata) -> Architecture:
    """Return what a file of `nextn export` holds: a Llama-like trunk, known by its tensors, with a head beside it."""
    kind = "qwen3" if meta.has_tensor("attn_q_norm.weight") else "qwen2" if meta.has_tensor("attn_q.bias") else "llama"
    windows = meta.file.arrays.get(f"{meta.architecture}.attention.sliding_window_pattern", ())[: meta.num_layers]
    more: Config = {}
    if any(windows):
        more["sliding_window"] = meta.integer("attention.sliding_window")
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
