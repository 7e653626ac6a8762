"""The words that findings share: names of engines, the commands that mend."""

import shlex
from collections.abc import Iterable, Sequence

from nextn.inventory import Inventory
from nextn.words import joined

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "transformers": "transformers"}
ROLES = {"embedding": "embedding", "output": "output head"}


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
