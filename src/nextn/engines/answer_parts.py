"""Parts of streamed answers, whose later counts include the earlier ones."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def answer_id(document: object) -> str | None:
    """Return the id of the answer that a document is a part of."""
    if not isinstance(document, Mapping):
        return None
    info = document.get("meta_info")  # SGLang's
    name = info.get("id") if isinstance(info, Mapping) else document.get("id")
    return name if isinstance(name, str) and name else None


def last_parts(found: Iterable[tuple[Hashable, Sequence[Item]]]) -> list[Item]:
    """Return what was found in documents, each beside its answer: of several parts of one, what the last has."""
    last: dict[Hashable, Sequence[Item]] = {}
    for place, (answer, items) in enumerate(found):
        if items:
            last[place if answer is None else answer] = items
    return [item for items in last.values() for item in items]
