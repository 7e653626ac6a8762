"""`nextn families`: found by the names that people know, with layout, what works and the engines."""

import json

import pytest
from artifacts import publish
from quick import loop
from typer.testing import CliRunner

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.cli import app
from nextn.errors import FamilyError
from nextn.family_table import by_config, rows, separate_rows, withheld
from nextn.family_table.search import families


def run(*words):
    result = CliRunner().invoke(app, ["families", *words])
    assert result.exception is None, result.exception
    return " ".join(result.output.split())


NAMES = [
    ("Qwen3.8-27B", {"qwen3_5"}),
    ("qwen3.8 27b", {"qwen3_5"}),
    ("Qwen3.8", {"qwen3_5", "qwen3_5_moe", "qwen4_exp"}),
    ("MiMo-V2.6-Distill-Qwen-9B", {"qwen3_5"}),
    ("MiMo-V2.6-Qwen-9B", {"qwen3_5"}),
    ("Ternary Bonsai 2", {"qwen3_5"}),
    ("GLM-5.3-Flash", {"glm5_next"}),
    ("glm 5.3", {"glm_moe_dsa", "glm5_next"}),
    ("GLM-4.6", {"glm4_moe", "glm4v_moe"}),
    ("deepseek r1", {"deepseek_v3"}),
    ("mimo v2.5", {"mimo_v2"}),
    ("kimi_k3", {"kimi_k3"}),
    ("gemma 4", {"gemma4_assistant"}),
    ("gemma-4-26B-A4B-it-assistant", {"gemma4_assistant"}),
    ("google/gemma-4-31B-it-assistant", {"gemma4_assistant"}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", {"qwen3_next"}),
    ("zai-org/GLM-4.7-Flash-FP8", {"glm4_moe_lite"}),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", {"nemotron_h"}),
    ("baidu/ERNIE-4.5-21B-A3B-PT", {"ernie4_5_moe"}),
    ("LGAI-EXAONE/K-EXAONE-236B-A23B", {"exaone_moe"}),
    ("inclusionAI/Ling-mini-2.0", {"bailing_moe_v2"}),
    ("Motif-Technologies/Motif-3-NVFP4", {"motif3"}),
    ("deepseek-ai/DeepSeek-V4-Flash-0731", set()),
    ("moonshotai/Kimi-VL-A3B-Instruct", set()),
    ("ibm-granite/granite-docling-258M", set()),
    ("Nemotron-3.5-Transcribe", set()),
    ("moonshotai/Kimi-Linear-48B-A3B-Instruct", set()),
]


@loop(("words", "names"), NAMES)
def test_names_that_people_know(words, names):
    assert {row.name for row in families(words).families} == names


def test_all_and_one():
    everything = json.loads(run("--json"))
    assert [each["name"] for each in everything["families"]] == [row.name for row in (*rows(), *separate_rows())]
    (one,) = json.loads(run("glm5_next", "--json"))["families"]
    assert one["layout"] == "model.layers.{layer}"
    assert one["engines"]["sglang"] == "runs"
    assert "decode" in one["works"]
    assert "audit" in json.loads(run("mimo", "7b", "--json"))["families"][0]["works"]
    text = run("glm", "5.3", "flash")
    assert "glm5_next" in text
    assert "SGLang" in text


def test_nothing_found_is_an_error():
    for words in ("no such model", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "zai-org/GLM-4-9B", "Qwen/Qwen3-30B-A3B"):
        result = CliRunner().invoke(app, ["families", words])
        assert isinstance(result.exception, FamilyError), words
        assert words in str(result.exception)


@loop("kind", ["minimax_m2", "kimi_k2", "kimi_k25", "kimi_vl", "kimi_linear"])
def test_what_was_never_published(tmp_path_factory, kind):
    """Neither lost nor damaged, whatever the config declares; no command looks for it."""
    folder = publish(
        tmp_path_factory.mktemp("m"), "deepseek_v3", modules=0,
        config={"model_type": kind, "num_mtp_modules": 3, "use_mtp": True, "num_mtp_layers": 1},
    )  # fmt: skip
    report = audit(Checkpoint.open(folder))
    assert report.clean
    (found,) = (each for each in report.findings if each.rule == "head-withheld")
    assert "published no MTP head" in found.found
    assert "num_mtp_modules = 3" in found.found
    assert not any(each.rule == "head-absent" for each in report.findings)
    with pytest.raises(FamilyError, match="published no MTP head"):
        by_config({"model_type": kind, "num_mtp_modules": 3})
    assert "published no MTP head" in run(kind)


def test_a_count_in_an_unknown_model(tmp_path):
    """A config declares a head that nobody has seen."""
    config = {"model_type": "unseen_moe", "num_nextn_predict_layers": 1}
    report = audit(Checkpoint.open(publish(tmp_path, "deepseek_v3", modules=0, config=config)))
    assert [each.rule for each in report.findings] == ["head-withheld"]
    assert "nextn knows none that was published" in report.findings[0].found


def test_the_audit_says_which_models(tmp_path):
    report = audit(Checkpoint.open(publish(tmp_path, "glm4_moe")))
    assert report.title == "GLM-4.5 / 4.6 / 4.7 (and Air)"


def test_the_outer_model_type_counts():
    """A Kimi-K3, which has a head, has a text model of the type of one that has none."""
    text = {"model_type": "kimi_linear"}
    assert withheld({"model_type": "kimi_k3", "text_config": text}) is None
    assert withheld({"model_type": "other", "text_config": text}) is withheld(text)
    assert withheld(text) is not None
