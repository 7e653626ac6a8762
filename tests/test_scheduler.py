"""The scheduler and its engine: what a request gets does not depend on its neighbors, on K, or on cached prefixes."""

import math
import re
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from quick import each_once, families, others_slow
from scheduled import Answers, Clock, Switched, Text, alone, scheduler_of
from tiny import CONFIGS, build, prompt, refrain

from nextn.cache.kv_cache import KVCache
from nextn.errors import ConfigError, QueueFullError
from nextn.runtime.backend import backend_for
from nextn.runtime.native.passes import Passes
from nextn.serve import scheduler as scheduler_module
from nextn.serve.engine import ServingEngine, bytes_per_sequence, limits_within, reduced_context_note
from nextn.serve.options import EngineOptions
from nextn.serve.prefix_cache import PrefixCache
from nextn.serve.request import GenerationChunk, GenerationRequest
from nextn.serve.scheduler import DraftPolicies, Group
from nextn.serve.served_batch import ServedBatch, ServedSequence
from nextn.settings import Sampling
from nextn.speculative.draft_policy import FixedLength

KINDS = (
    {},
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 2},
    {"sampling": Sampling(temperature=1.0)},
    {"sampling": Sampling(temperature=0.7, top_p=0.9, top_k=20), "num_speculative_tokens": 0},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logprobs": 2},
)


def observe(scheduler):
    """The list of what the caches take after each step."""
    sizes, step = [], scheduler.step

    def observed():
        step()
        sizes.append(scheduler.num_cache_bytes)

    scheduler.step = observed
    return sizes


def requests_of(model, count, *, lengths=(3, 17, 40, 70, 130), **options):
    rows = refrain(count, max(lengths), seed=4).tolist()
    return {
        index: GenerationRequest(
            prompt=tuple(rows[index][: lengths[index % len(lengths)]]), max_tokens=(6, 14, 25)[index % 3], seed=index,
            **(KINDS[index % len(KINDS)] | options),
        )
        for index in range(count)
    }  # fmt: skip


MODELS = [("glm_two", "auto"), ("glm_one", "torch"), ("qwen", "auto"), ("step", "auto")]


@pytest.mark.more
@pytest.mark.parametrize(("name", "backend"), others_slow(MODELS, *MODELS[1:3]))
def test_neighbors_change_nothing(trained, name, backend):
    """Every kind of request beside every other, arriving at different times: what it gets alone, and without drafts."""
    model = trained[name]
    requests = requests_of(model, 14)
    arrivals = {}
    for index, request in requests.items():
        arrivals.setdefault(index // 3 * 2, []).append((index, request))
    found = Answers(scheduler_of(model, backend=backend, max_num_seqs=6, prefix_bytes=10**8)).run(arrivals)
    assert found == alone(model, requests, backend=backend)
    plain = {index: replace(request, num_speculative_tokens=0) for index, request in requests.items()}
    assert found == alone(model, plain, backend=backend)


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "backend"), [("glm_two", "auto"), ("qwen", "auto"), ("glm_one", "torch")])
def test_copies_change_nothing(trained, name, backend):
    """Beside a head and without, for every kind of request and from cached prefixes; those that set K copy nothing."""
    model = trained[name]
    biased = replace(requests_of(model, 1, lengths=(70,))[0], max_tokens=40, logit_bias={3: 0.5, 5: -0.5})
    requests = requests_of(model, 9) | {9: biased}
    plain = alone(model, requests, backend=backend, num_speculative_tokens=0)
    for k in (3, 0):
        options = {"num_speculative_tokens": k, "num_copy_tokens": 8, "max_num_seqs": 6, "prefix_bytes": 10**8}
        answers = Answers(scheduler_of(model, backend=backend, **options))
        for turn in range(2):  # the second time from cached prefixes
            answers.run({0: [((turn, index), request) for index, request in requests.items()]})
        assert {each: answers.text(each) for each in answers.chunks} == {
            (turn, each): plain[each] for turn in range(2) for each in plain
        }
        copied = {
            index
            for (_, index), chunks in answers.chunks.items()
            if any(each.copied and each.num_accepted for chunk in chunks for each in chunk.rounds)
        }
        assert 9 in copied
        assert not [name for name in copied if requests[name].num_speculative_tokens is not None]


