"""Checkpoints: round trips in the published layouts, strict loading, and nothing half-written."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from artifacts import prefixed
from artifacts import tensors as layout_tensors
from quick import families, loop, most_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored import contents, in_one_file, set_config, tensors_of
from test_artifacts import COMPOSITES, ELSE
from tiny import BUILDS, CONFIGS, MOST, build, decode, prompt
from transformers import AutoConfig, AutoModelForCausalLM

import nextn
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.tensors import TensorReader
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.decoding.generate import generate
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import by_name
from nextn.model.load_head import head_tensors
from nextn.model.load_trunk import check_runs
from nextn.model.model import Model
from nextn.model.text_interface import read_tokenizer
from nextn.settings import Settings


@pytest.fixture
def saved(tmp_path):
    """A saved GLM-layout checkpoint, and the path of the shard that holds its head."""
    build("glm4_moe").save(tmp_path / "model")
    return tmp_path / "model", tmp_path / "model" / "model-00002-of-00002.safetensors"


def rewrite(shard, change):
    """Change the tensors of one shard, and the index with them."""
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = shard.parent / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    kept = {name: file for name, file in record["weight_map"].items() if file != shard.name}
    record["weight_map"] = kept | dict.fromkeys(tensors, shard.name)
    index.write_text(json.dumps(record))


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "modules"), families(BUILDS, most_of(MOST)))
def test_round_trip(name, modules, tmp_path):
    """save -> load -> the same tensors, bit for bit, and the same text; transformers loads the trunk unmodified."""
    model = build(name, modules=modules)
    model.save(tmp_path / "model")
    again = Model.load(tmp_path / "model")
    assert again.notes == ()
    for part in ("trunk", "head"):
        old, new = getattr(model, part).state_dict(), getattr(again, part).state_dict()
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert (
        decode(again, [prompt(9)], num_speculative_tokens=3, max_tokens=8)[0]
        == decode(model, [prompt(9)], num_speculative_tokens=3, max_tokens=8)[0]
    )
    # LongCat's layout has no tensors of experts that compute nothing, for which transformers has rows.
    trunk = type(model.trunk.model).from_pretrained(tmp_path / "model", ignore_mismatched_sizes=name == "longcat_flash")
    assert torch.equal(trunk.lm_head.weight, model.trunk.output.weight)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "modules", "fp8"),
    families(
        ((*each, fp8) for each in BUILDS for fp8 in (False, True) if not fp8 or by_name(each[0]).fp8),
        {*((*each, False) for each in most_of(MOST)), ("deepseek_v3", MOST["deepseek_v3"], True), ("qwen3_5", 1, True)},
    ),
)
def test_published_round_trip(name, modules, fp8, tmp_path):
    """bf16 and fp8 in the published layout: whole to an inventory, the same logits from one file as from shards, and
    bit for bit the same files when saved again."""
    build(name, modules=modules).save(tmp_path / "first", dtype=torch.bfloat16, fp8=fp8)
    found = Inventory.of(Checkpoint.open(tmp_path / "first"))
    assert (found.declared, found.modules, found.unrecognized) == (modules, tuple(range(modules)), ())
    small = {info.name: info for info in found.checkpoint.tensors.values() if info.dtype == "F8_E4M3"}
    assert bool(small) == fp8
    if fp8:
        plain = found.checkpoint.config["quantization_config"]["modules_to_not_convert"]
        assert {f"{module}.weight" for module in plain} <= found.checkpoint.tensors.keys() - small
        assert not [name for name in small if "conv" in name]  # a convolution is no Linear
    model = Model.load(tmp_path / "first")
    assert model.trunk.dtype == torch.bfloat16
    assert model.notes == ()
    model.save(tmp_path / "second", fp8=fp8)
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    for key in [key for key, value in first["config.json"].items() if value is None]:  # transformers fills it in
        second["config.json"][key] = None
    assert second == first
    tokens = torch.tensor([prompt(7)])
    hidden = model.trunk(tokens)
    single = Model.load(in_one_file(tmp_path / "first"))
    assert torch.equal(single.trunk(tokens).final_hidden, hidden.final_hidden)
    assert torch.equal(single.head(tokens, hidden.head_input), model.head(tokens, hidden.head_input))


def test_fp8_is_multiplied_by_its_scales(tmp_path):
    """The trunk's fp8 as transformers never reads it: blocks whose last one is cut off, as in kv_a_proj_with_mqa."""
    name, model = "model.layers.0.mlp.gate_proj.weight", build("glm4_moe", intermediate_size=160)
    model.save(tmp_path / "model", dtype=torch.bfloat16, fp8=True)
    stored = tensors_of(tmp_path / "model")
    assert stored[name].dtype == torch.float8_e4m3fn
    assert stored[name + "_scale_inv"].shape == (2, 1)
    again = Model.load(tmp_path / "model")
    old, new = (each.trunk.decoder.layers[0].mlp.gate_proj.weight for each in (model, again))
    assert torch.allclose(new.float(), old, rtol=0.07, atol=2e-3)
    section = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert section["weight_block_size"] == [128, 128]
    assert {"lm_head", "model.layers.2.eh_proj", "model.layers.1.mlp.gate"} <= set(section["modules_to_not_convert"])
    again.save(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_fp8_trunk_without_a_scale(tmp_path):
    """A weight read without its scale is off by a factor of thousands: the trunk's are looked at, too."""
    build("glm4_moe").save(tmp_path / "model", fp8=True)
    scale = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    in_one_file(tmp_path / "model", lambda table: table.pop(scale))
    with pytest.raises(CheckpointError, match=f"the trunk cannot be read, 1 problem:\n  without its scales.*{scale}"):
        Model.load(tmp_path / "model")


def test_no_published_fp8():
    with pytest.raises(FamilyError, match="no published fp8 layout"):
        replace(build("glm4_moe"), family=replace(by_name("glm4_moe"), fp8=None)).save("nowhere", fp8=True)


def test_compressed_tensors_fp8(tmp_path):
    """One scale a tensor and one a row, as compressed-tensors writes them, with scales of activations beside."""
    build("qwen3_5").save(tmp_path / "model", dtype=torch.bfloat16)
    whole, row = "model.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"

    def quantize(table):
        for name, scale in ((whole, torch.tensor(0.5)), (row, torch.full((64, 1), 0.25))):
            table |= {name: torch.ones(64, 32).to(torch.float8_e4m3fn), f"{name}_scale": scale.bfloat16()}
        table["mtp.layers.0.mlp.up_proj.input_scale"] = torch.tensor(1.0)

    in_one_file(tmp_path / "model", quantize)
    set_config(tmp_path / "model", quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    model = Model.load(tmp_path / "model")
    assert bool((model.trunk.decoder.layers[0].mlp.up_proj.weight == 0.5).all())
    assert bool((model.head.stack[0].block.mlp.up_proj.weight == 0.25).all())
    assert model.notes == ("scales of activations (1, such as mtp.layers.0.mlp.up_proj.input_scale) are not used",)


def test_a_trunk_that_cannot_be_read(tmp_path):
    """compressed-tensors' sparse weights: the error names one and says what to do."""
    build("qwen3_5").save(tmp_path / "model")

    def pack(table):
        del table["model.layers.0.mlp.up_proj.weight"]
        table["model.layers.0.mlp.up_proj.weight_packed"] = torch.zeros(64, 16, dtype=torch.int32)

    in_one_file(tmp_path / "model", pack)
    section = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}
    set_config(tmp_path / "model", quantization_config=section)
    with pytest.raises(
        CheckpointError, match=r"quantization is compressed-tensors \(model.layers.0.mlp.up_proj.weight_p"
    ):
        Model.load(tmp_path / "model")
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight_packed and others\), of which single layers cannot be read"
    ):
        Model.load(tmp_path / "model", stream=True)


