"""How models write tool calls: the syntaxes of chat templates, and what recognizes a call at its beginning.

`tool_syntax` recognizes a template's syntax by the template's text; `ToolSyntax.scan` reads calls from text that begins
with one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nextn.errors import ConfigError
from nextn.serve.call_text import TextCursor, Tool

Scan = Callable[[TextCursor, Mapping[str, Tool], bool], None]


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
    """Find the syntax of a chat template.

    Args:
        chat_template: The template's text.
        name: Use this syntax instead, one of `SYNTAXES`.

    Returns:
        None if the template has the markers of none.

    Raises:
        ConfigError: There is no syntax of this name.
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
    """Without a mark around the call, only JSON with the name of a tool is one."""
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