@pytest.mark.more
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_recurrent_trunk(backend):
    """The state of a sequence that joins, leaves, or continues from a prefix is its own."""
    model = build("qwen3_5", vocab_size=64)
    shared = prompt(300, seed=1)
    requests = {
        index: GenerationRequest(prompt=(*shared[: (300, 40, 280)[index % 3]], index), max_tokens=6 + index % 5, **kind)
        for index, kind in enumerate(KINDS)
    }
    running = Answers(scheduler_of(model, backend=backend, max_num_seqs=4, prefix_bytes=10**9))
    found = running.run({index * 5: [(index, request)] for index, request in requests.items()})
    assert running.scheduler.prefix_cache.num_hits >= 256
    assert found == alone(model, requests, backend=backend)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "kind"), [("glm_two", "auto"), ("glm_one", "auto"), ("qwen", "auto"), ("glm_two", "int8")]
)
def test_prefixes_change_neither_text_nor_drafts(trained, monkeypatch, name, kind):
    """After a hit the head's cache is that of a cold start: the same drafts are accepted."""
    model = trained[name]
    monkeypatch.setattr(model.trunk, "kv_cache_dtype", kind)
    shared = refrain(1, 200, seed=9).tolist()[0]
    base = GenerationRequest(prompt=(), max_tokens=30, num_speculative_tokens=3)
    requests = {size: replace(base, prompt=tuple(shared[:size])) for size in (200, 140, 64, 65, 129)}
    requests["other"] = replace(base, prompt=(*shared[:130], 1, 2, 3, 4))
    requests["again"] = requests[200]
    warm = Answers(scheduler_of(model, prefix_bytes=10**8))
    for key, request in requests.items():
        warm.run({0: [(key, request)]})
    for key, request in requests.items():
        cold = Answers(scheduler_of(model))
        cold.run({0: [(key, request)]})
        assert warm.rounds(key) == cold.rounds(key), key
    cached = {key: warm.chunks[key][0].cached_tokens for key in requests}
    block = warm.scheduler.prefix_cache.block_size
    assert block == (256 if name == "qwen" else 64)
    expected = {200: 0, 140: 128, 64: 0, 65: 64, 129: 128, "other": 128, "again": 192}
    assert cached == {key: size // block * block for key, size in expected.items()}
    stats = warm.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (
        sum(len(request.prompt) for request in requests.values()), sum(cached.values()),
    )  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        ("glm_two", "auto", "native"),
        ("glm_one", "auto", "native"),
        ("glm_one", "int8", "native"),
        ("glm_two", "auto", "torch"),
        ("glm_one", "auto", "torch"),
    ],
)
def test_restored_caches_are_those_of_a_cold_start(trained, monkeypatch, name, kind, backend):
    """Bit for bit on the native backend, also around the end of a block after which another prompt went on otherwise.

    torch sums in another order for another number of rows. Two sums of n terms differ by at most n roundings each;
    here n is at most the terms of all matrix products that a value passes through, and a value at most the largest.
    """
    monkeypatch.setattr(trained[name].trunk, "kv_cache_dtype", kind)
    model, backend = trained[name], backend_for(trained[name], backend)
    weights = [each for part in (model.trunk.model, model.head) for each in part.parameters() if each.ndim > 1]
    bound = 0 if backend.name == "native" else torch.finfo(torch.float32).eps * sum(each.shape[-1] for each in weights)
    prefixes = PrefixCache.of(backend, 10**8)
    tokens = tuple(prompt(210, vocab_size=40))
    other = (*tokens[:64], *prompt(70, seed=1, vocab_size=40))
    cold = prefilled(backend, tokens, PrefixCache.of(backend, 10**8))
    cached = [prefilled(backend, each, prefixes) for each in (other, tokens, tokens)]
    assert [batch.sequences[0].cached_tokens for batch in cached] == [0, 64, 192]
    for mine, theirs in zip(caches_of(cold), caches_of(cached[-1]), strict=True):
        for expected, found in zip(mine.read_block(0, 192), theirs.read_block(0, 192), strict=True):
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=bound * float(one.abs().max()))


@pytest.mark.more
@pytest.mark.parametrize("name", others_slow(["glm_two", "glm_one", "qwen", "step"], "glm_two", "qwen"))
def test_prefixes_on_the_torch_backend(trained, name):
    """Attention, and recurrent layers with attention: text and accepted drafts are those of a cold start."""
    shared = tuple(refrain(1, 300, seed=9).tolist()[0])
    prompts = [shared, shared[:280], (*shared[:270], 1, 2, 3), shared[:60], shared[:257], shared]
    requests = [GenerationRequest(each, max_tokens=16, num_speculative_tokens=3) for each in prompts]
    warm = Answers(scheduler_of(trained[name], backend="torch", prefix_bytes=10**8))
    for key, request in enumerate(requests):
        warm.run({0: [(key, request)]})
        cold = Answers(scheduler_of(trained[name], backend="torch"))
        cold.run({0: [(key, request)]})
        assert warm.rounds(key) == cold.rounds(key), key
    block = 256 if name == "qwen" else 64
    cached = [warm.chunks[key][0].cached_tokens for key in range(len(requests))]
    assert cached == [0, 256, 256, 0, 256, 299 // block * block]
    assert any(accepted for key in range(len(requests)) for _, accepted, _ in warm.rounds(key))
    prefixes = warm.scheduler.prefix_cache
    assert prefixes.nbytes == sum(node.block.nbytes for node in prefixes._nodes)
    restarted = warm.scheduler.restarted().prefix_cache
    assert (restarted.nbytes, restarted.max_positions) == (0, prefixes.max_positions)


WITHOUT_BLOCKS = {
    "deepseek_v4", "deepseek_v32", "glm_moe_dsa", "hy_v4", "glm5_next", "qwen4_exp", "minimax_m3", "inkling",
    "dots3_note",
}  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("name", families([name for name in CONFIGS if name not in WITHOUT_BLOCKS], {"nemotron_h"}))
def test_prefixes_of_every_family_on_the_torch_backend(name):
    """Untrained, so that texts depend on the whole prompt: those of a cold start, with and without drafts."""
    model, shared = build(name), tuple(prompt(300, vocab_size=40))
    warm = Answers(scheduler_of(model, backend="torch", prefix_bytes=10**8))
    cases = (shared, 3), (shared[:290], 3), ((*shared[:260], 1), 3), (shared, 0), (shared[:290], 0)
    for key, (tokens, k) in enumerate(cases):
        request = GenerationRequest(tokens, max_tokens=12, num_speculative_tokens=k)
        cold = Answers(scheduler_of(model, backend="torch"))
        warm.run({0: [(key, request)]})
        cold.run({0: [(key, request)]})
        assert warm.rounds(key) == cold.rounds(key), key
    assert [warm.chunks[key][0].cached_tokens for key in range(5)] == [0, 256, 256, 0, 256]


@pytest.mark.parametrize("name", families(CONFIGS, {"deepseek_v4", "deepseek_v32", "inkling"}))
def test_caches_without_blocks_have_no_prefix_cache(name):
    """Their layers hold more than keys and values; all of the memory is for sequences. All others have one."""
    backend = backend_for(build(name), "torch")
    has_none = name in WITHOUT_BLOCKS
    assert (PrefixCache.of(backend, 10**8) is None) == has_none
    limits = limits_within(backend, EngineOptions("torch", max_num_seqs=2, cache_gb=0.1))
    assert (limits.prefix_bytes == 0) == has_none


@pytest.mark.parametrize("name", ["qwen3_5", "bailing_hybrid", "nemotron_h"])
def test_restored_states_are_those_of_a_cold_start(name):
    """Of recurrent layers in torch: convolution and recurrent states, and still so when the block is used again."""
    backend = backend_for(build(name, vocab_size=64), "torch")
    prefixes, tokens = PrefixCache.of(backend, 10**8), tuple(prompt(257))  # steps of one position may write in place
    with torch.inference_mode():
        cold, *cached = [prefilled(backend, tokens, prefixes) for _ in range(3)]
    assert [batch.sequences[0].cached_tokens for batch in cached] == [256, 256]
    for batch in cached:
        for mine, theirs in zip(caches_of(cold), caches_of(batch), strict=True):
            end = 257 if mine is cold.cache else 255  # the head processes the block's last position after it
            for expected, found in zip(mine.read_block(0, end), theirs.read_block(0, end), strict=True):
                assert all(map(torch.equal, expected, found))


def prefilled(backend, tokens, prefixes):
    sequence = ServedSequence.of(GenerationRequest(prompt=tokens), [].append, Text(), 0)
    batch = ServedBatch(backend.trunk, backend.head, sequence, num_speculative_tokens=3, length=FixedLength(3))
    sequence.cached_tokens = prefixes.restore(batch)
    while not batch.prefill_chunk(64):
        prefixes.store(batch)
    return batch


def caches_of(batch):
    return [batch.cache, *batch.drafter.caches]


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "backend"), each_once(["glm_two", "glm_one"], ["native", "torch"]))
def test_prefixes_that_the_head_has_not_seen(trained, name, backend):
    """Requests without drafts leave them to the first one that drafts; its drafts are those of a cold start."""
    policy, shared = Switched(3), tuple(refrain(1, 200, seed=9).tolist()[0])
    requests = {
        key: GenerationRequest(prompt=(*shared[:size], *tail), max_tokens=30)
        for key, size, tail in ((0, 70, ()), (1, 140, ()), (2, 200, ()), (3, 140, (1, 2)), (4, 200, ()))
    }
    options = {"backend": backend, "length": lambda num_sequences: policy}
    warm = Answers(scheduler_of(trained[name], prefix_bytes=10**8, **options))
    prefixes, blocks = warm.scheduler.prefix_cache, []
    for key, request in requests.items():
        policy.is_off = key < 2
        warm.run({0: [(key, request)]})
        blocks.append([node.block.heads is not None for node in prefixes._nodes])
        assert prefixes.nbytes == sum(node.block.nbytes for node in prefixes._nodes)
    assert blocks == [[False], [False] * 2, *[[True] * 3] * 3]
    assert {len(node.block.states) for node in prefixes._nodes} == {warm.scheduler._backend.head.num_modules}
    assert [warm.chunks[key][0].cached_tokens for key in requests] == [0, 64, 128, 128, 192]
    policy.is_off = False
    for key in (2, 3, 4):
        cold = Answers(scheduler_of(trained[name], **options))
        cold.run({0: [(key, requests[key])]})
        assert warm.rounds(key) == cold.rounds(key)


