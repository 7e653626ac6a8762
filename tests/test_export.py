"""A head that was added to a model, written for an engine: what is written and printed, and what must be caught."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_separate_head import SETTINGS, TEXT, build, start
from transformers import AutoModelForCausalLM

from nextn.audit_rules import audit_checkpoint
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import open_head, trunk_family
from nextn.edit.export import as_text, export
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.model.model import Model
from nextn.train.head_run import prepare_head_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with trunks, a text, a head of the trunk's own layer and a draft in MiMo's layout."""
    root = tmp_path_factory.mktemp("made")
    (root / "text.txt").write_text(TEXT)
    for name in ("llama", "qwen3"):
        build(root / name, name)
    build(root / "other", "llama", initializer_range=0.02)
    for name, trunk, layout in (("own", "qwen3", None), ("draft", "llama", "mimo")):
        run = prepare_head_run(
            root / f"{name}-run", start(root / trunk, layout), data=[root / "text.txt"], settings=SETTINGS
        )
        list(run.trainer.run())
        run.write(head_only=True).parent.rename(root / name)
    return root


def changed(made, folder, trunk="llama", *, config=(), drop=(), trunk_config=()):
    """Copies of draft and trunk with other configs, and the draft without some tensors."""
    for name, own, fields in (("draft", "draft", config), (trunk, "trunk", trunk_config)):
        shutil.copytree(made / name, folder / own)
        path = folder / own / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(fields)))
    tensors = load_file(folder / "draft" / "head.safetensors")
    metadata = Checkpoint.open(made / "draft").headers["head.safetensors"].metadata
    kept = {name: value for name, value in tensors.items() if name not in drop}
    save_file(kept, folder / "draft" / "head.safetensors", metadata=metadata)
    return folder / "draft", folder / "trunk"


def rules(draft, trunk):
    checkpoint = Checkpoint.open(trunk)
    inventory = Inventory.of(checkpoint, family=trunk_family(checkpoint))
    report = audit_checkpoint(open_head(draft, inventory).checkpoint, trunk=inventory)
    return {each.rule for each in report.findings if each.severity != "note"}


@pytest.mark.more
def test_a_draft_and_the_command_that_serves_it(made, tmp_path):
    """All tensors bit for bit in the file that engines look for, with the record of its trunk; K and overrides."""
    vllm = export(made / "draft", tmp_path / "draft", "vllm", num_speculative_tokens=4)
    assert sorted(path.name for path in vllm.path.iterdir()) == ["config.json", "model.safetensors"]
    written, own = load_file(vllm.path / "model.safetensors"), load_file(made / "draft" / "head.safetensors")
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], value) for name, value in own.items())
    assert vllm.command[:3] == ("vllm", "serve", str(made / "llama"))
    assert json.loads(vllm.command[4]) == {
        "method": "mtp", "model": str(tmp_path / "draft"), "num_speculative_tokens": 4
    }  # fmt: skip
    assert json.loads(vllm.command[6]) == {"num_nextn_predict_layers": 1}
    assert as_text(vllm).startswith(
        "# vLLM 0.32.0: run with two-layer models by its Python interface on a CPU; not this model, and no GPU.\n"
    )
    assert rules(vllm.path, made / "llama") == set()
    metadata = Checkpoint.open(vllm.path).headers["model.safetensors"].metadata
    assert "trained_with" in metadata
    assert str(made) not in json.dumps(metadata)  # it may be published
    sglang = export(tmp_path / "draft", tmp_path / "again", "sglang", trunk=made / "llama")  # also what was exported
    assert sglang.command[-7:] == (
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
        "--enable-metrics",
    )  # fmt: skip
    assert "not run" in sglang.notes[0]
    assert Model.load(made / "llama", head=tmp_path / "again").notes == ()


@pytest.mark.parametrize("kind", ["own", "first"])
def test_keys_that_engines_do_not_share(kind, made, tmp_path):
    draft, trunk = changed(made, tmp_path, config={"mtp_repeated_kv": kind})
    notes = export(draft, tmp_path / "out", "sglang", trunk=trunk).notes
    assert any("kv = first" in note for note in notes) == (kind == "first")


