"""lost_parts: each tensor of a quantized module counts, in trunk and head, whatever the method."""

import re
from dataclasses import replace

import pytest
import torch
from artifacts import LAYOUTS, publish
from packed import CASES, quantize_folder
from quick import families
from stored import in_one_file
from tiny import build

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.lost_parts import lost_parts
from nextn.checkpoint.quantized_weights import implied_block
from nextn.checkpoint.safetensors_file import RawTensor, TensorInfo
from nextn.errors import CheckpointError
from nextn.family_table import by_name
from nextn.model.model import Model

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "U32": 4, "I64": 8}
# Suffix -> dtype and shape, for a weight [rows, columns]: as each method's own tool writes it.
METHODS = {
    "gptq": {".qweight": ("I32", "columns/8 rows"), ".qzeros": ("I32", "2 rows/8"), ".scales": ("F16", "2 rows"),
             ".g_idx": ("I32", "columns")},
    "awq": {".qweight": ("I32", "columns rows/8"), ".qzeros": ("I32", "2 rows/8"), ".scales": ("F16", "2 rows")},
    "pack-quantized": {".weight_packed": ("I32", "rows columns/8"), ".weight_scale": ("BF16", "rows 2"),
                       ".weight_zero_point": ("I32", "rows/8 2"), ".weight_shape": ("I64", "2")},
    "nvfp4": {".weight_packed": ("U8", "rows columns/2"), ".weight_scale": ("F8_E4M3", "rows columns/16"),
              ".weight_global_scale": ("F32", "1"), ".input_global_scale": ("F32", "1")},
    "modelopt": {".weight": ("U8", "rows columns/2"), ".weight_scale": ("F8_E4M3", "rows columns/16"),
                 ".weight_scale_2": ("F32", ""), ".input_scale": ("F32", "")},
    "quark": {".weight": ("U8", "rows columns/2"), ".weight_scale": ("U8", "rows columns/32")},
    "w8a8": {".weight": ("I8", "rows columns"), ".weight_scale": ("F32", "rows 1"), ".input_scale": ("F32", "1")},
    "fp8": {".weight": ("F8_E4M3", "rows columns"), ".weight_scale": ("F32", ""), ".input_scale": ("F32", "")},
    "mlx": {".weight": ("U32", "rows columns/8"), ".scales": ("BF16", "rows 1"), ".biases": ("BF16", "rows 1")},
    "nf4": {".weight": ("U8", "columns 1"), ".weight.absmax": ("U8", "rows"), ".weight.quant_map": ("F32", "16"),
            ".weight.nested_absmax": ("F32", "1"), ".weight.nested_quant_map": ("F32", "256"),
            ".weight.quant_state.bitsandbytes__nf4": ("U8", "90")},
    "int8": {".weight": ("I8", "rows columns"), ".SCB": ("F32", "rows"), ".weight_format": ("U8", "")},
    "torchao": {"._weight_qdata": ("I8", "rows columns"), "._weight_scale": ("F32", "rows 1"),
                "._weight_zero_point": ("I8", "rows 1")},
    "quanto": {".weight._data": ("I8", "rows columns"), ".weight._scale": ("BF16", "rows 1"),
               ".input_scale": ("BF16", "1"), ".output_scale": ("BF16", "1")},
}  # fmt: skip