@pytest.mark.one_case
@pytest.mark.parametrize("more", [0, 10**6])
def test_completed_prefixes_stay_within_memory(more):
    """What three MTP layers add needs more memory than the states do; without it, blocks stay as they are."""
    policy, request = Switched(3), GenerationRequest(prompt=tuple(prompt(200)), max_tokens=3)
    model = build("glm4_moe", modules=3)
    answers = Answers(scheduler_of(model, prefix_bytes=10**8, length=lambda num_sequences: policy))
    answers.run({0: [(0, request)]})
    prefixes, policy.is_off = answers.scheduler.prefix_cache, False
    before = prefixes.nbytes
    prefixes.max_bytes = before + more
    answers.run({0: [(1, request)]})
    assert answers.text(0) == answers.text(1)
    assert prefixes.nbytes == sum(node.block.nbytes for node in prefixes._nodes) <= prefixes.max_bytes
    assert (prefixes.nbytes > before) == (more > 0)


@pytest.mark.more
def test_prompts_leave_the_head_alone_while_nothing_is_drafted(trained):
    """By the policy for as many sequences as will soon run."""
    asked = []

    def length(num_sequences):
        asked.append(num_sequences)
        return FixedLength(0 if num_sequences > 1 else 3)

    answers = Answers(scheduler_of(trained["glm_two"], clock=Clock(), length=length))
    for name in range(2):
        answers.add(name, GenerationRequest(prompt=tuple(prompt(100, vocab_size=40)), max_tokens=3))
    answers.scheduler._admit()
    assert asked == [2, 2]
    with torch.inference_mode():
        batches = list(answers.scheduler._prefilling)
        for batch in batches:
            batch.prefill_chunk(64)
    assert [batch.drafter.num_pending for batch in batches] == [64, 64]


def test_salts_separate_prefixes(trained):
    """Nobody can find out by the time of an answer what others have asked under another salt."""
    answers = Answers(scheduler_of(trained["glm_two"], prefix_bytes=10**8))
    request = GenerationRequest(prompt=tuple(prompt(130, vocab_size=40)), max_tokens=2)
    cached = []
    for name, salt in enumerate(["", "", "a", "b", "a"]):
        answers.run({0: [(name, replace(request, cache_salt=salt))]})
        cached.append(answers.chunks[name][0].cached_tokens)
    assert cached == [0, 128, 0, 0, 128]


