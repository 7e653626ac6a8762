"""Detect how the weights of a module are stored, from the names, dtypes and shapes in the headers.

What a config declares for the same module is in `quant_formats`.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nextn.checkpoint.safetensors_file import TensorInfo

Storage = Literal[
    "plain", "fp8-block", "fp8-tensor", "fp8-bare", "mxfp8", "nvfp4", "mxfp4", "int8", "compressed", "gptq", "awq",
    "bnb", "mlx", "unknown",
]  # fmt: skip
PLAIN = frozenset({"BF16", "F16", "F32", "F64"})

# Suffixes of the weight's own name: `x.weight_scale`, or `experts.down_proj_scale` where experts are one tensor.
# fp8 and fp4: vLLM, quantization/fp8.py, modelopt.py and quark/; _packed and on: compressed-tensors, compressors/;
# .absmax and on: bitsandbytes, functional.py, QuantState.as_dict; _blocks: transformers, integrations/mxfp4.py.
WEIGHT_SUFFIXES = (
    "_scale_inv", "_scale", "_scale_2", "_packed", "_global_scale", "_shape", "_zero_point", "_g_idx",
    "_blocks", "_scales", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
)  # fmt: skip
# Suffixes of the module's name. scale: DeepSeek-V4; input_*: activations; SCB: bitsandbytes; biases: MLX.
MODULE_SUFFIXES = (
    ".weight", ".scale", ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale",
    ".qweight", ".qzeros", ".scales", ".g_idx", ".biases", ".SCB", ".weight_format",
)  # fmt: skip
SUFFIXES = (*(f".weight{suffix}" for suffix in WEIGHT_SUFFIXES), *MODULE_SUFFIXES)


def unpacked(info: "TensorInfo") -> bool:
    """Whether each element is one value (fp8 included), so that the shape is the matrix's."""
    return info.dtype in PLAIN or info.dtype.startswith("F8")


def split_name(name: str, names: Collection[str]) -> tuple[str, str]:
    """Split a tensor name into module and suffix, "" if none: `a.fc.weight_scale` into ("a.fc", ".weight_scale").

    `names` are all tensors: `experts.down_proj_scale` belongs to `experts.down_proj` only if that exists.
    """
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
    if f"{module}.weight_packed" in tensors:
        return "compressed"
    if f"{module}_blocks" in tensors:
        return "mxfp4"
    if weight is None:
        return None
    if f"{module}.SCB" in tensors or f"{weight.name}.absmax" in tensors:
        return "bnb"
    scale = scale_of(weight.name, tensors)
    return _scaled(weight, tensors[scale] if scale else None, second=f"{weight.name}_scale_2" in tensors)


def scale_of(weight: str, names: Collection[str]) -> str | None:
    """Return the tensor with the scales of `weight`; None if there is none."""
    module = weight.removesuffix(".weight")
    candidates = (f"{weight}_scale_inv", f"{weight}_scale", f"{module}.scale", f"{module}.scales")
    return next((name for name in candidates if name in names), None)


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