def test_layers_of_a_library_that_do_not_run(saved):
    """Such as bitsandbytes' for a matrix of few rows: the error comes when the model is loaded."""
    folder = saved[0]
    model, weights = Model.load(folder), TensorReader(Inventory.of(Checkpoint.open(folder)))
    model.trunk.model.hf_quantizer = object()
    check_runs(weights, model.trunk)
    model.trunk.decoder.layers[0].self_attn.forward = None
    with pytest.raises(CheckpointError, match="transformers cannot run the trunk: TypeError"):
        check_runs(weights, model.trunk)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_without_a_declared_dtype(name, tmp_path):
    """No dtype in config.json: as stored, not as fp32."""
    build(name).save(tmp_path / "model", dtype=torch.bfloat16)
    set_config(tmp_path / "model", dtype=None)
    assert Model.load(tmp_path / "model").trunk.dtype == torch.bfloat16


def test_vision_language_wrapper(tmp_path):
    """The text model of a vision-language checkpoint, tensors behind a prefix and sizes in text_config."""
    build("qwen3_5").save(tmp_path / "model")
    text = json.loads((tmp_path / "model" / "config.json").read_text())

    def wrap(table):
        for name in [each for each in table if each.startswith("model.")]:
            table["model.language_model." + name.removeprefix("model.")] = table.pop(name)
        table["model.visual.blocks.0.norm1.weight"] = torch.ones(4)

    in_one_file(tmp_path / "model", wrap)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    again = Model.load(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(again.trunk.decoder.layers[0].mlp.up_proj.weight,
                       build("qwen3_5").trunk.decoder.layers[0].mlp.up_proj.weight)  # fmt: skip
    assert again.notes == ("only the text model (qwen3_5_text) of qwen3_5 is loaded, and would be saved",)


# What a tiny config adds to its family's layout, or leaves out of it.
BESIDE_LAYOUT = {
    "glm4_moe": r"self_attn\.([qk]_norm|[qkv]_proj\.bias)",
    "cohere2_moe": r"mlp\.shared_experts",
    "mellum": r"^model\.layers\.#\.mlp\.(gate|up|down)_proj",
    "deepseek_v4": "tid#eid",
    "qwen4_exp": r"\.ple\.",
    "ernie4_5_moe": r"(proj|proj\.#|lm_head)\.bias",
    "nemotron_h": r"^backbone\.layers\.#\.mixer\.(gate|experts|shared_experts)",
}


@loop("name", CONFIGS)
def test_published_names(name, tmp_path):
    """The file holds the names that the engines' loaders match, and no name of ours."""
    build(name, modules=MOST[name]).save(tmp_path / "model")
    names = set(json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"])
    family, wrapper = by_name(name), COMPOSITES[name][0] if name in COMPOSITES else ""
    published = {prefixed(family, each, wrapper) for each in layout_tensors(name, modules=MOST[name])}
    found, wanted = ({re.sub(r"\d+", "#", each) for each in each_of} for each_of in (names, published))
    known = rf"{ELSE.pattern}|{BESIDE_LAYOUT[name]}" if name in BESIDE_LAYOUT else ELSE.pattern
    assert [each for each in found ^ wanted if not re.search(known, each)] == []
    fused = family.experts == "fused"
    assert any(re.search(r"experts\.gate_up_proj", each) for each in names) == fused


def test_bfloat16_and_sharded(tmp_path):
    """Several trunk shards and a cast on the way out; the model in memory keeps its dtype."""
    model = build("glm4_moe")
    model.trunk.model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    model.save(tmp_path / "model", dtype=torch.bfloat16)
    assert model.trunk.dtype == torch.float32
    again = Model.load(tmp_path / "model")
    assert again.trunk.dtype == torch.bfloat16
    assert torch.equal(again.head.stack[0].projection.weight, model.head.stack[0].projection.weight.bfloat16())
    gate = again.head.stack[0].block.mlp.gate.e_score_correction_bias
    assert gate.dtype == torch.float32, "routers keep fp32 where transformers keeps it"


def test_without_copies(tmp_path):
    """copies=False leaves the shared tensors out, and loading does not miss them."""
    model = build("glm4_moe")
    model.save(tmp_path / "model", copies=False)
    assert "model.layers.2.embed_tokens.weight" not in head_tensors(model.head, copies=False)
    assert Model.load(tmp_path / "model").head is not None


def test_a_copy_that_differs_is_reported(saved):
    folder, shard = saved
    rewrite(shard, lambda tensors: tensors["model.layers.2.embed_tokens.weight"].add_(0.5))
    notes = Model.load(folder).notes
    assert len(notes) == 1
    assert "embed_tokens.weight differs from the trunk's by up to 0.5" in notes[0]


def test_every_problem_is_listed_at_once(saved):
    """Missing, unexpected, mis-shaped and a dtype that needs scales: one error that names them all."""
    folder, shard = saved

    def damage(tensors):
        del tensors["model.layers.2.eh_proj.weight"]
        tensors["model.layers.2.surprise.weight"] = torch.zeros(3)
        tensors["model.layers.2.enorm.weight"] = torch.ones(7)
        tensors["model.layers.2.hnorm.weight"] = torch.ones(32).to(torch.float8_e4m3fn)

    rewrite(shard, damage)
    with pytest.raises(CheckpointError) as caught:
        Model.load(folder)
    text = str(caught.value)
    assert "4 problems" in text
    for words in ("missing: model.layers.2.eh_proj", "unexpected: model.layers.2.surprise", "mis-shaped", "F8_E4M3"):
        assert words in text


@pytest.mark.parametrize("name", ["model.layers.2.enorm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_non_finite_weights(name, saved):
    """NaN in the head or in the trunk is an error that names the tensor."""
    folder, _ = saved
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    rewrite(folder / index[name], lambda tensors: tensors[name].view(-1)[:1].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Model.load(folder)


def test_no_head(tmp_path):
    """The head is promised and absent: an error that says so; plain decoding is still possible."""
    model = build("glm4_moe")
    model.trunk.model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"no MTP head \(glm4_moe\): config.json declares 1 MTP layer"):
        Model.load(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"`nextn audit .*`nextn restore .*model --from BASE`"):
        Model.load(tmp_path / "model")
    assert Model.load(tmp_path / "model", need_head=False).head is None


def test_a_head_that_the_config_keeps_silent_about(saved):
    """Tensors are there and the config promises none: the error must not say that they are absent."""
    folder, _ = saved
    set_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"declares|has no num_nextn.*enorm.weight are present"):
        Model.load(folder)
    assert Model.load(folder, need_head=False).head is None


def test_without_a_config(saved):
    folder, _ = saved
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is absent or empty"):
        Model.load(folder)


def test_truncated_file(saved):
    folder, shard = saved
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=shard.name):
        Model.load(folder)


def test_unknown_family(saved):
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(FamilyError, match=r"'llama' has no known MTP head.*nextn families"):
        Model.load(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_trunk_without_a_family(kind, tmp_path):
    """Plain decoding needs no family: its tokens are those of transformers' own greedy decoding."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **tokens))
    reference.save_pretrained(tmp_path)
    model = Model.load(tmp_path, need_head=False)
    assert model.head is None
    prompt = [1, 2, 3]
    (result,) = generate(model, [prompt], Settings(num_speculative_tokens=0, max_tokens=12), backend="torch")
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 3:]
    assert list(result.tokens) == expected.tolist()
    model.save(tmp_path / "saved")
    assert Model.load(tmp_path / "saved", need_head=False).family.name == "generic"
    with pytest.raises(FamilyError, match=r"decode without \(-k 0\)") as error:
        Model.load(tmp_path)
    assert len(str(error.value)) < 400


def test_a_trunk_of_another_build(tmp_path):
    """GPT-2 keeps its layers under another name: one message, no AttributeError."""
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(FamilyError, match=r"GPT2LMHeadModel .* has no `layers`"):
        Model.load(tmp_path, need_head=False)


def test_tokenizer_of_another_model(tmp_path):
    model = build("glm4_moe")
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="tokenizer has 258 tokens, the model's vocabulary 64"):
        Model.load(tmp_path / "model")


def test_tokens_that_were_added_without_rows(tmp_path):
    """As by fine-tunes that add a padding token, and in Gemma 3's text models: text without them is as before."""
    model = build("glm4_moe", vocab_size=264)
    model.tokenizer = byte_tokenizer()
    model.tokenizer.add_tokens([f"<unused{index}>" for index in range(7)])
    assert model.tokenizer.add_special_tokens({"pad_token": "[PAD]"}) == 1
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model")
    assert [note for note in loaded.notes if "264 lacks <unused6>, [PAD], added to its tokenizer" in note]
    settings = nextn.Settings(num_speculative_tokens=2, max_tokens=4)
    assert len(nextn.generate(loaded, ["def"], settings)[0].tokens) == 4
    with pytest.raises(ConfigError, match=r"vocabulary is 0\.\.263"):
        nextn.generate(loaded, ["a[PAD]"], settings)
    loaded.tokenizer.eos_token = "[PAD]"
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="tokenizer has 266 tokens, the model's vocabulary 264"):
        Model.load(tmp_path / "model")


@pytest.mark.parametrize("source", ["/nowhere/at/all", "no-such-folder", "a/b/c"])
def test_no_such_checkpoint(source):
    with pytest.raises(CheckpointError, match="neither a folder"):
        Model.load(source)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        build("glm4_moe").save(tmp_path / "file" / "model")


def test_disk_full_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """The disk fills up while the head is written: the old folder stands, nothing half-written lies beside it."""
    model = build("glm4_moe")
    model.save(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        model.save(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_replaces_the_old_folder(tmp_path):
    build("glm4_moe", seed=0).save(tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("")
    build("glm4_moe", seed=1).save(tmp_path / "model")
    again = Model.load(tmp_path / "model")
    assert torch.equal(again.trunk.output.weight, build("glm4_moe", seed=1).trunk.output.weight)
    assert not (tmp_path / "model" / "stale.txt").exists()


def test_more_modules_than_the_layout_holds():
    with pytest.raises(ConfigError, match="expected 1 to 1"):
        build("qwen3_5", modules=2)
    with pytest.raises(ConfigError, match="reads a folder"):
        Model.build("folder")


def test_the_shard_is_plain_safetensors(saved):
    folder, shard = saved
    assert len({file.stat().st_mode for file in folder.glob("*.*")}) == 1  # none for its owner alone
    with safe_open(shard, framework="pt") as file:
        assert file.metadata()["format"] == "pt"


STRANGE_TOKENIZERS = {
    "load": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "precompiled_charsmap"),
    "encode": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "no entry found",
    ),
    "many values": ({"x": [[]] * 5_000_000}, "at most 4,000,000 are read"),
}


@pytest.mark.parametrize(("change", "says"), STRANGE_TOKENIZERS.values(), ids=STRANGE_TOKENIZERS)
def test_a_tokenizer_that_panics(change, says, tmp_path):
    """A panic of tokenizers' Rust code is no Exception: it passes every handler and ends in a traceback."""
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"no readable tokenizer: .*{says}"):
        read_tokenizer(tmp_path)


AUTO_MAP = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"auto_map": AUTO_MAP, "text_config": {"model_type": "unknown"}}, "cannot load the trunk: TypeError"),
        ({"auto_map": None}, "cannot load the trunk: TypeError"),
        ({"auto_map": AUTO_MAP, "model_type": "unknown"}, "code in a checkpoint is never run"),
        ({"num_attention_heads": 0}, "cannot load the trunk: ZeroDivisionError"),
        ({"rope_parameters": 3}, "cannot load the trunk"),
    ],
)
def test_a_config_that_transformers_chokes_on(config, says, saved, monkeypatch):
    """A traceback, or a question at the terminal whether to run the checkpoint's own code."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    folder, _ = saved
    path = folder / "config.json"
    record = json.loads(path.read_text())
    inner = {"text_config": record} if config.get("model_type") == "unknown" else {}
    path.write_text(json.dumps(record | inner | config))
    with pytest.raises(CheckpointError, match=says):
        Model.load(folder)