def test_prefix_cache_is_bounded(trained):
    """The least recently used blocks leave; the one that many prompts share stays."""
    model = trained["glm_two"]
    # Where nothing is drafted for a while, blocks have no part of the head, and more of them fit.
    answers = Answers(scheduler_of(model, prefix_bytes=10**8, length=lambda _: FixedLength(4)))
    shared = tuple(prompt(64, seed=0, vocab_size=40))
    answers.run({0: [("first", GenerationRequest(prompt=(*shared, 1), max_tokens=2))]})
    cache = answers.scheduler.prefix_cache
    cache.max_bytes = 4 * cache.nbytes
    for index in range(8):
        tail = prompt(64, seed=index + 1, vocab_size=40)
        answers.run({0: [(index, GenerationRequest(prompt=(*shared, *tail, 1), max_tokens=2))]})
        assert answers.chunks[index][0].cached_tokens == 64
        assert cache.nbytes <= cache.max_bytes
    assert cache.num_positions in (2 * 64, 3 * 64)
    answers.run({0: [("last", GenerationRequest(prompt=(*shared, *tail, 1), max_tokens=2))]})
    assert answers.chunks["last"][0].cached_tokens == 128


@pytest.mark.more
def test_streams_flow_during_a_long_prefill(trained, monkeypatch):
    """Between two chunks of a running stream, a prefill takes about as long as the rounds do."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)  # one round a step, however fast the machine is
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    model = trained["glm_two"]
    answers = Answers(scheduler_of(model, clock=Clock(), max_model_len=4000))
    answers.add("stream", GenerationRequest(prompt=tuple(prompt(5)), max_tokens=600))
    for _ in range(3):
        answers.scheduler.step()
    answers.add("long", GenerationRequest(prompt=tuple(prompt(3000, vocab_size=40)), max_tokens=3))
    steps = []
    while not answers.chunks["long"]:
        answers.scheduler.step()
        if not answers.sequences["stream"].is_over:
            steps.append(len(answers.chunks["stream"]))
    assert len(steps) > 20
    assert all(after == before + 1 for before, after in pairwise(steps))


@pytest.mark.parametrize("arrives", [False, True])
def test_rounds_end_when_a_request_arrives(trained, monkeypatch, arrives):
    """After the current one, however long they could go on."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 60.0)
    answers = Answers(scheduler_of(trained["glm_two"], backend="torch", has_arrivals=lambda: arrives))
    answers.add(0, GenerationRequest(prompt=tuple(prompt(5, vocab_size=40)), max_tokens=40))
    answers.scheduler.step()  # the prompt
    answers.scheduler.step()
    assert (len(answers.rounds(0)) == 2) == arrives
    assert (len(answers.text(0)) == 40) != arrives


def test_the_least_recently_used_block_leaves(trained):
    """Use is also what a request takes from the cache without adding to it."""
    answers = Answers(scheduler_of(trained["glm_two"], prefix_bytes=10**8))
    prompts = [tuple(prompt(66, seed=seed, vocab_size=40)) for seed in range(3)]
    cached = []
    for name, index in enumerate((0, 1, 0, 2, 0, 1)):
        answers.run({0: [(name, GenerationRequest(prompt=prompts[index], max_tokens=2))]})
        cached.append(answers.chunks[name][0].cached_tokens)
        if name == 1:
            answers.scheduler.prefix_cache.max_bytes = answers.scheduler.prefix_cache.nbytes
    assert cached == [0, 0, 64, 0, 64, 0]


def test_prefixes_with_and_without_a_head_are_separate(trained):
    answers, ks = Answers(scheduler_of(trained["glm_two"], prefix_bytes=10**8)), (0, 3, 3, 0)
    request = GenerationRequest(prompt=tuple(prompt(140, vocab_size=40)), max_tokens=20)
    for name, k in enumerate(ks):
        answers.run({0: [(name, replace(request, num_speculative_tokens=k))]})
    assert [answers.chunks[name][0].cached_tokens for name in range(4)] == [0, 0, 128, 128]
    assert answers.rounds(1) == answers.rounds(2)
    assert answers.text(0) == answers.text(1) == answers.text(3)


def test_rounds_end_when_a_sequence_does(trained, monkeypatch):
    """However long they could go on: its place is used at once."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 60.0)
    answers = Answers(scheduler_of(trained["glm_two"], backend="torch", max_num_seqs=2))
    for name, max_tokens in enumerate((5, 40, 40)):
        answers.add(name, GenerationRequest(prompt=tuple(prompt(5, vocab_size=40)), max_tokens=max_tokens))
    while not answers.sequences[0].is_over:
        answers.scheduler.step()
        assert answers.scheduler.stats().num_running <= 2
    assert not answers.sequences[1].is_over
    answers.scheduler.step()
    assert answers.chunks[2]


def test_policies_share_what_is_accepted():
    """Costs are those of a batch size, the acceptance is that of all; other groups have their own."""
    policies = DraftPolicies()
    one, many = (policies.policy(Group(True, 3, True, 0), count) for count in (1, 16))
    assert one.policy is many.policy is not policies.policy(Group(False, 3, True, 0), 1).policy
    assert (
        policies.policy(Group(True, 3, False, 0), 1) == policies.expected(Group(True, 3, False, 0), 1) == FixedLength(3)
    )
    for size, seconds in ((1, {0: 1.0, 3: 1.1}), (16, {0: 1.0, 3: 9.0})):
        one.policy.costs.set(size, seconds)
    assert [policies.expected(Group(True, 3, True, 0), count) for count in (1, 16)] == [FixedLength(3), FixedLength(0)]


def test_a_batch_that_grows_beyond_where_drafts_pay_stops_drafting_at_once(trained):
    """While the prompt of the second sequence is processed, the first one drafts only if two would, or by copies.

    A prompt that is sampled joins another batch.
    """
    for fastest, num_copies, temperature in ((0, 0, 0.0), (1, 0, 0.0), (0, 4, 0.0), (0, 0, 1.0)):
        scheduler = scheduler_of(
            trained["glm_two"], length=lambda _: FixedLength(2), max_model_len=1000, num_copy_tokens=num_copies
        )
        expected = {1: FixedLength(0), 2: FixedLength(fastest)}  # one sequence drafts all the same, as in a probe
        scheduler._policies.expected = lambda _, count, expected=expected: expected[count]
        answers = Answers(scheduler)
        answers.add("first", GenerationRequest(tuple(prompt(5, vocab_size=40)), max_tokens=900))
        while len(answers.rounds("first")) < 4:
            scheduler.step()
        sampling, rest = Sampling(temperature), tuple(prompt(300, vocab_size=40))
        answers.add("long", GenerationRequest(rest, sampling, max_tokens=4))
        before = len(answers.rounds("first"))
        while not answers.rounds("long"):
            scheduler.step()
        drafts = [len(each[0]) for each in answers.rounds("first")]
        assert 0 not in drafts[1:before]
        stays = fastest or temperature
        assert set(drafts[before:]) == {2 if stays else 0} or (num_copies and 0 not in drafts[before:])


def test_chunks_of_any_sizes_end_where_blocks_end(trained):
    """Else the prefix cache could not keep them."""
    scheduler = scheduler_of(trained["glm_two"], clock=lambda: 0.0, prefix_bytes=10**8)
    answers, rows = Answers(scheduler), refrain(2, 390, seed=4).tolist()
    answers.add(0, GenerationRequest(prompt=tuple(rows[0][:9]), max_tokens=300))
    while not scheduler._running:
        scheduler.step()
    slow = 1.05 * scheduler_module._AHEAD_S
    scheduler._chunk_s = {64: slow, 32: slow, 16: 0.0}
    answers.add(1, GenerationRequest(prompt=tuple(rows[1]), max_tokens=1))
    while not answers.chunks[1]:
        scheduler.step()
    assert scheduler.prefix_cache.num_positions == 384


@pytest.mark.parametrize("waiting", [1, 4])
def test_several_prompts_get_more_time(trained, monkeypatch, waiting):
    """Between two rounds of a running stream: as many times what the rounds took as prompts are waiting."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    answers = Answers(scheduler_of(trained["glm_two"], clock=Clock(), max_model_len=4000))
    answers.add("stream", GenerationRequest(prompt=tuple(prompt(5)), max_tokens=600))
    answers.scheduler.step()
    answers.scheduler.step()
    for index in range(waiting):
        answers.add(index, GenerationRequest(prompt=tuple(prompt(1000, vocab_size=40)), max_tokens=3))
    answers.scheduler.step()
    positions = sum(batch.num_prefilled for batch in answers.scheduler._prefilling)
    one_chunk = 64 if waiting == 1 else 4 * 64
    assert 16 <= positions <= one_chunk
    assert (positions > 64) == (waiting > 1)


