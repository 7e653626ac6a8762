"""Native decoding from several threads, from generators in turn and in forked processes: what one thread gives."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest

import pytest
import torch
from tiny import build
from tiny import prompt as drawn

from nextn.decoding.rounds import rounds
from nextn.devices import torch_threads
from nextn.evaluate.decoding_costs import measure_costs
from nextn.model.model import Model
from nextn.runtime import backend
from nextn.runtime.backend import backend_for
from nextn.runtime.native import LOCK
from nextn.runtime.native.abi import Program, Runtime, load
from nextn.settings import Sampling, Settings

TURNS = int(os.environ.get("NEXTN_ATTACKS", "2"))
SECONDS = 120  # after which a thread is taken to hang
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, top_p=0.9)
WAYS = [(0, GREEDY), (4, GREEDY), (0, SAMPLED), (4, SAMPLED)]
NAMES = ["plain-greedy", "drafts-greedy", "plain-sampled", "drafts-sampled"]


@pytest.fixture(autouse=True)
def two_workers(monkeypatch):
    """The runtime with two threads of its own, whatever the tests set torch to."""
    runtime = Runtime(load().library, 2)
    monkeypatch.setattr(backend, "load", lambda: runtime)


@pytest.fixture(scope="module")
def models(trained) -> list[Model]:
    """With backends of their own; qwen has recurrent layers, glm_one heads that are run from Python."""
    return [Model(each.trunk, each.head, each.family) for each in (trained["glm"], trained["qwen"])]


prompt = partial(drawn, vocab_size=40)  # the smallest of the models


def texts(
    model: Model, settings: Settings, seed: int, *, rows: int = 1, backend: str = "auto"
) -> list[tuple[object, ...]]:
    """All rounds of a decode: drafts, accepted drafts and tokens, by row."""
    made = backend_for(model, backend)
    prompts = [prompt(5 + seed + row, seed=seed) for row in range(rows)]
    return [row for each in rounds(made.trunk, made.head, prompts, settings) for row in each.rows]


def together(*works: Callable[[], object]) -> list[object]:
    """Run each in a thread of its own, all at once -> what they return. Fails where one raises or hangs."""
    results: list[object] = [None] * len(works)
    start = threading.Barrier(len(works))

    def run(place: int) -> None:
        start.wait()
        try:
            results[place] = works[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def several(model: Model, settings: Settings, first: int, rows: int) -> list[object]:
    return [texts(model, settings, first + turn % 3, rows=rows + turn % 2) for turn in range(TURNS)]


@pytest.mark.more
@pytest.mark.parametrize(("k", "sampling"), WAYS, ids=NAMES)
def test_two_threads_on_one_model(models, k, sampling):
    settings = Settings(num_speculative_tokens=k, sampling=sampling, max_tokens=16)
    for model in models:
        works = [partial(several, model, settings, first, 1) for first in (0, 3)]
        assert together(*works) == [work() for work in works]


@pytest.mark.parametrize(("k", "sampling"), WAYS, ids=NAMES)
def test_two_threads_on_two_models(models, k, sampling):
    settings = Settings(num_speculative_tokens=k, sampling=sampling, max_tokens=16)
    works = [partial(several, model, settings, 0, 1) for model in models]
    assert together(*works) == [work() for work in works]


@pytest.mark.more
def test_threads_that_do_different_things(models):
    """Other batches, other ways to sample, and costs that are measured meanwhile."""
    model, limits = models[0], {"max_tokens": 16}
    works = [
        partial(several, model, Settings(num_speculative_tokens=k, sampling=sampling, **limits), 2 * rows, rows)
        for rows, (k, sampling) in enumerate(WAYS, start=1)
    ]
    costs = partial(measure_costs, model, num_speculative_tokens=2, batch=2, context=20, repeats=2)
    assert together(*works, costs)[:-1] == [work() for work in works]


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3_next", "glm4_moe"])
def test_recording_shows_in_no_other_thread(name):
    """One thread runs the torch backend while another records the same model: attention and experts are named in its
    configs, delta rules are functions of its module, hidden states are taken by hooks."""
    model, settings = build(name), Settings(num_speculative_tokens=2, max_tokens=8)
    expected, done = texts(model, settings, 0, backend="torch"), threading.Event()

    def record() -> None:
        try:
            for _ in range(TURNS):
                backend.make_backend(model.trunk, model.head, name="native")
        finally:
            done.set()

    def decode() -> list[object]:
        found = []
        while not done.is_set():
            found.append(texts(model, settings, 0, backend="torch"))
        return found

    *found, _ = together(decode, decode, record)
    assert all(text == expected for each in found for text in each)
    assert texts(model, settings, 0, backend="torch") == expected


@pytest.mark.more
@pytest.mark.parametrize("name", ["deepseek_v4", "step3p5"])
def test_two_threads_on_the_plain_path(name):
    """Hooks that take hidden states see the passes of their own thread."""
    model, settings = build(name), Settings(num_speculative_tokens=2, max_tokens=8)
    works = [partial(texts, model, settings, seed, backend="torch") for seed in range(2)]
    expected = [work() for work in works]
    for _ in range(TURNS):
        assert together(*works) == expected


def test_a_thread_has_all_of_torchs_threads(models):
    """torch is held to one while rounds run natively, and a thread that first uses torch then would stay so."""
    settings = Settings(num_speculative_tokens=0, max_tokens=2)

    def counted() -> int:
        texts(models[0], settings, 0, backend="torch")
        return torch.get_num_threads()

    with torch_threads(3), ThreadPoolExecutor(1) as pool:
        with backend_for(models[0]).trunk.pass_context():
            other = pool.submit(counted)
            time.sleep(0.05)
        assert other.result(SECONDS) == 3


@pytest.mark.more
def test_a_backend_is_built_once():
    model = build("glm4_moe")
    first, second = together(partial(backend_for, model), partial(backend_for, model))
    assert first is second


@pytest.mark.more
def test_generators_in_turn(models):
    """In one thread: each goes on where it was, whatever the others left in the memory that passes share."""
    for model in models:
        made, ways = backend_for(model), [(k, sampling, rows) for k, sampling in WAYS for rows in (1, 2)]

        def start(k, sampling, rows, made=made):
            settings = Settings(num_speculative_tokens=k, sampling=sampling, max_tokens=20)
            return rounds(made.trunk, made.head, [prompt(4 + row, seed=k) for row in range(rows)], settings)

        expected = [[each.rows for each in start(*way)] for way in ways]
        found: list[list[object]] = [[] for _ in ways]
        for step in zip_longest(*(start(*way) for way in ways)):
            for place, each in enumerate(step):
                found[place] += [] if each is None else [each.rows]
        assert found == expected


def test_a_generator_that_is_left_holds_nothing(models):
    settings = Settings(num_speculative_tokens=4, max_tokens=16)
    expected = texts(models[0], settings, 0)
    made = backend_for(models[0])
    half_read = rounds(made.trunk, made.head, [prompt(9)], settings)
    next(half_read), next(half_read)
    assert together(partial(texts, models[0], settings, 0)) == [expected]
    assert len(list(half_read)) > 0


def test_a_generator_that_changes_threads(models):
    made, settings = backend_for(models[0]), Settings(num_speculative_tokens=4, max_tokens=16)
    expected = [each.rows for each in rounds(made.trunk, made.head, [prompt(9)], settings)]
    stream = rounds(made.trunk, made.head, [prompt(9)], settings)
    found = [together(partial(next, stream))[0].rows for _ in expected]
    assert found == expected


def test_programs_of_one_team_from_two_threads():
    """The team itself: one program at a time, whoever runs it."""
    runtime, outs = Runtime(load().library, 2), torch.zeros(2, 8, 1000)
    given = torch.randn(2, 8, 1000)
    programs = [Program(runtime) for _ in outs]
    for program, out, x in zip(programs, outs, given, strict=True):
        assert all(program.add("silu", [out, x]) for _ in range(20))

    def run(program: Program) -> None:
        for _ in range(50 * TURNS):
            program.run()

    together(*(partial(run, program) for program in programs))
    torch.testing.assert_close(outs, torch.nn.functional.silu(given))


def _child(sender, work) -> None:
    sender.send(work())


def forked(work: Callable[[], object]) -> object:
    """What a forked process returns. Fails where it hangs."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(sender, work))
    process.start()
    try:
        assert receiver.poll(SECONDS / 4), "the forked process hangs"
        return receiver.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(("k", "sampling"), [WAYS[0], WAYS[3]], ids=[NAMES[0], NAMES[3]])
def test_a_forked_process_has_threads_of_its_own(models, k, sampling):
    settings = Settings(num_speculative_tokens=k, sampling=sampling, max_tokens=16)
    work = partial(texts, models[0], settings, 0)
    expected = work()
    assert forked(work) == expected
    assert work() == expected  # the parent's are still there


@pytest.mark.more
def test_forks_while_another_thread_decodes(models):
    """The child must not wait for a lock, or for a round, of a thread that it does not have."""
    settings, done = Settings(num_speculative_tokens=4, max_tokens=16), threading.Event()
    work = partial(texts, models[0], settings, 0)
    expected = work()

    def decode() -> None:
        while not done.is_set():
            assert work() == expected

    def fork() -> None:
        try:
            for _ in range(TURNS):
                assert forked(work) == expected
        finally:
            done.set()

    together(decode, fork)


def test_a_failure_gives_the_lock_back(models):
    made = backend_for(models[0])
    with pytest.raises(RuntimeError), made.trunk.pass_context():
        raise RuntimeError("in the middle of a round")
    assert together(taken) == [True]


def taken() -> bool:
    """Whether this thread gets the lock."""
    if found := LOCK.acquire(timeout=5):
        LOCK.release()
    return found
