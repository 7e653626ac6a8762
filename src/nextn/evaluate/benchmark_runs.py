"""The runs of a benchmark: prompts decoded one by one, with and without MTP in turn, and their times."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nextn.decoding.generate import eos_tokens
from nextn.decoding.records import Round
from nextn.decoding.rounds import rounds
from nextn.evaluate.decoding_costs import adaptive_length
from nextn.evaluate.reference_texts import prompt_tokens
from nextn.evaluate.workload import ADAPTIVE, BenchmarkPlan, Prompt
from nextn.model.model import Model
from nextn.runtime.backend import Backend, backend_for
from nextn.settings import Sampling, Settings
from nextn.speculative.draft_policy import DraftLength


@dataclass(frozen=True)
class Run:
    """One prompt decoded once."""

    prompt: int  # index
    num_speculative_tokens: int
    temperature: float
    repeat: int
    rounds: tuple[Round, ...] = field(repr=False)  # that of the prefill first
    wall_s: float  # of all rounds after the prefill

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
        """Tokens per second after the prefill; nan if the prefill's token was the last."""
        return (len(self.tokens) - 1) / self.wall_s if len(self.rounds) > 1 else math.nan

    @property
    def round_s(self) -> float:
        """Mean seconds per round; nan without one."""
        return self.wall_s / (len(self.rounds) - 1) if len(self.rounds) > 1 else math.nan


def benchmark_runs(model: Model, prompts: Sequence[Prompt], plan: BenchmarkPlan) -> Iterator[Run]:
    """Yield all runs of the plan in its order, after a short run of each K to warm up. Raises ConfigError."""
    ids = [prompt_tokens(model, prompt, plan) for prompt in prompts]
    eos, engine = eos_tokens(model), backend_for(model, plan.backend)
    lengths: dict[float, DraftLength | None] = dict.fromkeys(plan.temperatures)
    for k in plan.k_values:
        settings = Settings(num_speculative_tokens=k, max_tokens=min(plan.max_tokens, 2 + 2 * k), eos=eos)
        _decode(engine, ids[0], settings, None)
    if plan.adaptive:  # one per temperature, as confidences are calibrated differently
        limit, backend = plan.k_values[-1], plan.backend
        lengths = {
            temperature: adaptive_length(
                model, limit=limit, num_copy_tokens=plan.num_copy_tokens, context=len(ids[0]), backend=backend
            )
            for temperature in plan.temperatures
        }
    for repeat, prompt, temperature, order in plan.order(len(prompts)):
        for k in order:
            settings = Settings(
                num_speculative_tokens=plan.k_values[-1] if k == ADAPTIVE else k,
                num_copy_tokens=plan.num_copy_tokens if k else 0,
                sampling=Sampling(temperature),
                max_tokens=plan.max_tokens,
                eos=eos,
                seed=plan.seed + repeat,
            )
            length = lengths[temperature] if k == ADAPTIVE else None
            log, wall_s = _decode(engine, ids[prompt], settings, length)
            yield Run(prompt, k, temperature, repeat, log, wall_s)


def _decode(
    engine: Backend, prompt: Sequence[int], settings: Settings, length: DraftLength | None
) -> tuple[tuple[Round, ...], float]:
    """All rounds, and the seconds of those after the prefill."""
    stream = rounds(engine.trunk, engine.head, [prompt], settings, length=length)
    log = [next(stream)]
    started = time.perf_counter()
    log += stream
    return tuple(log), time.perf_counter() - started
