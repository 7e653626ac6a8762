"""Checks of what clients rely on beside the text: token limits, stop strings, JSON schemas, tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from nextn.bounded_json import JsonObject, loads, short_repr
from nextn.engines.answers import EngineAnswer, EngineRequest
from nextn.engines.check_result import CheckResult
from nextn.engines.endpoint import Endpoint, is_refusal
from nextn.errors import EngineError
from nextn.text_format import counted
from nextn.verify_checks.session import VerifySession

FaultOf = Callable[[EngineAnswer], str | None]  # None: truncated, so inconclusive; "": valid; else what is wrong
_LIMITS = (1, 2, 3, 5, 8)
_JSON_TOKENS = 200  # enough for a small JSON object
_MORE_JSON_TOKENS = 1000  # if none was complete: byte-level tokenizers, and models that write much whitespace
_ROUNDS = "a round emits several tokens: apply limits, stop strings and grammars after each of them"

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "color": {"type": "string", "enum": ["red", "green", "blue"]},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "color", "member"],
    "additionalProperties": False,
}
_PERSON = "Describe one person as JSON with name, age, color (red, green or blue) and member (true or false)."
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


def max_tokens(session: VerifySession) -> CheckResult:
    """Check that max_tokens is a limit, is reached unless the text ends, and agrees with finish_reason."""
    wrong, num_counted = [], 0
    for prompt in session.prompts[:2]:
        for limit in _LIMITS:
            answer = session.target.answer(replace(session.greedy_request(prompt), max_tokens=limit))
            num = answer.completion_tokens if answer.completion_tokens is not None else len(answer.tokens) or None
            num_counted += num is not None
            wrong += [f"max_tokens {limit}: {fault}" for fault in _limit_faults(answer, num, limit)]
    if wrong:
        return CheckResult("max-tokens", "failed", "; ".join(wrong[:4]), _ROUNDS)
    if not num_counted:
        return CheckResult("max-tokens", "inconclusive", "no answer says how many tokens it has (usage)")
    evidence = f"{counted(num_counted, 'limit')} respected, of {_LIMITS[0]} to {_LIMITS[-1]} tokens"
    return CheckResult("max-tokens", "passed", evidence)


def _limit_faults(answer: EngineAnswer, num: int | None, limit: int) -> list[str]:
    faults = []
    if num is not None and num > limit:
        faults.append(f"{num} tokens returned")
    if answer.finish_reason not in ("length", "stop"):
        faults.append(f"finish_reason {answer.finish_reason!r}; expected length or stop")
    if num is not None and num < limit and answer.finish_reason == "length":
        faults.append(f"only {num} tokens returned, though finish_reason is length")
    return faults


def stop_strings(session: VerifySession) -> CheckResult:
    """Check with a stop string out of a known text that the text ends right before it, with finish_reason stop."""
    wrong, inconclusive, tried = [], 0, 0
    for prompt, complete in zip(session.prompts, session.greedy(session.target), strict=True):
        stop, end = _stop(complete.text)
        if not stop or tried == 4:
            continue
        tried += 1
        answer = session.target.answer(replace(session.greedy_request(prompt), stop=(stop,)))
        fault = _stop_fault(answer, stop, complete.text[:end])
        inconclusive += fault == ""
        wrong += [f"stop {stop!r}: {fault}"] if fault else []
    if wrong:
        return CheckResult("stop-strings", "failed", "; ".join(wrong[:4]), _ROUNDS)
    if tried == inconclusive:
        evidence = "no greedy text could be reproduced, or all are too short"
        return CheckResult("stop-strings", "inconclusive", evidence)
    evidence = f"{counted(tried - inconclusive, 'text')} ended right before the stop string"
    return CheckResult("stop-strings", "passed", evidence)


def _stop(text: str) -> tuple[str, int]:
    """Four characters, so that they span several tokens, and their first index in the text."""
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    return (stop, text.find(stop)) if len(text) >= 12 and stop.strip() else ("", 0)


def _stop_fault(answer: EngineAnswer, stop: str, expected: str) -> str | None:
    """None: correct; "": inconclusive, as another text was returned; else what is wrong."""
    if stop in answer.text:
        return f"the text contains it, {answer.text[-30:]!r}"
    if answer.text == expected:
        return None if answer.finish_reason == "stop" else f"finish_reason {answer.finish_reason!r}; expected stop"
    if expected.startswith(answer.text) and answer.finish_reason == "stop":
        return f"the text ends {len(expected) - len(answer.text)} characters too early"
    if answer.text.startswith(expected):
        return f"the text continues after it: {answer.text[len(expected) :][:30]!r}"
    return ""


def json_schema(session: VerifySession) -> CheckResult:
    """Check that JSON requested with a schema parses and fits the schema."""
    request = EngineRequest(_PERSON, _JSON_TOKENS, schema=SCHEMA)
    return _constrained(session, "json-schema", _seeded(session, request, 3), _schema_fault)


def tool_calls(session: VerifySession) -> CheckResult:
    """Check that a required tool is called, with arguments that fit its parameters."""
    tools = ({"type": "function", "function": _TOOL},)
    question = "What is the weather in Lisbon, in celsius?"
    request = EngineRequest(question, _JSON_TOKENS, tools=tools, tool_choice="weather")
    return _constrained(session, "tool-calls", _seeded(session, request, 2), _call_fault)


def _seeded(session: VerifySession, request: EngineRequest, num_sampled: int) -> list[EngineRequest]:
    """Return the request at temperature 0, and so many at 1."""
    temperatures = enumerate((0.0, *[1.0] * num_sampled), session.settings.seed)
    return [replace(request, temperature=temperature, seed=seed) for seed, temperature in temperatures]


def _constrained(session: VerifySession, name: str, requests: list[EngineRequest], fault_of: FaultOf) -> CheckResult:
    try:
        faults = _faults(session.target, requests, fault_of)
        if all(fault is None for fault in faults):
            limit = min(_MORE_JSON_TOKENS, (session.target.served.context or 4096) // 2)  # prompts are short
            requests = [replace(request, max_tokens=limit) for request in requests]
            faults = _faults(session.target, requests, fault_of)
    except EngineError as error:
        if not is_refusal(error):
            raise
        return CheckResult(name, "inconclusive", f"not supported: {error}", "")
    complete = [fault for fault in faults if fault is not None]
    num_truncated, wrong = faults.count(None), [fault for fault in complete if fault]
    evidence = f"{len(complete) - len(wrong)} of {len(complete)} valid"
    evidence += f", {num_truncated} truncated by max_tokens" if num_truncated else ""
    if not complete:
        limit = requests[0].max_tokens
        return CheckResult(name, "inconclusive", f"all {num_truncated} answers were truncated at {limit} tokens")
    if not wrong:
        return CheckResult(name, "passed", evidence)
    evidence += f": {'; '.join(dict.fromkeys(wrong[:3]))}"
    if len(wrong) == len(complete) and all(fault == _IGNORED for fault in wrong):
        return CheckResult(name, "inconclusive", f"{evidence}: the engine ignores the request", "")
    return CheckResult(name, "failed", evidence, f"{_ROUNDS}, and roll the grammar's state back with rejected drafts")


def _faults(endpoint: Endpoint, requests: list[EngineRequest], fault_of: FaultOf) -> list[str | None]:
    """Use chat, or completions where a model has no chat template and the request needs none."""
    try:
        return [fault_of(endpoint.answer(request, chat=True)) for request in requests]
    except EngineError as error:
        if requests[0].tools or not is_refusal(error):
            raise
    return [fault_of(endpoint.answer(request, chat=False)) for request in requests]


_IGNORED = "plain text was returned"


def _schema_fault(answer: EngineAnswer) -> str | None:
    if answer.finish_reason == "length":
        return None
    if not answer.text.lstrip().startswith(("{", "[", '"')):
        return _IGNORED
    return _json_fault(answer.text, SCHEMA)


def _call_fault(answer: EngineAnswer) -> str | None:
    if answer.finish_reason == "length":
        return None
    if not answer.tool_calls:
        return _IGNORED
    call = answer.tool_calls[0]
    return f"called {short_repr(call.name)}" if call.name != "weather" else _json_fault(call.arguments, _WEATHER)


def _json_fault(text: str, schema: Mapping[str, object]) -> str:
    try:
        value = loads(text)
    except ValueError:
        return f"not JSON: {text[:60]!r}"
    return misfit(value, schema)


def misfit(value: object, schema: JsonObject) -> str:
    """Return why a value does not fit a schema of types, enum, maxLength, properties and required; "" if it fits."""
    expected = _TYPES[schema["type"]]
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        return f"{short_repr(value)} is not of type {schema['type']}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{short_repr(value)} is not one of {schema['enum']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        return f"{value[:40]!r} is too long"
    if not isinstance(value, dict):
        return ""
    keys, allowed = set(value), set(schema["properties"])
    if keys - allowed or set(schema["required"]) - keys:
        return f"has the keys {short_repr(sorted(keys))}; expected {sorted(allowed)}"
    return next((fault for key in value if (fault := misfit(value[key], schema["properties"][key]))), "")
