"""Times of rounds by number of drafts, measured with sequences of random tokens while the server is idle."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nextn.decoding.text_stream import TextStream
from nextn.runtime.backend import Backend
from nextn.serve.request import GenerationRequest
from nextn.serve.scheduler import Group
from nextn.serve.served_batch import ServedBatch, ServedSequence
from nextn.settings import Sampling
from nextn.speculative.copy_choice import CopyChoice, CopyRun
from nextn.speculative.draft_policy import FixedLength, RoundPlan, candidate_lengths

_PROMPT_SIZE = 64  # positions, processed in one pass
# Each number of drafts is measured in several turns, each longer than a time slice of another process: rounds that fit
# between time slices would seem cheaper than they are on a busy machine. Turns that agree to within a factor end early.
_MIN_TURNS, _MAX_TURNS, _AGREEMENT = 3, 5, 1.1
_TURN_S, _MAX_ROUNDS = 0.02, 12  # a turn's least time, unless it has this many rounds
_ROUNDS_PER_CALL = 3
MAX_COPY_ROWS = 64  # positions of all sequences up to which rounds with copies are measured; longer ones take long
_MAX_AHEAD_S = 0.01  # seconds of rounds in one native call, after which a waiting request is noticed


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round, by number of drafts."""

    head: dict[int, float]  # by the head's, for all `candidate_lengths`
    copies: dict[int, float]  # by copied tokens of each sequence, in rounds without the head


@torch.inference_mode()
def measure_round_costs(
    backend: Backend,
    batch_size: int,
    group: Group,
    *,
    max_model_len: int,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> RoundTimes | None:
    """Measure rounds of `batch_size` sequences of a group as the scheduler runs them: the median of the means of turns.

    Tokens are sampled at temperature 1 unless the group takes the argmax. `is_interrupted` is called between passes.
    None if interrupted, or if `max_model_len` is too small for a turn.
    """
    timer = _RoundTimer()

    def new_batch() -> ServedBatch | None:
        batch: ServedBatch | None = None
        for row in range(batch_size):
            if is_interrupted():
                return None
            one = _prefilled(backend, timer, row, group, max_model_len)
            if batch is None:
                batch = one
            else:
                batch.join(one)
        return batch

    with backend.trunk.pass_context():
        batch = new_batch()
        kinds = [(length, 0) for length in candidate_lengths(group.num_speculative_tokens)]
        copies = candidate_lengths(group.num_copy_tokens)[1:] if group.num_copy_tokens else ()
        kinds[:0] = [(0, length) for length in copies if batch_size * (length + 1) <= MAX_COPY_ROWS]
        means: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
        for turn in range(_MAX_TURNS):
            # Most drafts first: after rounds without drafts, the head has to process the positions that it skipped.
            for kind in reversed(means):
                seconds = _time_rounds(batch, timer, kind, batch_size, is_interrupted)
                if seconds is None:  # sequences reached their maximum length, as those of small models soon do
                    batch = new_batch()
                    seconds = _time_rounds(batch, timer, kind, batch_size, is_interrupted)
                if seconds is None:
                    return None
                means[kind].append(seconds)
            if turn + 1 >= _MIN_TURNS and all(max(each) <= _AGREEMENT * min(each) for each in means.values()):
                break
        medians = {kind: statistics.median(seconds) for kind, seconds in means.items()}
        return RoundTimes(
            {length: seconds for (length, copied), seconds in medians.items() if not copied},
            {copied: seconds for (_, copied), seconds in medians.items() if copied},
        )


class _RoundTimer:
    """A policy that drafts, or copies, a given number of tokens and records the times of rounds."""

    def __init__(self) -> None:
        self.length, self.num_copied, self.seconds = FixedLength(0), 0, list[float]()

    def plan(self) -> RoundPlan:
        return self.length.plan()

    def rounds_unchanged(self, batch_size: int) -> int:
        return _ROUNDS_PER_CALL

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.seconds.append(seconds)

    def choose(self, runs: Sequence[CopyRun]) -> CopyChoice:
        return CopyChoice(((0,) * self.num_copied,) * len(runs), uses_head=not self.num_copied)

    def observe_copies(self, num_draft_tokens: int, seconds: float) -> None:
        self.seconds.append(seconds)

    def learn(self, confidences: Sequence[float], *, num_draft_tokens: int, num_accepted: int) -> None:
        pass

    @property
    def reason(self) -> str:
        return "measuring"


def _prefilled(backend: Backend, timer: _RoundTimer, row: int, group: Group, max_model_len: int) -> ServedBatch:
    """Return a batch of one sequence that has its first token and ends only at its maximum length."""
    size = min(_PROMPT_SIZE, max_model_len // 2)
    tokens = torch.randint(backend.trunk.vocab_size, (size,), generator=torch.Generator().manual_seed(row))
    sampling = Sampling(temperature=0.0 if group.is_argmax else 1.0)
    request = GenerationRequest(tuple(tokens.tolist()), sampling, max_tokens=max_model_len - size, seed=row)
    sequence = ServedSequence.of(request, lambda chunk: None, TextStream(None, ()), row)
    k, copies = group.num_speculative_tokens, group.num_copy_tokens
    timer.length = FixedLength(k)
    batch = ServedBatch(
        backend.trunk, backend.head, sequence, num_speculative_tokens=k, num_copy_tokens=copies, length=timer
    )
    batch.limit_caches(max_model_len)
    batch.max_ahead_s = _MAX_AHEAD_S
    while not batch.prefill_chunk(_PROMPT_SIZE):
        pass
    batch.first_round(0.0)
    return batch


def _time_rounds(
    batch: ServedBatch | None,
    timer: _RoundTimer,
    kind: tuple[int, int],
    batch_size: int,
    is_interrupted: Callable[[], bool],
) -> float | None:
    """Return the mean seconds of a turn's rounds; None if interrupted, if a sequence ended, or without a batch."""
    timer.length, timer.num_copied, timer.seconds = FixedLength(kind[0]), kind[1], []
    while batch is not None and len(batch.sequences) == batch_size:
        times = timer.seconds[1:]  # the first round may record its passes, or process positions that the head skipped
        if not batch.queued and (len(times) >= _MAX_ROUNDS or sum(times) >= _TURN_S):
            return statistics.mean(times)
        if not batch.queued and is_interrupted():
            return None
        batch.round()
    return None
