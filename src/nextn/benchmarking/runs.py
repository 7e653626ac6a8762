"""Plain and MTP decoding in turn, by a plan: each prompt at each K and temperature, who goes first changing."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nextn.benchmarking.cost import Clock, adaptive
from nextn.benchmarking.plan import ADAPTIVE, Plan
from nextn.benchmarking.workload import Prompt
from nextn.decode import Round, Settings, rounds
from nextn.fast.choose import Engine
from nextn.model import Model
from nextn.policy import DraftLength
from nextn.sampling import Sampling
from nextn.text import eos_tokens


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
