"""Every fix that audit prints as a command, followed: the finding is gone, nothing else changed, nothing new came."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
from artifacts import bf16, publish
from test_audit import BROKEN, RawTensor
from test_audit_values import edited, floats, is_norm, of_head

from nextn.audit import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory


def shift(by, *parts):
    """A `change` that adds `by` to the head's norm weights whose names have one of these parts."""
    return edited(lambda name: of_head(name) and is_norm(name) and any(part in name for part in parts or [""]),
                  lambda weights: weights + by)  # fmt: skip


def constant(part, value):
    return edited(lambda name: of_head(name) and part in name, lambda old: np.full_like(old, value))


def one_nan(table):
    name = "model.layers.2.eh_proj.weight"
    values = floats(table[name]).copy()
    values[0, 0] = np.nan
    table[name] = RawTensor(table[name].dtype, table[name].shape, bf16(values))


def copied_modules(table):
    for name in [each for each in table if each.startswith("model.layers.2.")]:
        table[name.replace("layers.2.", "layers.3.")] = table[name]


def copied_block(table):
    for name in [each for each in table if each.startswith("mtp.layers.0.")]:
        table[name] = table[name.replace("mtp.layers.0.", "model.layers.1.")]


ATTENTION = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
VALUES = {
    **{f"norm weights {by:+d}, {family}": ("gain-shifted", family, {"change": shift(by)})
       for by in (-2, -1, 1, 2) for family in ("glm4_moe", "qwen3_5")},
    **{f"some norm weights {by:+d}": ("gain-shifted", "qwen3_5", {"change": shift(by, *ATTENTION)}) for by in (-1, 1)},
    "input norms +1": ("gain-shifted", "qwen3_5", {"change": shift(1, "pre_fc")}),
    "not a number": ("values-nonfinite", "glm4_moe", {"change": one_nan}),
    "uninitialized": ("values-untrained", "glm4_moe", {"change": constant("eh_proj", 3e30)}),
    "projection of zeros": ("values-zero", "glm4_moe", {"change": constant("eh_proj", 0.0)}),
    "experts of zeros": ("values-zero", "deepseek_v3", {"change": constant(".experts.", 0.0)}),
    "norm that multiplies by 0": ("values-zero", "qwen3_5", {"change": constant("pre_fc_norm_hidden", -1.0)}),
    "one value": ("values-constant", "glm4_moe", {"change": constant("o_proj", 0.25)}),
    "two modules that are one": ("modules-identical", "glm4_moe", {"modules": 2, "change": copied_modules}),
    "a copied block": ("block-copied", "qwen3_5", {"change": copied_block}),
}  # fmt: skip
# Cases whose fix edits config.json, and rules of which some cases have advice alone.
EDITED = ("tied, with an lm_head of its own", "counted as a layer", "config silent", "dequantized, config kept",
          "int4 config, bf16 weights")  # fmt: skip
ADVICE = {
    "experts-twice", "config-contradicts", "names-foreign", "names-unknown", "vocabulary", "trunk-missing",
    "own-head-overwritten", "layer-index", "too-many-modules", "single-expert", "engine-ignores", "engine-drops",
    "engine-refuses", "engine-loads", "engine-absent", "quantization",
}  # fmt: skip
CASES = {name: (rule, family, options) for name, (rule, _, family, options, _) in BROKEN.items()} | VALUES


def commands(fix):
    """The commands of a fix that this test can follow: alternatives, each alone."""
    found = [fix] if fix.startswith("nextn ") else re.findall("`(nextn .+?)`", fix)
    return [each for each in found if each.split()[1] in ("restore", "convert")]


def tensors(folder):
    checkpoint = Checkpoint.open(folder)
    return {name: (info.dtype, info.shape, checkpoint.read_bytes(name)) for name, info in checkpoint.tensors.items()}


def followed(command, folder, base, here):
    """Run the command with its placeholders filled in -> the folder with the result."""
    out = folder.parent / "out"
    words = [{"BASE": str(base), "OUT": str(out)}.get(word, word) for word in shlex.split(command)[1:]]
    code, _, err = here(*words)
    assert code == 0, (command, err)
    return out if out.exists() else folder


def edits(fix):
    """The edits of config.json that a fix names: (keys, value), no value to remove them."""
    changes = [
        (field.split("."), json.loads(value)) for field, value in re.findall(r"Set (\S+) to (\w+) in config", fix)
    ]
    return changes + [(field.split("."), None) for field in re.findall(r"Remove the key (\S+) from config.json", fix)]


def edited_config(folder, keys, value):
    config = json.loads((folder / "config.json").read_text())
    *path, last = keys
    level = config
    for key in path:
        level = level[key]
    level.pop(last, None)
    if value is not None:
        level[last] = value
    (folder / "config.json").write_text(json.dumps(config))


def head_names(folder):
    inventory = Inventory.of(Checkpoint.open(folder))
    return {*inventory.spellings(inventory.stored), *inventory.unrecognized}


def rules(folder):
    return {each.rule for each in audit(Checkpoint.open(folder)).findings if each.severity != "note"}


@pytest.mark.parametrize("case", CASES)
def test_fixes_followed(case, here, tmp_path):
    rule, family, options = CASES[case]
    broken = publish(tmp_path / "broken", family, **options)
    found = [each for each in audit(Checkpoint.open(broken)).findings if each.rule == rule]
    assert found, rules(broken)
    base = publish(tmp_path / "base", family, modules=options.get("modules", 1))
    fixes = dict.fromkeys(each for one in found for each in commands(one.fix))
    assert fixes or case in EDITED or rule in ADVICE, [one.fix for one in found]
    before, sound, known = tensors(broken), tensors(base), rules(broken)
    trunk = before.keys() - head_names(broken)
    for index, command in enumerate(fixes):
        folder = tmp_path / str(index) / "tuned"
        shutil.copytree(broken, folder)
        result = followed(command.replace(str(broken), str(folder)), folder, base, here)
        assert rules(result) <= known - {rule}, command
        after = tensors(result)
        assert {name: before[name] for name in trunk} == {name: after.get(name) for name in trunk}
        changed = {name for name in before.keys() & after.keys() & sound.keys() if before[name] != after[name]}
        assert not {name for name in changed if before[name] == sound[name]}, command


@pytest.mark.parametrize("case", EDITED)
def test_edits_of_the_config_followed(case, tmp_path):
    rule, family, options = CASES[case]
    folder = publish(tmp_path, family, **options)
    before = rules(folder)
    found = [each for each in audit(Checkpoint.open(folder)).findings if each.rule == rule]
    changes = [change for one in found for change in edits(one.fix)]
    assert changes, [one.fix for one in found]
    for keys, value in changes:
        edited_config(folder, keys, value)
    assert rules(folder) <= before - {rule}


def test_a_head_at_its_initial_values_is_not_shifted(tmp_path):
    """Norm weights where training starts look one above weights near 0, and to subtract 1 would make them all 0."""
    zeros = edited(lambda name: of_head(name) and is_norm(name), np.zeros_like)
    for name, change in {"head": zeros, "both": edited(is_norm, np.zeros_like)}.items():
        folder = publish(tmp_path / name, "qwen3_5", change=change)
        found = audit(Checkpoint.open(folder)).findings
        assert "gain-shifted" not in {each.rule for each in found}
    found = audit(Checkpoint.open(publish(tmp_path / "one", "qwen3_5", change=shift(1)))).findings
    assert next("subtract-1`" in each.fix for each in found if each.rule == "gain-shifted")
