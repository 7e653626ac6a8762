"""Decoding, measuring and training on a second device: `test_devices.py` runs this file in a process of its own, since
torch counts devices once. The models are the trained fixtures, and the results those of the CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch
from scheduled import Answers, scheduler_of
from second_device import There, second_device
from tiny import FIXTURES, decode, refrain, refrains
from torch import nn

from nextn.cache.kv_cache import KVCache
from nextn.checkpoint.checkpoint import Checkpoint
from nextn.checkpoint.head_inventory import Inventory
from nextn.conformance import build as canary
from nextn.conformance.build import build as build_canary
from nextn.decoding.trace import trace
from nextn.evaluate import benchmark, decoding_costs
from nextn.evaluate.faults import FAULTS, measure_under_fault
from nextn.evaluate.reference import reference_acceptance
from nextn.evaluate.workload import Prompt, ReferencePlan
from nextn.model.device_map import spread_layers
from nextn.model.layer_loader import LayerLoader
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.serve.engine import bytes_per_sequence
from nextn.serve.request import GenerationRequest
from nextn.settings import Sampling, Settings
from nextn.speculative.sampling import sample_coupled
from nextn.train.config import HeadConfig, TrainConfig
from nextn.train.distributed import Ranks, processes
from nextn.train.head_task import HeadTask
from nextn.train.joint_task import JointTask
from nextn.train.loop import Trainer

SHORT = {"steps": 2, "batch_size": 2, "length": 16, "depths": 2, "dtype": "float32", "eval_batches": 1, "save_every": 1}


@pytest.fixture(scope="module", autouse=True)
def second():
    with second_device() as device:
        yield device


def there(name: str) -> Model:
    """The fixture on the second device, loaded anew."""
    model = Model.load(FIXTURES / name, dtype=torch.float32, device="second")
    parts = (model.trunk, model.head)
    assert all(isinstance(value, There) for part in parts for value in (*part.parameters(), *part.buffers()))
    return model


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("glm", Sampling()),
        ("glm", Sampling(0.8, repetition_penalty=1.3)),
        ("glm_two", Sampling(1.0, top_k=9, top_p=0.9, min_p=0.01)),
        ("qwen", Sampling(1.0)),
        ("v4", Sampling(1.0)),
        ("step", Sampling(1.0)),
    ],
)
def test_decoding(name, sampling, trained):
    prompts = [prompt[:length] for prompt, length in zip(refrain(2, 12, seed=1).tolist(), (12, 7), strict=True)]
    model, settings = there(name), {"num_speculative_tokens": 4, "max_tokens": 7, "sampling": sampling}
    assert "the model is on second:0" in backend_for(model).reason
    (texts, log), (host, other) = decode(model, prompts, **settings), decode(trained[name], prompts, **settings)
    assert texts == host
    assert [each.rows for each in log] == [each.rows for each in other]


def test_a_tensor_that_is_made_on_the_host_is_refused(monkeypatch):
    """Otherwise the other tests show nothing."""
    monkeypatch.setattr(
        KVCache, "positions", lambda self, count: torch.tensor(self.lengths)[:, None] + torch.arange(count)
    )
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        decode(there("glm"), [[3, 1, 4]], num_speculative_tokens=2, max_tokens=4)


class ThreeTokens:
    """A grammar whose masks are on the host, as llguidance's are: the next three tokens may follow."""

    last = 0

    def allowed(self, drafts):
        masks = []
        for last in (self.last, *drafts):
            mask = torch.zeros(48, dtype=torch.bool, device="cpu")
            mask[[(last + step) % 40 for step in (1, 2, 3)]] = True
            masks.append(mask)
        return masks

    def advance(self, tokens):
        self.last = tokens[-1]


PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {5: 2.0, 7: -100.0}}
SERVED = (
    {},
    {"num_speculative_tokens": 0},
    {"sampling": Sampling(repetition_penalty=1.3), **PENALTIES},
    {"sampling": Sampling(0.8, 20, 0.9, 0.01, 1.2), **PENALTIES, "logprobs": 3},
    {"sampling": Sampling(1.0, top_p=0.8), "grammar": ThreeTokens},
    {"grammar": ThreeTokens, "logprobs": 0},
    {"min_tokens": 8, "stop_token_ids": tuple(range(0, 40, 3))},
)


