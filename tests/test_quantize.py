"""Checkpoints of 4 and 8 bits: what is rounded and how, also by activations; that they load, nothing half-written."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Case, Values, stored
from quick import each_once
from safetensors.torch import save_file
from stored import contents, in_one_file, tensors_of
from tiny import FIXTURES, build, prompt

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.gguf_blocks import round_to_blocks, take_apart
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance
from nextn.checkpoint.quantization import QuantConfig
from nextn.checkpoint.quantized_weights import pack_codes, round_to_nearest
from nextn.checkpoint.tensors import TensorReader
from nextn.decoding.generate import generate
from nextn.decoding.rounds import Settings
from nextn.edit import quantize as module
from nextn.edit.convert import convert
from nextn.edit.quantize import quantize
from nextn.errors import CheckpointError, ConfigError
from nextn.evaluate.accuracy import input_squares
from nextn.model.model import Model
from nextn.model.packed_linear import packed_layers
from nextn.runtime.backend import backend_for

TOKENS = torch.tensor([prompt(21)])


@pytest.mark.more
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9), groups=st.integers(1, 3), bits=st.sampled_from([4, 8]), seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)  # fmt: skip
def test_rounding(rows, groups, bits, seed, dtype):
    """No worse than one scale that reaches the largest value, and packed as the format says."""
    weight = torch.randn(rows, groups * 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[0, :16] = 0
    found = round_to_nearest(weight, bits, 16)
    assert found.scales.dtype == dtype
    split = weight.float().unflatten(1, (-1, 16))
    steps = (split.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).to(dtype).float().clamp_min(1e-30)
    plain = ((split / steps).round() * steps - split).square().sum(-1)
    errors = (found.dequantize().unflatten(1, (-1, 16)) - split).square().sum(-1)
    assert bool((errors <= plain * (1 + 1e-5) + 1e-12).all())
    values = Values(found.codes.long(), found.scales, torch.zeros(rows, 1).int(), torch.zeros(1))
    expected = stored(Case("pack-quantized", bits), values)["weight_packed"]
    assert torch.equal(pack_codes(found), expected)


def test_channels_that_calibration_never_used_keep_their_weights():
    """Groups of which no channel counts are rounded as well as without importance; others are not affected by them."""
    weight, importance = torch.randn(6, 96, generator=torch.Generator().manual_seed(3)), torch.rand(96)
    importance[32:64] = 0
    found, plain = (round_to_nearest(weight, 4, 32, each).dequantize() for each in (importance, None))
    torch.testing.assert_close(found[:, 32:64], plain[:, 32:64])
    assert ((found - weight).abs() < 0.5 * weight.abs().amax()).all()


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "weights", "head_bits"),
    each_once(["qwen3_5", "glm4_moe", "deepseek_v3"], [("int8", 16), ("int4", 8), ("int4", 4), ("int8", 4)]),
)
def test_reloaded_model_computes_with_the_rounded_weights(name, weights, head_bits, tmp_path, monkeypatch):
    """The same states as of the original checkpoint with each rounded weight put back; in slices of a few rows."""
    monkeypatch.setattr(module, "_SLICE", 96)
    build(name).save(tmp_path / "model", dtype=torch.bfloat16)
    plan = quantize(tmp_path / "model", tmp_path / "out", weights=weights, group_size=16, head_bits=head_bits)
    original, packed = tensors_of(tmp_path / "model"), TensorReader(Inventory.of(Checkpoint.open(tmp_path / "out")))
    rounded = [each for each in packed.names() if packed.is_quantized(each)]
    assert {len(original[each].shape) for each in rounded} == {2}
    assert set(packed.names()) == original.keys()
    for each in rounded:
        bits = packed.integers(each).bits
        size = 16 if bits == 4 else original[each].shape[1]
        assert torch.equal(packed.read(each), round_to_nearest(original[each], bits, size).dequantize())
    in_head = [each for each in rounded if packed.inventory.family.canonical(each, packed.inventory.num_layers)]
    assert bool(in_head) == (head_bits < 16)
    assert {packed.integers(each).bits for each in in_head} <= {head_bits}
    back = {each: packed.read(each).bfloat16() for each in rounded}
    in_one_file(tmp_path / "model", lambda table: table.update(back))
    expected, found = (Model.load(tmp_path / folder).dequantize() for folder in ("model", "out"))
    with torch.inference_mode():
        states = [model.trunk(TOKENS) for model in (expected, found)]
        assert torch.equal(states[0].final_hidden, states[1].final_hidden)
        drafts = [model.head(TOKENS, states[0].head_input) for model in (expected, found)]
    assert torch.equal(*drafts)
    assert plan.num_bytes == sum(info.nbytes for info in Checkpoint.open(tmp_path / "out").tensors.values())


@pytest.mark.more
@pytest.mark.parametrize("head_bits", [16, 8, 4])
def test_what_the_config_declares(head_bits, tmp_path):
    """Every rounded module is covered, with its bits, and every other one is not; as engines read the section."""
    build("glm4_moe").save(tmp_path / "model", dtype=torch.bfloat16)
    quantize(tmp_path / "model", tmp_path / "out", weights="int4", group_size=16, head_bits=head_bits)
    checkpoint = Checkpoint.open(tmp_path / "out")
    config, reader = QuantConfig.of(checkpoint), TensorReader(Inventory.of(checkpoint))
    for name in reader.names():
        if name.endswith(".weight") and reader.checkpoint.info(name).shape[1:]:
            part = name.removesuffix(".weight")
            assert config.covers(part) == reader.is_quantized(name) or "embed" in name, name
            if name in reader.packed:
                weight = reader.integers(name)
                assert config.sections[0].format.settings(part).bits == weight.bits
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    plain = {"lm_head", "model.layers.1.mlp.gate", "model.layers.2.eh_proj"}
    assert plain <= set(section["ignore"])
    assert ("model.layers.2.self_attn.q_proj" in section["ignore"]) == (head_bits == 16)
    assert len(section["config_groups"]) == (2 if head_bits == 8 else 1)
    findings = audit(checkpoint).findings
    assert not [finding for finding in findings if finding.severity == "error"], findings


def test_joined_projections_are_declared(tmp_path):
    """SGLang's loader of this head asks the list for the joined names only."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    quantize(tmp_path / "model", tmp_path / "out", weights="int4", group_size=16)
    assert not [each for each in audit(tmp_path / "out").findings if each.rule == "quantization"]


