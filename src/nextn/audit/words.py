"""The words that findings share: names of engines, the commands that mend."""

import shlex
from collections.abc import Iterable, Sequence

from nextn.checkpoints.inventory import Inventory
from nextn.words import joined

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "transformers": "transformers"}
ROLES = {"embedding": "embedding", "output": "output head"}


def engines(names: Iterable[str]) -> str:
    """Engines as their makers write them."""
    return joined(ENGINES[name] for name in names)


def verb(names: Sequence[str], stem: str) -> str:
    """`vLLM reads`, `vLLM and SGLang read`."""
    return f"{engines(names)} {stem}{'s' if len(names) == 1 else ''}"


def restore(inventory: Inventory, *, whole: bool = False) -> str:
    """The command that puts the head of a base checkpoint into this one; whole: in place of one with all parts."""
    return f"nextn restore {_path(inventory)} --from BASE{' --force' if whole else ''}"


def aliases(inventory: Inventory, engine: str) -> str:
    """The command that writes the trunk's embedding and output head into the modules, where `engine` wants them."""
    return f"nextn restore {_path(inventory)} --add-aliases {engine}"


def convert(inventory: Inventory, option: str) -> str:
    return f"nextn convert {_path(inventory)} OUT {option}"


def _path(inventory: Inventory) -> str:
    return shlex.quote(inventory.checkpoint.path)
