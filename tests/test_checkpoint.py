"""Checkpoints: which files make one up, what it says of those that disagree, tensors by range, and the head in them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from artifacts import LAYERS, LAYOUTS, inventory_of, publish
from huggingface_hub import constants
from quick import loop
from test_safetensors_file import METADATA, raw_bytes, sample, theirs, u8

from nextn.checkpoint import checkpoint
from nextn.checkpoint.checkpoint import Checkpoint, write_index
from nextn.checkpoint.safetensors_file import RawTensor, write_json, write_safetensors
from nextn.checkpoint.tensors import is_finite
from nextn.errors import CheckpointError, FamilyError

_ = theirs  # a fixture


@pytest.fixture
def sharded(tmp_path):
    """Two shards with an index, a config, and a side file that the index does not name."""
    write_safetensors(tmp_path / "model-1.safetensors", {"a": u8(1), "b": u8(2, 3)})
    write_safetensors(tmp_path / "model-2.safetensors", {"c": u8(4)})
    write_safetensors(tmp_path / "mtp.safetensors", {"mtp.fc": u8(5)})
    shards = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    write_index(tmp_path, shards, 4)
    write_json(tmp_path / "config.json", {"model_type": "qwen3_next", "time_step_limit": [0.0, float("inf")]})
    return tmp_path


def test_no_torch_no_numpy():
    """Catches an import that would make `nextn audit` start in seconds instead of a tenth of one."""
    code = "import sys, nextn.checkpoint.checkpoint as _\nsys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_reads_what_the_library_wrote(theirs):
    """Catches wrong offsets, shapes or dtypes: every tensor's bytes equal torch's, and the header is complete."""
    opened = Checkpoint.open(theirs)
    assert set(opened.tensors) == set(sample())
    assert opened.headers["model.safetensors"].metadata == METADATA
    assert (opened.config, opened.index, opened.unindexed, opened.problems) == ({}, None, (), ())
    for name, tensor in sample().items():
        assert opened.info(name).shape == tuple(tensor.shape)
        assert opened.info(name).nbytes == tensor.nbytes
        assert opened.read_bytes(name) == raw_bytes(tensor), name


def test_long_tensors_come_in_chunks(theirs, monkeypatch):
    """Catches a lost or repeated byte where one chunk ends and the next begins."""
    monkeypatch.setattr(checkpoint, "CHUNK", 7)
    opened = Checkpoint.open(theirs)
    assert [len(piece) for piece in opened.chunks("model.torch.float32")] == [7] * 8 + [4]
    assert opened.read_bytes("model.torch.float32") == raw_bytes(sample()["model.torch.float32"])


def test_sharded(sharded):
    """Catches a shard, config or side file that is not opened, and side files taken for indexed ones."""
    opened = Checkpoint.open(str(sharded))
    assert opened.files == ("model-1.safetensors", "model-2.safetensors", "mtp.safetensors")
    assert opened.unindexed == ("mtp.safetensors",)
    assert opened.index is not None
    assert opened.problems == ()
    assert {name: opened.read_bytes(name) for name in opened.tensors} == {
        "a": b"\1", "b": b"\2\3", "c": b"\4", "mtp.fc": b"\5",
    }  # fmt: skip
    assert opened.config == {"model_type": "qwen3_next", "time_step_limit": [0.0, float("inf")]}
    assert opened.read_json("config.json") == opened.config
    assert opened.read_json("hf_quant_config.json") is None


def test_side_file_without_index(tmp_path):
    """Catches a side file beside model.safetensors that passes for loaded, and a lone foreign name that does not."""
    write_safetensors(tmp_path / "mtp.safetensors", {"mtp.fc": u8(1)})
    assert Checkpoint.open(tmp_path).unindexed == ()
    write_safetensors(tmp_path / "model.safetensors", {"a": u8(1)})
    assert Checkpoint.open(tmp_path).unindexed == ("mtp.safetensors",)


def test_single_file_sees_only_its_config(sharded):
    """Catches a single file that is opened together with its neighbors, or without its config."""
    opened = Checkpoint.open(sharded / "mtp.safetensors")
    assert (opened.files, opened.index, opened.config["model_type"]) == (("mtp.safetensors",), None, "qwen3_next")


def test_subfolders_and_resource_forks(sharded):
    """Catches a shard of a subfolder that the index names but is not opened, and junk files that are."""
    write_safetensors(sharded / "head" / "x.safetensors", {"x": u8(1)})
    write_safetensors(sharded / "original" / "y.safetensors", {"y": u8(1)})
    (sharded / "._model-1.safetensors").write_bytes(b"Mac OS X")
    write_index(sharded, {"x": "head/x.safetensors"}, 1)
    opened = Checkpoint.open(sharded)
    assert "head/x.safetensors" in opened.files
    assert "y" not in opened.tensors
    assert opened.read_bytes("x") == b"\1"


@pytest.mark.parametrize(
    ("weight_map", "kind", "file", "tensor"),
    [
        ({"gone": "model-2.safetensors"}, "missing_tensor", "model-2.safetensors", "gone"),
        ({"x": "model-9.safetensors", "y": "model-9.safetensors"}, "missing_file", "model-9.safetensors", None),
        ({"x": "../model-2.safetensors"}, "missing_file", "../model-2.safetensors", None),
        ({"c": "model-1.safetensors"}, "misplaced", "model-2.safetensors", "c"),
        ({"mtp.fc": "model-1.safetensors"}, "misplaced", "mtp.safetensors", "mtp.fc"),
        ({"b": None}, "unlisted", "model-1.safetensors", "b"),
    ],
)
def test_problem(sharded, weight_map, kind, file, tensor):
    """Catches a disagreement that raises, is passed over, or is told more than once."""
    index = json.loads((sharded / checkpoint.INDEX).read_text())["weight_map"] | weight_map
    write_index(sharded, {name: at for name, at in index.items() if at}, 4)
    opened = Checkpoint.open(sharded)
    [problem] = opened.problems
    assert (problem.kind, problem.file, problem.tensor) == (kind, file, tensor)
    assert file in problem.message


@pytest.mark.parametrize("home", ["model-1.safetensors", "model-2.safetensors"])
def test_duplicate(sharded, home):
    """Catches a tensor that two files hold and nobody reports, or whose copy is not the one the index means."""
    write_safetensors(sharded / "model-2.safetensors", {"a": u8(9), "c": u8(4)})
    write_index(sharded, {"a": home, "b": "model-1.safetensors", "c": "model-2.safetensors"}, 5)
    opened = Checkpoint.open(sharded)
    assert [(p.kind, p.file, p.tensor) for p in opened.problems] == [("duplicate", "model-2.safetensors", "a")]
    assert opened.info("a").file == home


def test_all_damaged_files_are_named(sharded):
    """Catches a user who mends one shard, only to learn of the next."""
    for name in ("model-1.safetensors", "mtp.safetensors"):
        content = (sharded / name).read_bytes()
        (sharded / name).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"model-1.*truncated by 1 bytes(.|\n)*mtp.*truncated"):
        Checkpoint.open(sharded)


@loop(
    ("name", "content", "says"),
    [
        ("config.json", b"{", "config.json: not readable as JSON"),
        ("config.json", b"[]", "must be a JSON object"),
        ("config.json", b"\xff\xfe\xfd", "not readable as JSON"),
        ("config.json", b"[" * 100_000, "not readable as JSON"),
        ("config.json", b'{"a": "\\ud800"}', "config.json: not readable as JSON: .*lone surrogate"),
        ("config.json", b'{"a": "\xed\xa0\x80"}', "config.json: not readable as JSON: .*can't decode byte 0xed"),
        ("config.json", b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "nested more than 100 deep"),
        ("config.json", b'{"a":[' + b"[]," * 300_000 + b"0]}", "600,002 JSON values, at most 500,000 are read"),
        ("config.json", b'{"a": "' + b"x" * 2**24 + b'"}', "16,777,225 bytes, at most 16,777,216 are read"),
        ("config.json", b" ", "config.json: not readable as JSON: it is empty. Download or save it again"),
        ("config.json", b"\n<!DOCTYPE html><title>Log in", "needs a login"),
        (checkpoint.INDEX, b"version https://git-lfs.github.com/spec/v1\noid sha256:0", r"git lfs pull.*--reindex"),
        (checkpoint.INDEX, b'{"weight_map": {"a": "b.safe', "not readable as JSON.* remove it, .*--reindex"),
        (checkpoint.INDEX, b"{}", "weight_map is None"),
        (checkpoint.INDEX, b'{"weight_map": {"a": 1}}', "weight_map is {'a': 1}"),
    ],
)
def test_damaged_json(sharded, name, content, says):
    """Catches a traceback, or a config taken as empty, where a JSON file is broken."""
    (sharded / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(sharded)


def test_nothing_to_open(tmp_path):
    """Catches a message that does not tell the user what to give instead."""
    with pytest.raises(CheckpointError, match=r"no \.safetensors file. It has no files"):
        Checkpoint.open(tmp_path)
    for name in ("epoch=0-step=10.ckpt", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=rf"{name}.*: pickle files are not read.*save_file"):
            Checkpoint.open(tmp_path)
    for wrong in (tmp_path / "pytorch_model.bin", tmp_path / "gone", "./no/such", "name", "a b/c", "x" * 5000):
        with pytest.raises(CheckpointError, match=r"neither a folder|cannot be read|pickle files are not read"):
            Checkpoint.open(wrong)


def test_gguf_files_are_converted_first(tmp_path):
    """Catches a message that does not name the command that reads such a file, and one that does where none is."""
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "some.gguf"):
        with pytest.raises(CheckpointError, match=r"`nextn convert \S*some.gguf OUT`"):
            Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=r"gone.gguf: no such file"):
        Checkpoint.open(tmp_path / "gone.gguf")


def test_unknown_tensor(sharded):
    """Catches a bare KeyError."""
    with pytest.raises(CheckpointError, match="no tensor 'nope'; it has a, b, c and 1 more"):
        Checkpoint.open(sharded).read_bytes("nope")


def test_file_shrinks_after_opening(sharded):
    """Catches short reads that would be written on as tensors."""
    opened = Checkpoint.open(sharded)
    os.truncate(sharded / "model-1.safetensors", 20)
    with pytest.raises(CheckpointError, match="became shorter"):
        opened.read_bytes("b")


def test_unreadable(sharded):
    """Catches a bare OSError where the system refuses to read."""
    opened = Checkpoint.open(sharded)
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: cannot be read: No such file.*another process"):
        opened.read_bytes("b")


def test_index_is_what_transformers_writes(tmp_path):
    """Catches an index whose fields loaders do not find."""
    write_index(tmp_path, {"b": "2.safetensors", "a": "1.safetensors"}, 12)
    written = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert written == {"metadata": {"total_size": 12}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}


def test_same_bits(tmp_path):
    """Equal numbers of another dtype are not the same."""
    tensors = {"a": u8(1), "b": u8(1), "c": RawTensor("I8", [1], b"\1"), "d": u8(2)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    opened = Checkpoint.open(tmp_path)
    a, b, c, d = (opened.tensors[name] for name in "abcd")
    assert opened.same(a, b)
    assert not opened.same(a, c)
    assert not opened.same(a, d)


def test_a_wrong_path_says_how_it_was_read(tmp_path, monkeypatch):
    """A mistyped folder looks like a hub id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"hf download.*no folder out/modle here, so it was taken as a hub id"):
        Checkpoint.open("out/modle")


