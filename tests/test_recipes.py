"""Recipes: each builds, fits its tokenizer, and has a head that is small beside its trunk."""

import pytest

from nextn.bytelevel import byte_tokenizer, vocab_size
from nextn.cost import draft_bytes, step_bytes
from nextn.data import Corpus
from nextn.errors import ConfigError
from nextn.model import Model
from nextn.recipes import by_name, write_prompts
from nextn.workload import read_prompts

SIZE = -(-vocab_size(byte_tokenizer()) // 8) * 8


@pytest.mark.parametrize(("name", "share"), [("demo", 0.2), ("code", 0.1), ("hybrid", 0.25)])
def test_a_draft_step_reads_little(name, share):
    """What makes drafting pay: the head of `code` reads less than a tenth of what its trunk does."""
    recipe = by_name(name, vocab_size=SIZE)
    model = Model.build(recipe.model, tokenizer=byte_tokenizer())
    assert draft_bytes(model.head) < share * step_bytes(model.trunk)
    assert recipe.train.length < recipe.model["max_position_embeddings"]


def test_an_unknown_recipe():
    with pytest.raises(ConfigError, match="known: demo, code, hybrid"):
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
