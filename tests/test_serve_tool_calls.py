"""Tool calls and reasoning: each syntax, cut at every position, mixed with text, broken, and forced by a grammar."""

import itertools
import json
import random
import re

import pytest
from quick import loop, others_slow
from transformers import AddedToken

from nextn.data.byte_tokenizer import byte_tokenizer, vocab_size
from nextn.errors import ConfigError
from nextn.serve.call_text import Tool
from nextn.serve.grammar import GrammarCompiler
from nextn.serve.message_parser import MessageDelta, MessageParser, joined_deltas, parse_message, reasoning_is_open
from nextn.serve.structured_output import MAX_CALLS, tool_call_grammar
from nextn.serve.tool_calls import SYNTAXES, tool_syntax

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "zip": {"type": ["string", "number"]},
                "where": {"type": "object"},
            },
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
)
# Arguments that look like the ends of calls, and text that needs escapes.
ARGUMENTS = {"city": 'São "Paulo" </tool_call> }{ ]\\', "days": 3, "exact": None, "where": {"lat": [1.5, -2]}}
PLAIN = {"city": "Tokyo\n日本", "days": 12, "exact": True, "zip": "0123a", "where": {"lat": [1.5, -2]}}


def hermes(*calls):
    lines = (json.dumps({"name": name, "arguments": args}, ensure_ascii=False) for name, args in calls)
    return "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)


def bare(value):
    return value if isinstance(value, str) else json.dumps(value)


def qwen_xml(*calls):
    """As Qwen3-Coder's and Qwen3.5's templates render it."""

    def one(name, args):
        parameters = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in args.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm_xml(*calls):
    """As GLM-4.5's and 4.6's templates render it."""

    def one(name, args):
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n" for key, value in args.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm_47_xml(*calls):
    """Without line breaks."""
    return glm_xml(*calls).replace("</arg_key>\n", "</arg_key>").replace("</arg_value>\n", "</arg_value>")


def deepseek_v3(*calls):
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    calls = "\n".join(one.format(name, json.dumps(args, ensure_ascii=False)) for name, args in calls)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def deepseek_v31(*calls):
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    calls = "".join(one.format(name, json.dumps(args, ensure_ascii=False)) for name, args in calls)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def mistral(*calls):
    calls = [{"name": name, "arguments": args, "id": "abcdef012"} for name, args in calls]
    return f"[TOOL_CALLS] {json.dumps(calls)}"


def mistral_v11(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)