def test_ends(trained):
    """At a stop string, an end token, and the limit: with the reason, in the middle of accepted drafts, too."""
    model = trained["glm_two"]
    row = refrain(1, 60, seed=4).tolist()[0]
    (text,) = alone(model, {0: GenerationRequest(prompt=tuple(row[:30]), max_tokens=20)}).values()
    for index in range(20):
        if text[index] in text[:index]:
            continue
        answers = Answers(scheduler_of(model))
        request = GenerationRequest(prompt=tuple(row[:30]), max_tokens=20, stop_token_ids=(text[index],))
        assert answers.run({0: [(0, request)]})[0] == text[: index + 1]
        assert answers.chunks[0][-1].finish == "eos"
    answers = Answers(scheduler_of(model))
    answers.run({0: [(0, GenerationRequest(prompt=tuple(row[:30]), max_tokens=20, stop=("x",)))]})
    assert answers.text(0) == (text[: text.index(7) + 1] if 7 in text else text)
    assert answers.chunks[0][-1].finish == ("stop" if 7 in text else "length")


def test_shorter_prompts_are_soon_done(trained, monkeypatch):
    """Beside a long one, which does not starve."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)
    answers = Answers(scheduler_of(trained["glm_two"], clock=Clock(), max_model_len=4000, max_num_seqs=8))
    sizes = {"long": 1500, **dict.fromkeys(range(5), 70)}
    for name, size in sizes.items():
        answers.add(name, GenerationRequest(prompt=tuple(prompt(size, vocab_size=40)), max_tokens=2))
    first: list[object] = []
    while len(first) < len(sizes):
        answers.scheduler.step()
        first += [name for name in sizes if answers.chunks[name] and name not in first]
    assert first[-1] == "long"
    assert answers.run()


@pytest.mark.more
def test_memory_is_bounded_while_kinds_of_requests_alternate(trained, monkeypatch):
    """Batches give back what sequences that left have used, when it is needed; texts stay the same."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    model = trained["glm_two"]
    backend = backend_for(model)
    limits = limits_within(backend, EngineOptions(max_num_seqs=4, max_model_len=256, cache_gb=0.01))
    per_position, _ = bytes_per_sequence(backend)
    bound = (limits.max_num_seqs + 1) * limits.max_model_len * per_position
    requests = {
        (wave, index): GenerationRequest(
            prompt=tuple(prompt(150 + index, vocab_size=40)), max_tokens=90 if index == 3 else 20,
            num_speculative_tokens=wave,
        )
        for wave in range(4) for index in range(4)
    }  # fmt: skip
    arrivals = {25 * wave: [(key, requests[key]) for key in requests if key[0] == wave] for wave in range(4)}
    most = {}
    for limit in (math.inf, bound):
        answers = Answers(scheduler_of(model, clock=Clock(), max_num_seqs=4, max_model_len=256, cache_bytes=limit))
        sizes = observe(answers.scheduler)
        assert answers.run(arrivals) == alone(model, requests)
        most[limit] = max(sizes)
    chunk = 64 * per_position  # that came after the last look
    assert most[bound] <= bound + chunk < most[math.inf]