@loop("name", LAYOUTS)
def test_every_tensor_has_its_place(name, tmp_path):
    """A head tensor taken for the trunk's, or one of the trunk's for the head's."""
    found = inventory_of(publish(tmp_path, name))
    assert (found.declared, found.modules, found.unrecognized, found.duplicates) == (1, (0,), (), {})
    assert set(found.family.names) - set(found.family.read_only_copies) <= {found.role(each) for each in found.stored}
    assert set(found.shared) == ({"embedding"} if LAYOUTS[name].tied else {"embedding", "output"})
    assert sorted(found.layers) == list(range(LAYERS))
    others = len(LAYOUTS[name].extra) + bool(LAYOUTS[name].norm)
    count = len(found.stored) + len(found.shared) + sum(map(len, found.layers.values())) + others
    assert count == len(found.checkpoint.tensors)


def test_unrecognized_tensors(tmp_path):
    """A head that the family does not know must not pass for a trunk without one."""

    def rename(table):
        for name in [each for each in table if each.startswith("mtp.")]:
            table["nextn." + name.removeprefix("mtp.")] = table.pop(name)

    found = inventory_of(publish(tmp_path, "qwen3_5", change=rename))
    assert not found.stored
    assert "nextn.fc.weight" in found.unrecognized


def test_aliases_and_spellings(tmp_path):
    """A tensor under two spellings is reported, and the published one counts."""

    def double(table):
        table["model.layers.2.shared_head.norm.weight"] = table["model.layers.2.transformer.shared_head.norm.weight"]

    found = inventory_of(publish(tmp_path, "step3p5", change=double))
    assert len(found.duplicates["0.final_norm.weight"]) == 2
    assert found.stored["0.final_norm.weight"] == "model.layers.2.transformer.shared_head.norm.weight"


