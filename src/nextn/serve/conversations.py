"""Conversations as chat templates expect them: one system message at the start, results in the order of the calls."""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile

from nextn.bounded_json import JsonDict
from nextn.serve.responses import Json

_SYSTEM = ("system", "developer")


def in_call_order(messages: Sequence[JsonDict]) -> list[JsonDict]:
    """Put a turn's results in the order of its calls: clients send them as they arrive, and few templates show ids."""
    ordered: list[JsonDict] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        part = list(group)
        if is_result and ordered:
            calls = [call["id"] for call in ordered[-1].get("tool_calls", ())]
            places = dict(zip(reversed(calls), range(len(calls) - 1, -1, -1), strict=True))  # of the first with an id
            part.sort(key=lambda message: places.get(message.get("tool_call_id"), len(calls)))
        ordered += part
    return ordered


def merge_leading(messages: Sequence[Json]) -> list[Json]:
    """Make one of the system messages at the start; empty ones are left out, later ones as well."""
    messages = [message for message in messages if message["role"] not in _SYSTEM or message["content"]]
    leading = list(takewhile(lambda message: message["role"] in _SYSTEM, messages))
    system: Json = {"role": "system", "content": _joined(leading)}
    return [*([system] if system["content"] else []), *messages[len(leading) :]]


def has_later(messages: Sequence[Json]) -> bool:
    """Whether there are several system messages, or one behind the start."""
    return any(message["role"] in _SYSTEM for message in messages[1:])


def without_later(messages: Sequence[Json]) -> list[Json]:
    """Make one of the system messages at the start; later ones become texts of the user, with those beside them."""
    return list(_as_users(merge_leading(messages)))


def _as_users(messages: Sequence[Json]) -> Iterator[Json]:
    turn: list[Json] = []  # of the user
    for number, message in enumerate(messages):
        if message["role"] == "user" or (number and message["role"] in _SYSTEM):
            turn.append(message)
            continue
        yield from _one_turn(turn)
        turn = []
        yield message
    yield from _one_turn(turn)


def _one_turn(turn: Sequence[Json]) -> Sequence[Json]:
    """The messages as they are, or one of the user if there are the system's among them."""
    is_mixed = any(message["role"] in _SYSTEM for message in turn)
    return [{"role": "user", "content": _joined(turn)}] if is_mixed else turn


def _joined(messages: Sequence[Json]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages if message["content"])
