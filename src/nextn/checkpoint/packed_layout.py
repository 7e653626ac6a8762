"""Weights of four to eight bits, stored as several tensors or in blocks: which tensors, and what they hold.

compressed-tensors' pack-quantized and int-quantized formats (ModelSlim's int8 is the latter), GPTQ, AWQ, and AutoRound
in the packing of either; NVFP4 and MXFP4 of compressed-tensors and ModelOpt; and the blocks of a GGUF file, one tensor
per weight. Knows headers and configs; `quantized_weights` and `gguf_blocks` read the values.

Sources: compressed-tensors 0.20, compressors/pack_quantized, compressors/naive_quantized and compressors/nvfp4;
GPTQModel, nn_modules/qlinear and utils/model.py; AutoAWQ, utils/packing_utils.py; vLLM 0.32, layers/quantization/inc
and layers/quantization/modelopt.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.gguf_file import BLOCK_NAMES, BLOCK_TYPES, named_kind
from nextn.checkpoint.quant_formats import WeightSettings
from nextn.checkpoint.quantization import QuantConfig, QuantSection, fp4_group_size
from nextn.checkpoint.remote import LocalFile
from nextn.checkpoint.safetensors_file import TensorInfo

Layout = Literal["pack-quantized", "int-quantized", "fp4-pack-quantized", "fp4", "gptq", "awq", "gguf"]
Part = Literal["codes", "scales", "zeros", "group_index", "shape", "global_scale", "input_factors"]

# Names of the parts after the module's; those of GGUF's blocks are in `gguf_file`.
_NAMES: Mapping[Layout, Mapping[Part, str]] = {
    "pack-quantized": {
        "codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point",
        "group_index": "weight_g_idx", "shape": "weight_shape",
    },
    "int-quantized": {"codes": "weight", "scales": "weight_scale", "zeros": "weight_zero_point"},
    "fp4-pack-quantized": {
        "codes": "weight_packed", "scales": "weight_scale", "global_scale": "weight_global_scale",
    },
    "fp4": {
        "codes": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2",
        "input_factors": "pre_quant_scale",
    },
    "gptq": {"codes": "qweight", "scales": "scales", "zeros": "qzeros", "group_index": "g_idx"},
    "awq": {"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
}  # fmt: skip
FP4: tuple[Layout, ...] = ("fp4-pack-quantized", "fp4")
_BITS: Mapping[Layout, tuple[int, ...]] = {
    "pack-quantized": (4, 8), "int-quantized": (8,), "fp4-pack-quantized": (4,), "fp4": (4,), "gptq": (4, 8),
    "awq": (4,),
}  # fmt: skip
_DTYPES: Mapping[Part, tuple[str, ...]] = {
    "codes": ("I32", "I8"), "scales": ("F16", "BF16", "F32"), "zeros": ("I32", "I8"), "group_index": ("I32", "I64"),
    "shape": ("I64", "I32"), "global_scale": ("F32",),
}  # fmt: skip
_FP4_DTYPES: Mapping[Part, tuple[str, ...]] = {**_DTYPES, "codes": ("U8",), "scales": ("F8_E4M3", "F8_E8M0", "U8")}
_GPTQ = ("gptq", "auto-round", "intel/auto-round")
# auto_round/inference: backend.py (GPTQ_FORMAT_NO_ZP) and convert_model.py, which reads "auto" as auto_gptq.
_AUTO_ROUND = (
    "auto",
    *(f"auto_round:{name}" for name in ("auto_gptq", "gptq", "gptqmodel", "auto_awq", "awq")),
    "auto_round",
)
_ZEROS_AS_THEY_ARE = ("gptq_v2", "auto_round", "auto_round:gptqmodel")
_MODELOPT = ("modelopt", "modelopt-file")
_METHODS = ("compressed-tensors", "awq", "gguf", "modelslim", *_MODELOPT, *_GPTQ)
# Names and dtypes of codes -> the layout that they have in compressed-tensors.
_CODES: Mapping[tuple[str, str], Layout | None] = {
    ("weight_packed", "I32"): "pack-quantized", ("weight_packed", "U8"): "fp4-pack-quantized",
    ("weight", "I8"): "int-quantized", ("weight", "U8"): None, ("qweight", "I32"): None,
}  # fmt: skip


@dataclass(frozen=True)
class PackedWeight:
    """The stored tensors of one weight [N, K]; if there is a `problem`, the sizes mean nothing."""

    module: str
    layout: Layout
    parts: Mapping[Part, TensorInfo]
    shape: tuple[int, int] = (0, 0)
    bits: int = 0  # of a code; 8 for fp4, whose values are a half of whole numbers from -12 to 12
    group_size: int = 0
    zero_offset: int = 0  # what stored zero points are less than real ones
    kind: str = ""  # of GGUF's blocks, one of `BLOCK_TYPES`
    problem: str | None = None

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)


class _Sizes(NamedTuple):
    rows: int
    columns: int
    bits: int
    groups: int


def with_logical_weights(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, PackedWeight]]:
    """Return the checkpoint with one tensor, `<module>.weight`, for each packed weight, and those weights by name.

    Only config and headers are read, and of local files the stored shapes. Of a weight with a problem, the tensor has
    a shape without elements.
    """
    weights = {f"{weight.module}.weight": weight for weight in _packed_weights(checkpoint)}
    if not weights:
        return checkpoint, weights
    parts = {info.name for weight in weights.values() for info in weight.parts.values()}
    parts |= {f"{weight.module}.weight_offset" for weight in weights.values()}  # of ModelSlim, which engines do not use
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in parts}
    for name, weight in weights.items():
        scales = weight.parts.get("scales")
        dtype = "F32" if scales is None else "BF16" if weight.layout in FP4 else scales.dtype
        tensors[name] = replace(weight.parts["codes"], name=name, dtype=dtype, shape=weight.shape)
    return replace(checkpoint, tensors=tensors), weights


def _packed_weights(checkpoint: Checkpoint) -> Iterator[PackedWeight]:
    codes = [info for info in checkpoint.tensors.values() if _may_be_codes(info)]
    config = QuantConfig.of(checkpoint) if codes else None
    section = config.sections[0] if config is not None else None
    if config is not None and config.sections[-1].form == "modelslim":  # beside quant_method = ascend
        section = config.sections[-1]
    if section is None or section.form not in _METHODS:
        return
    for info in codes:
        module, _, name = info.name.rpartition(".")
        layout = _layout(section, name, info.dtype)
        if layout == "gguf":
            yield _in_blocks(PackedWeight(module, layout, {"codes": info}))
        elif layout is not None:
            names = {part: f"{module}.{suffix}" for part, suffix in _NAMES[layout].items()}
            parts = {part: checkpoint.tensors[full] for part, full in names.items() if full in checkpoint.tensors}
            if layout == "fp4" and "scales" in parts and parts["scales"].dtype != "F8_E4M3":
                continue  # integers, as of ModelOpt's AWQ
            yield _weight(PackedWeight(module, layout, parts), section, checkpoint)


def _may_be_codes(info: TensorInfo) -> bool:
    name = info.name.rpartition(".")[2]
    is_fused_fp4 = info.dtype == "U8" and len(info.shape) != 2
    return ((name, info.dtype) in _CODES and not is_fused_fp4) or named_kind(name) is not None


def _layout(section: QuantSection, name: str, dtype: str) -> Layout | None:
    """Return the layout of codes called `name`; None if another program reads them."""
    if section.form == "gguf":
        return None if named_kind(name) is None else "gguf"
    if (name, dtype) not in _CODES:
        return None
    if section.form == "compressed-tensors":
        return None if section.format.section.get("format") == "marlin-24" else _CODES[name, dtype]
    if section.form in _MODELOPT:
        return "fp4" if (name, dtype) == ("weight", "U8") else None
    if section.form == "modelslim":
        return "int-quantized" if (name, dtype) == ("weight", "I8") else None
    if name != "qweight":
        return None
    if section.form == "awq":
        return "awq"
    return "awq" if "awq" in str(section.format.section.get("packing_format")) else "gptq"


def _in_blocks(weight: PackedWeight) -> PackedWeight:
    """Add the sizes of a weight in GGUF's blocks, which its name and shape state, or the problem."""
    info = weight.parts["codes"]
    kind = BLOCK_NAMES.get(info.name.rpartition(".")[2])
    if kind is None:
        return replace(weight, problem=f"unsupported: {info.name}; valid are {', '.join(BLOCK_NAMES)}")
    size, num_bytes, bits, group_size = BLOCK_TYPES[kind]
    if info.dtype != "U8":
        return replace(weight, problem=f"wrong dtype: {info.name} is {info.dtype}; blocks of {kind} are U8")
    if len(info.shape) != 2 or 0 in info.shape or info.shape[1] % num_bytes:
        problem = f"mis-shaped: {info.name} {info.shape}, expected rows of blocks of {kind}, {num_bytes} bytes each"
        return replace(weight, problem=f"{problem}: truncated; convert the GGUF file again")
    shape = info.shape[0], info.shape[1] // num_bytes * size
    return replace(weight, shape=shape, bits=bits, group_size=group_size, kind=kind)


