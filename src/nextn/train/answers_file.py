"""The file of a model's answers: a header with the settings that produced them, then a line per prompt, in order."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nextn.checkpoint.safetensors_file import atomic
from nextn.data.sources import HEADER_KEY
from nextn.errors import CheckpointError, ConfigError
from nextn.text_format import changes


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer, as stored."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the answer's eos included
    finish: str  # `eos`, `length` or `context`
    repetitive: bool  # see `Degeneracy.is_degenerate`
    text: str | None = None  # the answer without special tokens, if there is a tokenizer


def resume_answers(
    out: Path, header: Mapping[str, object], prompts: Sequence[Sequence[int]], batch_size: int
) -> list[GeneratedAnswer]:
    """Return the answers of the file's complete batches and truncate the rest; write the header of a new file."""
    header = json.loads(json.dumps(header))  # as it is read back: tuples are lists
    if not out.exists():
        with atomic(out) as file:
            file.write(json.dumps(header).encode() + b"\n")
        return []
    first, *lines = _complete_lines(out)
    _compare(out, header, _parse(out, 1, first))
    answers = [_parse_answer(out, number, line) for number, line in enumerate(lines, start=2)]
    for number, (answer, prompt) in enumerate(zip(answers, prompts, strict=False)):
        if answer.prompt != tuple(prompt):
            raise ConfigError(
                f"{out}:{number + 2}: the answer to another prompt than number {number} of those given; use the same "
                "prompts, count and seed to resume, or give another file"
            )
    if len(answers) < len(prompts):
        del answers[len(answers) - len(answers) % batch_size :]
    os.truncate(out, sum(map(len, [first, *lines[: len(answers)]])))
    return answers


def _complete_lines(out: Path) -> list[bytes]:
    try:
        lines = out.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be read ({error.strerror}); give another file") from error
    complete = [line for line in lines if line.endswith(b"\n")]
    if not complete:
        raise CheckpointError(f"{out}: not a file of answers; give another file, or remove it")
    return complete


def _parse(out: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{out}:{number}: not JSON: {error}; give another file, or remove it") from error
    return values if isinstance(values, dict) else {}


def _parse_answer(out: Path, number: int, line: bytes) -> GeneratedAnswer:
    values = _parse(out, number, line)
    try:
        answer = GeneratedAnswer(**values)  # type: ignore[arg-type]  # a wrong type fails the comparison of prompts
        return replace(answer, prompt=tuple(answer.prompt), tokens=tuple(answer.tokens))
    except TypeError as error:
        raise CheckpointError(f"{out}:{number}: not a stored answer: {error}; give another file") from error


def _compare(out: Path, header: Mapping[str, object], stored: Mapping[str, object]) -> None:
    if stored.get(HEADER_KEY) != "answers":
        raise CheckpointError(f"{out}: its first line is not the header of a file of answers; give another file")
    now, then = _flatten(header), _flatten(stored)
    if now == then:
        return
    for part in ("trunk", "head", "engine"):
        if now.get(part) != then.get(part):
            raise ConfigError(f"{out} holds answers of another {part}; give another file for this model's")
    raise ConfigError(f"{out} was made with {changes(then, now)}; resume with the same, or give another file")


def _flatten(values: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= _flatten(value) if isinstance(value, Mapping) else {key: value}
    return flat


def append_answers(out: Path, answers: Sequence[GeneratedAnswer]) -> None:
    """Append all lines of a batch, or none if the disk is full; resuming drops a partial line of a killed process."""
    size = out.stat().st_size
    data = "".join(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers).encode()
    try:
        with out.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(out, size)
        message = f"{out}: cannot be written: {error.strerror or error}. Complete batches are kept."
        raise CheckpointError(message) from error
