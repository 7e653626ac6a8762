"""Runs of the reference's prompts on a live engine: the gain of its counters, and its texts beside the reference's."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nextn.bounded_json import JsonDict
from nextn.checkpoint.safetensors_file import write_json
from nextn.engines.answers import EngineAnswer, EngineRequest, common_prefix, parse_answer
from nextn.engines.ask import ask_counted, read_counters
from nextn.engines.counters import Counters
from nextn.engines.endpoint import Endpoint
from nextn.errors import CheckpointError, ConfigError, EngineError
from nextn.evaluate.reference_report import ReferenceReport
from nextn.evaluate.reference_texts import prompt_tokens
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.model import Model

_CONCURRENCY = 8
_LONG_RATIO = 3.0  # short and long prompts are asked separately if the long ones are this many times longer


@dataclass(frozen=True)
class EngineObservation:
    """What an engine counted over some prompts."""

    temperature: float
    counters: Counters
    prompt_indices: tuple[int, ...] | None = None  # among the reference's prompts; None for unknown others
    answers: tuple[EngineAnswer, ...] = ()  # one per prompt, or () if they are not known
    exclusive: bool = True  # nothing but these prompts was counted

    @property
    def has_comparable_texts(self) -> bool:
        """Whether the texts can be compared with the reference's: they are greedy, and their token ids are known."""
        return not self.temperature and bool(self.answers) and all(answer.ids for answer in self.answers)


def split_by_length(ids: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the indices of the shorter and of the longer prompts, or of all if their lengths are similar."""
    order = sorted(range(len(ids)), key=lambda index: (len(ids[index]), index))
    half = len(order) // 2
    short, long = order[:half], order[half:]
    total_short, total_long = (sum(len(ids[index]) for index in part) for part in (short, long))
    if len(short) < 2 or total_long / len(long) < _LONG_RATIO * total_short / half:
        return [tuple(range(len(ids)))]
    return [tuple(sorted(short)), tuple(sorted(long))]


def drive_engine(
    endpoint: Endpoint,
    model: Model,
    prompts: Sequence[Prompt],
    plan: ReferencePlan,
    *,
    on_answer: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> list[EngineObservation]:
    """Ask every prompt at every temperature of the plan; short and long prompts make separate observations.

    The reference's own token ids are sent, or text if the endpoint applies its chat template. Observations are kept in
    `folder`, and those of an interrupted run are used if the engine was not started again since.

    Raises:
        ConfigError: The endpoint applies a template, and prompts are token ids.
        CheckpointError: A stored observation is damaged.
        EngineError: As `ask_prompts`.
    """
    ids = [prompt_tokens(model, prompt, plan) for prompt in prompts]
    contents: list[str | tuple[int, ...]] = list(ids)
    if endpoint.chat:
        contents = [prompt.text for prompt in prompts]
        if not all(isinstance(content, str) for content in contents):
            raise ConfigError("prompts of token ids cannot go through a chat template; omit --own-template")
    observed: list[EngineObservation] = []
    for temperature in plan.temperatures:
        for indices in split_by_length(ids):
            file = None if folder is None else folder / f"observed-{len(observed)}.json"
            observation = None if file is None else _stored_observation(file, endpoint)
            if observation is None:
                observation = ask_prompts(
                    endpoint, contents, indices, temperature, plan.max_tokens, seed=plan.seed,
                    template_variables=plan.template_variables, on_answer=on_answer,
                )  # fmt: skip
                if file is not None:
                    _store_observation(file, observation, read_counters(endpoint))
            else:
                for _ in indices:
                    on_answer()
            observed.append(observation)
    return observed


def _store_observation(file: Path, observation: EngineObservation, totals: Counters) -> None:
    """Write an observation, and the engine's counters after it, which a restart of the engine resets."""
    counters = {"totals": totals.as_record(), "counters": observation.counters.as_record()}
    write_json(file, vars(observation) | counters | {"answers": [answer.raw for answer in observation.answers]})


def _stored_observation(file: Path, endpoint: Endpoint) -> EngineObservation | None:
    """Return a stored observation; None if there is none, or the engine was started again since."""
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        totals, counters = (_to_counters(record.pop(name)) for name in ("totals", "counters"))
        answers = tuple(parse_answer(document, endpoint.url) for document in record.pop("answers"))
        indices = tuple(record.pop("prompt_indices"))
        observation = EngineObservation(counters=counters, answers=answers, prompt_indices=indices, **record)
    except (OSError, ValueError, KeyError, TypeError, EngineError) as error:
        raise CheckpointError(f"{file}: not readable: {error}; remove it") from error
    try:
        read_counters(endpoint).minus(totals)
    except EngineError:
        return None
    return observation


def _to_counters(record: JsonDict) -> Counters:
    tuples = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
    return Counters(**(record | tuples))


def ask_prompts(
    endpoint: Endpoint,
    prompts: Sequence[str | tuple[int, ...]],
    indices: Sequence[int],
    temperature: float,
    max_tokens: int,
    *,
    seed: int = 0,
    template_variables: Mapping[str, object] | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> EngineObservation:
    """Ask the prompts at these indices, and return what the counters gained.

    Raises EngineError if the engine counts no drafts, its counters were reset meanwhile, or it refuses a prompt.
    """
    requests = [
        EngineRequest(
            prompts[place], max_tokens, temperature, seed=seed + place, use_cache=False,
            template_variables=template_variables or {},
        )
        for place in indices
    ]  # fmt: skip
    found = ask_counted(endpoint, requests, concurrency=_CONCURRENCY, required=True, on_answer=on_answer)
    if found.counters is None:
        raise EngineError(found.no_counters)
    is_exclusive = _is_exclusive(found.counters, found.answers)
    return EngineObservation(temperature, found.counters, tuple(indices), found.answers, is_exclusive)


def _is_exclusive(counters: Counters, answers: Sequence[EngineAnswer]) -> bool:
    """Whether the rounds gave no more tokens than the answers hold; the last round of each may give K too many."""
    lengths = [len(answer.ids) if answer.ids else answer.completion_tokens for answer in answers]
    if counters.num_drafts is None or counters.accepted is None or None in lengths:
        return True
    slack = len(answers) * (1 + -(-(counters.draft_tokens or 0) // max(1, counters.num_drafts)))
    return counters.num_drafts + counters.accepted <= sum(length or 0 for length in lengths) + slack


def diverged_text_share(observation: EngineObservation, reference: ReferenceReport) -> float:
    """Return the share of the reference's text from the first token that differs from the engine's.

    1 if the texts cannot be compared; 0 for a reference of given texts, which are the engine's own answers.
    """
    if reference.text_source:
        return 0.0
    if not observation.has_comparable_texts:
        return 1.0
    generated = reference.generated[observation.temperature].texts
    texts = [generated[index].new for index in observation.prompt_indices or ()]
    pairs = zip(texts, observation.answers, strict=True)
    return 1 - sum(common_prefix(text, answer.ids or ()) for text, answer in pairs) / max(1, sum(map(len, texts)))


def count_retokenized(observation: EngineObservation, reference: ReferenceReport) -> int:
    """Return the number of prompts for which the engine reports other token ids than the reference's."""
    generated = reference.generated[observation.temperature].texts
    prompts = [generated[index].prompt for index in observation.prompt_indices or ()]
    return sum(
        answer.prompt_ids is not None and answer.prompt_ids != prompt
        for prompt, answer in zip(prompts, observation.answers, strict=False)
    )
