"""Prompts to measure a model on, grouped by domain: the built-in ones or a user's file."""

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nextn.data.sources import HEADER_KEY
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.model.model import Model

_BUILT_IN = Path(__file__).with_name("workload.jsonl")
_FORMATS = '.txt (prompts between blank lines) or .jsonl ({"prompt": text or token ids, "domain": name} per line)'


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
    """Read the prompts of a .txt or .jsonl file, or the built-in ones. Raises ConfigError with the invalid line."""
    path = path or _BUILT_IN
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        records = [_read_record(line, f"{path}:{number}") for number, line in lines]
        if records and HEADER_KEY in records[0]:  # a file of self-generated data, which also holds prompts
            lines, records = lines[1:], records[1:]
        prompts = [
            _to_prompt(record, f"{path}:{number}", line) for record, (number, line) in zip(records, lines, strict=True)
        ]
    elif path.suffix == ".txt":
        prompts = [Prompt(part.strip("\n"), path.stem) for part in _paragraphs(text)]
    else:
        raise ConfigError(f"{path}: prompts come from a {_FORMATS} file")
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


def _read_record(line: str, location: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{location}: not JSON: {error}") from error
    return record if isinstance(record, dict) else {}


def _to_prompt(record: dict[str, Any], location: str, line: str) -> Prompt:
    prompt = record.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ConfigError(f'{location}: expected {{"prompt": text or token ids, "domain": name}}, found {line[:80]}')
    return Prompt(prompt if isinstance(prompt, str) else tuple(prompt), str(record.get("domain", "own")))


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
