"""What messages share: lists cut short, counts with their noun."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

_LONGEST = 100  # characters of one name: those of a stranger's file have no bound


def some(names: Collection[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = [name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in islice(names, most)]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def counted(number: int, noun: str) -> str:
    many = "matrices" if noun == "matrix" else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def joined(words: Iterable[str]) -> str:
    """`a, b and c`; "" for none."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def changes(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Which values differ, and how; empty if none does."""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key} = {then.get(key)} (now {now.get(key)})" for key in keys)
