"""Forced tool calls: walks through each grammar give text that the parser of the same syntax reads as calls."""

import json
import random
import re

import pytest
from quick import others_slow
from transformers import AddedToken

from nextn.data.byte_tokenizer import byte_tokenizer, vocab_size
from nextn.errors import ConfigError
from nextn.serve.call_text import Tool
from nextn.serve.grammar import GrammarCompiler
from nextn.serve.message_parser import MessageParser, parse_message
from nextn.serve.structured_output import MAX_CALLS, tool_call_grammar
from nextn.serve.tool_calls import SYNTAXES

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[A-Z][a-z]{0,5}$"},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
    },
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
SPECIAL = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen_xml": ["<tool_call>", "</tool_call>", "</parameter>"],
    "glm_xml": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseek": [f"<｜tool▁{each}｜>" for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "llama3_json": [],
}
ENDS = {"qwen_xml": b"\n</parameter>", "glm_xml": b"</arg_value>"}  # of bare text, which a walk would not find


def tokenizer_of(syntax, *, special):
    """A byte tokenizer in which the marks of a syntax are special tokens, or are not tokens at all."""
    tokenizer = byte_tokenizer()
    if special:
        tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL[syntax]], special_tokens=True)
    return tokenizer


def walk(tokenizer, grammar, seed, end=b""):
    """Take allowed tokens at random, mostly those that end something; of bare text, now and then its end."""
    rng = random.Random(seed)
    state, tokens = GrammarCompiler(tokenizer, vocab_size(tokenizer)).compile(grammar)(), []
    for _ in range(5_000):
        allowed = state.allowed(())[0].nonzero().flatten().tolist()
        if tokenizer.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.7):
            return tokenizer.decode(tokens, skip_special_tokens=False)
        choices = [token for token in allowed if token != tokenizer.eos_token_id]
        if len(allowed) > 150 and end and rng.random() < 0.1 and len(state.allowed(tuple(end))) == len(end) + 1:
            tokens += end
            state.advance(tuple(end))
            continue
        weights = [200 if token > 256 or token in b'"}<' else 1 for token in choices]
        tokens += rng.choices(choices, weights)
        state.advance((tokens[-1],))
    raise AssertionError(f"no end: {tokenizer.decode(tokens)[:200]!r}")


def check(call, *, in_json):
    arguments = json.loads(call.arguments)
    if call.name == "now":
        return arguments == {}
    city = bool(re.fullmatch("[A-Z][a-z]{0,5}", arguments["city"])) if in_json else isinstance(arguments["city"], str)
    unit = arguments.get("unit", "kelvin") in ("celsius", "kelvin")
    return city and unit and 1 <= arguments["days"] <= 14 and {*arguments} <= {"city", "unit", "days"}


@pytest.mark.one_case
@pytest.mark.parametrize("special", others_slow([False, True], True))
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_walks_are_calls(syntax, special):
    tokenizer = tokenizer_of(syntax, special=special)
    grammar = tool_call_grammar(tokenizer, SYNTAXES[syntax], (WEATHER, NOW))
    names, counts = set(), set()
    for seed in range(25):
        text = walk(tokenizer, grammar, seed, ENDS.get(syntax, b""))
        delta = parse_message(MessageParser(SYNTAXES[syntax], (WEATHER, NOW)), text)
        assert delta.content == "", text
        assert delta.tool_calls, text
        assert all(check(call, in_json=not syntax.endswith("xml")) for call in delta.tool_calls), text
        names |= {call.name for call in delta.tool_calls}
        counts.add(min(len(delta.tool_calls), 2))
    assert names == {"get_weather", "now"}
    assert counts == {1, 2}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_one_call_of_one_tool(syntax):
    tokenizer = tokenizer_of(syntax, special=False)
    grammar = tool_call_grammar(tokenizer, SYNTAXES[syntax], (NOW,), parallel=False)
    for seed in range(10):
        delta = parse_message(MessageParser(SYNTAXES[syntax], (NOW,)), walk(tokenizer, grammar, seed))
        assert [call.name for call in delta.tool_calls] == ["now"]


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_tool_without_a_schema_has_no_arguments(syntax):
    tokenizer, tool = tokenizer_of(syntax, special=False), Tool("now", {})
    text = walk(tokenizer, tool_call_grammar(tokenizer, SYNTAXES[syntax], (tool,), parallel=False), 0)
    (call,) = parse_message(MessageParser(SYNTAXES[syntax], (tool,)), text).tool_calls
    assert call.arguments == "{}"


