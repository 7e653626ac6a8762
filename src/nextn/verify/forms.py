"""What a client relies on around the text: limits, stop strings, JSON that fits its schema, tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from nextn.engines.answers import Answer, Ask
from nextn.engines.documents import loads, shown
from nextn.engines.endpoint import Endpoint, is_refusal
from nextn.errors import EngineError
from nextn.verify.check import Check, Session
from nextn.words import counted

FaultOf = Callable[[Answer], str | None]  # None: cut off, so nothing can be said. "": valid. Else what is wrong
_LIMITS = (1, 2, 3, 5, 8)
_ROOM = 200  # tokens for a small JSON object
_ROUNDS = "a round gives several tokens: limits, stops and grammars must be looked at behind each of them"

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "colour", "member"],
    "additionalProperties": False,
}
_PERSON = "Describe one person as JSON with name, age, colour (red, green or blue) and member (true or false)."
_WEATHER: dict[str, object] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_TOOL = {"name": "weather", "description": "The weather in a city today.", "parameters": _WEATHER}
_TYPES: dict[object, type] = {"string": str, "integer": int, "boolean": bool, "object": dict}


def max_tokens(session: Session) -> Check:
    """Never more tokens than asked for, all of them unless the text ended, and finish_reason says which."""
    wrong, asked = [], 0
    for prompt in session.prompts[:2]:
        for limit in _LIMITS:
            answer = session.target.answer(replace(session.ask(prompt), max_tokens=limit))
            asked += 1
            wrong += [f"max_tokens {limit}: {fault}" for fault in _limit_faults(answer, limit)]
    if wrong:
        return Check("max-tokens", "failed", "; ".join(wrong[:4]), _ROUNDS)
    return Check("max-tokens", "passed", f"{counted(asked, 'limit')} kept, of {_LIMITS[0]} to {_LIMITS[-1]} tokens")


def _limit_faults(answer: Answer, limit: int) -> list[str]:
    num = answer.completion_tokens if answer.completion_tokens is not None else len(answer.tokens) or None
    faults = []
    if num is not None and num > limit:
        faults.append(f"{num} tokens came")
    if answer.finish not in ("length", "stop"):
        faults.append(f"finish_reason {answer.finish!r}; expected length or stop")
    if num is not None and num < limit and answer.finish == "length":
        faults.append(f"only {num} tokens came, though finish_reason is length")
    return faults


def stop_strings(session: Session) -> Check:
    """A stop string out of the middle of a known text: the text ends right before it, and finish_reason is stop."""
    wrong, unsure, tried = [], 0, 0
    for prompt, whole in zip(session.prompts, session.greedy(session.target), strict=True):
        stop, end = _stop(whole.text)
        if not stop or tried == 4:
            continue
        tried += 1
        answer = session.target.answer(replace(session.ask(prompt), stop=(stop,)))
        fault = _stop_fault(answer, stop, whole.text[:end])
        unsure += fault == ""
        wrong += [f"stop {stop!r}: {fault}"] if fault else []
    if wrong:
        return Check("stop-strings", "failed", "; ".join(wrong[:4]), _ROUNDS)
    if tried == unsure:
        return Check("stop-strings", "unclear", "no greedy text could be had twice, or all are too short", "")
    return Check("stop-strings", "passed", f"{counted(tried - unsure, 'text')} ended right before the stop string")


def _stop(text: str) -> tuple[str, int]:
    """Four characters, so that several tokens make it, and their first place in the text."""
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    return (stop, text.find(stop)) if len(text) >= 12 and stop.strip() else ("", 0)


def _stop_fault(answer: Answer, stop: str, expected: str) -> str | None:
    """None: right. "": cannot be told, as another text came. Else what is wrong."""
    if stop in answer.text:
        return f"the text contains it, {answer.text[-30:]!r}"
    if answer.text == expected:
        return None if answer.finish == "stop" else f"finish_reason {answer.finish!r}; expected stop"
    if expected.startswith(answer.text) and answer.finish == "stop":
        return f"the text ends {len(expected) - len(answer.text)} characters too early"
    if answer.text.startswith(expected):
        return f"the text goes on behind the place: {answer.text[len(expected) :][:30]!r}"
    return ""


def json_schema(session: Session) -> Check:
    """JSON that was asked to fit a schema parses and fits."""
    ask = Ask(_PERSON, _ROOM, schema=SCHEMA)
    asks = [replace(ask, temperature=t, seed=session.settings.seed + n) for n, t in enumerate((0.0, 1.0, 1.0, 1.0))]
    return _forms(session, "json-schema", asks, _schema_fault)


def tool_calls(session: Session) -> Check:
    """A tool that must be called is called, with arguments that fit its parameters."""
    ask = Ask("What is the weather in Lisbon, in celsius?", _ROOM, choice="weather",
              tools=({"type": "function", "function": _TOOL},))  # fmt: skip
    asks = [replace(ask, temperature=t, seed=session.settings.seed + n) for n, t in enumerate((0.0, 1.0, 1.0))]
    return _forms(session, "tool-calls", asks, _call_fault)


def _forms(session: Session, name: str, asks: list[Ask], fault_of: FaultOf) -> Check:
    try:
        faults = _faults(session.target, asks, fault_of)
    except EngineError as error:
        if not is_refusal(error):
            raise
        return Check(name, "unclear", f"not supported: {error}", "")
    told = [fault for fault in faults if fault is not None]
    cut, wrong = faults.count(None), [fault for fault in told if fault]
    evidence = f"{len(told) - len(wrong)} of {len(told)} valid" + (f", {cut} cut off by max_tokens" if cut else "")
    if not told:
        return Check(name, "unclear", f"all {cut} answers were cut off at {_ROOM} tokens")
    if not wrong:
        return Check(name, "passed", evidence)
    evidence += f": {'; '.join(dict.fromkeys(wrong[:3]))}"
    if len(wrong) == len(told) and all(fault == _IGNORED for fault in wrong):
        return Check(name, "unclear", f"{evidence}: the engine ignores the request", "")
    reference = _reference(session, asks, fault_of)
    advice = f"{reference}; grammar state must be put back with the drafts that are dropped" if reference else _ROUNDS
    return Check(name, "failed", evidence, advice)


def _reference(session: Session, asks: list[Ask], fault_of: FaultOf) -> str:
    if session.against is None:
        return ""
    try:
        wrong = [fault for fault in _faults(session.against, asks, fault_of) if fault]
    except EngineError:
        return ""
    return "it is broken without MTP, too" if wrong else "without MTP it is valid"


def _faults(endpoint: Endpoint, asks: list[Ask], fault_of: FaultOf) -> list[str | None]:
    """By chat, or by completions where a model has no chat template and the ask needs none."""
    try:
        return [fault_of(endpoint.answer(ask, chat=True)) for ask in asks]
    except EngineError as error:
        if asks[0].tools or not is_refusal(error):
            raise
    return [fault_of(endpoint.answer(ask, chat=False)) for ask in asks]


_IGNORED = "plain text came"


def _schema_fault(answer: Answer) -> str | None:
    if answer.finish == "length":
        return None
    if not answer.text.lstrip().startswith(("{", "[", '"')):
        return _IGNORED
    return _json_fault(answer.text, SCHEMA)


def _call_fault(answer: Answer) -> str | None:
    if answer.finish == "length":
        return None
    if not answer.calls:
        return _IGNORED
    call = answer.calls[0]
    return f"called {shown(call.name)}" if call.name != "weather" else _json_fault(call.arguments, _WEATHER)


def _json_fault(text: str, schema: Mapping[str, object]) -> str:
    try:
        found = loads(text)
    except ValueError:
        return f"not JSON: {text[:60]!r}"
    return misfit(found, schema)


def misfit(found: object, schema: Mapping) -> str:
    """Why a value does not fit a schema of types, enum, maxLength, properties and required; "" if it fits."""
    kind = _TYPES[schema["type"]]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        return f"{shown(found)} is no {schema['type']}"
    if "enum" in schema and found not in schema["enum"]:
        return f"{shown(found)} is not one of {schema['enum']}"
    if isinstance(found, str) and len(found) > schema.get("maxLength", len(found)):
        return f"{found[:40]!r} is too long"
    if not isinstance(found, dict):
        return ""
    keys, allowed = set(found), set(schema["properties"])
    if keys - allowed or set(schema["required"]) - keys:
        return f"has the keys {shown(sorted(keys))}; expected {sorted(allowed)}"
    return next((fault for key in found if (fault := misfit(found[key], schema["properties"][key]))), "")
