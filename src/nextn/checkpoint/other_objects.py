"""Folders that people give in place of a model: what each is, and what to do instead.

Recognized by the names of files, before any weight is read. Draft models of other kinds are in `draft_models`.
"""

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

_MAX_NAME = 200  # characters of a name from a file, in a message
_MAX_ENTRIES = 10_000  # of a folder that is looked at
_MAX_INNER = 100  # models in one
Config = Mapping[str, object]
_HUB_URL = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://(?:models/)?)([\w.-]+/[\w.-]+)(?:/.*)?", re.ASCII
)
_MODELSCOPE = re.compile(r"(?:https?://)?(?:www\.)?modelscope\.(?:cn|ai)/models/([\w.-]+/[\w.-]+)(?:/.*)?", re.ASCII)
_TAGGED = re.compile(r"(?:ollama://)?(?!\.)((?:[\w.-]+/)?[\w.-]+:[\w.-]+)", re.ASCII)  # of Ollama, and llama.cpp's -hf
_ADDRESS = re.compile(r"(?:https?://)?[\w.-]+:\d{2,5}(?:/.*)?", re.ASCII)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")


class Object(NamedTuple):
    """One kind of folder."""

    name: str
    fits: Callable[[Collection[str]], bool]  # names of files and subfolders
    sentence: str  # what it is, and what to do


def _has_file(pattern: str) -> Callable[[Collection[str]], bool]:
    return lambda names: any(re.fullmatch(pattern, name) for name in names)


# Files of a training run, which are looked for only where there are no safetensors weights.
TRAINING: tuple[Object, ...] = (
    Object(
        "DeepSpeed", _has_file(r"zero_to_fp32\.py|global_step\d+|.*_optim_states\.pt|mp_rank_\d+_model_states\.pt"),
        "a DeepSpeed training checkpoint, whose weights are sharded over ranks: `python zero_to_fp32.py . OUT "
        "--safe_serialization` in it writes a model, with config.json and the tokenizer copied beside",
    ),
    Object(
        "verl", _has_file(r"model_world_size_\d+_rank_\d+\.pt|global_step_\d+"),
        "a training checkpoint of verl, sharded over ranks: `python -m verl.model_merger merge --backend fsdp` writes "
        "safetensors",
    ),
    Object(
        "NeMo", lambda names: _has_file(r".*\.nemo")(names) or {"context", "weights"} <= set(names),
        "a NeMo checkpoint: export it to the Hugging Face layout with NeMo, with the MTP layers",
    ),
    Object(
        "Megatron",
        _has_file(r"latest_checkpointed_iteration\.txt|iter_\d{7}|model_optim_rng\.pt|mp_rank_\d+(?:_\d+)?|common\.pt"),
        "a Megatron training checkpoint: export it to the Hugging Face layout with the tool that trained it (Megatron "
        "Bridge, or its converter), with the MTP layers",
    ),
    Object(
        "FSDP", _has_file(r".*\.distcp|\.metadata|pytorch_model_fsdp_\d+|pytorch_model_fsdp\.bin"),
        "a distributed training checkpoint (FSDP, DCP): `accelerate merge-weights FOLDER OUT` writes safetensors, to "
        "which config.json and the tokenizer are copied",
    ),
    Object(
        "training run", _has_file(r"checkpoint-\d+"),
        "the folder of a training run: give one of its checkpoints, such as checkpoint-500 in it",
    ),
    Object(
        "incomplete download", _has_file(r".*\.(?:safetensors|bin|gguf)\.(?:incomplete|aria2|part|crdownload|tmp)"),
        "an incomplete download: run it again (`hf download` resumes) until no such files are left",
    ),
    Object("parts", _has_file(r".*\.(?:safetensors|bin|gguf)\.(?:part-[\da-z]+|\d{3})"),
           "a folder of parts of files that were cut: join the parts of each in their order with `cat`"),
    Object("CTranslate2", lambda names: "model.bin" in names and _has_file(r".*vocabulary\.(?:json|txt)")(names),
           "a model converted for CTranslate2: give the checkpoint that it was converted from"),
    Object("llamafile", _has_file(r".*\.llamafile"),
           "a llamafile: `unzip` takes out the GGUF file in it, which is converted first"),
    Object("ONNX", _has_file(r".*\.onnx(?:_data|\.data)?"),
           "an ONNX export, whose weights are in a graph: give the checkpoint that it was exported from"),
    Object("MLX", _has_file(r"weights(?:\.\d+)?\.npz"),
           "an MLX model of the old .npz layout: give the checkpoint that it was converted from, or convert it again "
           "with a recent mlx_lm"),
    Object("CoreML", _has_file(r".*\.(?:mlpackage|mlmodelc?)|com\.apple\.CoreML"),
           "a Core ML export: give the checkpoint that it was exported from"),
    Object("TensorRT", _has_file(r"rank\d+\.engine|.*\.engine"),
           "a built TensorRT engine: give the checkpoint that it was built from"),
    Object("tensorizer", _has_file(r".*\.tensors"),
           "a model that tensorizer serialized: give the checkpoint that it was made from"),
    Object("OpenVINO", _has_file(r"openvino_.*\.xml"),
           "an OpenVINO export: give the checkpoint that it was exported from"),
    Object("MLC", _has_file(r"mlc-chat-config\.json"),
           "a model converted for MLC: give the checkpoint that it was converted from"),
    Object("TensorFlow", _has_file(r"tf_model\.h5|.*\.weights\.h5|.*\.keras|flax_model.*\.msgpack"),
           "a model with weights of TensorFlow, Keras or Flax: give one with weights of PyTorch, as safetensors"),
    Object("HQQ", _has_file(r"qmodel\.pt"),
           "a model that HQQ saved, which transformers does not load: give the checkpoint that it was quantized from"),
    Object("PaddlePaddle", _has_file(r".*\.pdparams"),
           "a model of PaddlePaddle: give the release for PyTorch (of ERNIE, -PT), or export it as safetensors"),
    Object("Orbax", _has_file(r"_CHECKPOINT_METADATA|manifest\.ocdbt"),
           "an Orbax checkpoint of JAX: convert it to the Hugging Face layout with the tool that trained it"),
    Object("Ollama", _has_file(r"Modelfile"),
           "an Ollama Modelfile: give what its FROM line names; a blob is a GGUF file without the ending"),
    Object("DVC", _has_file(r".*\.(?:safetensors|bin|gguf)\.dvc"),
           "a folder of DVC pointers: `dvc pull` in it fetches the weights"),
    Object("hub cache", lambda names: {"blobs", "snapshots"} <= set(names),
           "a folder of the Hugging Face cache: give the hub id (org/name), or a folder in its snapshots"),
)  # fmt: skip


