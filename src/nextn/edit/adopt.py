"""Write a Llama-style trunk in GLM-4.5's layout (glm4_moe), which vLLM, SGLang, llama.cpp and transformers run.

Attention and norms keep their names and bytes, and so do the MLPs of all layers but the last. vLLM needs one layer of
experts (glm4_moe.py:509 of 0.32.0), and every engine builds the head's layer with them, so there the MLP is cut into
parts: EXPERTS experts that are all chosen, and the shared one. An untrained router gives each the weight 1 / EXPERTS,
which `routed_scaling_factor` turns into 1, exactly in every dtype; the sum of the parts is the MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from nextn.bounded_json import JsonDict, JsonObject
from nextn.checkpoint.checkpoint import CHUNK, CONFIG, Checkpoint, as_checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import GENERIC, misfits, open_head, record_training, trained_length, trunk_family
from nextn.checkpoint.safetensors_file import DTYPES, TensorInfo
from nextn.edit.compatibility import absent
from nextn.edit.execute import carry_out
from nextn.edit.links import refuse_links
from nextn.edit.plan import EditPlan, Piece, Progress, changes, divide, index_document, quiet, visible
from nextn.errors import CheckpointError, FamilyError, NextnError
from nextn.family_table import by_name
from nextn.text_format import some

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_STEMS = (
    "input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)  # fmt: skip
BIASES = frozenset(f"self_attn.{name}_proj.bias" for name in "qkv")  # of a decoder layer, that other layouts also have


def full_config(checkpoint: Checkpoint) -> JsonDict:
    """Return the checkpoint's config with all defaults, as transformers reads it."""
    from transformers import AutoConfig

    config: JsonDict = AutoConfig.for_model(**checkpoint.config).to_dict()
    return config


