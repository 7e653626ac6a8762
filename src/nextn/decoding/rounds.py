"""Rounds: draft K tokens with the head, or copy them from the text, verify them in one trunk pass, and emit those
that are accepted and one bonus token.

Works on token ids and knows no tokenizer, chat template or stop string. Every other way to decode is built on `rounds`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from nextn.decoding.batch import DecodingBatch
from nextn.decoding.drafter import Drafter
from nextn.decoding.prompt_groups import prompt_groups
from nextn.decoding.records import BatchSequence, Observer, Round
from nextn.errors import ConfigError
from nextn.model.head import Head
from nextn.model.trunk import Trunk
from nextn.runtime.native import LOCK
from nextn.runtime.protocols import DecodingHead, DecodingTrunk
from nextn.runtime.torch_backend import TorchHead, TorchTrunk
from nextn.settings import Settings
from nextn.speculative.draft_policy import PROBE_INTERVAL, DraftLength, FixedLength, candidate_lengths
from nextn.speculative.sampling import Uniforms

Stop = Callable[[int, Sequence[int]], int | None]


def rounds(
    trunk: Trunk | DecodingTrunk,
    head: Head | DecodingHead | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    length: DraftLength | None = None,
    stop: Stop | None = None,
    observer: Observer | None = None,
    seed_offsets: Sequence[int] | None = None,
    make_drafter: Callable[..., Drafter] = Drafter,
) -> Iterator[Round]:
    """Decode all prompts as one batch; yield one Round per trunk pass, the first after the prefill (without drafts).

    Prompts of different lengths are prefilled apart where padding would cost more.

    Args:
        trunk: That of a backend (`backend_for`), or the module, which then runs in torch.
        head: The same; may be None if settings.num_speculative_tokens is 0.
        prompts: Token ids.
        settings: How to decode.
        length: Policy for the number of drafts per round, at most settings.num_speculative_tokens; None: always that
            many, ended early only by settings.p_min.
        stop: stop(row, new_tokens) -> the number of new tokens to keep, or None to continue.
        observer: Called with an Event for each pass and sequence.
        seed_offsets: Per prompt, what is added to the seed of its random numbers; None: its index.
        make_drafter: Factory for the drafter; called like `Drafter`.

    Yields:
        A Round for each pass of the trunk; its rows are in the order of the prompts, without sequences that are over.

    Raises:
        ConfigError: for an empty prompt, one or max_tokens that the context does not hold, token ids outside the
            vocabulary, or drafts without a head.

    Example:
        >>> model, settings = nextn.load("tiny"), nextn.Settings(num_speculative_tokens=2, max_tokens=4)
        >>> log = list(nextn.rounds(model.trunk, model.head, [[100, 101, 102]], settings))
        >>> sum(len(each.rows[0].emitted) for each in log)
        4
    """
    passes: DecodingTrunk = TorchTrunk(trunk) if isinstance(trunk, Trunk) else trunk
    head_passes: DecodingHead | None = TorchHead(head) if isinstance(head, Head) else head
    _check(passes, head_passes, prompts, settings)
    length = length or FixedLength(settings.num_speculative_tokens, settings.p_min)
    with LOCK:
        # torch fixes a thread's thread count at its first use. Do that here, under the lock: while another thread runs
        # a native round, the count is temporarily 1.
        torch.get_num_threads()
    sequences = _sequences(prompts, settings, range(len(prompts)) if seed_offsets is None else seed_offsets, stop)
    make_batch = partial(DecodingBatch, passes, head_passes, observer=observer, make_drafter=make_drafter)
    with passes.pass_context():
        batches = [
            make_batch([sequences[row] for row in group], settings, length)
            for group in _groups(passes, prompts, settings, can_join=make_drafter is Drafter)
        ]
    # Do not hold these across a `yield`: inference mode is per thread, and one thread may interleave several decodes.
    with torch.inference_mode(), passes.pass_context():
        fixed = isinstance(length, FixedLength) and not length.p_min
        prepare(passes, head_passes, len(prompts), settings.num_speculative_tokens, fixed=fixed)
        passes.prepare(len(prompts), [size + 1 for size in candidate_lengths(settings.num_copy_tokens)], exact=False)
        batch, result = _prefill(batches)
    yield _in_order(result)
    while batch.sequences:
        with torch.inference_mode(), passes.pass_context():
            result = batch.round()
        yield _in_order(result)


def _groups(
    trunk: DecodingTrunk, prompts: Sequence[Sequence[int]], settings: Settings, *, can_join: bool
) -> list[list[int]]:
    """Return which prompts are prefilled together: all where batches cannot join (own drafters know rows)."""
    if not can_join:
        return [list(range(len(prompts)))]
    chunk, is_cpu = min(settings.chunk, trunk.max_block_size or settings.chunk), trunk.device.type == "cpu"
    return prompt_groups(list(map(len, prompts)), chunk, on_cpu=is_cpu, one_by_one=trunk.records_passes)


def _prefill(batches: list[DecodingBatch]) -> tuple[DecodingBatch, Round]:
    """Prefill each batch and return all as one, with its first round."""
    started = time.perf_counter()
    for batch in batches:
        batch.prefill_prompts()
    while len(batches) > 1:  # in pairs: each sequence is copied a few times, however many there are
        for place in range(len(batches) // 2):
            batches[place].join(batches.pop(place + 1))
    batch = batches.pop()  # the caller's list keeps no caches
    return batch, batch.first_round(started)


def _in_order(result: Round) -> Round:
    return replace(result, rows=tuple(sorted(result.rows, key=lambda part: part.row)))


def _check(
    trunk: DecodingTrunk, head: DecodingHead | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> None:
    if not prompts:
        raise ConfigError("no prompt was given; expected at least one")
    check_head(head, settings)
    if trunk.max_length is not None and settings.max_tokens > trunk.max_length:
        expected = f"at most {trunk.max_length}, the context of this model"
        raise ConfigError(f"max_tokens = {settings.max_tokens}; expected {expected}")
    for row, prompt in enumerate(prompts):
        check_prompt(trunk, prompt, f"prompt {row}")


def _sequences(
    prompts: Sequence[Sequence[int]], settings: Settings, seed_offsets: Sequence[int], stop: Stop | None
) -> list[BatchSequence]:
    return [
        BatchSequence(
            row=row,
            tokens=list(prompt),
            max_tokens=settings.max_tokens,
            eos=settings.eos or (),
            uniforms=Uniforms(settings.seed * 2**20 + offset),
            stop=None if stop is None else partial(stop, row),
        )
        for row, (prompt, offset) in enumerate(zip(prompts, seed_offsets, strict=True))
    ]


def prepare(trunk: DecodingTrunk, head: DecodingHead | None, rows: int, k: int, *, fixed: bool = False) -> None:
    """Record passes for every block size that rounds of up to k drafts can need, so that no round waits for one.

    fixed: most rounds draft exactly k.
    """
    trunk.prepare(rows, [1, k + 1] if fixed else range(1, k + 2), exact=fixed)
    if head is not None and k:
        # Baseline rounds between two that draft leave their positions for the head to refresh.
        head.prepare(rows, range(1, k + 2 + (0 if fixed else PROBE_INTERVAL)))


def check_head(head: DecodingHead | None, settings: Settings) -> None:
    """Raise ConfigError for drafts without a head."""
    if settings.num_speculative_tokens and head is None:
        raise ConfigError(
            f"num_speculative_tokens = {settings.num_speculative_tokens}, but the checkpoint has no head; "
            "use 0 or add a head"
        )


def check_prompt(trunk: DecodingTrunk, prompt: Sequence[int], name: str) -> None:
    """Raise ConfigError for a prompt that cannot be decoded. name: What the error calls it."""
    if not prompt:
        raise ConfigError(f"{name} is empty; expected at least one token")
    if trunk.max_length is not None and len(prompt) >= trunk.max_length:
        raise ConfigError(
            f"{name} has {len(prompt)} tokens; the context holds {trunk.max_length}, of which at least one must be new"
        )
    if not 0 <= min(prompt) <= max(prompt) < trunk.vocab_size:
        raise ConfigError(
            f"{name} has token ids {min(prompt)}..{max(prompt)}; "
            f"the model's vocabulary is 0..{trunk.vocab_size - 1}: use this model's tokenizer"
        )