def mistral_with_ids(*calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdef012[ARGS]{json.dumps(args)}" for name, args in calls)


def llama(*calls):
    return "; ".join(json.dumps({"name": name, "parameters": args}) for name, args in calls)


def llama_tagged(*calls):
    return f"<|python_tag|>{llama(*calls)}"


WRITERS = {
    hermes: "hermes",
    qwen_xml: "qwen_xml",
    glm_xml: "glm_xml",
    glm_47_xml: "glm_xml",
    deepseek_v3: "deepseek",
    deepseek_v31: "deepseek",
    mistral: "mistral",
    mistral_v11: "mistral",
    mistral_with_ids: "mistral",
    llama: "llama3_json",
    llama_tagged: "llama3_json",
}
XML = (qwen_xml, glm_xml, glm_47_xml)
BARE = (llama, llama_tagged)  # calls only at the beginning


def parser(syntax, **options):
    return MessageParser(SYNTAXES[syntax], TOOLS, **options)


def calls_of(delta):
    return [(call.name, json.loads(call.arguments)) for call in delta.complete_calls]


def settled(delta):
    """What counts in the end: without calls that began and came to nothing."""
    return delta.content, delta.reasoning, delta.complete_calls


def in_pieces(make, text, cuts):
    one = make()
    edges = [0, *cuts, len(text)]
    deltas = [one.push(text[begin:end]) for begin, end in itertools.pairwise(edges)]
    return joined_deltas([*deltas, one.finish()])


def same_however_cut(make, text):
    """Parse the text whole, in two pieces cut at every position, by characters, and at random positions."""
    whole = parse_message(make(), text)
    rng = random.Random(0)
    cuts = [[at] for at in range(len(text) + 1)]
    cuts += [range(len(text)), *(sorted(rng.choices(range(len(text) + 1), k=5)) for _ in range(20))]
    for each in cuts:
        assert settled(in_pieces(make, text, each)) == settled(whole), each
    return whole


@pytest.mark.more
@loop("write", WRITERS, ids=lambda write: write.__name__)
def test_calls(write):
    arguments = PLAIN if write in XML else ARGUMENTS
    expected = [("get_weather", arguments), ("now", {})]
    delta = same_however_cut(lambda: parser(WRITERS[write]), write(*expected))
    assert calls_of(delta) == expected
    assert delta.content == ""


@pytest.mark.more
@loop("write", [write for write in WRITERS if write not in BARE], ids=lambda write: write.__name__)
def test_text_around_calls(write):
    text = f"Let me see: a < b, {{x}} [1]\n\n{write(('now', {}))}\nDone.\n"
    delta = same_however_cut(lambda: parser(WRITERS[write]), text)
    assert calls_of(delta) == [("now", {})]
    assert delta.content == "Let me see: a < b, {x} [1]Done.\n"


@pytest.mark.more
@loop("write", WRITERS, ids=lambda write: write.__name__)
def test_an_unfinished_call_is_content(write):
    """At every position where the first call is not complete yet, the text is content, unchanged."""
    text = write(("get_weather", {"city": "Oslo"}))
    make = lambda: parser(WRITERS[write])  # noqa: E731
    for end in range(len(text)):
        delta = parse_message(make(), text[:end])
        if not delta.complete_calls:
            assert delta.content == text[:end]
        else:
            assert write in (deepseek_v3, deepseek_v31), "only DeepSeek's calls have a mark after the last"
            assert "<｜tool▁call▁end｜>" in text[:end]
    assert same_however_cut(make, text[: len(text) // 2]).complete_calls == []


@pytest.mark.more
@loop(
    ("syntax", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": }}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": "[1]"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}</tool>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1, "a": 2}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1}, "name": "then"}\n</tool_call>'),
        ("hermes", "<tool_call> is how a call begins, </tool_call> how it ends"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 30_000 + "1" + "}" * 30_001 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 150 + "1" + "}" * 151 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>'),
        ("qwen_xml", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call><function=now>" + "<parameter=a>1</parameter>" * 2 + "</function></tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=no\nw>\n</function>\n</tool_call>"),
        ("glm_xml", "<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>"),
        ("glm_xml", "<tool_call>\n</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁calls▁end｜>"),
        ("deepseek", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1<｜tool▁call▁end｜>'),
        ("deepseek", "<｜tool▁calls▁end｜>"),
        ("mistral", "[TOOL_CALLS] [now]"),
        ("mistral", "[TOOL_CALLS]now{}"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", 'Use {"name": "now", "parameters": {}}'),
        ("llama3_json", "; and so on"),
    ],
)
def test_malformed_calls_are_content(syntax, text):
    make = lambda: parser(syntax)  # noqa: E731
    delta = parse_message(make(), text) if len(text) > 1_000 else same_however_cut(make, text)
    assert settled(delta) == settled(MessageDelta((text,)))


def test_arguments_can_be_sent():
    """A lone surrogate becomes U+FFFD, and a bare text that is no number of JSON stays a text."""
    surrogate = '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>'
    bare = "<tool_call>\n<function=now>\n<parameter=a>\nNaN\n</parameter>\n</function>\n</tool_call>"
    for syntax, text, value in (("hermes", surrogate, "\ufffd"), ("qwen_xml", bare, "NaN")):
        assert calls_of(same_however_cut(lambda syntax=syntax: parser(syntax), text)) == [("now", {"a": value})]


def test_a_call_after_a_malformed_one():
    text = f"<tool_call> oops {hermes(('now', {}))}"
    delta = same_however_cut(lambda: parser("hermes"), text)
    assert (delta.content, calls_of(delta)) == ("<tool_call> oops", [("now", {})])


def test_content_is_not_held_back():
    one = parser("hermes")
    assert one.push("Hello <b").content == "Hello <b"
    assert one.push(" and <tool").content == " and"
    assert one.push("box").content == " <toolbox"
    assert one.push("<tool_call>\nnot").content == "<tool_call>\nnot"


@loop("write", WRITERS, ids=lambda write: write.__name__)
def test_calls_are_streamed(write):
    """Name first, then pieces of the arguments, which join to the whole; long text flows while it is written."""
    words = "The quick brown fox, 12 dogs and [3] cats"
    text = write(("get_weather", {"days": 12, "city": words}), ("now", {}))
    one = parser(WRITERS[write])
    pieces = [call for character in text for call in one.push(character).tool_calls]
    pieces += one.finish().tool_calls
    for index, (name, arguments) in enumerate([("get_weather", {"days": 12, "city": words}), ("now", {})]):
        call = [piece for piece in pieces if piece.index == index]
        assert [piece.name for piece in call] == [name] + [None] * (len(call) - 1)
        assert [piece.is_last for piece in call] == [False] * (len(call) - 1) + [True]
        assert json.loads("".join(piece.arguments for piece in call)) == arguments
        assert len(call) > (len(words) // 2 if index == 0 else 0)
    whole = parse_message(parser(WRITERS[write]), text)
    assert joined_deltas([MessageDelta((piece,)) for piece in pieces]).tool_calls == whole.tool_calls


@pytest.mark.more
def test_pieces_of_a_call_are_never_taken_back():
    """Whatever values, wherever the text is cut."""
    rng = random.Random(0)

    def value(depth):
        kinds = [lambda: rng.choice([0, -7, 12.5, 1e30, True, None]), lambda: "".join(rng.choices('a1"\\\n}]é😀', k=5))]
        if depth:
            kinds.append(lambda: [value(depth - 1) for _ in range(rng.randrange(3))])
            kinds.append(lambda: {str(key): value(depth - 1) for key in range(rng.randrange(3))})
        return rng.choice(kinds)()

    for _ in range(300):
        arguments = {key: value(3) for key in "abc"}
        ascii_only = rng.random() < 0.5
        text = json.dumps(
            {"name": "now", "arguments": arguments}, ensure_ascii=ascii_only, indent=rng.choice([None, 1])
        )
        cuts = sorted(rng.choices(range(len(text)), k=9))
        delta = in_pieces(lambda: parser("hermes"), f"<tool_call>{text}</tool_call>", cuts)
        assert calls_of(delta) == [("now", arguments)]


def test_a_name_after_the_arguments():
    text = '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>'
    assert calls_of(same_however_cut(lambda: parser("hermes"), text)) == [("now", {"a": 1})]


def test_a_streamed_call_that_is_malformed_has_no_last_piece():
    one = parser("hermes")
    begun = one.push('<tool_call>{"name": "now", "arguments": {"a": "bc')
    assert [(call.name, call.arguments, call.is_last) for call in begun.tool_calls] == [("now", '{"a": "bc', False)]
    text = '"}]' + hermes(("now", {}))
    delta = one.push(text)
    assert delta.content == '<tool_call>{"name": "now", "arguments": {"a": "bc"}]'
    assert [(call.index, call.name, call.is_last) for call in delta.tool_calls] == [(1, "now", True)]


@pytest.mark.more
def test_long_arguments_take_linear_time():
    """40,000 characters one by one; parsing the whole call at each would take minutes."""
    text = hermes(("now", {"text": "x" * 40_000}))
    one = parser("hermes")
    deltas = [one.push(character) for character in text]
    assert calls_of(joined_deltas(deltas)) == [("now", {"text": "x" * 40_000})]


@loop("write", XML, ids=lambda write: write.__name__)
@loop(
    ("key", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("days", "12", 12),
        ("days", "twelve", "twelve"),
        ("exact", "True", True),
        ("exact", "None", None),
        ("zip", "0123", "0123"),
        ("zip", "12", 12),
        ("zip", "[1]", "[1]"),
        ("where", '{"lat": 1}', {"lat": 1}),
        ("unknown", "[1]", [1]),
        ("unknown", "a b", "a b"),
    ],
)
def test_types_of_bare_values(write, key, text, value):
    delta = parse_message(parser(WRITERS[write]), write(("get_weather", {key: text})))
    assert calls_of(delta) == [("get_weather", {key: value})]


def test_arguments_as_json_text():
    delta = parse_message(parser("hermes"), hermes(("now", '{"a": 1}')))
    assert calls_of(delta) == [("now", {"a": 1})]


@loop(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nFirst a.\n\nThen b.\n</think>\n\nAnswer\n", False, "First a.\n\nThen b.", "Answer\n"),
        ("\n<think></think>x", False, "", "x"),
        ("Why?\n</think>\nBecause", True, "Why?", "Because"),
        ("  Why? </thin", True, "Why? </thin", ""),
        ("<think> never closed ", False, "never closed", ""),
        (" No <think>tags</think>", False, "", " No <think>tags</think>"),
        ("<thinking>", False, "", "<thinking>"),
        ("<thi", False, "", "<thi"),
        ("", False, "", ""),
    ],
)
def test_reasoning(text, is_open, reasoning, content):
    make = lambda: MessageParser(None, reasoning=True, is_open=is_open)  # noqa: E731
    assert settled(same_however_cut(make, text)) == (content, reasoning, [])


def test_reasoning_then_a_call():
    text = f"I call <tool_call>.\n</think>\n\nSure.\n{hermes(('now', {}))}"
    delta = same_however_cut(lambda: parser("hermes", is_open=True), text)
    assert (delta.reasoning, delta.content, calls_of(delta)) == ("I call <tool_call>.", "Sure.", [("now", {})])


def test_text_without_tools_is_content():
    assert parse_message(MessageParser(None), hermes(("now", {}))).content == hermes(("now", {}))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen_xml"),
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", "glm_xml"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'", "deepseek"),
        ('"[TOOL_CALLS] ["', "mistral"),
        ("'<|start_header_id|>assistant<|end_header_id|>' '\"parameters\": '", "llama3_json"),
        ("<|im_start|>{{ message.role }}", None),
        (None, None),
    ],
)
def test_the_syntax_of_a_template(template, name):
    syntax = tool_syntax(template)
    assert (syntax.name if syntax else None) == name


def test_the_syntax_can_be_chosen():
    assert tool_syntax("<tool_call>", "mistral") is SYNTAXES["mistral"]
    with pytest.raises(ConfigError, match="tool-call parser 'x'; expected one of qwen_xml, glm_xml, hermes"):
        tool_syntax(None, "x")


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("<a><think>\n", True), ("<a><think>\n\n</think>\n", False), ("", False)]
)
def test_whether_a_prompt_opens_reasoning(prompt, is_open):
    assert reasoning_is_open(prompt) is is_open


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


def test_no_content_after_a_call_that_was_forced():
    """A limit may cut off the next call; before the first call is whole, what there is stays."""
    call = hermes(("now", {}))
    for text, content in ((call + "\n<tool", ""), (call + '\n<tool_call>{"na', ""), ("<tool", "<tool"), (call, "")):
        forced = parse_message(parser("hermes", only_calls=True), text)
        assert forced.content == content
        assert len(forced.complete_calls) == text.startswith(call)
        free = parse_message(parser("hermes"), text)
        assert free.content == text.removeprefix(call).strip()


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