def head_dim(config: JsonObject) -> int:
    """Return the size of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def windows(config: JsonObject) -> list[bool]:
    """Return for each layer of the trunk whether it has a sliding window."""
    types = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return [bool(config.get("sliding_window")) and each == "sliding_attention" for each in types]


def layer_paths(config: JsonObject) -> set[str]:
    """Return the names of the tensors in a decoder layer without a bias of o_proj or of the MLP."""
    norms = ("self_attn.q_norm", "self_attn.k_norm") if config["model_type"] == "qwen3" else ()
    biases = BIASES if config["model_type"] == "qwen2" else frozenset()
    return {f"{stem}.weight" for stem in (*_STEMS, *norms)} | biases


_LAYOUT = "glm4_moe"
EXPERTS = 8  # SGLang shards experts over at most as many GPUs (glm4_moe.py: "Tensor parallel size")
_FILE = "model-glm4_moe.safetensors"  # llama.cpp's converter reads model*.safetensors only
_MLP = {"gate": 0, "up": 0, "down": 1}  # projection -> the dimension that is cut
_FIRST = "gate_proj.weight"
_UNUSED = "rotary_emb.inv_freq"  # of old checkpoints
_MOST_PADDING = 0.1  # of an MLP
# What kernels and quantization want the width of an expert to be a multiple of; torch's grouped_mm needs the last one.
_STEPS = (256, 128, 64, 32, 16)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Fields of the config that mean the same.
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlicedPiece(Piece):
    """A matrix's rows (axis 0) or columns (axis 1) from `begin` to `end`, with zeros behind them up to `size`."""

    axis: int = 0
    begin: int = 0
    end: int = 0
    size: int = 0

    @property
    def info(self) -> TensorInfo:
        stored = self.source.info(self.name)
        shape = (self.size, stored.shape[1]) if self.axis == 0 else (stored.shape[0], self.size)
        return replace(stored, shape=shape, begin=0, end=prod(shape) * DTYPES[stored.dtype] // 8)

    def chunks(self) -> Iterator[bytes]:
        stored = self.source.info(self.name)
        width = DTYPES[stored.dtype] // 8
        row = stored.shape[1] * width
        return self._rows(stored, row) if self.axis == 0 else self._columns(stored, row, width)

    def _rows(self, stored: TensorInfo, row: int) -> Iterator[bytes]:
        begin, end = (stored.begin + each * row for each in (self.begin, self.end))
        yield from self.source.chunks(replace(stored, begin=begin, end=end))
        yield bytes((self.size - (self.end - self.begin)) * row)

    def _columns(self, stored: TensorInfo, row: int, width: int) -> Iterator[bytes]:
        padding = (self.size - (self.end - self.begin)) * width
        for chunk in self.source.chunks(stored, max(1, CHUNK // row) * row):
            own = np.frombuffer(chunk, np.uint8).reshape(-1, row)[:, self.begin * width : self.end * width]
            yield np.pad(own, ((0, 0), (0, padding))).tobytes()


@dataclass(frozen=True, slots=True)
class ZeroPiece(Piece):
    """A tensor of zeros; `name` is that of another tensor, beside which it is needed."""

    shape: tuple[int, ...] = ()
    dtype: str = "F32"

    @property
    def info(self) -> TensorInfo:
        nbytes = prod(self.shape) * DTYPES[self.dtype] // 8
        return TensorInfo(self.name, self.dtype, self.shape, self.source.info(self.name).file, 0, nbytes)

    def chunks(self) -> Iterator[bytes]:
        yield bytes(self.info.nbytes)


def engines_after_adopting(source: "str | Path | Checkpoint", head: str | Path | None = None) -> tuple[str, ...]:
    """Return the engines that run this model, with this head or the one inside, once `adopt` wrote it; none: ().

    The config counts as its file says it: to import transformers for the fields that are not there takes seconds.
    """
    try:
        checkpoint = visible(as_checkpoint(source))
        trunk = Inventory.of(checkpoint, family=trunk_family(checkpoint))
        config = _stated(checkpoint.config)
        if (own := _head(head, trunk)) is None or config["model_type"] not in MODEL_TYPES or any(problems(config)):
            return ()
        _refuse_misshapen(trunk, own, config)
    except (NextnError, KeyError):
        return ()
    return ("vllm", "sglang") + (() if config["rope_parameters"]["rope_type"] == "llama3" else ("llama.cpp",))


def _stated(config: JsonObject) -> JsonDict:
    """Return the fields that `problems` reads, of a file that leaves some out or has their older names."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    defaults = {"hidden_act": "silu", "tie_word_embeddings": False, "model_type": None}
    windowless = {} if config.get("use_sliding_window", True) else {"sliding_window": None}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    return {**defaults, **config, **windowless, "rope_parameters": {"rope_type": rope_type}}


def adopt(
    source: "str | Path | Checkpoint",
    out: str | Path,
    *,
    head: str | Path | None = None,
    follow_links: bool = False,
    dry_run: bool = False,
    on_bytes: Progress = quiet,
) -> EditPlan:
    """Write the model `source`, of no family, into the new folder `out` in GLM-4.5's layout, where it computes the
    same.

    A head of the trunk's own layer is kept: that in the folder or file `head`, else in `source`. The options are those
    of `restore`. Raises CheckpointError if a tensor has no place in the layout, or the head is incomplete or of another
    trunk; FamilyError if the layout cannot compute the same, naming the fields of the config.
    """
    checkpoint = visible(as_checkpoint(source))
    refuse_links(checkpoint, follow=follow_links)
    config = _config(checkpoint)
    trunk = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    found = _head(head, trunk)
    plan = carry_out(_plan(trunk, found, config), out, follow_links=follow_links, dry_run=dry_run, on_bytes=on_bytes)
    if found is not None and not dry_run:
        length = trained_length(found)
        record_training(plan.folder, source=found.checkpoint.path, made_by="convert", trained_length=length)
    return plan


def _config(checkpoint: Checkpoint) -> JsonDict:
    """Return the trunk's full config; FamilyError for one that the layout cannot compute."""
    model_type = checkpoint.config.get("model_type")
    listed = [] if model_type in MODEL_TYPES else [f"model_type {model_type!r:.80} is not {', '.join(MODEL_TYPES)}"]
    config = {} if listed else full_config(checkpoint)
    if listed := listed or [*problems(config)]:
        raise FamilyError(f"{checkpoint.path}: glm4_moe cannot compute this trunk: {'; '.join(listed)}")
    return config


def problems(config: JsonObject) -> Iterator[str]:
    """Yield why a trunk with this config, with all defaults, of one of `MODEL_TYPES`, has no equal in the layout."""
    if config["model_type"] != "qwen2" and config.get("attention_bias"):
        yield "attention_bias: o_proj has a bias, and glm4_moe's has none"
    if config.get("mlp_bias"):
        yield "mlp_bias: glm4_moe's MLP has no bias"
    if config["hidden_act"] != "silu":
        yield f"hidden_act {config['hidden_act']}: engines run glm4_moe with silu alone"
    if any(windows(config)):
        yield f"sliding_window {config['sliding_window']}: glm4_moe has full attention in every layer"
    if (rope_type := config["rope_parameters"]["rope_type"]) not in _ROPE_TYPES:
        yield f"rope_parameters: rope_type {rope_type} is not one of {', '.join(_ROPE_TYPES)}"
    if config["num_hidden_layers"] < 2:
        yield "num_hidden_layers 1: SGLang would take the first layer for the head"
    if config.get("quantization_config"):
        yield "quantization_config: give the unquantized model, and quantize the result"


def _head(source: str | Path | None, trunk: Inventory) -> Inventory | None:
    """Return a complete head of one layer of the trunk's own class; None if there is none."""
    head = open_head(source, trunk) if source is not None else trunk if trunk.stored else None
    if head is None:
        return None
    path = head.checkpoint.path
    if head.family.name != GENERIC or len(head.modules) != 1:
        raise FamilyError(
            f"{path}: {len(head.modules)} MTP layers of {head.family.name}; glm4_moe takes one layer of the trunk's "
            "own class, as `nextn train --init-head` writes it without --layout"
        )
    listed = [f"{each} is missing" for each in absent(head)] + [each.found for each in misfits(head, trunk)]
    if listed:
        raise CheckpointError(f"{path}: the head cannot be converted: {'; '.join(listed)}")
    return head


def _plan(trunk: Inventory, head: Inventory | None, config: JsonObject) -> EditPlan:
    checkpoint, last = trunk.checkpoint, trunk.num_layers - 1
    _refuse_misshapen(trunk, head, config)
    width = part_width(config["intermediate_size"])
    stem = trunk.layers[last][f"mlp.{_FIRST}"].name.removesuffix(f".{_FIRST}")
    fresh = _parts(checkpoint, stem, f"model.layers.{last}.mlp", width)
    if config["tie_word_embeddings"]:
        fresh["lm_head.weight"] = Piece(checkpoint, trunk.shared["embedding"])
    if head is not None:
        fresh |= _head_pieces(head, width)
    gone = {f"{stem}.{name}_proj.weight" for name in _MLP} | set(trunk.stored.values())
    gone |= {name for name in checkpoint.tensors if name.endswith(_UNUSED)}
    files = divide(checkpoint, gone, fresh, new_file=_FILE)
    new = {**_same(config), **_layout(config, width, num_modules=int(head is not None))}
    documents = {CONFIG: new, **index_document(files, checkpoint)}
    notes, lines = tuple(_notes(config, has_head=head is not None)), changes(checkpoint, documents)
    return EditPlan(checkpoint, Path(), _LAYOUT, files, documents, changes=lines, notes=notes)


def _refuse_misshapen(trunk: Inventory, head: Inventory | None, config: JsonObject) -> None:
    """Raise CheckpointError for tensors that the layout has not, missing ones, and MLPs of other sizes."""
    layers = {f"layer {index}": trunk.layers.get(index, {}) for index in range(trunk.num_layers)}
    if head is not None:
        block = {name.removeprefix("0.block."): head.info(name) for name in head.own if name.startswith("0.block.")}
        layers["the head"] = block
    expected, size = layer_paths(config), (config["intermediate_size"], config["hidden_size"])
    shapes = {f"mlp.{name}_proj.weight": size if axis == 0 else size[::-1] for name, axis in _MLP.items()}
    shared = {"embedding": "embedding"} | ({} if config["tie_word_embeddings"] else {"output": "lm_head"})
    listed = [f"the {name} is missing" for role, name in shared.items() if role not in trunk.shared]
    for name, layer in layers.items():
        stored = {path for path in layer if not path.endswith(_UNUSED)}
        listed += [f"glm4_moe has no place for {layer[path].name}" for path in sorted(stored - expected)]
        listed += [f"{path} of {name} is missing" for path in sorted(expected - stored)]
        listed += [f"{layer[path].name} is {list(layer[path].shape)}, by the config {list(shape)}"
                   for path, shape in shapes.items() if path in stored and layer[path].shape != shape]  # fmt: skip
    if listed:
        raise CheckpointError(f"{trunk.checkpoint.path}: cannot be adopted: {some(listed, 3)}")


def part_width(intermediate_size: int) -> int:
    """Return the width of each of the EXPERTS + 1 parts of an MLP: a multiple of 256, or of less if that pads much."""
    count = EXPERTS + 1
    widths = [-(-intermediate_size // (count * step)) * step for step in _STEPS]
    fitting = (width for width in widths if count * width <= (1 + _MOST_PADDING) * intermediate_size)
    return next(fitting, widths[-1])


def _parts(source: Checkpoint, stem: str, target: str, width: int) -> dict[str, Piece]:
    """Return the tensors of a layer of experts at `target` that computes the MLP at `stem`."""
    beside = source.info(f"{stem}.{_FIRST}")
    rows, hidden = beside.shape
    names = [*(f"experts.{index}" for index in range(EXPERTS)), "shared_experts"]
    ends = [index * rows // len(names) for index in range(len(names) + 1)]
    pieces: dict[str, Piece] = {
        f"{target}.{name}.{each}_proj.weight": SlicedPiece(
            source, f"{stem}.{each}_proj.weight", axis=axis, begin=begin, end=end, size=width
        )
        for name, (begin, end) in zip(names, pairwise(ends), strict=True)
        for each, axis in _MLP.items()
    }
    router = ZeroPiece(source, beside.name, shape=(EXPERTS, hidden), dtype=beside.dtype)
    bias = ZeroPiece(source, beside.name, shape=(EXPERTS,))
    return {**pieces, f"{target}.gate.weight": router, f"{target}.gate.e_score_correction_bias": bias}


def _head_pieces(head: Inventory, width: int) -> dict[str, Piece]:
    row, count = by_name(_LAYOUT), head.num_layers
    mlp = {f"0.block.mlp.{name}_proj.weight" for name in _MLP}
    pieces = {row.published(canonical, count): Piece(head.checkpoint, head.stored[canonical])
              for canonical in head.own if canonical not in mlp}  # fmt: skip
    stem = head.stored[f"0.block.mlp.{_FIRST}"].removesuffix(f".{_FIRST}")
    return {**pieces, **_parts(head.checkpoint, stem, row.published("0.block.mlp", count), width)}


def _same(config: JsonObject) -> JsonDict:
    return {name: config[name] for name in _SAME if config.get(name) is not None}


def _layout(config: JsonObject, width: int, *, num_modules: int) -> JsonDict:
    """Return what the config has beside `_same`."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": head_dim(config),  # vLLM has no default
        "attention_bias": config["model_type"] == "qwen2",
        "use_qk_norm": config["model_type"] == "qwen3",
        # In the first place llama.cpp and transformers look for it; SGLang in either.
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,  # vLLM and SGLang load an lm_head whatever it says
        "first_k_dense_replace": config["num_hidden_layers"] - 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "n_shared_experts": 1,  # SGLang fuses one alone
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(EXPERTS),
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": num_modules,
    }


def _notes(config: JsonObject, *, has_head: bool) -> Iterator[str]:
    if config["rope_parameters"]["rope_type"] == "llama3":
        yield (
            "llama.cpp computes another model from rope_type llama3 in this layout, as glm4-moe.cpp:211 takes no "
            "factors: for it, train a head with --layout step35"
        )
    if not has_head:
        yield "it has no head yet: `nextn train RUN --freeze-trunk --init-head --from` this folder makes one"
