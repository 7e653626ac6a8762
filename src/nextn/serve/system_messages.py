"""Conversations for chat templates that know one system message, at the start."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from nextn.serve.responses import Json

_SYSTEM = ("system", "developer")


def merge_leading(messages: Sequence[Json]) -> list[Json]:
    """Make one of the system messages at the start; empty ones are left out."""
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
