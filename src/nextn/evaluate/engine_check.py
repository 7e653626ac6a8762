"""Does an engine serve this checkpoint? Its log-probabilities of one greedy text against the trunk's own."""

from dataclasses import dataclass

import torch

from nextn.engines.answers import EngineRequest
from nextn.engines.endpoint import Endpoint
from nextn.evaluate.given_texts import token_logprobs
from nextn.evaluate.teacher_forced import ReferenceText
from nextn.model.trunk import Trunk, TrunkOutput

_TOKENS = 32
# Nats per token, mean. Of the checkpoint in the package, six greedy texts: 0.01 for the same weights in bf16, 0.003 for
# weights rounded to 8 bits, 0.02 for 6 bits, 0.03 to 0.11 for 4 bits.
_MAX_DIFFERENCE = 0.1


# A greedy text of an engine, with the log-probabilities that it reports.
EngineText = tuple[ReferenceText, tuple[float, ...]]


@dataclass(frozen=True)
class EngineCheck:
    """The comparison of an engine's log-probabilities with the trunk's."""

    engine: str
    num_tokens: int
    mean_difference: float  # nats, of absolute values
    max_difference: float

    @property
    def is_same(self) -> bool:
        """Whether the engine can serve this trunk."""
        return self.mean_difference <= _MAX_DIFFERENCE

    @property
    def warnings(self) -> list[str]:
        """What the user must know."""
        if self.is_same:
            return []
        return [
            f"{self.engine} serves another model than this checkpoint, or coarsely rounded weights: its "
            f"log-probabilities differ by {self.mean_difference:.2f} nats per token ({self.num_tokens} tokens of one "
            f"prompt; at most {_MAX_DIFFERENCE:g} is expected): the figures are of its text, not of this model's"
        ]

    def as_record(self) -> dict[str, object]:
        return vars(self) | {"is_same": self.is_same}


def ask_engine(endpoint: Endpoint, prompt: tuple[int, ...]) -> EngineText | None:
    """Return an answer with log-probabilities; None from an engine that reports no ids or log-probabilities."""
    answer = endpoint.answer(EngineRequest(prompt, _TOKENS, logprobs=1))
    logprobs = tuple(token.logprob for token in answer.tokens if token.logprob is not None)
    if not answer.ids or len(logprobs) != len(answer.ids):
        return None
    return ReferenceText(prompt, answer.ids), logprobs


@torch.inference_mode()
def check_engine(engine: str, asked: EngineText, trunk: Trunk, output: TrunkOutput) -> EngineCheck:
    """Compare, given the trunk's states of the engine's text."""
    own = [value for block in token_logprobs(trunk, asked[0], output) for value in block[0].tolist()]
    differences = [abs(one - other) for one, other in zip(own, asked[1], strict=True)]
    return EngineCheck(engine, len(own), sum(differences) / len(own), max(differences))