def pickle_sentence(names: Sequence[str]) -> str:
    """Say what to do with files of torch.save."""
    return (
        f"{', '.join(names[:3])}: pickle files are not read, as they can run code. Convert each file with "
        "safetensors.torch.save_file({name: value.contiguous().clone() for name, value in torch.load(FILE, "
        'weights_only=True).items()}, NEW_FILE, {"format": "pt"}), which keeps every tensor.'
    )


def lower_case_sentence(names: Sequence[str]) -> str:
    """Say what to do with weights in files whose names end in capitals; "" if there are none."""
    found = next((name for name in names if name.lower().endswith((".safetensors", ".gguf"))), "")
    command = f"mv {shlex.quote(found)} {shlex.quote(found.lower())}"
    return f"{found}: loaders read names in lower case: `{command}` renames it." if found else ""


def source_sentence(name: str) -> str:
    """Say what to give in place of a name that is neither a folder, a .safetensors file nor a hub id."""
    if found := _HUB_URL.fullmatch(name):
        return f"{name}: an address; give the hub id {found[1]}."
    if found := _MODELSCOPE.fullmatch(name):
        command = f"modelscope download --model {found[1]} --local_dir MODEL"
        return f"{name}: an address of ModelScope: `{command}` downloads it; give that folder."
    path = Path(name.removeprefix("file://")).expanduser()
    if path.is_file():
        return _file_sentence(name, path)
    if path.exists():
        return f"{name}: an address; give the path {path}."
    if (path.parent / "run.json").is_file():
        return f"{name}: not written yet; `nextn train {shlex.quote(str(path.parent))} --resume` ends the run."
    if _ADDRESS.fullmatch(name):
        return f"{name}: the address of an engine, for --engine; MODEL is the checkpoint that it serves."
    is_path = "/" in name and path.parent.is_dir()
    if not is_path and (found := _TAGGED.fullmatch(name)):
        path_of = f"`ollama show --modelfile {found[1]}` prints the path of Ollama's; llama.cpp prints its own"
        return f"{name}: a name of Ollama or llama.cpp for a GGUF file: give the file ({path_of})."
    if re.fullmatch(r"(?!\.)[\w.-]+/[\w.-]+/", name, re.ASCII):
        return f"{name}: not a folder here; give the hub id without its last slash, {name.rstrip('/')}."
    kinds = "a folder, a .safetensors file nor a hub id (org/name, or org/name@revision)"
    return f"{name}: neither {kinds}; `tiny` is the bundled model, `smollm2` that of `nextn demo`."


