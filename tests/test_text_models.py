"""Models of several modalities, whose text model has a family, and names that a trunk has in memory."""

import shutil

from artifacts import load_json, publish
from quick import loop
from safetensors.torch import save_file
from stored import set_config
from test_audit import findings
from tiny import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import write_json
from nextn.family_table import by_config, lookup, outer_type

INSIDE = {
    "InternVL": ("glm4_moe", "llm_config", "language_model."),
    "Kimi": ("deepseek_v3", "text_config", "language_model."),
    "DeepSeek-VL2": ("deepseek_v3", "language_config", "language."),
    "Nemotron Omni": ("nemotron_h", "llm_config", "language_model."),
    "transformers": ("mimo", "text_config", "model.language_model."),
}


def inside(folder, name, key, prefix, **options):
    """Publish a family's checkpoint as the text model of one of another type."""

    def wrapped(table):
        options.get("change", lambda _: None)(table)
        for each in [*table]:
            stem = each.removeprefix("model.") if prefix.startswith("model.") else each
            table[prefix + stem if each.startswith(("model.", "backbone.")) or prefix[0] == "l" else each] = table.pop(
                each
            )

    publish(folder, name, change=wrapped)
    text = load_json(folder / "config.json")
    write_json(folder / "config.json", {"model_type": "other_vl", key: text, "vision_config": {"hidden_size": 8}})
    return folder


@loop("name, key, prefix", INSIDE.values(), ids=INSIDE)
def test_text_models_inside_others(name, key, prefix, tmp_path):
    """Trunk and head have the prefix of the outer model, and config.json has the text model's under any key."""
    folder = inside(tmp_path / "model", name, key, prefix)
    assert not findings(folder)
    report = audit(folder)
    assert (report.family, report.declared, report.modules) == (name, 1, (0,))
    assert any("other_vl" in each for each in report.unchecked)
    config = load_json(folder / "config.json")
    family = by_config(config)
    changed = family.with_count(config, 3) if family.max_modules is None else config
    assert (family.num_modules(changed), [*changed]) == (3 if changed is not config else 1, [*config])


def test_a_head_is_restored_into_a_text_model_inside_another(tmp_path):
    """Under the prefix of the outer model, and declared in the config of the text model."""
    base = publish(tmp_path / "base", "nemotron_h")
    head = [name for name in Checkpoint.open(base).tensors if name.startswith("mtp.")]
    lost = inside(tmp_path / "lost", "nemotron_h", "llm_config", "language_model.",
                  change=lambda table: [table.pop(name) for name in head])  # fmt: skip
    config = load_json(lost / "config.json")
    del config["llm_config"]["num_nextn_predict_layers"]
    write_json(lost / "config.json", config)
    nextn.restore(lost, base)
    assert load_json(lost / "config.json")["llm_config"]["num_nextn_predict_layers"] == 1
    assert Inventory.of(Checkpoint.open(lost)).modules == (0,)
    assert not findings(lost)


def test_outer_types():
    """Types that a row has are not named, nor a text model alone."""
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 2}
    assert outer_type({"model_type": "qwen3_5", "text_config": text}) == outer_type(text) == ""
    assert outer_type({"model_type": "other_vl", "text_config": text}) == "other_vl"
    deeper = {"model_type": "other_vl", "text_config": {"model_type": "other_text", "text_config": text}}
    assert (by_config(deeper).name, lookup(deeper, "num_hidden_layers")) == ("qwen3_5", 2)


def test_a_trunk_under_both_of_its_prefixes(tmp_path):
    """transformers, vLLM and SGLang read a Nemotron-H under model. as under backbone. (transformers' state_dict)."""

    def moved(table):
        for name in [each for each in table if each.startswith("backbone.")]:
            table["model." + name.removeprefix("backbone.")] = table.pop(name)

    assert not findings(publish(tmp_path, "nemotron_h", change=moved))


@loop("name, saved_as_published", [("bailing_hybrid", True), ("deepseek_v4", False)])
def test_a_state_dict_saved_as_it_is(name, saved_as_published, tmp_path):
    """One finding says that the names are transformers' own; what the fix does has the published ones."""
    config = AutoConfig.for_model(**(CONFIGS[name] | {"pad_token_id": 0}))
    trunk = AutoModelForCausalLM.from_config(config)
    trunk.save_pretrained(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "state")
    for file in (tmp_path / "state").glob("*.safetensors*"):
        file.unlink()
    state = {key: value.clone() for key, value in trunk.state_dict().items()}
    save_file(state, tmp_path / "state" / "model.safetensors")
    for folder in (tmp_path / "state", tmp_path / "saved"):
        set_config(folder, num_nextn_predict_layers=0)
    (found,) = findings(tmp_path / "state")
    assert (found.rule, found.severity) == ("names-unknown", "error")
    assert ("save_pretrained" in found.fix) == saved_as_published
    assert (not findings(tmp_path / "saved")) == saved_as_published
