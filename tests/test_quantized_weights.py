"""Quantized weights: fp8 blocks as published, and codes of four and eight bits in each format; errors for bad files."""

import json
import shutil

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import CASES, Case, quantize_folder, random_values, section, stored
from quick import loop, others_slow
from safetensors.torch import save_file
from stored import in_one_file, set_config
from tiny import CONFIGS, build, prompt

from nextn.checkpoint import quantized_weights
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.quantization import MODELSLIM_FILE, scale_of, scale_shape
from nextn.checkpoint.tensors import TensorReader
from nextn.decoding.generate import generate
from nextn.errors import CheckpointError
from nextn.family_table import by_name
from nextn.model.load_head import head_tensors
from nextn.model.model import Model
from nextn.settings import Settings

BLOCK = (4, 8)
NAME = "model.layers.0.mlp.up_proj"
TOKENS = torch.tensor([prompt(21)])


def bits(tensor):
    return tensor.view(torch.uint8)


def slow(weight):
    """weight_quant of kernel.py, one block after the other."""
    out, scales = (
        torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
        torch.empty(scale_shape(weight.shape, BLOCK)),
    )
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[place].float().abs().max() / 448.0
            out[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return out, scales


@pytest.mark.more
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 13), columns=st.integers(1, 19), experts=st.sampled_from([(), (3,)]),
    exponent=st.integers(-30, 10), dtype=st.sampled_from([torch.bfloat16, torch.float32]), seed=st.integers(0, 999),
)  # fmt: skip
def test_there_and_back(rows, columns, experts, exponent, dtype, seed):
    """A block edge that is cut off wrongly, a scale of the wrong block, or bits that wander at each saving."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(*experts, rows, columns, generator=generator) * 2.0**exponent).to(dtype)
    small, scale = quantized_weights.quantize_fp8(weight, BLOCK)
    assert scale.shape == scale_shape(weight.shape, BLOCK)
    back = quantized_weights.dequantize_fp8(small, scale, BLOCK)
    # e4m3 has 3 bits after the point: half a unit of the last place, or of the smallest subnormal, 2 ** -9.
    largest = weight.float().abs().max().item()
    gap = (back - weight.float()).abs()
    assert bool(
        (gap <= torch.maximum(weight.float().abs() * 2**-4, torch.tensor(largest / 448 * 2**-10)) * 1.001).all()
    )
    again, same = quantized_weights.quantize_fp8(back.to(dtype), BLOCK)
    assert torch.equal(bits(again), bits(small))
    assert torch.equal(same, scale)
    if not experts:
        expected, scales = slow(weight)
        assert torch.equal(bits(small), bits(expected))
        assert torch.equal(scale, scales)


def test_a_block_of_zeros():
    """Divided by its scale of 0, it would be NaN for ever."""
    weight = torch.zeros(8, 8)
    weight[:4] = 1.0
    back = quantized_weights.dequantize_fp8(*quantized_weights.quantize_fp8(weight, BLOCK), BLOCK)
    assert torch.equal(back, weight)


def test_scales_that_are_exponents():
    """MXFP8 keeps exponents as bytes, DeepSeek-V4 as e8m0: taken for numbers, weights are off by powers of two."""
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[126, 128], [127, 130]], dtype=torch.uint8)
    expected = torch.tensor([[0.5, 2.0], [1.0, 8.0]]).repeat_interleave(32, dim=1)
    assert torch.equal(quantized_weights.dequantize_fp8(weight, exponents, (1, 32)), expected)
    assert torch.equal(
        quantized_weights.dequantize_fp8(weight, exponents.view(torch.float8_e8m0fnu), (1, 32)), expected
    )


@loop(
    ("shape", "scale", "block"),
    [
        ((576, 7168), (5, 56), (128, 128)),  # kv_a_proj_with_mqa of DeepSeek-V3: the last block has 64 rows
        ((160, 256), (2, 2), (128, 128)),  # not blocks of 80
        ((8, 300, 200), (8, 3, 2), (128, 128)),
        ((300, 200), (300, 1), (1, 200)),
        ((300, 200), (), (128, 128)),
        ((300, 200), (1,), (128, 128)),
        ((300, 200), (2, 2), None),
        ((300, 200), (300,), None),
        ((200,), (2,), None),
    ],
)
def test_blocks_implied_by_scales(shape, scale, block):
    """A grid that does not fit must not be stretched over the weight."""
    assert quantized_weights.implied_block(shape, scale, (128, 128)) == block


@pytest.mark.parametrize(
    ("config", "block"),
    [
        ({}, (128, 128)),
        ({"weight_block_size": [1, 32]}, (1, 32)),
        ({"weight_block_size": "wide"}, (128, 128)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": [64, 32]}}}}, (64, 32)),
    ],
)
def test_declared_block(config, block):
    """Blocks that the config declares are overlooked."""
    assert quantized_weights.declared_block(config, by_name("deepseek_v3")) == block


def test_places_of_scales():
    """Each publisher's name for the scales, of a weight and of experts in one tensor."""
    for weight, scale in {
        "a.weight": "a.weight_scale_inv", "b.weight": "b.weight_scale", "c.weight": "c.scale",
        "experts.down_proj": "experts.down_proj_scale_inv",
    }.items():  # fmt: skip
        assert scale_of(weight, {weight, scale}) == scale
    assert scale_of("a.weight", {"a.weight", "b.weight_scale"}) is None


