"""The metadata of a GGUF file as a checkpoint's config: what all architectures have, and rotary embeddings."""

import numpy as np

from nextn.bounded_json import JsonDict
from nextn.checkpoint.gguf_file import GgufFile
from nextn.edit.gguf_layout import YARN
from nextn.errors import CheckpointError, FamilyError

Config = JsonDict
# Of Llama 3.1 and later; a GGUF has quotients of frequencies alone.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_LARGEST = 2**31 - 1  # of a number in the metadata
MOST_ROWS = 2**24  # of all heads of a layer
_NEAR = 1e-4  # of such quotients


class Metadata:
    """The metadata of an architecture, by names without it. A value that is missing or wrong is a CheckpointError."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def integer(self, name: str, default: int | None = None) -> int:
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
        return self.integer("nextn_predict_layers", 0)

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        count = self.integer("block_count") - self.num_modules
        if not 0 < count <= len(self.file.tensors):
            raise self._wrong("block_count", count + self.num_modules, "the number of blocks in the file")
        return count

    @property
    def head_dim(self) -> int:
        size = self.integer("embedding_length") // self.integer("attention.head_count")
        return self.integer("attention.key_length", size)

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
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] != meta.integer("embedding_length"):
        shape = None if embedding is None else embedding.shape
        raise CheckpointError(
            f"{meta.file.path}: token_embd.weight has shape {shape}, it must have rows of "
            f"{meta.integer('embedding_length')}. It holds no complete model: download it again."
        )
    for name in ("attention.head_count", "attention.head_count_kv"):
        count = meta.integer(name, meta.integer("attention.head_count"))
        if meta.head_dim * count > MOST_ROWS:
            raise CheckpointError(
                f"{meta.file.path}: {meta.architecture}.{name} is {count}: with {meta.head_dim} values each, more than "
                f"{MOST_ROWS} values in the heads of a layer. Download or convert the file again."
            )
    # llama.cpp ends a text at each of them.
    ends = [*dict.fromkeys(id for name in ("eos", "eot", "eom") if (id := _token(meta, name)) is not None)]
    return {
        "vocab_size": embedding.shape[1],
        "hidden_size": meta.integer("embedding_length"),
        # Models of experts alone may have none, and do not use it.
        "intermediate_size": meta.integer("feed_forward_length", meta.integer("expert_feed_forward_length", 0) or None),
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": meta.integer("attention.head_count"),
        "num_key_value_heads": meta.integer("attention.head_count_kv", meta.integer("attention.head_count")),
        "head_dim": meta.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(meta),
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


def rope_parameters(meta: Metadata) -> Config:
    """Return the rotary embeddings' part of a config. Raises FamilyError for types that are not read."""
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
            length = meta.integer("rope.scaling.original_context_length")
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