@pytest.mark.parametrize("name", ["glm", "qwen", "v4"])
def test_serving(name, trained):
    """Every way to choose tokens, in batches: the texts and log probabilities of the CPU."""
    found = {}
    for place, model in (("second", there(name)), ("cpu", trained[name])):
        answers = Answers(scheduler_of(model, backend="torch", max_num_seqs=4))
        for index, kind in enumerate(SERVED):
            tokens = tuple(refrain(1, 5 + index, seed=index)[0].tolist())
            answers.add(index, GenerationRequest(tokens, max_tokens=10, seed=index, **kind))
        found[place] = answers.run(), answers.logprobs()
        assert {answers.chunks[index][-1].finish for index in answers.chunks} <= {"length", "eos"}
    assert found["second"][0] == found["cpu"][0]
    assert found["second"][1] == pytest.approx(found["cpu"][1], abs=1e-4)


@pytest.mark.parametrize("name", ["glm", "qwen"])
def test_cached_prefixes(name):
    """Blocks stay on the device, with the rounds of a cold start."""
    model, tokens = there(name), tuple(refrain(1, 280, seed=9)[0].tolist())
    answers = Answers(scheduler_of(model, backend="torch", prefix_bytes=10**8))
    for key in range(2):
        answers.run({0: [(key, GenerationRequest(tokens, max_tokens=10, num_speculative_tokens=2))]})
    assert answers.chunks[1][0].cached_tokens == 256
    assert answers.rounds(0) == answers.rounds(1)


@pytest.mark.parametrize("name", ["glm", "qwen", "v4"])
def test_memory_of_caches(name, trained):
    """Which is read after a pass on the device."""
    sizes = [bytes_per_sequence(backend_for(model, "torch")) for model in (there(name), trained[name])]
    assert sizes[0] == sizes[1] > (0, 0)


def test_coupled_sampling_of_many_tokens(second):
    """More than race one by one, on a device without float64."""
    probs = torch.randn(4, 2000, device="cpu").softmax(-1)
    seeds, positions = range(4), [7] * 4
    assert sample_coupled(probs.to(second), seeds, positions) == sample_coupled(probs, seeds, positions)


@pytest.fixture
def loads_there(monkeypatch):
    """transformers moves tensors in threads, which know no second device."""
    real = LayerLoader.load

    def load(self, index, device, *, experts=True):
        real(self, index, torch.device("cpu"), experts=experts)
        for part in self._layers[index].modules():
            for name, value in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
                setattr(
                    part, name, nn.Parameter(value.to(device), False) if name in part._parameters else value.to(device)
                )

    monkeypatch.setattr(LayerLoader, "load", load)


@pytest.mark.usefixtures("loads_there")
@pytest.mark.parametrize("name", ["glm", "v4"])
def test_a_streamed_trunk(name, trained, tmp_path):
    """With states in memory, in files, and resumed from files, which are on the host."""
    tokens = torch.tensor(refrain(2, 12, seed=1).tolist())
    with torch.inference_mode():
        expected = trained[name].trunk(tokens).final_hidden
    for folder in (None, tmp_path / "states", tmp_path / "states"):
        trunk = Model.load(FIXTURES / name, dtype=torch.float32, device="second", stream=True).trunk
        output = trunk.run([tokens], folder=folder)[0].final_hidden
        assert isinstance(output, There)
        torch.testing.assert_close(output.raw, expected)


@pytest.mark.parametrize("name", ["glm", "qwen"])
def test_measuring(name, trained):
    """All positions at once, and one after the other; weights that are read wrong, and rounds that are run wrong."""
    model, plan = there(name), ReferencePlan(num_speculative_tokens=2, max_tokens=6)
    prompts = [Prompt(tuple(row), "x") for row in refrain(2, 8, seed=1).tolist()]
    found, host = reference_acceptance(model, prompts, plan), reference_acceptance(trained[name], prompts, plan)
    for one, other in zip(found.table(), host.table(), strict=True):
        assert one.num_drafted == pytest.approx(other.num_drafted, rel=1e-4)
        assert one.num_accepted == pytest.approx(other.num_accepted, rel=1e-4)
    assert found.controls.distinct_drafts == host.controls.distinct_drafts
    for fault in FAULTS:
        if name == "glm" and fault.name in ("norm-offset-missing", "stale-head-cache", "pairs-off-by-one"):
            assert measure_under_fault(found, model, fault) is not None


def test_tracing(trained):
    settings, prompt = Settings(num_speculative_tokens=3, max_tokens=5), refrain(1, 6, seed=1)[0].tolist()
    assert list(trace(there("glm"), prompt, settings)) == list(trace(trained["glm"], prompt, settings))


