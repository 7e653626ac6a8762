"""Streaming from a hub: the bytes that are read, what stays on disk, and a hub that stops answering."""

import gc
import json
import re

import pytest
import torch
from hub import only_loopback, own_client, serve  # noqa: F401  # fixtures: no other host, no token
from packed import Case, quantize_folder
from safetensors.torch import load_file
from tiny import build, prompt

from nextn.checkpoint import remote, snapshot
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.snapshot import PartialFile
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.errors import CheckpointError
from nextn.model.model import Model

BATCHES = [torch.tensor([prompt(21, seed=1), prompt(21, seed=2)])]
SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "moe_intermediate_size": 256, "n_routed_experts": 8}
SMALL = 900_000  # headers and configs, and twice 4 KiB of some hundred tensors for the trunk's fingerprint


@pytest.fixture
def folder(tmp_path):
    """Six layers with experts, of 13 MB in all: samples and headers are small beside them."""
    build("glm4_moe", **SIZES).save(tmp_path / "model", dtype=torch.bfloat16)
    return tmp_path / "model"


@pytest.fixture
def hub(folder, monkeypatch):
    served = serve(folder, monkeypatch)
    yield served
    served.stop()


def streamed():
    return Model.load("org/model", stream=True)


def downloads(model):
    return next(s.download for s in model.trunk.checkpoint.sources.values() if isinstance(s, PartialFile))


def disk_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def is_allocated(folder):
    """Whether this file system gives space of holes back, as all usual ones of Linux do."""
    return snapshot._fallocate() is not None and disk_bytes(folder) > 0


@pytest.mark.more
def test_same_states_each_tensor_once(hub, folder, tmp_path):
    """Adjacent tensors are one range, in pieces; no tensor comes twice; layers are gone from the disk after use."""
    model, local = streamed(), Model.load(folder)
    seen = []
    output = model.trunk.run(BATCHES, on_layer=lambda progress: seen.append(disk_bytes(tmp_path / "cache")))[0]
    with torch.inference_mode():
        expected = local.trunk(BATCHES[0])
        drafts = [each.head.teacher_forced_hidden(BATCHES[0], expected.head_input, 2) for each in (model, local)]
    assert torch.equal(output.final_hidden, expected.final_hidden)
    assert all(torch.equal(*pair) for pair in zip(*drafts, strict=True))
    checkpoint = Checkpoint.open(folder)
    needed = sum(info.nbytes for info in checkpoint.tensors.values())
    assert needed <= downloads(model).num_bytes <= 1.01 * needed
    assert hub.num_bytes - downloads(model).num_bytes < SMALL
    ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", each) for name in checkpoint.files for each in hub.asked(name) if each]
    large = [int(each[2]) + 1 - int(each[1]) for each in ranges if int(each[2]) - int(each[1]) > 100_000]
    assert len(large) < 30
    layer = needed / 8
    if is_allocated(tmp_path):
        assert max(seen) < 4.5 * layer  # two layers, the head, embedding and lm_head
        assert seen[-1] < 3 * layer
    del model
    gc.collect()
    assert not list((tmp_path / "cache").rglob("model-*.safetensors"))


@pytest.mark.more
def test_a_hub_that_stops_answering(hub, folder, tmp_path):
    """One error with the address, after the retries; the same call resumes after the last complete layer."""
    model, done = streamed(), []

    def fail(progress):
        done.append(progress.index)
        hub.faults["model-00001-of-00002.safetensors"] = [(503, {})] * 1000 if progress.index == 1 else []

    with pytest.raises(CheckpointError, match=r"HTTP 503 \(5 of 5 tries\).* complete layers are in .* resumes"):
        model.trunk.run(BATCHES, folder=tmp_path / "states", on_layer=fail)
    assert done in ([0, 1], [0, 1, 2])  # the next layer may have been on its way
    hub.faults.clear()
    del model
    gc.collect()
    hub.num_bytes, again = 0, []
    output = streamed().trunk.run(BATCHES, folder=tmp_path / "states", on_layer=again.append)[0]
    assert [layer.resumed for layer in again] == [index in done for index in range(6)]
    with torch.inference_mode():
        assert torch.equal(output.final_hidden, Model.load(folder).trunk(BATCHES[0]).final_hidden)
    assert hub.num_bytes < 0.85 * sum(info.nbytes for info in Checkpoint.open(folder).tensors.values())


