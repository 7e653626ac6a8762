"""Every fix that audit, the loaders and measure print, followed: the finding is gone, nothing else changed or came.

Those of diagnose are for the code of an engine, and followed in `test_cli_diagnose`.
"""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from artifacts import bf16, publish
from quick import loop
from safetensors.torch import load_file, save_file
from test_audit import BROKEN, H, RawTensor, put
from test_audit_values import edited, floats, is_norm, of_head
from tiny import FIXTURES, refrain

import nextn
from nextn.audit_rules import audit
from nextn.audit_rules.findings import SMALL_HEAD
from nextn.checkpoint.checkpoint import SHIPPED, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.errors import CheckpointError


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


def fresh(table):
    """Values of the head as training starts, apart from copies of the trunk's tensors."""
    draw = np.random.default_rng(0)
    own = lambda name: of_head(name) and not name.endswith(("bias", "embed_tokens.weight", "head.weight"))  # noqa: E731
    edited(own, lambda old: np.ones_like(old) if old.ndim == 1 else 0.02 * draw.standard_normal(old.shape))(table)


def copied_modules(table):
    for name in [each for each in table if each.startswith("model.layers.2.")]:
        table[name.replace("layers.2.", "layers.3.")] = table[name]


def copied_block(table):
    for name in [each for each in table if each.startswith("mtp.layers.0.")]:
        table[name] = table[name.replace("mtp.layers.0.", "model.layers.1.")]


