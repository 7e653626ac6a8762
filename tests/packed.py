"""Weights of four and eight bits as other programs store them, written bit by bit from each format's definition."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from stored import in_one_file, set_config
from torch import Tensor

from nextn.checkpoint.gguf_blocks import KQuantWeight, take_apart
from nextn.checkpoint.gguf_file import BLOCK_TYPES, blocks_name
from nextn.checkpoint.quantized_weights import quantize_fp8

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # output channel in each nibble of a word, from the lowest


@dataclass(frozen=True)
class Case:
    """One way to store a model; group 0: one scale per output channel."""

    layout: str
    bits: int = 4
    group: int = 16
    symmetric: bool = True
    ordered: bool = False  # columns in an order of their own, so that groups are no runs
    version: int = 1  # of GPTQ's format
    auto_round: bool = False
    scale: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("torch.") for value in vars(self).values())


CASES = [
    Case("pack-quantized"), Case("pack-quantized", 8, 0), Case("pack-quantized", symmetric=False),
    Case("pack-quantized", 8, 16, symmetric=False), Case("pack-quantized", ordered=True),
    Case("int-quantized", 8, 0), Case("int-quantized", 8, 16, symmetric=False),
    Case("gptq", scale=torch.float16), Case("gptq", symmetric=False), Case("gptq", 8, 32, symmetric=False),
    Case("gptq", 4, 0, version=2, symmetric=False), Case("gptq", ordered=True, version=2),
    Case("gptq", auto_round=True), Case("gptq", symmetric=False, version=2, auto_round=True),
    Case("awq", symmetric=False), Case("awq", group=32, scale=torch.float16),
    Case("awq", symmetric=False, auto_round=True),
    Case("nvfp4", 8, scale=torch.float32), Case("mxfp4", 8, 32, scale=torch.float32),
    Case("modelopt", 8, scale=torch.float32),
]  # fmt: skip
FP4 = ("nvfp4", "mxfp4", "modelopt")  # of compressed-tensors, and ModelOpt's NVFP4
# Twice the values of e2m1 in the order of their codes, 8 bits as whole numbers from 0.
FP4_CODES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + 128
_GLOBAL = 64.0  # NVFP4's scales are multiplied by it before they are rounded to e4m3


@dataclass(frozen=True)
class Values:
    """Codes [N, K], scales and zero points [N, groups], and the group of each column."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    index: Tensor

    def weight(self) -> Tensor:
        exact = (self.codes - self.zeros[:, self.index]).double() * self.scales[:, self.index].double()
        return exact.float()


