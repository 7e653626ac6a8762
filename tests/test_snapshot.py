"""snapshot: of a hub checkpoint, the files that loading needs and no others; then the cache alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub import SHA, only_loopback, own_client, serve  # noqa: F401  # fixtures: no other host, no token
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from stored import INDEX, set_config
from tiny import build

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.errors import CheckpointError
from nextn.model.model import Model
from nextn.model.text_interface import TextInterface

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A GLM-layout checkpoint, its head in a side file that the index does not name, and files that nobody needs."""
    folder = tmp_path / "published"
    build("glm4_moe").save(folder)
    (folder / SHARD).rename(folder / "mtp.safetensors")
    record = json.loads((folder / INDEX).read_text())
    record["weight_map"] = {name: file for name, file in record["weight_map"].items() if file != SHARD}
    (folder / INDEX).write_text(json.dumps(record))
    save_file({"lora_A": torch.zeros(2)}, folder / "adapter.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    served = serve(folder, monkeypatch)
    yield served
    served.stop()


def cached(cache: Path) -> set[str]:
    (snapshot,) = cache.glob("models--org--model/snapshots/*")
    assert snapshot.name == SHA
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if not path.is_dir()}


@pytest.mark.more
def test_only_what_is_needed(hub, tmp_path, monkeypatch):
    """An adapter, a pickle or another format's folder fetched; the head's own file left out; a second download."""
    cache = tmp_path / "cache"
    model = Model.load("org/model")
    expected = Model.load(tmp_path / "published")
    assert torch.equal(model.head.stack[0].projection.weight, expected.head.stack[0].projection.weight)
    assert model.notes == expected.notes
    needed = {"config.json", "generation_config.json", INDEX, "model-00001-of-00002.safetensors", "mtp.safetensors"}
    assert cached(cache) == needed & set(hub.files)
    hub.requests.clear()
    Model.load("org/model@v1")
    assert not [path for path, headers in hub.requests if headers.get("Range") == "all"]
    hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = Model.load("org/model")
    assert torch.equal(again.trunk.output.weight, expected.trunk.output.weight)


def test_no_head_no_download(hub, tmp_path):
    """Hundreds of gigabytes are fetched, and only then the promised head turns out to be absent."""
    del hub.files["mtp.safetensors"]
    with pytest.raises(CheckpointError, match=r"org/model: no MTP head .*`nextn restore org/model --from BASE`"):
        Model.load("org/model")
    assert not (tmp_path / "cache").exists()
    assert Model.load("org/model", need_head=False).head is None


@pytest.mark.parametrize(("status", "words"), [(401, "the hub requires a token"), (403, "the token has no access")])
def test_refused_downloads(hub, tmp_path, status, words):
    """A traceback of the hub's client in place of one line that says what to do."""
    hub.faults["download"] = [status]
    with pytest.raises(CheckpointError, match=f"org/model: the download failed with HTTP {status}: {words}"):
        Model.load("org/model")


def test_offline_without_a_cache(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"org/model: offline, and .*`hf download org/model`"):
        Model.load("org/model")


@pytest.mark.more
def test_a_part_of_the_cache(hub, tmp_path, monkeypatch):
    """A cache that an interrupted download left: offline, what lacks is named; online, the rest is fetched."""
    cache = tmp_path / "cache"
    Model.load("org/model")
    (snapshot,) = cache.glob("models--org--model/snapshots/*")
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match=r"in model-00001-of-00002\.safetensors, which is absent"):
            Model.load("org/model")
    assert Model.load("org/model").head is not None


def test_a_single_file(tmp_path):
    """A file is loaded as it is called, with the config.json beside it."""
    build("glm4_moe").save(tmp_path / "model")
    table = {
        name: value for file in (tmp_path / "model").glob("*.safetensors") for name, value in load_file(file).items()
    }
    (tmp_path / "one").mkdir()
    save_file(table, tmp_path / "one" / "whole model.safetensors")
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "one")
    set_config(tmp_path / "one", dtype=None)
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "one" / "other.safetensors")
    model = Model.load(tmp_path / "one" / "whole model.safetensors")
    assert torch.equal(model.head.stack[0].projection.weight, table["model.layers.2.eh_proj.weight"])


@pytest.mark.more
def test_config_and_tokenizer_without_weights(hub, tmp_path):
    """What an engine's texts must fit, of a model whose weights are never downloaded."""
    model = build("glm4_moe", vocab_size=264)
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "with-tokenizer")
    for path in (tmp_path / "with-tokenizer").glob("*.json"):
        hub.files[path.name] = path.read_bytes()
    read = TextInterface.read("org/model")
    loaded = Model.load(tmp_path / "with-tokenizer")
    own = TextInterface.of(loaded.trunk, loaded.tokenizer)
    assert (read.vocab_size, read.max_length, read.eos) == (own.vocab_size, own.max_length, own.eos)
    assert read.tokenizer("ab")["input_ids"] == own.tokenizer("ab")["input_ids"]
    assert not [path for path, _ in hub.requests if path.endswith(".safetensors")]