PLAIN = {
    "deepseek_v3": {"eh_proj", "head", "embed_tokens", "gate"},
    "qwen3_next": {"fc", "gate", "shared_expert_gate"},
    "deepseek_v4": {"head", "tok_emb", "gate"},
}


@pytest.mark.parametrize("name", [name for name in PLAIN if name in CONFIGS])
def test_what_stays_plain(name):
    """A router or the projection in fp8 is a head that engines read without its scales."""
    family = by_name(name)
    head = build(name).head
    tensors = head_tensors(head)
    packed = quantized_weights.quantize_tensors(tensors, family, head.trunk.num_layers)
    plain = {each for each, value in packed.items() if value.ndim > 1 and value.itemsize > 1} & tensors.keys()
    assert {each.split(".")[-2] for each in plain if each.endswith(".weight")} == PLAIN[name]
    small = {each for each, value in packed.items() if value.itemsize == 1}
    assert small == {fp8_weight(each) for each in packed.keys() - tensors.keys()}


def fp8_weight(scale):
    return scale.removesuffix("_scale_inv") if scale.endswith("_scale_inv") else scale.removesuffix("scale") + "weight"


def reader(folder, case, rows=24, columns=64, change=lambda table, config: None):
    """A checkpoint of one packed weight, changed by `change` -> the reader, and the real values."""
    values = random_values(case, rows, columns)
    table = {f"{NAME}.{part}": value for part, value in stored(case, values).items()}
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "quantization_config": section(case)}
    change(table, config["quantization_config"])
    folder.mkdir(exist_ok=True)
    save_file(table, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    set_config(folder, **config)
    return TensorReader(Inventory.of(Checkpoint.open(folder), family=by_name("qwen3_5"))), values


@loop("case", CASES, ids=str)
@loop(("rows", "columns"), [(24, 64), (32, 96)])
def test_values_of_every_format(case, rows, columns, tmp_path):
    """Codes, scales, zero points and groups as they were packed, and the product exactly."""
    weights, values = reader(tmp_path, case, rows, columns)
    name = f"{NAME}.weight"
    assert weights.names() == [name]
    assert weights.problem(name) is None
    assert weights.stored(name).shape == (rows, columns)
    found = weights.integers(name)
    assert torch.equal(found.codes.long(), values.codes)
    assert torch.equal(found.scales, values.scales)
    assert (found.zeros is None) == case.symmetric
    assert case.symmetric or torch.equal(found.zeros.long(), values.zeros)
    assert (found.bits, found.group_size) == (case.bits, case.group or columns)
    assert torch.equal(found.group_index, values.index) if case.ordered else found.group_index is None
    assert torch.equal(weights.read(name), values.weight())


def plain_and_packed(family, case, folder):
    """The quantized weights, a model that holds them in bf16, and the model of the checkpoint in `packed`."""
    build(family).save(folder / "plain", dtype=torch.bfloat16)
    shutil.copytree(folder / "plain", folder / "packed")
    weights = quantize_folder(folder / "packed", case)
    in_one_file(folder / "plain", lambda table: table.update({name: w.bfloat16() for name, w in weights.items()}))
    plain, packed = (Model.load(folder / name) for name in ("plain", "packed"))
    return weights, plain, packed


QUICK = [CASES[at] for at in (0, 5, 8, 11, 13)]


# What each format says of a weight: test_values_of_every_format. Here, one of each method, and groups in another order.
@pytest.mark.more
@pytest.mark.parametrize("case", others_slow(CASES, *QUICK), ids=str)
def test_a_model_computes_with_the_dequantized_weights(case, tmp_path):
    """The same logits as of the checkpoint that holds those weights in bf16, trunk, head and lm_head; also streamed."""
    weights, plain, packed = plain_and_packed("qwen3_5", case, tmp_path)
    streamed = Model.load(tmp_path / "packed", stream=True)
    assert any("mtp." in name for name in weights)
    assert packed.trunk.dtype == torch.bfloat16
    assert packed.notes == plain.notes
    with torch.inference_mode():
        outputs = [plain.trunk(TOKENS), packed.trunk(TOKENS), streamed.trunk.run([TOKENS])[0]]
        logits = [m.head(TOKENS, out.head_input) for m, out in zip((plain, packed, streamed), outputs, strict=True)]
    for output, head in zip(outputs[1:], logits[1:], strict=True):
        assert torch.equal(output.final_hidden, outputs[0].final_hidden)
        assert torch.equal(head, logits[0])


@pytest.mark.more
@pytest.mark.parametrize("case", [Case("gptq"), Case("pack-quantized")], ids=str)
def test_experts(case, tmp_path):
    """Stored one by one, they are stacked in memory, and streamed a few at a time."""
    weights, plain, packed = plain_and_packed("glm4_moe", case, tmp_path)
    assert any(".experts." in name for name in weights)
    with torch.inference_mode():
        expected = plain.trunk(TOKENS)
        assert torch.equal(packed.trunk(TOKENS).final_hidden, expected.final_hidden)
        assert torch.equal(packed.head(TOKENS, expected.head_input), plain.head(TOKENS, expected.head_input))
        streamed = Model.load(tmp_path / "packed", stream=True).trunk.run([TOKENS])[0]
    assert torch.equal(streamed.final_hidden, expected.final_hidden)


def cut(part):
    """Change: the tensor loses its last row."""

    def change(table, config):
        table[f"{NAME}.{part}"] = table[f"{NAME}.{part}"][:-1].contiguous()

    return change


def drop(part):
    return lambda table, config: table.pop(f"{NAME}.{part}")


def declare(**values):
    return lambda table, config: config.update(values)


def as_32(part):
    return lambda table, config: table.update({f"{NAME}.{part}": table[f"{NAME}.{part}"].int()})


PACK, GPTQ, AWQ = Case("pack-quantized"), Case("gptq"), Case("awq", symmetric=False)
NVFP4, MXFP4, MODELOPT = CASES[-3:]


@loop(
    ("case", "change", "message"),
    [
        (PACK, drop("weight_scale"), r"without its scales: .*weight_packed is packed .* no .*weight_scale: take"),
        (Case("pack-quantized", symmetric=False), drop("weight_zero_point"), "without its zero points: .*zero_point"),
        (GPTQ, drop("scales"), r"without its scales: .*up_proj.qweight is packed \(gptq\), and there is no .*scales"),
        (GPTQ, drop("qzeros"), "without its zero points: .*qzeros"),
        (AWQ, drop("qzeros"), "without its zero points: .*qzeros"),
        (GPTQ, declare(group_size=32), r"wrong group size: .*scales \(4, 24\) has 4 groups of 64 .* of 32: corr"),
        (AWQ, declare(group_size=-1), "wrong group size: .*scales .* declares groups of 64"),
        (GPTQ, declare(bits=8), r"unsupported: .*qweight \(8, 24\) has 4 bits per value, and the config declares 8"),
        (GPTQ, declare(checkpoint_format="marlin"), "unsupported: config.json has checkpoint_format marlin; valid"),
        (AWQ, declare(version="gemv"), "unsupported: config.json has version gemv; valid are gemm"),
        (Case("gptq", auto_round=True), declare(packing_format="auto_round:fake"), "auto_round:fake; valid are"),
        (GPTQ, cut("scales"), r"mis-shaped: .*qzeros \(4, 3\), expected \(3, 3\) for a weight \(24, 64\) of 4 bits"),
        (PACK, cut("weight_packed"), r"mis-shaped: .*weight_scale \(24, 4\), expected \(23, 4\)"),
        (PACK, cut("weight_scale"), r"mis-shaped: .*weight_scale \(23, 4\), expected \(24, 4\)"),
        (AWQ, cut("qzeros"), r"mis-shaped: .*qzeros \(3, 3\), expected \(4, 3\)"),
        (GPTQ, cut("g_idx"), r"mis-shaped: .*g_idx \(63,\), expected \(64,\)"),
        (GPTQ, cut("qweight"), "wrong group size|mis-shaped"),
        (GPTQ, as_32("scales"), "wrong dtype: .*scales is I32; valid are F16, BF16, F32"),
        (NVFP4, drop("weight_global_scale"), "without its global scale: .*weight_packed .* no .*weight_global_scale"),
        (MODELOPT, drop("weight_scale_2"), "without its global scale: .*weight is packed .* no .*weight_scale_2"),
        (MXFP4, cut("weight_scale"), r"mis-shaped: .*weight_scale \(23, 2\), expected \(24, 2\)"),
        (MXFP4, drop("weight_scale"), "without its scales: .*weight_packed"),
        (NVFP4, lambda table, _: table.update({f"{NAME}.weight_packed": torch.zeros(24, 16, dtype=torch.uint8)}),
         r"mis-shaped|wrong group size"),
        (MODELOPT, lambda table, _: table.update({f"{NAME}.pre_quant_scale": torch.ones(64)}),
         "unsupported: .*pre_quant_scale .*NVFP4 with AWQ"),
        (NVFP4, lambda _, config: config["config_groups"]["group_0"]["weights"].update(symmetric=False),
         "unsupported: .* zero points"),
        (NVFP4, lambda _, config: config["config_groups"]["group_0"]["weights"].update(num_bits=6),
         "unsupported: .* declares 6"),
    ],
)  # fmt: skip
def test_bad_files(case, change, message, tmp_path):
    """Each names the tensor, what was found, what is valid and what to do."""
    weights, _ = reader(tmp_path, case, change=change)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(weights.problem(f"{NAME}.weight"))


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 24, 64]), max_size=3)
DTYPES = st.sampled_from([torch.int32, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.bool])


