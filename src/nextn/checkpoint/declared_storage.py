"""How the config's quantization has engines store a quantized matrix, as far as its section says so. Knows no files."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from nextn.checkpoint.module_lists import table
from nextn.checkpoint.quant_formats import CompressedTensors, Format, Gptq, ModelOpt
from nextn.checkpoint.quantization import QuantConfig, Storage

_FP8: frozenset[Storage] = frozenset({"fp8-block", "fp8-tensor", "mxfp8"})
_FP4: frozenset[Storage] = frozenset({"nvfp4", "mxfp4"})
_PACKED: frozenset[Storage] = frozenset({"compressed"})
_INT8: frozenset[Storage] = frozenset({"int8"})
Kinds = frozenset[Storage] | None


def declared_storage(config: QuantConfig, module: str) -> Kinds:
    """Return the kinds in which engines can load the matrix; None where a section does not say, or nextn cannot."""
    found = [_READERS.get(section.form, _unknown)(section.format, module) for section in config.sections]
    known = [kinds for kinds in found if kinds is not None]
    return frozenset[Storage]().union(*known) if len(known) == len(found) else None


def _unknown(_: Format, module: str) -> Kinds:
    return None


def _compressed_tensors(section: Format, module: str) -> Kinds:
    """With 8 bits, integers are packed or not, as its `format` says."""
    weights = section.weights(module) if isinstance(section, CompressedTensors) else {}
    match weights.get("type", "int"), weights.get("num_bits"):
        case "float", 8:
            return _FP8
        case "int", 8:
            return _INT8 | _PACKED
        case _, int():
            return _PACKED
    return None


def _modelopt(section: Format, module: str) -> Kinds:
    algorithm = section.algorithm(module) if isinstance(section, ModelOpt) else ""
    is_fp8 = algorithm.startswith(("FP8", "MXFP8"))
    return frozenset[Storage]({"nvfp4"}) if "NVFP4" in algorithm else _FP8 if is_fp8 else None


def _quark(section: Format, module: str) -> Kinds:
    """A layer's own entry, whose key is a name or a glob, comes before the one for all: vllm, quark/quark.py."""
    layers, tail = table(section.section, "layer_quant_config"), module.rpartition("layers.")[2]
    own = [value for key, value in layers.items() if fnmatchcase(module, key)]
    if not own and any(key.endswith(tail) for key in layers):
        return None  # under another prefix, as engines rename
    entry = own[0] if own else section.section.get("global_quant_config")
    weight = entry.get("weight") if isinstance(entry, Mapping) else None
    dtype = weight.get("dtype") if isinstance(weight, Mapping) else None
    return {"fp4": _FP4, "fp8_e4m3": _FP8, "int8": _INT8}.get(str(dtype))


def _gptq(section: Format, module: str) -> Kinds:
    """A rule of GPTQModel can name another method for its modules."""
    rules = isinstance(section, Gptq) and section.rules.first(module) is not None
    return None if rules else frozenset[Storage]({"gptq"})


_READERS: dict[str, Callable[[Format, str], Kinds]] = {
    "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "modelopt-file": _modelopt, "quark": _quark,
    "gptq": _gptq, "awq": lambda _, module: frozenset[Storage]({"awq"}),
    # DeepSeek-V4's experts are fp4 in a release of this method.
    **dict.fromkeys(("fp8", "mxfp8", "fbgemm-fp8"), lambda _, module: _FP8 | _FP4),
}  # fmt: skip
