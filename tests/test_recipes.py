"""Recipes: each builds, fits its tokenizer, and has a head that is small beside its trunk."""

import json

import pytest
from chats import chatty, said

from nextn.data.byte_tokenizer import byte_tokenizer, vocab_size
from nextn.data.corpus import Corpus
from nextn.data.sources import load_corpora
from nextn.errors import ConfigError
from nextn.evaluate.decoding_costs import draft_bytes, step_bytes
from nextn.evaluate.workload import read_prompts
from nextn.model.model import Model
from nextn.train.joint_run import prepare_joint_run
from nextn.train.recipes import by_name, held_out_prompts, write_prompts

SIZE = -(-vocab_size(byte_tokenizer()) // 8) * 8


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "share"), [("demo", 0.2), ("tiny", 0.12), ("code", 0.1), ("hybrid", 0.25)])
def test_a_draft_step_reads_little(name, share):
    """What makes drafting pay: the head of `code` reads less than a tenth of what its trunk does."""
    recipe = by_name(name, vocab_size=SIZE)
    model = Model.build(recipe.model, tokenizer=byte_tokenizer())
    assert draft_bytes(model.head) < share * step_bytes(model.trunk)
    assert recipe.train.length < recipe.model["max_position_embeddings"]


def test_an_unknown_recipe():
    with pytest.raises(ConfigError, match="known: demo, tiny, code, hybrid"):
        by_name("nonsense", vocab_size=SIZE)


def test_prompts_for_bench_are_read_back(tmp_path):
    """What training leaves beside the model is what `nextn bench --prompts` takes."""
    file = tmp_path / "held_out.py"
    file.write_text("".join(f"line {number} of a text\n" for number in range(400)))
    corpus = Corpus.from_files([file], byte_tokenizer())
    write_prompts(tmp_path / "prompts.jsonl", corpus)
    found = read_prompts(tmp_path / "prompts.jsonl")
    assert len(found) == 24
    assert {(len(prompt.text), prompt.domain) for prompt in found} == {(128, "held-out")}


CHATS = [{"messages": said(("user", f"ask {number}"), ("assistant", f"{number} it is"))} for number in range(400)]


def write_chats(path):
    path.write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    return path


@pytest.mark.more
def test_prompts_of_conversations_end_where_the_assistant_begins(tmp_path):
    """Catches held-out figures measured on pieces that no user would send."""
    _, held = load_corpora([write_chats(tmp_path / "a.jsonl")], chatty(), held_out=0.3)
    found = held_out_prompts(held, count=3)
    assert len(found) == 3
    assert all(bytes(prompt).startswith(b"<u>ask") and bytes(prompt).endswith(b"<a>") for prompt in found)


@pytest.mark.more
def test_training_counts_answers_alone(tmp_path):
    """Catches a mask that does not reach the loss: labels of a step are the assistant's tokens, or all with
    all_tokens."""
    chatty().save_pretrained(tmp_path / "tokenizer")
    options = {"data": [str(write_chats(tmp_path / "a.jsonl"))], "recipe": "demo", "tokenizer": tmp_path / "tokenizer"}
    small = {"batch_size": 2, "length": 48, "compile": False, "depths": 1}
    counts = {}
    for all_tokens in (False, True):
        task = prepare_joint_run(tmp_path / "run", **options, settings=small, all_tokens=all_tokens).trainer.task
        example = task.example(0)
        batch = example.batch
        counts[all_tokens] = task.loss(example, lam=1.0).counts.tolist()
        wanted = batch.label_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])
        assert counts[all_tokens][0] == wanted.sum()
    assert 0 < counts[False][0] < counts[True][0]


def test_rows_longer_than_the_context(tmp_path):
    """Catches a run whose positions the model was not made for."""
    with pytest.raises(ConfigError, match=r"length = 5000; the model's context holds 4096"):
        prepare_joint_run(tmp_path, recipe="demo", settings={"length": 5000})
