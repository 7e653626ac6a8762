"""Strict loading of heads and trunks, in every layout: each tensor that looks like a head's is used or reported."""

import json
from types import SimpleNamespace

import pytest
import torch
from quick import families
from safetensors.torch import load_file, save_file
from stored import INDEX, in_one_file, set_config, tensors_of
from tiny import BUILDS, build, decode, prompt
from transformers import AutoModelForCausalLM

import nextn
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.edit.convert import extract
from nextn.errors import CheckpointError
from nextn.model.model import Model
from nextn.model.stored_layout import fuse_experts, split_experts, to_runtime_layout, to_stored_layout

ENORM, PROJECTION = "model.layers.2.enorm.weight", "model.layers.2.eh_proj.weight"
HEAD_SHARD = "model-00002-of-00002.safetensors"
FP8 = torch.float8_e4m3fn


@pytest.fixture
def glm(tmp_path):
    build("glm4_moe").save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def qwen(tmp_path):
    build("qwen3_5").save(tmp_path / "model")
    return tmp_path / "model"


def refused(folder) -> list[str]:
    """The problems that loading lists, without their title and the advice below them."""
    with pytest.raises(CheckpointError) as caught:
        Model.load(folder)
    title, *lines, advice = str(caught.value).splitlines()
    assert f"the head cannot be loaded, {len(lines)} problem" in title
    assert "`nextn audit" in advice
    assert "nextn restore" in advice
    return [line.strip() for line in lines]


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "modules"), families(BUILDS))
def test_nothing_keeps_an_initial_value(name, modules, tmp_path):
    """Every number of the head comes from the file: a tensor that nobody set would not be 2."""
    built = build(name, modules=modules)
    built.save(tmp_path / "model", copies=False)

    def fill(table):
        for tensor in Inventory.of(Checkpoint.open(tmp_path / "model")).stored.values():
            table[tensor].fill_(2)

    in_one_file(tmp_path / "model", fill)
    head = Model.load(tmp_path / "model").head
    assert len(head.stack) == modules
    for key, value in head.state_dict().items():
        assert bool((value == 2).all()), key
        assert value.device.type == "cpu"
    frozen = [{key for key, value in each.named_parameters() if not value.requires_grad} for each in (head, built.head)]
    assert frozen[0] == frozen[1]


def test_a_head_alone_is_read_onto_a_trunk(glm, tmp_path):
    """The file that `extract` writes; a model it is not."""
    extract(glm, tmp_path / "head.safetensors")
    model = Model.load(glm)
    head = nextn.load_head(tmp_path / "head.safetensors", model.trunk.model)
    expected = model.head.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in head.state_dict().items())
    with pytest.raises(CheckpointError, match="a head alone; give its trunk"):
        Model.load(tmp_path / "head.safetensors")


