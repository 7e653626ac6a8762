"""Checkpoints as bitsandbytes 0.50, torchao 0.18 and transformers 5.24 wrote them: edits keep what these load.

The tables have the names, dtypes and shapes of files that the tools wrote from a tiny model; their loaders were run on
results of `restore` and `convert` in the same layouts.
"""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from artifacts import EXPERTS, load_json, publish
from test_restore import without

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import CONFIG, INDEX, Checkpoint
from nextn.checkpoint.quant_formats import FORMATS
from nextn.checkpoint.quantization import MODELSLIM_FILE, QuantConfig, stored_modules
from nextn.checkpoint.safetensors_file import RawTensor, read_header, write_safetensors
from nextn.errors import CheckpointError

NAME = "glm4_moe"
NF4 = {"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": None,
       "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes"}  # fmt: skip
INT8 = NF4 | {"_load_in_4bit": False, "load_in_4bit": False, "_load_in_8bit": True, "load_in_8bit": True}
TORCHAO = {"modules_to_not_convert": None, "quant_method": "torchao",
           "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": None}
PACKED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def raw(dtype, shape):
    size = (
        int(np.prod(shape))
        * {"I64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}[dtype]
    )
    return RawTensor(dtype, shape, np.random.default_rng(0).integers(1, 60, size, "u1").tobytes())


def parts_of(method, module, shape):
    """The tensors in which each tool stores a weight."""
    rows, columns = shape
    return {
        "nf4": {f"{module}.weight": raw("U8", (rows * columns // 2, 1)),
                f"{module}.weight.absmax": raw("F32", (rows * columns // 64,)),
                f"{module}.weight.quant_map": raw("F32", (16,)),
                f"{module}.weight.quant_state.bitsandbytes__nf4": raw("U8", (78,))},
        "int8": {f"{module}.weight": raw("I8", shape), f"{module}.SCB": raw("F32", (rows,)),
                 f"{module}.weight_format": raw("U8", ())},
        "torchao": {f"{module}._weight_qdata": raw("I8", shape), f"{module}._weight_scale": raw("F32", (rows, 1)),
                    f"{module}._weight_zero_point": raw("I8", (rows, 1))},
        "torchao fp8": {f"{module}._weight_qdata": raw("F8_E4M3", shape),
                        f"{module}._weight_scale": raw("F32", (rows, 1))},
        "fp8": {f"{module}.weight": raw("F8_E4M3", shape), f"{module}.weight_scale_inv": raw("F32", (1, 1))},
    }[method]  # fmt: skip


CONFIGS = {"nf4": NF4, "int8": INT8, "torchao": TORCHAO, "torchao fp8": TORCHAO, "fp8": FP8}


def quantized(folder, method):
    """A model that lost its head, with the Linears of its layers as the tool packs them."""

    def change(table):
        without(NAME)(table)
        for name in [
            each for each in table if each.split(".")[-2] in PACKED and each.endswith(".weight") and "layers" in each
        ]:
            value = table.pop(name)
            table |= parts_of(method, name.removesuffix(".weight"), value.shape)

    publish(folder, NAME, change=change, config={"quantization_config": CONFIGS[method]})
    if method.startswith("torchao"):
        with_metadata(folder)
    return folder


def with_metadata(folder):
    """Entries of the header by which torchao knows the class of each weight."""
    checkpoint = Checkpoint.open(folder)
    modules = [name.removesuffix("._weight_qdata") for name in checkpoint.tensors if name.endswith("._weight_qdata")]
    metadata = {f"{module}.weight": json.dumps({"_type": "Int8Tensor"}) for module in modules}
    metadata |= {"tensor_names": json.dumps([*metadata]), "format": "pt"}
    tensors = {name: RawTensor(info.dtype, info.shape, checkpoint.read_bytes(name))
               for name, info in checkpoint.tensors.items()}  # fmt: skip
    write_safetensors(folder / "model.safetensors", tensors, metadata=metadata)
    return metadata


@pytest.mark.more
@pytest.mark.parametrize("method", CONFIGS)
def test_restore_keeps_the_loaders_default(method, tmp_path):
    """A list in place of null takes lm_head from what transformers leaves out, and the model no longer loads."""
    target = quantized(tmp_path / "target", method)
    nextn.restore(target, publish(tmp_path / "base", NAME))
    section = load_json(target / CONFIG)["quantization_config"]
    (entries,) = (value for key, value in section.items() if key in ("llm_int8_skip_modules", "modules_to_not_convert"))
    assert "lm_head" in entries
    config = QuantConfig.of(Checkpoint.open(target))
    assert config is not None
    for module, kind in stored_modules(Checkpoint.open(target).tensors):
        if "layers" in module and module.split(".")[-1] in PACKED:
            assert config.covers(module) is (kind != "plain"), module
    wrong = [each for each in audit(Checkpoint.open(target)).findings if each.severity != "note"]
    assert not wrong, wrong


def test_modelslim_gets_an_entry_for_each_matrix(tmp_path):
    """vllm-ascend looks each Linear up in the description, and stops at one that it lacks."""

    def change(table):
        for name in [each for each in table if each.endswith("_proj.weight") and "layers.2" not in each]:
            rows, columns = table[name].shape
            table |= {name: raw("I8", (rows, columns)), f"{name}_scale": raw("F32", (rows, 1)),
                      f"{name}_offset": raw("F32", (rows, 1))}  # fmt: skip

    base = publish(tmp_path / "base", NAME)
    whole = publish(tmp_path / "whole", NAME, change=change)
    names = [name for name in Checkpoint.open(whole).tensors if "layers.2" not in name]
    description = {name: "W8A8_DYNAMIC" if "_proj.weight" in name else "FLOAT" for name in names}
    target = publish(tmp_path / "target", NAME, change=lambda table: (change(table), without(NAME)(table)))
    for folder in (whole, target):
        (folder / MODELSLIM_FILE).write_text(json.dumps(description))
    assert [each.rule for each in audit(Checkpoint.open(whole)).findings if each.severity != "note"] == ["quantization"]
    nextn.restore(target, base)
    assert (
        load_json(target / MODELSLIM_FILE).items() >= {**description, "model.layers.2.eh_proj.weight": "FLOAT"}.items()
    )
    assert audit(Checkpoint.open(target)).clean


@pytest.mark.one_case
@pytest.mark.parametrize("form", ["single-file", "shards", "side-file"])
def test_metadata_survive(form, tmp_path):
    """Every entry of the files' headers is in the result, and lists of names have all names."""
    folder = quantized(tmp_path / "model", "torchao")
    said = read_header(folder / "model.safetensors").metadata
    nextn.restore(folder, publish(tmp_path / "base", NAME))
    nextn.convert(folder, tmp_path / "out", form=form)
    headers = [read_header(path).metadata for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    merged = {key: value for header in headers for key, value in header.items()}
    assert merged.items() >= said.items()


def test_metadata_of_the_index_survive(tmp_path):
    """All that another tool wrote there, with the new size; a count of parameters that no longer holds is left out."""
    target = publish(tmp_path / "target", NAME, change=without(NAME), shards=2)
    index = load_json(target / INDEX)
    index["metadata"] |= {"total_parameters": 7, "quantized_by": "a tool"}
    (target / INDEX).write_text(json.dumps(index))
    nextn.restore(target, publish(tmp_path / "base", NAME))
    size = sum(info.nbytes for info in Checkpoint.open(target).tensors.values())
    assert load_json(target / INDEX)["metadata"] == {"total_size": size, "quantized_by": "a tool"}


def test_an_explicit_list_gets_nothing_more():
    """Where the config names modules, transformers has no default to keep."""
    for method, key in (("fp8", "modules_to_not_convert"), ("bitsandbytes", "llm_int8_skip_modules")):
        section = {"quant_method": method, key: ["model.layers.0.mlp"], "load_in_4bit": True}
        new = FORMATS[method](section).without(["mtp.fc"], {"lm_head": False, "model.layers.0.self_attn.q_proj": True})
        assert "lm_head" not in new[key]


def in_mlx(table, *, packed):
    """The trunk as mlx_lm.convert writes it: one tensor for all experts of a matrix, and codes in words of 32 bits."""
    without(NAME)(table)
    for name in [each for each in table if ".experts.0." in each]:
        stem, part = name.split(".experts.0.")
        parts = [table.pop(name.replace(".0.", f".{number}.") if number else name) for number in range(EXPERTS)]
        data = b"".join(each.data for each in parts)
        table[f"{stem}.switch_mlp.{part}"] = RawTensor("BF16", (EXPERTS, *parts[0].shape), data)
    for name in [each for each in table if each.endswith(("_proj.weight", "lm_head.weight"))] if packed else ():
        *outer, size_in = table.pop(name).shape
        size = int(np.prod(outer)) * size_in
        table[name] = RawTensor("U32", (*outer, size_in // 8), bytes(size // 2))
        for part in ("scales", "biases"):
            table[name.replace("weight", part)] = RawTensor("BF16", (*outer, size_in // 16), bytes(size // 8))


@pytest.mark.parametrize("packed", [False, True])
def test_mlx(packed, tmp_path):
    """Experts under MLX's name are the layer's own; unpacked ones become what transformers loads, bit for bit."""
    base, section = publish(tmp_path / "base", NAME), {"group_size": 16, "bits": 4, "mode": "affine"}
    target = publish(
        tmp_path / "mlx",
        NAME,
        change=partial(in_mlx, packed=packed),
        config={"quantization": section} if packed else {},
    )
    nextn.restore(target, base)
    report = audit(Checkpoint.open(target))
    serious = [each.rule for each in report.findings if each.severity != "note"]
    assert serious == ([] if packed else ["experts-form"])
    assert report.unchecked == ()
    assert ("engine-loads" in [each.rule for each in report.findings]) is packed
    if not packed:
        nextn.convert(target, tmp_path / "out", trunk_experts="split")
        out, old = Checkpoint.open(tmp_path / "out"), Checkpoint.open(base)
        assert all(out.read_bytes(name) == old.read_bytes(name) for name in out.tensors)
        assert audit(out).clean
        assert "head-stale" not in [each.rule for each in audit(out).findings]


def in_mlx_with_head(path, stored, own, *, drop=False, prefix=""):
    """A model in MLX, four bits in groups of 16, with a head of other `stored` bits and groups, and an `own` entry."""
    bits, group = stored

    def change(table):
        for name in [each for each in table if "self_attn" in each and each.endswith("_proj.weight")]:
            rows, columns = table[name].shape
            here, size = (bits, group) if name.startswith("mtp.") else (4, 16)
            table[name] = raw("U32", (rows, columns * here // 32))
            for part in ("scales", "biases"):
                table[name.replace("weight", part)] = raw("BF16", (rows, columns // size))
        for name in [each for each in table if drop and each.startswith("mtp.")]:
            del table[name]

    section = {"group_size": 16, "bits": 4, "mode": "affine"}
    names = [f"{prefix}mtp.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    return publish(
        path, "qwen3_5", change=change, config={"quantization": section | (dict.fromkeys(names, own) if own else {})}
    )


EIGHT = {"group_size": 16, "bits": 8}


@pytest.mark.parametrize(
    ("stored", "own", "rules"),
    [
        ((8, 16), EIGHT, []),  # a head of more bits than the trunk, as the config says
        ((8, 16), None, ["quantization"]),
        ((4, 8), None, ["quantization"]),
        ((4, 16), EIGHT, ["quantization"]),
        ((4, 16), {"group_size": 16, "bits": 4, "mode": "mxfp4"}, ["quantization"]),  # which has no biases
        ((4, 16), None, []),
    ],
)
def test_bits_of_a_head_in_mlx(stored, own, rules, tmp_path):
    """A module has the bits and groups of its entry, else those of all: engines on MLX build it by them."""
    report = audit(Checkpoint.open(in_mlx_with_head(tmp_path, stored, own)))
    assert [each.rule for each in report.findings if each.severity == "error"] == rules


def test_restore_of_a_head_in_mlx(tmp_path):
    """Its bytes are copied as they are: into a model whose config has its bits, and into no other."""
    base = in_mlx_with_head(tmp_path / "base", (8, 16), EIGHT)
    for name, own, prefix in (("same", EIGHT, ""), ("prefixed", EIGHT, "language_model.")):
        target = in_mlx_with_head(tmp_path / name, (8, 16), own, drop=True, prefix=prefix)
        nextn.restore(target, base)
        assert audit(Checkpoint.open(target)).clean
    with pytest.raises(
        CheckpointError, match="has 8 bits in groups of 16 there, and 4 bits in groups of 16 by the target"
    ):
        nextn.restore(in_mlx_with_head(tmp_path / "four", (4, 16), None, drop=True), base)
    plain = publish(tmp_path / "plain", "qwen3_5", change=without("qwen3_5"))
    with pytest.raises(CheckpointError, match=r"quantized \(mlx\).*no quantization\. Use a base in bf16"):
        nextn.restore(plain, base)


def test_mlx_keeps_the_names_of_its_head(tmp_path):
    """A head whose norm weights get the trunk's convention keeps the prefix under which MLX's engines look for it."""
    names = {"model.": "language_model.model.", "mtp.": "language_model.mtp.", "lm_head": "language_model.lm_head"}

    def change(table):
        for old, new in names.items():
            for name in [each for each in table if each.startswith(old)]:
                table[name.replace(old, new, 1)] = table.pop(name)

    section = {"group_size": 16, "bits": 4, "mode": "affine"}
    folder = publish(tmp_path / "mlx", "qwen3_5", change=change, config={"quantization": section})
    nextn.convert(folder, tmp_path / "out", norm_weight="add-1")
    assert Checkpoint.open(tmp_path / "out").tensors.keys() == Checkpoint.open(folder).tensors.keys()


def test_restore_into_mlx_says_how_norm_weights_are_stored(tmp_path):
    """Not where both store w - 1, nor where the family stores w."""
    mlx, notes = {"quantization": {"group_size": 16, "bits": 4, "mode": "affine"}}, {}
    for name, config in (("qwen3_5", mlx), ("qwen3_5", {}), ("glm4_moe", mlx)):
        folder = tmp_path / f"{name}{len(config)}"
        target = publish(folder, name, change=without(name), config=config)
        plan = nextn.restore(target, publish(tmp_path / name, name), dry_run=True)
        notes[folder.name] = any(f"nextn audit {target}" in note for note in plan.notes)
    assert notes == {"qwen3_51": True, "qwen3_50": False, "glm4_moe1": False}


def test_restore_beside_an_unknown_method(tmp_path):
    """EXL3 stores three tensors and no weight: a head of plain weights is complete beside them."""

    def change(table):
        without(NAME)(table)
        for name in [each for each in table if each.endswith("_proj.weight")]:
            stem, (num_rows, width) = name.removesuffix("weight"), table.pop(name).shape
            table |= {f"{stem}trellis": raw("U8", (width, num_rows)), f"{stem}suh": raw("F32", (width,)),
                      f"{stem}svh": raw("F32", (num_rows,))}  # fmt: skip

    target = publish(tmp_path / "target", NAME, change=change, config={"quantization_config": {"quant_method": "exl3"}})
    nextn.restore(target, publish(tmp_path / "base", NAME))
    assert audit(Checkpoint.open(target)).clean
    lost = {
        name: info for name, info in Checkpoint.open(target).tensors.items() if "layers.1.self_attn.k_proj" not in name
    }
    assert not audit(replace(Checkpoint.open(target), tensors=lost)).clean


def test_hqq_without_a_config(tmp_path):
    """HQQ's save_to_safetensors stores a matrix as its codes and 18 settings, which are no matrices of their own."""
    settings = ("scale", "zero", "shape", "axis", "group_size", "nbits", "packing", "view_as_float")

    def change(table):
        without(NAME)(table)
        for name in [each for each in table if each.endswith("_proj.weight")]:
            stem, (rows, width) = name.removesuffix("weight"), table.pop(name).shape
            table |= {f"{stem}{each}": raw("U8", (4,)) for each in settings}
            table[f"{stem}W_q"] = raw("U8", (rows // 2, width))

    folder = publish(tmp_path, NAME, change=change)
    count = sum(name.endswith("W_q") for name in Checkpoint.open(folder).tensors)
    found = {each.rule: each.found for each in audit(Checkpoint.open(folder)).findings}
    assert found.keys() == {"head-absent", "quantization"}
    assert f"The trunk stores {count} matrices, such as model.layers.0.mlp.down_proj" in found["quantization"]