def test_benchmarks(monkeypatch):
    monkeypatch.setattr(decoding_costs, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(benchmark, "measure_costs", partial(decoding_costs.measure_costs, repeats=1))
    prompts, plan = (
        [Prompt(tuple(refrain(1, 8, seed=3)[0].tolist()), "x")],
        benchmark.BenchmarkPlan((1,), max_tokens=4, repeats=1),
    )
    assert benchmark.run_benchmark(there("glm"), prompts, plan).identical == (1, 1)


def trained_twice(task_on, tmp_path: Path, device: torch.device) -> None:
    """The losses are the CPU's, the result loads, and a run that is resumed begins where the first one ended."""
    losses = []
    for place in (torch.device("cpu"), device):
        task = task_on(Ranks(device=place))
        trainer = Trainer(task, out=tmp_path / place.type)
        losses.append([value for record in trainer.run() for value in getattr(record, "loss", ())])
    assert all(isinstance(value, There) for value in task.named.values())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    trainer.write_result(tmp_path / "model")
    Model.load(tmp_path / "model")
    again = Trainer(task_on(Ranks(device=device)), out=tmp_path / device.type)
    assert again.resume()
    assert again.step == SHORT["steps"]


def test_joint_training(tmp_path, second):
    corpus, prompts = refrains(20, 40, seed=3, eos=47), refrain(1, 6, seed=1).tolist()
    config = TrainConfig(**SHORT, optimizer="muon", checkpoint_layers=True, accumulate=2)

    def task(ranks: Ranks) -> JointTask:
        model = Model.load(FIXTURES / "glm", dtype=torch.float32)
        return JointTask(model, corpus, config, prompts=prompts, ranks=ranks)

    trained_twice(task, tmp_path, second)


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_head_training(objective, tmp_path, second):
    corpus, origin = refrains(20, 40, seed=3, eos=47), Inventory.of(Checkpoint.open(FIXTURES / "glm"))
    config = HeadConfig(**SHORT, objective=objective, kv="own" if objective == "ce" else "decode", eval_every=1)

    def task(ranks: Ranks) -> HeadTask:
        model = Model.load(FIXTURES / "glm", dtype=torch.float32)
        made = HeadTask(model, corpus, config, origin=origin, ranks=ranks)
        if objective == "kl":
            list(made.cached(tmp_path / ranks.device.type / "hidden").fill())
        return made

    trained_twice(task, tmp_path, second)


def test_one_process_trains_on_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with processes("second") as ranks:
        assert ranks == Ranks(device=torch.device("second"))


def test_canaries(tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "FAULTS", FAULTS[:1])
    monkeypatch.setattr(canary, "ENGINES", ())
    monkeypatch.setattr(canary, "MAX_K", 2)
    monkeypatch.setattr(canary, "PASSES", 1)
    made = build_canary(tmp_path / "canary", "glm4_moe", steps=(1, 1), count=1, tokens=4, device="second")
    assert len(made["readings"]) == 3


@pytest.mark.usefixtures("loads_there")
@pytest.mark.parametrize("name", ["glm", "qwen", "v4"])
@pytest.mark.parametrize(("own", "places"), [("cpu", "cpu,second:0"), ("second", "second:0,disk"), ("second", "cpu")])
def test_layers_on_several_devices(name, own, places, trained, tmp_path, monkeypatch):
    """Layers run where they are, and those in host memory and on disk where the rest of the model is."""
    model = Model.load(FIXTURES / name, dtype=torch.float32, device=own, defer=True)
    spread_layers(model.trunk, places, tmp_path)
    for layer, place in zip(model.trunk.decoder.layers, model.trunk.layer_places, strict=True):
        assert all(value.is_meta == (place == "disk" or place == "cpu" != own) for value in layer.parameters())
    prompts = [prompt[:length] for prompt, length in zip(refrain(2, 12, seed=1).tolist(), (12, 7), strict=True)]
    for stage in {model.trunk.stage, "pre" if name == "glm" else model.trunk.stage}:
        for each in (model, trained[name]):
            monkeypatch.setattr(each.trunk, "stage", stage)
        settings = {"num_speculative_tokens": 4, "max_tokens": 7, "sampling": Sampling(1.0)}
        (texts, log), (host, other) = decode(model, prompts, **settings), decode(trained[name], prompts, **settings)
        assert texts == host
        assert [each.rows for each in log] == [each.rows for each in other]
