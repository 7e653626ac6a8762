"""Grammars: masks against enumerated languages, drafts and rollback, EOS, limits, and a real engine's texts."""

import itertools
import json
import queue
import random
import re
import threading
from dataclasses import replace

import pytest
import torch
from chats import chatty
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import loop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.data.byte_tokenizer import byte_tokenizer
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.serve.engine import ServingEngine
from nextn.serve.grammar import (
    JSON_OBJECT,
    GrammarCompiler,
    Lark,
    Regex,
    json_schema,
)
from nextn.serve.options import EngineOptions
from nextn.serve.request import GenerationRequest
from nextn.settings import Sampling

EOS = 257
V = 264  # some ids more than the tokenizer has, as in checkpoints with a padded vocabulary
BYTES = GrammarCompiler(byte_tokenizer(), V)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def state_of(spec, *texts):
    state = BYTES.compile(spec)()
    for text in texts:
        state.advance(tuple(text.encode()))
    return state


def ids(mask):
    return set(mask.nonzero().flatten().tolist())


def next_ids(state):
    (mask,) = state.allowed(())
    assert mask.dtype == torch.bool
    return ids(mask)


def merged_tokenizer():
    """Bytes, and longer tokens that begin and end in the middle of what a grammar has."""
    vocabulary = byte_tokenizer().get_vocab()
    vocabulary = {token: id for token, id in vocabulary.items() if id < 256}
    merges = [("a", "b"), ("ab", "c"), ("c", "c"), ("b", "c"), ("1", "2"), ("1", ","), ('"', "a")]
    vocabulary |= {left + right: 256 + index for index, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def sentencepiece_tokenizer():
    """As Llama-2's: a metaspace for spaces, and bytes as `<0x..>` for what is not in the vocabulary."""
    characters = '{}[]":,_abcdefghijklmnopqrstuvwxyz0123456789▁'
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "▁a", "ab"]
    vocabulary, merges = {token: id for id, token in enumerate(tokens)}, [("▁", "a"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", bos_token="<s>")


WORDS = ["".join(letters) for size in range(5) for letters in itertools.product("abcé", repeat=size)]
LANGUAGES = {
    "enum": (json_schema({"enum": ["ab", "abc", 12, None]}), ['"ab"', '"abc"', "12", "null"]),
    "array": (
        json_schema({"type": "array", "items": {"enum": [1, 12]}, "minItems": 1, "maxItems": 2}),
        ["[1]", "[12]", *(f"[{a},{b}]" for a in (1, 12) for b in (1, 12))],
    ),
    "optional": (
        json_schema(
            {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "additionalProperties": False}
        ),
        ["{}", '{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
    ),
    "integers": (json_schema({"type": "integer", "minimum": 8, "maximum": 112}), list(map(str, range(8, 113)))),
    "regex": (
        Regex("(ab|a)c{0,2}|é"),
        [text for text in WORDS if re.fullmatch("(ab|a)c{0,2}|é", text)],
    ),
    "lark": (Lark('start: "a" start "b" | "c"'), None),
}  # fmt: skip


@pytest.mark.more
@loop("name", [name for name, (_, texts) in LANGUAGES.items() if texts])
@loop("make", [byte_tokenizer, merged_tokenizer])
def test_masks_of_a_finite_language(name, make):
    """After each prefix: a token if some text continues with it, EOS if the prefix is a text. No whitespace."""
    spec, texts = LANGUAGES[name]
    tokenizer = make()
    eos = tokenizer.eos_token_id
    characters = {character: byte for byte, character in enumerate(_characters())}
    vocabulary = {id: token for token, id in tokenizer.get_vocab().items() if id != eos}
    pieces = {id: bytes(characters[character] for character in token) for id, token in vocabulary.items()}
    blank = {id for id, piece in pieces.items() if any(byte in b" \t\r\n" for byte in piece)}
    language = {text.encode() for text in texts}
    grammar = GrammarCompiler(tokenizer, 300).compile(spec)
    todo, seen = [()], set()
    while todo:
        tokens = todo.pop()
        prefix = b"".join(pieces[token] for token in tokens)
        state = grammar()
        state.advance(tokens)
        follows = {id for id, piece in pieces.items() if any(text.startswith(prefix + piece) for text in language)}
        assert next_ids(state) - blank == follows | ({eos} if prefix in language else set()), prefix
        if prefix not in seen:
            seen.add(prefix)
            todo += [(*tokens, token) for token in follows]
    assert language <= seen


def _characters():
    tokens = {id: token for token, id in byte_tokenizer().get_vocab().items()}
    return [tokens[byte] for byte in range(256)]


def test_a_recursive_grammar():
    state = state_of(LANGUAGES["lark"][0], "aaac")
    for _ in range(3):
        assert next_ids(state) == {ord("b")}
        state.advance((ord("b"),))
    assert next_ids(state) == {EOS}


def test_masks_of_drafts_are_those_of_advancing():
    rng = random.Random(0)
    text = tuple(b'{"name": "\xc3\xa9ab" , "age": 42}')
    for _ in range(40):
        begin = rng.randrange(len(text))
        drafts = text[begin : begin + rng.randrange(6)]
        state = state_of(json_schema(PERSON))
        state.advance(text[:begin])
        masks = state.allowed(drafts)
        assert len(masks) == len(drafts) + 1
        assert next_ids(state) == ids(masks[0]), "allowed() changed the state"
        for mask, draft in zip(masks, [*drafts, None], strict=True):
            assert next_ids(state) == ids(mask)
            if draft is not None:
                state.advance((draft,))


@pytest.mark.parametrize("forbidden", [ord("x"), EOS, -1, V - 1, V, 10**6])
def test_a_forbidden_draft_ends_the_masks(forbidden):
    state = state_of(json_schema(PERSON))
    masks = state.allowed((*b'{"na', forbidden, *b"me"))
    assert len(masks) == 5
    assert ids(masks[4]) == {ord("m")}
    assert next_ids(state) == ids(masks[0])
    state.advance(tuple(b'{"name"'))
    assert ord(":") in next_ids(state)


def test_eos_only_where_the_text_may_end():
    text = '{"name":"a","age":7}'
    state = state_of(json_schema(PERSON))
    for byte in text.encode():
        assert EOS not in next_ids(state)
        state.advance((byte,))
    assert EOS in next_ids(state)


def test_drafts_with_eos_are_rolled_back():
    state = state_of(json_schema({"enum": [1, 12]}), "1")
    masks = state.allowed((EOS,))
    assert ids(masks[0]) == {ord("2"), EOS}
    assert ids(masks[1]) == {EOS}
    assert ids(state.allowed((ord("2"), EOS))[1]) == {EOS}
    state.advance((ord("2"), EOS))
    assert [ids(mask) for mask in state.allowed((EOS, EOS, ord("2")))] == [{EOS}] * 3
    with pytest.raises(ConfigError, match="token 50 does not follow the grammar: the text has ended"):
        state.advance((ord("2"),))


def test_eos_too_early():
    with pytest.raises(ConfigError, match="token 257 does not follow the grammar"):
        state_of(Regex("ab"), "a").advance((EOS,))


def test_every_eos_token_ends():
    grammar = GrammarCompiler(byte_tokenizer(), V, eos_ids=(EOS, 10)).compile(Regex("a*"))
    assert next_ids(grammar()) == {ord("a"), 10, EOS}


def test_unknown_ids_are_never_allowed():
    state = state_of(Regex("(?s:.*)"))
    assert next_ids(state) < set(range(EOS + 1))


def test_states_are_independent():
    grammar = BYTES.compile(Regex("ab|cd"))
    one, two = grammar(), grammar()
    one.advance((ord("a"),))
    assert next_ids(one) == {ord("b")}
    assert next_ids(two) == {ord("a"), ord("c")}


def test_a_token_that_does_not_follow():
    with pytest.raises(ConfigError, match="token 120 does not follow the grammar"):
        state_of(Regex("ab"), "x")


@pytest.mark.parametrize("make", [byte_tokenizer, merged_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ['{"a_b": ["abc", 12, {"é日🎉": null}], "b": " ab ab"}', "{}"])
def test_tokenizers(make, text):
    """Text as the tokenizer encodes it is accepted, and may end at its end."""
    tokenizer = make()
    tokens = tuple(
        tokenizer.encode(text.replace(" ", "▁") if make is sentencepiece_tokenizer else text, add_special_tokens=False)
    )
    assert tokenizer.decode(tokens) == text
    state = GrammarCompiler(tokenizer, 400).compile(JSON_OBJECT)()
    assert len(state.allowed(tokens)) == len(tokens) + 1
    state.advance(tokens)
    assert tokenizer.eos_token_id in next_ids(state)


@loop(
    ("schema", "message"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "string", "pattern": "(["}, "unclosed character class"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ({"$ref": "#/$defs/x"}, "Pointer '/\\$defs/x' does not exist"),
        ({"$ref": "http://127.0.0.1:9/x"}, "is not present in a registry"),
        ({"$ref": "#"}, "no text fulfills it"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"type": "array", "minItems": 5, "maxItems": 2}, "minItems \\(5\\) is greater than maxItems \\(2\\)"),
    ],
)
def test_bad_schemas(schema, message):
    with pytest.raises(ConfigError, match=f"JSON schema cannot be used: .*{message}"):
        BYTES.compile(json_schema(schema))


@pytest.mark.parametrize("schema", [None, [], 3, "{}", True])
def test_a_schema_is_an_object(schema):
    with pytest.raises(ConfigError, match="expected an object"):
        json_schema(schema)


def _alternatives(prefix):
    return {"anyOf": [{"properties": {f"{prefix}{index}": {}}} for index in range(6)]}


def _nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@loop(
    ("spec", "message"),
    [
        (Regex("(a"), "unclosed group"),
        (Lark("start: missing"), "missing"),
        (Regex("a" * 4_097), "regular expression has 4,097 characters; expected at most 4,096"),
        (json_schema(_nested(32)), "nested more than 32 levels deep"),
        (json_schema({"enum": [1, {"a": [2**53 + 1]}]}), "the constant 9007199254740993"),
        (json_schema({"properties": {"id": {"const": 10**400}}}), "the constant 1000"),
        (json_schema({"minimum": 10**4000}), "JSON schema cannot be used: number out of range"),
        (json_schema({"default": float("nan")}), "JSON schema cannot be used"),
        (json_schema({"enum": list(range(1_001))}), "array of 1,001 items; expected at most 1,000"),
        (json_schema({"properties": {str(n): {} for n in range(251)}}), "object of 251 members; expected at most 250"),
        (json_schema({"allOf": [_alternatives(prefix) for prefix in "abcdefgh"]}), "schema too large"),
    ],
)
def test_bad_grammars_and_limits(spec, message):
    with pytest.raises(ConfigError, match=message) as error:
        BYTES.compile(spec)
    assert "\n" not in str(error.value)


@pytest.mark.more
def test_what_is_within_the_limits():
    BYTES.compile(json_schema(_nested(31)))
    BYTES.compile(json_schema({"enum": list(range(1_000))}))
    names = [f"property {n}" for n in range(250)]
    optional = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    assert EOS in next_ids(state_of(json_schema(optional), json.dumps(dict.fromkeys(names, 1))))


def test_a_regular_expression_that_is_too_complex():
    """It compiles; what becomes too much is found while the text grows, and each step before that is bounded."""
    spec = Regex("(.*a.{200}){20}")
    with pytest.raises(ConfigError, match="the grammar became too complex to follow: lexer error"):
        BYTES.compile(spec)().allowed(tuple(random.Random(0).choices(b"abc", k=3_000)))
    assert len(BYTES.compile(spec)().allowed(tuple(b"abc"))) == 4, "the limit that one text reached must not stay"


def test_whitespace_is_bounded():
    """A space, or a new line with up to 24 characters of indentation."""
    for text, longest in ((b" " * 60, 1), (b"\n" + b" " * 60, 25), (b"\n" * 60, 1)):
        assert len(state_of(JSON_OBJECT, "{").allowed(tuple(text))) == longest + 1


def test_the_least_recently_used_grammar_goes(monkeypatch):
    compiled = []
    original = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, spec: compiled.append(spec) or original(self, spec))
    monkeypatch.setattr("nextn.serve.grammar._MAX_CACHED", 2)
    compiler = GrammarCompiler(byte_tokenizer(), V)
    a, b, c = Regex("a"), Regex("b"), Regex("c")
    for spec in (a, b, a, c, a, b):
        compiler.compile(spec)
    assert compiled == [a, b, c, b]


def test_threads_share_a_compiler():
    results = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(30):
            n = rng.randrange(90)
            state = BYTES.compile(json_schema({"type": "integer", "minimum": n, "maximum": n}))()
            masks = state.allowed(tuple(str(n).encode()))
            results.append(len(masks) == 1 + len(str(n)) and EOS in ids(masks[-1]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 120


def test_a_tokenizer_without_eos():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    with pytest.raises(ConfigError, match="no eos_token"):
        GrammarCompiler(tokenizer, V)


def test_added_tokens_beyond_the_vocabulary():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["[PAD]"])
    [mask] = GrammarCompiler(tokenizer, 258).compile(Regex("[ab]"))().allowed(())
    assert (len(mask), mask.nonzero().flatten().tolist()) == (258, [97, 98])
    with pytest.raises(ConfigError, match="ids up to 258; expected"):
        GrammarCompiler(tokenizer, 258, eos_ids=[258])


def test_a_vocabulary_smaller_than_the_tokenizer():
    with pytest.raises(ConfigError, match="ids up to 257; expected less than the vocabulary's 200"):
        GrammarCompiler(byte_tokenizer(), 200)


def _schemas():
    strings = st.builds(_string, st.integers(0, 3), st.integers(0, 3))
    integers = st.builds(_integer, st.integers(-200, 200), st.integers(0, 300))
    values = st.lists(st.text(max_size=4) | st.integers(-(2**53), 2**53) | st.none(), min_size=1, max_size=3)
    patterns = st.sampled_from(["^[a-c]{2}$", "[0-9]x", "^(é|日)+$"])
    leaves = st.one_of(
        strings,
        integers,
        values.map(lambda each: {"enum": each}),
        patterns.map(lambda each: {"type": "string", "pattern": each}),
        st.just({"type": "boolean"}),
    )
    return st.recursive(leaves, _containers_of, max_leaves=6)


def _containers_of(inner):
    properties = st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3)
    objects = st.builds(_object, properties, st.booleans(), st.randoms(use_true_random=False))
    arrays = st.builds(_array, inner, st.integers(0, 2), st.integers(0, 2))
    return objects | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})


