"""Published curves: what the data file holds, which curve fits, and the conditions that are named."""

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from quick import loop
from tiny import FIXTURES

import nextn
from nextn.errors import ConfigError, NextnError
from nextn.evaluate.published_curves import (
    MeasuredCurve,
    PublishedCurve,
    check_shared,
    curves_of,
    fitting_curve,
    published_curves,
    read_curves,
)
from nextn.evaluate.reference_report import ReferenceReport
from nextn.family_table.rows import FAMILIES

HERE = MeasuredCurve(
    name="T=1 argmax", lengths={"1": 1.5, "2": 1.7, "code": 1.7}, source="org/mine", precision="bfloat16",
    thinking=None, temperature=1.0, prompts="built-in, 16 prompts", max_tokens=256, num_speculative_tokens=2,
    rates={"1": (0.55,), "2": (0.5, 0.4)},
)  # fmt: skip
KS = tuple("12345678")


def fitting(source, family, *, thinking=None, temperature=1.0, measured=KS, precision=None, size=None):
    curves = curves_of([source], family, size)
    here = replace(HERE, thinking=thinking, temperature=temperature, precision=precision)
    return fitting_curve(curves, [source], replace(here, lengths=dict.fromkeys(measured, 1.5)))


def test_data_file():
    """Each curve has a source, AL within 1 and K + 1 that rises but for noise, rates, and a family that exists."""
    curves = published_curves()
    assert len(curves) >= 14
    families = {family.name for family in FAMILIES}
    for curve in curves:
        assert all(1 <= length <= int(k) + 1 for k, length in curve.lengths.items())
        assert all(after > before - 0.3 for before, after in pairwise(curve.lengths.values()))
        assert curve.run or curve.rates
        assert all(0 < rate < 1 for rate in curve.rates)
        assert curve.source.startswith("https://")
        assert curve.family is None or curve.family in families
    keys = [(curve.model, curve.draft, curve.thinking, curve.precision, curve.prompts) for curve in curves]
    assert len(set(keys)) == len(keys)
    deepseek = next(curve for curve in curves if curve.model == "DeepSeek-V4-Pro" and curve.thinking)
    assert (deepseek.lengths["3"], deepseek.lengths["8"]) == (2.49, 2.58)
    assert len({curve.model for curve in curves if curve.rates}) >= 5


@loop(
    "model, num_depths, length",
    (
        ("Nemotron-3-Super-120B-A12B", 3, 2.55),
        ("GLM-5.3-Flash", 3, 2.94),
        ("Qwen3.6-27B", 3, 3.15),
        ("Qwen3.6-27B", 6, 4.74),
        ("Qwen3-Next-80B-A3B-Instruct", 3, 3.01),
        ("MiMo-7B-Base", 2, 2.06),
        ("Inkling", 8, 4.40),
        ("GLM-5", 1, 1.95),
        ("Qwen3.8-27B", 3, 2.65),
    ),
)
def test_rates_are_conditional(model, num_depths, length):
    """AL that follows from them is the one that the source states of the same rounds."""
    curves = [curve for curve in published_curves() if curve.model == model and len(curve.rates) == num_depths]
    assert [round(curve.lengths[str(num_depths)], 2) for curve in curves] == [length]


@pytest.mark.parametrize(
    ("source", "family", "thinking", "expected"),
    [
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "qwen3_5_moe", True, ("Qwen3.5-397B-A17B", "MTP", True)),
        ("models/qwen3.6-35b-a3b", "qwen3_5_moe", None, ("Qwen3.6-35B-A3B", "MTP", None)),
        ("x/DeepSeek-V4-Pro-0813", "deepseek_v4", True, ("DeepSeek-V4-Pro-0813", "DSpark, probabilistic drafts", True)),
        ("x/DeepSeek-V4-Pro", "deepseek_v4", False, ("DeepSeek-V4-Pro", "MTP", False)),
        ("moonshotai/Kimi-K2.5", "generic", None, ("Kimi-K2.5", "EAGLE-3", True)),
        ("Qwen/Qwen3.8-Flash-Next-FP8", "qwen4_exp", None, ("Qwen3.8-Flash-Next", "MTP", True)),
    ],
)
def test_the_curve_that_fits(source, family, thinking, expected):
    curve = fitting(source, family, thinking=thinking)
    assert (curve.model, curve.draft, curve.thinking) == expected


