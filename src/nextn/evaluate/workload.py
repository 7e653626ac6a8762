"""What to measure: prompts by domain, built-in or of a user's file, and plans of benchmarks and reference measurements.

Imports no torch, so that an invalid plan is refused at once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from nextn.data.benchmark_prompts import (
    HUMANEVAL,
    SPEED_BENCH,
    category_of,
    check_resolved,
    question_file,
    question_records,
    split_name,
    turns_of,
)
from nextn.engines.counters import MAX_POSITIONS
from nextn.errors import ConfigError, require
from nextn.settings import Sampling, Settings, check_prompts, prompt_ids

if TYPE_CHECKING:
    from nextn.data.records import Record
    from nextn.model.model import Model
    from nextn.model.text_interface import TextInterface

_BUILT_IN = Path(__file__).with_name("workload.jsonl")
_COLUMNS = '"prompt" (text or token ids), "text" or "messages"'
_FORMATS = (
    f"a .txt file (prompts between blank lines), .jsonl or .parquet records with {_COLUMNS}, questions of SPEED-Bench, "
    "SpecBench or MT-bench (also a folder that SPEED-Bench's script wrote), or speed-bench or humaneval"
)
# In place of a K: as many drafts per round as pay, see `draft_policy.AdaptiveLength`.
ADAPTIVE = -1
# Acceptance rules that the decoder implements, of those that can be scored (`teacher_forced.RULES`).
DECODED = ("block", "ratio", "argmax")


@dataclass(frozen=True)
class Prompt:
    """A prompt, as text or token ids, and the domain that its figures are reported under."""

    text: str | tuple[int, ...]
    domain: str
    later: tuple[str, ...] = ()  # the user's later turns, if it begins a conversation
    # The index of the conversation that a played turn belongs to; None for a prompt of its own.
    conversation: int | None = None
    turns: tuple[str, ...] = ()  # the user's turns down to this one, where `text` also has the model's answers

    def tokens(
        self, model: "Model | TextInterface", *, chat: bool = False, variables: Mapping[str, object] | None = None
    ) -> tuple[int, ...]:
        """Encode it for this model (`variables` of its template); raise ConfigError for text without a tokenizer."""
        from nextn.decoding.generate import encode  # here, so that reading prompts needs no torch

        if isinstance(self.text, str) and model.tokenizer is None:
            raise no_tokenizer("the checkpoint")
        return tuple(encode(model, self.text, chat=chat, variables=variables))


def no_tokenizer(what: str) -> ConfigError:
    """Return the error for prompts that are text, where `what` cannot encode them."""
    return ConfigError(
        f"{what} has no tokenizer, so prompts that are text cannot be read: add its base model's tokenizer.json and "
        'tokenizer_config.json to its folder, or pass a .jsonl file with token ids ({"prompt": [3, 14, 15]} per line)'
    )


# Of a function of the Python API: a file or benchmark, see `read_prompts`; None: the built-in ones; texts or token ids.
PromptSource = str | Path | Sequence[str | Sequence[int] | Prompt] | None


def read_prompts(source: Path | str | None = None) -> list[Prompt]:
    """Read the prompts of a file, or of a benchmark (`benchmark_prompts.split_name`), or the built-in ones.

    Raises ConfigError with the invalid line, for questions without their text, and for a category without questions.
    """
    name, subset, category = split_name(str(source or _BUILT_IN))
    prompts = _read_file(_question_path(name)) if name not in (SPEED_BENCH, HUMANEVAL) or Path(name).exists() else [
        _to_prompt(record, location) for location, record in question_records(name, subset)
    ]  # fmt: skip
    if not prompts:
        raise ConfigError(f"{name}: holds no prompt; expected {_FORMATS}")
    if category is not None:
        known = ", ".join(by_domain(prompts))
        prompts = [prompt for prompt in prompts if prompt.domain == category]
        if not prompts:
            raise ConfigError(f"--prompts {source}: no question of category {category}; expected one of {known}")
    texts = [(str(prompt.text), *prompt.later) for prompt in prompts]
    check_resolved(texts, str(source))
    return prompts


def take_prompts(given: PromptSource) -> tuple[list[Prompt], dict[str, object]]:
    """Return the prompts given to a Python function, and their `prompts_record`; raise ConfigError for none."""
    if given is None or isinstance(given, str | Path):
        prompts = read_prompts(given)
        return prompts, prompts_record(given, prompts)
    check_prompts(given)
    prompts = [
        each if isinstance(each, Prompt) else Prompt(each if isinstance(each, str) else prompt_ids(each), "own")
        for each in given
    ]
    if not prompts:
        raise ConfigError(f"no prompts are given; expected texts or lists of token ids, or {_FORMATS}")
    return prompts, _origin("given", None, None, prompts)


def prompts_record(source: Path | str | None, prompts: Sequence[Prompt]) -> dict[str, object]:
    """Return where prompts came from for JSON reports, with the SHA-256 of a file, else of their texts."""
    name, subset, category = split_name(str(source or _BUILT_IN))
    file = _question_path(name)
    data = file.read_bytes() if file.is_file() else None
    return _origin("built-in" if source is None else name, subset, category, prompts, data)


def num_turns(prompts: Sequence[Prompt]) -> int:
    """Return the number of texts that answer them: one for each of the user's turns."""
    return sum(1 + len(prompt.later) for prompt in prompts)


