"""The base model that fixes name: from config.json or the model card, and only what is safe to copy into a shell."""

import json
import shlex

import pytest
from artifacts import load_json, publish
from quick import loop

from nextn.audit_rules import audit
from nextn.checkpoint.base_model import RECORD, base_model, is_hub_id
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import write_json


@pytest.fixture
def folder(tmp_path):
    return publish(tmp_path / "tuned model", "qwen3_5", change=lambda table: [
        table.pop(name) for name in list(table) if name.startswith("mtp.")
    ])  # fmt: skip


def named(folder, *, config=None, card=None, source=None):
    """What the fix restores from, with this `_name_or_path`, card and source in nextn.json."""
    if source is not None:
        write_json(folder / RECORD, {"source": source})
    if config is not None:
        write_json(folder / "config.json", load_json(folder / "config.json") | {"_name_or_path": config})
    if card is not None:
        (folder / "README.md").write_text(card)
    return base_model(Checkpoint.open(folder))


@loop(
    ("card", "base"),
    [
        ("---\nbase_model: org/base-1.5B\n---\n# Card", "org/base-1.5B"),
        ("---\nlicense: mit\nbase_model:\n- org/base\ntags:\n- x\n---\n", "org/base"),
        ("---\r\nbase_model:\r\n  - 'org/base'  # the instruct one\r\n---\r\n", "org/base"),
        ('---\nbase_model: ["org/base"]\n---\n', "org/base"),
        ('\ufeff---\nbase_model: "org/base"\n---\n', "org/base"),
        ("---\nbase_model:\n- org/one\n- org/two\n---\n", None),  # a merge: either may have the head
        ("---\nbase_model_relation: quantized\n---\n", None),
        ("---\nlicense: mit\n---\nbase_model: org/base\n", None),
        ("base_model: org/base\n", None),
        ("---\nbase_model: $(rm -rf ~)/x\n---\n", None),
        ("---\nbase_model: --force\n---\n", None),
        ("---\n" + "base_model: &a [*a]\n" * 100 + "---\n", None),
        ("---\nbase_model:" + "\n- " * 30_000, None),
    ],
)
def test_the_card(card, base, folder):
    assert named(folder, card=card) == base


@loop(
    ("name", "accepted"),
    [
        ("Qwen/Qwen3.5-0.8B", True),
        ("a/b", True),
        ("zai-org/GLM-4.5_Air.v2", True),
        ("base", False),
        ("a/b/c", False),
        ("-a/b", False),
        ("a/-b", False),
        ("a/b.", False),
        ("a/b--c", False),
        ("a/b..c", False),
        ("a/b.git", False),
        ("a/b\n", False),
        ("a/`id`", False),
        ("a/b'", False),
        ("ä/b", False),
        ("a/" + "b" * 95, False),
        ("", False),
    ],
)
def test_hub_ids(name, accepted):
    assert is_hub_id(name) == accepted


def test_the_config_comes_first(folder):
    assert named(folder, config="org/from-config", card="---\nbase_model: org/from-card\n---\n") == "org/from-config"
    assert named(folder, config="not an id") == "org/from-card"
    assert named(folder, config=["org/base"]) == "org/from-card"
    (folder / "README.md").unlink()
    assert named(folder, source="nextn train runs/tiny") is None  # what trained the head is no model
    assert named(folder, source="org/restored-from") == "org/restored-from"
    (folder / RECORD).write_text("{")
    assert named(folder) is None


def test_folders(folder, tmp_path, monkeypatch):
    """A folder that exists and has a config.json, absolute or relative; not the checkpoint itself, by any name."""
    base = publish(tmp_path / "it's base", "qwen3_5")
    assert named(folder, config=str(base)) == str(base)
    assert shlex.split(Inventory.of(Checkpoint.open(folder)).restore_command())[-1] == str(base)
    monkeypatch.chdir(tmp_path)
    assert named(folder, config="it's base") == "it's base"
    for other in (str(folder), f"{folder}/", "tuned model", "tuned model/../tuned model"):
        assert named(folder, config=other) is None
    for other in (str(tmp_path), "/nowhere", "-it's base", "\0", "x" * 5000, "it's base\x1b[2J"):
        assert named(folder, config=other) is None


def test_a_hub_checkpoint_names_no_local_folder(folder, tmp_path):
    """A stranger's config must not direct a command at this machine's folders, nor at itself."""
    base = publish(tmp_path / "base", "qwen3_5")
    write_json(folder / "config.json", load_json(folder / "config.json") | {"_name_or_path": str(base)})
    local = Checkpoint.open(folder)
    remote = Checkpoint(**{**vars(local), "revision": "0" * 40, "path": "Org/Model"})
    assert (base_model(local), base_model(remote)) == (str(base), None)
    remote.config["_name_or_path"] = "org/model"
    assert base_model(remote) is None


def test_fixes_can_be_copied(folder):
    """The command of the finding, as the shell reads it; without a base model, the placeholder."""
    (finding,) = [each for each in audit(Checkpoint.open(folder)).findings if each.rule == "head-absent"]
    assert shlex.split(finding.fix) == ["nextn", "restore", str(folder), "--from", "BASE"]
    named(folder, config="org/base")
    (finding,) = [each for each in audit(Checkpoint.open(folder)).findings if each.rule == "head-absent"]
    assert shlex.split(finding.fix) == ["nextn", "restore", str(folder), "--from", "org/base"]


def test_a_card_that_cannot_be_read(folder):
    (folder / "README.md").write_bytes(b"---\nbase_model: \xff\xfe/x\n---\n")
    assert base_model(Checkpoint.open(folder)) is None
    (folder / "README.md").unlink()
    (folder / "README.md").mkdir()
    assert base_model(Checkpoint.open(folder)) is None
    assert json.loads((folder / "config.json").read_text())
