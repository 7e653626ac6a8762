"""Lists of quantized modules that contradict the trunk's files, or each other: engines do not load such models."""

import re

import pytest
from artifacts import load_json, publish
from quick import loop
from test_other_tools import raw

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import CONFIG, Checkpoint
from nextn.checkpoint.quantization import MODELOPT_FILE
from nextn.checkpoint.safetensors_file import write_json

NVFP4 = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "lm_head"]
PLAIN = ["*self_attn*", "*linear_attn*", "*gate_proj", "mtp*"]


def packed(folder, ignore, modules=NVFP4, config=None):
    """A dense Qwen3.5 with these modules in ModelOpt's NVFP4, and a list of those that are not."""

    def change(table):
        for module in modules:
            rows, columns = table[f"{module}.weight"].shape
            table |= {f"{module}.weight": raw("U8", (rows, columns // 2)), f"{module}.weight_scale_2": raw("F32", ()),
                      f"{module}.weight_scale": raw("F8_E4M3", (rows, columns // 16))}  # fmt: skip

    section = config or {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    return publish(folder, "qwen3_5", change=change, config={"quantization_config": section})


def found(folder):
    return [each for each in audit(Checkpoint.open(folder)).findings if each.severity != "note"]


@loop(("ignore", "place", "words"), [
    ([*PLAIN, "model.layers.1.mlp.down_proj"], "", ""),
    ([*PLAIN, "model.layers.1.mlp.down_proj", "lm_head*"], "lm_head", "1 matrix, such as lm_head, packed"),
    ([*PLAIN, "model.layers.*.mlp.down_proj"], "model.layers.0.mlp.down_proj", "engines build them unquantized"),
    (PLAIN, "model.layers.1.mlp.down_proj", "unquantized, and the config .* has engines build them quantized"),
])  # fmt: skip
def test_the_trunk_against_the_list(ignore, place, words, tmp_path):
    """vllm#45132: nvidia/Qwen3.6-35B-A3B-NVFP4 has lm_head in four tensors, and lm_head* in its list."""
    wrong = found(packed(tmp_path, ignore))
    assert [(each.rule, each.severity, each.place) for each in wrong] == [("quantization", "error", place)] * bool(
        place
    )
    for each in wrong:
        assert re.search(words, each.found)


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_a_shared_matrix_in_fp8(module, tmp_path):
    """A script that took every matrix: the method has parameters for scales in linear layers alone."""

    def change(table):
        shape = table[f"{module}.weight"].shape
        table |= {f"{module}.weight": raw("F8_E4M3", shape), f"{module}.weight_scale_inv": raw("F32", (1, 1))}

    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": []}
    folder = publish(tmp_path, "qwen3_5", change=change, config={"quantization_config": config})
    assert module in [each.place for each in found(folder) if "build them unquantized" in each.found]


def test_lists_that_contradict_each_other(tmp_path):
    """The head is left out in config.json alone: the command that the finding names puts it into the other list."""
    folder = packed(tmp_path, ignore := [*PLAIN, "model.layers.1.mlp.down_proj"])
    other = {"quant_algo": "NVFP4", "exclude_modules": [each for each in ignore if each != "mtp*"]}
    write_json(folder / MODELOPT_FILE, {"quantization": other})
    (wrong,) = found(folder)
    assert (wrong.rule, wrong.severity) == ("quantization", "warning")
    assert "3 matrices of the head" in wrong.found
    assert wrong.fix == f"nextn restore {folder} --from {folder} --force"
    nextn.restore(folder, folder, force=True)
    assert not found(folder)
    assert load_json(folder / MODELOPT_FILE)["quantization"]["exclude_modules"][:-1] == other["exclude_modules"]
    assert load_json(folder / CONFIG)["quantization_config"]["ignore"] == ignore


HEAD = ["mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.down_proj"]
ALL_LAYERS = [f"model.layers.{index}.mlp.{part}_proj" for index in (0, 1) for part in ("up", "down")]
FP8, FP4 = {"num_bits": 8, "type": "float", "strategy": "tensor"}, {"num_bits": 4, "type": "float", "group_size": 16}


def of_modelopt(algorithm, **entries):
    mixed = {"quantized_layers": {module: {"quant_algo": entries["mtp"]} for module in HEAD}
             | {module: {"quant_algo": "NVFP4"} for module in ALL_LAYERS}} if entries else {}  # fmt: skip
    return {"quant_method": "modelopt", "quant_algo": algorithm, **mixed}


def of_quark(**layers):
    entries = {name: {"weight": {"dtype": dtype}} for name, dtype in layers.items()}
    weight = {"weight": {"dtype": "fp4"}}
    return {"quant_method": "quark", "global_quant_config": weight, "layer_quant_config": entries, "exclude": []}


def of_groups(**groups):
    named = [{"targets": [target], "weights": weights} for target, weights in groups.items()]
    return {"quant_method": "compressed-tensors", "config_groups": dict(enumerate(named)), "ignore": []}


@loop(("config", "kind"), [
    (of_modelopt("NVFP4"), ""), (of_modelopt("FP8"), "fp8"), (of_modelopt("W4A8_MXFP4_FP8"), ""),
    (of_modelopt("MIXED_PRECISION", mtp="NVFP4"), ""),
    (of_modelopt("MIXED_PRECISION", mtp="FP8"), "fp8"), (of_quark(), ""), (of_quark(**{"mtp.*": "fp8_e4m3"}), "fp8"),
    (of_quark(**{f"model.{each}": "fp8_e4m3" for each in HEAD}), ""),  # under a prefix that engines rename
    ({**of_quark(), "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "fp8"),
    (of_groups(Linear=FP8), "fp8"), (of_groups(Linear=FP4), "compressed"), (of_groups(**{"re:mtp.*": FP8}), "fp8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "gptq"), ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:mtp.*": {"method": "nvfp4"}}}, ""),
    ({"quant_method": "fp8"}, ""),  # DeepSeek-V4's experts are fp4 in such a release
])  # fmt: skip
def test_a_head_of_another_kind_than_the_config_declares(config, kind, tmp_path):
    """A head taken from a release of another quantization: no parameter has its shape."""
    kinds = [
        each for each in found(packed(tmp_path, [], [*ALL_LAYERS, *HEAD], config)) if "build them as" in each.found
    ]
    assert [each.place for each in kinds if "The head" in each.found] == [min(HEAD)] * bool(kind)
    assert all(each.severity == "error" and re.search(f"build them as {kind}", each.found) for each in kinds)


@pytest.mark.parametrize("config", [
    {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "modules_to_not_convert": None},
    {"quant_method": "gptq", "bits": 4, "group_size": 16},
])  # fmt: skip
def test_lists_that_vllm_takes_from_the_files(config, tmp_path):
    """An empty list leaves out, in vLLM, what the files hold unpacked, except experts; SGLang has all packed."""

    def change(table):
        for name in [each for each in table if each.endswith("mlp.up_proj.weight") and not each.startswith("mtp.")]:
            rows, columns = table.pop(name).shape
            shape = (columns // 8, rows) if config["quant_method"] == "gptq" else (columns, rows // 8)
            stem = name.removesuffix("weight")
            table |= {f"{stem}qweight": raw("I32", shape), f"{stem}qzeros": raw("I32", (columns // 16, rows // 8)),
                      f"{stem}scales": raw("BF16", (columns // 16, rows))}  # fmt: skip

    (wrong,) = found(publish(tmp_path, "qwen3_5", change=change, config={"quantization_config": config}))
    assert (wrong.rule, wrong.severity) == ("quantization", "warning")
    assert "has SGLang build them quantized" in wrong.found


@loop("block", [None, [128, 128]])
def test_a_convolution_in_fp8(block, tmp_path):
    """Engines build the convolutions of recurrent layers without the quantization config."""
    conv = "model.layers.0.linear_attn.conv1d"

    def change(table):
        shape, scale = table[f"{conv}.weight"].shape, "weight_scale_inv" if block else "weight_scale"
        table |= {f"{conv}.weight": raw("F8_E4M3", shape), f"{conv}.{scale}": raw("F32", (1, 1, 1) if block else (1,))}

    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mtp"]}
    config |= {"weight_block_size": block} if block else {}
    folder = publish(tmp_path, "qwen3_5", change=change, config={"quantization_config": config})
    assert (conv, "error") in [(each.place, each.severity) for each in found(folder) if "convolution" in each.found]
