"""shapes: tensors of one module that do not fit each other, and copies that differ in nothing but their dtype."""

import re
from functools import partial

import numpy as np
import pytest
from artifacts import publish

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.safetensors_file import RawTensor


@pytest.mark.parametrize(
    ("family", "lost"), [("qwen3_5", "mtp.layers.0.mlp.gate_proj"), ("glm4_moe", "layers.0.mlp.up_proj")]
)
def test_half_of_a_projection(family, lost, tmp_path):
    """Rows that a merge of tensor-parallel shards lost, of head or trunk: no loader takes the module."""

    def halve(table):
        (name,) = (each for each in table if each.endswith(f"{lost}.weight"))
        rows, columns = table[name].shape
        table[name] = RawTensor("BF16", (rows // 2, columns), table[name].data[: rows * columns])

    checkpoint = Checkpoint.open(publish(tmp_path, family, change=halve))
    found = [each for each in audit(checkpoint).findings if each.severity == "error"]
    assert [each.rule for each in found] == ["shape"]
    assert lost in found[0].found


@pytest.mark.parametrize("layers", ["", r"layers\.2\."])
def test_scales_of_another_size(layers, tmp_path):
    """Scales that a faulty export computed from packed values are half as many, of the whole checkpoint or the head."""

    def pack(table):
        for name in [each for each in table if each.endswith("_proj.weight") and "eh_proj" not in each]:
            rows, columns = table[name].shape
            groups = columns // (32 if re.search(layers, name) else 16)
            table[name] = RawTensor("U8", (rows, columns // 2), bytes(rows * columns // 2))
            table[f"{name}_scale"] = RawTensor("F8_E4M3", (rows, groups), b"\x38" * (rows * groups))
            table[f"{name}_scale_2"] = RawTensor("F32", (), bytes(4))

    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.2.eh_proj"]}
    checkpoint = Checkpoint.open(publish(tmp_path, "glm4_moe", change=pack, config={"quantization_config": section}))
    found = [each for each in audit(checkpoint, sample=True).findings if each.severity == "error"]
    assert [each.rule for each in found] == ["quantization"]
    assert re.search(r"such as .*weight_scale .* expected .* for groups of 16", found[0].found)


def test_scales_of_another_method(tmp_path):
    """MXFP4 as Quark stores it, which nextn does not read: 32 values have a scale."""

    def pack(table, groups):
        for name in [each for each in table if each.endswith("_proj.weight") and "eh_proj" not in each]:
            rows, columns = table[name].shape
            table[name] = RawTensor("U8", (rows, columns // 2), bytes(rows * columns // 2))
            count = -(-columns // groups)
            table[f"{name}_scale"] = RawTensor("U8", (rows, count), bytes(rows * count))

    section = {"quant_method": "quark", "exclude": ["lm_head", "model.layers.2.eh_proj"]}
    for groups, count in ((32, 0), (16, 1)):
        options = {"change": partial(pack, groups=groups), "config": {"quantization_config": section}}
        checkpoint = Checkpoint.open(publish(tmp_path / str(groups), "glm4_moe", **options))
        found = [each.found for each in audit(checkpoint, sample=True).findings if each.rule == "quantization"]
        assert [("of scales" in each) for each in found] == [True] * count


def test_blocks_of_another_size(tmp_path):
    """fp8 scales that do not fit the block of the config."""

    def change(table):
        name = next(each for each in table if each.endswith("q_proj.weight_scale_inv"))
        table[name] = RawTensor("F32", (1, 7), bytes(28))

    checkpoint = Checkpoint.open(publish(tmp_path, "qwen3_5", fp8=True, change=change))
    assert any(each.rule == "quantization" and "[1, 7]" in each.found for each in audit(checkpoint).findings)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_copies_in_another_dtype(dtype, tmp_path):
    """Equal values are equal copies; other values are not."""

    def cast(table, offset=0.0):
        for name in ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"):
            values = (np.frombuffer(table[name].data, "<u2").astype("<u4") << 16).view("<f4") + offset
            kind = {"F16": "<f2", "F32": "<f4"}[dtype]
            table[name] = RawTensor(dtype, table[name].shape, values.astype(kind).tobytes())

    def rules(folder, change):
        return {each.rule for each in audit(Checkpoint.open(publish(folder, "deepseek_v3", change=change))).findings}

    assert "copy-differs" not in rules(tmp_path / "equal", cast)
    assert "copy-differs" in rules(tmp_path / "other", lambda table: cast(table, 0.01))
