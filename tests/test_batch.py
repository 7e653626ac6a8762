"""Sequences that join a batch between rounds and leave it get what they get alone, for every kind of cache."""

import time

import pytest
import torch
from quick import each_once, families, most_of
from replays import fast_of
from tiny import BUILDS, MOST, build, decode, prompt, refrain

from nextn.decoding import batch as batch_module
from nextn.decoding.batch import DecodingBatch
from nextn.decoding.records import BatchSequence
from nextn.runtime.native.rounds import NativeRounds
from nextn.runtime.torch_backend import TorchHead, TorchTrunk
from nextn.settings import Settings
from nextn.speculative.draft_policy import NO_DRAFTS, FixedLength
from nextn.speculative.sampling import Uniforms

LENGTHS, STARTS, NEW = (9, 14, 5), (0, 1, 2), (12, 6, 9)  # prompt tokens, rounds before each joins, new tokens


def parts_of(name, *, native):
    """A model, and its trunk and head as the backend runs them."""
    model = build(name)
    if native:
        model = fast_of(model)
        return model, model.trunk, model.head
    return model, TorchTrunk(model.trunk), TorchHead(model.head)


def batch_of(trunk, head, row, tokens, *, num_speculative_tokens, max_tokens):
    sequence = BatchSequence(row, list(tokens), max_tokens, (), Uniforms(row))
    settings = Settings(num_speculative_tokens=num_speculative_tokens)
    return DecodingBatch(trunk, head, [sequence], settings, FixedLength(num_speculative_tokens))


def joined(trunk, head, prompts, k):
    """Tokens and drafts by sequence, where each joins after STARTS rounds."""
    running, tokens, drafted = None, [[] for _ in prompts], [[] for _ in prompts]

    def collect(result):
        for part in result.rows:
            tokens[part.row] += part.emitted
            drafted[part.row].append((part.drafts, part.num_accepted))

    with torch.inference_mode(), trunk.pass_context():
        for number in range(40):
            for row in [row for row, start in enumerate(STARTS) if start == number]:
                new = batch_of(trunk, head, row, prompts[row], num_speculative_tokens=k, max_tokens=NEW[row])
                collect(new.prefill())
                if running is not None and running.sequences:
                    running.join(new)
                else:
                    running = new
            if not running.sequences:
                return tokens, drafted
            collect(running.round())
            while running.queued:
                collect(running.round())
    raise AssertionError("still running")


@pytest.mark.one_case
@pytest.mark.parametrize("native", [False, True])
def test_batches_of_several_sequences_join(native):
    model, trunk, head = parts_of("glm4_moe", native=native)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    texts = [[] for _ in prompts]
    with torch.inference_mode(), trunk.pass_context():
        first, second, third = (
            batch_of(trunk, head, row, prompts[row], num_speculative_tokens=3, max_tokens=NEW[row]) for row in range(3)
        )
        rounds = [each.prefill() for each in (first, second, third)]
        second.join(third)
        first.join(second)
        while first.sequences or first.queued:
            rounds.append(first.round())
    for part in [part for each in rounds for part in each.rows]:
        texts[part.row] += part.emitted
    assert texts == alone(model, prompts, 3)[0]


def alone(model, prompts, k):
    texts, logs = [], []
    for tokens, new in zip(prompts, NEW, strict=True):
        (text,), log = decode(model, [tokens], num_speculative_tokens=k, max_tokens=new)
        texts.append(text)
        logs.append([(part.drafts, part.num_accepted) for each in log for part in each.rows])
    return texts, logs


@pytest.mark.more
@pytest.mark.parametrize(("name", "modules"), families(BUILDS, most_of(MOST)), ids=lambda value: str(value))
def test_joining_changes_nothing(name, modules):
    model = build(name, modules=modules)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    found = joined(TorchTrunk(model.trunk), TorchHead(model.head), prompts, 3)
    assert found == alone(model, prompts, 3)


@pytest.mark.one_case
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_joining_native_rounds_changes_nothing(name, k):
    """Memory of the native cache is moved when sequences join, and used again when they leave."""
    model = fast_of(build(name))
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    assert joined(model.trunk, model.head, prompts, k) == alone(model, prompts, k)


def test_a_stop_string_at_the_last_token_is_the_reason():
    """Of several reasons at one token, the one that says most: also where it would have ended there anyway."""
    model = build("glm4_moe")
    trunk, head = TorchTrunk(model.trunk), TorchHead(model.head)
    batch = batch_of(trunk, head, 0, prompt(9), num_speculative_tokens=3, max_tokens=5)
    batch.sequences[0].stop = lambda new: 5 if len(new) >= 5 else None
    with torch.inference_mode():
        rounds = [batch.prefill()]
        while batch.sequences:
            rounds.append(batch.round())
    assert [part.finish for each in rounds for part in each.rows][-1] == "stop"


@pytest.mark.one_case
@pytest.mark.parametrize("native", [False, True])
def test_policies_learn_of_plain_rounds_only_where_no_sequence_drafted(native):
    """A sequence at its last token drafts nothing, which says nothing about the round of the other."""
    _, trunk, head = parts_of("glm4_moe", native=native)

    class Learning(FixedLength):
        def learn(self, confidences, *, num_draft_tokens, num_accepted):
            learned.append(len(confidences))

    learned = []
    sequences = [BatchSequence(row, prompt(9, seed=row), limit, (), Uniforms(row)) for row, limit in enumerate((2, 12))]
    with torch.inference_mode(), trunk.pass_context():
        batch = DecodingBatch(trunk, head, sequences, Settings(num_speculative_tokens=2), Learning(2))
        batch.prefill()
        batch.round()
    assert learned == [2]


