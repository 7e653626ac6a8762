"""Chat templates and records: transformers' rendering and masks, templates that never end, which tokens count."""

import json
import os
import time

import numpy as np
import pytest
from chats import EOS, MARKED, chatty, reasoner, said
from quick import loop

from nextn.data import chat_template
from nextn.data.chat_template import apply_chat_template
from nextn.data.records import RecordReader
from nextn.errors import ConfigError

TALK = [
    {"role": "user", "content": "What? \u00e4\U0001f600"},
    {"role": "assistant", "content": "This."},
    {"role": "user", "content": "And?", "name": None},
    {"role": "assistant", "content": "That \U0001f600 too."},
]
LOOPS = "{% for each in range(99999) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {
    "loops": (LOOPS, "takes more than 0.5 s"),
    "power": ("{{ (10 ** 10) ** (10 ** 9) }}", "takes more than 0.5 s|MiB of memory|OverflowError"),
    "string": ("{{ 'x' * 3000000000 }}", "more than 512 MiB of memory"),
    "list": (
        "{% set ns = namespace(x=[0]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "MiB",
    ),
    "output": ("{{ 'x' * 20000000 }}", "renders 20,000,000 characters, at most 16,777,216 are allowed"),
    "no program": ("{% for %}", "TemplateSyntaxError"),
    "deep": ("{{ " + "(" * 200_000 + ")" * 200_000 + " }}", "refuses this conversation"),
    "long": (" " * 2_000_000, "at most 1,048,576 characters, not 2,000,000"),
    "no text": (7, "refuses this conversation"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "refusal": ("{{ raise_exception('no' * 5000) }}", "conversation: nono"),
    "attributes": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
}


@pytest.mark.parametrize("prompt", [False, True])
def test_as_transformers_does(prompt):
    """Other text, other ids, or a mask that is off by a token."""
    tokenizer = chatty()
    theirs = tokenizer.apply_chat_template(
        TALK, add_generation_prompt=prompt, return_assistant_tokens_mask=True, tokenize=True, return_dict=True
    )
    ids, mask = apply_chat_template(tokenizer, TALK, add_generation_prompt=prompt, assistant_mask=True)
    assert (ids, mask) == (theirs["input_ids"], [each == 1 for each in theirs["assistant_masks"]])
    assert any(mask)
    assert apply_chat_template(tokenizer, TALK, add_generation_prompt=prompt) == (ids, [])


def test_tools():
    tokenizer = chatty()
    tokenizer.chat_template = "{{ tools | tojson }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    ids, _ = apply_chat_template(tokenizer, TALK, tools=tools)
    assert '"name": "f"' in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["add_generation_prompt", "tools", "messages", "eos_token", "self"])
def test_variables_that_would_have_no_effect(name):
    with pytest.raises(ConfigError, match=f"its variables cannot include {name}$"):
        apply_chat_template(chatty(), TALK, variables={"enable_thinking": True, name: 1})


