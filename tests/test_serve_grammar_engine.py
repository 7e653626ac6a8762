"""Grammars on a real engine: the same text whatever K is, and what happens when a grammar breaks."""

import json
import queue
from dataclasses import replace

import pytest
import torch
from chats import chatty

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.grammar import GrammarCompiler, json_schema
from nextn.serve.options import EngineOptions
from nextn.serve.request import GenerationRequest
from nextn.settings import Sampling

PROMPT = tuple(b"def add(")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    return replace(Model.load(SHIPPED), tokenizer=chatty())


@pytest.fixture(scope="module")
def engine(model):
    """Native: the bits of its products do not depend on the number of drafts."""
    options = EngineOptions(backend="native", warmup=False, max_model_len=1024, cache_gb=0.1)
    engine = ServingEngine(model, options)
    yield engine
    engine.close(grace_s=1)


@pytest.fixture(scope="module")
def compiler(model):
    return GrammarCompiler(model.tokenizer, model.trunk.vocab_size)


def start(engine, **fields):
    chunks = queue.Queue()
    engine.submit(GenerationRequest(PROMPT, **fields), chunks.put)
    return chunks


def result(chunks):
    """-> text, number of accepted drafts, finish, error"""
    text, accepted = "", 0
    while True:
        chunk = chunks.get(timeout=60)
        text += chunk.text
        accepted += sum(one.num_accepted for one in chunk.rounds)
        if chunk.finish is not None:
            return text, accepted, chunk.finish, chunk.error


def is_answer(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "sizes", "kind"]
        and len(value["name"]) <= 8
        and len(value["sizes"]) <= 4
        and all(type(each) is int and 0 <= each <= 9 for each in value["sizes"])
        and value["kind"] in ("a", "b", None)
    )


@pytest.mark.more
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_does_not_depend_on_the_drafts(engine, compiler, temperature):
    """Drafts are masked as well, so they are accepted inside a grammar, too."""
    grammar = compiler.compile(json_schema(SCHEMA))
    fields = {"grammar": grammar, "sampling": Sampling(temperature), "seed": 5, "max_tokens": 700}
    fields["stop_token_ids"] = (257,)
    runs = [result(start(engine, **fields, num_speculative_tokens=k)) for k in (0, 1, 3)]
    assert {finish for _, _, finish, _ in runs} == {"eos"}
    (text,) = {text for text, *_ in runs}
    assert is_answer(text)
    assert [accepted > 0 for _, accepted, *_ in runs] == [False, True, True]


class Breaking:
    """A grammar that can be followed for five tokens only."""

    def __init__(self, vocab_size):
        self.left, self.mask = 5, torch.ones(vocab_size, dtype=torch.bool)

    def allowed(self, drafts):
        if self.left < 0:
            raise ConfigError("too complex")
        return [self.mask] * (len(drafts) + 1)

    def advance(self, tokens):
        self.left -= len(tokens)


@pytest.mark.more
def test_a_grammar_that_breaks_ends_its_own_sequence_only(model, engine):
    vocab_size = model.trunk.vocab_size
    broken = start(engine, grammar=lambda: Breaking(vocab_size), max_tokens=40, logprobs=0)
    other = start(engine, max_tokens=40, logprobs=0)
    assert result(broken)[2:] == ("error", "too complex")
    assert result(other)[2:] == ("length", "")
