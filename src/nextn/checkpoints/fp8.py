"""fp8 as it is published: e4m3 weights, one scale a block, multiplied. Maths and names; knows no files and no head.

Source: https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_quant, weight_dequant) and
fp8_cast_bf16.py beside it. In spite of its name, `weight_scale_inv` is multiplied.
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

# Linears of a decoder layer that fp8 releases leave alone: routers, gates, the small projections of a delta net, what
# is no Linear. Source: modules_to_not_convert in the published configs (DeepSeek-V3.2, Qwen3-Next-FP8, Qwen3.5-FP8).
_PLAIN = re.compile(
    r"(^|\.)(gate|router|shared_expert_gate|in_proj_(a|b|ba)|([qkv]_)?conv1d|weights_proj|ngram_embedding)\."
)


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """weight [..., M, N] -> e4m3 of its shape, fp32 scales [..., ceil(M / rows), ceil(N / columns)].

    Quantising again what came out, cast to a floating dtype that holds `weight`, gives the same bits.
    """
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., m, rows, n, columns]
    # A block of zeros must not have the scale 0, by which it would be divided.
    scale = (blocks.abs().amax(dim=(-3, -1)) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (weight.float() / _spread(scale, weight.shape, block)).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scale


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """e4m3 weight [..., M, N] and its scales, as `grid` says -> fp32."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return weight.float() * (scale.float() if scale.numel() == 1 else _spread(scale.float(), weight.shape, block))


def grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape`."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def block_of(shape: Sequence[int], scale: Sequence[int], declared: tuple[int, int]) -> tuple[int, int] | None:
    """The block that scales of shape `scale` stand for: the declared one, else a row, else the tensor; None for none.

    A scale a row or a tensor: compressed-tensors' strategies channel and tensor, which have no block in the config.
    """
    if len(shape) >= 2:
        for block in (declared, (1, shape[-1])):
            if grid(shape, block) == tuple(scale):
                return block
    return declared if tuple(scale) in ((), (1,), (1, 1)) else None


def declared_block(config: Mapping[str, object], family: Family) -> tuple[int, int]:
    """The block by a quantization_config (weight_block_size, compressed-tensors' block_structure), or the family's."""
    groups = config.get("config_groups")
    weights = [_table(_table(group).get("weights")) for group in _table(groups).values()]
    for found in (config.get("weight_block_size"), *(each.get("block_structure") for each in weights)):
        if isinstance(found, list) and len(found) == 2 and all(type(size) is int and size > 0 for size in found):
            return found[0], found[1]
    return (family.fp8 or Fp8()).block


def pack(tensors: Mapping[str, Tensor], family: Family, num_layers: int) -> dict[str, Tensor]:
    """Tensors under their published names -> those that the family's fp8 release quantises, with scales beside them."""
    fp8 = family.fp8
    assert fp8 is not None
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim >= 2 and quantised(name, family, num_layers):
            weight, scale = quantise(value, fp8.block)
            suffix = f".{fp8.scale}" if name.endswith(".weight") else f"_{fp8.scale.removeprefix('weight_')}"
            out |= {name: weight, name.removesuffix(".weight") + suffix: scale}
        else:
            out[name] = value
    return out


def quantised(name: str, family: Family, num_layers: int) -> bool:
    """Whether the matrix `name` is fp8 in the family's fp8 release: the Linears of the decoder layers, by name."""
    if not name.endswith(".weight") and ".experts." not in name:
        return False
    canonical = family.canonical(name, num_layers)
    if canonical is None:
        place = family.trunk_layer(name)
        return place is not None and place[0] < num_layers and _PLAIN.search(place[1]) is None
    role, _, rest = canonical.partition(".")[2].partition(".")
    return family.fp8 is not None and role not in family.fp8.plain and _PLAIN.search(rest) is None


def section(plain: Collection[str], family: Family) -> dict[str, object]:
    """The quantization_config of a checkpoint whose matrices `plain` (names of modules) are not fp8."""
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


def _spread(scale: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]
