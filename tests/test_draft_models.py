"""Draft models that are no MTP head: recognized, named with who runs them, and left alone by every command."""

import json
import re

import gguf
import numpy as np
import pytest
from artifacts import publish
from quick import loop
from typer.testing import CliRunner

from nextn.audit_rules import audit
from nextn.audit_rules.gguf import audit_gguf
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.draft_models import DRAFT_MODELS, standalone, stored
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor, write_safetensors
from nextn.cli import app
from nextn.edit.convert import convert
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, NextnError

# architectures, further config, names of tensors -> the kind; as released models and the engines' registries have them.
STANDALONE = [
    (["LlamaForCausalLMEagle3"], {}, [], "EAGLE-3"),
    (["LlamaEagle3DraftModel"], {}, [], "EAGLE-3"),
    (["Eagle3DeepseekV2ForCausalLM"], {}, [], "EAGLE-3"),
    (["EagleLlamaForCausalLM"], {}, [], "EAGLE-3"),
    (["MistralLarge3ForCausalLMEagle"], {}, [], "EAGLE-3"),
    (["LlamaForCausalLM"], {}, ["midlayer.hidden_norm.weight", "fc.weight", "d2t", "t2d"], "EAGLE-3"),
    (["PEagleDraftModel"], {}, [], "P-EAGLE"),
    (["PeagleQwen3ForCausalLM"], {}, [], "P-EAGLE"),
    (["LlamaForCausalLM"], {}, ["midlayer.hidden_norm.weight", "mask_hidden"], "P-EAGLE"),
    (["DFlashDraftModel"], {}, [], "DFlash"),
    (["DFlash2DraftModel"], {}, [], "DFlash"),
    (["MuseGlimmerAssistantModel"], {}, [], "DFlash"),
    (["Qwen3ForCausalLM"], {"dflash_config": {"target_layer_ids": [1]}}, [], "DFlash"),
    (None, {"model_type": "qwen3"}, ["fc.weight", "hidden_norm.weight", "layers.0.mlp.up_proj.weight"], "DFlash"),
    (["Qwen3DSparkModel"], {}, [], "DSpark"),
    (["Lfm2DSparkDraftModel"], {}, [], "DSpark"),
    (["LingDSparkModel"], {}, [], "DSpark"),
    (["DSparkSpeculator"], {}, [], "DSpark"),
    (None, {}, ["fc.weight", "markov_head.markov_w1.weight"], "DSpark"),
    (None, {"model_type": "qwen3_5_mtp"}, ["fc.weight", "norm.weight", "pre_fc_norm_hidden.weight"], "mlx-vlm"),
    (None, {"model_type": "glm4_moe_lite_mtp"}, ["model.hnorm.weight", "model.mtp_block.mlp.gate.weight"], "mlx-vlm"),
    (None, {"model_type": "qwen3_5"}, ["mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight"], None),
    (["Gemma4AssistantForCausalLM"], {"model_type": "gemma4_assistant"}, [], None),
    (["MedusaModel"], {}, [], "Medusa"),
    (None, {"medusa_num_heads": 5}, [], "Medusa"),
    (None, {}, ["0.0.linear.weight", "0.1.weight"], "Medusa"),
    (None, {"speculators_model_type": "mlp"}, [], "speculators"),
    (["Eagle2_5_VLForConditionalGeneration"], {}, [], None),
    (["Eagle3_VLForConditionalGeneration"], {}, [], None),
    (["DeepseekV4ForCausalLM"], {"dspark_block_size": 5}, ["mtp.2.markov_head.markov_w1.weight"], None),
    (["Gemma4ForConditionalGeneration"], {}, ["model.layers.0.mlp.up_proj.weight"], None),
    (["LlamaForCausalLM"], {}, ["model.layers.0.hidden_norm.weight", "lm_head.weight"], None),
]


@loop(("classes", "config", "names", "kind"), STANDALONE)
def test_standalone(classes, config, names, kind):
    found = standalone({"architectures": classes, **config}, names)
    assert (found and found.name) == kind


def test_kinds_have_names_and_sentences():
    assert len({kind.name for kind in DRAFT_MODELS}) == len(DRAFT_MODELS)
    for kind in DRAFT_MODELS:
        assert kind.sentence.startswith("this is a")
        assert "\n" not in kind.sentence


