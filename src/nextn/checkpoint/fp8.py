"""Block-wise fp8 as published: e4m3 weights, multiplied by one scale per block. Arithmetic and names, no files.

Source: https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_quant, weight_dequant) and
fp8_cast_bf16.py next to it. In spite of its name, `weight_scale_inv` is multiplied.
"""

import re
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nextn.families import Family, Fp8

WEIGHT = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F64", "F8_E8M0", "U8")  # U8: the exponents of MXFP8, as bytes
LARGEST = 448.0

# Parts of a decoder layer that fp8 releases leave unquantized: routers, gates, small projections of a delta net, and
# what is not a Linear. From modules_to_not_convert in published configs (DeepSeek-V3.2, Qwen3-Next-FP8, Qwen3.5-FP8).
UNQUANTIZED_PARTS = re.compile(
    r"(^|\.)(gate|router|shared_expert_gate|in_proj_(a|b|ba)|([qkv]_)?conv1d|weights_proj|ngram_embedding)\."
)


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., M, N] to e4m3 of its shape and fp32 scales [..., ceil(M / rows), ceil(N / columns)].

    Quantizing the dequantized result again, in a dtype that can represent `weight`, gives the same bits.
    """
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., m, rows, n, columns]
    # The scale of a block of zeros must not be 0, as it is divided by.
    scale = (blocks.abs().amax(dim=(-3, -1)) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (weight.float() / _expand(scale, weight.shape, block)).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize an e4m3 weight [..., M, N] with scales of shape `grid`, one scale, or one per row, to fp32."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return weight.float() * (scale.float() if scale.numel() == 1 else _expand(scale.float(), weight.shape, block))


def grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of `shape`."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def block_of(shape: Sequence[int], scale: Sequence[int], declared: tuple[int, int]) -> tuple[int, int] | None:
    """Return the block size that scales of shape `scale` imply: the declared one, a row or the tensor; else None.

    One scale per row or tensor are compressed-tensors' strategies channel and tensor, without a block in the config.
    """
    if len(shape) >= 2:
        for block in (declared, (1, shape[-1])):
            if grid(shape, block) == tuple(scale):
                return block
    return declared if tuple(scale) in ((), (1,), (1, 1)) else None


def declared_block(config: Mapping[str, object], family: Family) -> tuple[int, int]:
    """Return the block size of a quantization_config (weight_block_size, block_structure), or the family's."""
    groups = config.get("config_groups")
    weights = [_table(_table(group).get("weights")) for group in _table(groups).values()]
    for block in (config.get("weight_block_size"), *(each.get("block_structure") for each in weights)):
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
    return (family.fp8 or Fp8()).block


def pack(tensors: Mapping[str, Tensor], family: Family, num_layers: int) -> dict[str, Tensor]:
    """Quantize those of the published tensors that the family's fp8 release quantizes, and add their scales."""
    fp8 = family.fp8
    assert fp8 is not None
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim >= 2 and quantized(name, family, num_layers):
            weight, scale = quantize(value, fp8.block)
            suffix = f".{fp8.scale}" if name.endswith(".weight") else f"_{fp8.scale.removeprefix('weight_')}"
            out |= {name: weight, name.removesuffix(".weight") + suffix: scale}
        else:
            out[name] = value
    return out


def quantized(name: str, family: Family, num_layers: int) -> bool:
    """Whether the matrix `name` is fp8 in the family's fp8 release: a Linear of a decoder layer, by its name."""
    if not name.endswith(".weight") and ".experts." not in name:
        return False
    canonical = family.canonical(name, num_layers)
    if canonical is None:
        layer = family.trunk_layer(name)
        return layer is not None and layer[0] < num_layers and UNQUANTIZED_PARTS.search(layer[1]) is None
    role, _, rest = canonical.partition(".")[2].partition(".")
    return family.fp8 is not None and role not in family.fp8.unquantized and UNQUANTIZED_PARTS.search(rest) is None


def section(plain: Collection[str], family: Family) -> dict[str, object]:
    """Return the quantization_config of a checkpoint in which the modules `plain` are not fp8."""
    assert family.fp8 is not None
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(family.fp8.block),
        "modules_to_not_convert": sorted(plain),
    }


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _expand(scale: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]
