"""Tools for chat templates that know none: a text that describes them, and calls and results as parts of messages.

The calls are written as Hermes models do, which `tool_calls` reads and `tool_grammar` enforces.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_DESCRIPTION = """\
You can call functions. Each line between <tools> and </tools> has one: its name and a JSON schema of its arguments.
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON in this form:
<tool_call>
{{"name": "the name", "arguments": {{"parameter": "value"}}}}
</tool_call>
Its result follows between <tool_response> and </tool_response>. If no function helps, answer without a call."""


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[Message]:
    """Return a conversation of plain texts that says the same.

    Args:
        messages: As chat templates read them.
        tools: The offered ones, in OpenAI's form; may be empty.
        has_system: Describe them in the system message; else in the user's first message.
    """
    shown: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if shown and shown[-1].get("is_result"):  # many templates want user and assistant to take turns
                shown[-1]["content"] += f"\n{text}"
            else:
                shown.append({"role": "user", "content": text, "is_result": True})
        else:
            shown.append(_with_calls(message))
    for message in shown:
        message.pop("is_result", None)
    return _described(shown, tools, "system" if has_system else "user") if tools else shown


def _with_calls(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return plain | {"content": "\n".join([*([plain["content"]] if plain["content"] or not texts else []), *texts])}


def _described(messages: list[Message], tools: Sequence[Mapping[str, Any]], role: str) -> list[Message]:
    """Add the description to the first message of a role, or as a first message."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _DESCRIPTION.format(tools=lines)
    at = next((at for at, message in enumerate(messages) if message["role"] == role), None)
    if at is None or (role == "system" and at):
        return [{"role": role, "content": text}, *messages]
    first = messages[at]
    parts = (first["content"], text) if role == "system" else (text, first["content"])
    return [*messages[:at], first | {"content": "\n\n".join(part for part in parts if part)}, *messages[at + 1 :]]