def test_policies_see_the_time_around_native_rounds(monkeypatch):
    """Where only native time counted, drafting would look faster than it is: it has more work around its rounds."""
    fast, seconds = fast_of(build("glm4_moe")), []
    native_run = NativeRounds.run

    def slow_run(self, *args, **options):
        time.sleep(0.02)
        return native_run(self, *args, **options)

    monkeypatch.setattr(NativeRounds, "run", slow_run)
    monkeypatch.setattr(FixedLength, "observe", lambda self, num_tokens, took: seconds.append(took))
    with torch.inference_mode(), fast.trunk.pass_context():
        batch = batch_of(fast.trunk, fast.head, 0, prompt(9), num_speculative_tokens=2, max_tokens=40)
        batch.prefill()
        batch.round()
        num_rounds = 1 + len(batch.queued)
        while batch.queued:
            batch.round()
    assert sum(seconds) >= 0.02
    assert len(seconds) == num_rounds


class Late(FixedLength):
    """Baseline rounds, then rounds that draft."""

    num_plain = 200

    def plan(self):
        return super().plan() if self.num_plain <= 0 else NO_DRAFTS

    def observe(self, num_tokens, seconds):
        object.__setattr__(self, "num_plain", self.num_plain - 1)


@pytest.mark.more
@pytest.mark.parametrize(("name", "native"), each_once(["glm4_moe", "qwen3_5"], [False, True]))
def test_drafting_after_many_plain_rounds(name, native, monkeypatch):
    """More positions pending than the head takes at once; states that are copied each round without end."""
    monkeypatch.setattr(batch_module, "MAX_DEFERRED", 150)
    _, trunk, head = parts_of(name, native=native)
    # Tokens that end a sequence differ, so that Python runs between the rounds.
    ends = (), (trunk.vocab_size,)
    sequences = [BatchSequence(row, prompt(9, seed=row), 230, eos, Uniforms(row)) for row, eos in enumerate(ends)]
    batch, drafted, longest = (DecodingBatch(trunk, head, sequences, Settings(num_speculative_tokens=3), Late(3)), 0, 0)
    with torch.inference_mode(), trunk.pass_context():
        batch.prefill()
        while batch.sequences:
            drafted += sum(len(part.drafts) for part in batch.round().rows)
            longest = max([longest, *map(len, batch.drafter.pending)])
    assert drafted > 0
    assert 100 < longest <= 150


def test_plain_rounds_of_many_sequences_are_native():
    """Also where the positions of a round with drafts would be too many for one pass of the lm_head."""
    _, trunk, head = parts_of("glm4_moe", native=True)
    texts, native, drafted = [], [], 0
    for k in (3, 0):
        late = Late(k)
        object.__setattr__(late, "num_plain", 6)
        sequences = [BatchSequence(row, prompt(4, seed=row), 16, (), Uniforms(row)) for row in range(30)]
        batch = DecodingBatch(trunk, head, sequences, Settings(num_speculative_tokens=k), late)
        batch.max_ahead_s = 0.0  # a round a call, as the policy changes
        with torch.inference_mode(), trunk.pass_context():
            batch.prefill()
            while batch.sequences:
                parts = batch.round().rows
                native.append(isinstance(batch.native, NativeRounds))
                drafted += sum(len(part.drafts) for part in parts)
        texts.append([sequence.new for sequence in sequences])
    assert native[:6] == [True] * 6
    assert drafted > 0
    assert texts[0] == texts[1]


def after_plain_rounds(model, rows):
    """Tokens and drafts of sequences that get drafts from the 21st round on, and the longest the head was behind."""
    sequences = [BatchSequence(row, list(tokens), 60, (), Uniforms(row)) for row, tokens in enumerate(rows)]
    late, drafted, longest = Late(3), [], 0
    object.__setattr__(late, "num_plain", 20)
    with torch.inference_mode(), model.trunk.pass_context():
        batch = DecodingBatch(model.trunk, model.head, sequences, Settings(num_speculative_tokens=3), late)
        batch.max_ahead_s = 0.0  # a round a call, as the policy changes
        batch.prefill()
        while batch.sequences:
            longest = max(longest, batch.drafter.num_pending)
            drafted += [(part.row, part.drafts, part.num_accepted) for part in batch.round().rows]
    return [sequence.new for sequence in sequences], drafted, longest


@pytest.mark.more
@pytest.mark.parametrize("name", ["glm_two", "glm_one"])
def test_a_head_that_starts_late_drafts_the_same(trained, name, monkeypatch):
    """As one that has processed the prompts at once, and all later positions soon."""
    rows = [refrain(1, 40 + 200 * index, seed=index).tolist()[0] for index in range(2)]
    monkeypatch.setattr(batch_module, "MAX_DEFERRED", 1)
    at_once = after_plain_rounds(fast_of(trained[name]), rows)
    monkeypatch.setattr(batch_module, "MAX_DEFERRED", 512)
    late = after_plain_rounds(fast_of(trained[name]), rows)
    assert late[:2] == at_once[:2]
    assert sum(num_accepted for _, _, num_accepted in late[1]) > 20
    assert at_once[2] < 100 < 240 <= late[2]
