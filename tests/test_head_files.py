"""A trained head as files: the trunk's bytes as they were, the head in its layout, the record, audit and loading."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors import SafetensorError
from tiny import FIXTURES, build

from nextn.audit import audit
from nextn.checkpoint.checkpoint import Checkpoint, write_index
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import Provenance, trunk_fingerprint
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.checkpoint.staging_folder import owned
from nextn.edit.restore import restore
from nextn.errors import CheckpointError, ConfigError
from nextn.model.model import Model
from nextn.train import head_task
from nextn.train.head_task import write_standalone_head, write_with_trunk


def trunk_bytes(folder):
    """Name -> dtype, shape and bytes of every tensor that is not the head's own."""
    inventory = Inventory.of(Checkpoint.open(folder))
    heads = inventory.spellings(inventory.own)
    return {
        name: (info.dtype, info.shape, b"".join(inventory.checkpoint.chunks(name)))
        for name, info in inventory.checkpoint.tensors.items()
        if name not in heads
    }


def changed(head):
    with torch.no_grad():
        for value in head.parameters():
            value.add_(0.125)
    return head


def same_head(one, two):
    mine, theirs = one.state_dict(), two.state_dict()
    assert mine.keys() == theirs.keys()
    return all(torch.equal(value, theirs[name].to(value.dtype)) for name, value in mine.items())


@pytest.mark.parametrize("name", ["glm", "qwen", "v4", "glm_two"])
def test_a_head_is_replaced_and_the_trunk_is_not(name, tmp_path):
    origin = Inventory.of(Checkpoint.open(FIXTURES / name))
    model = Model.load(FIXTURES / name)
    dtype = model.trunk.dtype
    head = changed(model.head.float())
    write_with_trunk(origin, head, tmp_path / "out", dtype=dtype, source="runs/first")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(FIXTURES / name)
    again = Model.load(tmp_path / "out")
    assert same_head(again.head, head)
    assert again.head.stack[0].dtype == dtype
    written = Checkpoint.open(tmp_path / "out")
    record = Provenance.read(written)
    assert (record.made_by, record.source) == ("train", "runs/first")
    assert record.trained_with == record.beside == trunk_fingerprint(origin)
    assert {found.rule for found in audit(written).findings} <= {
        found.rule for found in audit(origin.checkpoint).findings
    }
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "deepseek_v4", "step3p5", "exaone_moe", "nemotron_h"])
def test_a_head_is_added_where_there_was_none(name, tmp_path):
    """A checkpoint that promises no head and holds none becomes one that loads with it, clean for the audit."""
    model = build(name)
    head = model.head
    model.head = None
    model.save(tmp_path / "trunk")
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    write_with_trunk(origin, head, tmp_path / "out", dtype=None, source="runs/first")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "trunk")
    assert same_head(Model.load(tmp_path / "out").head, head)
    findings = audit(Checkpoint.open(tmp_path / "out")).findings
    assert not [found.rule for found in findings if found.severity == "error"]


def test_an_fp8_trunk_stays_fp8(tmp_path):
    """Its bytes and scales stay; the head is written unquantized, and config.json leaves it out of the quantization."""
    model = build("deepseek_v3")
    model.save(tmp_path / "trunk", dtype=torch.bfloat16, fp8=True)
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    assert "F8_E4M3" in {info.dtype for info in origin.checkpoint.tensors.values()}
    loaded = Model.load(tmp_path / "trunk")
    head = changed(loaded.head.float())
    write_with_trunk(origin, head, tmp_path / "out", dtype=torch.bfloat16, source="runs/first")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "trunk")
    written = Inventory.of(Checkpoint.open(tmp_path / "out"))
    assert {written.info(name).dtype for name in written.own} <= {"BF16", "F32"}
    assert not [found.rule for found in audit(written.checkpoint).findings if found.severity == "error"]
    again = Model.load(tmp_path / "out")
    torch.testing.assert_close(
        again.head.stack[0].projection.weight.float(), head.stack[0].projection.weight, rtol=1e-2, atol=1e-2
    )


def test_files_of_the_trunk_are_linked(tmp_path):
    """A big trunk is not copied: a file without anything of a head is the same file."""
    model = build("glm4_moe")
    model.save(tmp_path / "trunk")
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    write_with_trunk(origin, changed(model.head), tmp_path / "out", dtype=None, source="run")
    linked = [path.name for path in (tmp_path / "out").glob("*.safetensors") if path.stat().st_nlink > 1]
    assert "model-00001-of-00002.safetensors" in linked


def test_a_head_alone_is_a_base_for_restore(tmp_path):
    origin = Inventory.of(Checkpoint.open(FIXTURES / "glm"))
    model = Model.load(FIXTURES / "glm")
    head = changed(model.head.float())
    path = tmp_path / "head" / "head.safetensors"
    write_standalone_head(origin, head, path, dtype=torch.bfloat16, source="runs/first")
    assert sorted(each.name for each in path.parent.iterdir()) == ["config.json", "head.safetensors"]
    restore(FIXTURES / "glm", path, out=tmp_path / "out", force=True)
    assert same_head(Model.load(tmp_path / "out").head, head)
    with pytest.raises(ConfigError, match=r"ends in \.safetensors"):
        write_standalone_head(origin, head, tmp_path / "head.bin", dtype=None, source="run")


def test_a_trunk_packed_by_another_method_stays_as_it_is(tmp_path):
    """Words of int4 are bytes like others, and the config says that the head is not packed so."""
    model = build("qwen3_5")
    model.save(tmp_path / "trunk")
    (file,) = [path for path in (tmp_path / "trunk").glob("*.safetensors") if "00001-of" in path.name]
    checkpoint = Checkpoint.open(tmp_path / "trunk")
    tensors = {name: checkpoint.raw(name) for name, info in checkpoint.tensors.items() if info.file == file.name}
    tensors = {name: replace(raw, data=b"".join(raw.data())) for name, raw in tensors.items()}
    for name in [name for name in tensors if name.endswith("mlp.up_proj.weight")]:
        del tensors[name]
        tensors[name.replace(".weight", ".qweight")] = RawTensor("I32", (4, 64), bytes(range(256)) * 4)
    write_safetensors(file, tensors, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path / "trunk")
    write_index(tmp_path / "trunk", {name: info.file for name, info in checkpoint.tensors.items()}, 0)
    config = checkpoint.config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    write_json(tmp_path / "trunk" / "config.json", config)
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    write_with_trunk(origin, changed(model.head), tmp_path / "out", dtype=torch.bfloat16, source="run")
    assert trunk_bytes(tmp_path / "out") == trunk_bytes(tmp_path / "trunk")
    assert "mtp" in json.dumps(Checkpoint.open(tmp_path / "out").config["quantization_config"])


def test_a_failure_names_the_folder_and_leaves_the_old_one(tmp_path, monkeypatch):
    """Not the place where the result is prepared; two processes cannot replace one result at once."""
    model = build("glm4_moe", initializer_range=0.02)
    model.save(tmp_path / "trunk")
    origin = Inventory.of(Checkpoint.open(tmp_path / "trunk"))
    out = tmp_path / "model"
    write = partial(write_with_trunk, origin, model.head, out, dtype=None, source="run")
    write()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with owned(out), pytest.raises(CheckpointError, match=f"{out}: another process is changing"):
        write()

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(head_task, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device") as found:
        write()
    assert ".nextn" not in str(found.value)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"trunk", "model"}