@pytest.mark.more
@pytest.mark.parametrize(("template", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_template(template, says):
    """A hang, memory without a bound, or a traceback; and a process that serves nobody after it."""
    tokenizer = chatty()
    tokenizer.chat_template = template
    started = time.monotonic()
    with pytest.raises(ConfigError, match=says) as caught:
        apply_chat_template(tokenizer, TALK, seconds=0.5 if "0.5 s" in says else 30)
    assert time.monotonic() - started < 60
    assert len(str(caught.value)) < 800
    tokenizer.chat_template = MARKED
    assert apply_chat_template(tokenizer, TALK)[0]


def test_one_process_for_all():
    """A start, which takes a second, for each conversation."""
    tokenizer = chatty()
    apply_chat_template(tokenizer, TALK)
    process = chat_template._worker(os.getpid())._process
    for _ in range(20):
        apply_chat_template(tokenizer, TALK)
    assert chat_template._worker(os.getpid())._process is process


@pytest.mark.more
def test_interrupted(monkeypatch):
    """An answer that nobody waited for, taken for that of the next conversation."""
    tokenizer = chatty()
    whole = apply_chat_template(tokenizer, TALK)
    process = chat_template._worker(os.getpid())._process
    with monkeypatch.context() as patch:
        patch.setattr(process, "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            apply_chat_template(tokenizer, TALK[:1])
    assert process.poll() is not None
    assert apply_chat_template(tokenizer, TALK) == whole


class Interrupted:
    def readline(self):
        raise KeyboardInterrupt


HELLO = said(("system", "s"), ("user", "hi"), ("assistant", "yes"), ("user", "é"), ("assistant", "né"))


def read(record, **options):
    return RecordReader(chatty(), **options).document(record, "x.jsonl:3")


def counted(document):
    """The tokens that count, as text; eos as #."""
    return bytes(ord("#") if id == EOS else id for id in document.ids[document.mask]).decode()


def test_only_what_the_assistant_says_counts():
    """Catches a mask that is shifted, covers the user's turns or the role marks, or leaves out the end of the turn."""
    document = read({"messages": HELLO})
    text = bytes(ord("#") if id == EOS else id for id in document.ids).decode()
    assert text == "<s>s<u>hi<a>yes#<u>é<a>né#"
    assert counted(document) == "yes#né#"
    assert document.name == "x.jsonl:3"


def test_all_tokens():
    """Catches --all-tokens that still leaves something out, and a template without marks that is refused then."""
    for record in ({"messages": HELLO}, {"prompt": "a", "completion": "b"}, {"prompt": [1], "tokens": [2]}):
        assert read(record, all_tokens=True).mask is None
    reader = RecordReader(chatty(marked=False), all_tokens=True)
    assert reader.document({"messages": HELLO}, "x").ids.tolist() == read({"messages": HELLO}).ids.tolist()


def test_prompt_and_completion():
    """The completion counts, and the eos that ends it; the prompt does not. A text has neither and counts whole."""
    document = read({"prompt": "2+2=", "completion": "4"})
    assert document.ids.tolist() == [*b"2+2=4", EOS]
    assert document.mask.tolist() == [False] * 4 + [True, True]
    document = read({"text": "a<|endoftext|>", "meta": 3})
    assert (document.ids.tolist(), document.mask) == ([*b"a<|endoftext|>"], None)


def test_stored_answers():
    """An answer cut at its length does not say eos, so the eos behind it does not count; one that said it does."""
    cut = read({"prompt": [1, 2], "tokens": [3, 4], "finish": "length", "text": "never read"}).with_eos(EOS)
    assert (cut.ids.tolist(), cut.mask.tolist()) == ([1, 2, 3, 4, EOS], [False, False, True, True, False])
    ended = read({"prompt": [1, 2], "tokens": [3, EOS]}).with_eos(EOS)
    assert (ended.ids.tolist(), ended.mask.tolist()) == ([1, 2, 3, EOS], [False, False, True, True])


def test_conversations_come_first():
    """Data sets that hold both the conversation and its text: the conversation says what counts."""
    assert read({"text": "x", "prompt": "p", "messages": HELLO}).mask is not None
    assert read({"text": "x", "prompt": "p", "messages": None}).ids.tolist() == [*b"x"]


@loop(
    ("record", "words"),
    [
        ({"body": "x", "id": 3}, r"x:3: its columns are body, id; expected \"text\", \"messages\""),
        ({}, "its columns are none"),
        ({"text": None}, r"its columns are text \(null\)"),
        ({"text": ["a"]}, r"\"text\" is \['a'\]; expected text"),
        ({"prompt": "a", "tokens": [1]}, r"\"prompt\" is 'a'; expected token ids"),
        ({"prompt": [1], "tokens": [True]}, r"\"tokens\" is \[True\]"),
        ({"prompt": [-1], "tokens": [1]}, r"\"prompt\" is \[-1\]"),
        ({"messages": "hi"}, r"\"messages\" is 'hi'; expected \["),
        ({"messages": [{"content": "x"}]}, "expected"),
        ({"messages": said(("tool", "x"))}, r"refuses this conversation: no role tool \(its roles: tool\)"),
        ({"messages": []}, "refuses this conversation"),
        ({"messages": HELLO, "tools": "[{"}, r"\"tools\" is '\[\{'; expected a list of tools, or the JSON of one"),
        ({"messages": HELLO, "tools": {"name": "f"}}, r"\"tools\" is \{"),
    ],
)
def test_what_is_refused(record, words):
    """Catches a traceback, a line that nobody can find, and a record that is trained on as something else."""
    with pytest.raises(ConfigError, match=words):
        RecordReader(chatty()).document(record, "x:3")


@loop("as_text", [False, True])
def test_tools_and_calls(as_text):
    """Tables hold tools and arguments as JSON: without the tools, or refused, a model learns calls of tools unseen."""
    call, tools = {"function": {"name": "f", "arguments": {"n": 7}}}, [{"function": {"name": "f"}}]
    if as_text:
        call["function"]["arguments"], tools = json.dumps(call["function"]["arguments"]), json.dumps(tools)
    messages = [*HELLO[:2], {"role": "assistant", "content": "", "tool_calls": [call]}]
    reader = RecordReader(reasoner(), all_tokens=True)
    assert bytes(reader.document({"messages": messages, "tools": tools}, "x").ids.tolist()) == b"<s>s<u>hi<a>[f=7]1"
    assert bytes(reader.document({"messages": messages, "tools": ""}, "x").ids.tolist()) == b"<s>s<u>hi<a>[f=7]"


def test_arguments_that_a_template_wants_as_text():
    tokenizer = chatty()
    tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments + '!' }}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"n": 7}'}}
    record = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert bytes(RecordReader(tokenizer, all_tokens=True).document(record, "x").ids.tolist()) == b'{"n": 7}!'


