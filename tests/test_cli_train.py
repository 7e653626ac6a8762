"""`nextn train --freeze-trunk`: options that go together, what is said and written, exit codes."""

import json
import sys

import pytest
import torch
from tiny import build

from nextn import cli
from nextn.corpus.bytelevel import byte_tokenizer
from nextn.model import Model

SMALL = [
    *("--set", "steps=3", "--set", "batch_size=2", "--set", "length=32", "--set", "depths=2"),
    *("--set", "eval_batches=1", "--set", "dtype=float32", "--set", "eval_every=2", "--set", "warmup=0"),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a model and texts."""
    folder = tmp_path_factory.mktemp("given")
    model = build("glm4_moe", vocab_size=264, initializer_range=0.02)
    model.tokenizer = byte_tokenizer()
    model.save(folder / "model")
    (folder / "text").mkdir()
    for name in "abc":
        (folder / "text" / f"{name}.txt").write_text(f"{name} is a letter, and so on. " * 40)
    return folder


def nextn(*arguments, monkeypatch, capsys):
    """-> exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["nextn", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    return end.value.code or 0, told.out, told.err


def test_a_head_is_trained_and_its_figures_told(given, tmp_path, monkeypatch, capsys):
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", *SMALL, "--accumulate", "2"]
    code, out, err = nextn(tmp_path, *how, "--json", "--allow-worse", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    told = json.loads(out)
    assert told["model"] == str(tmp_path / "model")
    assert told["best"]["greedy"]["AL"] >= 1
    assert told["baseline"]["kv"] == "decode"
    assert Model.load(tmp_path / "model").head is not None
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2, 2, 3, 3]
    code, _, err = nextn(tmp_path, *how, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "holds a run already; use --resume" in err


def test_a_fresh_head_alone(given, tmp_path, monkeypatch, capsys):
    how = ["--freeze-trunk", "--from", given / "model", "--data", given / "text", "--init-head", "--head-only", *SMALL]
    code, out, err = nextn(tmp_path, *how, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    assert "wrote" in out
    assert "held-out greedy" in err
    assert (tmp_path / "head" / "head.safetensors").exists()
    assert not (tmp_path / "model").exists()


def test_a_worse_head_is_exit_code_1(given, tmp_path, monkeypatch, capsys):
    """A head that has its trunk's law, trained on the labels of a text that the trunk does not know."""
    model = Model.load(given / "model")
    with torch.no_grad():
        # Both say token 7 whatever they read: the trunk by its output head, the head through it.
        for norm in (model.trunk.final_norm, model.head.stack[0].final_norm):
            norm.weight.fill_(0.0)
            norm.weight[0] = 1.0
        model.trunk.output.weight.zero_()
        model.trunk.output.weight[7, 0], model.trunk.output.weight[9, 0] = 20.0, -20.0
        for layer in (model.trunk.decoder.layers[-1], model.head.stack[0].layers[0]):
            layer.mlp.shared_experts.down_proj.weight.zero_()
        model.trunk.embedding.weight[:, 0] = 50.0
        model.head.stack[0].projection.weight.zero_()
        model.head.stack[0].projection.weight[0, 0] = 50.0
    model.save(tmp_path / "model")
    how = ["--freeze-trunk", "--from", tmp_path / "model", "--data", given / "text", *SMALL, "--set", "lr=0.5"]
    how += ["--set", "objective=ce", "--set", "steps=8", "--set", "eval_every=4"]
    code, _, err = nextn(tmp_path / "run", *how, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1, err
    assert "worse than the one it started from" in err
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--freeze-trunk"], "--freeze-trunk needs a trunk"),
        (["--from", "MODEL"], "go with --freeze-trunk"),
        (["--init-head"], "go with --freeze-trunk"),
        (["--cache-gb", "0"], "go with --freeze-trunk"),
        (["--freeze-trunk", "--from", "MODEL", "--recipe", "code"], "--model and --recipe build a trunk"),
        (["--freeze-trunk", "--from", "MODEL", "--modules", "2"], "modules = 2"),
        (["--freeze-trunk", "--from", "MODEL", "--set", "objective=mse"], "objective = 'mse'"),
        (["--freeze-trunk", "--from", "MODEL", "--accumulate", "3"], "expected a divisor of batch_size = 8"),
        (["--freeze-trunk", "--from", "/nowhere"], "/nowhere"),
        (["--freeze-trunk", "--from", "MODEL", "--data", "EMPTY"], "empty"),
        (["--freeze-trunk", "--from", "MODEL", "--resume", "--data", "TEXT", *SMALL], "holds no checkpoint"),
    ],
)
def test_bad_input_is_exit_code_2(options, words, given, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    places = {"MODEL": given / "model", "TEXT": given / "text", "EMPTY": tmp_path / "empty"}
    options = [places.get(each, each) for each in options]
    code, _, err = nextn(tmp_path / "run", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert words in err