def test_the_number_of_calls_is_bounded():
    tokenizer = tokenizer_of("hermes", special=False)
    state = GrammarCompiler(tokenizer, 258).compile(tool_call_grammar(tokenizer, SYNTAXES["hermes"], (NOW,)))()
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    most = "\n".join([call] * MAX_CALLS)
    masks = state.allowed(tuple(f"{most}\n".encode()))
    assert len(masks) == len(most.encode()) + 1
    assert masks[-1][257]


def test_a_mark_that_is_a_special_token_is_that_token():
    tokenizer = tokenizer_of("hermes", special=True)
    grammar = tool_call_grammar(tokenizer, SYNTAXES["hermes"], (NOW,))
    state = GrammarCompiler(tokenizer, vocab_size(tokenizer)).compile(grammar)()
    assert state.allowed(())[0].nonzero().flatten().tolist() == [tokenizer.convert_tokens_to_ids("<tool_call>")]


@pytest.mark.parametrize("special", [False, True])
def test_free_text_may_have_well_formed_calls(special):
    tokenizer = tokenizer_of("hermes", special=special)
    compiler, call = GrammarCompiler(tokenizer, vocab_size(tokenizer)), '{"name": "now", "arguments": {}}'
    grammars = [
        tool_call_grammar(tokenizer, SYNTAXES["hermes"], (NOW,), parallel=parallel, forced=False)
        for parallel in (True, False)
    ]
    whole = f"<tool_call>\n{call}\n</tool_call>"
    for text, may_end, is_valid in (
        ("", True, True), ("No <tool_cal> here, and <b>{", True, True), (f"Hm. {whole}", True, True),
        (f"{whole}\n{whole} So.", True, True), ("Hm. <tool_call>\n{", False, True),
        (f"<tool_call>\n{call}", False, True), ("<tool_call> {", False, False), ("<tool_call>\n{'a", False, False),
    ):  # fmt: skip
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        masks = compiler.compile(grammars[0])().allowed(tokens)
        assert (len(masks) == len(tokens) + 1) == is_valid, text
        assert not is_valid or bool(masks[-1][tokenizer.eos_token_id]) == may_end, text
    tokens = tuple(tokenizer(f"{whole}\n{whole}", add_special_tokens=False)["input_ids"])
    assert len(compiler.compile(grammars[1])().allowed(tokens)) < len(tokens)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ((), "the request has no tools"),
        ((Tool('a"b', {}),), "tool name 'a\"b'; expected letters"),
        ((Tool("", {}),), "tool name ''"),
        ((Tool("a", {"properties": [1]}),), "expected `properties` to be an object"),
        ((Tool("a", {"properties": {"x": {"enum": [*range(1_001)]}}}),), "array of 1,001 items"),
        ((Tool("a", {"properties": {"x>y": {}}}),), "parameter 'x>y'; expected letters"),
    ],
)
def test_bad_tools(tools, message):
    with pytest.raises(ConfigError, match=message):
        tool_call_grammar(byte_tokenizer(), SYNTAXES["qwen_xml"], tools)


def test_a_bad_schema_is_found_when_compiled():
    tokenizer = byte_tokenizer()
    grammar = tool_call_grammar(tokenizer, SYNTAXES["hermes"], (Tool("a", {"type": "strin"}),))
    with pytest.raises(ConfigError, match="Invalid type: strin"):
        GrammarCompiler(tokenizer, 258).compile(grammar)
