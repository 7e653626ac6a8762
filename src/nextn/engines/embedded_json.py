"""JSON objects and dicts of Python inside other text: after a prompt, in a line of a log, or with an end cut off."""

import json
import re

from nextn.bounded_json import loads

_MAX_FAILED = 1024 * 1024  # characters in brackets that are no object
MAX_DOCUMENTS = 20_000
_TOKEN = re.compile(r"\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'|[{}\[\],]")
_PAIRS = {"{": "}", "[": "]"}
# Of Python: its strings, names, tuples, numpy's numbers, objects that show no value, numbers as keys, a last comma.
_PYTHON = re.compile(
    r"(?P<string>\"(?:[^\"\\\n]|\\.)*+\")|'(?P<text>(?:[^'\\\n]|\\.)*+)'|\b(?P<name>True|False|None|nan|inf)\b|"
    r"\bnp\.\w{1,20}\((?P<number>[^()\n]{1,40})\)|(?P<object><[^<>\n]{0,200}>)|(?P<tuple>[()])|"
    r"(?<=[{,])\s*(?P<key>[0-9]{1,9})(?=\s*:)|,(?=\s*[\]}])"
)
_NAMES = {"True": "true", "False": "false"}
_FIRST_KEY = re.compile(r"[\"'][\w/.:-]{1,100}[\"']\s?:\s")


def documents(text: str) -> tuple[list[object], bool]:
    """Return the objects in a text that is no JSON, and whether they are all: large texts are not read to the end.

    Of an object whose beginning or end is missing, what is there.
    """
    documents, place, num_failed, is_whole = list[object](), 0, 0, False
    for _ in range(MAX_DOCUMENTS):
        start = text.find("{", place)
        is_whole = start < 0
        if is_whole or num_failed > _MAX_FAILED:
            break
        found, end = _object_at(text, start)
        documents += [found] * (found is not None)
        num_failed += (end - start) * (found is None)
        place = start + 1 if found is None else end
    if place == 0 and (key := _FIRST_KEY.search(text)):
        found, _end_of_text = _object_at("{" + text[key.start() :], 0)
        documents += [found] * (found is not None)
    return documents, is_whole or text.find("{", place) < 0


def _object_at(text: str, start: int) -> tuple[object, int]:
    """The object that begins here, None for none, and where it ends."""
    end, cut = _end(text, start)
    parsed = map(_parsed, cut or [text[start:end]])
    return next((each for each in parsed if each is not None), None), end


def _end(text: str, start: int) -> tuple[int, list[str]]:
    """Where the object that begins here ends; without an end, the object closed there, or at its last comma."""
    closers, comma = [], (start, "")
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token in _PAIRS:
            closers.append(_PAIRS[token])
        elif token in "}]":
            if token != closers.pop():
                return match.end(), []
            if not closers:
                return match.end(), []
        elif token == "," and len(closers) < 100:
            comma = (match.start(), "".join(reversed(closers)))
    return len(text), [text[start:] + "".join(reversed(closers)), text[start : comma[0]] + comma[1]]


def _parsed(text: str) -> object:
    """An object of JSON or of Python; None for another text."""
    for form in (text, None):
        try:
            return loads(_PYTHON.sub(_as_json, text) if form is None else form)
        except ValueError:
            continue
    return None


def _as_json(match: re.Match[str]) -> str:
    kind, found = match.lastgroup, match[0]
    if kind == "text":
        return json.dumps(re.sub(r"\\(['\"\\])", r"\1", match["text"]))
    if kind == "key":
        return json.dumps(match["key"])
    if kind == "tuple":
        return "[" if found == "(" else "]"
    values = {"string": found, "name": _NAMES.get(found, "null"), "number": match["number"], "object": "null"}
    return values.get(kind or "", "") or ""