def _file_sentence(name: str, path: Path) -> str:
    if path.suffix in PICKLES:
        return pickle_sentence([name])
    if re.search(r"\.part\d+of\d+$|\.gguf-split-[a-z]$", path.name):
        return (
            f"{name}: one part of a file that was cut: join all parts in their order with `cat`, and give the result."
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        link = f"ln -s {shlex.quote(str(path.absolute()))} model.gguf"
        return f"{name}: a GGUF file without the ending .gguf, as Ollama stores them: `{link}`, and give model.gguf."
    if sentence := training_sentence([path.name]):
        return f"{name}: {sentence}"
    if path.suffix in _ARCHIVES:
        return f"{name}: an archive; unpack it and give the folder."
    if lower := lower_case_sentence([path.name]):
        return f"{name}: {lower}"
    return f"{name}: a file, and no .safetensors: give the model's folder, such as {path.absolute().parent}."


def adapter_sentence(adapter: Config, trained_head: str = "", before: str = "") -> str:
    """Say what an adapter's folder is, from its adapter_config.json.

    trained_head: The file in it with a head, as a word of a command; before: what precedes that command.
    """
    if "fine_tune_type" in adapter:
        base = str(adapter.get("model") or "BASE")[:_MAX_NAME]
        return (
            f"this is an adapter of mlx_lm for {base}, not a model: merge it first (`mlx_lm.fuse --model {base} "
            "--adapter-path ADAPTER --save-path MERGED`). mlx_lm leaves the MTP head out: `nextn restore MERGED --from "
            "ORIGINAL`, with the model that has it, puts it back."
        )
    kind = str(adapter.get("peft_type") or "LoRA")[:_MAX_NAME]
    kind = "LoRA" if kind.upper() == "LORA" else kind
    base = str(adapter.get("base_model_name_or_path") or "its base")[:_MAX_NAME]
    saved = adapter.get("modules_to_save")
    head = any("mtp" in str(name) or "nextn" in str(name) for name in saved) if isinstance(saved, list) else False
    own = " It has modules of an MTP head of its own, which the merge must keep." if head else ""
    return (
        f"this is {'an' if kind[:1] in 'AEIOU' else 'a'} {kind} adapter of {base}, not a model: merge it first (peft: "
        f"merge_and_unload, then save_pretrained to MERGED). transformers leaves the MTP head out there: {before}"
        f"`nextn restore MERGED --from {trained_head or base}` puts "
        f"{'the trained one' if trained_head else 'it'} back.{own}"
    )


def engine_sentence(config: Config, files: Collection[str]) -> str:
    """Say what a folder is whose weights are in an engine's own layout, by config.json and file names; else ""."""
    if any(re.fullmatch(r"model-rank-\d+-part-\w+\.safetensors", file) for file in files):
        return (
            "this is a sharded state of vLLM or SGLang, with a slice of each tensor for each rank (--load-format "
            "sharded_state): give the checkpoint that it was made from."
        )
    if "architecture" not in config or not {"producer", "mapping"} & config.keys() or "model_type" in config:
        return ""
    return (
        "this is a checkpoint in TensorRT-LLM's layout: give the one that it was converted from, which its PyTorch "
        "backend serves, too."
    )


def training_sentence(names: Collection[str]) -> str:
    """Say what a folder without safetensors weights is; "" if nothing is recognized."""
    return next((f"this is {each.sentence}." for each in TRAINING if each.fits(names)), "")


def inner_models(path: Path) -> list[Path]:
    """Return the folders in this one, up to two deep, with a config.json and safetensors weights; the newest first."""
    configs = chain.from_iterable(islice(path.glob(each), _MAX_INNER) for each in ("*/config.json", "*/*/config.json"))
    models = [file.parent for file in configs if any(file.parent.glob("*.safetensors"))]
    return sorted(models, key=lambda model: model.stat().st_mtime, reverse=True)


def folder_names(path: Path) -> list[str]:
    """Return the names in a folder, subfolders included, and of those in its direct subfolders for training runs."""
    names: list[str] = []
    for entry in sorted(path.iterdir())[:_MAX_ENTRIES]:
        names.append(entry.name)
        if entry.is_dir() and not entry.is_symlink():
            names += [inner.name for inner in sorted(entry.iterdir())[:100]]
    return names