@pytest.mark.one_case
@pytest.mark.parametrize("case", [Case("gptq"), Case("awq", symmetric=False), Case("pack-quantized")], ids=str)
def test_packed_layers(case, tmp_path, monkeypatch):
    """Each tensor of a packed weight comes by range, once; states and head are those of the folder."""
    build("glm4_moe").save(tmp_path / "model")
    quantize_folder(tmp_path / "model", case)
    hub = serve(tmp_path / "model", monkeypatch)
    model, local = streamed(), Model.load(tmp_path / "model")
    output = model.trunk.run(BATCHES)[0]
    with torch.inference_mode():
        expected = local.trunk(BATCHES[0])
        drafts = [each.head.teacher_forced_hidden(BATCHES[0], expected.head_input, 2) for each in (model, local)]
    assert torch.equal(output.final_hidden, expected.final_hidden)
    assert all(torch.equal(*pair) for pair in zip(*drafts, strict=True))
    assert downloads(model).num_bytes == sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    hub.stop()


def test_a_disk_that_fills(hub, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot.os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be written: No space left on device; free some"):
        streamed()


@pytest.mark.more
def test_measure_a_hub_id(hub, folder, tmp_path, here, monkeypatch):
    """The record is that of the folder; the head is not downloaded again for its hash."""
    texts = tmp_path / "texts.jsonl"
    records = [{"prompt": prompt(5, seed=seed), "tokens": prompt(16, seed=seed + 9)} for seed in range(3)]
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--texts", texts, "--temperatures", 0, "-k", 2, "--json", "--stream", "--states", tmp_path / "states")
    code, out, err = here("measure", "org/model", *options)
    assert code == 0, err
    assert hub.num_bytes <= 1.01 * sum(info.nbytes for info in Checkpoint.open(folder).tensors.values()) + SMALL
    ours, theirs = json.loads(out), json.loads(here("measure", folder, *options)[1])
    for record in (ours, theirs):
        del record["stream"], record["machine"], record["model"]
    assert ours == theirs
    assert remote.TRIES == 5


TRAIN = ("--freeze-trunk", "--stream", "--head-only", "--allow-worse", "--set", "steps=2", "--set", "batch_size=2",
         "--set", "length=32", "--set", "depths=2", "--set", "eval_batches=1", "--set", "dtype=float32")  # fmt: skip


@pytest.mark.slow
def test_train_the_head_of_a_hub_id(tmp_path, here, monkeypatch):
    """The head is that of the folder; each tensor comes once, and none of the head where a file has it."""
    model = build("glm4_moe", **SIZES | {"vocab_size": 264, "num_hidden_layers": 3})
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "model", dtype=torch.bfloat16)
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} is a letter, and so on. " * 40)
    hub = serve(tmp_path / "model", monkeypatch)
    remote = ("--from", "org/model")
    needed = sum(info.nbytes for info in Checkpoint.open(tmp_path / "model").tensors.values())

    def train(name, *options):
        hub.num_bytes = 0
        code, _, err = here("train", tmp_path / name, *TRAIN, "--data", tmp_path / "text", *options)
        assert code == 0, err
        gc.collect()
        return load_file(tmp_path / name / "head" / "head.safetensors"), hub.num_bytes

    local, _ = train("local", "--from", tmp_path / "model")
    assert here("extract", tmp_path / "model", tmp_path / "head.safetensors")[0] == 0
    file = tmp_path / "head.safetensors"
    for name, own, num_bytes in (("first", (), needed), ("second", ("--head", file), needed - file.stat().st_size)):
        head, num_read = train(name, *remote, *own)
        assert all(torch.equal(value, local[key]) for key, value in head.items())
        assert num_bytes <= num_read <= 1.01 * num_bytes + SMALL
    code, _, err = here("train", tmp_path / "other", *TRAIN[:2], "--data", tmp_path / "text", *remote)
    assert (code, "of org/model, only what is needed is downloaded" in err) == (2, True)
    hub.stop()
