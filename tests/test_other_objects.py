"""Folders that are no model: a sentence says what they are and what to do, by every command, with exit code 2."""

# ruff: noqa: C408, E501

import json
import os
import re

import pytest
from quick import loop
from tiny import FIXTURES
from typer.testing import CliRunner

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.other_objects import TRAINING
from nextn.checkpoint.safetensors_file import RawTensor, write_safetensors
from nextn.cli import app
from nextn.errors import CheckpointError, NextnError

WEIGHTS = "model.safetensors"


def folder(path, *names, config=None, adapter=None, weights=()):
    path.mkdir(exist_ok=True)
    for name in names:
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")
    for name, document in (("config.json", config), ("adapter_config.json", adapter)):
        if document is not None:
            (path / name).write_text(json.dumps(document))
    for name in weights:
        write_safetensors(path / name, {"fc.weight": RawTensor("F32", (1,), lambda: iter([bytes(4)]))})
    return path


LORA = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8, "modules_to_save": ["mtp"]}
CASES = {
    "adapter": (dict(adapter=LORA, weights=["adapter_model.safetensors"]), "a LoRA adapter of org/base", "merge it first"),
    "adapter beside its base's config": (dict(config={"model_type": "qwen3_5"}, adapter=LORA, weights=[
        "adapter_model.safetensors"]), "a LoRA adapter of org/base", "merge it first"),
    "adapter in .bin": (dict(names=["adapter_model.bin"], adapter=LORA), "a LoRA adapter of org/base", "merge it first"),
    "another adapter": (dict(adapter={"peft_type": "IA3"}, weights=["adapter_model.safetensors"]), "an IA3 adapter", "merge"),
    "adapter of a local base": (dict(adapter={"base_model_name_or_path": "/data/x"}), "LoRA adapter of /data/x", "restore"),
    "DeepSpeed": (dict(names=["latest", "zero_to_fp32.py", "global_step10/mp_rank_00_model_states.pt"]), "DeepSpeed",
                  "zero_to_fp32.py"),
    "DeepSpeed's step": (dict(names=["global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]), "DeepSpeed", "OUT"),
    "FSDP": (dict(names=["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"]), "FSDP, DCP",
             "accelerate merge-weights"),
    "DCP": (dict(names=[".metadata", "__0_0.distcp", "__1_0.distcp"]), "FSDP, DCP", "accelerate merge-weights"),
    "Megatron": (dict(names=["latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/model_optim_rng.pt"]),
                 "Megatron", "Hugging Face layout"),
    "Megatron's iteration": (dict(names=["common.pt", "metadata.json", "__0_0.distcp"]), "Megatron", "Bridge"),
    "PaddlePaddle": (dict(names=["model_state.pdparams"], config={"model_type": "ernie4_5_moe"}), "PaddlePaddle", "-PT"),
    "ONNX": (dict(names=["model.onnx", "model.onnx_data"], config={"model_type": "qwen3_5"}), "ONNX", "exported from"),
    "MLX": (dict(names=["weights.npz"], config={"model_type": "qwen3"}), "MLX", "converted from"),
    "OpenVINO": (dict(names=["openvino_model.xml", "openvino_model.bin"], config={}), "OpenVINO", "exported from"),
    "MLC": (dict(names=["mlc-chat-config.json", "params_shard_0.bin"]), "MLC", "converted from"),
    "Core ML": (dict(names=["Manifest.json", "Data/com.apple.CoreML/model.mlmodel"]), "Core ML", "exported from"),
    "NeMo": (dict(names=["model.nemo"]), "NeMo", "Hugging Face layout"),
    "NeMo's folder": (dict(names=["context/model.yaml", "weights/__0_0.distcp", "weights/.metadata"]), "NeMo", "MTP layers"),
    "TensorFlow": (dict(names=["tf_model.h5"], config={"model_type": "llama"}), "TensorFlow", "safetensors"),
    "DVC": (dict(names=["model.safetensors.dvc"], config={"model_type": "llama"}), "DVC", "dvc pull"),
    "hub cache": (dict(names=["blobs/aa", "refs/main", "snapshots/ab/config.json"]), "Hugging Face cache", "hub id"),
    "verl": (dict(names=["actor/model_world_size_8_rank_0.pt", "actor/huggingface/config.json"]), "verl", "model_merger"),
    "verl's run": (dict(names=["global_step_100/actor/x.pt", "latest_checkpointed_iteration.txt"]), "verl", "model_merger"),
    "an adapter of mlx_lm": (dict(adapter={"fine_tune_type": "lora", "model": "org/base"}, weights=["adapters.safetensors"]),
                             "an adapter of mlx_lm for org/base", "mlx_lm.fuse --model org/base"),
    "TensorRT-LLM": (dict(config={"architecture": "X", "mapping": {}}, weights=["rank0.safetensors"]), "TensorRT-LLM's layout",
                     "converted from"),
    "a state of vLLM for each rank": (dict(config={"model_type": "glm4_moe"}, weights=["model-rank-0-part-0.safetensors"]),
                                      "a sharded state of vLLM or SGLang", "made from"),
    "tensorizer": (dict(names=["model.tensors"], config={}), "tensorizer", "made from"),
    "CTranslate2": (dict(names=["model.bin", "shared_vocabulary.json"], config={}), "CTranslate2", "converted from"),
    "parts": (dict(names=["model.safetensors.part-00", "model.safetensors.part-01"], config={}), "parts", "`cat`"),
    "a trainer's folder": (dict(names=["checkpoint-100/model.safetensors", "runs/x"]), "training run", "checkpoint-500"),
    "a trainer's adapters": (dict(names=["checkpoint-100/adapter_model.safetensors"]), "training run", "such as checkpoi"),
    "half a download": (dict(names=["model-00001-of-00002.safetensors.incomplete"], config={}), "incomplete download",
                        "run it again"),
    "aria2's half": (dict(names=["model.safetensors.aria2"], config={}), "incomplete download", "run it again"),
    "llamafile": (dict(names=["m.llamafile"]), "a llamafile", "unzip"),
    "Keras": (dict(names=["model.weights.h5"], config={}), "Keras", "safetensors"),
    "HQQ": (dict(names=["qmodel.pt"], config={}), "HQQ saved", "quantized from"),
    "Orbax": (dict(names=["0/_CHECKPOINT_METADATA", "0/default/manifest.ocdbt"]), "Orbax", "Hugging Face layout"),
    "Ollama": (dict(names=["Modelfile", "sha256-ab"]), "Modelfile", "FROM"),
    "TensorRT": (dict(names=["rank0.engine"], config={"pretrained_config": {}}), "TensorRT engine", "built from"),
}  # fmt: skip


@loop("name", CASES)
def test_what_it_is(name, tmp_path):
    content, what, fix = CASES[name]
    rest = {key: value for key, value in content.items() if key != "names"}
    path = folder(tmp_path, *content.get("names", ()), **rest)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(path)
    message = str(error.value)
    assert "this is " in message
    assert what in message
    assert fix in message
    assert "\n" not in message


def test_the_file_of_an_adapter_is_what_its_folder_is(tmp_path):
    path = folder(tmp_path, adapter=LORA, weights=["adapter_model.safetensors"])
    with pytest.raises(CheckpointError, match="this is a LoRA adapter of org/base"):
        Checkpoint.open(path / "adapter_model.safetensors")


@pytest.mark.more
def test_every_command_says_it(tmp_path):
    """And nothing is written."""
    path = folder(tmp_path / "adapter", adapter=LORA, weights=["adapter_model.safetensors"])
    commands = (
        ["audit", path], ["measure", path], ["restore", path, "--from", FIXTURES / "glm"], ["generate", path, "x"],
        ["convert", path, tmp_path / "out"], ["extract", path, tmp_path / "head.safetensors"],
    )  # fmt: skip
    before = sorted(path.iterdir())
    for command in commands:
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert isinstance(result.exception, NextnError), (command, result.output)
        assert result.exception.exit_code == 2
        assert "LoRA adapter of org/base" in str(result.exception), command
    assert sorted(path.iterdir()) == before
    assert not (tmp_path / "out").exists()


def test_models_are_none_of_them(tmp_path):
    """A merged model beside its adapter, a training run's saved model, and every fixture."""
    assert Checkpoint.open(FIXTURES / "glm").tensors
    for name in ("adapter_config.json", "latest", "zero_to_fp32.py", "model.onnx"):
        path = tmp_path / name.replace(".", "-")
        folder(path, name, config={"model_type": "glm4_moe"}, weights=[WEIGHTS])
        (path / name).write_text("{}")
        assert Checkpoint.open(path).tensors


@pytest.mark.parametrize(("text", "says"), [
    ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "LFS"),
    ("<!DOCTYPE html><html><head><title>Log in</title>", "needs a login"),
])  # fmt: skip
def test_what_is_no_file_of_weights(text, says, tmp_path):
    """A pointer, or the page of a server: a file that was not fetched says so."""
    folder(tmp_path, config={"model_type": "glm4_moe"})
    (tmp_path / WEIGHTS).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tmp_path)


def test_names_in_capitals(tmp_path):
    """Of a file system that keeps no case: the command that renames the file."""
    for place, end in enumerate(("SAFETENSORS", "GGUF")):
        name, renamed = f"A Model.{end}", f"a model.{end.lower()}"
        where = folder(tmp_path / str(place), name, config={"model_type": "glm4_moe"})
        for path in (where, where / name):
            with pytest.raises(CheckpointError, match=f"mv '{name}' '{renamed}'"):
                Checkpoint.open(path)


def test_one_of_several_files():
    """It has a part of the tensors: the folder is asked for, rather than the rest called lost."""
    with pytest.raises(CheckpointError, match=f"give its folder, {FIXTURES / 'qwen'}"):
        Checkpoint.open(FIXTURES / "qwen" / "model-00001-of-00002.safetensors")


@loop("run", ["epoch_0/config.json", "latest_checkpointed_iteration.txt", "optim/.metadata", "blobs/a"])
def test_a_model_inside(run, tmp_path):
    """Whatever else a run writes: the newest complete model in its folder is the one to give."""
    where = folder(tmp_path / "run", run, "epoch_0/model.pt")
    old, new = (where / name for name in ("step_100/consolidated", "step_200/consolidated"))
    for age, model in ((100, old), (0, new)):
        model.parent.mkdir()
        folder(model, config={"model_type": "qwen3_5"}, weights=[WEIGHTS])
        os.utime(model, (1e9 - age, 1e9 - age))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(where)
    assert str(refused.value).endswith(f"give {new}, the newest of 2 models in it.")


@loop(("files", "says"), [
    (["model.safetensors.index.json"], "names are missing"), (["pytorch_model.bin"], "torch.load"),
    (["m.gguf"], "nextn convert"), (["training_args.bin"], "give {}/draft."),
])  # fmt: skip
def test_a_model_of_its_own_with_another_inside(files, says, tmp_path):
    """Advised to take a draft or an embedding's layer for the model, whose own files are what is wrong."""
    folder(tmp_path, *files, "draft/x", config={"model_type": "qwen3_5"})
    folder(tmp_path / "draft", config={}, weights=[WEIGHTS])
    if files[0].endswith(".index.json"):
        (tmp_path / files[0]).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=re.escape(says.format(tmp_path))):
        Checkpoint.open(tmp_path)


