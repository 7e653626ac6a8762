"""Weights of compressed-tensors against the package that defines them: the values that it decompresses, exactly."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme
from quick import loop
from safetensors.torch import save_file
from stored import set_config, tensors_of
from tiny import build
from torch import Tensor

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.tensors import TensorReader
from nextn.edit.quantize import quantize
from nextn.family_table import by_name

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 72, 256
INT = {"type": "int", "symmetric": True, "dynamic": False}
FP4 = {"type": "float", "num_bits": 4, "symmetric": True, "dynamic": False}
FP8 = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
GROUPS = {"strategy": "group", "group_size": 64}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "w4a16": ("pack-quantized", {**INT, **GROUPS, "num_bits": 4}),
    "w4a16-zeros": ("pack-quantized", {**INT, **GROUPS, "num_bits": 4, "symmetric": False}),
    "w8a16": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "w8a16-groups": ("pack-quantized", {**INT, **GROUPS, "num_bits": 8, "symmetric": False}),
    "w8a8": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "w8a8-tensor": ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {**FP8, "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "fp8-block": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [24, 128]}),
    "nvfp4": ("nvfp4-pack-quantized", {**FP4, "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32}),
}


def decompressed(tensors: dict[str, Tensor], form: str, scheme: dict[str, object]) -> Tensor:
    """What the package makes of a module's tensors, by their names after the module's."""
    made = QuantizationScheme.model_validate({"targets": ["Linear"], **scheme})
    return BaseCompressor.get_value_from_registry(form).decompress(tensors, made)["weight"]


def scale_shape(weights: dict[str, object]) -> tuple[int, ...]:
    match weights["strategy"]:
        case "group" | "tensor_group":
            return ROWS, COLUMNS // weights["group_size"]
        case "channel":
            return ROWS, 1
        case "block":
            return ROWS // 24, COLUMNS // 128
    return (1,)


@loop("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@loop("case", CASES)
def test_we_read_what_the_package_writes(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    form, weights = CASES[case]
    generator = torch.Generator().manual_seed(1)
    shape = scale_shape(weights)
    # Scales that clip some of the weights, and zero points anywhere.
    scales = (
        (torch.rand(shape, generator=generator) + 0.5)
        * 3
        / (448 if form == "float-quantized" else 2 ** (weights["num_bits"] - 1))
    )
    state = {"weight": torch.randn(ROWS, COLUMNS, generator=generator).to(dtype), "weight_scale": scales.to(dtype)}
    if form == "nvfp4-pack-quantized":  # whose scales are rounded after they are multiplied by this
        state["weight_global_scale"] = torch.tensor([100.0])
        state["weight_scale"] = (100 * scales).to(torch.float8_e4m3fn).to(dtype)
    if not weights["symmetric"]:
        half = 2 ** (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    compressed = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    save_file(
        {f"{MODULE}.{name}": each.contiguous() for name, each in compressed.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    section = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    set_config(tmp_path, model_type="qwen3_5_text", num_hidden_layers=4, quantization_config=section)
    with TensorReader(Inventory.of(Checkpoint.open(tmp_path), family=by_name("qwen3_5"))) as reader:
        name = f"{MODULE}.weight"
        assert reader.problem(name) is None
        assert reader.is_quantized(name)
        expected = decompressed(compressed, form, {"weights": weights})
        assert expected.dtype == (torch.bfloat16 if weights["num_bits"] == 4 and weights["type"] == "float" else dtype)
        assert torch.equal(reader.read(name).to(expected.dtype), expected)


@pytest.mark.parametrize(("weights", "head_bits"), [("int8", 16), ("int4", 16), ("w8a8", 8)])
def test_the_package_reads_what_we_write(weights: str, head_bits: int, tmp_path: Path) -> None:
    """Each weight of a quantized model, with the scheme that the config has for it."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    quantize(tmp_path / "model", tmp_path / "out", weights=weights, group_size=16, head_bits=head_bits)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme, tensors = section["config_groups"]["group_0"], tensors_of(tmp_path / "out")
    form, number = scheme["format"], 0
    assert len(section["config_groups"]) == 1
    # As the package decides which of its forms a model runs with.
    assert infer_module_format(torch.nn.Linear, QuantizationScheme.model_validate(scheme)).value == form
    with TensorReader(Inventory.of(Checkpoint.open(tmp_path / "out"))) as reader:
        for name in reader.packed:
            module = name.removesuffix("weight")
            parts = {key.removeprefix(module): each for key, each in tensors.items() if key.startswith(module)}
            assert torch.equal(reader.read(name).bfloat16(), decompressed(parts, form, scheme))
            number += 1
    assert number > 5
