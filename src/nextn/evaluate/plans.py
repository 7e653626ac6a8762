"""Plans of benchmarks and of reference measurements. Imports no torch, so that an invalid plan is refused at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from nextn.errors import ConfigError
from nextn.settings import Sampling

# In place of a K: as many drafts per round as pay, see `draft_policy.AdaptiveLength`.
ADAPTIVE = -1
# Acceptance rules that the decoder implements, of those that can be scored (`teacher_forced.RULES`).
DECODED = ("block", "ratio", "argmax")


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


@dataclass(frozen=True)
class ReferencePlan:
    """Settings of `reference_acceptance`. Raises ConfigError for invalid values."""

    num_speculative_tokens: int = 4  # the largest K
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256  # new tokens of each continuation
    chat: bool | None = None  # through the chat template; None: if the checkpoint has one
    seed: int = 0
    backend: str = "auto"  # what decodes the texts, see `backend_for`
    rule: str = "block"  # acceptance rule of the decoder above temperature 0, one of DECODED

    def __post_init__(self) -> None:
        if self.rule not in DECODED:
            raise ConfigError(
                f"rule {self.rule!r}; expected one of {', '.join(DECODED)}: others are scored, not decoded"
            )
        if self.num_speculative_tokens < 1:
            num = self.num_speculative_tokens
            raise ConfigError(f"num_speculative_tokens = {num}; expected 1 or more, as there is no depth 0 to measure")
        if self.max_tokens < 3:
            raise ConfigError(f"max_tokens = {self.max_tokens}; expected 3 or more, or no round has a draft")
        if not self.temperatures:
            raise ConfigError("temperatures is empty; expected at least one, such as 0 (greedy)")
        for temperature in self.temperatures:
            Sampling(temperature)
        object.__setattr__(self, "temperatures", tuple(sorted(set(self.temperatures))))


def rotate(values: Iterable[int], turn: int) -> list[int]:
    """Rotate the values left by `turn`, so that none is always first or always after the same one."""
    values = list(values)
    start = turn % len(values)
    return values[start:] + values[:start]