def size(text, rows, columns):
    name, _, divisor = text.partition("/")
    return -(-{"rows": rows, "columns": columns}.get(name, 0) // int(divisor or 1)) or int(name)


def quantize(table, method):
    for name in [each for each in table if each.endswith("_proj.weight") and "eh_proj" not in each]:
        rows, columns = table.pop(name).shape
        for suffix, (dtype, shape) in METHODS[method].items():
            sizes = tuple(size(each, rows, columns) for each in shape.split())
            count = SIZES[dtype]
            for each in sizes:
                count *= each
            table[name.removesuffix(".weight") + suffix] = RawTensor(dtype, sizes, b"\x01" * count)


def without(checkpoint, name):
    return replace(checkpoint, tensors={key: info for key, info in checkpoint.tensors.items() if key != name})


@pytest.mark.one_case
@pytest.mark.parametrize("method", METHODS)
def test_each_part_counts(method, tmp_path):
    """An error names it, in the layer's attention, in an expert, and in the head's."""
    checkpoint = Checkpoint.open(publish(tmp_path, "glm4_moe", change=lambda table: quantize(table, method)))
    assert lost_parts(checkpoint.tensors) == {}
    modules = ("layers.0.self_attn.v_proj", "layers.1.mlp.experts.1.gate_proj", "layers.2.self_attn.o_proj",
               "layers.2.mlp.experts.0.down_proj")  # fmt: skip
    for name in (f"model.{module}{suffix}" for module in modules for suffix in METHODS[method]):
        left = without(checkpoint, name)
        assert lost_parts(left.tensors) == {name[: name.index("_proj") + 5]: [name]}, name
        rule = "trunk-partial" if "layers.2" not in name else "head-partial"
        rule = "scale-missing" if method == "fp8" and name.endswith("weight_scale") and rule[0] == "h" else rule
        found = [each for each in audit(left, sample=True).findings if each.rule == rule and each.severity == "error"]
        assert len(found) == 1, name
        assert name.removesuffix("_scale") in found[0].found + found[0].place, name


def infos(**kinds):
    return {name: TensorInfo(name, *form, "", 0, 0) for name, form in kinds["kinds"].items()}


def test_schemes_that_differ_are_whole():
    """Modules of one checkpoint in other schemes: fewer parts are no loss."""
    asymmetric = {f".weight_{part}": ("I32", (8, 8)) for part in ("packed", "zero_point")}
    asymmetric |= {".weight_scale": ("BF16", (8, 1)), ".weight_shape": ("I64", (2,))}
    symmetric = {suffix: form for suffix, form in asymmetric.items() if "zero" not in suffix}
    tensors = {f"model.layers.{layer}.mlp.experts.{expert}.up_proj{suffix}": form
               for layer in range(3) for expert in range(4) for suffix, form in asymmetric.items()}  # fmt: skip
    tensors |= {f"model.layers.{layer}.self_attn.o_proj{suffix}": form
                for layer in range(3) for suffix, form in symmetric.items()}  # fmt: skip
    tensors |= {f"model.layers.{layer}.self_attn.{name}": ("BF16", (8,))  # of other programs, and of caches
                for layer in range(3) for name in ("k_scale", "router.scale", "norm.weight", "a_offset")}  # fmt: skip
    tensors |= {"model.layers.3.eh_proj.weight": ("BF16", (8, 8)), "model.visual.biases": ("F32", (8,))}
    assert lost_parts(infos(kinds=tensors)) == {}


def test_experts_in_one_tensor():
    """Whose codes and scales have no dot between them: MXFP4, and fp8 of fused experts."""
    forms = {"gate_up_proj_blocks": ("U8", (4, 8, 1, 16)), "gate_up_proj_scales": ("U8", (4, 8, 1)),
             "down_proj": ("F8_E4M3", (4, 8, 8)), "down_proj_scale_inv": ("F32", (4, 1, 1))}  # fmt: skip
    tensors = infos(kinds={f"{root}.0.mlp.experts.{name}": form for root in ("model.layers", "mtp.layers", "x.layers")
                           for name, form in forms.items()})  # fmt: skip
    assert lost_parts(tensors) == {}
    for lost in tensors:
        stem = lost.partition("_proj")[0] + "_proj"
        assert lost_parts({name: info for name, info in tensors.items() if name != lost}).get(stem, [lost]) == [lost]


@pytest.mark.more
@pytest.mark.parametrize("case", [case for case in CASES if case.ordered], ids=str)
def test_channels_without_groups_are_not_read(case, tmp_path):
    """Channels in an order of their own: runs of them are other groups, and the values would be wrong."""
    folder, grouped = tmp_path / "model", replace(case, group=8)
    build("glm4_moe").save(folder)
    quantize_folder(folder, grouped)
    Model.load(folder)
    lost = next(name for name in Checkpoint.open(folder).tensors if name.endswith("g_idx") and "layers.0" in name)
    in_one_file(folder, lambda table: table.pop(lost))
    with pytest.raises(CheckpointError, match="without the groups of its input channels"):
        Model.load(folder)


@pytest.mark.more
def test_a_head_of_a_method_that_is_not_read(tmp_path):
    """One problem names its matrices and storage, not each of their parts."""
    build("glm4_moe").save(tmp_path)

    def change(table):
        for name in [each for each in table if "layers.2" in each and each.endswith("o_proj.weight")]:
            rows, columns = table.pop(name).shape
            table |= {f"{name}_packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
                      f"{name}_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
                      f"{name}_global_scale": torch.ones(1)}  # fmt: skip

    in_one_file(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"1 problem:\n  packed: model.layers.2.self_attn.o_proj, as compressed;"):
        Model.load(tmp_path)


def test_scales_of_32_values():
    """MXFP8 is read whatever block the config declares."""
    assert implied_block((64, 128), (64, 4), (128, 128)) == (1, 32)
    assert implied_block((64, 128), (64, 8), (128, 128)) is None


@pytest.mark.more
@pytest.mark.parametrize("name", families(LAYOUTS, ["deepseek_v4", "iquest_q1", "mimo_v2", "nemotron_h", "qwen4_exp"]))
def test_each_tensor_of_a_head_counts(name, tmp_path):
    """None is lost in silence, of those that are the head's own; experts and layers that differ in a number are one."""
    checkpoint = Checkpoint.open(publish(tmp_path, name))
    stored, copies = Inventory.of(checkpoint).stored, by_name(name).copies
    own = {re.sub(r"\d+", "0", each): each for role, each in stored.items() if role.split(".")[1] not in copies}
    assert [each for each in own.values() if audit(without(checkpoint, each), sample=True).clean] == []


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_part_that_one_of_two_layers_lacks(name, tmp_path):
    publish(tmp_path, name, modules=2, change=lambda table: table.pop("model.layers.3.enorm.weight"))
    found = [each for each in audit(Checkpoint.open(tmp_path)).findings if each.severity == "error"]
    assert [(each.rule, each.place) for each in found] == [("head-partial", "model.layers.3.enorm")]
    assert "MTP layer 1 " in found[0].found


def test_layers_that_are_numbered_from_1(tmp_path):
    """Engines look for layer 0; to declare as many layers as before would change nothing."""

    def change(table):
        for name in [name for name in table if "mtp_layers.0." in name]:
            table[name.replace("mtp_layers.0.", "mtp_layers.1.")] = table.pop(name)

    publish(tmp_path, "mimo", change=change)
    found = [each for each in audit(Checkpoint.open(tmp_path)).findings if each.severity != "note"]
    assert [each.rule for each in found] == ["modules-missing"]
    assert "of 0 no tensor" in found[0].found
    assert "numbered 1 " in found[0].found
    assert "--force" in found[0].fix


@pytest.mark.parametrize("headless", [False, True])
def test_a_copy_in_a_folder_original(headless, tmp_path):
    """As Meta's repositories have one: it hides nothing, and is no part of the model."""
    lost = (lambda table: [table.pop(name) for name in [*table] if name.startswith("mtp.")]) if headless else None
    publish(tmp_path, "qwen3_5", shards=2, change=lost)
    (tmp_path / "original").mkdir()
    copy = publish(tmp_path / "original", "qwen3_5")
    (copy / "config.json").rename(copy / "params.json")
    (copy / "model.safetensors").rename(copy / "consolidated.00.safetensors")
    report = audit(Checkpoint.open(tmp_path))
    assert [each.rule for each in report.findings if each.severity != "note"] == ["head-absent"] * headless