def _origin(
    name: str, subset: str | None, category: str | None, prompts: Sequence[Prompt], data: bytes | None = None
) -> dict[str, object]:
    texts = json.dumps([[prompt.text, *prompt.later] for prompt in prompts]).encode()
    digest = hashlib.sha256(texts if data is None else data)
    return {
        "source": name,
        "subset": subset,
        "category": category,
        "sha256": digest.hexdigest(),
        "num": len(prompts),
        "turns": num_turns(prompts),
    }


def prompts_text(record: Mapping[str, object]) -> str:
    """Return a `prompts_record` in words."""
    category = "" if record["category"] is None else f", {record['category']}"
    return f"{record['source']}{category}, {record['num']} prompts"


def _question_path(name: str) -> Path:
    return question_file(Path(name)) if Path(name).is_dir() else Path(name)


def _read_file(path: Path) -> list[Prompt]:
    # Here, as they import numpy.
    from nextn.data.corpus import read_text
    from nextn.data.sources import read_records

    if path.suffix == ".txt":
        return [Prompt(part.strip("\n"), path.stem) for part in _paragraphs(read_text(path))]
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: prompts come from {_FORMATS}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected {_FORMATS}")
    return [_to_prompt(record, location) for location, record in read_records(path)]


def _paragraphs(text: str) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            parts[-1].append(line)
        elif parts[-1]:
            parts.append([])
    return ["\n".join(lines) for lines in parts if lines]


def _to_prompt(record: "Record", location: str) -> Prompt:
    from nextn.data.records import prompt_column

    domain = str(record.get("domain", category_of(record) or "own"))
    if (turns := turns_of(record, location)) is not None:
        return Prompt(turns[0], domain, later=turns[1:])
    messages = record.get("messages")
    prompt = prompt_column(record) if messages is None else _user_message(messages, location)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise ConfigError(f"{location}: expected {_COLUMNS}, found {str(dict(record))[:80]}")
    return Prompt(prompt, domain)


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


class _ThinkingMode:
    thinking: bool | None

    @property
    def template_variables(self) -> dict[str, object]:
        """Variables of the chat template: the names by which published templates turn thinking on or off."""
        if self.thinking is None:
            return {}
        mode = "enabled" if self.thinking else "disabled"
        return {"enable_thinking": self.thinking, "thinking": self.thinking, "thinking_mode": mode}