def stored_bytes(value, seen):
    """Bytes of all tensors' memory that can be reached from a cache, whatever its class says of itself."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        is_new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if is_new else 0
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(stored_bytes(each, seen) for each in value)
    return stored_bytes(vars(value), seen) if "Layer" in type(value).__name__ or isinstance(value, KVCache) else 0


@pytest.mark.parametrize("name", families(CONFIGS, {"deepseek_v4", "qwen3_5", "inkling"}))
def test_caches_of_the_torch_backend_take_the_estimated_bytes(name, monkeypatch):
    """Of every layer type: at the full length, together and one by one, before and after they join."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    model, length, k = build(name), 100, 2
    per_position, per_state = bytes_per_sequence(backend_for(model, "torch"))
    kinds = {}, {}, {"num_speculative_tokens": 0}
    limits = {"max_model_len": length, "max_num_seqs": len(kinds), "num_speculative_tokens": k}
    answers = Answers(scheduler_of(model, backend="torch", length=lambda num_sequences: FixedLength(k), **limits))
    for index, kind in enumerate(kinds):
        size = 66 + 12 * index
        tokens = tuple(prompt(size, seed=index, vocab_size=40))
        answers.add(index, GenerationRequest(tokens, max_tokens=length - size, **kind))
    most = 0
    while not answers.scheduler.is_idle:
        answers.scheduler.step()
        caches = [each for batch in answers.scheduler._batches for each in batch._caches]
        stored = stored_bytes(caches, set())
        counted = answers.scheduler.num_cache_bytes
        assert 0.4 * counted <= stored <= counted
        most = max(most, counted)
    assert most <= len(kinds) * ((length + k + 1) * per_position + per_state)
    assert most > 0.6 * len(kinds) * length * per_position


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_memory_bounds_the_context(trained, backend):
    """On every backend: --cache-gb, or what does not fit is refused."""
    made = backend_for(trained["glm_two"], backend)
    per_position, per_state = bytes_per_sequence(made)
    options = EngineOptions(backend, max_num_seqs=64, cache_gb=0.01)
    limits = limits_within(made, options)
    assert limits.prefix_bytes == 0.25 * 10**7
    needed = 65 * (limits.max_model_len * per_position + per_state) + limits.prefix_bytes
    assert 0.95 * 10**7 < needed <= 10**7
    with pytest.raises(ConfigError, match=f"64 sequences of {limits.max_model_len + 1} positions do not fit 0.01 GB"):
        limits_within(made, replace(options, max_model_len=limits.max_model_len + 1))
    note = reduced_context_note(made, options, limits.max_model_len)
    enough = replace(options, cache_gb=float(re.search(r"--cache-gb (\S+)", note)[1]))
    whole = limits_within(made, enough).max_model_len
    assert whole == made.trunk.max_length
    assert reduced_context_note(made, enough, whole) is None
    assert limits_within(made, replace(enough, cache_gb=0.8 * enough.cache_gb)).max_model_len < whole