def test_precision_and_the_k_that_were_measured():
    for precision, length in (("bfloat16", 2.51), ("FP8", 2.52)):
        assert fitting("Qwen/Qwen3.8-27B", "qwen3_5", precision=precision).lengths["3"] == length
    assert fitting("Qwen/Qwen3.8-27B", "qwen3_5").lengths["3"] == 2.51  # before those that state less
    assert fitting("Qwen/Qwen3.8-Flash-Next", "qwen4_exp", measured=["7"]) is None
    assert fitting("Qwen/Qwen3.5-397B-A17B", "qwen3_5_moe", measured=["5"]).lengths["5"] == 4.41


@loop(
    "name, family, size",
    (
        ("org/SmolLM2-135M", "generic", None),
        ("org/mine", "qwen3_5_moe", None),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", (2048, 40)),
        ("Qwen/Qwen3.5-27B", "qwen3_5", (5120, 64)),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3_next", (2048, 48)),
        ("zai-org/GLM-5.1", "glm_moe_dsa", None),
        ("org/GLM-5-9B", "glm_moe_dsa", None),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek_v3", (7168, 61)),
        ("deepseek-ai/DeepSeek-R1", "deepseek_v3", (7168, 61)),
        ("deepseek-ai/DeepSeek-V30", "deepseek_v3", None),
        ("org/MiniMiMo-7B-Base", "mimo", None),
        ("org/Intern-S2", "qwen3_5", (5120, 64)),
        ("org/DeepSeek-V2", "qwen3_5", (5120, 64)),
        ("XiaomiMiMo/MiMo-7B-RL", "mimo", (4096, 36)),
        ("thinkingmachines/Inkling-Small", "inkling", None),
        ("/models/Qwen3.8-27B/mine-llama", "generic", (4096, 32)),
    ),
)
def test_none_fits(name, family, size):
    """Another size or version of the family is another model, and so is what is in a folder of another's name."""
    assert fitting(name, family, temperature=0.0, size=size) is None


@loop("path", ("/m/Qwen3.8-27B/", "/c/models--Qwen--Qwen3.8-27B/snapshots/0a1b", "/m/Qwen3.8-27B/model.safetensors"))
def test_paths_of_a_model(path):
    assert {curve.model for curve in curves_of([path], "generic")} == {"Qwen3.8-27B"}


@loop("name", ("mine-v2", "qwen-mine", "myqwen3", "/models/Qwen3.5/mine"))
def test_names_of_no_released_model(name):
    """Equal sizes may be of the model that it was made from."""
    assert curves_of([name], "qwen3_5", (5120, 64))


def test_a_model_that_it_may_be_made_from():
    """By the name of its base, or by the sizes of a model of its family."""
    by_base = {curve.model for curve in curves_of(["mine", "deepseek-ai/DeepSeek-V3-0324"], "deepseek_v3")}
    assert by_base == {"DeepSeek-V3"}
    assert {curve.model for curve in curves_of(["mine"], "qwen3_5", (5120, 64))} == {"Qwen3.6-27B", "Qwen3.8-27B"}
    assert curves_of(["mine"], "qwen3_5", (64, 4)) == curves_of(["mine"], "qwen3_next", (5120, 64)) == []


def test_no_pair_of_figures():
    """What was not measured is not shown."""
    curve = PublishedCurve.of_record({"model": "m", "rates": [0.8, 0.5], "source": "s"})
    nan = float("nan")
    assert curve.figures(replace(HERE, lengths={"2": nan}, rates={"2": (nan, nan)})) == ""
    assert curve.figures(replace(HERE, lengths={}, rates={"2": (0.5, nan)})) == "a_1 0.50 (published 0.80)"


def test_what_has_figures_is_shown():
    """Of the curves, and of the temperatures that were measured; others are passed over, though they fit better."""
    nan = float("nan")
    unknown = replace(HERE, lengths={}, rates={"2": (nan, nan)})
    measured = {0.0: replace(HERE, temperature=0.0), 1.0: unknown}
    report = SimpleNamespace(plan=SimpleNamespace(temperatures=(0.0, 1.0)), scored=measured, _names=("m",),
                             _measured_curve=measured.get)  # fmt: skip
    curves = [PublishedCurve("other", {"2": 2.0}, "s"), PublishedCurve("m", {"5": 2.0}, "s", temperature=1.0)]
    curve, shown = ReferenceReport.beside(report, [*curves, replace(curves[1], rates=(0.8,))])
    assert (curve.rates, shown.temperature) == ((0.8,), 0.0)
    report.scored = {1.0: unknown}
    assert ReferenceReport.beside(report, curves) is None