@pytest.mark.more
@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    case=st.sampled_from(CASES), part=st.integers(0, 4), shape=SHAPES, dtype=DTYPES, size=st.integers(-2, 70),
    value=st.integers(-9, 99),
)  # fmt: skip
def test_any_part_of_any_shape(case, part, shape, dtype, size, value, tmp_path_factory):
    """A reason, or a weight: never another exception."""

    def change(table, config):
        name = sorted(table)[part % len(table)]
        table[name] = torch.full(shape, value).to(dtype)
        config |= {"group_size": size} if size % 3 == 0 else {}

    weights, _ = reader(tmp_path_factory.mktemp("fuzz"), case, change=change)
    for name in weights.names():
        if weights.problem(name) is None:
            try:
                weight = weights.read(name)
            except CheckpointError as error:
                assert "groups from" in str(error)  # noqa: PT017
            else:
                assert tuple(weight.shape) == weights.stored(name).shape


def test_a_group_that_does_not_exist(tmp_path):
    def change(table, config):
        table[f"{NAME}.g_idx"][5] = 9

    weights, _ = reader(tmp_path, Case("gptq"), change=change)
    with pytest.raises(CheckpointError, match=r"g_idx: it has groups from 0 to 9; valid are 0 to 3"):
        weights.read(f"{NAME}.weight")


