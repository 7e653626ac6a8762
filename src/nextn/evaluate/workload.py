"""Prompts to measure a model on, grouped by domain: the built-in ones or a user's file."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.data.corpus import read_text
from nextn.data.records import Record, prompt_column
from nextn.data.sources import read_records
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.model.model import Model

_BUILT_IN = Path(__file__).with_name("workload.jsonl")
_COLUMNS = '"prompt" (text or token ids), "text" or "messages"'
_FORMATS = f"a .txt file (prompts between blank lines), or .jsonl or .parquet records with {_COLUMNS}"


@dataclass(frozen=True)
class Prompt:
    """A prompt, as text or token ids, and the domain that its figures are reported under."""

    text: str | tuple[int, ...]
    domain: str

    def tokens(self, model: "Model", *, chat: bool = False) -> tuple[int, ...]:
        """Encode it for this model. Raises ConfigError for text if the checkpoint has no tokenizer."""
        from nextn.decoding.generate import encode  # here, so that reading prompts needs no torch

        if isinstance(self.text, str) and model.tokenizer is None:
            raise ConfigError(
                "the checkpoint has no tokenizer, so prompts that are text cannot be read; pass a .jsonl file with "
                'token ids ({"prompt": [3, 14, 15]} per line), or add tokenizer.json to its folder'
            )
        return tuple(encode(model, self.text, chat=chat))


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """Read the prompts of a .txt, .jsonl or .parquet file, or the built-in ones.

    Raises ConfigError with the invalid line.
    """
    path = path or _BUILT_IN
    if path.suffix == ".txt":
        prompts = [Prompt(part.strip("\n"), path.stem) for part in _paragraphs(read_text(path))]
    elif path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; expected {_FORMATS}")
        prompts = [_to_prompt(record, location) for location, record in read_records(path)]
    else:
        raise ConfigError(f"{path}: prompts come from {_FORMATS}")
    if not prompts:
        raise ConfigError(f"{path}: holds no prompt; expected {_FORMATS}")
    return prompts


def _paragraphs(text: str) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return ["\n".join(lines) for lines in parts if lines]


def _to_prompt(record: Record, location: str) -> Prompt:
    messages = record.get("messages")
    prompt = prompt_column(record) if messages is None else _user_message(messages, location)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise ConfigError(f"{location}: expected {_COLUMNS}, found {str(dict(record))[:80]}")
    return Prompt(prompt, str(record.get("domain", "own")))


def _user_message(messages: object, location: str) -> object:
    """The text of a conversation of one user message, which the chat template is applied to later."""
    turns = [*messages] if isinstance(messages, list) and all(isinstance(each, dict) for each in messages) else []
    while turns and turns[-1].get("role") == "assistant":
        turns.pop()
    if [turn.get("role") for turn in turns] != ["user"]:
        raise ConfigError(
            f'{location}: expected "messages" of one user message and its answer; `nextn answer` reads longer '
            "conversations, and `nextn measure --texts` its answers to them"
        )
    return turns[0].get("content")


def by_domain(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Map each domain to the indices of its prompts, in order."""
    indices: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        indices.setdefault(prompt.domain, []).append(index)
    return indices


def indices_without(repetitive: Set[int], prompts: Sequence[Prompt], domain: str) -> set[int]:
    """Return the indices of a domain's prompts ("all": of every domain) without repetitive texts, or all if all are."""
    indices = set(range(len(prompts)) if domain == "all" else by_domain(prompts)[domain])
    return indices - repetitive or indices
