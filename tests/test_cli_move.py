"""restore, convert and extract on the command line: what is printed, exit codes, JSON."""

import json

import pytest
from artifacts import load_json, publish
from test_restore import lost, snapshot, take
from typer.testing import CliRunner

from nextn.cli import app, main
from nextn.edit.compatibility import absent
from nextn.errors import ConfigError


def nextn(*args):
    return CliRunner().invoke(app, [str(each) for each in args], env={"COLUMNS": "200"})


@pytest.mark.more
def test_restore(tmp_path):
    """The plan before, the same told after; JSON that holds nothing but itself."""
    base, target = (
        publish(tmp_path / "base", "glm4_moe"),
        lost(tmp_path / "target", "glm4_moe", config={"num_nextn_predict_layers": 0}),
    )
    before = snapshot(target)
    reported = nextn("restore", target, "--from", base, "--dry-run")
    assert reported.exit_code == 0, reported.output
    assert "would write" in reported.output
    assert "num_nextn_predict_layers: 0 -> 1" in reported.output
    assert "model.safetensors is renamed to model-00001-of-00002.safetensors" in reported.output
    assert snapshot(target) == before
    record = json.loads(nextn("restore", target, "--from", base, "--json").output)
    assert record["dry_run"] is False
    assert record["bytes"] > 0
    assert absent(take(target)) == []
    reported = nextn("restore", target, "--add-aliases", "vllm")
    assert "wrote" in reported.output


@pytest.mark.more
def test_convert(tmp_path):
    """Every flag reaches its meaning, and what excludes each other is said."""
    source = publish(tmp_path / "source", "glm4_moe", shards=2)
    reported = nextn("convert", source, tmp_path / "side", "--form", "side-file")
    assert reported.exit_code == 0, reported.output
    assert "is removed" not in reported.output
    assert f"{source} is not changed" in reported.output
    assert (tmp_path / "side" / "mtp.safetensors").exists()
    reported = nextn(
        "convert", tmp_path / "side", tmp_path / "one", "--form", "single-file", "--norm-weights", "subtract-1"
    )
    assert "norm weights" in reported.output
    reported = nextn("convert", source, tmp_path / "three", "--form", "one-file")
    assert reported.exit_code == 2
    assert "single-file" in reported.output
    reported = nextn("convert", source, tmp_path / "three", "--norm-weights", "twice")
    assert isinstance(reported.exception, ConfigError)
    assert "norm weights: twice" in str(reported.exception)
    assert not (tmp_path / "three").exists()


def test_options_that_do_not_apply(tmp_path):
    """The options that were given are named, and no others; nothing is written."""
    out = tmp_path / "out"
    for args, named in (
        (("m.gguf", out, "--experts", "split", "--form", "shards"), "the folder with --form, --experts"),
        (("tiny", "--reindex", "--to", "glm4_moe", "--dtype", "float32"), "then convert with --to, --dtype"),
        (("tiny", out, "--dtype", "float32"), "only for a .gguf file give --dtype"),
    ):
        result = nextn("convert", *args)
        assert isinstance(result.exception, ConfigError), (args, result.output)
        assert str(result.exception).endswith(named)
    assert not out.exists()


@pytest.mark.more
def test_extract(tmp_path):
    """The file that the user named, and a base for restore."""
    assert (
        nextn("extract", publish(tmp_path / "source", "glm4_moe"), tmp_path / "head" / "h.safetensors").exit_code == 0
    )
    assert load_json(tmp_path / "head" / "config.json")["model_type"] == "glm4_moe"
    assert (
        nextn("restore", lost(tmp_path / "t", "glm4_moe"), "--from", tmp_path / "head" / "h.safetensors").exit_code == 0
    )


def test_refusals(tmp_path, monkeypatch, capsys):
    """One line on stderr and code 2; a missing base or target is no traceback."""
    base, target = publish(tmp_path / "base", "glm4_moe"), publish(tmp_path / "target", "glm4_moe")
    for args, reason in (
        ([target, "--from", base], "already has a complete head"),
        ([tmp_path / "none", "--from", base], "not a folder"),
        ([target], "nothing to restore"),
    ):
        monkeypatch.setattr("sys.argv", ["nextn", "restore", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert reason in said
        assert len(said.splitlines()) == 1