def test_blocks_of_gguf(tmp_path):
    """Attention values have eight bits; the blocks are read as those of a file are, in both backends."""
    build("glm4_moe").save(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="group size 64; blocks of q4_1 have groups of 32"):
        quantize(tmp_path / "model", tmp_path / "out", weights="q4_1", group_size=64)
    importance = {(0, "self_attn.q_proj.weight"): torch.arange(1.0, 33)}
    quantize(tmp_path / "model", tmp_path / "out", weights="q4_1", head_bits=8, importance=importance)
    original, reader = tensors_of(tmp_path / "model"), TensorReader(Inventory.of(Checkpoint.open(tmp_path / "out")))
    rounded = [each for each in reader.names() if reader.is_quantized(each)]
    assert {each for each in rounded if ".layers.0." in each} == {
        each for each in original if ".layers.0." in each and each.endswith("proj.weight")
    }
    for each in rounded:
        kind = "Q8_0" if each.endswith("v_proj.weight") or ".layers.2." in each else "Q4_1"
        assert reader.packed[each].kind == kind, each
        counts = importance.get((0, each.removeprefix("model.layers.0.")))
        blocks = round_to_blocks(original[each], kind, counts)
        assert torch.equal(reader.read(each), take_apart(blocks, kind).dequantize()), each
    errors = [each for each in audit(Checkpoint.open(tmp_path / "out")).findings if each.severity == "error"]
    assert not errors, [f"{each.place}: {each.found}" for each in errors]
    model = Model.load(tmp_path / "out")
    assert backend_for(model, "native").name == "native"


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype, tmp_path):
    """Scales have the weight's dtype, and are before the codes in a file of float32."""
    build("qwen3_5").save(tmp_path / "model", dtype=dtype)
    quantize(tmp_path / "model", tmp_path / "out", weights="int4", group_size=16)
    name, old = "model.layers.0.mlp.up_proj.weight", tensors_of(tmp_path / "model")
    reader = TensorReader(Inventory.of(Checkpoint.open(tmp_path / "out")))
    assert reader.integers(name).scales.dtype == dtype
    assert torch.equal(reader.read(name), round_to_nearest(old[name], 4, 16).dequantize())


