"""`nextn train --export`: from a trunk without a head to a served one, and what is refused before it trains."""

import json
import shutil

import pytest
from bpe_tokenizers import bpe_tokenizer
from gguf import GGUFReader
from test_separate_head import TEXT, build

from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import trunk_family
from nextn.edit.export import check_export
from nextn.errors import CheckpointError, FamilyError
from nextn.family_table import by_name

SMALL = [
    *("--set", "steps=3", "--set", "batch_size=2", "--set", "length=48", "--set", "depths=2", "--set", "warmup=0"),
    *("--set", "eval_batches=1", "--set", "dtype=float32", "--set", "eval_every=2"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with trunks and a text."""
    root = tmp_path_factory.mktemp("made")
    (root / "text.txt").write_text(TEXT)
    for name in ("llama", "qwen3", "gemma3"):
        build(root / name, name)
    return root


def command(made, out, trunk="llama", *options):
    how = ["--freeze-trunk", "--init-head", "--from", made / trunk, "--data", made / "text.txt", *SMALL]
    return ["train", out, *how, *options]


SERVED = {
    "vllm": ("mimo", "vllm serve {trunk} --speculative-config"),
    "sglang": ("mimo", "python -m sglang.launch_server --model-path {trunk}"),
    "transformers": (None, "model.generate(**inputs, use_mtp=True)"),
    "llama.cpp": ("step35", "llama-server -m {out}/export/model.gguf --spec-type draft-mtp"),
}


@pytest.mark.one_case
@pytest.mark.parametrize("engine", SERVED)
def test_one_command_from_a_trunk_to_a_served_head(engine, made, tmp_path, here):
    """The layout is the engine's; the last line serves what was written, and the run records it."""
    layout, last = SERVED[engine]
    out = tmp_path / "run"
    code, said, error = here(*command(made, out, "llama", "--export", engine))
    assert code == 0, error
    assert said.splitlines()[-1].startswith(last.format(trunk=made / "llama", out=out))
    record = json.loads((out / "run.json").read_text())
    assert (record["layout"], record["export"]) == (layout, engine)
    assert record["result"]["export"]["engine"].startswith(("vLLM", "SGLang", "transformers", "llama.cpp"))
    if engine == "llama.cpp":
        assert GGUFReader(out / "export" / "model.gguf").fields["general.architecture"].contents() == "step35"
    else:
        assert Checkpoint.open(out / "export").tensors


def test_a_finished_run_is_exported_later(made, tmp_path, here):
    """And once; then its result is printed as before."""
    out = tmp_path / "run"
    assert here(*command(made, out, "llama", "--layout", "mimo"))[0] == 0
    code, said, error = here("train", out, "--resume", "--export", "vllm", "--json")
    assert code == 0, error
    assert json.loads(said)["export"]["path"] == str(out / "export")
    assert "nothing was changed" in here("train", out, "--resume", "--export", "vllm")[1]


REFUSED = {
    "an unknown engine": ("llama", ["--export", "tgi"], "--export tgi; expected vllm, sglang, transformers, llama.cpp"),
    "a layout of another engine": (
        "llama", ["--export", "vllm", "--layout", "step35"], "runs no head of the trunk's own layers"
    ),
    "a pair that llama.cpp would run badly": (
        "llama", ["--export", "llama.cpp", "--layout", "mimo"], "hand over no hidden state"
    ),
    "an activation": ("gemma3", ["--export", "vllm"], "cannot have a head in MiMo's layout"),
    "a trunk without a graph": ("gemma3", ["--export", "llama.cpp"], "step35 layout cannot hold this trunk"),
    "a revision": ("org/model@abc", ["--export", "vllm"], "--export with --from org/model@abc: download"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_exported_is_refused_before_training(fault, made, tmp_path, here):
    trunk, options, words = REFUSED[fault]
    how = command(made, tmp_path / "run", trunk, *options)
    how[how.index("--from") + 1] = trunk if "/" in trunk else made / trunk
    code, _, error = here(*how)
    assert code == 2
    assert words in error
    assert not [*tmp_path.glob("run/*.safetensors"), *tmp_path.glob("run/run.json"), *tmp_path.glob("run/export")]


def test_more_that_is_refused_before_training(made, tmp_path, here):
    """A tokenizer that cannot be written, two layers for a GGUF, and a folder that is there."""
    trunk = build(tmp_path / "trunk", "qwen3")
    bpe_tokenizer("llama-bpe").save_pretrained(trunk)
    path = trunk / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": {"type": "Whitespace"}}))
    out = tmp_path / "run"
    for options, words in (
        (["--export", "llama.cpp", "--from", trunk], "none of those that nextn writes into a GGUF"),
        (["--export", "llama.cpp", "--set", "modules=2"], "allows at most 1"),
    ):
        code, _, error = here(*command(made, out, "qwen3", *options))
        assert (code, words in error) == (2, True), error
    (out / "export").mkdir(parents=True)
    assert "remove it" in here(*command(made, out, "llama", "--export", "vllm"))[2]
    code, _, error = here("train", tmp_path / "joint", "--export", "vllm")
    assert (code, "--export needs --freeze-trunk" in error) == (2, True)


def test_what_the_trunk_alone_decides(made, tmp_path):
    """A quantized trunk, whose quantization vLLM alone gives to the draft, and several layers in a GGUF."""
    folder = shutil.copytree(made / "qwen3", tmp_path / "trunk")
    trunk = Inventory.of(Checkpoint.open(folder), family=trunk_family(Checkpoint.open(folder)))
    with pytest.raises(FamilyError, match="2 MTP layers; a GGUF here holds one"):
        check_export("llama.cpp", trunk.family, trunk, num_modules=2)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    trunk = Inventory.of(Checkpoint.open(folder), family=trunk.family)
    check_export("sglang", by_name("mimo_draft"), trunk)
    with pytest.raises(CheckpointError, match=r"no head can be exported for vLLM .*trunk's quantization"):
        check_export("vllm", by_name("mimo_draft"), trunk)
