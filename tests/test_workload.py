"""The built-in prompts, and files of the user's."""

import json
from pathlib import Path

import pytest
from quick import loop

from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.errors import ConfigError
from nextn.evaluate.workload import Prompt, ReferencePlan, by_domain, indices_without, read_prompts
from nextn.model.model import Model


def test_built_in_prompts_are_in_four_domains():
    """A line lost or misspelt; a prompt that ends in a space, which no tokenizer would end with."""
    prompts = read_prompts()
    assert {domain: len(places) for domain, places in by_domain(prompts).items()} == {
        "code": 4, "prose": 4, "json": 4, "repetition": 4,
    }  # fmt: skip
    assert len({prompt.text for prompt in prompts}) == 16
    assert all(150 <= len(prompt.text) <= 350 and not prompt.text.endswith(" ") for prompt in prompts)


def test_txt_is_cut_at_blank_lines(tmp_path):
    """Indentation stays: it belongs to code."""
    (tmp_path / "mine.txt").write_text("\n\n  one\nline two\n \n\nsecond\n")
    assert read_prompts(tmp_path / "mine.txt") == [Prompt("  one\nline two", "mine"), Prompt("second", "mine")]


def test_jsonl_holds_text_or_tokens(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "domain": "x"}\n\n{"prompt": [3, 1], "domain": "y"}\n{"prompt": "b"}\n')
    assert read_prompts(path) == [Prompt("a", "x"), Prompt((3, 1), "y"), Prompt("b", "own")]


def test_records_of_training_data_are_prompts(tmp_path):
    """The columns that `nextn answer` takes; the answer of a conversation is no part of its prompt."""
    turns = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    records = [{"text": "a"}, {"prompt": "b", "text": "x"}, {"messages": turns, "prompt": "x"}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    assert [prompt.text for prompt in read_prompts(path)] == ["a", "b", "c"]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": None, "text": "a"}, {"prompt": "b", "text": "x"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mine.parquet")
    assert [prompt.text for prompt in read_prompts(tmp_path / "mine.parquet")] == ["a", "b"]


@loop(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', "a.jsonl:1: expected .* one user message"),
        ("a.jsonl", '{"messages": "x"}', "a.jsonl:1: expected .* one user message"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl:1: expected"),
        ("a.parquet", "x", "not a readable parquet file"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ""}', "a.jsonl:2: expected"),
        ("a.jsonl", '{"prompt": [1, true]}', "a.jsonl:1: expected"),
        ("a.jsonl", '["x"]', "a.jsonl:1: a JSON list"),
        ("a.jsonl", "{", "a.jsonl:1: not JSON"),
        ("a.jsonl", '{"prompt": ' + "[" * 9_000, "a.jsonl:1: not JSON"),
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.csv", "x", "prompts come from a .txt file"),
        ("a.txt", "\udcff", "not UTF-8 text"),
    ],
)
def test_errors_name_the_line(tmp_path, name, text, words):
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words):
        read_prompts(tmp_path / name)


def test_stored_answers_are_prompts(tmp_path):
    """The first line of what `nextn answer` writes is no prompt; a line like it further down is an error."""
    lines = ['{"nextn": "answers"}', '{"prompt": [1, 2], "tokens": [3]}']
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(lines))
    assert read_prompts(file) == [Prompt((1, 2), "own")]
    file.write_text("\n".join(reversed(lines)))
    with pytest.raises(ConfigError, match=r"answers\.jsonl:2: expected"):
        read_prompts(file)


def test_absent_file():
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(Path("/nowhere.txt"))


def test_text_needs_a_tokenizer(trained):
    """Random tokens in place of the text would measure nothing."""
    model = trained["qwen"]
    with pytest.raises(ConfigError, match=r"no tokenizer.*token ids"):
        Prompt("a", "x").tokens(model)
    assert Prompt((3, 1), "x").tokens(model) == (3, 1)
    spoken = Model(model.trunk, model.head, model.family, byte_tokenizer())
    assert Prompt("ab", "x").tokens(spoken) == (97, 98)


def test_repetitive_texts_are_left_out_unless_all_are():
    prompts = [Prompt("a", "x"), Prompt("b", "y"), Prompt("c", "x")]
    assert indices_without({1, 2}, prompts, "all") == {0}
    assert indices_without({1}, prompts, "x") == {0, 2}
    assert indices_without({0, 2}, prompts, "x") == {0, 2}


def test_k_has_bounds():
    for k in (0, 257, 10**6):
        with pytest.raises(ConfigError, match=f"num_speculative_tokens = {k}; expected 1 to 256"):
            ReferencePlan(num_speculative_tokens=k)
