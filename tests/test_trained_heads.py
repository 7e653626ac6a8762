"""Heads as speculators 0.9 and Unsloth 2026.10 wrote them from tiny models: read, restored, converted like others."""

import json
import re
import shlex
import shutil

import pytest
from artifacts import load_json, publish
from hub import Hub, only_loopback, own_client  # noqa: F401
from quick import loop
from test_restore import without

import nextn
from nextn.audit_rules import audit
from nextn.checkpoint.checkpoint import CONFIG, INDEX, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.safetensors_file import RawTensor, write_safetensors
from nextn.checkpoint.snapshot import folder_of
from nextn.checkpoint.tensors import TensorReader, bytes_of
from nextn.checkpoint.trained_heads import SIDE_HEAD, renamed_head
from nextn.edit.export import export
from nextn.errors import CheckpointError, NextnError

# Published name -> that of speculators, whose experts are fused.
SPECULATORS = {"mtp.fc.": "input_proj.", "mtp.norm.": "final_layernorm.", "mtp.layers.0.": "",
               "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
               "mtp.pre_fc_norm_embedding.": "token_layernorm."}  # fmt: skip


def head_of(folder):
    """Published name -> tensor, of the head's own."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.raw(name) for name in checkpoint.tensors if name.startswith("mtp.")}


def contents(folder):
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read_bytes(name) for name in checkpoint.tensors if name.startswith("mtp.")}


def speculators(base, folder):
    folder.mkdir()
    table = {}
    for name, value in head_of(base).items():
        start = next(start for start in SPECULATORS if name.startswith(start))
        table[f"mtp_layers.0.{SPECULATORS[start]}{name.removeprefix(start)}"] = value
    table["verifier_lm_head.weight"] = RawTensor("BF16", (64, 32), bytes(4096))
    write_safetensors(folder / "model.safetensors", table, metadata={"format": "pt"})
    config = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
              "speculators_config": {"algorithm": "mtp"},
              "transformer_layer_config": load_json(base / CONFIG)}  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def unsloth(base, folder):
    """An adapter's folder with a head beside it."""
    folder.mkdir(exist_ok=True)
    table = {name.removeprefix("mtp."): value for name, value in head_of(base).items()}
    write_safetensors(folder / SIDE_HEAD, table, metadata={"format": "pt"})
    return folder / SIDE_HEAD


def fused(path, name):
    base = publish(path / "split", name)
    if name == "qwen3_5":
        return base
    nextn.convert(base, path / "base", experts="fused")
    return path / "base"


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_speculators(name, tmp_path):
    """The head that a converter wrote goes back into a model, byte for byte, and to a file of its own."""
    base = fused(tmp_path, name)
    head, target = speculators(base, tmp_path / "head"), publish(tmp_path / "target", name, change=without(name))
    assert audit(head).modules == (0,)
    assert not [each for each in audit(head).findings if each.severity == "error"]
    with TensorReader(Inventory.of(Checkpoint.open(head))) as reader:
        assert {name: bytes_of(reader.read(name)) for name in reader.names()} == contents(base)
    nextn.restore(target, head)
    nextn.extract(head, tmp_path / "alone" / "head.safetensors")
    nextn.convert(head, tmp_path / "converted")
    for folder in (target, tmp_path / "alone", tmp_path / "converted"):
        assert contents(folder) == contents(base), folder
    assert "speculators_model_type" not in load_json(tmp_path / "converted" / CONFIG)


def test_speculators_head_of_another_model(tmp_path):
    """None of the families that store such a head."""
    head = speculators(publish(tmp_path / "base", "qwen3_5"), tmp_path / "head")
    config = load_json(head / CONFIG)
    others = [{"transformer_layer_config": model} for model in ({"model_type": "qwen3"}, None, [1])]
    for other in (*others, {"speculators_model_type": "eagle3"}):
        (head / CONFIG).write_text(json.dumps(config | other))
        with pytest.raises(NextnError, match="layout of the speculators library"):
            Checkpoint.open(head)