def test_templates_that_do_not_say_what_counts():
    """One that marks nothing, and none at all."""
    without = chatty()
    without.chat_template = None
    marks = r"^x:1: .*\{% generation %\}.*--all-tokens"
    for tokenizer, words in ((chatty(marked=False), marks), (without, "x:1: the tokenizer has no chat template")):
        with pytest.raises(ConfigError, match=words):
            RecordReader(tokenizer).document({"messages": HELLO}, "x:1")


def test_notes():
    """Catches long or unanswered conversations that pass without a word, and texts that are counted among them."""
    reader = RecordReader(chatty(), context=20)
    reader.document({"text": "long" * 20}, "x")
    assert reader.notes == ()
    for messages in (HELLO, said(("user", "hi")), said(("user", "a"), ("assistant", "b"))):
        reader.document({"messages": messages}, "x")
    long, unanswered = reader.notes
    assert long.startswith("1 of 3 conversations are longer than the model's context of 20 tokens")
    assert unanswered.startswith("1 of 3 conversations have no assistant turn")


def test_prompts():
    """Catches an answer that is left in the prompt, and a prompt that does not ask for one."""
    reader = RecordReader(chatty())
    assert bytes(reader.prompt({"messages": HELLO[:3]}, "x")) == b"<s>s<u>hi<a>"
    assert bytes(reader.prompt({"messages": HELLO[:2]}, "x")) == b"<s>s<u>hi<a>"
    assert bytes(reader.prompt({"prompt": "hi", "completion": "no"}, "x")) == b"hi"
    assert bytes(reader.prompt({"text": "hi"}, "x", chat=True)) == b"<u>hi<a>"
    assert reader.prompt({"prompt": [3, 4], "tokens": [5]}, "x") == [3, 4]
    for record, words in (({"a": 1}, "its columns are a"), ({"prompt": {}}, "expected token ids")):
        with pytest.raises(ConfigError, match=words):
            reader.prompt(record, "x")


def test_masks_are_as_long_as_ids():
    for record in ({"messages": HELLO}, {"prompt": "a", "completion": ""}):
        document = read(record).with_eos(EOS)
        assert document.mask.dtype == np.bool_
        assert len(document.mask) == len(document.ids)