def test_rates_are_shown():
    """At the published K, or at the largest that was measured, which is then a difference; AL at an equal K only."""
    curve = PublishedCurve.of_record({"model": "m", "rates": [0.8, 0.5, 0.25], "source": "s", "draft": "MTP"})
    assert curve.lengths == {"3": 2.3}
    text = curve.text(HERE)
    assert text.startswith("T=1 argmax: a_1 0.50, a_2 0.40 (published 0.80, 0.50); m, s; differs: ")
    assert "K 3 (here 2)" in text
    deeper = replace(HERE, lengths={"3": 1.5, "4": 1.6}, num_speculative_tokens=4, rates={"3": (0.6, 0.5, 0.4)})
    text = curve.text(deeper)
    assert "AL 1.50 at K = 3 (published 2.30); a_1 0.60, a_2 0.50, a_3 0.40 (published 0.80, 0.50, 0.25)" in text
    assert "; K " not in text
    chosen = fitting_curve([curve], ["m"], HERE)
    assert chosen is curve
    assert curve.as_record(HERE)["rates"] == (0.8, 0.5, 0.25)


def test_conditions_that_differ_are_named():
    curve = fitting("Qwen/Qwen3.5-397B-A17B", "qwen3_5_moe")
    text = curve.text(HERE)
    assert text.startswith("T=1 argmax: AL 1.50 at K = 1 (published 1.93), 1.70 at K = 2 (published 2.73); Qwen3.5")
    for words in ("model Qwen3.5-397B-A17B (here org/mine)", "thinking on (here the template's default)", "here 256"):
        assert words in text
    assert "draft MTP" not in text  # alike
    assert curve.as_record(HERE)["differences"] == curve.differences(HERE)


def test_measure_shows_it(here, tmp_path, monkeypatch):
    """For a checkpoint of that name, or made from it; not for another one of the family."""
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2, 3, 4, 5]}\n' * 2)
    options = ("--prompts", tmp_path / "p.jsonl", "-k", 1, "--max-tokens", 4, "--backend", "torch", "--temperatures", 1)
    tuned, named = tmp_path / "tuned", tmp_path / "DeepSeek-V4-Pro"
    for folder in (tuned, named):
        shutil.copytree(FIXTURES / "v4", folder)
    (tuned / "README.md").write_text("---\nbase_model: deepseek-ai/DeepSeek-V4-Pro\n---\n")
    code, out, _ = here("measure", tuned, *options)
    assert code == 0
    assert "published, for comparison only: T=1 argmax: AL" in out
    assert "(published 1.79); DeepSeek-V4-Pro" in out
    code, out, _ = here("measure", named, *options, "--json")
    assert json.loads(out)["published"]["run"] == "27180633016"
    code, out, _ = here("measure", FIXTURES / "v4", *options, "--json")
    assert "published" not in json.loads(out)
    alike = PublishedCurve("m", {"1": 1.5}, "s", family="deepseek_v4", size=(64, 2))
    monkeypatch.setattr("nextn.evaluate.published_curves.published_curves", lambda: (alike,))
    code, out, _ = here("measure", FIXTURES / "v4", *options, "--json")
    assert json.loads(out)["published"]["model"] == "m"


def test_diagnose_shows_it(here, tmp_path):
    """By the base that the files name; the same checkpoint without is not compared."""
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2, 3, 4, 5]}\n' * 2)
    (tmp_path / "m.txt").write_text(
        "vllm:spec_decode_num_drafts_total 100\nvllm:spec_decode_num_draft_tokens_total 100\n"
        "vllm:spec_decode_num_accepted_tokens_total 40\n"
    )
    tuned = shutil.copytree(FIXTURES / "v4", tmp_path / "tuned")
    options = ("--engine", tmp_path / "m.txt", "--prompts", tmp_path / "p.jsonl", "--max-tokens", 4)
    options += ("--backend", "torch")
    assert "published, for comparison only" not in here("diagnose", tuned, *options)[1]
    (tuned / "README.md").write_text("---\nbase_model: deepseek-ai/DeepSeek-V4-Pro\n---\n")
    assert "published, for comparison only: greedy: AL" in here("diagnose", tuned, *options)[1]
    plan = nextn.ReferencePlan(temperatures=(0.0,), max_tokens=4, backend="torch")
    found = nextn.diagnose(str(tuned), str(tmp_path / "m.txt"), [[1, 2, 3, 4, 5]], plan)
    assert found.reference.published[0].model == "DeepSeek-V4-Pro"


def golden(folder, text):
    path = folder / "golden.yaml"
    path.write_text(text)
    return path


