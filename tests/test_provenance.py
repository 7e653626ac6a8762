"""Provenance: the fingerprint of a trunk sees a fine-tune, the record beside the weights, the base model of fixes."""

import json
import shlex
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from artifacts import inventory_of, load_json, publish, watched
from quick import loop

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.base_model import base_model, is_hub_id
from nextn.checkpoint.checkpoint import SHIPPED, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import (
    RECORD,
    Provenance,
    as_float32,
    head_fingerprint,
    record_training,
    trained_length,
    trunk_fingerprint,
)
from nextn.checkpoint.safetensors_file import RawTensor, write_json
from nextn.edit.convert import convert, extract
from nextn.edit.restore import restore
from nextn.errors import CheckpointError


def nudge(name):
    """Change one element of a tensor, as the smallest fine-tune would."""

    def change(table):
        old = table[name]
        data = np.frombuffer(old.data, "<u2").copy()
        data[len(data) // 2] ^= 1
        table[name] = RawTensor(old.dtype, old.shape, data.tobytes())

    return change


def recast_to(dtype, name):
    """The same bytes under another dtype."""
    return lambda table: table.update({name: RawTensor(dtype, table[name].shape, table[name].data)})


def test_trunk_fingerprint_sees_a_fine_tune(tmp_path):
    """A weight of the trunk that changed must change it; the head and the files' division must not."""
    whole = inventory_of(publish(tmp_path / "a", "glm4_moe"))
    sharded = inventory_of(publish(tmp_path / "b", "glm4_moe", shards=3))
    head = inventory_of(publish(tmp_path / "c", "glm4_moe", change=nudge("model.layers.2.eh_proj.weight")))
    tuned = inventory_of(publish(tmp_path / "d", "glm4_moe", change=nudge("model.layers.1.self_attn.q_proj.weight")))
    assert trunk_fingerprint(whole) == trunk_fingerprint(sharded) == trunk_fingerprint(head)
    assert trunk_fingerprint(whole) != trunk_fingerprint(tuned)
    assert head_fingerprint(whole) == head_fingerprint(sharded) == head_fingerprint(tuned)
    assert head_fingerprint(whole) != head_fingerprint(head)
    recast = inventory_of(publish(tmp_path / "e", "glm4_moe", change=recast_to("F16", "model.layers.2.eh_proj.weight")))
    assert head_fingerprint(whole) != head_fingerprint(recast)


def test_head_fingerprint_leaves_copies_out(tmp_path):
    """A head with its copies restored is the same head."""
    with_copies = inventory_of(publish(tmp_path / "a", "glm4_moe"))
    without = inventory_of(publish(tmp_path / "b", "glm4_moe", copies=False))
    assert head_fingerprint(with_copies) == head_fingerprint(without)


def test_few_reads(tmp_path):
    """A fingerprint that reads the experts would read a checkpoint of hundreds of gigabytes."""
    folder = publish(tmp_path, "deepseek_v3", config={"num_hidden_layers": 2})
    inventory = inventory_of(folder)
    with watched() as names:
        trunk_fingerprint(inventory)
    assert names
    assert not [name for name in names if ".experts." in name]


def test_record(tmp_path):
    """Written, read back, and refused where somebody else's nextn.json lies there."""
    folder = publish(tmp_path, "glm4_moe")
    assert Provenance.read(Checkpoint.open(folder)) is None
    record = Provenance("a", "b", "c", "org/base", "main", "restore")
    record.write(folder)
    assert Provenance.read(Checkpoint.open(folder)) == record
    (folder / RECORD).write_text(json.dumps({"something": "else"}))
    with pytest.raises(CheckpointError, match="not a record"):
        Provenance.read(Checkpoint.open(folder))
    for length in (0, -1, 2**31, 1.5, True, "256", [256]):
        replace(record, trained_length=length).write(folder)
        with pytest.raises(CheckpointError, match=r"trained_length = .*; expected a number of tokens from 1"):
            Provenance.read(Checkpoint.open(folder))


def without_head(table):
    for name in [name for name in table if name.startswith("model.layers.2.")]:
        del table[name]


@pytest.mark.more
def test_the_trained_length_stays_with_the_head(tmp_path):
    """A copy of the head that forgets it would be decoded beyond what it was trained on, without a word."""
    base = publish(tmp_path / "base", "glm4_moe")
    record_training(base, source="run", trained_length=256)
    assert trained_length(inventory_of(base)) == 256
    extract(base, tmp_path / "head.safetensors")
    assert trained_length(inventory_of(tmp_path / "head.safetensors")) == 256
    for source in (base, tmp_path / "head.safetensors"):
        lost = publish(tmp_path / f"lost-{source.name}", "glm4_moe", change=without_head)
        restore(lost, source)
        assert trained_length(inventory_of(lost)) == 256
    convert(base, tmp_path / "converted", norm_weight="add-1")
    assert trained_length(inventory_of(tmp_path / "converted")) == 256
    assert trained_length(inventory_of(publish(tmp_path / "other", "glm4_moe"))) is None


def test_values_count_and_not_how_they_are_stored(tmp_path):
    """A load and save that casts routers to fp32, or fuses the head's experts: the same trunk and head."""

    def cast(table):
        for name in [each for each in table if each.endswith("mlp.gate.weight")]:
            value = table[name]
            data = b"".join(value.data() if callable(value.data) else [value.data])
            table[name] = RawTensor("F32", value.shape, as_float32(data, value.dtype))

    plain, wide = publish(tmp_path / "plain", "glm4_moe"), publish(tmp_path / "wide", "glm4_moe", change=cast)
    nextn.convert(plain, tmp_path / "fused", experts="fused")
    one = Inventory.of(Checkpoint.open(plain))
    for other in (Inventory.of(Checkpoint.open(folder)) for folder in (wide, tmp_path / "fused")):
        assert head_fingerprint(one) == head_fingerprint(other)
        assert trunk_fingerprint(one) == trunk_fingerprint(other)


def test_a_tied_lm_head_and_the_signs_of_zeros(tmp_path):
    """Savers drop an lm_head that is tied; merging an adapter that changes nothing adds 0 to -0."""

    def fill(table, *, zeros, tied):
        value = table["model.embed_tokens.weight"]
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.eh_proj.weight"):
            size = len(table[name].data) // 2
            table[name] = RawTensor(value.dtype, table[name].shape, zeros * size)
        if tied:
            del table["lm_head.weight"]

    one, other = (
        inventory_of(publish(tmp_path / name, "glm4_moe", copies=False, change=partial(fill, zeros=zeros, tied=tied)))
        for name, zeros, tied in (("one", b"\0\x80", False), ("other", b"\0\0", True))
    )
    assert trunk_fingerprint(one) == trunk_fingerprint(other)
    assert head_fingerprint(one) == head_fingerprint(other)


def test_the_record_of_the_shipped_checkpoint_is_of_its_head_and_trunk():
    inventory = inventory_of(SHIPPED)
    record = Provenance.read(inventory.checkpoint)
    assert record is not None
    assert record.head == head_fingerprint(inventory)
    assert record.beside == record.trained_with == trunk_fingerprint(inventory)


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
    """A config from elsewhere must not direct a command at this machine's folders, nor at itself."""
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