def test_wrapped_names(tmp_path):
    """Vision-language checkpoints put the same head behind a prefix; the vision tower's layers are not the trunk's."""

    def wrap(table):
        for name in [each for each in table if each.startswith("model.")]:
            table["model.language_model." + name.removeprefix("model.")] = table.pop(name)
        table["model.visual.layers.40.norm.weight"] = table["mtp.norm.weight"]

    found = inventory_of(publish(tmp_path, "qwen3_5", change=wrap))
    assert sorted(found.layers) == [0, 1]
    assert found.unrecognized == ()
    assert found.shared["embedding"] == "model.language_model.embed_tokens.weight"


def test_undecidable_checkpoints(tmp_path):
    """No layer count, or a type without a row: an error that says what is missing."""
    for count, found in ((None, "none"), (-3, "num_hidden_layers = -3"), (0, "num_hidden_layers = 0")):
        folder = publish(tmp_path / str(count), "glm4_moe", config={"num_hidden_layers": count})
        words = f"num_hidden_layers, an integer of 1 or more, is needed .* config.json has {found}"
        with pytest.raises(CheckpointError, match=words):
            inventory_of(folder)
    with pytest.raises(FamilyError, match="llama"):
        inventory_of(publish(tmp_path / "b", "glm4_moe", config={"model_type": "llama"}))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_anywhere(dtype):
    """Also in the tails that vector loops leave, and beside values whose sum would be infinite."""
    assert is_finite(torch.empty(0, dtype=dtype))
    for size in (1, 7, 33, 100):
        values = torch.full((size,), 3e38 if dtype in (torch.float32, torch.bfloat16, torch.float64) else 400.0)
        assert is_finite(values.to(dtype))
        for bad in ("nan",) if dtype == torch.float8_e4m3fn else ("nan", "inf", "-inf"):
            for index in range(size):
                spoiled = values.clone()
                spoiled[index] = float(bad)
                assert not is_finite(spoiled.to(dtype)), (size, index, bad)


def test_matrices_and_views():
    matrix = torch.ones(5, 40)
    assert is_finite(matrix.T[::2])
    matrix[3, 39] = float("nan")
    assert not is_finite(matrix.T[1::2])
    assert is_finite(matrix[:3])


def test_subclasses():
    """A tensor made of others has their values, one without parts its own."""

    class Plain(torch.Tensor):
        pass

    class Packed(torch.Tensor):
        def __tensor_flatten__(self):
            return ["codes", "scale"], None

    def packed(scale: float) -> torch.Tensor:
        tensor = torch.zeros(3).as_subclass(Packed)
        tensor.codes, tensor.scale = torch.ones(3, dtype=torch.uint8), torch.tensor([1.0, scale])
        return tensor

    assert is_finite(torch.ones(3).as_subclass(Plain))
    assert is_finite(packed(2.0))
    for bad in (float("nan"), float("inf")):
        assert not is_finite(torch.tensor([1.0, bad]).as_subclass(Plain)), bad
        assert not is_finite(packed(bad)), bad
