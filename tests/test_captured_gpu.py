"""The captures themselves, which need a CUDA device (`make test-gpu`). What they compute is tested without one."""

import time

import pytest
import torch
from test_captured import CAPTURED, PLAIN
from tiny import MOST, build, decode, prompt, refrain

from nextn.decode import Settings, rounds
from nextn.fast.captured import CapturedTrunk
from nextn.fast.choose import engine
from nextn.model import Model
from nextn.sampling import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")
LENGTHS = (3, 17, 40)
# Large enough that a pass is many kernels, small enough that they are short: what graphs are for.
DEEP = {"num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 512}


def both(model: Model, **settings: object) -> None:
    """Texts and drafts on CUDA graphs and on the plain path of the same device."""
    fast = model.engine("fast")
    assert (fast.path, fast.runtime, type(fast.trunk)) == ("fast", "CUDA graphs", CapturedTrunk)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    (texts, log), (plain, other) = decode(fast, prompts, **settings), decode(model, prompts, **settings)
    assert texts == plain
    assert [each.rows for each in log] == [each.rows for each in other]


@pytest.mark.parametrize("name", CAPTURED)
def test_texts_are_the_plain_path_s(name):
    both(build(name, modules=MOST[name]).to(CUDA), drafts=3, max_tokens=10)


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_captured_runs_plainly_and_says_why(name):
    model = build(name).to(CUDA)
    made = model.engine()
    assert made.path == "plain"
    assert PLAIN[name] in made.reason
    decode(model, [prompt(12)], drafts=3, max_tokens=6)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=9), Sampling(1.0, top_p=0.8)])
def test_sampling_takes_the_same_numbers(sampling):
    both(build("glm4_moe").to(CUDA), drafts=3, max_tokens=20, sampling=sampling)


def test_caches_that_grow():
    model = build("glm4_moe").to(CUDA)
    fast, start = engine(model.trunk, model.head, path="fast"), [prompt(1000), prompt(1010)]
    assert decode(fast, start, drafts=4, max_tokens=40)[0] == decode(model, start, drafts=4, max_tokens=40)[0]


def test_trained_heads_in_bfloat16(fixture_folder):
    """Near-ties may fall to either side in bfloat16, so acceptance is compared, not text."""
    model = Model.load(fixture_folder / "glm_one", dtype=torch.bfloat16, device="cuda")
    logs = [
        decode(path, refrain(6, 40, seed=9).tolist(), drafts=3, max_tokens=32)[1]
        for path in (model.engine("fast"), model)
    ]
    fast, plain = (sum(part.kept for each in log for part in each.rows) / len(log) for log in logs)
    assert fast == pytest.approx(plain, rel=0.15)


def test_memory_does_not_grow_from_text_to_text():
    model = build("glm4_moe").to(CUDA)
    fast = model.engine("fast")
    used = []
    for seed in range(6):
        decode(fast, [prompt(30, seed=seed)], drafts=3, max_tokens=20)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[1] + 2**20


@pytest.mark.parametrize("drafts", [0, 4])
def test_rounds_are_faster_than_on_the_plain_path(drafts):
    """Not by how much, which is measured elsewhere: a replay must not cost what launching each kernel does."""
    model = build("glm_ocr", **DEEP).to(CUDA)
    settings = Settings(drafts=drafts, max_tokens=64)
    times = {}
    for path in ("fast", "plain"):
        made = model.engine(path)
        for _ in range(2):  # the first one captures
            stream = rounds(made.trunk, made.head, [prompt(20)], settings)
            next(stream)
            torch.cuda.synchronize()
            started = time.perf_counter()
            count = len(list(stream))
            times[path] = (time.perf_counter() - started) / count
    assert times["fast"] < 0.7 * times["plain"]


def test_rounds_sampled_on_the_device_do_not_wait(recwarn):
    """The host waits for the drafts and for the verdict, and for nothing else."""
    model = build("glm4_moe").to(CUDA)
    made = model.engine("fast")
    for sampling in (Sampling(), Sampling(1.0)):
        settings = Settings(drafts=3, max_tokens=24, sampling=sampling)
        list(rounds(made.trunk, made.head, [prompt(20)], settings))  # captures
        stream = rounds(made.trunk, made.head, [prompt(20)], settings)
        next(stream)
        torch.cuda.set_sync_debug_mode("warn")
        recwarn.clear()
        try:
            count = len(list(stream))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in recwarn if "synchroniz" in str(each.message)]
        assert len(waits) <= 2 * count
