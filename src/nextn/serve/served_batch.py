"""A batch in which each sequence samples its own tokens, see `TokenSampler`."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from nextn.decoding.batch import DecodingBatch
from nextn.decoding.drafter import Drafter
from nextn.decoding.records import BatchSequence, DraftResult, SequenceRound
from nextn.decoding.text_stream import TextStream
from nextn.model.trunk import TrunkOutput
from nextn.runtime.protocols import DecodingHead, DecodingTrunk, WholeRounds
from nextn.serve.request import GenerationChunk, GenerationRequest, TokenLogprob, failure_message
from nextn.serve.token_sampler import TokenSampler, choose_tokens, verify_drafts
from nextn.settings import Settings
from nextn.speculative.draft_policy import DraftLength, RoundPlan
from nextn.speculative.sampling import Prediction, Uniforms

_LOG = logging.getLogger(__name__)
_UNINTERRUPTED_S = 0.01  # of rounds in one native call


@dataclass(eq=False, kw_only=True)
class ServedSequence(BatchSequence):
    """A sequence with its request, its text so far, and where its chunks go."""

    request: GenerationRequest
    emit: Callable[[GenerationChunk], None]
    text: TextStream
    sampler: TokenSampler
    cached_tokens: int = 0
    has_place: bool = False  # whether it has left the queue
    is_cancelled: bool = False
    is_over: bool = False
    rounds: list[SequenceRound] = field(default_factory=list)  # not emitted yet
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of these rounds' tokens
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # not emitted yet

    @classmethod
    def of(
        cls, request: GenerationRequest, emit: Callable[[GenerationChunk], None], text: TextStream, number: int
    ) -> "ServedSequence":
        """Return the sequence of a request. number: The label of its rounds."""
        sequence = cls(
            row=number,
            tokens=list(request.prompt),
            max_tokens=request.max_tokens,
            eos=request.stop_token_ids,
            uniforms=Uniforms(request.seed),
            request=request,
            emit=emit,
            text=text,
            sampler=TokenSampler(request),
        )
        sequence.stop = sequence._stop_after if request.stop else None
        return sequence

    def accept(self, logits: Tensor, emitted: Sequence[int]) -> None:
        """Move past the tokens of a round; log probabilities are kept until it is emitted."""
        try:
            if self.request.logprobs is not None:
                self.logprobs += [self.sampler.logprob(row, token) for row, token in zip(logits, emitted, strict=False)]
            self.sampler.advance(emitted)
        except Exception as error:
            self.sampler.fail(error)
        if self.sampler.failure:
            self.flush("error", self.sampler.failure)
            self.is_cancelled = True

    def flush(self, finish: str | None, error: str = "") -> None:
        """Emit what the rounds since the last call have added."""
        if self.is_over or not (self.rounds or finish):
            return
        tokens = [token for each in self.rounds for token in each.emitted]
        try:
            text = self.text.push(tokens, self.eos, last=finish is not None)
        except Exception as failure:
            self._fail_alone(failure)
            return
        logprobs = tuple(self.logprobs[: len(tokens)])
        prompt, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        self._end_chunk(GenerationChunk(text, tuple(self.rounds), logprobs, finish, error, self.cached_tokens, prompt))

    def fail(self, error: Exception) -> None:
        """End at once. The text of rounds that were not emitted is dropped, because it may be what failed."""
        if not self.is_over:
            self._end_chunk(GenerationChunk("", (), (), "error", failure_message(error), self.cached_tokens))

    def _fail_alone(self, error: Exception) -> None:
        """End by an error of this sequence alone; it leaves its batch, which continues, before the next step."""
        _LOG.error("a generation failed", exc_info=error)
        self.fail(error)
        self.is_cancelled = True

    def _stop_after(self, new: Sequence[int]) -> int | None:
        try:
            return self.text.stop_after(new)
        except Exception as error:
            self._fail_alone(error)
            return len(new)

    def _end_chunk(self, chunk: GenerationChunk) -> None:
        self.rounds, self.logprobs, self.is_over = [], [], chunk.finish is not None
        self.emit(chunk)


class ServedBatch(DecodingBatch):
    """`DecodingBatch` over ServedSequences of one kind: all take the argmax, see `TokenSampler.is_argmax`, or none."""

    sequences: list[ServedSequence]  # type: ignore[assignment]

    def __init__(
        self,
        trunk: DecodingTrunk,
        head: DecodingHead | None,
        sequence: ServedSequence,
        *,
        num_speculative_tokens: int,
        num_copy_tokens: int = 0,
        length: DraftLength,
    ) -> None:
        """Create a batch of one sequence."""
        self.is_argmax = TokenSampler.is_argmax(sequence.request)
        make = Drafter if self.is_argmax else partial(CoupledDrafter, sequences=lambda: self.sequences)
        settings = Settings(num_speculative_tokens=num_speculative_tokens, num_copy_tokens=num_copy_tokens)
        super().__init__(trunk, head, [sequence], settings, length, make_drafter=make)

    def run(self, seconds: float, *, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Run rounds for this many seconds, at least one, and emit what they add; stop when a sequence ends.

        `is_interrupted` is asked between native calls, and ends it earlier.
        """
        members = {sequence.row: sequence for sequence in self.sequences}
        self.max_ahead_s = min(seconds, _UNINTERRUPTED_S)
        deadline = time.perf_counter() + seconds
        with self.isolated():
            while len(self.sequences) == len(members):
                self._collect(members, self.round().rows)
                if not self.queued and (time.perf_counter() >= deadline or is_interrupted()):
                    break
        for sequence in members.values():
            sequence.flush(None)

    def start(self) -> None:
        """Sample and emit the first token, after the last chunk of the prompt."""
        members = {sequence.row: sequence for sequence in self.sequences}
        with self.isolated():
            self._collect(members, self.first_round(time.perf_counter()).rows)
        for sequence in members.values():
            sequence.flush(None)

    @contextmanager
    def isolated(self, *others: "ServedBatch") -> Iterator[None]:
        """On any failure, end the sequences of this batch and of `others`, because their state is then unknown.

        Other batches have caches of their own and go on.
        """
        batches = [self, *others]
        members = [sequence for batch in batches for sequence in batch.sequences]
        try:
            yield
        except Exception as error:
            _LOG.error("failed generations: %d", len(members), exc_info=error)
            for sequence in members:
                sequence.fail(error)
            for batch in batches:
                batch.sequences = []

    def drop_cancelled(self) -> None:
        """Let sequences leave whose clients went away."""
        for sequence in self.sequences:
            if sequence.is_cancelled:
                sequence.flush("cancelled")
        with self.isolated():
            self.keep([row for row, sequence in enumerate(self.sequences) if not sequence.is_cancelled])

    def _collect(self, members: Mapping[int, ServedSequence], rows: Sequence[SequenceRound]) -> None:
        for part in rows:
            members[part.row].rounds.append(part)
            if part.finish is not None:
                members[part.row].flush(part.finish)

    def _verify(self, predicted: Prediction, drafted: DraftResult) -> list[tuple[int, int]]:
        if self.is_argmax:
            return super()._verify(predicted, drafted)
        samplers = [sequence.sampler for sequence in self.sequences]
        verification = verify_drafts(samplers, predicted.logits, drafted.drafts)
        rows = zip(self.sequences, predicted.logits, drafted.drafts, verification, strict=True)
        for sequence, logits, drafts, (num_accepted, token) in rows:
            sequence.accept(logits, [*drafts[:num_accepted], token])
        return verification

    def _on_prompt(self, hidden: TrunkOutput, parts: Sequence[Sequence[int]]) -> None:
        """Keep the log probabilities of the prompt's next tokens where a request asks for them."""
        if not any(sequence.request.prompt_logprobs for sequence in self.sequences):
            return
        logits = self.trunk.read(hidden).logits
        for row, (sequence, part) in enumerate(zip(self.sequences, parts, strict=True)):
            if sequence.request.prompt_logprobs:
                following = sequence.tokens[self.num_prefilled + 1 :][: len(part)]
                sequence.prompt_logprobs += [
                    sequence.sampler.logprob(at, token) for at, token in zip(logits[row], following, strict=False)
                ]

    def _native_rounds(self, is_drafting: bool) -> WholeRounds | None:
        return super()._native_rounds(is_drafting) if self.is_argmax else None


class CoupledDrafter(Drafter):
    """Drafts with each sequence's own rule, which the trunk's tokens follow, too."""

    uses_native_chain = False

    def __init__(self, *args: object, sequences: Callable[[], Sequence[ServedSequence]], **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._sequences = sequences
        self._drafted: list[list[int]] = []

    def draft(self, plan: RoundPlan, limits: Sequence[int], *args: object, **options: object) -> DraftResult:
        self._drafted = [[] for _ in limits]
        return super().draft(plan, limits, *args, **options)  # type: ignore[arg-type]

    def sample_drafts(
        self, prediction: Prediction, seen: Tensor | None, uniforms: Tensor | None
    ) -> tuple[Tensor | None, list[int]]:
        samplers = [sequence.sampler for sequence in self._sequences()]
        tokens = choose_tokens(samplers, prediction.logits, self._drafted, are_drafts=True)
        for drafted, token in zip(self._drafted, tokens, strict=True):
            drafted.append(token)
        return None, tokens