def _weight(weight: PackedWeight, section: QuantSection, checkpoint: Checkpoint) -> PackedWeight:
    try:
        zero_offset = _zero_offset(section)
        settings = section.format.settings(weight.module)
        _check_parts(weight, settings)
        sizes = _sizes(weight, settings, checkpoint)
        _check_sizes(weight, sizes, settings)
        group_size = _group_size(weight, sizes, settings)
        bits = 8 if weight.layout in FP4 else sizes.bits
    except ValueError as error:
        return replace(weight, problem=str(error))
    shape = sizes.rows, sizes.columns
    return replace(weight, shape=shape, bits=bits, group_size=group_size, zero_offset=zero_offset)


def _zero_offset(section: QuantSection) -> int:
    """Return what is added to stored zero points; ValueError for a variant of the method that is not read."""
    keys, known = {
        "gptq": (("checkpoint_format", "format"), ("gptq", "gptq_v2")),  # GPTQModel writes both
        "awq": (("version", "checkpoint_format", "format"), ("gemm",)),
        "compressed-tensors": (("format",), ()),
        "modelslim": (("rotation",), ()),
    }.get(section.form, (("packing_format",), _AUTO_ROUND))
    fields = section.format.section
    key = next((each for each in keys if fields.get(each) is not None), keys[0])
    variant = fields.get(key)
    if known and variant is not None and str(variant).lower() not in known:
        raise ValueError(
            f"unsupported: {section.file} has {key} {variant}; valid are {', '.join(known)}: save the model in one of "
            "them, or load the unquantized one"
        )
    if rotation := fields.get("rotation"):
        raise ValueError(
            f"unsupported: {section.file} has rotation {rotation}: inputs of down_proj are rotated while it runs; "
            "quantize without a rotation, or load the unquantized model"
        )
    return 1 if section.form in _GPTQ and variant not in _ZEROS_AS_THEY_ARE else 0