def random_values(case: Case, rows: int, columns: int, seed: int = 0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    size = case.group or columns
    groups = -(-columns // size)
    index = torch.arange(columns) // size
    if case.ordered:
        index = index[torch.randperm(columns, generator=generator)]
    middle, largest = 2 ** (case.bits - 1), 2**case.bits
    codes = torch.randint(0, largest, (rows, columns), generator=generator)
    # Not 0: version 1 of GPTQ's format stores one less.
    zeros = torch.randint(1, largest, (rows, groups), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.2 / middle + 1e-3).to(case.scale)
    if case.layout in FP4:
        codes, scales = FP4_CODES[codes % 16], fp4_scales(case, scales)
    return Values(codes, scales, torch.full_like(zeros, middle) if case.symmetric else zeros, index)


def fp4_scales(case: Case, scales: Tensor) -> Tensor:
    """The nearest scales that the format can store, for codes of twice the value."""
    if case.layout == "mxfp4":
        return scales.log2().round().exp2()
    return (scales * 2 * _GLOBAL).to(torch.float8_e4m3fn).float() / 2 / _GLOBAL


def nearest_values(case: Case, weight: Tensor) -> Values:
    """The weight rounded to nearest, symmetrically."""
    size, middle = case.group or weight.shape[1], 2 ** (case.bits - 1)
    index = torch.arange(weight.shape[1]) // size
    groups = range(int(index[-1]) + 1)
    scales = torch.stack([weight[:, index == each].float().abs().amax(1) / (middle - 1) for each in groups], 1)
    scales = scales.clamp_min(1e-8).to(case.scale)
    if case.layout in FP4:
        scales = fp4_scales(case, scales * (middle - 1) / 12)
        nearest = (weight.float() / scales[:, index]).unsqueeze(-1).sub(FP4_CODES - 128).abs().argmin(-1)
        return Values(FP4_CODES[nearest], scales, torch.full(scales.shape, middle), index)
    codes = (weight.float() / scales.float()[:, index]).round().clamp(1 - middle, middle - 1) + middle
    return Values(codes.long(), scales, torch.full(scales.shape, middle), index)


def words(rows: Tensor, bits: int) -> Tensor:
    """Pack each row into int32 words, the first value in the lowest bits."""
    out = []
    for row in rows.tolist():
        number = sum(value << bits * place for place, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        out.append([(number >> 32 * word) % 2**32 for word in range(count)])
    return torch.tensor(out).to(torch.uint32).view(torch.int32)


def awq_words(rows: Tensor) -> Tensor:
    order = torch.tensor([first + nibble for first in range(0, rows.shape[1], 8) for nibble in AWQ_NIBBLES])
    return words(rows[:, order], 4)


def stored(case: Case, values: Values) -> dict[str, Tensor]:
    """Name after the module's -> tensor."""
    middle, bits = 2 ** (case.bits - 1), case.bits
    signed = {"codes": (values.codes - middle).to(torch.int8), "zeros": (values.zeros - middle).to(torch.int8)}
    match case.layout:
        case "pack-quantized":
            tensors = {
                "weight_packed": words(values.codes, bits),
                "weight_scale": values.scales,
                "weight_shape": torch.tensor(values.codes.shape),
                "weight_zero_point": words(values.zeros.T, bits).T,
            }
            tensors |= {"weight_g_idx": values.index.int()} if case.ordered else {}
        case "int-quantized":
            tensors = {"weight": signed["codes"], "weight_scale": values.scales, "weight_zero_point": signed["zeros"]}
        case "gptq":
            less = values.zeros - (1 if case.version == 1 else 0)
            tensors = {
                "qweight": words(values.codes, bits).T,
                "qzeros": words(less.T, bits),
                "scales": values.scales.T,
                "g_idx": values.index.int(),
            }
        case "awq":
            tensors = {
                "qweight": awq_words(values.codes.T), "qzeros": awq_words(values.zeros.T), "scales": values.scales.T
            }  # fmt: skip
        case "nvfp4" | "mxfp4" | "modelopt":
            raw = values.codes.unsqueeze(-1).eq(FP4_CODES).int().argmax(-1).to(torch.uint8)
            scales = (values.scales * 2 * _GLOBAL).to(torch.float8_e4m3fn)
            if case.layout == "mxfp4":
                scales = ((values.scales * 2).log2() + 127).to(torch.uint8)
            packed = "weight" if case.layout == "modelopt" else "weight_packed"
            tensors = {packed: raw[:, ::2] | raw[:, 1::2] << 4, "weight_scale": scales}
            more = {
                "nvfp4": {"weight_global_scale": torch.tensor([_GLOBAL])},
                "modelopt": {"weight_scale_2": torch.tensor(1 / _GLOBAL)},
            }
            tensors |= more.get(case.layout, {})
    if case.symmetric:
        tensors.pop("weight_zero_point", None)
    return {name: value.contiguous() for name, value in tensors.items()}


def section(case: Case) -> dict[str, object]:
    """The quantization_config."""
    size = case.group or -1
    if case.layout in ("gptq", "awq"):
        packing = {"packing_format": "auto_round:gptqmodel" if case.version == 2 else f"auto_round:auto_{case.layout}"}
        own = {"checkpoint_format": f"gptq{'_v2' if case.version == 2 else ''}"} if case.layout == "gptq" else {}
        method = {"quant_method": "auto-round", **packing} if case.auto_round else {"quant_method": case.layout, **own}
        return method | {"bits": case.bits, "group_size": size, "sym": case.symmetric, "desc_act": case.ordered}
    if case.layout == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    if case.layout in FP4:
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": case.group,
                   "strategy": "tensor_group" if case.layout == "nvfp4" else "group"}  # fmt: skip
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        form = f"{case.layout}-pack-quantized"
        return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    weights = {"num_bits": case.bits, "type": "int", "symmetric": case.symmetric, "group_size": case.group or None,
               "strategy": "group" if case.group else "channel"}  # fmt: skip
    weights |= {"actorder": "group"} if case.ordered else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": case.layout, "config_groups": groups, "ignore": ["lm_head"]}


def quantize_folder(folder: Path, case: Case, *, is_random: bool = True) -> dict[str, Tensor]:
    """Replace the weights of projections and lm_head, by random ones or rounded -> the real weights."""
    weights: dict[str, Tensor] = {}

    def replace(table):
        for name in [name for name in table if name.endswith(("proj.weight", "lm_head.weight"))]:
            old = table.pop(name)
            values = random_values(case, *old.shape, seed=len(weights)) if is_random else nearest_values(case, old)
            weights[name] = values.weight()
            table |= {f"{name.removesuffix('weight')}{part}": each for part, each in stored(case, values).items()}

    in_one_file(folder, replace)
    set_config(folder, quantization_config=json.loads(json.dumps(section(case))))
    return weights


def fp8_folder(folder: Path, block: tuple[int, int] | None, suffix: str = "weight_scale_inv") -> None:
    """Store the weights of projections in fp8. block: rows and columns with a common scale; None: the tensor."""

    def replace(table):
        for name in [name for name in table if name.endswith("proj.weight")]:
            weight = table[name]
            size = weight.shape if block is None else (block[0], min(block[1], weight.shape[1]))
            table[name], scales = quantize_fp8(weight, size)
            scales = scales[0] if block is None else scales  # of one element
            table[f"{name.removesuffix('weight')}{suffix}"] = scales

    in_one_file(folder, replace)
    declared = {} if block is None or block[0] == 1 else {"weight_block_size": list(block)}
    set_config(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", **declared})


# Where the float16 scales of a block begin; else at 0.
_HALVES = {**dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q6_K": (208,)}
_MINIMA = {"Q4_1": -8, "Q5_1": -16}  # times a scale; of K-quants, they are subtracted


def random_blocks(kind: str, rows: int, blocks: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """GGUF's blocks of random bytes with finite scales, [rows, bytes]."""
    generator, num_bytes = np.random.default_rng([len(kind), rows, seed]), BLOCK_TYPES[kind].num_bytes
    data = generator.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        spread = 100 if scale == 1 else 2
        data[..., 0] = generator.integers(100 - spread, 100 + spread, (rows, blocks)) + round(20 * (scale != 1))
    else:
        halves = generator.normal(size=(rows, blocks, 1)) * scale
        for place in _HALVES.get(kind, (0,)):
            data[..., place : place + 2] = halves.astype(np.float16).view(np.uint8)
            halves *= _MINIMA.get(kind, 2 ** (BLOCK_TYPES[kind].bits - 1))  # half as large as a group's range
    return data.reshape(rows, -1)


def random_k_quant(kind: str, n: int, k: int) -> KQuantWeight:
    """A weight [N, K] of one of `K_QUANTS`."""
    data = random_blocks(kind, n, k // BLOCK_TYPES[kind].size)
    weight = take_apart(torch.from_numpy(data), kind)
    assert isinstance(weight, KQuantWeight)
    return weight


# Scales of random blocks whose weights are near those of a model.
SCALES = {"Q4_0": 0.01, "Q4_1": 0.01, "Q5_0": 5e-3, "Q5_1": 5e-3, "Q8_0": 1e-3, "IQ4_NL": 1e-3, "MXFP4": 0.1,
          "IQ4_XS": 5e-5, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 5e-5}  # fmt: skip


def block_folder(folder: Path, kind_of: Callable[[str], str]) -> dict[str, Tensor]:
    """Replace the weights of projections, if rows are whole blocks, by those of a type -> the real weights."""
    weights: dict[str, Tensor] = {}

    def replace(table):
        for name in [name for name in table if name.endswith("proj.weight")]:
            (rows, columns), kind = table[name].shape, kind_of(name)
            count, rest = divmod(columns, BLOCK_TYPES[kind].size)
            if rest:
                continue
            del table[name]
            blocks = torch.from_numpy(random_blocks(kind, rows, count, SCALES[kind], len(weights)))
            weights[name] = take_apart(blocks, kind).dequantize()
            table[f"{name.removesuffix('weight')}{blocks_name(kind)}"] = blocks

    in_one_file(folder, replace)
    set_config(folder, quantization_config={"quant_method": "gguf"})
    return weights