def test_the_record_says_where_the_head_comes_from(tmp_path):
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    quantize(tmp_path / "model", tmp_path / "out", weights="int8")
    record = Provenance.read(Checkpoint.open(tmp_path / "out"))
    assert (record.made_by, record.source) == ("quantize", str(tmp_path / "model"))
    assert record.trained_with not in ("", record.beside)


@pytest.mark.more
def test_a_model_without_a_head(tmp_path):
    """Of a type that has no family."""
    model = build("qwen3_5")
    model.head = None
    model.save(tmp_path / "model", dtype=torch.bfloat16)
    quantize(tmp_path / "model", tmp_path / "out", weights="int8", head_bits=4)
    assert not (tmp_path / "out" / "nextn.json").exists()
    Model.load(tmp_path / "out", need_head=False)


def test_rows_that_do_not_divide(tmp_path):
    """They stay as they are, and the config leaves them out; if all do, the error says why."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    plan = quantize(tmp_path / "model", tmp_path / "out", weights="int4", group_size=64)
    assert any("do not divide into groups" in note for note in plan.notes)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in section["ignore"]
    Model.load(tmp_path / "out")
    with pytest.raises(CheckpointError, match="--group-size 128 must divide their input channels"):
        quantize(tmp_path / "model", tmp_path / "other", weights="int4", group_size=128)
    assert not (tmp_path / "other").exists()


def test_bad_input(tmp_path):
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    for options in ({"weights": "int2"}, {"weights": "int4", "head_bits": 2}, {"weights": "int4", "group_size": 12}):
        with pytest.raises(
            ConfigError, match="expected weights int8, w8a8, int4 or q4_1, head bits 16, 8 or 4, and a group size"
        ):
            quantize(tmp_path / "model", tmp_path / "out", **options)
    quantize(tmp_path / "model", tmp_path / "out", weights="int8")
    with pytest.raises(CheckpointError, match=r"already quantized \(compressed-tensors\). Give the unquantized"):
        quantize(tmp_path / "out", tmp_path / "again", weights="int8")
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        quantize(tmp_path / "model", tmp_path / "out", weights="int8")
    # What optimum-quanto writes: some matrices as codes, and no quantization_config.
    in_one_file(tmp_path / "model", lambda table: _as_codes(table, "model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj, already quantized, though"):
        quantize(tmp_path / "model", tmp_path / "again", weights="int8")


def _as_codes(table, name):
    value = table.pop(name)
    table |= {f"{name}._data": value.to(torch.int8), f"{name}._scale": value[:, :1].clone()}


@pytest.mark.more
def test_interrupted_and_repeated(tmp_path, monkeypatch):
    """Nothing is left of it, and the same command then writes the same bytes as one that was not."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    calls = []

    def interrupt(done, total):
        calls.append(done)
        if len(calls) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "model", tmp_path / "out", weights="int8", on_bytes=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    for name in ("out", "other"):
        quantize(tmp_path / "model", tmp_path / name, weights="int8")
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_shards_and_index(tmp_path):
    """Every file under its name, and an index of what the files hold."""
    shutil.copytree(FIXTURES / "glm", tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "out", weights="int8", head_bits=8)
    old, new = (Checkpoint.open(tmp_path / name) for name in ("model", "out"))
    assert new.files == old.files
    assert not new.problems
    assert new.index.keys() == new.tensors.keys()
    assert sum(map(len, (old.files, old.index))) < sum(map(len, (new.files, new.index)))


