"""The words that findings share: names of engines, lists cut short, counts with their noun, the commands that mend."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from nextn.inventory import Inventory

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "transformers": "transformers"}
ROLES = {"embedding": "embedding", "output": "output head"}
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


def engines(names: Iterable[str]) -> str:
    """Engines as their makers write them."""
    return joined(ENGINES[name] for name in names)


def verb(names: Sequence[str], stem: str) -> str:
    """`vLLM reads`, `vLLM and SGLang read`."""
    return f"{engines(names)} {stem}{'s' if len(names) == 1 else ''}"


def restore(inventory: Inventory, *options: str) -> str:
    """The command that puts the head of a base checkpoint into this one."""
    return " ".join(["nextn restore", shlex.quote(inventory.checkpoint.path), "--from BASE", *options])


def aliases(inventory: Inventory, engine: str) -> str:
    """The command that writes the trunk's embedding and output head into the modules, where `engine` wants them."""
    return f"nextn restore {shlex.quote(inventory.checkpoint.path)} --add-aliases {engine}"


def convert(inventory: Inventory) -> str:
    """The command that writes the head in the layout of the config's family."""
    return f"nextn convert {shlex.quote(inventory.checkpoint.path)} OUT --to {inventory.family.name}"