@pytest.mark.more
def test_a_draft_model_of_its_own_says_who_runs_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    write_safetensors(tmp_path / "model.safetensors", {"fc.weight": RawTensor("F32", (1,), lambda: iter([bytes(4)]))})
    commands = (["audit", tmp_path], ["restore", tmp_path, "--from", "tiny"], ["convert", tmp_path, tmp_path / "out"],
                ["measure", tmp_path], ["train", tmp_path / "run", "--from", tmp_path, "--freeze-trunk"])  # fmt: skip
    for command in commands:
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert isinstance(result.exception, NextnError), (command, result.output)
        assert result.exception.exit_code == 2
        assert "DFlash draft model" in str(result.exception)
        assert "method dflash" in str(result.exception)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "run").exists()


@loop(("arch", "what"), [("eagle3", "EAGLE"), ("dflash", "DFlash"), ("gemma4_mtp", "Gemma 4 assistant")])
def test_gguf(tmp_path_factory, arch, what):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_tensor("fc.weight", np.ones((4, 4), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=what):
        audit_gguf(path)


DSPARK = {"dspark_block_size": 5, "dspark_markov_rank": 4, "dspark_target_layer_ids": [0, 1]}
MTP_PARTS = ("enorm", "hnorm", "e_proj", "h_proj")
# Of DeepSeek-V4-Flash-0731: three blocks; the projection in the first, final norm and heads in the last.
ONLY_DSPARK = ("mtp.0.main_proj.weight", "mtp.0.main_norm.weight", "mtp.2.markov_head.markov_w1.weight",
               "mtp.2.markov_head.markov_w2.weight", "mtp.2.confidence_head.proj.weight")  # fmt: skip


def stages(first):
    """Turn the three MTP modules from `mtp.<first>.` on into DSpark's stages, which have the same kind of block."""

    def change(table):
        for name in list(table):
            _, stage, rest = name.split(".", 2) if name.startswith("mtp.") else ("", "-1", "")
            if int(stage) >= first and rest.startswith(MTP_PARTS):
                del table[name]
        for name in ONLY_DSPARK:
            _, stage, rest = name.split(".", 2)
            table[f"mtp.{int(stage) + first}.{rest}"] = RawTensor("BF16", (4,), bytes(8))

    return change


def released(folder, *, first=0, config=DSPARK, change=None, copies=False):
    def both(table):
        stages(first)(table)
        if change is not None:
            change(table)

    return publish(folder, "deepseek_v4", modules=first + 3, copies=copies, config={
        "num_nextn_predict_layers": 1, **config}, change=both)  # fmt: skip


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    return released(tmp_path_factory.mktemp("flash"))


def test_stages_under_mtp_names_are_no_modules(flash):
    """One such checkpoint, with 4705 tensors under mtp., has num_nextn_predict_layers = 1 and no MTP head."""
    inventory = Inventory.of(Checkpoint.open(flash))
    assert inventory.draft_model.kind.name == "DSpark"
    assert inventory.draft_model.names == {name for name in inventory.checkpoint.tensors if name.startswith("mtp.")}
    assert (inventory.declared, inventory.modules, inventory.unrecognized) == (0, (), ())
    report = audit(inventory.checkpoint)
    assert [each.rule for each in report.findings] == ["draft-model-stored"]
    assert report.clean
    assert "method dspark" in report.findings[0].found
    assert any("of the DSpark draft model" in line for line in report.unchecked)


def test_a_part_of_the_stages_is_enough(tmp_path):
    """Config without its fields, or tensors without the heads: either is a sign."""
    one = released(tmp_path / "a", config={})
    two = released(tmp_path / "b", change=lambda table: [table.pop(name) for name in ONLY_DSPARK])
    for folder in (one, two):
        assert [each.rule for each in audit(Checkpoint.open(folder)).findings] == ["draft-model-stored"]


def test_stages_that_were_lost(tmp_path):
    """As after a fine-tuning that saved transformers' modules alone."""
    folder = publish(tmp_path, "deepseek_v4", modules=0, config=DSPARK)
    found = {each.rule: each for each in audit(Checkpoint.open(folder)).findings}
    assert found["draft-model-absent"].severity == "warning"
    assert "dspark_block_size" in found["draft-model-absent"].place
    assert "head-absent" not in found


@pytest.mark.more
def test_commands_refuse_with_the_reason(flash, tmp_path):
    base = publish(tmp_path / "base", "deepseek_v4", copies=False)
    log = tmp_path / "engine.log"
    log.write_text(
        "INFO [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 1.50, Accepted throughput: 20.0 tokens/s, "
        "Drafted throughput: 40.0 tokens/s, Accepted: 100 tokens, Drafted: 200 tokens, Per-position acceptance rate: "
        "0.500, Avg Draft acceptance rate: 50.0%\n"
    )
    before = {path: path.read_bytes() for path in flash.iterdir()}
    commands = (
        ["restore", flash, "--from", base], ["restore", base, "--from", flash, "--force"], ["measure", flash],
        ["convert", flash, tmp_path / "out", "--experts", "fused"], ["extract", flash, tmp_path / "h.safetensors"],
        ["train", tmp_path / "run", "--from", flash, "--freeze-trunk"],
        ["train", tmp_path / "run", "--from", flash, "--freeze-trunk", "--init-head"],
        ["serve", flash, "--print", "vllm"], ["diagnose", flash, "--engine", log, "-k", "1"],
    )  # fmt: skip
    for command in commands:
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert isinstance(result.exception, NextnError), (command, result.output, result.exception)
        assert result.exception.exit_code == 2, command
        assert "no MTP head: " in str(result.exception), (command, str(result.exception))
        assert "DSpark" in str(result.exception), command
    assert {path: path.read_bytes() for path in flash.iterdir()} == before
    assert not (tmp_path / "out").exists()


def without_parts(table):
    for name in [name for name in table if re.search("main_proj|main_norm|markov_head|confidence_head", name)]:
        del table[name]


@pytest.mark.more
@pytest.mark.parametrize("change", [None, without_parts])
def test_a_file_with_both(change, tmp_path):
    """MTP module 0, and stages behind it: the head is audited, replaced and converted, the stages keep their bytes."""
    folder = released(tmp_path / "both", first=1, copies=True, change=change)
    inventory = Inventory.of(Checkpoint.open(folder))
    assert (inventory.declared, inventory.modules) == (1, (0,))
    assert len(inventory.draft_model.names) > len(ONLY_DSPARK)
    assert {each.rule for each in audit(inventory.checkpoint).findings if each.severity != "note"} == set()
    stays = {name: inventory.checkpoint.read_bytes(name) for name in inventory.draft_model.names}
    convert(folder, tmp_path / "out", experts="fused")
    after = Checkpoint.open(tmp_path / "out")
    assert {name: after.read_bytes(name) for name in stays} == stays
    assert Inventory.of(after).family.experts == "fused"


@pytest.mark.more
@loop("root", ["mtp_dspark.", "model.mtp_dspark."])
def test_names_of_its_own(tmp_path_factory, root):
    """Mistral-Large-4's stages lie beside whatever head there is, which comes and goes without them."""
    path = tmp_path_factory.mktemp("own")
    names = [f"{root}layers.0.attention.wq.weight", f"{root}markov_head.w1.weight"]

    def more(table):
        table |= {name: RawTensor("BF16", (4,), bytes(8)) for name in names}

    base = publish(path / "base", "glm4_moe", copies=False)
    folder = publish(path / "lost", "glm4_moe", modules=0, change=more, config={"num_nextn_predict_layers": 1})
    found = [each.rule for each in audit(Checkpoint.open(folder)).findings]
    assert "head-absent" in found
    assert "draft-model-stored" in found
    restore(folder, base)
    report = audit(Checkpoint.open(folder))
    assert report.modules == (0,)
    assert report.clean
    assert set(names) <= set(Checkpoint.open(folder).tensors)


@loop("model_type", ["mistral_large4", "deepseek_v41", "llama"])
def test_models_without_a_family(tmp_path_factory, model_type):
    stage = {"mtp_dspark.layers.0.q.weight": RawTensor("BF16", (4,), bytes(8))}
    folder = publish(
        tmp_path_factory.mktemp("m"), "deepseek_v3", modules=0, config={"model_type": model_type},
        change=lambda table: table.update(stage),
    )  # fmt: skip
    report = audit(Checkpoint.open(folder))
    assert [each.rule for each in report.findings] == ["draft-model-stored"]
    assert report.clean


def test_heads_are_not_taken_for_draft_models():
    """An MTP module that lost its norms is a damaged head, not a draft model, unless something says so."""
    assert stored(["mtp.0.attn.wkv.weight", "mtp.0.norm.weight"], {}) is None
    assert stored(["mtp.layers.0.mlp.up_proj.weight", "model.mtp.layers.0.enorm.weight"], {}) is None
    assert stored(["model.layers.0.main_proj.weight"], {}) is None