def _string(low, more):
    return {"type": "string", "minLength": low, "maxLength": low + more}


def _integer(low, more):
    return {"type": "integer", "minimum": low, "maximum": low + more}


def _array(items, low, more):
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + more}


def _object(properties, closed, rng):
    required = [name for name in properties if rng.random() < 0.5]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False if closed else {"type": "null"},
    }


def validates(value, schema):
    """The keywords that `_schemas` uses."""
    if "anyOf" in schema:
        return any(validates(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    if type(value) is not kinds[schema["type"]]:
        return False
    if isinstance(value, str):
        in_range = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
        return in_range and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            validates(each, schema["items"]) for each in value
        )
    if isinstance(value, dict):
        extra = schema["additionalProperties"]
        rules = {name: schema["properties"].get(name, extra) for name in value}
        valid = all(rule is not False and validates(value[name], rule) for name, rule in rules.items())
        return valid and set(schema["required"]) <= set(value)
    return type(value) is bool or value is None or schema["minimum"] <= value <= schema["maximum"]


@pytest.mark.more
@settings(max_examples=60, deadline=None)
@given(_schemas(), st.integers(0, 2**32))
def test_random_walks_end_in_valid_json(schema, seed):
    """Take allowed tokens at random, mostly those that close something, until EOS; drafts are tried on the way."""
    rng = random.Random(seed)
    state, text = BYTES.compile(json_schema(schema))(), bytearray()
    for _ in range(3_000):
        allowed = sorted(next_ids(state))
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            break
        choices = [token for token in allowed if token != EOS]
        token = rng.choices(choices, [50 if token in b'"]}0x' else 1 for token in choices])[0]
        drafts = (token, *rng.choices(range(V), k=3))
        assert len(state.allowed(drafts)) >= 2
        state.advance((token,))
        text.append(token)
    else:
        raise AssertionError(f"no end after {len(text)} bytes")
    assert validates(json.loads(text.decode()), schema), text.decode()


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
