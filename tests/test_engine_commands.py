"""`nextn serve --print`: a command per family and engine, refusals, notes, and K from advice."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from artifacts import publish

from nextn.checkpoint.checkpoint import SHIPPED, Checkpoint
from nextn.errors import CheckpointError, ConfigError
from nextn.family_table import rows
from nextn.serve.engine_commands import (
    ENGINES,
    SEPARATE_GGUF,
    as_script,
    engine_commands,
)

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
