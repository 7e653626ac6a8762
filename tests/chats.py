"""A byte-level tokenizer that speaks: a chat template with and without marks around what the assistant says."""

from nextn.data.byte_tokenizer import byte_tokenizer

_TURNS = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<{{ m.role[0] }}>"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content }}{{ eos_token }}END{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = _TURNS.replace("BEGIN", "{% generation %}").replace("END", "{%- endgeneration -%}")
UNMARKED = _TURNS.replace("BEGIN", "").replace("END", "")
EOS = 257


def chatty(*, marked=True):
    """ids of a text are its bytes; `<u>question<a>answer`, then eos (257), which the assistant says."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = MARKED if marked else UNMARKED
    return tokenizer


def said(*turns):
    """("user", "hi"), ("assistant", "yes") -> messages."""
    return [{"role": role, "content": content} for role, content in turns]


def reasoner():
    """One whose template has marks of reasoning and of Hermes' tool calls, of which histories show everything."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role[0] }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }}={{ c.function.arguments.n }}]"
        "{% endfor %}{% endfor %}{# <tool_call> <think></think> #}"
        "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    return tokenizer


REASONED = '<think>Why?</think>I look. <tool_call>{"name": "count", "arguments": {"n": 1}}</tool_call>'
