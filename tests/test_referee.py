"""The comparison with engines, without one: rounds through a text, counters, conventions, text by text."""

import json

import pytest
import torch
from engine_faults import INJECTED, Files, plant
from engines.protocol import Answer
from engines.referee import Ours, Seen, asked, compared, conventions, counts_of, rates_of
from tiny import refrain

from nextn.decoding.rounds import rounds
from nextn.engines.counters import Counters
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.stats.acceptance import Acceptance

TOKENS, K = 24, 3


@pytest.fixture(scope="module")
def noisy(tmp_path_factory, fixture_folder):
    """The trained fixture with a head that is right about half the time."""
    model = Model.load(fixture_folder / "glm", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.head.parameters():
            if value.ndim > 1:
                value += torch.randn(value.shape, generator=generator) * 0.7 * value.std()
    folder = tmp_path_factory.mktemp("noisy") / "model"
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def ours(noisy):
    prompts = [tuple(row) for row in refrain(6, 20, seed=5).tolist()]
    return Ours.of(str(noisy), prompts, tokens=TOKENS, num_speculative_tokens=K)


def decoded(ours, k, place):
    """Our own decoder's counts of one prompt."""
    settings = Settings(num_speculative_tokens=k, max_tokens=TOKENS)
    return Acceptance.of(rounds(ours.model.trunk, ours.model.head, [list(ours.prompts[place])], settings))


def seen_of(ours, k, *, scores=None, overruns=True):
    """What an engine would give that decodes as we do."""
    texts = tuple(text.new[:TOKENS] for text in ours.measured.generated[0.0].texts)
    counts = ours.counts(scores or ours.scores(), k, overruns=overruns) if k else []
    return Seen(k, texts, tuple(counts))


@pytest.mark.more
@pytest.mark.parametrize("k", [1, 2, 3])
def test_counts_are_those_of_decoding(ours, k):
    """Rounds that are cut to what is missing are the decoder's own."""
    counted = ours.counts(ours.scores(), k, overruns=False)
    for place, each in enumerate(counted):
        acceptance = decoded(ours, k, place)
        assert (each.num_drafts, each.per_position) == (acceptance.num_rounds, acceptance.num_accepted)
    assert 0.2 < rates_of(counted, k)[0] < 0.95


def test_overrunning_rounds_are_verified_in_full(ours):
    """The last round of a text accepts what it would accept in a longer one."""
    counted = ours.counts(ours.scores(), K, overruns=True)
    short = ours.counts(ours.scores(), K, overruns=False)
    assert sum(each.accepted for each in counted) > sum(each.accepted for each in short)
    assert all(0 <= full.num_drafts - cut.num_drafts <= 1 for full, cut in zip(counted, short, strict=True))


def test_an_engine_like_ours_agrees(ours):
    record = compared(ours, "transformers", seen_of(ours, 0), [seen_of(ours, K, overruns=False)])
    (row,) = record["by_drafts"]
    assert record["convention"] == []
    assert row["inside"]
    assert row["same_counts"]
    assert row["same_under_convention"]
    assert row["identical"] == record["plain"]["identical"] == len(ours.prompts)
    assert [each["value"] for each in row["difference"]] == [0.0] * K
    assert json.loads(json.dumps(record)) == record


@pytest.mark.more
def test_a_convention_explains_a_difference(ours):
    """vLLM passes on the state before the head's norm in this family: counts differ from those of the row."""
    readings = conventions(ours.model, "vllm")
    assert {"next_hidden", "position0"} == {each.key for each in readings}
    (row,) = compared(ours, "vllm", seen_of(ours, 0), [seen_of(ours, K, scores=ours.scores(readings))])["by_drafts"]
    assert not row["same_counts"]
    assert row["same_under_convention"]
    other = seen_of(ours, K)
    (row,) = compared(ours, "vllm", seen_of(ours, 0), [other])["by_drafts"]
    assert row["same_counts"]
    assert not row["same_under_convention"]


def test_a_lead_changes_what_the_head_sees(ours):
    """llama.cpp's position before the first, from the previous request, changes the rounds of some text."""
    led, plain = (ours.counts(ours.scores(leads=each), K, overruns=False) for each in (True, False))
    assert counts_of(led, K) != counts_of(plain, K)


def test_another_text_is_reported_with_its_gap(ours):
    seen = seen_of(ours, 1)
    first = list(seen.texts[0])
    first[5] = (first[5] + 1) % 40
    record = compared(ours, "transformers", Seen(0, (tuple(first), *seen.texts[1:]), ()), [])
    assert record["plain"]["identical"] == len(ours.prompts) - 1
    (gap,) = record["plain"]["gaps"]
    assert gap["place"] == 5
    assert gap["gap"] > 0


class Fake:
    """A worker whose engine accepts one draft per round."""

    def __init__(self, *, counts):
        self.hello, self.rounds, self.asked = {"counts": counts}, 0, []

    def ask(self, request, **_):
        self.asked.append(tuple(request.prompt))
        lengths = [2] * ((request.max_tokens - 1) // 2)
        self.rounds += len(lengths)
        return Answer(list(range(request.max_tokens)), 1.0, len(lengths), 0, 0, lengths)

    def metrics(self):
        name = "vllm:spec_decode_num_"
        lines = [f"{name}drafts_total {self.rounds}", f"{name}accepted_tokens_total {self.rounds}"]
        lines += [f'{name}accepted_tokens_per_pos_total{{position="0"}} {self.rounds}']
        return "\n".join([*lines, f"{name}draft_tokens_total {2 * self.rounds}"])


@pytest.mark.parametrize("counts", [True, False])
def test_counts_of_a_request(counts):
    """Those between two readings, or those of its rounds; the first request of a server does not count."""
    worker = Fake(counts=counts)
    seen = asked(worker, [(1, 2), (3,)], 2, 9)
    assert worker.asked == [(3,), (1, 2), (3,)]
    assert [counts_of([each], 2) for each in seen.counts] == [[4, 4, 0]] * 2
    assert seen.texts == (tuple(range(9)),) * 2
    assert asked(worker, [(1,)], 0, 9).counts == ()


def test_rates_of_nothing():
    """A depth that no round reached has no rate."""
    assert rates_of([Counters("x", 4, None, 0, (0,))], 2) == [0.0, None]


@pytest.mark.parametrize("fault", INJECTED, ids=lambda fault: fault.name)
def test_an_injected_fault_changes_only_the_head(fault, noisy, fixture_folder, tmp_path):
    """The trunk's tensors stay; the head's are gone, named otherwise, or other ones."""
    plant(fault, noisy, tmp_path / "bad", other=fixture_folder / "glm_one")
    before, after = (Files.of(folder).tensors for folder in (noisy, tmp_path / "bad"))
    head = set(Files.of(noisy).names.values())
    assert all(torch.equal(after[name], value) for name, value in before.items() if name not in head)
    changed = [name for name in head if name not in after or not torch.equal(after[name], before[name])]
    assert changed
    if fault.name == "shifted":
        assert all(torch.equal(after[name], before[name] - 1) for name in changed)
    if fault.name == "quantized":
        assert all(len(row.unique()) <= 15 for name in changed for row in after[name].flatten(0, -2))
