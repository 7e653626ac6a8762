"""The trunk's own answers to prompts: the text on which a head learns to say what its trunk says.

Decoded by our own decoder, with the head where there is one, and kept as JSON lines: first one that says how they were
made, then one for each prompt, in order. An answer hangs on its prompt's place and the seed, so that a run which was
interrupted goes on to the same file.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

from nextn.checkpoints.tensor_file import atomic
from nextn.corpus.corpus_files import HEADER, Source, records, sorted_out
from nextn.corpus.data import Corpus
from nextn.corpus.loops import degeneracy
from nextn.corpus.prompts import prompts
from nextn.corpus.records import Reader
from nextn.decode import Settings, rounds
from nextn.errors import CheckpointError, ConfigError
from nextn.model import Model
from nextn.text import eos_tokens
from nextn.training.imprint import imprint
from nextn.words import changes


@dataclass(frozen=True)
class Answer:
    """prompt, tokens: ids, the answer's eos included. finish: `eos`, `length` or `context`. looping: see
    `data.Degeneracy`. text: the answer without special tokens, where there is a tokenizer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: str
    looping: bool
    text: str | None = None


@dataclass(frozen=True)
class Tally:
    """What the file holds so far. total: answers wanted. tokens: of all answers. finishes: how many ended how.
    looping: how many are loops. tokens_per_s: of the last batch, 0 for answers that were there before."""

    total: int
    answers: int = 0
    tokens: int = 0
    looping: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    tokens_per_s: float = 0.0

    def plus(self, answers: Sequence[Answer], seconds: float = 0.0) -> "Tally":
        new = sum(len(each.tokens) for each in answers)
        return Tally(
            self.total,
            self.answers + len(answers),
            self.tokens + new,
            self.looping + sum(each.looping for each in answers),
            self.finishes + Counter(each.finish for each in answers),
            new / seconds if seconds else 0.0,
        )

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"finishes": dict(self.finishes)}


def answer(
    model: Model,
    asked: Sequence[Sequence[int]],
    settings: Settings,
    out: Path,
    *,
    batch_size: int = 8,
    path: str = "auto",
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Tally]:
    """Answer prompts [*][ids] into the file `out`; yields what it holds, at first and after each batch.

    A file that is there is gone on with, from its last whole batch. settings.eos = None: the checkpoint's own; drafts
    is taken as 0 for a model without a head. path: see `Model.engine`. should_stop is asked in every round; a batch
    that is not whole is left out. Raises ConfigError for a file that was made with other settings, prompts or another
    model, CheckpointError for one that is damaged or cannot be written.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}; expected a whole number >= 1")
    eos = eos_tokens(model) if settings.eos is None else settings.eos
    settings = replace(settings, eos=eos, drafts=settings.drafts if model.head is not None else 0)
    header = _header(model, settings, batch_size, path)
    tally = Tally(len(asked)).plus(_resumed(out, header, asked, batch_size))
    yield tally
    while tally.answers < len(asked):
        started, first = time.perf_counter(), tally.answers
        made = _decoded(model, asked[first : first + batch_size], first, settings, path, should_stop)
        if made is None:
            return
        _append(out, made)
        tally = tally.plus(made, time.perf_counter() - started)
        yield tally


def read_prompts(
    sources: Sequence[Source], model: Model, *, count: int | None = None, length: int = 64, seed: int = 0, chat: bool
) -> tuple[list[list[int]], list[str]]:
    """(prompts, notes): those of the first `count` records; what is missing is cut from text files.

    length: tokens of each that is cut; seed: of the places. chat: prompts that are text go through the chat template.
    Raises ConfigError for what cannot be read, or too little text.
    """
    if model.tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer to read prompts with; add tokenizer.json to its folder")
    texts, others = sorted_out(sources)
    if not sources or (count is not None and count < 1):
        raise ConfigError(f"{len(sources)} sources of prompts, count = {count}; expected at least one of each")
    reader, found = Reader(model.tokenizer), []
    for place, record in islice((pair for source in others for pair in records(source)), count):
        found.append(_checked(reader.prompt(record, place, chat=chat), place, model.trunk.vocab_size))
    if texts:
        if count is None:
            raise ConfigError(f"{texts[0]} is text: say how many prompts to cut from it, such as --count 1000")
        corpus, missing = Corpus.from_files(texts, model.tokenizer), count - len(found)
        if missing > 0:
            cut = prompts(corpus, count=missing, length=length, seed=seed, continuation=0)
            found += [piece.tolist() for piece in cut]
    return _fitting(found, model.trunk.max_length)


def _checked(ids: list[int], place: str, vocab_size: int) -> list[int]:
    if not ids:
        raise ConfigError(f"{place}: the prompt is empty; expected at least one token")
    if max(ids) >= vocab_size:
        raise ConfigError(f"{place}: token {max(ids)} is not in the model's vocabulary of {vocab_size}")
    return ids


def _fitting(found: list[list[int]], context: int | None) -> tuple[list[list[int]], list[str]]:
    fitting = [prompt for prompt in found if context is None or len(prompt) < context]
    told = f"{len(found) - len(fitting)} of {len(found)} prompts fill the model's context of {context} tokens"
    if not fitting:
        raise ConfigError(f"no prompt is left: {told}" if found else "no prompt was found in the given files")
    return fitting, [f"{told}: left out"] if len(fitting) < len(found) else []


def _header(model: Model, settings: Settings, batch_size: int, path: str) -> dict[str, object]:
    head = imprint(model.head) if model.head is not None and settings.drafts else None
    made_by = {"trunk": imprint(model.trunk.model), "head": head, "batch_size": batch_size, "path": path}
    return json.loads(json.dumps({HEADER: "answers"} | made_by | {"settings": asdict(settings)}))


def _resumed(out: Path, header: Mapping[str, object], asked: Sequence[Sequence[int]], batch_size: int) -> list[Answer]:
    """The answers of the file's whole batches; what is behind them is cut off. A new file gets its header."""
    if not out.exists():
        with atomic(out) as file:
            file.write(json.dumps(header).encode() + b"\n")
        return []
    first, *lines = _whole_lines(out)
    _compare(out, header, _parsed(out, 1, first))
    found = [_stored(out, number, line) for number, line in enumerate(lines, start=2)]
    for number, (have, want) in enumerate(zip(found, asked, strict=False)):
        if have.prompt != tuple(want):
            raise ConfigError(
                f"{out}:{number + 2}: the answer to another prompt than number {number} of those given; use the same "
                "prompts, count and seed to go on, or another file"
            )
    if len(found) < len(asked):
        del found[len(found) - len(found) % batch_size :]
    os.truncate(out, sum(map(len, [first, *lines[: len(found)]])))
    return found


