"""A head that was added to a model, written for an engine; the commands that serve it, refusals, notes, and K."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from artifacts import publish
from safetensors.torch import load_file, save_file
from test_separate_head import SETTINGS, TEXT, build, start
from transformers import AutoModelForCausalLM

from nextn.audit_rules import audit_checkpoint
from nextn.checkpoint.checkpoint import SHIPPED, Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.checkpoint.provenance import open_head, trunk_family
from nextn.edit.export import as_text, export
from nextn.errors import CheckpointError, ConfigError, FamilyError
from nextn.family_table import rows
from nextn.family_table.engine_versions import RUN
from nextn.model.model import Model
from nextn.serve.engine_commands import (
    ENGINES,
    SEPARATE_GGUF,
    as_script,
    engine_commands,
)
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
    run = f"# vLLM {RUN['vllm']} was run with two-layer models by its Python interface on a CPU"
    assert as_text(vllm).startswith(f"{run}; not this model, and no GPU.\n")
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
    "a quantized trunk": (
        "draft-quantized", {"trunk_config": {"quantization_config": {"quant_method": "fp8"}}}, "trunk's quantization"
    ),
    "other heads": ("draft-sizes", {"config": {"num_attention_heads": 8}}, "heads is 8, the trunk's is 4"),
}  # fmt: skip


def test_the_head_of_another_trunk_is_a_note(made, tmp_path, here):
    """A fine-tune may keep its base's head: a note from audit and export; `measure` compares with that trunk."""
    draft, trunk = changed(made, tmp_path, trunk="other")
    assert "draft-trunk" not in rules(draft, trunk)
    (note,) = (each for each in export(draft, tmp_path / "out", "vllm", trunk=trunk).notes if "another trunk" in each)
    command = re.search("`nextn (measure .+?)`", note)[1].replace("--against TRUNK", f"--against {made / 'llama'}")
    asked = tmp_path / "x.txt"
    asked.write_text("a\n\nb c\n\nde\n\nf g h\n")
    options = ("--temperatures", "1", "--max-tokens", "12", "--backend", "torch", "-k", "1", "--prompts", asked)
    code, out, err = here(*shlex.split(command), *options)
    assert (code in (0, 1, 3), "AL" in out) == (True, True), err


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
    code, out, _ = here("audit", made / "other", "--head", tmp_path / "out")
    assert (code, "draft-trunk" in out) == (0, True)  # a note
    assert here("audit", made / "llama", "--head", tmp_path / "out")[0] == 0


FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = [row for row in rows() if row.names]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("families"), {}

    def checkpoint(name):
        if name not in made:
            made[name] = Checkpoint.open(publish(folder / name, name))
        return made[name]

    return checkpoint


def option(command, name):
    return command[command.index(name) + 1]


