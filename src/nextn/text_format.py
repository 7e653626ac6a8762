"""Words that messages share: lists, counts, names of documentation pages, how to install an extra."""

import math
import shlex
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from itertools import islice

_MAX_NAME = 100  # characters; names in untrusted files have no bound
_MARKER = "; extra == "  # as in "fastapi>=0.115; extra == 'serve'"; wheels have the extras of others written out


def docs_page(name: str) -> str:
    """Return the command that shows a documentation page."""
    return f"`nextn docs {name}`"


def some(names: Collection[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    shown = [name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..." for name in islice(names, most)]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    many = "matrices" if noun == "matrix" else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def rate_text(rate: float, *, digits: int = 2) -> str:
    """Return a rate or a ratio as text, "-" for one of nothing (nan), such as of a depth that was never drafted."""
    return "-" if math.isnan(rate) else f"{rate:.{digits}f}"


def joined(words: Iterable[str]) -> str:
    """Join words as `a, b and c`; "" for none."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def changes(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe the values that differ, `key = old (now new)`; "" if none does."""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key} = {then.get(key)} (now {now.get(key)})" for key in keys)


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra.

    It names the packages, not `nextn[extra]`: pip would look for a package of that name in its index, which need not be
    this one.
    """
    try:
        split = [each.partition(_MARKER) for each in requires("nextn") or []]
    except PackageNotFoundError:
        split = []
    packages = [package for package, _, marker in split if marker.strip("'\"") == extra]
    return "pip install " + (shlex.join(packages) if packages else f"'.[{extra}]' in the folder of nextn's sources")