def _check_parts(weight: PackedWeight, settings: WeightSettings) -> None:
    names, codes = _NAMES[weight.layout], weight.parts["codes"]
    needed: dict[Part, str] = {"scales": "its scales"}
    if weight.layout in ("gptq", "awq") or settings.symmetric is False:
        needed["zeros"] = "its zero points"
    if weight.layout in FP4:
        needed = _needed_for_fp4(weight, settings)
    if settings.ordered and "group_index" in names:
        needed["group_index"] = "the groups of its input channels"
    for part, what in needed.items():
        if part not in weight.parts:
            raise ValueError(
                f"without {what}: {codes.name} is packed ({weight.layout}), and there is no "
                f"{weight.module}.{names[part]}: take the complete checkpoint"
            )
    dtypes = _FP4_DTYPES if weight.layout in FP4 else _DTYPES
    for part, info in weight.parts.items():
        if info.dtype not in dtypes[part]:
            raise ValueError(f"wrong dtype: {info.name} is {info.dtype}; valid are {', '.join(dtypes[part])}")
        if part in ("codes", "zeros") and len(info.shape) != 2 and weight.layout != "int-quantized":
            raise ValueError(f"mis-shaped: {info.name} {info.shape}; packed weights have two dimensions")


def _needed_for_fp4(weight: PackedWeight, settings: WeightSettings) -> dict[Part, str]:
    """Return what NVFP4 (scales in e4m3, and one for the tensor) and MXFP4 need; ValueError for variants of them."""
    if settings.symmetric is False:
        raise ValueError(f"unsupported: {weight.module} has fp4 codes with zero points; load the unquantized model")
    if (factors := weight.parts.get("input_factors")) is not None:
        message = f"unsupported: {factors.name} (NVFP4 with AWQ) scales the layer's inputs; load the unquantized model"
        raise ValueError(message)
    scales = weight.parts.get("scales")
    is_nvfp4 = weight.layout == "fp4" or (scales is not None and scales.dtype == "F8_E4M3")
    needed: dict[Part, str] = {"scales": "its scales"}
    return {**needed, "global_scale": "its global scale"} if is_nvfp4 else needed