def test_names_are_unique():
    names = [each.name for each in TRAINING]
    assert len(set(names)) == len(names)


def test_what_to_give_instead(tmp_path, monkeypatch):
    """Addresses, revisions and pickles: the error names what works. An index without its files: what is missing."""
    (tmp_path / "a.pt").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sha256-ab").write_bytes(b"GGUF\x03")
    for name in ("a.tar.gz", "a.nemo", "m.gguf.part2of2"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    for name, says in {
        str(tmp_path / "run" / "model"): f"`nextn train {tmp_path / 'run'} --resume` ends the run",
        "hf://org/name/file": "give the hub id org/name.",
        f"file://{tmp_path}": f"give the path {tmp_path}.",
        str(tmp_path / "sha256-ab"): f"ln -s {tmp_path / 'sha256-ab'} model.gguf",
        str(tmp_path / "a.tar.gz"): "an archive; unpack it",
        str(tmp_path / "a.nemo"): "a NeMo checkpoint",
        str(tmp_path / "m.gguf.part2of2"): "join all parts in their order",
        **dict.fromkeys(["./nothing", "./x/", "../x/", "~/x/", "./x:y", f"{tmp_path.name}/x:y"], "neither a folder"),
        **dict.fromkeys(["localhost:8000", "http://10.0.0.1:8000/v1"], "the address of an engine, for --engine"),
        "https://huggingface.co/org/name/tree/main": "give the hub id org/name.",
        "hf.co/org/name": "give the hub id org/name.",
        "org/name/": "give the hub id without its last slash, org/name.",
        "org/name-GGUF:Q4_K_M": "a name of Ollama or llama.cpp",
        "ollama://qwen3.6:27b": "`ollama show --modelfile qwen3.6:27b`",
        "https://www.modelscope.cn/models/org/name/files": "--model org/name --local_dir",
        str(tmp_path / "a.pt"): "torch.load",
        str(tmp_path / "a.zip"): "neither a folder",
        str(tmp_path / "config.json"): f"give the model's folder, such as {tmp_path}.",
    }.items():
        with pytest.raises(CheckpointError, match=re.escape(says)):
            Checkpoint.open(name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    for name in ("a.pt", "a.nemo"):
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names are missing"):
        Checkpoint.open(tmp_path)