def stored(folder, names, **config):
    """Add tensors to a folder's file, and fields to its config.json."""
    checkpoint = Checkpoint.open(folder)
    table = {stored: checkpoint.raw(name) for name, stored in checkpoint.stored_names.items()}
    write_safetensors(folder / "model.safetensors", table | {name: RawTensor("BF16", (2,), bytes(4)) for name in names})
    (folder / CONFIG).write_text(json.dumps(load_json(folder / CONFIG) | config))
    return folder


@loop(
    "names, config, message",
    (
        (["mtp_layers.1.input_proj.weight"], {}, "mtp_layers.1.input_proj.weight"),
        (["mtp_layers.1.input_proj.weight"], {"num_nextn_predict_layers": 2}, "mtp_layers.1.input_proj.weight"),
        (["mtp_layers.extra.weight"], {}, "mtp_layers.extra.weight"),
        ([], {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ([], {"num_nextn_predict_layers": None}, "num_nextn_predict_layers is null"),
        (["mtp.fc.weight"], {}, "mtp_layers.0.input_proj.weight"),
    ),
)
def test_speculators_head_that_is_not_read(names, config, message, tmp_path):
    """Of several layers, or with two tensors in one place: nothing of it is dropped."""
    head = stored(speculators(publish(tmp_path / "base", "qwen3_5"), tmp_path / "head"), names, **config)
    with pytest.raises(CheckpointError, match=f"^{head}: .*{re.escape(message)}"):
        Checkpoint.open(head)


def test_two_names_of_one_tensor():
    with pytest.raises(CheckpointError, match=r"fc\.weight and mtp\.fc\.weight"):
        renamed_head({}, ["fc.weight", "mtp.fc.weight"], [SIDE_HEAD])


def test_tensors_that_speculators_does_not_write(tmp_path):
    """They are kept, and named as not checked; only the verifier's copies are left out."""
    head = speculators(publish(tmp_path / "base", "qwen3_5"), tmp_path / "head")
    stored(head, ["embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"])
    assert not [line for line in audit(head).unchecked if "outside" in line]
    assert all(name.startswith("mtp.") for name in Checkpoint.open(head).tensors)
    stored(head, ["adapter.weight"])
    assert [line for line in audit(head).unchecked if "adapter.weight" in line]
    stored(head, ["mtp_layers.0.extra.weight"])
    assert "mtp.layers.0.extra.weight" in Checkpoint.open(head).tensors


def test_problems_are_of_published_names(tmp_path):
    """Of a file that is there twice: a report has one kind of names."""
    head = speculators(publish(tmp_path / "base", "qwen3_5"), tmp_path / "head")
    shutil.copy(head / "model.safetensors", head / "model-copy.safetensors")
    names = {each.tensor for each in Checkpoint.open(head).problems} - {None}
    assert names
    assert not [name for name in names if name.startswith("mtp_layers.0.")]


def lone(base, folder):
    """The files of a model of which its own are absent, and Unsloth's head."""
    unsloth(base, folder)
    (folder / CONFIG).write_bytes((base / CONFIG).read_bytes())
    return "model.embed_tokens.weight"


def lost(base, folder):
    """A head of speculators in two files, of which the second is absent."""
    speculators(base, folder)
    return "mtp_layers.0.token_layernorm.bias"


@pytest.mark.parametrize("make", [lone, lost])
def test_absent_files_of_an_index(make, tmp_path):
    """A head's tensors beside an index that names more are not the whole of a checkpoint."""
    base, folder = publish(tmp_path / "base", "qwen3_5"), tmp_path / "folder"
    name = make(base, folder)
    table = {name: "model-2.safetensors"}
    if make is lost:
        table |= dict.fromkeys(Checkpoint.open(folder).stored_names.values(), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))
    report = audit(folder)
    assert not report.clean
    checkpoint = Checkpoint.open(folder)
    assert "model-2.safetensors" in {each.file for each in checkpoint.problems}
    assert bool(checkpoint.stored_names) == (make is lost)  # what is left of a model is no head alone
    assert all(each.startswith("mtp.") for each in checkpoint.index) == (make is lost)
    assert [each for each in report.findings if each.severity == "error" and "model-2.safetensors" in each.found]


@pytest.mark.more
@pytest.mark.parametrize("adapter", [True, False])
def test_unsloths_file(adapter, tmp_path):
    """The sentence on the adapter's folder, and the finding on the model beside it, name the command that restores."""
    base = publish(tmp_path / "base", "qwen3_5")
    target = publish(tmp_path / "a target", "qwen3_5", change=without("qwen3_5"))
    folder = tmp_path / "an adapter" if adapter else target
    file = unsloth(base, folder)
    if adapter:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        with pytest.raises(NextnError) as caught:
            Checkpoint.open(folder)
        said = str(caught.value)
    else:
        (said,) = (each.fix for each in audit(target).findings if each.rule == "head-absent")
    command = shlex.split(re.search("nextn restore [^`]*", said)[0])
    assert command[-1] == str(file)
    nextn.restore(target, command[-1])
    assert contents(target) == contents(base)
    assert audit(target).clean


@pytest.mark.parametrize("ref", ["", "@v1"])
@pytest.mark.parametrize("other", ["model.safetensors", "adapter_config.json"])
def test_unsloths_file_on_the_hub(other, ref, tmp_path):
    """It is downloaded first: beside a model, and in an adapter's repository."""
    target = publish(tmp_path / "a target", "qwen3_5", change=without("qwen3_5"))
    unsloth(publish(tmp_path / "base", "qwen3_5"), target)
    (target / "adapter_config.json").write_text("{}")
    names = {SIDE_HEAD, other, *([CONFIG] if "model" in other else [])}
    hub = Hub({name: (target / name).read_bytes() for name in names})
    try:
        if "model" in other:
            (said,) = (each.fix for each in audit(hub.open(f"org/model{ref}")).findings if each.rule == "head-absent")
        else:
            with pytest.raises(NextnError) as caught:
                hub.open(f"org/model{ref}")
            said = str(caught.value)
    finally:
        hub.stop()
    pinned = " --revision v1" if ref else ""
    assert f"`hf download org/model {SIDE_HEAD}{pinned} --local-dir DIR`, then `nextn restore " in said
    assert re.search("nextn restore [^`]*", said)[0].endswith(f"--from DIR/{SIDE_HEAD}")


def test_a_head_alone_is_not_indexed(tmp_path, here):
    """Loaders find none of its tensors, whatever an index says."""
    head = speculators(publish(tmp_path / "base", "qwen3_5"), tmp_path / "a head")
    for args in (("convert", head, "--reindex"), ("convert", head, tmp_path / "out", "--reindex")):
        code, _, err = here(*args)
        assert (code, f"nextn restore MODEL --from '{head}'" in " ".join(err.split())) == (2, True), err


@pytest.mark.more
def test_a_file_beside_a_model_is_not_the_model(tmp_path):
    """A draft model's names in a file that loaders do not open make no draft model of the folder."""
    base = publish(tmp_path / "base", "qwen3_5")
    unsloth(base, base)
    (base / SIDE_HEAD).rename(base / "other.safetensors")
    assert [each.place for each in audit(base).findings if each.severity != "note"] == ["other.safetensors"]


@pytest.mark.more
def test_a_head_alone_is_not_served(tmp_path, here):
    """Engines have no command for it: what is printed puts it into its trunk first."""
    base = publish(tmp_path / "base", "qwen3_5")
    nextn.extract(base, tmp_path / "alone" / "head.safetensors")
    with pytest.raises(CheckpointError, match="--head"):
        folder_of(Checkpoint.open(speculators(base, tmp_path / "head")))
    for head in (tmp_path / "alone", tmp_path / "head"):
        code, _, err = here("serve", head, "--print", "vllm")
        assert (code, "restore MODEL" in err) == (2, True)
        code, _, err = here("generate", head, "a")
        assert (code, "--head" in err) == (2, True)
        with pytest.raises(NextnError, match=f"nextn restore {base} --from {head} --force"):
            export(head, tmp_path / "out", "vllm", trunk=base)