@pytest.mark.more
@pytest.mark.parametrize("steps", [0, 1, 5, 20, 40])
def test_cancelled_requests_leave(trained, monkeypatch, steps):
    """While they wait, are prefilled, and run, within one step; the others go on."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    model = trained["glm_two"]
    requests = requests_of(model, 6, lengths=(130,))
    answers = Answers(scheduler_of(model, max_num_seqs=3, clock=Clock()))
    for index, request in requests.items():
        answers.add(index, request)
    for _ in range(steps):
        answers.scheduler.step()
    cancelled = [index for index in (0, 2, 4) if not answers.sequences[index].is_over]
    for index in cancelled:
        answers.sequences[index].is_cancelled = True
    answers.scheduler.step()
    assert [answers.chunks[index][-1].finish for index in cancelled] == ["cancelled"] * len(cancelled)
    stats = answers.scheduler.stats()
    assert stats.num_running + stats.num_waiting == sum(not each.is_over for each in answers.sequences.values())
    answers.run()
    expected = alone(model, requests)
    for index in requests:
        num_tokens = len(answers.text(index)) if index in cancelled else None
        assert answers.text(index) == expected[index][:num_tokens]
    assert answers.scheduler.stats().cache_positions == 0


@pytest.mark.more
def test_requests_take_turns(trained):
    """A request with many choices is not answered whole before one that came later, nor does it starve."""
    answers, many, other = Answers(scheduler_of(trained["glm_two"], max_num_seqs=2)), object(), object()
    parents = {**dict.fromkeys(range(6), many), "b0": other, "b1": other, "c": None, "d": None}
    for name, parent in parents.items():
        answers.add(name, GenerationRequest(prompt=(1, 2, 3), max_tokens=40, parent=parent))
    answers.sequences["b1"].is_cancelled = True
    begun = []
    while not answers.scheduler.is_idle:
        answers.scheduler.step()
        begun += [name for name in parents if answers.text(name) and name not in begun]
    assert begun == [0, "b0", "c", "d", 1, 2, 3, 4, 5]


class BrokenGrammar:
    """Fails at the first mask, or where tokens are emitted."""

    def __init__(self, masks):
        self.masks = masks

    def allowed(self, drafts):
        if self.masks:
            raise ValueError("a mask with a bug")
        return [torch.ones(48, dtype=torch.bool)] * (len(drafts) + 1)

    def advance(self, tokens):
        raise ValueError("a grammar with a bug")


class BrokenText(Text):
    """Fails at a part: `push` at the second call, so that its sequence has joined others, or `stop_after`."""

    def __init__(self, part):
        self.part, self.num_calls = part, 0

    def push(self, *args, **options):
        self.num_calls += 1
        if self.part == "push" and self.num_calls > 1:
            raise ValueError("a tokenizer with a bug")
        return super().push(*args, **options)

    def stop_after(self, new):
        if self.part == "stop":
            raise ValueError("a stop string with a bug")


@pytest.mark.one_case
@pytest.mark.parametrize("part", ["push", "stop", "mask", "advance", "prompt"])
@pytest.mark.parametrize("kind", [{}, {"sampling": Sampling(1.0)}], ids=["greedy", "sampled"])
def test_a_failure_of_one_request_ends_no_other(trained, monkeypatch, part, kind):
    """In its own batch, whether it fails before or after it has joined the others."""
    model = trained["glm_two"]
    request = GenerationRequest(prompt=tuple(prompt(20, vocab_size=40)), max_tokens=30, **kind)
    good = {index: replace(request, seed=index) for index in range(2)}
    bad = replace(request, stop=("x",) if part == "stop" else (), seed=9)
    if part in ("mask", "advance"):
        bad = replace(bad, grammar=lambda: BrokenGrammar(part == "mask"))
    run_chunk = ServedBatch.prefill_chunk

    def prefill_chunk(self, size):
        if part == "prompt" and self.sequences[0] is answers.sequences["bad"]:
            raise MemoryError
        return run_chunk(self, size)

    expected, answers = alone(model, good), Answers(scheduler_of(model, prefix_bytes=10**8))
    monkeypatch.setattr(ServedBatch, "prefill_chunk", prefill_chunk)
    answers.add(0, good[0])
    answers.add("bad", bad, text=BrokenText(part))
    answers.add(1, good[1])
    found = answers.run()
    assert {index: found[index] for index in good} == expected
    end = answers.chunks["bad"][-1]
    error = "MemoryError" if part == "prompt" else "ValueError"
    assert (end.finish, end.error) == ("error", f"internal error: {error}")
    assert [chunk.finish for chunk in answers.chunks["bad"][:-1]] == [None] * (len(answers.chunks["bad"]) - 1)
    assert answers.scheduler.stats().cache_positions == 0


def test_a_failure_between_the_chunks_of_a_prompt_ends_no_other(trained, monkeypatch):
    """The sequence has left its batch, which must not wait for the next chunk."""
    model, store = trained["glm_two"], PrefixCache.store

    def broken(self, batch):
        if batch.sequences[0] is answers.sequences["bad"]:
            raise MemoryError
        store(self, batch)

    monkeypatch.setattr(PrefixCache, "store", broken)
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 10.0)  # all prompts in one step
    good = GenerationRequest(prompt=tuple(prompt(20, vocab_size=40)), max_tokens=12)
    expected, answers = alone(model, {0: good}), Answers(scheduler_of(model, prefix_bytes=10**8))
    answers.add("bad", replace(good, prompt=tuple(prompt(200, vocab_size=40))))
    answers.add(0, good)
    found = answers.run()
    assert {0: found[0]} == expected
    assert answers.chunks["bad"][-1].error == "internal error: MemoryError"


@pytest.mark.more
def test_a_failure_of_a_batch_ends_no_other_batch(trained, monkeypatch, caplog):
    """Where it cannot be told whose it is, it is that of the sequences that shared the pass."""
    monkeypatch.setattr(scheduler_module, "_AHEAD_S", 0.0)
    monkeypatch.setattr(scheduler_module, "_AHEAD_PER_SEQUENCE_S", 0.0)
    model = trained["glm_two"]
    request = GenerationRequest(prompt=tuple(prompt(20, vocab_size=40)), max_tokens=90)
    good = {index: replace(request, seed=index) for index in range(2)}
    expected, answers = alone(model, good), Answers(scheduler_of(model))
    for index in range(2):
        answers.add(index, good[index])
        answers.add(f"bad {index}", replace(request, logprobs=1))
    while len(answers.chunks["bad 1"]) < 2:
        answers.scheduler.step()
    monkeypatch.setattr("nextn.serve.served_batch.verify_drafts", lambda *args: 1 / 0)
    found = answers.run()
    assert {index: found[index] for index in good} == expected
    for index in range(2):
        assert answers.chunks[f"bad {index}"][-1].error == "internal error: ZeroDivisionError"
    assert "failed generations: 2" in caplog.text


@pytest.fixture(scope="module")
def engine(trained):
    engine = ServingEngine(trained["glm_two"], EngineOptions(warmup=False, max_num_seqs=3, max_queue=4, cache_gb=0.1))
    yield engine
    engine.close(grace_s=5)


def submitted(engine, requests):
    """Submit all from threads of their own; return their chunks once all have ended."""
    chunks, ended = {key: [] for key in requests}, {key: threading.Event() for key in requests}

    def emit(key, chunk):
        chunks[key].append(chunk)
        if chunk.finish is not None:
            ended[key].set()

    for key, request in requests.items():
        engine.submit(request, lambda chunk, key=key: emit(key, chunk))
    for event in ended.values():
        assert event.wait(60)
    return chunks


def test_a_slow_pass_does_not_rule_out_its_size(trained, monkeypatch):
    """Only sizes that fit the budget are used while others run; one that was slow once must be tried again."""
    sizes, run_chunk = [], ServedBatch.prefill_chunk
    monkeypatch.setattr(ServedBatch, "prefill_chunk", lambda self, size: sizes.append(size) or run_chunk(self, size))
    scheduler = scheduler_of(trained["glm_two"], clock=lambda: 0.0)
    answers, rows = Answers(scheduler), refrain(2, 500, seed=4).tolist()
    answers.add(0, GenerationRequest(prompt=tuple(rows[0][:9]), max_tokens=400))
    while not scheduler._running:
        scheduler.step()
    scheduler._chunk_s = {64: 1.05 * scheduler_module._AHEAD_S, 32: 0.0, 16: 0.0}
    answers.add(1, GenerationRequest(prompt=tuple(rows[1]), max_tokens=1))
    while not answers.chunks[1]:
        scheduler.step()
    assert sizes[1:3] == [32, 32]
    assert 64 in sizes[3:]


def test_no_request_waits_for_a_recording_after_warmup(trained, monkeypatch):
    """Sizes that warm-up leaves out: of prompts, of rounds, and of what the head catches up on after others."""
    options = EngineOptions("native", warmup=False, max_num_seqs=1, cache_gb=0.1, num_speculative_tokens=2)
    engine, sizes, record = ServingEngine(trained["glm_one"], options), [], Passes._record
    for _ in engine._warm_up_steps():
        pass
    monkeypatch.setattr(
        Passes, "_record", lambda self, count, size: sizes.append((count, size)) or record(self, count, size)
    )
    rows, drawn = refrain(4, 150, seed=4).tolist(), {"sampling": Sampling(1.0), "frequency_penalty": 0.5}
    for row, length in enumerate((5, 20, 70, 150)):
        for kind in ({}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 1}, drawn):
            submitted(engine, {row: GenerationRequest(prompt=tuple(rows[row][:length]), max_tokens=100, **kind)})
    engine.close(grace_s=5)
    assert sizes == []


def test_an_engine_says_until_when_it_measures(trained):
    """Whoever times two servers of one machine has to know when the idle one takes no time of the other."""
    options = EngineOptions("torch", max_num_seqs=1, cache_gb=0.1, num_speculative_tokens=1, max_model_len=200)
    engine = ServingEngine(trained["glm_two"], options)
    assert engine.stats().is_measuring
    deadline = time.monotonic() + 60
    while engine.stats().is_measuring and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.stats().is_measuring
    assert engine.stats().cost_curve
    assert next(engine._warm_up, "over") == "over"
    engine.close(grace_s=5)


@pytest.mark.more
def test_engine_answers(engine, trained):
    requests = {key: replace(request, stop=()) for key, request in requests_of(None, 7).items()}
    chunks = submitted(engine, requests)
    texts = {
        key: [token for chunk in own for each in chunk.rounds for token in each.emitted] for key, own in chunks.items()
    }
    assert texts == alone(trained["glm_two"], requests)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_engine_refuses(engine):
    def submit(**options):
        engine.submit(GenerationRequest(**({"prompt": (1, 2)} | options)), lambda chunk: None)

    with pytest.raises(ConfigError, match="empty"):
        submit(prompt=())
    with pytest.raises(ConfigError, match="vocabulary"):
        submit(prompt=(10**6,))
    with pytest.raises(ConfigError, match="tokens; the"):
        submit(prompt=(1,) * 10**6)
    with pytest.raises(ConfigError, match="num_speculative_tokens = 5; expected 0 to 4, the K of this engine"):
        submit(num_speculative_tokens=5)


class HeldSequences:
    """Sequences of an engine that end only after `release`."""

    def __init__(self, engine):
        self._engine, self._released = engine, threading.Event()
        self._num_submitted, self._num_ended = 0, 0

    def submit(self, request):
        self._engine.submit(request, self._emit)
        self._num_submitted += 1

    def release(self):
        """Let all sequences go on, and wait for their ends."""
        self._released.set()
        while self._num_ended < self._num_submitted:
            time.sleep(0.01)

    def _emit(self, chunk: GenerationChunk):
        self._released.wait(30)
        self._num_ended += chunk.finish is not None


def test_full_queue(engine):
    """Refused at once, not queued; room again after the others have ended."""
    held, request = HeldSequences(engine), GenerationRequest(prompt=(1, 2), max_tokens=2)
    for _ in range(7):
        held.submit(request)
    with pytest.raises(QueueFullError, match="7 requests"):
        held.submit(request)
    held.release()
    assert submitted(engine, {0: request})[0][-1].finish == "length"


def test_the_queue_counts_requests(engine):
    """One with more sequences than all places is one, also while only some of them have a place."""
    held, request = HeldSequences(engine), GenerationRequest(prompt=(1, 2), max_tokens=2)
    parents = [object() for _ in range(6)]
    with engine._changed:  # the engine sees all at once, before it is held
        for _ in range(8):
            held.submit(replace(request, parent=parents[0]))
    while sum(sequence.has_place for sequence in engine._open.values()) < 3:
        time.sleep(0.01)
    for parent in parents[1:5]:  # the first has all three places, four wait
        for _ in range(8):
            held.submit(replace(request, parent=parent))
    for parent in (parents[5], None):
        with pytest.raises(QueueFullError, match="5 requests"):
            held.submit(replace(request, parent=parent))
    held.submit(replace(request, parent=parents[1]))  # one more of a request that waits
    held.release()
    assert submitted(engine, {0: request})[0][-1].finish == "length"


def test_a_broken_request_does_not_end_the_engine(engine):
    class Broken:
        def allowed(self, drafts):
            return [torch.ones(engine.backend.trunk.vocab_size, dtype=torch.bool)]

        def advance(self, tokens):
            raise ValueError("a grammar with a bug")

    good = GenerationRequest(prompt=(1, 2), max_tokens=3)
    chunks = submitted(engine, {0: replace(good, grammar=Broken)})
    assert chunks[0][-1].finish == "error"
    assert chunks[0][-1].error == "internal error: ValueError"
    assert submitted(engine, {0: good})[0][-1].finish == "length"


def test_text_that_cannot_be_decoded_does_not_end_the_engine(engine, monkeypatch):
    """A client that gets no end; an engine's thread that is gone."""

    class Broken(Text):
        def push(self, *args, **options):
            raise ValueError("a tokenizer with a bug")

    good = GenerationRequest(prompt=(1, 2), max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr("nextn.serve.engine.TextStream", lambda *args, **options: Broken())
        assert submitted(engine, {0: good})[0][-1].error == "internal error: ValueError"
    assert submitted(engine, {0: good})[0][-1].finish == "length"


def test_closing_ends_everything(trained):
    engine = ServingEngine(trained["glm_two"], EngineOptions(warmup=False, cache_gb=0.1))
    chunks = []
    engine.submit(GenerationRequest(prompt=(1, 2), max_tokens=10**6), chunks.append)
    engine.close(grace_s=0.05)
    assert chunks[-1].finish in ("cancelled", "length")
    with pytest.raises(QueueFullError, match="shutting down"):
        engine.submit(GenerationRequest(prompt=(1, 2)), chunks.append)


def test_memory_is_known_before_start(trained):
    with pytest.raises(ConfigError, match="do not fit"):
        ServingEngine(trained["glm_two"], EngineOptions(cache_gb=0.01, max_num_seqs=64, max_model_len=100_000))
    with pytest.raises(ConfigError, match="max_num_seqs = 0"):
        EngineOptions(max_num_seqs=0)
