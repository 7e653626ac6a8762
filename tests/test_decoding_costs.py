"""A clock that the passes advance, caches that do not change, bytes counted by hand."""

from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import FIXTURES, build

from nextn.errors import ConfigError
from nextn.evaluate import decoding_costs
from nextn.evaluate.decoding_costs import (
    Machine,
    copy_bandwidth,
    draft_bytes,
    measure_costs,
    peak_memory,
    processor_name,
    rotate,
    step_bytes,
    time_passes,
)
from nextn.runtime.backend import backend_for
from nextn.speculative.draft_vocabulary import DraftVocabulary


class PassClock:
    """A clock that only the passes advance."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(decoding_costs._Passes, "verify", lambda passes, num: self.turn(("verify", num), num**2))
        monkeypatch.setattr(decoding_costs._Passes, "draft", lambda passes, k: self.turn(("draft", k), 0.5 * k))

    def turn(self, call, seconds):
        self.now += seconds
        self.calls.append(call)

    def __call__(self):
        return self.now


@pytest.mark.more
def test_costs_are_of_their_own_passes(trained, monkeypatch):
    """Each pass is timed after its predecessor in decoding, in rotating order; the warm-up does not count."""
    clock = PassClock(monkeypatch)
    found = measure_costs(trained["glm"], num_speculative_tokens=3, batch=2, context=20, repeats=4, clock=clock)
    assert found.v == (1, 4, 9, 16)
    assert found.c == 0.5
    assert (found.batch, found.context, found.max_speculative_tokens, found.steps[0].num) == (2, 20, 3, 4)
    assert found.round_cost(2) == 9 + 2 * 0.5
    pairs = list(zip(clock.calls[::2], clock.calls[1::2], strict=True))
    turns = [pairs[place : place + 5] for place in range(0, 25, 5)]
    before = {after: before for before, after in turns[0]}
    assert before == {
        ("verify", 1): ("verify", 1),
        **{("verify", num): ("draft", num - 1) for num in (2, 3, 4)},
        ("draft", 3): ("verify", 4),
    }
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert len({turn[0] for turn in turns}) == 5


def test_short_passes_are_repeated():
    """Of seven, four that another process interrupts would be the median."""
    clock, seconds = SimpleNamespace(now=0.0), [0.004] * 5  # the warm-up's, and four that count

    def verify(num):
        clock.now += seconds.pop() if num == 3 and seconds else 0.001

    def draft(k):
        clock.now += 0.001

    passes = SimpleNamespace(verify=verify, draft=draft)
    steps, _ = time_passes(passes, 3, repeats=7, clock=lambda: clock.now)
    assert [round(step.median, 6) for step in steps] == [0.001] * 4
    assert steps[0].num < 70
    longer, _ = time_passes(passes, 3, repeats=7, min_s=0.5, clock=lambda: clock.now)
    assert longer[0].num > 2 * steps[0].num


@pytest.mark.one_case
@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("name", [folder.name for folder in sorted(FIXTURES.iterdir())])
def test_passes_are_rolled_back(trained, name, path):
    """A pass must not change the cache for the next one, also in recurrent and compressed layers."""
    passes = decoding_costs._Passes(backend_for(trained[name], path), 2, 21)
    with torch.inference_mode():
        first = passes.verify(4), passes.draft(3)
        assert (passes.verify(4), passes.draft(3)) == first
    assert passes.cache.lengths == [21, 21]
    assert {tuple(cache.lengths) for cache in passes.caches} == {(21, 21)}


@pytest.mark.more
def test_costs_of_a_real_model(trained):
    found = measure_costs(build("glm4_moe"), num_speculative_tokens=2, context=600, repeats=1)
    assert len(found.v) == 3
    assert min(*found.v, found.c) > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_speculative_tokens": 0}, "at least 1"),
        ({"num_speculative_tokens": 2, "batch": 0}, "at least 1"),
        ({"num_speculative_tokens": 2, "context": 510}, "512"),
    ],
)
def test_bad_settings(trained, wrong, words):
    with pytest.raises(ConfigError, match=words):
        measure_costs(trained["glm"], **wrong)


def test_rotation():
    assert [rotate("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_bytes_by_hand():
    """Without the embedding, which is only looked up, and inactive experts; with the shared lm_head."""
    model = build("glm4_moe")
    config, trunk = model.trunk.config, model.trunk.model
    experts = {name: value for name, value in trunk.named_parameters() if value.ndim == 3}
    assert experts
    rest = sum(value.numel() for name, value in trunk.named_parameters() if name not in experts)
    active = sum(value.numel() * config.num_experts_per_tok / len(value) for value in experts.values())
    assert step_bytes(model.trunk) == 4 * (rest - 64 * 32 + active)
    assert step_bytes(model.trunk, 8) == round((rest - 64 * 32 + active) * 8.5 / 8), "a 32-bit scale for 64 weights"
    layers = rest - 2 * 64 * 32 + active
    in_four_bits = layers * 5 / 8  # a 32-bit scale for 32 weights
    assert step_bytes(model.trunk, 4) == round(64 * 32 * 8.5 / 8 + in_four_bits), "eight bits for the lm_head"
    inner = dict(model.head.named_parameters())
    share = config.num_experts_per_tok / config.n_routed_experts
    own = sum(value.numel() * (share if value.ndim == 3 else 1) for value in inner.values())
    assert draft_bytes(model.head) == 4 * (own + 64 * 32)
    assert draft_bytes(model.head, 7) == own + 64 * 32, "a byte each"
    assert draft_bytes(model.head, num_tokens=5) == 4 * (own + 5 * 32)
    assert draft_bytes(model.head, 7, lm_head_bits=4) == own + 64 * 32 * (4 + 32 / 128) / 8
    model.head.draft_vocabulary = DraftVocabulary.of([[1, 2, 3]], 3, vocab_size=64)
    assert draft_bytes(model.head) == 4 * (own + 3 * 32)


def test_machine(trained, monkeypatch):
    monkeypatch.setattr(trained["qwen"].trunk, "kv_cache_dtype", "int8")
    found = Machine.of(trained["qwen"])
    assert (found.dtype, found.kv_cache_dtype) == ("float32", "int8")
    assert found.bandwidth == 5e9
    assert found.threads == torch.get_num_threads()
    assert set(found.versions) == {"nextn", "python", "torch", "transformers"}
    assert abs((date.fromisoformat(found.date) - datetime.now(UTC).date()).days) <= 1
    assert found.name == processor_name()


def test_the_processor_is_named_with_what_kernels_are_chosen_by(monkeypatch):
    text = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: sse2 avx2 avx512_bf16 rtm\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **options: text)
    name = processor_name()
    assert name.startswith("AMD EPYC, cpu family 25, model 17 (")
    assert name.endswith(": avx2 avx512_bf16)")


def test_bandwidth_counts_reading_and_writing():
    ticks = iter(range(100))
    assert copy_bandwidth(torch.device("cpu"), num_bytes=1000, repeats=3, clock=lambda: next(ticks)) == 2000


def test_peak_memory_is_in_bytes():
    """Not in kilobytes: a process with torch takes 100 MiB and more."""
    assert 100 * 2**20 < peak_memory(torch.device("cpu")) < 100 * 2**30
