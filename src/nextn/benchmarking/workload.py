"""The prompts that a model is measured on, by domain: the built-in ones, or a file of the user's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nextn.corpus.corpus_files import HEADER
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.model import Model

_BUILT_IN = Path(__file__).with_name("workload.jsonl")
_FORMATS = '.txt (prompts between blank lines) or .jsonl ({"prompt": text or token ids, "domain": name} a line)'


@dataclass(frozen=True)
class Prompt:
    """text: a string, or token ids. domain: the group that its figures are told in."""

    text: str | tuple[int, ...]
    domain: str

    def tokens(self, model: "Model", *, chat: bool = False) -> tuple[int, ...]:
        """Token ids for this model. Raises ConfigError for text without a tokenizer."""
        from nextn.text import encode  # prompts are read, and sent to engines, without torch

        if isinstance(self.text, str) and model.tokenizer is None:
            raise ConfigError(
                "the checkpoint has no tokenizer, so prompts that are text cannot be read; pass a .jsonl file with "
                'token ids ({"prompt": [3, 14, 15]} a line), or add tokenizer.json to its folder'
            )
        return tuple(encode(model, self.text, chat=chat))


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """The prompts of a .txt or .jsonl file, or the built-in ones. Raises ConfigError, with the line, for others."""
    path = path or _BUILT_IN
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        records = [_read(line, f"{path}:{number}") for number, line in lines]
        if records and HEADER in records[0]:  # of stored answers, which are prompts, too
            lines, records = lines[1:], records[1:]
        prompts = [_parsed(each, f"{path}:{number}", line) for each, (number, line) in zip(records, lines, strict=True)]
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


def _read(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    return record if isinstance(record, dict) else {}


def _parsed(record: dict[str, Any], place: str, line: str) -> Prompt:
    prompt = record.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ConfigError(f'{place}: expected {{"prompt": text or token ids, "domain": name}}, found {line[:80]}')
    return Prompt(prompt if isinstance(prompt, str) else tuple(prompt), str(record.get("domain", "own")))


def by_domain(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """domain -> places of its prompts, in order."""
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt.domain, []).append(place)
    return places
