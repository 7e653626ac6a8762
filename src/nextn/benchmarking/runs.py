"""Plain and MTP decoding in turn, by a plan: each prompt at each K and temperature, who goes first changing."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from nextn.benchmarking.cost import Clock, adaptive, rotated
from nextn.benchmarking.workload import Prompt
from nextn.decode import Round, Settings, rounds
from nextn.errors import ConfigError
from nextn.fast.choose import Engine
from nextn.model import Model
from nextn.policy import DraftLength
from nextn.sampling import Sampling
from nextn.text import eos_tokens

# In place of a K: as many drafts a round as pay, see `policy.Adaptive`.
ADAPTIVE = -1


@dataclass(frozen=True)
class Plan:
    """What to run: every K of `drafts` (0, plain decoding, always with it) at every temperature, `repeats` times.

    adaptive: also as many drafts as pay, up to the largest K. path: see `Model.engine`. Raises ConfigError for values
    out of range.
    """

    drafts: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    repeats: int = 3
    chat: bool = False
    seed: int = 0
    adaptive: bool = False
    path: str = "auto"

    def __post_init__(self) -> None:
        if not self.drafts or min(self.drafts) < 0 or not max(self.drafts):
            raise ConfigError(f"drafts = {self.drafts}; expected numbers of drafts, at least one of them above 0")
        if not self.temperatures or self.repeats < 1:
            raise ConfigError(f"{self.temperatures=}, {self.repeats=}; expected a temperature and a repeat at least")
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens = {self.max_tokens}; expected 2 or more: the prefill gives the first one")
        for temperature in self.temperatures:
            Sampling(temperature)  # raises for what cannot be sampled at
        object.__setattr__(self, "drafts", tuple(sorted({0, *self.drafts})))
        object.__setattr__(self, "temperatures", tuple(dict.fromkeys(self.temperatures)))

    @property
    def choices(self) -> list[int]:
        return [*self.drafts, *([ADAPTIVE] if self.adaptive else [])]

    def order(self, num_prompts: int) -> Iterator[tuple[int, int, float, list[int]]]:
        """(repeat, prompt, temperature, Ks in the order of this turn): who goes first changes from turn to turn."""
        for repeat, prompt, temperature in product(range(self.repeats), range(num_prompts), self.temperatures):
            yield repeat, prompt, temperature, rotated(self.choices, repeat + prompt)

    def num_runs(self, num_prompts: int) -> int:
        return self.repeats * num_prompts * len(self.temperatures) * len(self.choices)


@dataclass(frozen=True)
class Run:
    """One prompt decoded once. rounds: the prefill's first. wall_s: of all rounds behind the prefill."""

    prompt: int
    drafts: int
    temperature: float
    repeat: int
    rounds: tuple[Round, ...] = field(repr=False)
    wall_s: float

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for each in self.rounds for token in each.rows[0].emitted)

    @property
    def draft_s(self) -> float:
        return sum(each.draft_s for each in self.rounds[1:])

    @property
    def verify_s(self) -> float:
        return sum(each.verify_s for each in self.rounds[1:])

    @property
    def tokens_per_s(self) -> float:
        """nan where the prefill's token was the last."""
        return (len(self.tokens) - 1) / self.wall_s if len(self.rounds) > 1 else float("nan")

    @property
    def round_s(self) -> float:
        """Seconds of a round, on average; nan without one."""
        return self.wall_s / (len(self.rounds) - 1) if len(self.rounds) > 1 else float("nan")


def runs(model: Model, prompts: Sequence[Prompt], plan: Plan, *, clock: Clock = time.perf_counter) -> Iterator[Run]:
    """All runs of the plan, in its order, after a short one of each K that does not count. Raises ConfigError."""
    ids = [prompt.tokens(model, chat=plan.chat) for prompt in prompts]
    eos, made = eos_tokens(model), model.engine(plan.path)
    lengths: dict[float, DraftLength | None] = dict.fromkeys(plan.temperatures)
    for drafts in plan.drafts:
        settings = Settings(drafts=drafts, max_tokens=min(plan.max_tokens, 2 + 2 * drafts), eos=eos)
        _run(made, ids[0], settings, None, clock)
    if plan.adaptive:  # one for each temperature: what confidences are worth differs
        limit, path = plan.drafts[-1], plan.path
        lengths = {each: adaptive(model, limit=limit, context=len(ids[0]), path=path) for each in plan.temperatures}
    for repeat, place, temperature, order in plan.order(len(prompts)):
        for drafts in order:
            settings = Settings(
                drafts=plan.drafts[-1] if drafts == ADAPTIVE else drafts,
                sampling=Sampling(temperature),
                max_tokens=plan.max_tokens,
                eos=eos,
                seed=plan.seed + repeat,
            )
            length = lengths[temperature] if drafts == ADAPTIVE else None
            log, wall_s = _run(made, ids[place], settings, length, clock)
            yield Run(place, drafts, temperature, repeat, log, wall_s)


def _run(
    made: Engine, prompt: Sequence[int], settings: Settings, length: DraftLength | None, clock: Clock
) -> tuple[tuple[Round, ...], float]:
    stream = rounds(made.trunk, made.head, [prompt], settings, length=length)
    log = [next(stream)]
    started = clock()
    log += stream
    return tuple(log), clock() - started
