"""The plan of a reference measurement: how many drafts, which temperatures, how much text."""

from dataclasses import dataclass

from nextn.errors import ConfigError
from nextn.settings import Sampling

# Acceptance rules that the decoder implements, of those that can be scored (`teacher_forced.RULES`).
DECODED = ("block", "ratio", "argmax")


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