def test_for_transformers(made, tmp_path):
    """The printed line is enough for `use_mtp`, also for a model with layer types."""
    out = export(made / "own", tmp_path / "model", "transformers")
    assert json.loads((out.path / "config.json").read_text())["mtp_layer_types"] == ["full_attention"]
    ids = torch.tensor([[97, 32, 105, 115]])
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "inputs": {"input_ids": ids, "pad_token_id": 0}}
    loaded, line, generate = out.code.splitlines()
    exec(f"{loaded}\n{line}", names)
    sampling = ", do_sample=False, max_new_tokens=12)"
    assert torch.equal(*(eval(generate.replace(old, new) + sampling, names) for old, new in
                         ((")", ""), (", use_mtp=True)", ""))))  # fmt: skip


CAUGHT = {
    "a bias left out": ("draft-biases", {"drop": ["model.mtp_layers.0.self_attn.k_proj.bias"]}, "k_proj.bias is not"),
    "all biases left out": (
        "draft-biases", {"drop": [f"model.mtp_layers.0.self_attn.{each}_proj.bias" for each in "qkv"]}, "are not stored"
    ),
    "another trunk": ("draft-trunk", {"trunk": "other"}, "trained on another trunk"),
    "a quantized trunk": (
        "draft-quantized", {"trunk_config": {"quantization_config": {"quant_method": "fp8"}}}, "trunk's quantization"
    ),
    "other heads": ("draft-sizes", {"config": {"num_attention_heads": 8}}, "heads is 8, the trunk's is 4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CAUGHT)
def test_what_would_be_silently_wrong_is_caught(fault, made, tmp_path):
    """By `nextn audit TRUNK --head DRAFT`, and by `nextn export`, which writes nothing."""
    rule, changes, words = CAUGHT[fault]
    draft, trunk = changed(made, tmp_path, **changes)
    assert rule in rules(draft, trunk)
    with pytest.raises(CheckpointError, match=words):
        export(draft, tmp_path / "out", "vllm", trunk=trunk)
    assert not (tmp_path / "out").exists()


def test_a_quantized_trunk_is_fine_for_sglang(made, tmp_path):
    draft, trunk = changed(made, tmp_path, trunk_config={"quantization_config": {"quant_method": "fp8"}})
    assert export(draft, tmp_path / "out", "sglang", trunk=trunk).path.is_dir()


@pytest.mark.parametrize(
    ("head", "engine", "error", "words"),
    [
        ("draft", "llama.cpp", FamilyError, "hand over no hidden state"),
        ("draft", "tgi", ConfigError, "--for tgi; expected vllm, sglang, transformers, llama"),
        ("draft", "transformers", FamilyError, "train one without --layout"),
        ("own", "vllm", FamilyError, "train with --layout mimo"),
        ("own", "sglang", FamilyError, "train with --layout mimo"),
    ],
)
def test_an_engine_that_cannot(head, engine, error, words, made, tmp_path):
    with pytest.raises(error, match=words):
        export(made / head, tmp_path / "out", engine)


def test_the_trunk_must_be_known(made, tmp_path):
    draft, _ = changed(made, tmp_path)
    save_file(load_file(draft / "head.safetensors"), draft / "head.safetensors")
    with pytest.raises(ConfigError, match=r"does not say which trunk .* --model"):
        export(draft, tmp_path / "out", "vllm")
    assert export(draft, tmp_path / "out", "vllm", trunk=made / "llama").path.is_dir()


def test_command(made, tmp_path, here):
    code, out, _ = here("export", made / "draft", tmp_path / "out", "--for", "vllm", "-k", "2")
    assert code == 0
    assert '"num_speculative_tokens": 2' in out
    _, out, _ = here("export", made / "draft", tmp_path / "more", "--for", "sglang", "--json")
    assert json.loads(out)["command"][0] == "python"
    assert here("audit", made / "other", "--head", tmp_path / "out")[0] == 1
    assert here("audit", made / "llama", "--head", tmp_path / "out")[0] == 0