def test_command(here, tmp_path):
    shutil.copytree(FIXTURES / "qwen", tmp_path / "model")
    options = ("--weights", "int8", "--group-size", 16, "--json")
    code, out, err = here("quantize", tmp_path / "model", tmp_path / "out", *options, "--dry-run")
    assert (code, (tmp_path / "out").exists()) == (0, False), err
    code, out, err = here("quantize", tmp_path / "model", tmp_path / "out", *options, "--head-bits", 8)
    assert code == 0, err
    assert not json.loads(out)["dry_run"]
    Model.load(tmp_path / "out")
    for wrong in (("--head-bits", "2"), ("--head-bits", "auto")):
        code, _, err = here("quantize", tmp_path / "model", tmp_path / "other", "--weights", "int8", *wrong)
        assert code == 2, err


@pytest.mark.more
def test_activations_of_eight_bits(tmp_path):
    """W8A8: the codes of W8A16 with a sign, natively the same text, and nothing else in the config but the scheme."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    folders = [tmp_path / "int8", tmp_path / "w8a8"]
    for folder in folders:
        quantize(tmp_path / "model", folder, weights=folder.name, head_bits=8)
    readers = [TensorReader(Inventory.of(Checkpoint.open(folder))) for folder in folders]
    assert readers[0].packed.keys() == readers[1].packed.keys()
    for name in readers[0].packed:
        assert {reader.packed[name].layout for reader in readers} == {"pack-quantized", "int-quantized"}
        assert torch.equal(readers[0].integers(name).codes, readers[1].integers(name).codes)
        assert torch.equal(readers[0].read(name), readers[1].read(name))
    section = json.loads((folders[1] / "config.json").read_text())["quantization_config"]
    activations = section["config_groups"]["group_0"]["input_activations"]
    assert (activations["strategy"], activations["dynamic"], activations["num_bits"]) == ("token", True, 8)
    plan = Settings(num_speculative_tokens=2, max_tokens=8)
    texts = [generate(Model.load(folder), [prompt(9)], plan, backend="native")[0].tokens for folder in folders]
    assert texts[0] == texts[1]
    assert not [finding for finding in audit(Checkpoint.open(folders[1])).findings if finding.severity == "error"]


def test_activations_of_eight_bits_need_weights_of_eight(tmp_path):
    with pytest.raises(ConfigError, match="expected head bits 16 or 8"):
        quantize(tmp_path / "model", tmp_path / "out", weights="w8a8", head_bits=4)


def test_a_note_says_which_engine_refuses_quantized_experts(tmp_path):
    build("glm4_moe").save(tmp_path / "model", dtype=torch.bfloat16)
    plan = quantize(tmp_path / "model", tmp_path / "out", weights="int8", dry_run=True)
    assert any("vLLM's build for CPUs has no kernel" in note for note in plan.notes)


@pytest.mark.more
def test_fused_experts(tmp_path):
    """Experts that are one tensor are quantized one by one, as those that are stored so."""
    build("qwen3_5_moe").save(tmp_path / "split")
    convert(tmp_path / "split", tmp_path / "fused", experts="fused", trunk_experts="fused")
    for name in ("split", "fused"):
        quantize(tmp_path / name, tmp_path / f"{name}-int8", weights="int8", head_bits=8)
    assert tensors_of(tmp_path / "fused-int8").keys() == tensors_of(tmp_path / "split-int8").keys()
    expected = tensors_of(tmp_path / "split-int8")
    assert all(torch.equal(value, expected[name]) for name, value in tensors_of(tmp_path / "fused-int8").items())


@pytest.mark.more
def test_experts_in_two_forms(tmp_path):
    """One of the forms is quantized, and a note names the tensors of the other, which may have other values."""
    build("qwen3_5_moe").save(tmp_path / "split")
    convert(tmp_path / "split", tmp_path / "both", experts="fused", trunk_experts="fused")
    in_one_file(tmp_path / "split"), in_one_file(tmp_path / "both")
    fused = tensors_of(tmp_path / "both")
    save_file(tensors_of(tmp_path / "split") | fused, tmp_path / "both/model.safetensors", {"format": "pt"})
    plan = quantize(tmp_path / "both", tmp_path / "int8", weights="int8", head_bits=8)
    count = sum(".experts.gate_up_proj" in name or ".experts.down_proj" in name for name in fused)
    assert any(note.startswith(f"left out: {count} tensors in another form than split: ") for note in plan.notes)
    quantize(tmp_path / "split", tmp_path / "expected", weights="int8", head_bits=8)
    assert tensors_of(tmp_path / "int8").keys() == tensors_of(tmp_path / "expected").keys()


TEXTS = [prompt(21), prompt(9)]


def streamed(folder) -> Model:
    build("glm4_moe").save(folder, dtype=torch.bfloat16)
    return Model.load(folder, skip_head=True, stream=True)


def test_squares_are_those_of_the_inputs(tmp_path):
    """Of every Linear of every layer, over all tokens of all texts."""
    found = input_squares(streamed(tmp_path / "model").trunk, TEXTS)
    model, seen = Model.load(tmp_path / "model"), {}
    layer = model.trunk.decoder.layers[1]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.setdefault(len(seen), inputs[0]))
    with torch.inference_mode():
        for text in TEXTS:
            model.trunk(torch.tensor([text]))
    rows = torch.cat([each.flatten(0, 1) for each in seen.values()]).float()
    torch.testing.assert_close(found[1, "self_attn.o_proj.weight"], rows.square().mean(0))
    linear = {f"{name}.weight" for name, part in layer.named_modules() if isinstance(part, torch.nn.Linear)}
    assert {name for index, name in found if index == 1} == linear


@pytest.mark.more
def test_files_have_the_scales_of_the_calibration(tmp_path):
    """Those of each weight are chosen by its own input; a weight without one, and the head's, count all alike."""
    squares = input_squares(streamed(tmp_path / "model").trunk, TEXTS)
    weights = dict(Model.load(tmp_path / "model").trunk.model.named_parameters())
    kept = {key: value for key, value in squares.items() if "o_proj" not in key[1]}
    quantize(tmp_path / "model", tmp_path / "out", weights="int4", group_size=16, importance=kept)
    changed = 0
    for layer in packed_layers(Model.load(tmp_path / "out").trunk):
        name, found = layer.codes.name, layer.codes.integers()
        index, path = name.removeprefix("model.layers.").split(".", 1)
        expected = round_to_nearest(weights[name].detach(), 4, 16, kept.get((int(index), path)))
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales, expected.scales)
        changed += not torch.equal(expected.scales, round_to_nearest(weights[name].detach(), 4, 16).scales)
    assert changed > 2


def test_what_counts_more_is_nearer():
    """The error of outputs is less than with equal counts, on inputs whose channels differ as the counts say."""
    draws = torch.Generator().manual_seed(0)
    weight, counts = (
        torch.randn(64, 128, generator=draws),
        torch.logspace(-3, 1, 128)[torch.randperm(128, generator=draws)],
    )
    x = torch.randn(500, 128, generator=draws) * counts.sqrt()
    errors = [(x @ (round_to_nearest(weight, 4, 32, each).dequantize() - weight).T).norm() for each in (None, counts)]
    assert errors[1] < 0.9 * errors[0]
