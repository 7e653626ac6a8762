"""Which tensors of quantized modules are lost: the codes themselves, or scales, zero points and the like beside them.

A method has its parts by definition, or they are what most modules of the same kind have beside codes of the same
name and dtype, so that this also holds for methods that nextn does not read.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from nextn.checkpoint.gguf_file import BLOCK_NAMES
from nextn.checkpoint.quantization import PLAIN, WEIGHT_SUFFIXES, split_name
from nextn.checkpoint.safetensors_file import TensorInfo

# Suffixes of codes, by the name of a module or of its weight; those without a name of their own are known by the dtype.
_OWN_CODES = (
    ".qweight", "._weight_qdata", "._weight_tensor_data", ".weight._data", ".weight_packed", "_packed",
    ".weight_blocks", "_blocks",
    *(f".{name}" for name in BLOCK_NAMES),
)  # fmt: skip
_SHARED_CODES = (".weight", "")
_NO_CODES = PLAIN | {"I16", "I32", "I64", "U16", "U64", "BOOL"}  # dtypes of values, and of buffers
# Of which nothing but codes is the reason, and their suffix; others need a module of their kind that has codes.
_CODES_OF = {
    **{f".weight{suffix}": ".weight" for suffix in WEIGHT_SUFFIXES}, ".SCB": ".weight", ".weight_format": ".weight",
    ".weight_shape": ".weight_packed", ".weight_scales": ".weight_blocks", ".qzeros": ".qweight", ".g_idx": ".qweight",
    ".weight._scale": ".weight._data", "._weight_scale": "._weight_qdata", "._weight_zero_point": "._weight_qdata",
    "._weight_scale_and_zero": "._weight_qdata",
}  # fmt: skip
_QUANT_STATE = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
# `weight_scales` is of EETQ.
_SCALES = (".weight_scale", "_scale", ".weight_scale_inv", "_scale_inv", ".scale", ".scales", ".SCB", ".weight_scales")

Parts = Mapping[str, str]  # suffix -> dtype
Codes = tuple[str, str]  # suffix and dtype
Kinds = Mapping[str, Mapping[frozenset[str], int]]  # kind of module -> suffixes -> number of modules that have them


def lost_parts(tensors: Mapping[str, TensorInfo], *, is_defined: bool = True) -> dict[str, list[str]]:
    """Return module -> names of the tensors, codes first, that quantized modules of trunk and head lack.

    is_defined: Whether the parts may be those of a known method; else only other modules show what a module lacks.
    """
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for name, info in tensors.items():
        module, suffix = split_name(name, tensors)
        if not suffix:  # or beside codes of fused experts that are lost
            suffix = next((each for each in WEIGHT_SUFFIXES if name.endswith(each)), "")
        modules[name.removesuffix(suffix)][suffix] = info.dtype
    alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = defaultdict(list)
    for module, parts in modules.items():
        alike[_kind(module), tuple(parts.items())].append(module)
    groups: dict[Codes, dict[str, Counter[frozenset[str]]]] = defaultdict(lambda: defaultdict(Counter))
    for (kind, form), found in alike.items():
        if (codes := _codes(parts := dict(form))) is not None:
            groups[codes, parts[codes]][kind][frozenset(parts)] += len(found)
    scales, lost = _usual_scales(groups), dict[str, list[str]]()
    for (kind, form), found in alike.items():
        if suffixes := _lost(kind, dict(form), groups, scales, is_defined):
            lost |= {module: [f"{module}{suffix}" for suffix in suffixes] for module in found}
    return lost


def _lost(kind: str, parts: Parts, groups: Mapping[Codes, Kinds], scales: str, is_defined: bool) -> list[str]:
    """Return the suffixes that a module of this kind with these parts lacks."""
    if (codes := _codes(parts)) is None:
        return [] if {*_SHARED_CODES} & {*parts} else _without_codes(kind, frozenset(parts), groups, is_defined)
    usual = _beside_others(kind, frozenset(parts), groups[codes, parts[codes]])
    if not is_defined:
        return usual
    known = (needed[0] for needed in _required(codes, parts, scales) if not {*needed} & {*parts, *usual})
    return [*known, *usual]


def _codes(parts: Parts) -> str | None:
    """Return the suffix of the quantized values; None for a module without any."""
    shared = (suffix for suffix in _SHARED_CODES if suffix in parts and parts[suffix] not in _NO_CODES)
    # Without a suffix of a known method, it may be a tensor of a method with names of its own.
    known = (suffix for suffix in shared if suffix or parts[suffix].startswith("F8") or len(parts) > 1)
    return next((suffix for suffix in _OWN_CODES if suffix in parts), None) or next(known, None)


def _kind(module: str) -> str:
    """Return the last two components without numbers: of `experts.5.up_proj`, `experts.up_proj`."""
    return ".".join([part for part in module.rsplit(".", 3)[-3:] if not part.isdecimal()][-2:])


def _usual_scales(groups: Mapping[Codes, Kinds]) -> str:
    """Return the suffix of the scales that most fp8 weights have; "" where most have none."""
    found: Counter[str] = Counter()
    for (_, dtype), kinds in groups.items():
        for parts, count in (each for sets in kinds.values() for each in sets.items() if dtype.startswith("F8")):
            found[next((suffix for suffix in _SCALES if suffix in parts), "")] += count
    return max(found, key=lambda suffix: (found[suffix], suffix)) if 2 * found[""] < found.total() else ""


def _required(codes: str, parts: Parts, scales: str) -> Iterator[tuple[str, ...]]:
    """Yield what the method's definition has beside such codes, each as the suffixes of which one is enough."""
    dtype, stem = parts[codes], codes.removesuffix("_packed").removesuffix("_blocks")
    if codes == ".qweight":
        yield (".scales",)
    elif codes == "._weight_qdata":
        yield "._weight_scale", "._weight_scale_and_zero"
    elif codes.endswith("_blocks"):
        yield (f"{stem}_scales",)
    elif any(suffix in parts for suffix in (".weight.absmax", ".weight.quant_map", *_QUANT_STATE)):
        yield from ((".weight.absmax",), (".weight.quant_map",), _QUANT_STATE)
    elif codes == ".weight" and dtype == "U32":
        yield (".scales",)
    elif dtype.startswith("F8"):
        yield from [(scales, *_SCALES)] if scales else []
    elif codes.endswith("_packed") or codes in _SHARED_CODES:
        yield f"{stem}_scale", *_SCALES
        if dtype in ("U8", "F4") and parts.get(f"{stem}_scale") == "F8_E4M3":  # NVFP4
            yield (f"{stem}_global_scale" if codes.endswith("_packed") else f"{stem}_scale_2",)


def _beside_others(kind: str, own: frozenset[str], kinds: Kinds) -> list[str]:
    """Return what a module lacks of the parts that more modules of its kind have, or all other kinds."""
    larger = [other for other, count in kinds[kind].items() if own < other and count > kinds[kind][own]]
    lost = max(larger, key=kinds[kind].__getitem__) - own if larger else frozenset()
    usual = [max(sets, key=sets.__getitem__) for other, sets in kinds.items() if other != kind]
    return sorted(lost | (frozenset.intersection(*usual) - own) if len(usual) > 1 else lost)


def _without_codes(kind: str, own: frozenset[str], groups: Mapping[Codes, Kinds], is_defined: bool) -> list[str]:
    """Return the suffix of the codes that what a module has belongs to; nothing where that is not certain."""
    alike = {codes for (codes, _), kinds in groups.items() if any(own < each for each in kinds.get(kind, ()))}
    alike |= {_CODES_OF[suffix] for suffix in own if suffix in _CODES_OF} if is_defined and not alike else set()
    return sorted(alike)[:1]