ATTENTION = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
VALUES = {
    **{f"norm weights {by:+d}, {family}": ("norm-weights-shifted", family, {"change": shift(by)})
       for by in (-2, -1, 1, 2) for family in ("glm4_moe", "qwen3_5")},
    **{f"some norm weights {by:+d}": ("norm-weights-shifted", "qwen3_5", {"change": shift(by, *ATTENTION)})
       for by in (-1, 1)},
    "input norms +1": ("norm-weights-shifted", "qwen3_5", {"change": shift(1, "pre_fc")}),
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
EDITED = ("tied on one level, without an lm_head",
          "tied, with an lm_head of its own", "counted as a layer", "config silent", "dequantized, config kept",
          "int4 config, bf16 weights")  # fmt: skip
ADVICE = {
    "config-contradicts", "names-foreign", "names-unknown", "vocabulary", "trunk-missing",
    "trunk-partial", "own-head-overwritten", "layer-index", "too-many-modules", "single-expert", "engine-ignores",
    "engine-drops", "engine-refuses", "engine-loads", "engine-absent", "not-run", "quantization",
    "scale-unused", "precision-higher",
}  # fmt: skip
CASES = {name: (rule, family, options) for name, (rule, _, family, options, _) in BROKEN.items()} | VALUES


def commands(fix):
    """The commands of a fix that this test can follow: alternatives, each alone."""
    found = [fix] if fix.startswith("nextn ") else re.findall("(?<!then run )`(nextn .+?)`", fix)
    return [each for each in found if each.split()[1] in ("restore", "convert") and ".gguf" not in each]


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


@pytest.mark.one_case
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
    trunk = before.keys() - head_names(broken) if "--trunk-experts" not in str(fixes) else set()
    for index, command in enumerate(fixes):
        folder = tmp_path / str(index) / "tuned"
        shutil.copytree(broken, folder)
        result = followed(command.replace(str(broken), str(folder)), folder, base, here)
        assert rules(result) <= known - {rule}, command
        after = tensors(result)
        assert {name: before[name] for name in trunk} == {name: after.get(name) for name in trunk}
        changed = {name for name in before.keys() & after.keys() & sound.keys() if before[name] != after[name]}
        assert not {name for name in changed if before[name] == sound[name]}, command


@loop(("case", "prefix"), [("a compiled model", "_orig_mod."), ("experts numbered behind their weight", "")])
def test_renaming_followed(case, prefix, here, tmp_path):
    """The code for each file, then the command: in shards with an index, and in one file without."""
    _, family, options = CASES[case]
    for shards in (1, 3):
        folder = publish(tmp_path / str(shards), family, shards=shards, **options)
        (fix,) = (each.fix for each in audit(folder).findings if each.rule == "names-foreign")
        code, command = re.search(r"(save_file\(.*\)), and then run `(nextn .*)`", fix).groups()
        for file in folder.glob("*.safetensors"):
            eval(code, {"save_file": save_file, "load_file": load_file, "re": re, "FILE": file, "PREFIX": prefix})
        followed(command, folder, folder, here)
        assert not rules(folder)
        assert tensors(folder) == tensors(publish(tmp_path / f"sound-{shards}", family))


@pytest.mark.parametrize(
    ("rule", "options"),
    [("names-unknown", {"change": put("mtp.stray.weight", (8, H))}), CASES["packed trunk, plain head, int4"][::2]],
)
def test_fixes_keep_a_complete_head(rule, options, here, tmp_path):
    """Another model's head is not better than the user's own."""
    folder = publish(tmp_path / "own", "qwen3_5", **options)
    halved = edited(lambda name: of_head(name) and "proj" in name, lambda weights: weights / 2)
    base = publish(tmp_path / "base", "qwen3_5", change=halved)
    finding = next(each for each in audit(Checkpoint.open(folder)).findings if each.rule == rule)
    before, (command,) = tensors(folder), commands(finding.fix)
    after = tensors(followed(command, folder, base, here))
    assert rule not in rules(folder)
    assert after == {name: value for name, value in before.items() if name in after}
    assert before.keys() - after.keys() <= {"mtp.stray.weight"}


@loop(
    "case",
    ["never trained", "a copied block", "not a number", "experts of zeros", "two modules that are one",
     "norm weights +1, glm4_moe"],
)  # fmt: skip
def test_fixes_of_a_head_that_the_base_has_too(case, here, tmp_path, monkeypatch):
    """A head restored from a base that has the same values: to restore from it once more would change nothing."""
    rule, family, options = (VALUES | {"never trained": ("values-untrained", "glm4_moe", {"change": fresh})})[case]
    own, sound = (publish(tmp_path / name, family, modules=options.get("modules", 1)) for name in ("own", "sound"))
    same = publish(tmp_path / "same", family, **options)
    nextn.restore(own, same, force=True)
    for limit in (0, SMALL_HEAD):  # also of a head that is too large to be compared
        monkeypatch.setattr("nextn.audit_rules.findings.SMALL_HEAD", limit)
        found = [each for each in audit(own).findings if each.rule == rule]
        restores = {each for one in found for each in commands(one.fix) if each.startswith("nextn restore")}
        assert restores == {f"nextn restore {own} --from BASE --force"}
    assert all(f"BASE is not {same}, which has this head" in one.fix for one in found)
    followed(*restores, own, sound, here)
    assert rule not in {each.rule for each in audit(own).findings}


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
        assert "norm-weights-shifted" not in {each.rule for each in found}
    found = audit(Checkpoint.open(publish(tmp_path / "one", "qwen3_5", change=shift(1)))).findings
    assert next("subtract-1`" in each.fix for each in found if each.rule == "norm-weights-shifted")


GLM = FIXTURES / "glm"
HEAD = "model.layers.2."


def without(*parts):
    """A `change` that leaves out the tensors whose names have one of these parts."""
    return lambda tensors: {name: value for name, value in tensors.items() if not any(part in name for part in parts)}


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


def swap_halves(weight):
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


# What the loaders refuse: how the checkpoint came to be, and what its config declares.
UNLOADABLE = {
    "stripped": (without(HEAD), 1),
    "undeclared": (without(), 0),
    "a tensor is missing": (without("eh_proj"), 1),
    "mis-shaped": (changed(f"{HEAD}eh_proj.weight", lambda value: value[:, :64].clone()), 1),
    "not a number": (changed(f"{HEAD}enorm.weight", lambda value: value * np.nan), 1),
}


# And of which audit has another fix than to restore the head.
LOADED_OTHERWISE = ("fused experts beside single ones", "fused experts as modules", "counted as a layer")
TRUNK_UNLOADABLE = ("experts of the trunk in both forms", "a matrix of a trunk layer lost",
                    "another number of heads", "experts numbered behind their weight")  # fmt: skip


def with_adapter(table):
    """One matrix of the head with an adapter that was not merged."""
    name = "mtp.layers.0.self_attn.q_proj"
    table[f"{name}.base_layer.weight"] = table.pop(f"{name}.weight")
    for part in "AB":
        put(f"{name}.lora_{part}.default.weight", (4, H))(table)


def glm(folder, change, declared=1):
    folder.mkdir()
    tensors = {}
    for file in sorted(GLM.glob("*.safetensors")):
        tensors |= load_file(file)
    save_file(change(tensors), folder / "model.safetensors")
    config = json.loads((GLM / "config.json").read_text()) | {"num_nextn_predict_layers": declared}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loads(folder):
    """Every tensor of the fixture that the fix brings back, and a head that drafts."""
    ours, theirs = (nextn.load(each).head.state_dict() for each in (folder, GLM))
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.more
def test_fixes_of_the_loaders_followed(here, tmp_path):
    for index, (name, (change, declared)) in enumerate(UNLOADABLE.items()):
        folder = glm(tmp_path / str(index), change, declared)
        with pytest.raises(CheckpointError) as refused:
            nextn.load(folder)
        before, message = tensors(folder), str(refused.value)
        for keys, value in edits(message):
            edited_config(folder, keys, value)
        for command in commands(message):
            assert followed(command, folder, GLM, here) == folder
        assert loads(folder), (name, message)
        trunk = {tensor for tensor in before if not tensor.startswith(HEAD)}
        assert {tensor: before[tensor] for tensor in trunk} == {tensor: tensors(folder)[tensor] for tensor in trunk}
        assert not rules(folder), name


@pytest.mark.more
@loop("case", ["adapter", *LOADED_OTHERWISE, *TRUNK_UNLOADABLE])
def test_loaders_say_what_audit_says(case, tmp_path):
    """Where to restore a head is not the way, neither does the loader advise it."""
    family, options = ("qwen3_5", {"change": with_adapter}) if case == "adapter" else CASES[case][1:]
    folder = publish(tmp_path, family, **options)
    fixes = {each.fix for each in audit(folder).findings if each.severity == "error"}
    assert fixes
    with pytest.raises(CheckpointError) as refused:
        nextn.load(folder)
    assert all(fix in str(refused.value) for fix in fixes)
    assert "nextn restore" not in str(refused.value)


def test_the_fix_for_pickles_followed(tmp_path):
    pickled = glm(tmp_path / "pickled", without())
    table = load_file(pickled / "model.safetensors")
    table["model.layers.2.embed_tokens.weight"] = table["model.embed_tokens.weight"]  # shared, as in a running model
    torch.save(table, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as refused:
        nextn.load(pickled)
    code = re.search(r"safetensors.torch.save_file\(.*\)(?=, which)", str(refused.value))[0]
    eval(code, {"safetensors": safetensors, "torch": torch, "FILE": pickled / "pytorch_model.bin",
                "NEW_FILE": pickled / "model.safetensors"})  # fmt: skip
    assert loads(pickled)


def test_a_trunk_that_only_a_pickle_holds(tmp_path):
    """A head in a file of its own is not all of the model: what is not read is not clean, and says the same to load."""
    folder = glm(tmp_path / "model", without())
    table = load_file(folder / "model.safetensors")
    torch.save(table, folder / "pytorch_model.bin")
    save_file({name: value for name, value in table.items() if "layers.2." in name}, folder / "mtp.safetensors")
    (folder / "model.safetensors").unlink()
    (finding,) = [each for each in nextn.audit(folder).findings if each.severity == "error"]
    assert (finding.rule, "pytorch_model.bin" in finding.fix) == ("trunk-missing", True)
    with pytest.raises(CheckpointError, match=re.escape(finding.fix)):
        nextn.load(folder)


@pytest.mark.slow
def test_fixes_of_measure_followed(here, tmp_path):
    """Texts that repeat themselves: sampled ones do not. A low acceptance: --probe names the half to exchange."""
    (tmp_path / "prompts.txt").write_text("\n\n".join(["x = x = x = x =", "the the the the", "0, 0, 0, 0, 0,"]))
    how = ("--prompts", tmp_path / "prompts.txt", "-k", 1, "--max-tokens", 48, "--backend", "torch")
    said = here("measure", "tiny", *how, "--temperatures", 0)[1]
    (option,) = set(re.findall(r"compare at (--temperatures 1)", said))
    assert "too few" in said or "every text" in said
    assert "every text is degenerate" not in here("measure", "tiny", *how, *option.split())[1]
    swapped, low = tmp_path / "swapped", ("--temperatures", 1, "-k", 1, "--max-tokens", 20, "--backend", "torch")
    prompts = [json.dumps({"prompt": row.tolist()}) for row in refrain(8, 33, seed=10**6)]
    (tmp_path / "ids.jsonl").write_text("\n".join(prompts))
    glm(swapped, changed(f"{HEAD}eh_proj.weight", swap_halves))
    low = ("measure", swapped, "--prompts", tmp_path / "ids.jsonl", *low)
    code, said, _ = here(*low)
    assert (code, "--probe tries other conventions" in said) == (0, True)
    code, said, _ = here(*low, "--probe")
    assert (code, "the weights fit projection of hidden first" in said) == (1, True)
    shutil.rmtree(swapped)
    glm(swapped, without())
    code, said, _ = here(*low, "--probe")
    assert (code, "--probe tries other conventions" in said) == (0, False)


@pytest.mark.slow
@pytest.mark.parametrize("names_base", [True, False])
def test_the_fix_for_a_stale_head_followed(names_base, here, tmp_path):
    """The command as it is printed runs; where nextn.json names the base, there is nothing to fill in."""
    folder = tmp_path / "tuned model"
    model = nextn.load("tiny")
    with torch.no_grad():
        model.trunk.model.lm_head.weight.mul_(0.5)
    model.trunk.model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text((SHIPPED / "tokenizer.json").read_text())
    nextn.restore(folder, "tiny")
    if not names_base:
        record = json.loads((folder / "nextn.json").read_text()) | {"source": "gone"}
        (folder / "nextn.json").write_text(json.dumps(record))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (fix,) = (each.fix for each in nextn.audit(folder).findings if each.rule == "head-stale")
    words = shlex.split(re.search("`nextn (.+?)`", fix)[1])
    assert words == ["measure", str(folder), "--against", str(SHIPPED) if names_base else "BASE"]
    (tmp_path / "prompts.txt").write_text("import os\n\ndef add(\n\nclass A:")
    quick = ("-k", 1, "--max-tokens", 12, "--backend", "torch", "--prompts", tmp_path / "prompts.txt")
    code, said, err = here(*(word.replace("BASE", "tiny") for word in words), *quick)
    assert code in (0, 1, 3), err
    assert re.search("^(keep|train) the head|^inconclusive", said, re.MULTILINE)  # what the fix promises
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trunk_cast_without_loss_is_not_stale(dtype, tmp_path):
    model = nextn.load("tiny")
    model.trunk.model.to(dtype).save_pretrained(tmp_path / "cast")
    nextn.restore(tmp_path / "cast", "tiny")
    assert "head-stale" not in {each.rule for each in nextn.audit(tmp_path / "cast").findings}


def test_a_head_in_a_subfolder_under_other_names(tmp_path):
    """It is named, and restored once it has the names that the fix shows."""
    folder = publish(tmp_path / "tuned", "glm4_moe")
    table = load_file(folder / "model.safetensors")
    head = {name: value for name, value in table.items() if name.startswith("model.layers.2.")}
    save_file({name: value for name, value in table.items() if name not in head}, folder / "model.safetensors")
    (folder / "mtp").mkdir()
    file = folder / "mtp" / "model.safetensors"
    save_file({name.replace("model.layers.2", "layers.0"): value for name, value in head.items()}, file)
    (found,) = (each for each in audit(folder).findings if each.rule == "head-absent")
    assert "subfolder mtp has" in found.found
    (name,) = re.findall(r"rename them there to names such as model.layers.2.(\w+),", found.fix)
    assert f"model.layers.2.{name}.weight" in head
    save_file(head, file)
    command = next(each for each in commands(found.fix) if str(folder / "mtp") in each)
    nextn.restore(folder, shlex.split(command)[4], family="glm4_moe")
    assert audit(folder).clean


def test_a_head_in_a_subfolder(tmp_path):
    """A trainer that writes the trained head apart: the fix takes that one, and not the base model's."""
    folder = publish(tmp_path / "tuned", "qwen3_5", side_file="mtp.safetensors")
    (folder / "mtp").mkdir()
    (folder / "mtp.safetensors").rename(folder / "mtp" / "model.safetensors")
    (found,) = (each for each in audit(folder).findings if each.rule == "head-absent")
    assert "subfolder mtp has" in found.found
    command = found.fix.split("`")[1]
    assert shlex.split(command)[-3:] == [str(folder / "mtp"), "--family", "qwen3_5"]
    nextn.restore(folder, folder / "mtp", family="qwen3_5")
    assert audit(folder).clean