def _whole_lines(out: Path) -> list[bytes]:
    try:
        lines = out.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be read ({error.strerror}); name another file") from error
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole:
        raise CheckpointError(f"{out}: no file of answers; name another file, or remove it")
    return whole


def _parsed(out: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise CheckpointError(f"{out}:{number}: not JSON: {error}; name another file, or remove it") from error
    return found if isinstance(found, dict) else {}


def _stored(out: Path, number: int, line: bytes) -> Answer:
    values = _parsed(out, number, line)
    try:
        made = Answer(**values)  # type: ignore[arg-type]  # a wrong type shows in the comparison of prompts
        return replace(made, prompt=tuple(made.prompt), tokens=tuple(made.tokens))
    except TypeError as error:
        raise CheckpointError(f"{out}:{number}: not a stored answer: {error}; name another file") from error


def _compare(out: Path, header: Mapping[str, object], stored: Mapping[str, object]) -> None:
    if stored.get(HEADER) != "answers":
        raise CheckpointError(f"{out}: its first line is not that of a file of answers; name another file")
    now, then = _flat(header), _flat(stored)
    if now == then:
        return
    for part, what in (("trunk", "trunk"), ("head", "head")):
        if now[part] != then.get(part):
            raise ConfigError(f"{out} holds answers of another {what}; name another file for this model's")
    raise ConfigError(f"{out} was made with {changes(then, now)}; go on with the same, or name another file")


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in values.items():
        out |= _flat(value) if isinstance(value, Mapping) else {key: value}
    return out


def _decoded(
    model: Model,
    asked: Sequence[Sequence[int]],
    first: int,
    settings: Settings,
    path: str,
    should_stop: Callable[[], bool],
) -> list[Answer] | None:
    """One batch; None if it was stopped."""
    made, numbers = model.engine(path), range(first, first + len(asked))
    tokens: list[list[int]] = [[] for _ in asked]
    finishes = ["" for _ in asked]
    for each in rounds(made.trunk, made.head, asked, settings, numbers=numbers):
        for part in each.rows:
            tokens[part.row] += part.emitted
            finishes[part.row] = part.finish or ""
        if should_stop():
            return None
    rows = zip(asked, tokens, finishes, strict=True)
    return [Answer(tuple(p), tuple(t), f, degeneracy(t).looping, _text(model, t)) for p, t, f in rows]


def _text(model: Model, tokens: list[int]) -> str | None:
    return None if model.tokenizer is None else model.tokenizer.decode(tokens, skip_special_tokens=True)


def _append(out: Path, made: Sequence[Answer]) -> None:
    """All lines of a batch, or none where the disk refuses; a torn line of a killed process is cut off on resuming."""
    size = out.stat().st_size
    data = "".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in made).encode()
    try:
        with out.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(out, size)
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}. Whole batches stay.") from error