def _sizes(weight: PackedWeight, settings: WeightSettings, checkpoint: Checkpoint) -> _Sizes:
    """Return the sizes that the shapes of some parts imply; `_check_sizes` compares the others."""
    codes, scales = weight.parts["codes"].shape, weight.parts["scales"].shape
    if len(codes) != 2:
        raise ValueError(f"mis-shaped: {weight.parts['codes'].name} {codes}; packed weights have two dimensions")
    match weight.layout:
        case "gptq":
            bits = 32 * weight.parts["zeros"].shape[1] // max(1, codes[1])
            return _Sizes(codes[1], 32 * codes[0] // max(1, bits), bits, scales[0] if scales else 0)
        case "awq":
            rows = scales[-1] if scales else 0
            return _Sizes(rows, codes[0], 32 * codes[1] // max(1, rows), scales[0] if scales else 0)
        case "pack-quantized":
            columns = _stored_columns(weight, checkpoint) or 32 * codes[1] // (settings.bits or 4)
            return _Sizes(codes[0], columns, 32 * codes[1] // max(1, columns), scales[1] if len(scales) == 2 else 1)
        case "int-quantized":
            return _Sizes(*codes, 8, scales[1] if len(scales) == 2 else 1)
        case "fp4-pack-quantized" | "fp4":
            return _Sizes(codes[0], 2 * codes[1], 4, scales[1] if len(scales) == 2 else 0)
        case "gguf":
            raise AssertionError("blocks state their sizes, see `_in_blocks`")


def _stored_columns(weight: PackedWeight, checkpoint: Checkpoint) -> int | None:
    """Return K as stored; None if it is not, or in a file that is not local."""
    info = weight.parts.get("shape")
    if info is None or info.shape != (2,) or not isinstance(source := checkpoint.sources[info.file], LocalFile):
        return None
    return int.from_bytes(source.read(info.end - info.nbytes // 2, info.end), "little")


def _check_sizes(weight: PackedWeight, sizes: _Sizes, settings: WeightSettings) -> None:
    rows, columns, bits, groups = sizes
    known = _BITS[weight.layout]
    if bits not in known or settings.bits not in (None, bits):
        declared = "" if settings.bits in (None, bits) else f", and the config declares {settings.bits}"
        raise ValueError(
            f"unsupported: {weight.parts['codes'].name} {weight.parts['codes'].shape} has {bits} bits per value"
            f"{declared}; valid for {weight.layout} are {' and '.join(map(str, known))}, as declared"
        )
    for part, valid in _shapes(weight.layout, sizes).items():
        info = weight.parts.get(part)
        if info is not None and info.shape not in valid:
            raise ValueError(
                f"mis-shaped: {info.name} {info.shape}, expected {valid[0]} for a weight {(rows, columns)} of {bits} "
                f"bits in {groups} groups: truncated or of another module; take the complete checkpoint"
            )


def _shapes(layout: Layout, sizes: _Sizes) -> dict[Part, list[tuple[int, ...]]]:
    """Return the valid shapes of each part, the usual one first."""
    rows, columns, bits, groups = sizes
    words, of_rows = -(-columns * bits // 32), -(-rows * bits // 32)
    per_row: list[tuple[int, ...]] = [(rows, groups), *([(rows,), (1,), (1, 1), ()] if groups == 1 else [])]
    match layout:
        case "gptq":
            return {"codes": [(words, rows)], "scales": [(groups, rows)], "zeros": [(groups, of_rows)],
                    "group_index": [(columns,)]}  # fmt: skip
        case "awq":
            return {"codes": [(columns, of_rows)], "scales": [(groups, rows)], "zeros": [(groups, of_rows)]}
        case "pack-quantized":
            return {"codes": [(rows, words)], "scales": per_row, "zeros": [(of_rows, groups), (rows, groups)],
                    "group_index": [(columns,)], "shape": [(2,)]}  # fmt: skip
        case "int-quantized":
            return {"codes": [(rows, columns)], "scales": per_row, "zeros": per_row}
        case "fp4-pack-quantized" | "fp4":
            return {"codes": [(rows, columns // 2)], "scales": [(rows, groups)], "global_scale": [(1,), ()]}
        case "gguf":
            raise AssertionError("blocks are one tensor, see `_in_blocks`")


def _group_size(weight: PackedWeight, sizes: _Sizes, settings: WeightSettings) -> int:
    if weight.layout in FP4:
        return _fp4_group_size(weight.parts["scales"], sizes)
    declared = sizes.columns if settings.group_size == -1 else settings.group_size
    if not sizes.groups or (declared is not None and (declared < 1 or sizes.groups != -(-sizes.columns // declared))):
        scales = weight.parts["scales"]
        raise ValueError(
            f"wrong group size: {scales.name} {scales.shape} has {sizes.groups} groups of {sizes.columns} input "
            f"channels, and the config declares groups of {declared}: correct group_size in the quantization config, "
            "or take the complete checkpoint"
        )
    return declared or -(-sizes.columns // sizes.groups)


def _fp4_group_size(scales: TensorInfo, sizes: _Sizes) -> int:
    """Return the group size that NVFP4 and MXFP4 define; ValueError for another number of scales."""
    size = fp4_group_size(scales.dtype)
    groups = -(-sizes.columns // size)
    if not groups or sizes.groups != groups:
        raise ValueError(
            f"wrong group size: {scales.name} {scales.shape}, expected {(sizes.rows, groups)} for groups of {size}: of "
            "a faulty export, or of another module; quantize again with a newer version, or take the release"
        )
    return size
