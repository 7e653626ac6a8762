"""How models write tool calls: the syntaxes of chat templates, and what recognizes a call at its beginning.

`tool_syntax` recognizes a template's syntax by the template's text; `ToolSyntax.scan` reads calls from text that begins
with one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nextn.bounded_json import JsonDict, JsonObject
from nextn.errors import ConfigError
from nextn.serve.call_text import TextCursor, Tool

Scan = Callable[[TextCursor, Mapping[str, Tool], bool], None]
Message = JsonDict
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


@dataclass(frozen=True)
class ToolSyntax:
    """How a family of models writes calls."""

    name: str
    template_markers: tuple[str, ...]  # the chat template has all of them
    begins: tuple[str, ...]  # a call begins with one of them
    closers: tuple[str, ...]  # a call ends with one of them
    scan: Scan  # moves a cursor at a begin past one or more calls
    only_first: bool = False  # a call may only begin the message or follow another call


def tool_syntax(chat_template: str | None, name: str | None = None) -> ToolSyntax | None:
    """Find the syntax of a chat template, or the one of this name; None if the template has the markers of none.

    Raises ConfigError if the name is none of `SYNTAXES`.
    """
    if name is not None:
        if name not in SYNTAXES:
            raise ConfigError(f"tool-call parser {name!r}; expected one of {', '.join(SYNTAXES)}")
        return SYNTAXES[name]
    template = chat_template or ""
    matches = (syntax for syntax in SYNTAXES.values() if all(each in template for each in syntax.template_markers))
    return next(matches, None)


def _scan_hermes(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> None:
    cursor.expect("<tool_call>")
    cursor.json_call("arguments")
    cursor.skip_space()
    cursor.expect("</tool_call>")


def _scan_qwen_xml(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> None:
    cursor.expect("<tool_call>")
    cursor.skip_space()
    cursor.expect("<function=")
    name = cursor.name_before(">")
    arguments: dict[str, object] = {}
    with cursor.call_with(name, arguments):
        cursor.skip_space()
        while cursor.has("<parameter="):
            key = cursor.name_before(">")
            cursor.bare_value("</parameter>", tools.get(name), key, arguments, frame="\n")
            cursor.skip_space()
        cursor.expect("</function>")
        cursor.skip_space()
        cursor.expect("</tool_call>")


def _scan_glm_xml(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> None:
    cursor.expect("<tool_call>")
    name = cursor.name()
    arguments: dict[str, object] = {}
    with cursor.call_with(name, arguments):
        cursor.skip_space()
        while cursor.has("<arg_key>"):
            key = cursor.name_before("</arg_key>")
            cursor.skip_space()
            cursor.expect("<arg_value>")
            cursor.bare_value("</arg_value>", tools.get(name), key, arguments)
            cursor.skip_space()
        cursor.expect("</tool_call>")


def _scan_deepseek(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> None:
    """V3 and R1 write a type, the name and a fenced block; V3.1 the name and JSON."""
    if has_calls and cursor.has("<｜tool▁calls▁end｜>"):
        return
    if cursor.has("<｜tool▁calls▁begin｜>"):
        cursor.skip_space()
    cursor.expect("<｜tool▁call▁begin｜>")
    name = cursor.name_before("<｜tool▁sep｜>")
    cursor.skip_space()
    if cursor.has("{"):
        cursor.at -= 1
        cursor.json_arguments(name)
    else:
        name = cursor.name_before("\n")
        cursor.skip_space()
        cursor.expect("```json")
        cursor.json_arguments(name)
        cursor.skip_space()
        cursor.expect("```")
    cursor.skip_space()
    cursor.expect("<｜tool▁call▁end｜>")


def _scan_mistral(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> None:
    """Tokenizers before v11 have one list of calls; later ones a name and arguments per call."""
    cursor.expect("[TOOL_CALLS]")
    cursor.skip_space()
    if not cursor.has("["):
        name = cursor.name()
        if cursor.has("[CALL_ID]"):
            cursor.name()
        cursor.expect("[ARGS]")
        cursor.json_arguments(name)
        return
    cursor.json_call("arguments")
    cursor.skip_space()
    while cursor.has(","):
        cursor.json_call("arguments")
        cursor.skip_space()
    cursor.expect("]")


def _scan_llama(cursor: TextCursor, tools: Mapping[str, Tool], has_calls: bool) -> None:
    """Read a call without marks around it: only JSON with the name of a tool is one."""
    if has_calls:
        cursor.has(";")
    cursor.skip_space()
    cursor.has("<|python_tag|>")
    cursor.json_call("parameters", "arguments", names=tools)


# In the order in which a template is tried: more specific markers first.
SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        ToolSyntax("qwen_xml", ("<tool_call>", "<function="), ("<tool_call>",), ("</tool_call>",), _scan_qwen_xml),
        ToolSyntax("glm_xml", ("<tool_call>", "<arg_key>"), ("<tool_call>",), ("</tool_call>",), _scan_glm_xml),
        ToolSyntax("hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",), _scan_hermes),
        ToolSyntax(
            "deepseek", ("<｜tool▁call▁begin｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
            ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), _scan_deepseek,
        ),
        ToolSyntax("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), ("}", "]"), _scan_mistral),
        ToolSyntax(
            "llama3_json", ("<|start_header_id|>", '"parameters"'), ("<|python_tag|>", "{", ";"), ("}",), _scan_llama,
            only_first=True,
        ),
    )
}  # fmt: skip


def with_tools(messages: Sequence[Message], tools: Sequence[JsonObject], *, has_system: bool = True) -> list[Message]:
    """Return a conversation of plain texts that says the same, with the tools (in OpenAI's form) in the system message.

    Without `has_system`, they are described in the user's first message.
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


def _described(messages: list[Message], tools: Sequence[JsonObject], role: str) -> list[Message]:
    """Add the description to the first message of a role, or as a first message."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _DESCRIPTION.format(tools=lines)
    at = next((at for at, message in enumerate(messages) if message["role"] == role), None)
    if at is None or (role == "system" and at):
        return [{"role": role, "content": text}, *messages]
    first = messages[at]
    parts = (first["content"], text) if role == "system" else (text, first["content"])
    return [*messages[:at], first | {"content": "\n\n".join(part for part in parts if part)}, *messages[at + 1 :]]
