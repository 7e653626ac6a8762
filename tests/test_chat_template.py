"""chat_template: transformers' own rendering and masks, and templates that never end, fill the memory or are none."""

import os
import time

import pytest
from chats import MARKED, chatty

from nextn.data import chat_template
from nextn.data.chat_template import apply_chat_template
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
