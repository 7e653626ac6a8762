"""What the HTTP layer and the engine exchange: a request in, chunks of rounds out."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from nextn.decoding.records import SequenceRound
from nextn.errors import NextnError
from nextn.settings import Sampling


class GrammarState(Protocol):
    """The position of one sequence in a grammar that its tokens must follow."""

    def allowed(self, drafts: tuple[int, ...]) -> list[Tensor]:
        """Return, for each prefix of the drafts (the empty one first), a bool tensor [V] of the tokens that may follow.

        The list ends early after a draft that the grammar forbids. The state is as before afterwards.
        """

    def advance(self, tokens: tuple[int, ...]) -> None:
        """Move past tokens that were emitted."""


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate. The HTTP layer makes `n` of them for a request with `n` choices."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)  # temperature 0: greedy
    max_tokens: int = 256
    min_tokens: int = 0  # none of stop_token_ids before these
    num_speculative_tokens: int | None = None  # K; None: the engine's choice, 0: plain decoding
    stop_token_ids: tuple[int, ...] = ()  # they end the sequence, the tokenizer's EOS included
    skip_special_tokens: bool = False  # leave special tokens out of the text
    stop: tuple[str, ...] = ()  # strings that end the text, which ends before them
    seed: int = 0
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  # the same, times their number
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    logprobs: int | None = None  # alternatives to return with each token; None: no log probabilities
    prompt_logprobs: bool = False  # the same for the tokens of the prompt after the first
    grammar: Callable[[], GrammarState] | None = None  # makes the state at the first generated token
    cache_salt: str = ""  # cached prefixes are shared only among requests with the same salt
    # The API request that it belongs to; those take turns in the queue. None: one of its own.
    parent: object | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of an emitted token under the trunk's unmodified distribution, in nats."""

    token: int
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    top: tuple[tuple[int, float], ...]  # the most likely tokens, best first


@dataclass(frozen=True)
class GenerationChunk:
    """What one or more rounds add to a sequence. The first round of a sequence is the prefill, without drafts."""

    text: str  # what became final; an incomplete character or a possible stop string is held back
    rounds: tuple[SequenceRound, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per emitted token, if they were requested
    finish: str | None = None  # None, `eos`, `stop`, `length`, `context`, `cancelled` or `error`
    error: str = ""  # with finish `error`: what failed
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in the first chunk: of the prompt's tokens after the first
    at: float = field(default_factory=time.monotonic)  # when the rounds ended, by the engine's clock


def failure_message(error: Exception) -> str:
    """Return the message to the client for an error that ended its generation; details of our own faults are logged."""
    return str(error) if isinstance(error, NextnError) else f"internal error: {type(error).__name__}"


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for gauges and `/health`."""

    num_running: int
    num_waiting: int
    cache_positions: int  # positions of KV cache in use by running sequences
    max_cache_positions: int
    prefix_positions: int  # positions held by the prefix cache
    max_prefix_positions: int
    prefix_queries: int  # prompt tokens looked up so far
    prefix_hits: int  # of these, tokens found
    cost_curve: tuple[float, ...] = ()  # cost of verifying 1, 2, ... positions, in baseline steps; empty: not measured
    draft_cost: float = 0.0  # of one draft, in baseline steps
    is_measuring: bool = False  # when idle, it measures the costs of rounds, which takes the processor


class Engine(Protocol):
    """Runs generations in a thread of its own."""

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationChunk], None]) -> Callable[[], None]:
        """Queue a request. `emit` is called in the engine's thread and must return at once; the last chunk ends it.

        Returns what ends the sequence after the current round: any thread may call it, also after the end.
        Raises QueueFullError if too many requests wait, or the engine is closing; ConfigError if the prompt does not
        fit or has unknown tokens.
        """

    def stats(self) -> EngineStats: ...

    def close(self, *, grace_s: float) -> None:
        """Stop accepting; let running sequences end within this time, then cancel them."""