def test_comments_state_conditions(tmp_path):
    """In the forms that InferenceX's files have; those of one mode are not the other's."""
    both = golden(
        tmp_path,
        "# Acceptance Length (AL) reference values measured with SPEED-Bench.\n"
        "# dataset: coding | output_len: 4096\n"
        '# thinking_on : temp 0.6 top_p 0.95 top_k 20 | chat_template_kwargs: {"enable_thinking": true}\n'
        "# thinking_off: temperature=0.7, top_p=0.8\n"
        "# Measured on some-model (B300, vLLM MTP), per num_speculative_tokens.\n"
        "# key = num_speculative_tokens (MTP level); value = golden AL\n"
        "some-model:\n  thinking_on:\n    1: 1.93\n    2: N/A\n    3: 3.39\n  thinking_off:\n    3: 3.33  # AR=0.7\n",
    )
    on, off = read_curves(both)
    shared = {"model": "some-model", "source": str(both), "draft": "MTP", "prompts": "coding", "max_tokens": 4096,
              "engine": "B300, vLLM MTP"}  # fmt: skip
    mine = {"thinking": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert on == PublishedCurve(**shared, lengths={"1": 1.93, "3": 3.39}, **mine)
    assert off == PublishedCurve(**shared, lengths={"3": 3.33}, thinking=False, temperature=0.7, top_p=0.8)
    differences = "; ".join(off.differences(HERE))
    assert "top_p 0.8 (here 1); top_k not stated (here 0)" in differences
    assert "precision not stated (here bfloat16)" in differences


def test_files_without_modes(tmp_path):
    """K directly below the model, and the list of older files; nothing is stated."""
    for block in ("\n  1: 1.9\n  2: 2.6\n", " [{1: 1.9}, {2: 2.6}]\n"):
        (curve,) = read_curves(golden(tmp_path, f"m:{block}"))
        assert curve == PublishedCurve("m", {"1": 1.9, "2": 2.6}, curve.source)


@loop(
    "text, message",
    (
        ("just words", "a str; expected models"),
        ("m: 3", "m is a int"),
        ("m: {thinking_on: [3]}", "m, thinking_on is a list"),
        ("m: {3: 4.5}", "AL is 4.5 at K = 3; expected a number from 1 to 4"),
        ("m: {3: 0.6}", "AL is 0.6 at K = 3"),
        ("m: {0: 1}", "K is 0; expected a whole number from 1"),
        ("m: {x: 1}", "K is 'x'"),
        ("m: {1: N/A}", "no acceptance length in it"),
        ("m: [", "as YAML: "),
        ("m: {1: [1]}", "AL is a list at K = 1"),
        ("", "a NoneType; expected models"),
        ("Model,coding,Overall\nx,0.57,0.57\n", "coding = '0.57'; expected a number from 1"),
        ("Model,coding,Overall\nx,,\n", "without an acceptance length"),
    ),
)
def test_files_that_are_none(tmp_path, text, message):
    with pytest.raises(NextnError, match=re.escape(message)):
        read_curves(golden(tmp_path, text))


def test_other_files_are_left_to_others(tmp_path):
    assert read_curves(tmp_path) == read_curves(tmp_path / "none") == read_curves(golden(tmp_path, "{}")) == ()


def test_what_is_shared_is_asked_before():
    curve, matrix = PublishedCurve("m", {"3": 2.0}, "a.yaml"), PublishedCurve("m", {"code": 2.0}, "b.csv")
    check_shared([curve, matrix], 3, ["x"])
    check_shared([matrix], 1, ["code"])
    with pytest.raises(ConfigError, match="begins at K = 3; raise -k from 2"):
        check_shared([curve], 2, ["code"])
    with pytest.raises(ConfigError, match="of the categories code; the prompts are of x"):
        check_shared([matrix], 3, ["x", "x"])
    assert "K not stated (here 2)" in matrix.text(HERE)
    assert "1.70 on code (published 2.00)" in matrix.text(HERE)


def test_measure_shows_a_file(here, tmp_path):
    """Of another model, too; it decides nothing, so the exit code is 0."""
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2, 3, 4, 5], "domain": "code"}\n' * 2)
    options = ("measure", FIXTURES / "glm", "--prompts", tmp_path / "p.jsonl", "-k", 1, "--max-tokens", 4)
    options += ("--backend", "torch", "--temperatures", 1)
    path = golden(tmp_path, "other:\n  thinking_off:\n    1: 1.92\n")
    code, out, _ = here(*options, "--baseline", path)
    assert code == 0
    assert "(published 1.92); other, " in out
    matrix = tmp_path / "matrix.csv"
    matrix.write_text("Model,code,math,Overall\none,1.50,,1.50\norg/glm,1.60,1.70,1.65\n")
    record = json.loads(here(*options, "--baseline", matrix, "--json")[1])["published"]
    assert (record["model"], record["lengths"]) == ("one", {"code": 1.5})
    code, _, err = here(*options, "--baseline", path, "--max-drop", "5%")
    assert (code, "compared with what" in err) == (2, True)