@pytest.mark.one_case
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_every_family(row, engine, checkpoints):
    """A command with K where the engine runs the head, else an error that names an engine which does."""
    checkpoint = checkpoints(row.name)
    if row.engines[ENGINES[engine]].support != "runs":
        with pytest.raises(ConfigError, match=r"; (use |none of the three does)"):
            engine_commands(checkpoint, engine)
        return
    found = engine_commands(checkpoint, engine, num_speculative_tokens=2)
    *conversions, command = found.commands
    match engine:
        case "vllm":
            assert command[:3] == ("vllm", "serve", checkpoint.path)
            assert json.loads(option(command, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 2}
        case "sglang":
            assert option(command, "--model-path") == checkpoint.path
            assert option(command, "--speculative-num-steps") == "2"
            assert option(command, "--speculative-num-draft-tokens") == "3"
        case "llama.cpp":
            outs = [option(each, "--outfile") for each in conversions]
            assert option(command, "-m") == outs[0]
            assert option(command, "--spec-draft-n-max") == "2"
            assert ("--mtp" in conversions[-1]) == (row.name in SEPARATE_GGUF)
            assert option(command, "--model-draft") == outs[1] if row.name in SEPARATE_GGUF else len(outs) == 1
    assert found.notes[0].startswith("Flags as of ")
    assert all(note.endswith((".", "`", row.name)) or "Fix: " in note for note in found.notes), found.notes


def test_llama_cpp_aborts_without_linear_attention():
    """As on tiny: `GGML_ASSERT(buffer) failed`. The same layout with linear attention is served."""
    with pytest.raises(ConfigError, match=r"aborts on a trunk .* full attention .*; use vLLM and SGLang$"):
        engine_commands(Checkpoint.open(SHIPPED), "llama.cpp")
    assert engine_commands(Checkpoint.open(SHIPPED), "vllm").commands
    assert engine_commands(Checkpoint.open(FIXTURES / "qwen"), "llama.cpp").commands


def test_a_script_can_be_run_by_a_shell(tmp_path):
    """Comments and commands only, whatever the path is."""
    folder = publish(tmp_path / "a 'model' $HOME", "qwen3_5")
    lines = as_script(engine_commands(Checkpoint.open(folder), "vllm")).splitlines()
    assert all(line.startswith("# ") for line in lines[:-1])
    assert shlex.split(lines[-1])[2] == str(folder)


def test_k_is_the_number_of_layers_that_follow_each_other(tmp_path):
    checkpoint = Checkpoint.open(publish(tmp_path, "glm4_moe", modules=2))
    command = engine_commands(checkpoint, "vllm").commands[-1]
    assert json.loads(option(command, "--speculative-config"))["num_speculative_tokens"] == 2
    with pytest.raises(ConfigError, match="K = 3: above the 2 MTP layers of this head, vLLM needs a multiple of 2"):
        engine_commands(checkpoint, "vllm", num_speculative_tokens=3)
    (note, *_) = (
        note for note in engine_commands(checkpoint, "vllm", num_speculative_tokens=4).notes if "again" in note
    )
    assert note == "vLLM applies the head's 2 MTP layers again for draft 3 and later ones."


def test_families_with_flags_of_their_own(checkpoints):
    (command,) = engine_commands(checkpoints("inkling"), "sglang").commands
    assert "--enable-multi-layer-eagle" in command


def test_a_hub_checkpoint_is_downloaded_for_the_converter(checkpoints):
    checkpoint = replace(checkpoints("qwen3_5"), path="org/name", ref="v1")
    download, convert, serve = engine_commands(checkpoint, "llama.cpp").commands
    (vllm,) = engine_commands(checkpoint, "vllm").commands
    assert download == ("hf", "download", "org/name", "--revision", "v1", "--local-dir", "name")
    assert convert[2:] == ("name", "--outfile", "name.gguf")
    assert option(serve, "-m") == "name.gguf"
    assert option(vllm, "--revision") == "v1"


def test_a_lost_head(tmp_path):
    def change(table):
        for name in [each for each in table if each.startswith("mtp.")]:
            del table[name]

    checkpoint = Checkpoint.open(publish(tmp_path, "qwen3_5", change=change))
    with pytest.raises(CheckpointError, match="has no MTP head, so no engine can draft with it"):
        engine_commands(checkpoint, "vllm")


def test_notes_on_quantized_checkpoints(tmp_path):
    checkpoint = Checkpoint.open(publish(tmp_path, "deepseek_v3", fp8=True))
    notes = engine_commands(checkpoint, "vllm").notes
    assert any("reads the quantization (fp8) from config.json" in note for note in notes)
    assert any("vllm#48492" in note for note in notes)
    plain = engine_commands(Checkpoint.open(publish(tmp_path / "plain", "deepseek_v3")), "vllm").notes
    assert not any("quantiz" in note for note in plain)


def test_findings_about_the_files_are_notes(tmp_path):
    """What keeps a head from working in this engine, and not what concerns others."""
    checkpoint = Checkpoint.open(publish(tmp_path, "glm4_moe", copies=False))
    assert any(note.startswith("shared-missing: ") for note in engine_commands(checkpoint, "vllm").notes)
    assert not any(note.startswith("shared-missing: ") for note in engine_commands(checkpoint, "llama.cpp").notes)


def test_unknown_engine(checkpoints):
    with pytest.raises(ConfigError, match=r"--print tgi; expected one of vllm, sglang, llama\.cpp"):
        engine_commands(checkpoints("qwen3_5"), "tgi")


def test_default_k(here):
    code, out, _ = here("serve", FIXTURES / "qwen", "--print", "vllm")
    assert code == 0
    assert '"num_speculative_tokens": 3' in out


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_no_command_for_files_of_mlx(engine, tmp_path):
    folder = publish(tmp_path, "qwen3_5", config={"quantization": {"group_size": 64, "bits": 4}})
    with pytest.raises(ConfigError, match=r"in MLX's layout, .* does not: give the model that was converted"):
        engine_commands(Checkpoint.open(folder), engine)
