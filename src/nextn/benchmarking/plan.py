"""What a benchmark is to run. Imports no torch, so that a wrong plan is refused at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from nextn.errors import ConfigError
from nextn.settings import Sampling

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


def rotated(values: Iterable[int], turn: int) -> list[int]:
    """The values, begun `turn` places further on: whoever comes first or after whom changes from turn to turn."""
    values = list(values)
    start = turn % len(values)
    return values[start:] + values[:start]
