"""`nextn accuracy`, and the same figure beside the speeds of `nextn bench` with weights of few bits."""

import json

import pytest

from nextn.cli.accuracy import accuracy_of
from nextn.cli.common import ModelOptions


@pytest.fixture(scope="module")
def few_texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "ids.jsonl"
    file.write_text('{"prompt": [3, 14, 15], "tokens": [9, 26, 5, 35, 8, 9, 7]}\n' * 3)
    return file


@pytest.mark.more
def test_every_way_is_compared(here, fixture_folder, few_texts, tmp_path):
    """Widths and backends of the model, another form of it, and few bits in torch, which has none, left out."""
    folder, other = fixture_folder / "glm", tmp_path / "rounded"
    assert here("quantize", folder, other, "--weights", "int8", "--group-size", 32)[0] == 0
    args = [folder, other, "--texts", few_texts, "--weights", "stored,int8", "--backend", "native,torch", "--json"]
    code, said, complaint = here("accuracy", *args)
    assert code == 0, complaint
    record = json.loads(said)
    ways = [(each["source"], each["weights"], each["backend"]) for each in record["figures"]]
    three = [("stored", "native"), ("stored", "torch"), ("int8", "native")]
    assert ways == [(str(name), *way) for name in (folder, other) for way in three]
    assert record["texts"]["texts"] == 3
    figures = dict(zip(ways, record["figures"], strict=True))
    assert all(each["positions"] == 27 for each in figures.values())
    assert figures[ways[2]]["kl_mean"] > 2 * figures[ways[0]]["kl_mean"]
    assert figures[ways[2]]["step_bytes"] < figures[ways[0]]["step_bytes"]


def test_the_table_has_a_row_for_each_way(here, fixture_folder, few_texts):
    code, said, complaint = here("accuracy", fixture_folder / "glm", "--texts", few_texts, "--weights", "stored,int4")
    assert code == 0, complaint
    rows = [line.split() for line in said.splitlines()]
    assert [row[:3] for row in rows[1:3]] == [["glm", "bfloat16", "native"], ["glm", "int4", "native"]]
    assert said.splitlines()[-1].startswith(f"27 positions of {few_texts}")


@pytest.mark.more
def test_bench_shows_what_few_bits_cost(here, monkeypatch, tmp_path, own_cache):
    """The bundled model: its speed at 4 bits comes with its divergence."""
    monkeypatch.setattr("nextn.cli.accuracy.TOKENS", 100)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(")
    args = ["--repeats", 1, "--max-tokens", 2, "--temperatures", 0, "--prompts", prompts, "--weights", "int4"]
    code, said, complaint = here("bench", "tiny", "-k", 1, *args)
    assert code == 0, complaint
    assert "beside float32: KL 0.0" in said
    assert "at 99 positions of pydoc_data.topics" in said


def test_weights_of_16_bits_have_no_such_line_and_those_without_tokenizer_a_note(fixture_folder, capsys):
    for folder, weights, note in (("glm", "stored", ""), ("glm", "int8", "as the checkpoint has no tokenizer")):
        options = ModelOptions(str(fixture_folder / folder), weights=weights)
        assert accuracy_of(options.load(need_head=False), options, quiet=True) is None
        assert note in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--weights", "int2"], "--weights 'int2': 'int2'; expected some of stored, int8, int4"),
        (["--backend", "cuda"], "expected some of auto, native, torch"),
        (["--weights", "int8", "--backend", "torch"], "only the native backend"),
        (["--texts", "absent.txt"], "absent.txt"),
        (["absent-folder"], "absent-folder"),
        ([], "give records of token ids"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_a_usage_error(here, fixture_folder, args, part):
    code, said, complaint = here("accuracy", fixture_folder / "glm", *args)
    assert code == 2
    assert not said
    assert part in " ".join(complaint.split())
