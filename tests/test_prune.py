"""Experts that were pruned in the trunk alone: the audit says so, and convert prunes the head by a list."""

import json
import re

import pytest
from artifacts import LAYERS, publish
from quick import loop
from typer.testing import CliRunner

from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor
from nextn.cli import app
from nextn.edit.convert import convert
from nextn.edit.expert_pieces import read_expert_list
from nextn.errors import ConfigError
from nextn.family_table import by_name
from nextn.model.model import Model

KEEP = [3, 0]
NAMES = {"deepseek_v3": "n_routed_experts", "glm4_moe": "n_routed_experts", "exaone_moe": "num_experts",
         "qwen3_5_moe": "num_experts", "hy_v3": "num_experts"}  # fmt: skip
IN_HEAD = {"deepseek_v3", "glm4_moe", "qwen3_5_moe", "hy_v3"}  # EXAONE's head is dense


def rows(tensor, keep):
    size = len(tensor.data) // tensor.shape[0]
    data = b"".join(tensor.data[each * size : (each + 1) * size] for each in keep)
    return RawTensor(tensor.dtype, (len(keep), *tensor.shape[1:]), data)


def pruned(name, keep=KEEP, *, head=False):
    """A table whose trunk, or head, has these experts alone, as REAP writes it."""
    family = by_name(name)

    def change(table):
        for each in list(table):
            mine = family.canonical(each, LAYERS) is not None
            match = re.search(r"\.mlp\.(experts\.(\d+)\.|(?!shared).*?(?:gate\.weight|bias)$)", each)
            if mine != head or match is None or "shared_expert" in each:
                continue
            tensor = table.pop(each)
            if match[2] is None:
                table[each] = rows(tensor, keep)
            elif int(match[2]) in keep:
                number = keep.index(int(match[2]))
                table["\0" + each.replace(f".experts.{match[2]}.", f".experts.{number}.")] = tensor
        for each in [each for each in table if each.startswith("\0")]:
            table[each[1:]] = table.pop(each)

    return change


def folder(path, name, **options):
    return publish(path, name, copies=False, config={NAMES[name]: len(KEEP)}, change=pruned(name, **options))


@pytest.mark.parametrize(("settings", "rules"), [({}, {"experts-pruned"}), ({"mtp_num_experts": 4}, set())])
def test_a_block_of_its_own_takes_the_configs_number(settings, rules, tmp_path):
    """A full head beside a pruned trunk of Qwen3.8-Flash-Next, unless the config has a number for the head."""
    publish(tmp_path, "qwen4_exp", copies=False, config={"num_experts": 2, **settings}, change=pruned("qwen4_exp"))
    assert {each.rule for each in audit(Checkpoint.open(tmp_path)).findings if each.severity != "note"} == rules


@pytest.mark.more
@loop("name", sorted(IN_HEAD))
def test_one_finding(tmp_path_factory, name):
    path = folder(tmp_path_factory.mktemp("a"), name)
    found = [each for each in audit(Checkpoint.open(path)).findings if each.severity != "note"]
    assert [each.rule for each in found] == ["experts-pruned"], found
    assert "have 2 experts, the head's block 4" in found[0].found
    assert "--keep-experts" in found[0].fix
    other = publish(tmp_path_factory.mktemp("b"), name, copies=False, change=pruned(name, head=True))
    found = [each for each in audit(Checkpoint.open(other)).findings if each.severity != "note"]
    assert [each.rule for each in found] == ["experts-pruned"], found
    assert "restore" in found[0].fix


def test_a_block_of_its_own_may_have_fewer(tmp_path):
    change = pruned("openpangu_v2", head=True)
    report = audit(Checkpoint.open(publish(tmp_path, "openpangu_v2", copies=False, change=change)))
    assert "experts-pruned" not in {each.rule for each in report.findings}


def test_a_dense_head_needs_nothing(tmp_path):
    assert audit(Checkpoint.open(folder(tmp_path, "exaone_moe"))).clean


@pytest.mark.one_case
@pytest.mark.parametrize("form", ["split", "fused"])
def test_pruned_by_the_list(tmp_path, form):
    """Each kept expert has its bytes under its new number, the router its rows, and the result loads."""
    source = folder(tmp_path / "a", "glm4_moe")
    before = Checkpoint.open(source)
    if form == "fused":
        convert(source, tmp_path / "fused", experts="fused")
        source = tmp_path / "fused"
    CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--keep-experts", "3,0"])
    found = {each.rule for each in audit(Checkpoint.open(tmp_path / "out")).findings if each.severity != "note"}
    assert found == (set() if form == "split" else {"experts-form"})
    if form == "fused":
        assert Inventory.of(Checkpoint.open(tmp_path / "out")).family.experts == "fused"
        convert(tmp_path / "out", tmp_path / "split", experts="split")
    after = Checkpoint.open(tmp_path / ("split" if form == "fused" else "out"))
    root = f"model.layers.{LAYERS}.mlp"
    for new, old in enumerate(KEEP):
        for part in ("gate_proj", "up_proj", "down_proj"):
            stays = after.read_bytes(f"{root}.experts.{new}.{part}.weight")
            assert stays == before.read_bytes(f"{root}.experts.{old}.{part}.weight")
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        size = before.info(f"{root}.{name}").nbytes // 4
        whole = before.read_bytes(f"{root}.{name}")
        assert after.read_bytes(f"{root}.{name}") == b"".join(whole[i * size : (i + 1) * size] for i in KEEP)
    others = [name for name in before.tensors if not name.startswith(root)]
    assert all(after.read_bytes(name) == before.read_bytes(name) for name in others)
    Model.load(tmp_path / "out")


def test_the_config_follows(tmp_path):
    """A config that still has the number from before is corrected, where the trunk has the new one."""
    path = publish(tmp_path / "a", "glm4_moe", copies=False, change=pruned("glm4_moe"))
    convert(path, tmp_path / "out", keep_experts=KEEP)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_routed_experts"] == 2
    assert audit(Checkpoint.open(tmp_path / "out")).clean


@loop(("given", "what"), [
    ("0", "have 2 experts"), ("0,1,2", "have 2 experts"), ("0,7", "none is 7"), ("0,0", "each expert once"),
    ("a,b", "numbers joined by commas"), ("", "numbers joined by commas"), ("0.5,1", "numbers joined"),
    ("-1,0", "each expert once"), ("no.json", "no file"), ("true,1", "numbers joined"), ("[0],1", "numbers joined"),
    ("[" * 2000, "numbers joined"),
])  # fmt: skip
def test_bad_lists(tmp_path_factory, given, what):
    path = folder(tmp_path_factory.mktemp("a"), "glm4_moe")
    with pytest.raises(ConfigError, match=what):
        convert(path, path.with_name(f"{path.name}-out"), keep_experts=read_expert_list(given))


def test_a_list_in_a_file(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("[3, 0]\n")
    assert read_expert_list(str(path)) == read_expert_list("3, 0") == KEEP
    for text in ("3, 0", '{"3": 0}', "[" * 100_000, ""):
        path.write_text(text)
        with pytest.raises(ConfigError, match="expected numbers joined by commas"):
            read_expert_list(str(path))


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_puzzle", "interns2_mobius"])
def test_a_head_whose_trunk_has_no_experts(name, tmp_path):
    """Its own fields of the config have the number that is left."""
    convert(publish(tmp_path / "whole", name), tmp_path / "out", keep_experts=[0, 2])
    assert audit(tmp_path / "out").clean