def test_loading_lists_what_is_wrong(tmp_path):
    """Not one line per expert of a model; then what the audit says to do."""
    build("glm4_moe").save(tmp_path / "model")
    weights = quantize_folder(tmp_path / "model", GPTQ)
    set_config(tmp_path / "model", quantization_config=section(GPTQ) | {"group_size": 8})
    trunk = [name for name in weights if ".layers.2." not in name]
    with pytest.raises(CheckpointError, match=rf"the trunk cannot be read, {len(trunk)} problems:\n  wrong") as caught:
        Model.load(tmp_path / "model")
    listed, advice = str(caught.value).split(f"and {len(trunk) - 20} more")
    assert listed.count("\n") == 21
    assert "Correct the quantization config" in advice


@pytest.mark.more
def test_a_head_that_cannot_be_read(tmp_path):
    build("qwen3_5").save(tmp_path / "model")
    quantize_folder(tmp_path / "model", GPTQ)
    in_one_file(tmp_path / "model", lambda table: table.pop("mtp.layers.0.mlp.up_proj.scales"))
    with pytest.raises(CheckpointError, match=r"head cannot be loaded, 1 problem:\n  without its scales: mtp.*qweight"):
        Model.load(tmp_path / "model")


def test_settings_of_single_modules(tmp_path):
    """GPTQ's `dynamic`, AutoRound's `extra_config` and a second group of compressed-tensors declare other sizes."""
    other = {"bits": 4, "group_size": 16}
    targeted = {"targets": ["re:.*up_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}
    for case, found in (
        (GPTQ, {"dynamic": {r".*up_proj$": other}, "group_size": 32}),
        (Case("gptq", auto_round=True), {"extra_config": {NAME: other}, "group_size": 32, "bits": 8}),
        (PACK, {"config_groups": section(Case("pack-quantized", 8, 0))["config_groups"] | {"group_1": targeted}}),
    ):
        weights, values = reader(tmp_path, case, change=declare(**found))
        assert torch.equal(weights.read(f"{NAME}.weight"), values.weight())


def test_bytes_of_all_parts(tmp_path):
    """What a streamed layer reads and releases."""
    weights, _ = reader(tmp_path, PACK)
    expected = sum(info.nbytes for info in Checkpoint.open(tmp_path).tensors.values())
    assert weights.num_bytes([f"{NAME}.weight"]) == weights.fetch([f"{NAME}.weight"]) == expected


@pytest.mark.more
@pytest.mark.parametrize("case", [GPTQ, NVFP4], ids=str)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_text_of_a_packed_model(backend, case, tmp_path):
    """Both backends decode it, and MTP's greedy text is that of plain decoding."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    quantize_folder(tmp_path / "model", case, is_random=False)
    model = Model.load(tmp_path / "model")
    runs = [
        generate(model, [prompt(9)], Settings(num_speculative_tokens=k, max_tokens=16), backend=backend)[0]
        for k in (0, 3)
    ]
    assert runs[0].tokens == runs[1].tokens
    assert len(runs[1].tokens) == 16


def test_files_of_gptqmodel(tmp_path):
    """Its config has the format under two names, of which old files have one, and may ask for work that is not done."""
    common = {"method": "gptq", "pack_dtype": "int32", "lm_head": False, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}

    def problem(place, case, **fields):
        def change(_, section):
            section.pop("checkpoint_format", None)
            section.update(common | fields)

        weights, values = reader(tmp_path / str(place), case, 24, 48, change)
        name = f"{NAME}.weight"
        if (text := weights.problem(name)) is None:
            assert torch.equal(weights.read(name), values.weight())
        return text

    for place, case in enumerate((Case("gptq", group=32), Case("gptq", group=32, version=2))):
        variant = "gptq_v2" if case.version == 2 else "gptq"
        assert problem(2 * place, case, format=variant) is None
        assert problem(2 * place + 1, case, format=variant, checkpoint_format=variant) is None
    assert problem(4, Case("awq", group=32, symmetric=False), format="gemm", checkpoint_format="gemm") is None
    assert "has format gptq_p; valid are gptq, gptq_v2" in problem(5, Case("gptq"), format="gptq_p")
    assert "gemv_fast; valid are gemm" in problem(6, Case("awq", symmetric=False), format="gemv_fast")
    assert "rotation hadamard: inputs of down_proj are rotated" in problem(7, Case("gptq"), rotation="hadamard")


@pytest.mark.parametrize("method", ["W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC"])
def test_modelslim(method, tmp_path):
    """int8 codes with a scale per row, by a file of its own; never codes as values."""

    def change(table, section):
        section |= {"quant_method": "ascend"}
        table[f"{NAME}.weight_offset"] = torch.zeros(24, 1)
        (tmp_path / MODELSLIM_FILE).write_text(json.dumps(dict.fromkeys(table, method)))

    weights, values = reader(tmp_path, Case("int-quantized", 8, 0), change=change)
    name = f"{NAME}.weight"
    if "W4" in method:
        assert "is 'W4A8_DYNAMIC'; valid are W8A8," in weights.problem(name)
    else:
        assert torch.equal(weights.read(name), values.weight())
    (tmp_path / MODELSLIM_FILE).unlink()
    set_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"weight is I8, and config.json names no quant_method"):
        TensorReader(Inventory.of(Checkpoint.open(tmp_path), family=by_name("qwen3_5"))).unreadable([name])


def test_inputs_narrower_than_a_group(tmp_path):
    """One group, or a last one that is cut off, in every layout."""
    for place, (layout, columns, group) in enumerate(
        (layout, *sizes)
        for layout in ("gptq", "awq", "pack-quantized", "int-quantized")
        for sizes in ((16, 32), (40, 32))
    ):
        for auto_round in (False, True) if layout in ("gptq", "awq") else (False,):
            case = Case(layout, 8 if layout == "int-quantized" else 4, group, symmetric=False, auto_round=auto_round)
            weights, values = reader(tmp_path / f"{place}-{auto_round}", case, 32, columns)
            assert torch.equal(weights.read(f"{NAME}.weight"), values.weight()), case
