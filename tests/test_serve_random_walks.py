"""Random walks of the scheduler: arrivals, joins, cancellations, cached prefixes and drafting that goes on and off.

Whatever happens, greedy texts are those of the same requests alone, and the head's caches those of a cold start.
"""

import random
from dataclasses import replace

import pytest
import torch
from quick import case
from scheduled import Answers, Switched, Text, alone, scheduler_of
from tiny import build, prompt, refrain

from nextn.decoding import batch as batch_module
from nextn.runtime.backend import backend_for
from nextn.serve import scheduler as scheduler_module
from nextn.serve.request import GenerationRequest
from nextn.serve.served_batch import ServedBatch, ServedSequence
from nextn.settings import Sampling
from nextn.speculative.draft_policy import FixedLength

TILE = 32  # positions whose order in a cache is up to the kernels
K = 3


class Walk:
    """Requests that share beginnings, with what happens to them chosen by a seed."""

    def __init__(self, model, rows, seed, *, num_requests=20):
        self.model, self.rows, self.random = model, rows, random.Random(seed)
        self.policy, self.checked = Switched(K), set()
        self.requests = {name: self.request(name) for name in range(num_requests)}
        scheduler = scheduler_of(
            model,
            length=lambda num_sequences: self.policy,
            max_num_seqs=self.random.choice([2, 4, 6]),
            max_model_len=1000,
            num_speculative_tokens=K,
            prefix_bytes=self.random.choice([500_000, 10**8]),
        )
        self.answers = Answers(scheduler)

    def request(self, name):
        row = self.random.choice(self.rows)
        size = self.random.choice([self.random.randint(1, 40), *(self.random.randint(len(row) // 3, len(row)),) * 2])
        options = [{}, {}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 2}, {"stop_token_ids": (3,)}]
        options += [{"sampling": Sampling(1.0), "seed": name}, {"cache_salt": "a"}, {"frequency_penalty": 0.3}]
        chosen = self.random.choice(options)
        return GenerationRequest(tuple(row[:size]), max_tokens=self.random.randint(1, 60), **chosen)

    def run(self):
        waiting, scheduler = list(self.requests), self.answers.scheduler
        while waiting or not scheduler.is_idle:
            while waiting and self.random.random() < 0.3:
                name = waiting.pop()
                self.answers.add(name, self.requests[name])
            if self.random.random() < 0.08:
                self.policy.is_off = not self.policy.is_off
            if self.random.random() < 0.03:
                self.random.choice([*self.answers.sequences.values(), Cancelled()]).is_cancelled = True
            scheduler.step()
            for batch in scheduler._batches:
                check_lengths(batch)
                self.check_sequences(batch)

    def check_sequences(self, batch):
        """Each one after its prompt has left the cache of prefixes, and once in a while."""
        for row, sequence in enumerate(batch.sequences):
            is_late = self.random.random() < 0.02
            if batch.drafter is not None and (is_late or (sequence.new and sequence not in self.checked)):
                self.checked.add(sequence)
                self.check_head(batch, row)

    def check_head(self, batch, row):
        """What the MTP layers have of a sequence is what they have after a cold start with the same tokens."""
        cold = prefilled(self.model, batch.sequences[row].tokens)
        for mine, theirs in zip(batch.drafter.caches, cold.drafter.caches, strict=True):
            end = min(mine.lengths[row], theirs.lengths[0]) // TILE * TILE
            for found, expected in zip(mine._slices(end), theirs._slices(end), strict=True):
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one[row], other[0], atol=1e-4, rtol=1e-4)


class Cancelled:
    """No request."""

    is_cancelled = False


def check_lengths(batch):
    """The head has processed, or keeps for later, each position that the trunk has seen."""
    if batch.drafter is None or not batch.sequences:
        return
    pending = batch.drafter.pending
    if batch.native is not None:
        native = batch.native.pending()
        both = zip(pending, native, strict=True)
        pending = native if batch.native.can_draft else [torch.cat(each) for each in both]
    for cache in batch.drafter.caches:
        counts = [length + len(states) for length, states in zip(cache.lengths, pending, strict=True)]
        assert counts == batch.cache.lengths


def prefilled(model, tokens):
    backend = backend_for(model)
    sequence = ServedSequence.of(GenerationRequest(tuple(tokens)), [].append, Text(), 0)
    batch = ServedBatch(backend.trunk, backend.head, sequence, num_speculative_tokens=K, length=FixedLength(K))
    with torch.inference_mode(), backend.trunk.pass_context():
        while not batch.prefill_chunk(64):
            pass
    return batch


def texts_of(name, trained):
    if name == "qwen3_5":  # its blocks of prefixes have 256 positions
        return build(name, vocab_size=64), [prompt(580, seed=seed) for seed in range(2)]
    return trained[name], refrain(3, 300, seed=5).tolist()


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        case(name, seed, quick=seed == index % 2)
        for index, name in enumerate(("glm_one", "glm_two", "qwen3_5"))
        for seed in range(12)
    ],
)
def test_what_happens_to_others_changes_nothing(trained, monkeypatch, name, seed):
    model, rows = texts_of(name, trained)
    monkeypatch.setattr(batch_module, "MAX_DEFERRED", (100, 512)[seed % 2])
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", (0.0, 0.001)[seed // 2 % 2])
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    walk = Walk(model, rows, seed)
    walk.run()
    plain = {key: replace(request, num_speculative_tokens=0) for key, request in walk.requests.items()}
    expected = alone(model, plain, max_model_len=1000)
    for key, sequence in walk.answers.sequences.items():
        found = walk.answers.text(key)
        assert walk.answers.chunks[key][-1].finish in ("cancelled", "eos", "length")
        assert found == expected[key][: len(found) if sequence.is_cancelled else None]
