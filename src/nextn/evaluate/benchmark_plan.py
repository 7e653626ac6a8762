"""The plan of a benchmark. Imports no torch, so that an invalid plan is refused at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from nextn.errors import ConfigError
from nextn.settings import Sampling

# In place of a K: as many drafts per round as pay, see `draft_policy.AdaptiveLength`.
ADAPTIVE = -1


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to run: every K at every temperature, `repeats` times. Raises ConfigError for invalid values."""

    k_values: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)  # 0, baseline decoding, is always added
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256  # new tokens per prompt
    repeats: int = 3
    chat: bool = False  # through the chat template
    seed: int = 0
    adaptive: bool = False  # also as many drafts per round as pay, up to the largest K
    backend: str = "auto"  # see `backend_for`

    def __post_init__(self) -> None:
        if not self.k_values or min(self.k_values) < 0 or not max(self.k_values):
            raise ConfigError(f"k_values = {self.k_values}; expected numbers of drafts, at least one of them above 0")
        if not self.temperatures or self.repeats < 1:
            raise ConfigError(
                f"temperatures = {self.temperatures}, repeats = {self.repeats}; expected at least one of each"
            )
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens = {self.max_tokens}; expected 2 or more: the prefill emits the first one")
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


def rotate(values: Iterable[int], turn: int) -> list[int]:
    """Rotate the values left by `turn`, so that none is always first or always after the same one."""
    values = list(values)
    start = turn % len(values)
    return values[start:] + values[:start]
