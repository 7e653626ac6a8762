"""Published curves: what the data file holds, which curve fits, and the conditions that are named."""

import json

import pytest
from tiny import FIXTURES

from nextn.evaluate.acceptance_curve import MeasuredConditions, fitting_curve, published_curves
from nextn.family_table.rows import FAMILIES

HERE = MeasuredConditions("T=1 argmax", "org/mine", "bfloat16", None, 1.0, "built-in, 16 prompts", 256)


def test_data_file():
    """Each curve has a source, K = 1..8, AL within 1 and K + 1, and a family that exists."""
    curves = published_curves()
    assert len(curves) >= 14
    families = {family.name for family in FAMILIES}
    for curve in curves:
        assert len(curve.lengths) == 8
        assert all(1 <= length <= k + 2 for k, length in enumerate(curve.lengths))
        assert curve.source.startswith("https://")
        assert curve.family is None or curve.family in families
    keys = [(curve.model, curve.draft, curve.thinking) for curve in curves]
    assert len(set(keys)) == len(keys)
    deepseek = next(curve for curve in curves if curve.model == "DeepSeek-V4-Pro" and curve.thinking)
    assert (deepseek.lengths[2], deepseek.lengths[7]) == (2.49, 2.58)


@pytest.mark.parametrize(
    ("source", "family", "thinking", "expected"),
    [
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "qwen3_5_moe", True, ("Qwen3.5-397B-A17B", "MTP", True)),
        ("models/qwen3.5-35b-a3b", "qwen3_5_moe", None, ("Qwen3.5-397B-A17B", "MTP", True)),
        ("x/DeepSeek-V4-Pro-0813", "deepseek_v4", True, ("DeepSeek-V4-Pro-0813", "DSpark, probabilistic drafts", True)),
        ("x/DeepSeek-V4-Pro", "deepseek_v4", False, ("DeepSeek-V4-Pro", "MTP", False)),
        ("moonshotai/Kimi-K2.5", "generic", None, ("Kimi-K2.5", "EAGLE-3", True)),
    ],
)
def test_the_curve_that_fits(source, family, thinking, expected):
    curve = fitting_curve(source, family, thinking=thinking, temperature=1.0)
    assert (curve.model, curve.draft, curve.thinking) == expected


def test_none_fits():
    assert fitting_curve("org/SmolLM2-135M", "generic", thinking=None, temperature=0.0) is None


def test_conditions_that_differ_are_named():
    curve = fitting_curve("org/mine", "qwen3_5_moe", thinking=None, temperature=1.0)
    text = curve.text(HERE, [1.5, 1.7])
    assert text.startswith("T=1 argmax: AL 1.50 at K = 1 (published 1.93), 1.70 at K = 2 (published 2.73)")
    for words in ("model Qwen3.5-397B-A17B (here org/mine)", "thinking on (here the template's default)", "here 256"):
        assert words in text
    assert "draft MTP" not in text  # alike
    assert curve.as_record(HERE)["differences"] == curve.differences(HERE)


def test_measure_shows_it(here, tmp_path):
    """For a checkpoint of that family; never for another one."""
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2, 3, 4, 5]}\n' * 2)
    options = ("--prompts", tmp_path / "p.jsonl", "-k", 1, "--max-tokens", 4, "--backend", "torch", "--temperatures", 1)
    code, out, _ = here("measure", FIXTURES / "v4", *options)
    assert code == 0
    assert "published, for comparison only: T=1 argmax: AL" in out
    assert "(published 1.79); DeepSeek-V4-Pro" in out
    code, out, _ = here("measure", FIXTURES / "v4", *options, "--json")
    assert json.loads(out)["published"]["run"] == "27180633016"
    code, out, _ = here("measure", FIXTURES / "glm", *options, "--json")
    assert "published" not in json.loads(out)