@dataclass(frozen=True)
class BenchmarkPlan(_ThinkingMode):
    """What to run: every K at every temperature, `repeats` times. Raises ConfigError for invalid values."""

    k_values: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)  # 0, baseline decoding, is always added
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256  # new tokens per prompt
    repeats: int = 3
    chat: bool = False  # through the chat template
    seed: int = 0
    adaptive: bool = False  # also as many drafts per round as pay, up to the largest K
    backend: str = "auto"  # see `backend_for`
    num_copy_tokens: int = 0  # copied from the text in a round, at most; never in baseline decoding
    thinking: bool | None = None  # a variable of the chat template; None: the template's default

    def __post_init__(self) -> None:
        Settings(num_copy_tokens=self.num_copy_tokens)  # raises for an invalid number
        has_drafts = min(self.k_values, default=-1) >= 0 and max(self.k_values) > 0
        require(
            self,
            k_values=(has_drafts, "numbers of drafts, at least one of them above 0"),
            temperatures=(len(self.temperatures) > 0, "at least one, such as 0 (greedy)"),
            repeats=(self.repeats >= 1, "at least 1"),
            max_tokens=(self.max_tokens >= 2, "2 or more: the prefill emits the first one"),
        )
        for temperature in self.temperatures:
            Sampling(temperature)  # raises for an invalid temperature
        object.__setattr__(self, "k_values", tuple(sorted({0, *self.k_values})))
        object.__setattr__(self, "temperatures", tuple(dict.fromkeys(self.temperatures)))

    @property
    def choices(self) -> list[int]:
        """All values of K, and `ADAPTIVE` if it is asked for."""
        return [*self.k_values, *([ADAPTIVE] if self.adaptive else [])]

    def order(self, num_prompts: int) -> Iterator[tuple[int, int, float, list[int]]]:
        """Yield (repeat, prompt, temperature, values of K in order); which K is first changes from turn to turn."""
        for repeat, prompt, temperature in product(range(self.repeats), range(num_prompts), self.temperatures):
            yield repeat, prompt, temperature, rotate(self.choices, repeat + prompt)

    def num_runs(self, num_prompts: int) -> int:
        """Return the number of decodes in all."""
        return self.repeats * num_prompts * len(self.temperatures) * len(self.choices)


@dataclass(frozen=True)
class ReferencePlan(_ThinkingMode):
    """What to measure: the texts of `measure`, and the reference of `diagnose`. Raises ConfigError for invalid values.

    Attributes:
        num_speculative_tokens: The largest K.
        temperatures: 0 = greedy.
        max_tokens: New tokens of each continuation.
        chat: Through the chat template; None: if the checkpoint has one.
        seed: Of sampled texts.
        backend: What decodes the texts: `auto`, `native` or `torch`.
        rule: Acceptance rule of the decoder above temperature 0: `block`, `ratio` or `argmax`.
        thinking: A variable of the chat template; None: the template's default.

    Example:
        >>> nextn.ReferencePlan(num_speculative_tokens=3, temperatures=(1.0, 0.0)).temperatures
        (0.0, 1.0)
    """

    num_speculative_tokens: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    chat: bool | None = None
    seed: int = 0
    backend: str = "auto"
    rule: str = "block"
    thinking: bool | None = None

    def __post_init__(self) -> None:
        numbers = f"1 to {MAX_POSITIONS}: there is no depth 0 to measure, and memory and time grow with every depth"
        require(
            self,
            rule=(self.rule in DECODED, f"one of {', '.join(DECODED)}: others are scored, not decoded"),
            num_speculative_tokens=(1 <= self.num_speculative_tokens <= MAX_POSITIONS, numbers),
            max_tokens=(self.max_tokens >= 3, "3 or more, or no round has a draft"),
            temperatures=(len(self.temperatures) > 0, "at least one, such as 0 (greedy)"),
        )
        for temperature in self.temperatures:
            Sampling(temperature)
        object.__setattr__(self, "temperatures", tuple(sorted(set(self.temperatures))))


def rotate(values: Iterable[int], turn: int) -> list[int]:
    """Rotate the values left by `turn`, so that none is always first or always after the same one."""
    values = list(values)
    start = turn % len(values)
    return values[start:] + values[:start]