def test_all_problems_in_one_error(qwen):
    """Ten faults of ten kinds: a loader that stops at the first makes its user try ten times."""

    def damage(table):
        mlp = "mtp.layers.0.mlp"
        del table["mtp.norm.weight"]
        table["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 32)  # a second module
        table["nextn.fc.weight"] = torch.zeros(3)
        table["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(7)
        table["mtp.layers.0.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int32)
        table["mtp.layers.0.self_attn.o_proj.weight"] = torch.zeros(32, 32).to(FP8)
        table |= {f"{mlp}.up_proj.weight": torch.zeros(64, 32).to(FP8),
                  f"{mlp}.up_proj.weight_scale_inv": torch.ones(2, 2)}  # fmt: skip
        table |= {f"{mlp}.gate_proj.weight": torch.ones(64, 32).to(FP8),
                  f"{mlp}.gate_proj.weight_scale_inv": torch.full((1, 1), float("inf"))}  # fmt: skip
        table["mtp.pre_fc_norm_embedding.weight"][3] = float("nan")
        table["model.mtp.fc.weight"] = table["mtp.fc.weight"] + 1

    in_one_file(qwen, damage)
    assert sorted(refused(qwen)) == [
        "duplicated: model.mtp.fc.weight and mtp.fc.weight differ",
        "mis-shaped: mtp.layers.0.mlp.up_proj.weight_scale_inv (2, 2), expected (1, 1) for (64, 32) in blocks of "
        "(128, 128)",
        "mis-shaped: mtp.pre_fc_norm_hidden.weight (7,), expected (32,)",
        "missing: mtp.norm.weight (32,)",
        "non-finite: mtp.layers.0.mlp.gate_proj.weight_scale_inv",
        "non-finite: mtp.pre_fc_norm_embedding.weight",
        "unexpected: mtp.layers.1.mlp.up_proj.weight (64, 32)",
        "unexpected: nextn.fc.weight, which looks like a head's, but is not a name of qwen3_5",
        "without its scales: mtp.layers.0.self_attn.o_proj.weight is F8_E4M3, and there is no "
        "mtp.layers.0.self_attn.o_proj.weight_scale_inv",
        "wrong dtype: mtp.layers.0.input_layernorm.weight is I32; valid are BF16, F16, F32, F64, and F8_E4M3 with "
        "scales",
    ]


def test_scales_without_an_fp8_weight(qwen):
    """A weight cast to bf16 without its scales, which are left over: it is not what was published."""
    in_one_file(qwen, lambda table: table.update({"mtp.fc.weight_scale_inv": torch.ones(1, 1)}))
    assert refused(qwen) == ["unexpected: mtp.fc.weight_scale_inv (1, 1)"]


def test_overflow_of_a_narrower_dtype(qwen):
    """A number that the dtype asked for cannot hold would become infinite on the way."""
    in_one_file(qwen, lambda table: table["mtp.norm.weight"].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"non-finite: mtp\.norm\.weight"):
        Model.load(qwen, dtype=torch.float16)


def test_spellings_that_agree(qwen):
    """The same bits under two names are no fault, and told."""
    in_one_file(qwen, lambda table: table.update({"model.mtp.fc.weight": table["mtp.fc.weight"].clone()}))
    assert Model.load(qwen).notes == ("model.mtp.fc.weight and mtp.fc.weight are identical",)


@pytest.mark.parametrize("extra", [0.0, 1.0])
def test_one_name_in_two_files(glm, extra):
    """A stale side file beside the shard that the index names: which one an engine reads is chance."""
    norm = load_file(glm / HEAD_SHARD)[ENORM]
    save_file({ENORM: norm + extra}, glm / "mtp.safetensors")
    if extra:
        assert refused(glm) == [f"duplicated: {ENORM} in {HEAD_SHARD} and in mtp.safetensors differ"]
    else:
        assert Model.load(glm).notes == (f"{ENORM} in {HEAD_SHARD} and in mtp.safetensors are identical",)


def test_head_in_a_side_file(glm):
    """A head in a file that the index does not name is found, and that it is there is told."""
    expected = Model.load(glm).head.state_dict()
    (glm / HEAD_SHARD).rename(glm / "mtp.safetensors")
    index = json.loads((glm / INDEX).read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != HEAD_SHARD}
    (glm / INDEX).write_text(json.dumps(index | {"weight_map": kept}))
    again = Model.load(glm)
    assert all(torch.equal(value, expected[name]) for name, value in again.head.state_dict().items())
    assert again.notes == (
        "the head is in mtp.safetensors, which the index does not list: engines that follow the index miss it",
    )


def test_the_index_names_what_is_absent(glm):
    """A file that did not arrive: the error says which, tensor by tensor."""
    table = load_file(glm / HEAD_SHARD)
    save_file({ENORM: table[ENORM]}, glm / "rest.safetensors")
    (glm / HEAD_SHARD).unlink()
    lines = refused(glm)
    assert f"missing: {PROJECTION} (32, 64); by the index it is in {HEAD_SHARD}" in lines
    assert not [line for line in lines if ENORM in line]


def test_shared_tensors_that_only_the_head_has(glm):
    """The trunk's embedding and output head left out because the head's copies hold them: they are used, and told."""
    tokens = torch.tensor([[3, 1, 4]])
    expected = Model.load(glm)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        in_one_file(glm, lambda table, name=name: table.pop(name))
    again = Model.load(glm)
    assert torch.equal(again.trunk(tokens).final_hidden, expected.trunk(tokens).final_hidden)
    assert torch.equal(again.trunk.output.weight, expected.trunk.output.weight)
    assert [note.split(":")[0] for note in again.notes] == [
        "the trunk has no model.embed_tokens.weight",
        "the trunk has no lm_head.weight",
    ]


def test_tied_output_is_not_missing(tmp_path):
    """A tied trunk stores no output head: the head's copy is compared with it, not put in its place."""
    build("glm4_moe", tie_word_embeddings=True).save(tmp_path / "model")
    assert "lm_head.weight" not in tensors_of(tmp_path / "model")
    model = Model.load(tmp_path / "model")
    assert model.notes == ()
    assert model.trunk.output.weight is model.trunk.embedding.weight


@pytest.mark.parametrize(
    ("copy", "words"),
    [
        (torch.zeros(64, 32), "embed_tokens.weight differs from the trunk's by up to"),
        (torch.zeros(8, 32), "embed_tokens.weight has shape (8, 32), the trunk's (64, 32)"),
    ],
)
def test_copies_that_differ(copy, words, glm):
    """Engines that read the copy and engines that read the trunk's draft differently."""
    in_one_file(glm, lambda table: table.update({"model.layers.2.embed_tokens.weight": copy}))
    (note,) = Model.load(glm).notes
    assert words in note


def test_a_copy_that_is_not_finite(glm):
    in_one_file(glm, lambda table: table["model.layers.2.embed_tokens.weight"].fill_(float("nan")))
    assert refused(glm) == ["non-finite: model.layers.2.embed_tokens.weight"]


def test_more_modules_than_declared(tmp_path):
    """Three modules stored and two promised: the third must not vanish."""
    build("glm4_moe", modules=3).save(tmp_path / "model")
    set_config(tmp_path / "model", num_nextn_predict_layers=2)
    lines = refused(tmp_path / "model")
    assert all(line.startswith("unexpected: model.layers.4.") for line in lines)
    assert len(lines) == len([name for name in tensors_of(tmp_path / "model") if name.startswith("model.layers.4.")])


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_wrapper_of_other_programs(name, tmp_path):
    """`language_model.model.`, as MLX and older transformers write it, loads."""
    build(name).save(tmp_path)

    def tokens():
        model = Model.load(tmp_path, dtype=torch.float32)
        return decode(model, [prompt(5)], num_speculative_tokens=2, max_tokens=8)[0]

    def wrap(table):
        for each in [each for each in table if not each.startswith("mtp.")]:
            table[f"language_model.{each}"] = table.pop(each)

    expected = tokens()
    in_one_file(tmp_path, wrap)
    assert tokens() == expected


@pytest.mark.more
@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("bailing_hybrid", marks=pytest.mark.slow)])
def test_a_wrapped_text_model_is_a_finding_where_transformers_misses_it(name, wrapper, tmp_path):
    build(name).save(tmp_path)

    def wrap(table):
        for each in [each for each in table if each.startswith("model.")]:
            table[each.replace("model.", wrapper, 1)] = table.pop(each)

    in_one_file(tmp_path, wrap)
    _, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    rules = {each.rule for each in nextn.audit(tmp_path).findings}
    assert ("names-unknown" in rules) == bool(loaded["missing_keys"])
    assert bool(loaded["missing_keys"]) == ((name, wrapper) != ("qwen3_5", "model.language_model."))


def test_a_method_that_transformers_does_not_know(tmp_path):
    """It would read the codes as values, and say that shapes differ; no package helps."""
    build("glm4_moe").save(tmp_path)

    def pack(table):
        for name in [each for each in table if "layers.0" in each and each.endswith("_proj.weight")]:
            rows, columns = table[name].shape
            table[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
            table[f"{name}_scale"] = torch.ones(rows, columns // 16)

    in_one_file(tmp_path, pack)
    set_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": []})
    with pytest.raises(CheckpointError, match=r"is modelopt .* neither transformers nor nextn reads"):
        Model.load(tmp_path)


def test_experts_round_trip():
    """Fused -> one by one -> fused is the identity, and gate comes before up."""
    state = {
        "0.block.mlp.experts.gate_up_proj": torch.randn(3, 8, 5),
        "0.block.mlp.experts.down_proj": torch.randn(3, 5, 4),
    }
    split = split_experts(state)
    assert torch.equal(split["0.block.mlp.experts.2.up_proj.weight"], state["0.block.mlp.experts.gate_up_proj"][2, 4:])
    again = fuse_experts(split)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_gate_and_up_rows_take_turns():
    """The published dense MLP is one tensor: row 0 of the gate, row 0 of the up projection, row 1 of the gate."""
    state = {"0.block.mlp.gate_proj.weight": torch.zeros(3, 2), "0.block.mlp.up_proj.weight": torch.ones(3, 2)}
    family = SimpleNamespace(interleaved_gate_up=("mlp",), separate_gate_up=(), experts="fused")
    stored = to_stored_layout(SimpleNamespace(family=family), state)
    assert stored["0.block.mlp.gate_up_proj.weight"][:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    again = to_runtime_layout(SimpleNamespace(family=family), stored)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
