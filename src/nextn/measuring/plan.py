"""What a measurement is to take: how many drafts, at which temperatures, over how much text."""

from dataclasses import dataclass

from nextn.errors import ConfigError
from nextn.settings import Sampling

# Rules of acceptance that the decoder has, of those that can be scored (`columns.RULES`).
DECODED = ("block", "ratio", "argmax")


@dataclass(frozen=True)
class Plan:
    """drafts: the largest K. max_tokens: of each continuation. chat: through the chat template; None: text, where there
    is a template. path: what the texts are decoded on, see `Model.engine`. rule: of the decoder above temperature 0:
    block, ratio or argmax. Raises ConfigError for values out of range.
    """

    drafts: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    chat: bool | None = None
    seed: int = 0
    path: str = "auto"
    rule: str = "block"

    def __post_init__(self) -> None:
        if self.rule not in DECODED:
            raise ConfigError(
                f"rule {self.rule!r}; expected one of {', '.join(DECODED)}: others are scored, not decoded"
            )
        if self.drafts < 1:
            raise ConfigError(f"drafts = {self.drafts}; expected 1 or more: depth 1 is the least that can be measured")
        if self.max_tokens < 3:
            raise ConfigError(f"max_tokens = {self.max_tokens}; expected 3 or more, or no round has a draft")
        if not self.temperatures:
            raise ConfigError("no temperature was given; expected one at least, such as 0 (greedy)")
        for temperature in self.temperatures:
            Sampling(temperature)
        object.__setattr__(self, "temperatures", tuple(sorted(set(self.temperatures))))
