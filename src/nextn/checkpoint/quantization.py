"""Which modules of a checkpoint are quantized: by its config, and by the names, dtypes and shapes in its headers.

Finds the sections in config.json and beside it, and edits them to leave modules unquantized; `quant_formats`
interprets them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import TYPE_CHECKING, Literal, cast

from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.gguf_file import BLOCK_NAMES
from nextn.checkpoint.module_lists import Section, quantized
from nextn.checkpoint.quant_formats import FORMATS, Format, Unlisted
from nextn.errors import CheckpointError
from nextn.family_table import lookup
from nextn.family_table.config_fields import text_config, text_key
from nextn.text_format import some

if TYPE_CHECKING:
    from nextn.checkpoint.safetensors_file import TensorInfo

MODELOPT_FILE = "hf_quant_config.json"
MODELSLIM_FILE = "quant_model_description.json"
# lm_head and routers: most engines build them unquantized whatever the config says, some follow it.
UNSURE = frozenset({"lm_head", "head", "gate", "router", "shared_expert_gate"})
MAX_NAME = 300
Storage = Literal[
    "plain", "fp8-block", "fp8-tensor", "fp8-bare", "mxfp8", "nvfp4", "mxfp4", "int8", "compressed", "gptq", "awq",
    "bnb", "torchao", "mlx", "gguf", "unknown",
]  # fmt: skip
PLAIN = frozenset({"BF16", "F16", "F32", "F64"})
NEVER_PACKED = PLAIN | {"I64", "BOOL"}  # dtypes; the integers are buffers

# Suffixes of the weight's own name: `x.weight_scale`, or `experts.down_proj_scale` where experts are one tensor.
# fp8 and fp4: vLLM, quantization/fp8.py, modelopt.py and quark/; _packed and on: compressed-tensors, compressors/;
# .absmax and on: bitsandbytes, functional.py, QuantState.as_dict; _blocks: transformers, integrations/mxfp4.py.
WEIGHT_SUFFIXES = (
    "_scale_inv", "_scale", "_scale_2", "_packed", "_global_scale", "_shape", "_zero_point", "_g_idx", "_offset",
    "_blocks", "_scales", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
)  # fmt: skip
# Suffixes of the module's name. scale: DeepSeek-V4; input_*: activations; SCB: bitsandbytes; biases: MLX; input_offset,
# deq_scale and quant_bias: ModelSlim; _weight_*:
# torchao, prototype/safetensors/safetensors_support.py, whose file metadata say of which class each weight is;
# .weight._*: optimum-quanto, tensor/weights/; W_q: HQQ, core/quantize.py.
MODULE_SUFFIXES = (
    "._weight_qdata", "._weight_scale", "._weight_zero_point", "._weight_scale_and_zero", "._weight_act_pre_scale",
    "._weight_per_tensor_scale", "._weight_tensor_data", "._weight_static_scale",
    ".weight._data", ".weight._scale", ".weight._shift",
    ".weight", ".scale", ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale",
    ".qweight", ".qzeros", ".scales", ".g_idx", ".biases", ".SCB", ".weight_format",
    ".input_offset", ".deq_scale", ".quant_bias", ".W_q",
)  # fmt: skip
SUFFIXES = (
    *(f".weight{suffix}" for suffix in WEIGHT_SUFFIXES), *MODULE_SUFFIXES, *(f".{name}" for name in BLOCK_NAMES)
)  # fmt: skip
_SUFFIXES = frozenset(SUFFIXES)


@dataclass(frozen=True, slots=True)
class QuantSection:
    """One section: the object at `keys` in `file`."""

    file: str
    keys: tuple[str, ...]
    method: str
    form: str
    format: Format = field(repr=False)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """The sections of a checkpoint's configs that describe its quantization, at least one, in order of precedence."""

    checkpoint: Checkpoint = field(repr=False)
    sections: tuple[QuantSection, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "QuantConfig | None":
        """Read the sections; None for an unquantized checkpoint, CheckpointError for an invalid section."""
        sections = tuple(_sections(checkpoint))
        return cls(checkpoint, sections) if sections else None

    @property
    def method(self) -> str:
        """The quant_method of the first section."""
        return self.sections[0].method

    @property
    def known(self) -> bool:
        """Whether the methods are supported; `covers` is None for the modules of any other."""
        return all(section.form in FORMATS for section in self.sections)

    @property
    def has_known_parts(self) -> bool:
        """Whether what a quantized module stores is known."""
        return self.known and not any(section.form in ("higgs", "metal", "sinq", "spqr", "vptq")
                                      for section in self.sections)  # fmt: skip

    @property
    def by_files(self) -> bool:
        """Whether vLLM takes the modules other than experts from the files, as the lists are empty."""
        return all(section.format.by_files for section in self.sections)

    def covers(self, module: str) -> bool | None:
        """Whether an engine that follows the config builds the Linear called `module` quantized.

        None where sections or engines disagree, and for an lm_head or router that the config does not leave out.
        Raises CheckpointError for a pattern that takes too long to match.
        """
        answers = self._answers(module)
        covered = answers.pop() if len(answers) == 1 else None
        return None if covered and module.rpartition(".")[2] in UNSURE else covered

    def disputed(self, module: str) -> bool:
        """Whether one section leaves the module unquantized, and another does not."""
        return self._answers(module) >= {True, False} and module.rpartition(".")[2] not in UNSURE

    def _answers(self, module: str) -> set[bool | None]:
        return {self._covers(section, module) for section in self.sections} if len(module) <= MAX_NAME else set()

    def _covers(self, section: QuantSection, module: str) -> bool | None:
        try:
            return section.format.covers(module)
        except ValueError as error:
            raise _fault(self.checkpoint, section.file, error) from error

    def leaving_out(
        self, modules: Sequence[str], tensors: "Mapping[str, TensorInfo] | None" = None
    ) -> dict[str, dict[str, object]]:
        """Return the edited config files, by name, with which engines build `modules`, and no others, unquantized.

        tensors: Those of the checkpoint after the edit; None: as it is. A shorter name stands for several modules where
        it is a prefix of no quantized module of these. Raises CheckpointError where the format cannot express it.
        """
        unquantized = frozenset(modules)
        stored = {name: kind != "plain" for name, kind in stored_modules(tensors or self.checkpoint.tensors)}
        others = {name: packed for name, packed in stored.items() if name not in unquantized}
        edited: dict[str, dict[str, object]] = {}
        for old in self.sections:
            remaining = [module for module in modules if self._covers(old, module) is not False]
            if remaining and old.format.lists_modules:
                new = self._without(old, remaining, others)
                config = self.checkpoint.config if old.file == CONFIG else self.checkpoint.read_json(old.file)
                edited[old.file] = _replaced(edited.get(old.file, config), old.keys, new)
        return edited

    def _without(self, old: QuantSection, modules: Sequence[str], others: Mapping[str, bool]) -> Section:
        """Return the edited section, after checking how it reads."""
        try:
            section = old.format.without(modules, others)
            new = FORMATS[old.form](section)
            missed = [name for name in modules if new.covers(name) is not False]
            changed = [name for name in quantized(others) if new.covers(name) is not old.format.covers(name)]
            if wrong := missed + changed:
                raise ValueError(f"no entry expresses it without changing {brief(wrong[0])}")
        except ValueError as error:
            what = f"{self.checkpoint.path}: {old.file} ({old.method}) cannot leave {some(modules)}"
            remedy = "Quantize the head as the trunk is, or take a checkpoint of another format"
            raise CheckpointError(f"{what} unquantized: {error}. {remedy}.") from error
        return section


def declared(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a config's quantization_config, or its text model's, unchanged; empty where there is none."""
    section = lookup(config, "quantization_config")
    return section if isinstance(section, Mapping) else {}


def is_mlx(checkpoint: Checkpoint) -> bool:
    """Whether MLX wrote the checkpoint, whose engines have names of their own."""
    formats = {header.metadata.get("format") for header in checkpoint.headers.values()}
    return "mlx" in formats or isinstance(checkpoint.config.get("quantization"), Mapping)


def _fault(checkpoint: Checkpoint, file: str, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}: the quantization config in {file} cannot be used: {error}.")


def _replaced(value: object, keys: tuple[str, ...], section: Section) -> dict[str, object]:
    """Return `value` with `section` at `keys`; copies only the objects on the way, as JSON may be nested deeply."""
    if not keys:
        return section
    inner = cast(dict[str, object], value)
    return inner | {keys[0]: _replaced(inner[keys[0]], keys[1:], section) if keys[1:] else section}


def _sections(checkpoint: Checkpoint) -> Iterator[QuantSection]:
    for file, keys, section in _raw_sections(checkpoint):
        try:
            if not isinstance(section, dict):
                raise ValueError(f"{'.'.join(keys)} is {brief(section)}, it must be an object")
            method = {MODELOPT_FILE: "modelopt", MODELSLIM_FILE: "modelslim"}.get(file) or _method(keys, section)
            form = method.lower().replace("_", "-")
            if form.startswith("modelopt"):  # modelopt_fp4, ...
                form = "modelopt-file" if file == MODELOPT_FILE else "modelopt"
            if form == "modelopt" and isinstance(inner := section.get("quantization"), dict):
                keys, section, form = (*keys, "quantization"), inner, "modelopt-file"  # as vLLM also reads it
            yield QuantSection(file, keys, method, form, FORMATS.get(form, Unlisted)(section))
        except ValueError as error:
            raise _fault(checkpoint, file, error) from error


def _raw_sections(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[str, ...], object]]:
    """Yield file, keys and value, where vllm/config/model.py and sglang/srt/configs/model_config.py look, and MLX."""
    text = text_config(checkpoint.config)
    for outer, config in (((), checkpoint.config), ((text_key(checkpoint.config),), text)):
        for key in ("quantization_config", "compression_config"):
            if config.get(key):
                yield CONFIG, (*outer, key), config[key]
    match checkpoint.config.get("quantization"):
        case {"group_size": _} as section:
            yield CONFIG, ("quantization",), section
    if (own := checkpoint.read_json(MODELOPT_FILE)) and own.get("quantization"):
        yield MODELOPT_FILE, ("quantization",), own["quantization"]
    if own := checkpoint.read_json(MODELSLIM_FILE):
        yield MODELSLIM_FILE, (), own


def _method(keys: tuple[str, ...], section: Section) -> str:
    method = section.get("quant_method")
    if method is None:
        guesses = {"compression_config": "compressed-tensors", "load_in_4bit": "bitsandbytes"}
        guesses |= {"load_in_8bit": "bitsandbytes", "quant_algo": "modelopt", "group_size": "mlx"}
        method = next((guess for key, guess in guesses.items() if key in keys or section.get(key)), None)
    if not isinstance(method, str):
        raise ValueError(f"quant_method is {brief(method)}, it must be a string such as fp8 or compressed-tensors")
    return method


def unpacked(info: "TensorInfo") -> bool:
    """Whether each element is one value (fp8 included), so that the shape is the matrix's."""
    return info.dtype in PLAIN or info.dtype.startswith("F8")


def split_name(name: str, names: Collection[str]) -> tuple[str, str]:
    """Split a tensor name into module and suffix, "" if none: `a.fc.weight_scale` into ("a.fc", ".weight_scale").

    `names` are all tensors: `experts.down_proj_scale` belongs to `experts.down_proj` only if that exists.
    """
    suffix = name[name.rfind(".") :]  # of one component, as most are
    if suffix not in _SUFFIXES:
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    if not suffix:
        bare = next((suffix for suffix in WEIGHT_SUFFIXES if name.endswith(suffix)), "")
        stem = name.removesuffix(bare)
        suffix = bare if stem in names or f"{stem}_blocks" in names else ""
    return name.removesuffix(suffix), suffix


def stored_modules(tensors: "Mapping[str, TensorInfo]") -> "Iterator[tuple[str, Storage]]":
    """Yield every module that holds a matrix or is quantized, and how it is stored."""
    for module in dict.fromkeys(split_name(name, tensors)[0] for name in tensors):
        weight = tensors.get(f"{module}.weight") or tensors.get(module)
        kind = storage(tensors, module)
        if kind is not None and (kind != "plain" or (weight and len(weight.shape) > 1)):
            yield module, kind


def storage(tensors: "Mapping[str, TensorInfo]", module: str) -> Storage | None:
    """Return how `module` (a name without ".weight") is stored; None if it is not, "fp8-bare" for fp8 without scale."""
    weight = tensors.get(f"{module}.weight") or tensors.get(module)
    if packed := tensors.get(f"{module}.qweight"):
        if (scales := tensors.get(f"{module}.scales")) is None:
            return "unknown"
        # AWQ packs along the output, GPTQ along the input, so that only GPTQ's last dimensions agree.
        return "gptq" if packed.shape[-1:] == scales.shape[-1:] else "awq"
    if f"{module}._weight_qdata" in tensors:
        return "torchao"
    if f"{module}.weight_packed" in tensors:
        return "compressed"
    if any(f"{module}.{name}" in tensors for name in BLOCK_NAMES):
        return "gguf"
    if f"{module}_blocks" in tensors:
        return "mxfp4"
    if weight is None:
        return "unknown" if {f"{module}.weight._data", f"{module}.W_q"} & tensors.keys() else None
    if f"{module}.SCB" in tensors or f"{weight.name}.absmax" in tensors:
        return "bnb"
    scale = scale_of(weight.name, tensors)
    return _scaled(weight, tensors[scale] if scale else None, second=f"{weight.name}_scale_2" in tensors)


def may_be_packed(info: "TensorInfo") -> bool:
    """Whether values of this dtype may be codes. Tables of token -> experts, as DeepSeek-V4's, hold integers."""
    return info.dtype not in NEVER_PACKED and not info.name.endswith(".tid2eid")


def scale_of(weight: str, names: Collection[str]) -> str | None:
    """Return the tensor with the scales of `weight`; None if there is none."""
    module = weight.removesuffix(".weight")
    candidates = (f"{weight}_scale_inv", f"{weight}_scale", f"{module}.scale", f"{module}.scales")
    return next((name for name in candidates if name in names), None)


def scale_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of `shape`."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def fp4_group_size(scale_dtype: str) -> int:
    """Return how many values have a common scale in NVFP4, whose scales are e4m3, or in MXFP4."""
    return 16 if scale_dtype == "F8_E4M3" else 32


def _scaled(weight: "TensorInfo", scale: "TensorInfo | None", *, second: bool) -> Storage:
    if weight.dtype in PLAIN:
        return "plain"
    if weight.dtype.startswith("F8"):
        return "fp8-bare" if scale is None else _fp8(weight, scale)
    if scale is None:
        return "unknown"
    if weight.dtype in ("U8", "F4") or (weight.dtype == "I8" and scale.dtype == "F8_E8M0"):
        return "nvfp4" if second else "mxfp4"
    return "int8" if weight.dtype == "I8" else "mlx" if weight.dtype == "U32" else "unknown"


def _fp8(weight: "TensorInfo", scale: "TensorInfo") -> Storage:
    """One scale for the tensor or each row is fp8-tensor, for 32 values of a row mxfp8, for a block fp8-block."""
    if len(scale.shape) < 2 or len(weight.shape) < 2:
        return "fp8-tensor"
    if scale.shape[-2] != weight.shape[-2]:
        return "fp8-block" if scale.shape[-2:] != (1, 1) or scale.name.endswith(("_inv", ".scale")) else "fp8-tensor"
    if scale.dtype in ("U8", "F8_E8M0") and scale.shape[-1] > 1:
        return "mxfp8"
    return "fp8-block" if scale.name.endswith("_inv") or scale.shape[-1] > 1 else "fp8-tensor"
